package modeltest

import (
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

// PassesChecks answers the checks of models/modelcheck; all pass. Pass it to [Server.Handle].
func PassesChecks(_ int, req openai.ChatCompletionRequest) Reply {
	last := req.Messages[len(req.Messages)-1]
	text := last.Content
	if len(last.MultiContent) > 0 {
		text = last.MultiContent[0].Text
	}
	switch {
	case strings.Contains(text, "INVALID_PARAMS"):
		return ToolCall("temperature", `{"city":"Madrid, Spain"}`)
	case last.Role == openai.ChatMessageRoleTool:
		return Text("It is 21 degrees in Madrid.")
	case len(req.Tools) > 0:
		return ToolCall("temperature", `{"city":"Madrid"}`)
	case strings.Contains(text, "three hundred"):
		return Text("one, two, three, four, five").WithFinish(openai.FinishReasonLength).WithUsage(40, 16, 0)
	case strings.Contains(text, "thirty"):
		return Text("one, two, three, four, five, six, seven, eight, nine, ten and so on up to thirty")
	case strings.Contains(text, "colour"):
		return Text("Red.")
	}
	return Text("ok")
}
