package models_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
)

// Redaction keeps the words of a refusal about a key.
func TestRefusalOfKeyKeepsItsWords(t *testing.T) {
	for want, err := range map[string]*models.Error{
		"call model: status 401: (invalid_api_key) Incorrect API key provided": {
			Status: 401, Code: "invalid_api_key", Message: "Incorrect API key provided", Advice: "-",
		},
		"call model: status 401: no such key": {Status: 401, Code: "401", Message: "no such key", Advice: "-"},
	} {
		assert.Equal(t, want+" (-)", redact.Text(err.Error(), 1000))
	}
}

func TestTransientErrorsAreRetried(t *testing.T) {
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
			assert.Truef(t, resp.Message.Content == "The answer." && resp.Attempts == 2 && shown == "The answer.",
				"response = %+v, shown %q", resp, shown)
			for _, r := range server.Requests() {
				assert.Equal(t, "k", r.IdempotencyKey())
			}
		})
	}
}

func TestPermanentErrorsAreNotRetried(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault  modeltest.Reply
		status int
		want   string
	}{
		"400": {modeltest.Status(http.StatusBadRequest, 0), 400, "Bad Request"},
		"401": {modeltest.Status(http.StatusUnauthorized, 0), 401, "OPENAI_API_KEY"},
		"404": {
			modeltest.Refusal(404, "invalid_request_error", "model_not_found", "no such model", 0), 404, "AGENT_MODEL",
		},
		"408":          {modeltest.Status(http.StatusRequestTimeout, 0), 408, "Request Timeout"},
		"422":          {modeltest.Raw(422, "application/json", `{"detail":"messages: too many"}`), 422, "messages: too many"},
		"web page":     {modeltest.Raw(404, "text/html", "<html><body>Not here</body></html>"), 404, "web page"},
		"200 web page": {modeltest.Raw(200, "text/html", "<!doctype html>"), 0, "web page"},
		"plain text":   {modeltest.Raw(403, "text/plain", "go\naway"), 403, "go away"},
		"empty":        {modeltest.Raw(418, "text/plain", ""), 418, "teapot"},
		"error text":   {modeltest.Raw(400, "application/json", `{"error":"bad model"}`), 400, "bad model"},
		"no quota": {
			modeltest.Refusal(429, "insufficient_quota", "insufficient_quota", "pay first", 0), 429, "pay first",
		},
		"no answer": {modeltest.Raw(304, "text/plain", ""), 304, "not modified"},
		"bad request mid-stream": {
			modeltest.Raw(200, "text/event-stream", "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n"), 400,
			"too long",
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, test.fault)
			_, err := client(t, server).Complete(t.Context(), ask("hi"))
			var failure *models.Error
			require.Truef(t, errors.As(err, &failure), "err = %v, want a *models.Error", err)
			assert.Truef(t, failure.Status == test.status && !failure.Retryable && strings.Contains(err.Error(), test.want),
				"err = %+v, want status %d and %q", failure, test.status, test.want)
		})
	}
}

// The status of a refusal decides, also if the server is silent before the end of its message.
func TestStalledRefusalKeepsItsStatus(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	c := client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second })
	_, err := c.Complete(t.Context(), ask("hi"))
	var failure *models.Error
	require.Truef(t, errors.As(err, &failure), "err = %v, want a *models.Error", err)
	assert.Truef(t, failure.Status == http.StatusUnauthorized && !failure.Retryable && len(server.Requests()) == 1,
		"err = %+v after %d requests", failure, len(server.Requests()))
}

func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	fault := modeltest.Status(http.StatusBadGateway, 0)
	server := modeltest.New(t, fault, fault, fault)
	_, err := client(t, server).Complete(t.Context(), ask("hi"))
	var failure *models.Error
	assert.Truef(t, errors.As(err, &failure) && failure.Status == http.StatusBadGateway && failure.Retryable,
		"err = %v", err)
}

func TestMidStreamErrorKeepsProviderMessage(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.MidStreamError("Half an", "the GPU caught fire"))
	once := func(c *models.Config) { c.Retry.Attempts = 1 }
	_, err := client(t, server, once).Complete(t.Context(), ask("hi"))
	assert.ErrorContains(t, err, "the GPU caught fire")
}

