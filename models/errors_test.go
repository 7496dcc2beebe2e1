package models_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

func TestWhatMayPassIsRepeated(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]modeltest.Reply{
		"429":                modeltest.Status(http.StatusTooManyRequests, 0),
		"500":                modeltest.Status(http.StatusInternalServerError, 0),
		"503 in plain text":  modeltest.Raw(http.StatusServiceUnavailable, "text/plain", "try later"),
		"reset":              modeltest.Reset(),
		"cut stream":         modeltest.CutStream("The answ"),
		"ended stream":       modeltest.EndedStream("The answ"),
		"error mid-stream":   modeltest.MidStreamError("The answ", "upstream overloaded"),
		"garbled chunk":      modeltest.Raw(http.StatusOK, "text/event-stream", "data: {\"choices\":[{\"ind\n\n"),
		"nothing at all":     modeltest.Raw(http.StatusOK, "text/event-stream", ""),
		"done before a word": modeltest.Raw(http.StatusOK, "text/event-stream", "data: [DONE]\n\n"),
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, fault, modeltest.Text("The answer."))
			req := ask("hi")
			req.IdempotencyKey = "k"
			var shown string
			req.OnDelta = func(text string) { shown += text }
			req.OnRestart = func() { shown = "" }
			resp := complete(t, client(t, server), req)
			if resp.Message.Content != "The answer." || resp.Attempts != 2 || shown != "The answer." {
				t.Errorf("response = %+v, shown %q", resp, shown)
			}
			for _, r := range server.Requests() {
				if r.IdempotencyKey() != "k" {
					t.Errorf("an attempt had the key %q", r.IdempotencyKey())
				}
			}
		})
	}
}

func TestWhatWillNotPassIsNotRepeated(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault  modeltest.Reply
		status int
		want   string
	}{
		"400":          {modeltest.Status(http.StatusBadRequest, 0), 400, "Bad Request"},
		"401":          {modeltest.Status(http.StatusUnauthorized, 0), 401, "OPENAI_API_KEY"},
		"404":          {modeltest.Refusal(404, "invalid_request_error", "model_not_found", "no such model", 0), 404, "AGENT_MODEL"},
		"408":          {modeltest.Status(http.StatusRequestTimeout, 0), 408, "Request Timeout"},
		"422":          {modeltest.Raw(422, "application/json", `{"detail":"messages: too many"}`), 422, "messages: too many"},
		"web page":     {modeltest.Raw(404, "text/html", "<html><body>Not here</body></html>"), 404, "web page"},
		"200 web page": {modeltest.Raw(200, "text/html", "<!doctype html>"), 0, "web page"},
		"plain text":   {modeltest.Raw(403, "text/plain", "go\naway"), 403, "go away"},
		"empty":        {modeltest.Raw(418, "text/plain", ""), 418, "teapot"},
		"error text":   {modeltest.Raw(400, "application/json", `{"error":"bad model"}`), 400, "bad model"},
		"no quota":     {modeltest.Refusal(429, "insufficient_quota", "insufficient_quota", "pay first", 0), 429, "pay first"},
		"no answer":    {modeltest.Raw(304, "text/plain", ""), 304, "not modified"},
		"bad request mid-stream": {
			modeltest.Raw(200, "text/event-stream", "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n"), 400, "too long",
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, test.fault)
			_, err := client(t, server).Complete(t.Context(), ask("hi"))
			var failure *models.Error
			if !errors.As(err, &failure) {
				t.Fatalf("err = %v, want a *models.Error", err)
			}
			if failure.Status != test.status || failure.Retryable || !strings.Contains(err.Error(), test.want) {
				t.Errorf("err = %+v, want status %d and %q", failure, test.status, test.want)
			}
		})
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	fault := modeltest.Status(http.StatusBadGateway, 0)
	server := modeltest.New(t, fault, fault, fault)
	_, err := client(t, server).Complete(t.Context(), ask("hi"))
	var failure *models.Error
	if !errors.As(err, &failure) || failure.Status != http.StatusBadGateway || !failure.Retryable {
		t.Errorf("err = %v", err)
	}
}

func TestMidStreamErrorKeepsTheProvidersWords(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.MidStreamError("Half an", "the GPU caught fire"))
	once := func(c *models.Config) { c.Retry.Attempts = 1 }
	_, err := client(t, server, once).Complete(t.Context(), ask("hi"))
	if err == nil || !strings.Contains(err.Error(), "the GPU caught fire") {
		t.Errorf("err = %v, want the provider's words", err)
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, time.Second), modeltest.Text("ok"))
	resp := complete(t, client(t, server), ask("hi"))
	if resp.Duration < time.Second {
		t.Errorf("the request was repeated after %s, the server asked for a second", resp.Duration)
	}
}

