package modelcheck_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
)

// client connects to the server and retries nothing.
func client(t *testing.T, server *modeltest.Server, change ...func(*models.Config)) *models.Client {
	t.Helper()
	config := models.Config{
		BaseURL: server.URL(), APIKey: "secret-key-0123456789", Model: "gpt-4o", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 1},
	}
	for _, c := range change {
		c(&config)
	}
	c, err := models.New(config)
	require.NoError(t, err)
	return c
}

func check(t *testing.T, c *models.Client, target modelcheck.Target) map[string]modelcheck.Result {
	t.Helper()
	found := map[string]modelcheck.Result{}
	begun := ""
	err := modelcheck.Run(t.Context(), c, target, func(name string) { begun = name }, func(r modelcheck.Result) {
		assert.Equal(t, begun, r.Check)
		found[r.Check] = r
	})
	require.NoError(t, err)
	return found
}

func TestEveryProviderPassesChecks(t *testing.T) {
	type provider func(testing.TB, ...modeltest.Reply) *modeltest.Server
	for name, test := range map[string]struct {
		server  provider
		model   string
		dialect string
		images  bool
	}{
		"gpt-4o":          {modeltest.New, "gpt-4o", "chat completions", true},
		"gpt-6-sol":       {modeltest.OpenAI, "gpt-6-sol", "Responses API; learned here: over the Responses API", true},
		"gemini 3":        {modeltest.Gemini, "gemini-3-pro", "chat completions", true},
		"qwen vllm":       {modeltest.QwenVLLM, "Qwen/Qwen3.5-27B", "chat completions", true},
		"another vllm":    {modeltest.QwenVLLM, "house/x", "chat completions; learned here: one system message", true},
		"llama.cpp":       {modeltest.LlamaCpp, "local", "chat completions; learned here: one system message", true},
		"mistral":         {modeltest.Mistral, "mistral-large-latest", "chat completions", true},
		"kimi":            {modeltest.ReasoningWanted, "kimi-k2-thinking", "chat completions", false},
		"deepseek":        {modeltest.ReasoningWanted, "deepseek-chat", "chat completions", false},
		"openrouter":      {modeltest.OpenRouter, "vendor/model", "chat completions", true},
		"without routes":  {modeltest.NoResponses, "gpt-oss", "chat completions", true},
		"unnamed echoing": {modeltest.ReasoningWanted, "x", "chat completions; learned here: with reasoning_content", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := test.server(t)
			server.Handle(modeltest.AnswerChecks)
			c := client(t, server)
			target := modelcheck.Target{Model: test.model}
			calls := modelcheck.Calls(c, target)
			found := check(t, c, target)
			for _, r := range found {
				assert.Truef(t, r.Status != modelcheck.Fail, "%s: %s", r.Check, r.Detail)
			}
			assert.Equal(t, test.dialect, found[modelcheck.Dialect].Detail)
			assert.Equal(t, test.images, found[modelcheck.Image].Status == modelcheck.Pass, found[modelcheck.Image])
			assert.Equal(t, calls, len(server.Requests()))
		})
	}
}

// answering is a server that passes its checks, except for requests that contain a text.
func answering(t *testing.T, contains string, reply modeltest.Reply) *modeltest.Server {
	t.Helper()
	server := modeltest.New(t)
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(fmt.Sprint(req.Messages[1:], req.Tools, req.ReasoningEffort), contains) {
			return reply
		}
		return modeltest.AnswerChecks(n, req)
	})
	return server
}