func TestRetryAfterIsRespected(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, time.Second), modeltest.Text("ok"))
	resp := complete(t, client(t, server), ask("hi"))
	assert.Truef(t, resp.Duration >= time.Second,
		"the request was repeated after %s, the server asked for a second", resp.Duration)
}

func TestLongRetryAfterReturnsToCaller(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, time.Hour))
	_, err := client(t, server).Complete(t.Context(), ask("hi"))
	var failure *models.Error
	assert.Truef(t, errors.As(err, &failure) && failure.RetryAfter == time.Hour && failure.Retryable,
		"err = %+v, want one to retry after an hour", failure)
}

func TestNoWaitBeyondDeadline(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Status(http.StatusTooManyRequests, 50*time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	_, err := client(t, server, func(c *models.Config) { c.Retry.MaxWait = time.Minute }).Complete(ctx, ask("hi"))
	var failure *models.Error
	assert.Truef(t, errors.As(err, &failure) && ctx.Err() == nil,
		"err = %v (context: %v), want the server's answer at once", err, ctx.Err())
}

func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Hang(), modeltest.Text("ok"))
	resp := complete(t, client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second }), ask("hi"))
	assert.Equal(t, 2, resp.Attempts)
}

// Some servers send neither usage nor [DONE], and keep the connection open, also with comments.
func TestStreamThatStaysOpenEndsAfterItsFinish(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for text := hello + finish; ; text = ": ping\n\n" {
			_, _ = io.WriteString(w, text)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-ticker.C:
			case <-r.Context().Done():
				return
			}
		}
	}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := client(t, server).Complete(ctx, ask("hi"))
	require.NoError(t, err)
	assert.Equal(t, "hello", resp.Message.Content)
	assert.Truef(t, resp.Duration < 30*time.Second, "it ended after %s", resp.Duration)
	assert.Truef(t, resp.Attempts == 1 && resp.Unknown, "it may be billed: %+v", resp)
}

// Some servers send the finish reason before the end of the answer.
func TestAnswerAfterFinishReasonIsNotCut(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Custom(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		text := hello + finish
		for range 6 {
			_, _ = io.WriteString(w, text)
			_ = http.NewResponseController(w).Flush()
			time.Sleep(time.Second)
			text = hello
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	resp := complete(t, client(t, server, func(c *models.Config) { c.IdleTimeout = 4 * time.Second }), ask("hi"))
	assert.Equal(t, strings.Repeat("hello", 6), resp.Message.Content)
}

func TestSlowStreamIsNotIdle(t *testing.T) {
	t.Parallel()
	slow := modeltest.Text(strings.Repeat("a slow word ", 90)).Slowly(50 * time.Millisecond)
	server := modeltest.New(t, slow)
	resp := complete(t, client(t, server, func(c *models.Config) { c.IdleTimeout = 2 * time.Second }), ask("hi"))
	assert.Truef(t, resp.Attempts == 1 && resp.Duration >= 2*time.Second,
		"attempts = %d in %s", resp.Attempts, resp.Duration)
}

func TestErrorsAndLogsHideSecrets(t *testing.T) {
	t.Parallel()
	words := "Incorrect API key provided: " + key + " and sk-proj-abcdefgh1234 and Bearer abcdef.ghijkl"
	server := modeltest.New(t, modeltest.Refusal(500, "server_error", "", words, 0),
		modeltest.Refusal(401, key, key, words, 0))
	var log bytes.Buffer
	c := client(t, server, func(c *models.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	_, err := c.Complete(t.Context(), ask("hi"))
	require.Error(t, err)
	for _, secret := range []string{key, "abcdefgh1234", "abcdef.ghijkl"} {
		assert.Truef(t, !strings.Contains(err.Error()+log.String(), secret),
			"%q is shown by:\n%s\n%s", secret, err, log.String())
	}
	assert.Contains(t, log.String(), "model call repeated")
}

func TestUnreachableServerAdvice(t *testing.T) {
	t.Parallel()
	c, err := models.New(models.Config{
		BaseURL: "http://127.0.0.1:1/v1", Model: "m", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 2, Base: time.Millisecond},
	})
	require.NoError(t, err)
	_, err = c.Complete(t.Context(), ask("hi"))
	var failure *models.Error
	assert.Truef(t, errors.As(err, &failure) && failure.Retryable && strings.Contains(err.Error(), "OPENAI_BASE_URL"),
		"err = %v", err)
}

// No retry of such a request can succeed.
func TestPermanentTransportErrors(t *testing.T) {
	t.Parallel()
	tooLong := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("{" + strings.Repeat(" ", 32<<20)))
	})
	plain := httptest.NewServer(tooLong)
	t.Cleanup(plain.Close)
	encrypted := httptest.NewUnstartedServer(tooLong)
	encrypted.Config.ErrorLog = log.New(io.Discard, "", 0) // of the failed handshake
	encrypted.StartTLS()
	t.Cleanup(encrypted.Close)
	unknownHost := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", IsNotFound: true}}
	}}
	for name, test := range map[string]struct {
		url       string
		transport http.RoundTripper
		want      string
	}{
		"unknown host":   {"http://models.invalid/v1", unknownHost, "OPENAI_BASE_URL"},
		"unknown issuer": {encrypted.URL, nil, "OPENAI_BASE_URL"},
		"plain HTTP":     {strings.Replace(plain.URL, "http:", "https:", 1), nil, "OPENAI_BASE_URL"},
		"long answer":    {plain.URL, nil, "longer than 32 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := models.New(models.Config{
				BaseURL: test.url, Model: "m", Logger: slog.New(slog.DiscardHandler),
				HTTPClient: &http.Client{Transport: test.transport},
			})
			require.NoError(t, err)
			_, err = c.Complete(t.Context(), ask("hi"))
			failure, ok := errors.AsType[*models.Error](err)
			assert.Truef(t, ok && !failure.Retryable && strings.Contains(err.Error(), test.want),
				"err = %v, want a permanent one with %q", err, test.want)
		})
	}
}

