package models_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

const (
	hello  = `data: {"choices":[{"index":0,"delta":{"content":"hello"}}]}` + "\n\n"
	finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
)

func events(body string) modeltest.Reply {
	return modeltest.Raw(http.StatusOK, "text/event-stream", body)
}

func TestStreamsOfManyServersAreUnderstood(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"more comments than go-openai allows":   strings.Repeat(": OPENROUTER PROCESSING\n\n", 1000) + hello + finish + "data: [DONE]\n\n",
		"more blanks than go-openai allows":     strings.Repeat("\n", 1000) + hello + finish + "data: [DONE]\n\n",
		"event names and ids":                   "event: message\nid: 1\n" + hello + "event: message\nid: 2\n" + finish + "data: [DONE]\n\n",
		"no end marker":                         hello + finish,
		"no finish reason":                      hello + "data: [DONE]\n\n",
		"a cut after the finish reason":         hello + finish + "data: {\"usa",
		"carriage returns":                      strings.ReplaceAll(hello+finish, "\n", "\r\n"),
		"a null error in every chunk":           strings.ReplaceAll(hello+finish, `{"choices"`, `{"error":null,"choices"`),
		"usage as null in every chunk":          strings.ReplaceAll(hello+finish, `{"choices"`, `{"usage":null,"choices"`),
		"another choice":                        hello + `data: {"choices":[{"index":1,"delta":{"content":"no"}}]}` + "\n\n" + finish,
		"chunks without choices":                "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n" + hello + finish,
		"a whole message at the end of it":      "data: {\"choices\":[]}\n\n" + strings.ReplaceAll(hello, "delta", "message") + finish,
		"finish reason together with last text": strings.ReplaceAll(hello, `"}}]`, `"},"finish_reason":"stop"}]`),
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, events(body))
			resp := complete(t, client(t, server, func(c *models.Config) { c.Retry.Attempts = 1 }), ask("hi"))
			if resp.Message.Content != "hello" || resp.FinishReason != "stop" {
				t.Errorf("response = %+v", resp)
			}
		})
	}
}

func TestErrorsInStreamsAreSeenInEveryForm(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"alone":            `data: {"error":{"message":"too hot"}}` + "\n\n",
		"after comments":   strings.Repeat(": PROCESSING\n\n", 400) + `data: {"error":{"message":"too hot"}}` + "\n\n",
		"after its name":   "event: error\n" + `data: {"error":{"message":"too hot"}}` + "\n\n",
		"after text":       hello + `data: {"error":{"message":"too hot","code":502}}` + "\n\n",
		"not first":        hello + `data: {"id":"x","choices":[],"error":{"message":"too hot","code":"server_error"}}` + "\n\n",
		"with blanks":      `data: { "error" : { "message" : "too hot" } }` + "\n\n",
		"as text":          `data: {"error":"too hot"}` + "\n\n",
		"without field":    hello + `{"error":{"message":"too hot"}}` + "\n",
		"as the only line": `{"error":{"message":"too hot"}}`,
		"with end marker":  hello + `data: {"error":{"message":"too hot"}}` + "\n\ndata: [DONE]\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, events(body))
			_, err := client(t, server, func(c *models.Config) { c.Retry.Attempts = 1 }).Complete(t.Context(), ask("hi"))
			if err == nil || !strings.HasSuffix(err.Error(), "too hot") {
				t.Errorf("err = %v, want the server's words", err)
			}
		})
	}
}