func TestLongWaitsAreLeftToTheCaller(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, time.Hour))
	_, err := client(t, server).Complete(t.Context(), ask("hi"))
	var failure *models.Error
	if !errors.As(err, &failure) || failure.RetryAfter != time.Hour || !failure.Retryable {
		t.Errorf("err = %+v, want one to retry after an hour", failure)
	}
}

func TestNoWaitGoesBeyondTheDeadline(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, 50*time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	_, err := client(t, server, func(c *models.Config) { c.Retry.MaxWait = time.Minute }).Complete(ctx, ask("hi"))
	var failure *models.Error
	if !errors.As(err, &failure) || ctx.Err() != nil {
		t.Errorf("err = %v (context: %v), want the server's answer at once", err, ctx.Err())
	}
}

func TestSilenceEnds(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Hang(), modeltest.Text("ok"))
	resp := complete(t, client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second }), ask("hi"))
	if resp.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", resp.Attempts)
	}
}

func TestSlowIsNotSilent(t *testing.T) {
	t.Parallel()
	slow := modeltest.Text(strings.Repeat("a slow word ", 90)).Slowly(50 * time.Millisecond)
	server := modeltest.New(t, slow)
	resp := complete(t, client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second }), ask("hi"))
	if resp.Attempts != 1 || resp.Duration < 2*time.Second {
		t.Errorf("attempts = %d in %s", resp.Attempts, resp.Duration)
	}
}

func TestNoErrorAndNoLogShowsASecret(t *testing.T) {
	t.Parallel()
	words := "Incorrect API key provided: " + key + " and sk-proj-abcdefgh1234 and Bearer abcdef.ghijkl"
	server := modeltest.New(t, modeltest.Refusal(500, "server_error", "", words, 0), modeltest.Refusal(401, key, key, words, 0))
	var log bytes.Buffer
	c := client(t, server, func(c *models.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	_, err := c.Complete(t.Context(), ask("hi"))
	if err == nil {
		t.Fatal("no error")
	}
	for _, secret := range []string{key, "abcdefgh1234", "abcdef.ghijkl"} {
		if strings.Contains(err.Error()+log.String(), secret) {
			t.Errorf("%q is shown by:\n%s\n%s", secret, err, log.String())
		}
	}
	if !strings.Contains(log.String(), "model call repeated") {
		t.Errorf("the repetition was not logged: %s", log.String())
	}
}

func TestUnreachableServerSaysWhatToCheck(t *testing.T) {
	t.Parallel()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	c, err := models.New(models.Config{
		BaseURL: gone.URL + "/v1", Model: "m", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 2, Base: time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Complete(t.Context(), ask("hi"))
	var failure *models.Error
	if !errors.As(err, &failure) || !failure.Retryable || !strings.Contains(err.Error(), "OPENAI_BASE_URL") {
		t.Errorf("err = %v", err)
	}
}

func TestNoModelIsRefusedBeforeItsServerWasAsked(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"gpt-6-astra", "gpt-6.1-sol", "gpt-6-sol", "gpt-6-luna", "gpt-5.6-sol", "o3"} {
		server := modeltest.New(t, modeltest.ToolCall("f", "{}"))
		req := ask("hi")
		req.Model, req.MaxTokens, req.Temperature = model, 100, new(float32(0.5))
		req.Tools = []models.Tool{{Name: "f"}}
		resp, err := client(t, server).Complete(t.Context(), req)
		if err != nil || len(resp.Message.ToolCalls) != 1 || server.Requests()[0].Model != model {
			t.Errorf("%s: err = %v, %+v", model, err, resp.Message)
		}
	}
}

func TestNoErrorShowsWhatHeadersAndQuerySay(t *testing.T) {
	t.Parallel()
	const header, query = "header-value-0123", "query value/0123"
	set := func(c *models.Config) {
		c.Headers = map[string]string{"api-key": header}
		c.Query = url.Values{"code": {query}}
		c.Retry = models.Retry{Attempts: 1}
	}
	shown := func(err error) {
		t.Helper()
		for _, secret := range []string{header, query, url.QueryEscape(query)} {
			if err == nil || strings.Contains(err.Error(), secret) {
				t.Errorf("%q is shown by: %v", secret, err)
			}
		}
	}
	words := "not with " + header + " and " + query
	_, err := client(t, modeltest.New(t, modeltest.Refusal(401, "", "", words, 0)), set).Complete(t.Context(), ask("hi"))
	shown(err)
	config := models.Config{BaseURL: "http://127.0.0.1:1/v1", Model: "m", Logger: slog.New(slog.DiscardHandler)}
	set(&config)
	away, err := models.New(config) // the error of a connection names the whole URL
	if err != nil {
		t.Fatal(err)
	}
	_, err = away.Complete(t.Context(), ask("hi"))
	shown(err)
}