func TestErrorsHideHeadersAndQuery(t *testing.T) {
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
			assert.Truef(t, err != nil && !strings.Contains(err.Error(), secret), "%q is shown by: %v", secret, err)
		}
	}
	words := "not with " + header + " and " + query
	_, err := client(t, modeltest.New(t, modeltest.Refusal(401, "", "", words, 0)), set).Complete(t.Context(), ask("hi"))
	shown(err)
	config := models.Config{BaseURL: "http://127.0.0.1:1/v1", Model: "m", Logger: slog.New(slog.DiscardHandler)}
	set(&config)
	away, err := models.New(config) // a connection error contains the whole URL
	require.NoError(t, err)
	_, err = away.Complete(t.Context(), ask("hi"))
	shown(err)
}

// endless streams words until the client disconnects.
func endless(gone chan<- struct{}) modeltest.Reply {
	return modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			if _, err := w.Write([]byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word word word word " +
				"\"}}]}\n\n")); err != nil {
				break
			}
			w.(http.Flusher).Flush()
		}
		gone <- struct{}{}
	})
}

func TestAnswerOverLimitIsCut(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{}, 1)
	server := modeltest.New(t, endless(gone))
	req := ask("talk")
	req.MaxTokens = 50
	var shown strings.Builder
	req.OnDelta = func(text string) { shown.WriteString(text) }
	resp := complete(t, client(t, server), req)
	assert.Equal(t, models.FinishLength, resp.FinishReason)
	assert.Equal(t, 1, resp.Attempts)
	n := resp.Usage.CompletionTokens
	assert.Truef(t, resp.Usage.Estimated && n > 50 && n <= 1000, "usage is %+v, want the really streamed text", resp.Usage)
	assert.Truef(t, resp.Message.Content == shown.String() && resp.Unknown,
		"%d bytes were shown, the answer has %d; what was used is unknown: %t", shown.Len(), len(resp.Message.Content),
		resp.Unknown)
	select {
	case <-gone:
	case <-time.After(90 * time.Second):
		t.Error("the server still talks")
	}
}

func TestAnswerNearLimitIsNotCut(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("extraordinary ", 40) // few tokens for its length
	server := modeltest.New(t, modeltest.Text(text).WithUsage(10, 42, 0))
	req := ask("talk")
	req.MaxTokens = 50
	resp := complete(t, client(t, server), req)
	assert.Equal(t, models.FinishStop, resp.FinishReason, len(resp.Message.Content))
	assert.Equal(t, text, resp.Message.Content, len(resp.Message.Content))
}

