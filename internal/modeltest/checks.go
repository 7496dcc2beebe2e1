package modeltest

import (
	"fmt"
	"net/http"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

// AnswerChecks answers the checks of models/modelcheck so that all pass, and refuses any other prompt. Pass it to
// [Server.Handle]. The order of its cases matters: a correction ends with a tool reply at some servers, and its request
// has tools.
func AnswerChecks(_ int, req openai.ChatCompletionRequest) Reply {
	last := req.Messages[len(req.Messages)-1]
	text := last.Content
	if len(last.MultiContent) > 0 {
		text = last.MultiContent[0].Text
	}
	switch {
	case strings.Contains(text, "INVALID_PARAMS"): // correction
		return ToolCall("temperature", `{"city":"Madrid, Spain"}`)
	case last.Role == openai.ChatMessageRoleTool: // tools: the answer
		return Text("It is 21 degrees in Madrid.")
	case len(req.Tools) > 0: // tools: the call
		return ToolCall("temperature", `{"city":"Madrid"}`)
	case strings.Contains(text, "three hundred"): // limit
		return Text("one, two, three, four, five").WithFinish(openai.FinishReasonLength).WithUsage(40, 16, 0)
	case strings.Contains(text, "thirty"): // stream
		return Text("one, two, three, four, five, six, seven, eight, nine, ten and so on up to thirty")
	case strings.Contains(text, "colour"): // image
		return Text("Red.")
	case strings.Contains(text, "Say ok"): // answers
		return Text("ok")
	}
	return Refusal(http.StatusBadRequest, "invalid_request_error", "", fmt.Sprintf("no check asks %q", text), 0)
}