func TestFailedCheckNamesSetting(t *testing.T) {
	refusal := func(status int, message string) modeltest.Reply {
		return modeltest.Refusal(status, "invalid_request_error", "", message, 0)
	}
	for name, test := range map[string]struct {
		fault    string // these requests get the reply
		reply    modeltest.Reply
		check    string
		status   modelcheck.Status
		detail   string
		help     string
		settings func(*models.Config)
	}{
		"wrong key":     {"", refusal(401, "no"), "answers", "fail", "status 401", "AGENT_MODEL_HEADERS", nil},
		"unknown route": {"", refusal(404, "no"), "answers", "fail", "status 404", "OPENAI_BASE_URL", nil},
		"no version":    {"", refusal(404, "api-version is missing"), "answers", "fail", "404", "AGENT_MODEL_QUERY", nil},
		"no money":      {"", refusal(402, "credit is used up"), "answers", "fail", "402", "OPENAI_API_KEY", nil},
		"too often":     {"", modeltest.Status(429, 0), "answers", "fail", "429", "wait", nil},
		"broken server": {"", modeltest.Status(500, 0), "answers", "fail", "500", "the server's log", nil},
		"broken link":   {"", modeltest.Reset(), "answers", "fail", "", "the server's log", nil},
		"half a document": {
			"", modeltest.Raw(200, "application/json", `{"choices":[`), "answers", "fail", "", "the server's log", nil,
		},
		"web page": {
			"", modeltest.Raw(200, "text/html", "<html>"), "answers", "fail", "web page", "OPENAI_BASE_URL", nil,
		},
		"little context": {
			"temperature", modeltest.Refusal(400, "invalid_request_error", "context_length_exceeded", "too long", 0), "tools",
			"fail", "too long", "AGENT_CONTEXT_TOKENS", nil,
		},
		"refused request": {
			"Say ok", modeltest.Raw(200, "application/json",
				`{"choices":[{"message":{"role":"assistant","refusal":"I will not"},"finish_reason":"stop"}]}`),
			"answers", "fail", "I will not", "AGENT_MODEL", nil,
		},
		"odd member": {"", refusal(400, "bad member"), "answers", "fail", "bad member", "AGENT_MODEL_EXTRA", nil},
		"strange effort": {
			"turbo", refusal(400, "reasoning_effort: bad value"), "answers", "fail", "bad value",
			"AGENT_REASONING_EFFORT", turbo,
		},
		"other protocol": {
			"temperature", refusal(400, "use /v1/responses"), "tools", "fail", "/v1/responses",
			"AGENT_MODEL_API", overChat,
		},
		"only thoughts": {
			"Say ok", modeltest.Text("").WithFinish("length"), "answers", "fail", "reasoning",
			"AGENT_REASONING_EFFORT", nil,
		},
		"empty answer":  {"Say ok", modeltest.Text(""), "answers", "fail", "empty", "AGENT_MODEL", nil},
		"no tools":      {"temperature", modeltest.Text("21"), "tools", "fail", "in words", "--enable-auto-tool-choice", nil},
		"refused tools": {"temperature", refusal(400, "tools are off"), "tools", "fail", "tools are off", "--jinja", nil},
		"odd arguments": {
			"temperature", modeltest.MalformedCall("temperature"), "tools", "fail",
			"called temperature", "AGENT_MODEL", nil,
		},
		"endless calls": {"celsius", modeltest.ToolCall("temperature", "{}"), "tools", "fail", "again", "AGENT_MODEL", nil},
		"no correction": {"INVALID_PARAMS", refusal(400, "odd"), "correction", "fail", "odd", "AGENT_MODEL_EXTRA", nil},
		"one piece":     {"thirty", modeltest.Text("one"), "stream", "pass", "in one piece", "", nil},
		"early end":     {"hundred", modeltest.Text("one"), "limit", "fail", `"stop"`, "AGENT_MODEL_EXTRA", nil},
		"no bound": {
			"hundred", modeltest.Text(strings.Repeat("one ", 999)), "limit", "fail", "billed",
			"AGENT_MODEL_EXTRA", nil,
		},
		"blind model": {"colour", modeltest.Text("Blue"), "image", "fail", "Blue", "AGENT_MODEL", nil},
		"no images": {
			"image_url", refusal(400, "image input is not supported"), "image", "skipped", "refused one", "", nil,
		},
		"no price": {"x", modeltest.Text("ok"), "price", "skipped", "do not bound", "AGENT_PRICES", unpriced},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := client(t, answering(t, test.fault, test.reply), func(c *models.Config) {
				if test.settings != nil {
					test.settings(c)
				}
			})
			got := check(t, c, modelcheck.Target{})[test.check]
			assert.Truef(t, got.Status == test.status && strings.Contains(got.Detail, test.detail) &&
				strings.Contains(got.Help, test.help), "got %+v", got)
		})
	}
}