func TestCallCutBeforeArgumentsIsDropped(t *testing.T) {
	t.Parallel()
	reply := modeltest.ToolCall("drop_all", "").WithFinish(models.FinishLength)
	server := modeltest.New(t, reply, modeltest.ToolCall("probe", ""))
	c := client(t, server)
	if resp := complete(t, c, ask("go")); len(resp.Message.ToolCalls) != 0 || resp.FinishReason != models.FinishLength {
		t.Errorf("response is %+v", resp)
	}
	resp := complete(t, c, ask("go"))
	assert.Truef(t, len(resp.Message.ToolCalls) == 1 && resp.Message.ToolCalls[0].Arguments == "{}",
		"a whole call without arguments is %+v", resp.Message.ToolCalls)
}

func TestBeforeRetryReportsBillableAttempt(t *testing.T) {
	t.Parallel()
	half := strings.Repeat("half an answer ", 20)
	for name, test := range map[string]struct {
		fault  modeltest.Reply
		billed bool
	}{
		"cut":        {modeltest.CutStream(half), true},
		"ended":      {modeltest.EndedStream(half), true},
		"mid-error":  {modeltest.MidStreamError(half, "overloaded"), true},
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
			req, calls := ask("go"), 0
			req.BeforeRetry = func(context.Context) (int, error) {
				calls += len(server.Requests())
				return 77, nil
			}
			resp := complete(t, client(t, server, retries(2)), req)
			assert.Truef(t, (calls == 1) == test.billed && !resp.Unknown && resp.Usage.TotalTokens == 161,
				"told %d times, response %+v", calls, resp)
			if got := server.Requests()[1].MaxTokens; (got == 77) != test.billed { //nolint:staticcheck // most servers know it
				t.Errorf("the second attempt was allowed %d tokens", got)
			}
			failed, err := client(t, server, retries(1)).Complete(t.Context(), req)
			assert.Truef(t, err != nil && failed.Unknown == test.billed && failed.Usage == (models.Usage{}),
				"response %+v, err %v", failed, err)
		})
	}
}

func TestBeforeRetryErrorEndsCall(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Reset())
	req, spent := ask("go"), errors.New("nothing is left")
	req.BeforeRetry = func(context.Context) (int, error) { return 0, spent }
	resp, err := client(t, server).Complete(t.Context(), req)
	assert.Truef(t, errors.Is(err, spent) && !resp.Unknown, "response %+v, err %v", resp, err)
}

func TestInterruptedCallHasUnknownUsage(t *testing.T) {
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
	assert.Truef(t, err != nil && resp.Unknown && resp.Message.Content == "", "response %+v, err %v", resp, err)
}

// net/http repeats requests with an idempotency key on its own if a reused connection breaks.
func TestTransportDoesNotResendRequest(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("ok"), modeltest.Reset(), modeltest.Text("ok"))
	c := client(t, server, func(c *models.Config) { c.Retry.Attempts = 1 })
	req := ask("go")
	req.IdempotencyKey = "k"
	complete(t, c, req)
	resp, err := c.Complete(t.Context(), req)
	assert.ErrorContains(t, err, "EOF") // of the reset connection, not of a second one
	assert.Truef(t, resp.Unknown && len(server.Requests()) == 2, "after %d requests: %+v", len(server.Requests()), resp)
	if got := complete(t, c, req); got.Unknown || server.Requests()[2].IdempotencyKey() != "k" {
		t.Errorf("response %+v, key %q", got, server.Requests()[2].IdempotencyKey())
	}
}

// Usage comes last. A complete answer without it was billed all the same.
func TestMissingUsageIsUnknownIfServerReportsUsage(t *testing.T) {
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
		{Usage: models.Usage{Estimated: true}},
		{Usage: models.Usage{Estimated: true}, Unknown: true},
		{},
		{Usage: models.Usage{Estimated: true}, Unknown: true},
	} {
		got := complete(t, c, ask("go"))
		assert.Truef(t, got.Unknown == want.Unknown && got.Usage.Estimated == want.Usage.Estimated &&
			got.Usage.TotalTokens != 0, "answer %d: %+v", i, got)
	}
}

func TestCallsSucceedAfterManyRefusals(t *testing.T) {
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
		assert.NoError(t, <-errs)
	}
	assert.Equal(t, 3*callers, len(server.Requests()))
}

func TestPriced(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	for model, want := range map[string]bool{"gpt-4o-mini": true, "home-made": false} {
		assert.Equal(t, want, client(t, server, func(c *models.Config) { c.Model = model }).Priced(), model)
	}
}
