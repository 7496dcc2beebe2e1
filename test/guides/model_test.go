//go:build unix

package guides_test

import (
	"regexp"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
)

var asksForOrder = regexp.MustCompile(`order (\d+)\?`)

// scriptedModel looks orders up, and promises refunds until the instructions forbid it.
func scriptedModel(t testing.TB) *modeltest.Server {
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		order := asksForOrder.FindStringSubmatch(last.Content)
		switch {
		case last.Role == openai.ChatMessageRoleTool:
			return modeltest.Text("It was found.")
		case order != nil:
			return modeltest.ToolCall("check_order", `{"order":`+order[1]+`}`)
		case strings.Contains(req.Messages[0].Content, "Promise no refund."):
			return modeltest.Text("I cannot promise that.")
		}
		return modeltest.Text("You get your money back.")
	})
	return server
}
