package models_test

import (
	"context"
	"errors"
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
	t.Parallel()
	gone := make(chan struct{}, 1)
	server := modeltest.New(t, endless(gone))
	req := ask("talk")
	req.MaxTokens = 50
	var shown strings.Builder
	req.OnDelta = func(text string) { shown.WriteString(text) }
	resp := complete(t, client(t, server), req)
	if resp.FinishReason != models.FinishLength || resp.Attempts != 1 {
		t.Errorf("finish reason %q after %d attempts", resp.FinishReason, resp.Attempts)
	}
	if n := resp.Usage.CompletionTokens; !resp.Usage.Estimated || n <= 50 || n > 1000 {
		t.Errorf("usage is %+v, want what was really said", resp.Usage)
	}
	if resp.Message.Content != shown.String() || !resp.Unknown {
		t.Errorf("%d bytes were shown, the answer has %d; what was used is unknown: %t", shown.Len(), len(resp.Message.Content), resp.Unknown)
	}
	select {
	case <-gone:
	case <-time.After(90 * time.Second):
		t.Error("the server still talks")
	}
}

func TestAnAnswerNearItsLimitIsNotCut(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("extraordinary ", 40) // few tokens for their length
	server := modeltest.New(t, modeltest.Text(text).WithUsage(10, 42, 0))
	req := ask("talk")
	req.MaxTokens = 50
	resp := complete(t, client(t, server), req)
	if resp.FinishReason != models.FinishStop || resp.Message.Content != text {
		t.Errorf("finish reason %q, %d bytes", resp.FinishReason, len(resp.Message.Content))
	}
}

func TestACallThatWasCutBeforeItsArgumentsIsNone(t *testing.T) {
	t.Parallel()
	reply := modeltest.ToolCall("drop_all", "").WithFinish(models.FinishLength)
	server := modeltest.New(t, reply, modeltest.ToolCall("probe", ""))
	c := client(t, server)
	if resp := complete(t, c, ask("go")); len(resp.Message.ToolCalls) != 0 || resp.FinishReason != models.FinishLength {
		t.Errorf("response is %+v", resp)
	}
	resp := complete(t, c, ask("go"))
	if len(resp.Message.ToolCalls) != 1 || resp.Message.ToolCalls[0].Arguments != "{}" {
		t.Errorf("a whole call without arguments is %+v", resp.Message.ToolCalls)
	}
}

func TestAnAttemptThatMayBeBilledIsToldBeforeAnother(t *testing.T) {
	t.Parallel()
	said := strings.Repeat("half an answer ", 20)
	for name, test := range map[string]struct {
		fault  modeltest.Reply
		billed bool
	}{
		"cut":        {modeltest.CutStream(said), true},
		"ended":      {modeltest.EndedStream(said), true},
		"mid-error":  {modeltest.MidStreamError(said, "overloaded"), true},
		"silent":     {modeltest.Hang(), true},
		"reset":      {modeltest.Reset(), true},
		"empty":      {modeltest.Raw(http.StatusOK, "application/json", `{"choices":[]}`), true},
		"error":      {modeltest.Status(http.StatusInternalServerError, 0), true},
		"gateway":    {modeltest.Status(http.StatusBadGateway, 0), true},
		"time-out":   {modeltest.Status(http.StatusGatewayTimeout, 0), true},
		"refused":    {modeltest.Status(http.StatusTooManyRequests, 0), false},
		"overloaded": {modeltest.Status(http.StatusServiceUnavailable, 0), false},
		"full":       {modeltest.Status(529, 0), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := modeltest.New(t, test.fault, modeltest.Text("ok").WithUsage(160, 1, 0), test.fault)
			retries := func(attempts int) func(c *models.Config) {
				return func(c *models.Config) { c.IdleTimeout = 2 * time.Second; c.Retry.Attempts = attempts }
			}
			req, told := ask("go"), 0
			req.BeforeRetry = func(context.Context) (int, error) {
				told += len(server.Requests())
				return 77, nil
			}
			resp := complete(t, client(t, server, retries(2)), req)
			if (told == 1) != test.billed || resp.Unknown || resp.Usage.TotalTokens != 161 {
				t.Errorf("told %d times, response %+v", told, resp)
			}
			if got := server.Requests()[1].MaxTokens; (got == 77) != test.billed { //nolint:staticcheck // what most servers know
				t.Errorf("the second attempt was allowed %d tokens", got)
			}
			failed, err := client(t, server, retries(1)).Complete(t.Context(), req)
			if err == nil || failed.Unknown != test.billed || failed.Usage != (models.Usage{}) {
				t.Errorf("response %+v, err %v", failed, err)
			}
		})
	}
}

func TestACallerCanForbidAnotherAttempt(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Reset())
	req, spent := ask("go"), errors.New("nothing is left")
	req.BeforeRetry = func(context.Context) (int, error) { return 0, spent }
	if resp, err := client(t, server).Complete(t.Context(), req); !errors.Is(err, spent) || resp.Unknown {
		t.Errorf("response %+v, err %v", resp, err)
	}
}

func TestAnInterruptedCallIsUnknown(t *testing.T) {
	t.Parallel()
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
	if err == nil || !resp.Unknown || resp.Message.Content != "" {
		t.Errorf("response %+v, err %v", resp, err)
	}
}

// The transport of net/http repeats requests with an idempotency key by itself when a connection that was kept breaks.
func TestARequestIsNotSentAgainUnseen(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("ok"), modeltest.Reset(), modeltest.Text("ok"))
	c := client(t, server, func(c *models.Config) { c.Retry.Attempts = 1 })
	req := ask("go")
	req.IdempotencyKey = "k"
	complete(t, c, req)
	resp, err := c.Complete(t.Context(), req)
	if err == nil || !resp.Unknown || len(server.Requests()) != 2 {
		t.Errorf("after %d requests: response %+v, err %v", len(server.Requests()), resp, err)
	}
	if got := complete(t, c, req); got.Unknown || server.Requests()[2].IdempotencyKey() != "k" {
		t.Errorf("response %+v, key %q", got, server.Requests()[2].IdempotencyKey())
	}
}

// Usage comes last. An answer that is whole without it was billed all the same.
func TestAUsageThatIsMissingIsUnknownWhereTheServerReportsIt(t *testing.T) {
	t.Parallel()
	unsaid := modeltest.Custom(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write([]byte(`data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":"stop"}]}` + "\n\n"))
	})
	cut := modeltest.Custom(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write([]byte(`data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":"stop"}]}` + "\n\n"))
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	server := modeltest.New(t, unsaid, cut, modeltest.Text("yes").WithUsage(5, 1, 0), unsaid)
	c := client(t, server)
	for i, want := range []models.Response{
		{Usage: models.Usage{Estimated: true}}, {Usage: models.Usage{Estimated: true}, Unknown: true}, {}, {Usage: models.Usage{Estimated: true}, Unknown: true},
	} {
		if got := complete(t, c, ask("go")); got.Unknown != want.Unknown || got.Usage.Estimated != want.Usage.Estimated || got.Usage.TotalTokens == 0 {
			t.Errorf("answer %d: %+v", i, got)
		}
	}
}

func TestAStormOfRefusalsIsWeatheredByAll(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	server := modeltest.New(t)
	for model, want := range map[string]bool{"gpt-4o-mini": true, "home-made": false} {
		if got := client(t, server, func(c *models.Config) { c.Model = model }).Priced(); got != want {
			t.Errorf("%s has a price: %v, want %v", model, got, want)
		}
	}
}