func turbo(c *models.Config)    { c.ReasoningEffort = "turbo" }
func overChat(c *models.Config) { c.API = models.APIChat }
func unpriced(c *models.Config) { c.Model = "house/own" }

func TestCorrectionIsSkippedWithoutCall(t *testing.T) {
	found := check(t, client(t, answering(t, "temperature", modeltest.Text("21"))), modelcheck.Target{})
	got := found[modelcheck.Correction]
	assert.Truef(t, got.Status == modelcheck.Skipped && got.Detail == "no tool was called", "got %+v", got)
}

func TestUselessCallsAreSkipped(t *testing.T) {
	for name, test := range map[string]struct {
		status int
		help   string
		change func(*models.Config)
	}{
		"wrong key":   {401, "OPENAI_API_KEY", overChat},
		"not found":   {404, "AGENT_MODEL", overChat},
		"unreachable": {200, "OPENAI_BASE_URL", func(c *models.Config) { c.BaseURL = "http://127.0.0.1:1/v1" }},
	} {
		t.Run(name, func(t *testing.T) {
			c := client(t, answering(t, "", modeltest.Status(test.status, 0)), test.change)
			for name, r := range check(t, c, modelcheck.Target{}) {
				want := modelcheck.Skipped
				switch name {
				case modelcheck.Answers:
					want = modelcheck.Fail
					assert.Contains(t, r.Help, test.help)
				case modelcheck.Price:
					want = modelcheck.Pass
				}
				assert.Truef(t, r.Status == want, "got %+v, want %s", r, want)
			}
		})
	}
}

func TestTargetEffortReachesServer(t *testing.T) {
	server := answering(t, "\x00", modeltest.Text(""))
	check(t, client(t, server), modelcheck.Target{Model: "gpt-4o", Effort: "low"})
	for i, r := range server.Requests() {
		assert.Equal(t, "low", r.ReasoningEffort, i)
		assert.Equal(t, "gpt-4o", r.Model, i)
	}
}

func TestChecksEndWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := client(t, answering(t, "", modeltest.Hang()))
	err := modelcheck.Run(ctx, c, modelcheck.Target{}, func(string) { cancel() }, func(r modelcheck.Result) {
		t.Errorf("%+v was reported", r)
	})
	assert.ErrorIs(t, err, context.Canceled)
}

func TestSilentModelIsReportedAsSlow(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	answers, tools := modelcheck.Once(ctx, client(t, answering(t, "", modeltest.Hang())), modelcheck.Target{})
	for _, r := range []modelcheck.Result{answers, tools} {
		assert.Truef(t, r.Status == modelcheck.Fail && strings.Contains(r.Detail, "did not answer within") &&
			strings.Contains(r.Help, "AGENT_REASONING_EFFORT"), "got %+v", r)
	}
}

func TestOnce(t *testing.T) {
	refused := modeltest.Refusal(400, "invalid_request_error", "", "tools are off", 0)
	for name, test := range map[string]struct {
		fault          string
		reply          modeltest.Reply
		answers, tools modelcheck.Status
		calls          int
	}{
		"both work":     {"\x00", modeltest.Text(""), "pass", "pass", 1},
		"words alone":   {"temperature", modeltest.Text("21"), "pass", "fail", 1},
		"refused tools": {"temperature", refused, "pass", "fail", 2},
		"refused all":   {"", refused, "fail", "fail", 2},
		"wrong key":     {"", modeltest.Status(401, 0), "fail", "fail", 1},
	} {
		t.Run(name, func(t *testing.T) {
			server := answering(t, test.fault, test.reply)
			answers, tools := modelcheck.Once(t.Context(), client(t, server), modelcheck.Target{})
			assert.Truef(t, answers.Status == test.answers && tools.Status == test.tools && len(server.Requests()) == test.calls,
				"%+v, %+v after %d calls", answers, tools, len(server.Requests()))
		})
	}
}
