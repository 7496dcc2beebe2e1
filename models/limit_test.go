package models_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

// endless streams words until the client goes away.
func endless(gone chan<- struct{}) modeltest.Reply {
	return modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			if _, err := w.Write([]byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word word word word \"}}]}\n\n")); err != nil {
				break
			}
			w.(http.Flusher).Flush()
		}
		gone <- struct{}{}
	})
}

func TestAnAnswerThatIgnoresItsLimitIsCut(t *testing.T) {
	gone := make(chan struct{}, 1)
	server := modeltest.New(t, endless(gone))
	req := ask("talk")
	req.MaxTokens = 50
	var shown strings.Builder
	req.OnDelta = func(text string) { shown.WriteString(text) }
	resp := complete(t, client(t, server), req)
	if resp.FinishReason != openai.FinishReasonLength || resp.Attempts != 1 {
		t.Errorf("finish reason %q after %d attempts", resp.FinishReason, resp.Attempts)
	}
	if n := resp.Usage.CompletionTokens; !resp.Usage.Estimated || n <= 50 || n > 1000 {
		t.Errorf("usage is %+v, want what was really said", resp.Usage)
	}
	if resp.Message.Content != shown.String() || resp.Lost != (models.Usage{}) {
		t.Errorf("%d bytes were shown, the answer has %d; lost %+v", shown.Len(), len(resp.Message.Content), resp.Lost)
	}
	select {
	case <-gone:
	case <-time.After(90 * time.Second):
		t.Error("the server still talks")
	}
}

func TestAnAnswerNearItsLimitIsNotCut(t *testing.T) {
	text := strings.Repeat("extraordinary ", 40) // few tokens for their length
	server := modeltest.New(t, modeltest.Text(text).WithUsage(10, 42, 0))
	req := ask("talk")
	req.MaxTokens = 50
	if resp := complete(t, client(t, server), req); resp.FinishReason != openai.FinishReasonStop || resp.Message.Content != text {
		t.Errorf("finish reason %q, %d bytes", resp.FinishReason, len(resp.Message.Content))
	}
}

func TestACallThatWasCutBeforeItsArgumentsIsNone(t *testing.T) {
	reply := modeltest.ToolCall("drop_all", "").WithFinish(openai.FinishReasonLength)
	server := modeltest.New(t, reply, modeltest.ToolCall("probe", ""))
	c := client(t, server)
	if resp := complete(t, c, ask("go")); len(resp.Message.ToolCalls) != 0 || resp.FinishReason != openai.FinishReasonLength {
		t.Errorf("response is %+v", resp)
	}
	if resp := complete(t, c, ask("go")); len(resp.Message.ToolCalls) != 1 || resp.Message.ToolCalls[0].Function.Arguments != "{}" {
		t.Errorf("a whole call without arguments is %+v", resp.Message.ToolCalls)
	}
}

func TestLostAttemptsAreReckoned(t *testing.T) {
	prompt := strings.Repeat("words ", 100) // about 150 tokens
	said := strings.Repeat("half an answer ", 20)
	for name, test := range map[string]struct {
		fault      modeltest.Reply
		prompt     bool
		completion int
	}{
		"cut":       {modeltest.CutStream(said), true, 70},
		"ended":     {modeltest.EndedStream(said), true, 70},
		"mid-error": {modeltest.MidStreamError(said, "overloaded"), true, 70},
		"silent":    {modeltest.Hang(), true, 0},
		"reset":     {modeltest.Reset(), true, 0},
		"refused":   {modeltest.Status(http.StatusTooManyRequests, 0), false, 0},
		"broken":    {modeltest.Status(http.StatusBadGateway, 0), false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := modeltest.New(t, test.fault, modeltest.Text("ok").WithUsage(160, 1, 0), test.fault)
			c := client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second; c.Retry.Attempts = 2 })
			resp := complete(t, c, ask(prompt))
			once := client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second; c.Retry.Attempts = 1 })
			failed, err := once.Complete(t.Context(), ask(prompt))
			if err == nil {
				t.Fatal("no error")
			}
			for at, lost := range map[string]models.Usage{"answered": resp.Lost, "failed": failed.Lost} {
				if (lost.PromptTokens > 100) != test.prompt || lost.CompletionTokens < test.completion || lost.CompletionTokens > test.completion+10 {
					t.Errorf("%s: lost %+v", at, lost)
				}
				if lost.Estimated != test.prompt {
					t.Errorf("%s: lost %+v is not marked as an estimate", at, lost)
				}
			}
			if resp.Usage.TotalTokens != 161 || (resp.LostUSD > 0) != test.prompt || (failed.LostUSD > 0) != test.prompt {
				t.Errorf("usage %+v, lost $%v and $%v", resp.Usage, resp.LostUSD, failed.LostUSD)
			}
		})
	}
}

func TestAnInterruptedCallTellsWhatItUsed(t *testing.T) {
	server := modeltest.New(t, modeltest.Text(strings.Repeat("slowly ", 50)).Slowly(20*time.Millisecond))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req := ask("talk")
	n := 0
	req.OnDelta = func(string) {
		if n++; n == 3 {
			cancel()
		}
	}
	resp, err := client(t, server).Complete(ctx, req)
	if err == nil || resp.Lost.CompletionTokens == 0 || resp.Lost.PromptTokens == 0 || resp.Message.Content != "" {
		t.Errorf("response %+v, err %v", resp, err)
	}
}

func TestAStormOfRefusalsIsWeatheredByAll(t *testing.T) {
	const callers = 16
	server := modeltest.New(t)
	server.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n < 2*callers {
			return modeltest.Status(http.StatusTooManyRequests, 0)
		}
		return modeltest.Text("ok")
	})
	c := client(t, server, func(c *models.Config) { c.Retry.Attempts = 40 })
	errs := make(chan error, callers)
	for range callers {
		go func() {
			_, err := c.Complete(t.Context(), ask("hi"))
			errs <- err
		}()
	}
	for range callers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := len(server.Requests()); n != 3*callers {
		t.Errorf("%d requests, want %d", n, 3*callers)
	}
}

func TestAModelWithoutAPriceIsKnown(t *testing.T) {
	server := modeltest.New(t)
	for model, want := range map[string]bool{"gpt-4o-mini": true, "home-made": false} {
		if got := client(t, server, func(c *models.Config) { c.Model = model }).Priced(); got != want {
			t.Errorf("%s has a price: %v, want %v", model, got, want)
		}
	}
}
