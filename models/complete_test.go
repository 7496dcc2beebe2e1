package models_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
)

const key = "secret-key-0123456789"

// client connects to the server and retries quickly.
func client(t *testing.T, server *modeltest.Server, change ...func(*models.Config)) *models.Client {
	t.Helper()
	config := models.Config{
		BaseURL: server.URL(), APIKey: key, Model: "gpt-4o-mini", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 3, Base: time.Millisecond, MaxWait: 2 * time.Second},
	}
	for _, c := range change {
		c(&config)
	}
	c, err := models.New(config)
	require.NoError(t, err)
	return c
}

func ask(text string) models.Request {
	return models.Request{Messages: []models.Message{{Role: models.RoleUser, Content: text}}}
}

func complete(t *testing.T, c *models.Client, req models.Request) models.Response {
	t.Helper()
	resp, err := c.Complete(t.Context(), req)
	require.NoError(t, err, "Complete")
	return resp
}

func TestCompleteReturnsStreamedText(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("The orders table is the largest, with 42 MB.").WithUsage(1000, 500, 200))
	req := ask("which table?")
	var shown strings.Builder
	req.OnDelta = func(text string) { shown.WriteString(text) }
	resp := complete(t, client(t, server), req)

	assert.Truef(t, resp.Message.Content == "The orders table is the largest, with 42 MB." &&
		shown.String() == resp.Message.Content, "text = %q, shown %q", resp.Message.Content, shown.String())
	want := models.Usage{PromptTokens: 1000, CompletionTokens: 500, TotalTokens: 1500, CachedTokens: 200}
	assert.NoDiff(t, want, resp.Usage)
	cost := (800*0.15 + 200*0.075 + 500*0.60) / 1e6
	assert.Truef(t, resp.Priced && resp.CostUSD == cost, "cost = %v (priced %v), want %v", resp.CostUSD, resp.Priced, cost)
	assert.Truef(t, resp.FinishReason == models.FinishStop && resp.Model == "gpt-4o-mini" && resp.Attempts == 1 &&
		resp.Duration > 0, "response = %+v", resp)
}

func TestCompleteSendsRequest(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("ok"), modeltest.Text("ok"))
	zero := float32(0)
	req := ask("hi")
	req.Messages = append(req.Messages, models.Message{Role: models.RoleTool, ToolCallID: "call_1"})
	req.MaxTokens, req.Temperature, req.IdempotencyKey = 77, &zero, "exec-1/step-2"
	c := client(t, server)
	complete(t, c, req)
	req.Model = "o3"
	req.Temperature = nil
	complete(t, c, req)

	first, second := server.Requests()[0], server.Requests()[1]
	assert.Truef(t, first.IdempotencyKey() == "exec-1/step-2" && first.Header.Get("Authorization") == "Bearer "+key,
		"headers = %v", first.Header)
	assert.Truef(t, first.Stream && first.StreamOptions != nil && first.StreamOptions.IncludeUsage &&
		strings.Contains(first.Body, `"max_tokens":77`), "request = %s", first.Body)
	assert.Contains(t, first.Body, `"temperature":`)
	assert.True(t, first.Messages[1].Content != "", "the answer of a tool was sent without content, which servers refuse")
	assert.Truef(t, second.Model == "o3" && !strings.Contains(second.Body, `"max_tokens"`) &&
		second.MaxCompletionTokens == 77, "request to o3 = %s", second.Body)
}

func TestUnsendableToolCallIsRepaired(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ called, arguments, name, sent string }{
		"in order":         {"table_sizes", `{"a": 1}`, "table_sizes", `{"a": 1}`},
		"a dot":            {"multi_tool_use.parallel", `{}`, "multi_tool_use_parallel", `{}`},
		"blanks and signs": {"two numbers, añadir!", `{}`, "two_numbers__a_adir_", `{}`},
		"too long":         {strings.Repeat("x", 65), `{}`, strings.Repeat("x", 64), `{}`},
		"a list":           {"f", `[1]`, "f", `{}`},
		"a text":           {"f", `"hi"`, "f", `{}`},
		"null":             {"f", `null`, "f", `{}`},
		"no JSON":          {"f", `{"a": `, "f", `{}`},
		"nothing":          {"f", ``, "f", `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, modeltest.Text("ok"))
			req := ask("hi")
			made := models.ToolCall{ID: "call_1", Name: test.called, Arguments: test.arguments}
			req.Messages = append(req.Messages,
				models.Message{Role: models.RoleAssistant, ToolCalls: []models.ToolCall{made}},
				models.Message{Role: models.RoleTool, ToolCallID: "call_1", Name: test.called, Content: "no"})
			complete(t, client(t, server), req)
			sent := server.Requests()[0].Messages
			got := sent[1].ToolCalls[0].Function
			assert.Truef(t, got.Name == test.name && got.Arguments == test.sent && sent[2].Name == test.name,
				"sent %+v and the answer of %q, want %q with %s", got, sent[2].Name, test.name, test.sent)
			if kept := req.Messages[1].ToolCalls[0]; kept.Name != test.called || kept.Arguments != test.arguments {
				t.Errorf("the caller's own message was changed to %+v", kept)
			}
		})
	}
}

func TestToolCallsAreEqualInAllDialects(t *testing.T) {
	t.Parallel()
	at := func(i int) *int { return &i }
	call := func(index *int, id, name, args string) openai.ToolCall {
		return openai.ToolCall{Index: index, ID: id, Function: openai.FunctionCall{Name: name, Arguments: args}}
	}
	type want struct{ Name, Args string }
	for name, test := range map[string]struct {
		reply modeltest.Reply
		want  []want
	}{
		"one": {modeltest.ToolCall("sizes", `{"limit":3}`), []want{{"sizes", `{"limit":3}`}}},
		"several, in fragments": {
			modeltest.ToolCall("a", `{"text":"long enough for more than one piece"}`).AndCall("b", `{"n":2}`),
			[]want{{"a", `{"text":"long enough for more than one piece"}`}, {"b", `{"n":2}`}},
		},
		"interleaved and out of order": {
			modeltest.Fragments(call(at(1), "y", "b", ""), call(at(0), "x", "a", `{"p"`), call(at(1), "", "", `{}`),
				call(at(0), "", "", `:1}`)),
			[]want{{"a", `{"p":1}`}, {"b", `{}`}},
		},
		"whole calls without index": {
			modeltest.Fragments(call(nil, "x", "a", `{"p":1}`), call(nil, "y", "b", `{"p":2}`)),
			[]want{{"a", `{"p":1}`}, {"b", `{"p":2}`}},
		},
		"fragments without index": {
			modeltest.Fragments(call(nil, "x", "a", `{"p"`), call(nil, "", "", `:1}`), call(nil, "y", "b", ""),
				call(nil, "y", "", "{}")),
			[]want{{"a", `{"p":1}`}, {"b", `{}`}},
		},
		"whole calls all with index 0": {
			modeltest.Fragments(call(at(0), "x", "a", `{"p":1}`), call(at(0), "y", "a", `{"p":2}`)),
			[]want{{"a", `{"p":1}`}, {"a", `{"p":2}`}},
		},
		"whole calls all with index 0 and no id": {
			modeltest.Fragments(call(at(0), "", "a", `{"p":1}`), call(at(0), "", "a", `{"p":2}`), call(at(0), "", "b", `{}`)),
			[]want{{"a", `{"p":1}`}, {"a", `{"p":2}`}, {"b", `{}`}},
		},
		"name repeated in each fragment": {
			modeltest.Fragments(call(at(0), "x", "a", `{"p"`), call(at(0), "x", "a", `:1}`)),
			[]want{{"a", `{"p":1}`}},
		},
		"name repeated, id in a later fragment": {
			modeltest.Fragments(call(at(0), "", "a", `{"p"`), call(at(0), "x", "a", `:1}`)),
			[]want{{"a", `{"p":1}`}},
		},
		"no ids": {
			modeltest.Fragments(call(at(0), "", "a", "{}"), call(at(1), "", "a", "{}")),
			[]want{{"a", "{}"}, {"a", "{}"}},
		},
		"the same id twice": {
			modeltest.Fragments(call(at(0), "x", "a", "{}"), call(at(1), "x", "b", "{}")),
			[]want{{"a", "{}"}, {"b", "{}"}},
		},
		"no arguments": {modeltest.Fragments(call(at(0), "x", "a", "")), []want{{"a", "{}"}}},
		"no name":      {modeltest.Fragments(call(at(0), "x", "", "{}")), []want{{"unnamed", "{}"}}},
		"malformed":    {modeltest.MalformedCall("a"), []want{{"a", `{"limit": 3,`}}},
		"arguments as an object": {
			modeltest.Raw(http.StatusOK, "application/json",
				`{"choices":[{"index":0,"message":{"tool_calls":[{"function":{"name":"a","arguments":{"p":1}}}]},"finish_reason":"stop"}]}`),
			[]want{{"a", `{"p":1}`}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, test.reply, test.reply)
			c := client(t, server)
			resp := complete(t, c, ask("go"))
			var got []want
			ids := map[string]bool{}
			for _, call := range resp.Message.ToolCalls {
				got = append(got, want{call.Name, call.Arguments})
				ids[call.ID] = true
			}
			assert.NoDiff(t, test.want, got)
			assert.Truef(t, !ids[""] && len(ids) == len(got), "ids are missing or repeated: %v", ids)
			assert.Equal(t, models.FinishToolCalls, resp.FinishReason)
		})
	}
}

func TestMissingCallIDsDeriveFromRequest(t *testing.T) {
	t.Parallel()
	reply := modeltest.Fragments(openai.ToolCall{Function: openai.FunctionCall{Name: "a"}})
	server := modeltest.New(t, reply, reply, reply)
	c := client(t, server)
	first := complete(t, c, ask("one")).Message.ToolCalls[0].ID
	again := complete(t, c, ask("one")).Message.ToolCalls[0].ID
	other := complete(t, c, ask("two")).Message.ToolCalls[0].ID
	assert.Truef(t, first == again && first != other,
		"ids = %s, %s for the same request and %s for another", first, again, other)
}

func TestMissingUsageIsEstimated(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text(strings.Repeat("word", 25)).NoUsage().WithModel("unheard-of"))
	resp := complete(t, client(t, server, func(c *models.Config) { c.Model = "unheard-of" }),
		ask(strings.Repeat("word", 10)))
	// every word is shorter
	want := models.Usage{PromptTokens: 12 + 8 + 8 + 8, CompletionTokens: 12 + 76, TotalTokens: 124, Estimated: true}
	assert.NoDiff(t, want, resp.Usage)
	assert.Truef(t, !resp.Priced && resp.CostUSD == 0, "an unknown model was priced at %v", resp.CostUSD)
}

func TestImplausibleUsageIsEstimated(t *testing.T) {
	t.Parallel()
	for name, reply := range map[string]modeltest.Reply{
		"-1 for unknown":  modeltest.Text("ok").WithUsage(-1, -1, 0),
		"a negative part": modeltest.Text("ok").WithUsage(-5, 10, 0),
		"the largest":     modeltest.Text("ok").WithUsage(1<<32-1, 1, 0),
	} {
		t.Run(name, func(t *testing.T) {
			c := client(t, modeltest.New(t, reply))
			resp := complete(t, c, ask(strings.Repeat("word", 10)))
			want := models.Usage{PromptTokens: 36, CompletionTokens: 1, TotalTokens: 37, Estimated: true}
			assert.NoDiff(t, want, resp.Usage)
			quote := models.Quote{Model: "m", PromptTokens: 14}
			c.ObserveUsage(quote, resp.Usage)
			assert.Equal(t, 1, c.Density(quote), "later prompts are estimated at more")
		})
	}
}

func TestDocumentInsteadOfStreamIsAccepted(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Raw(http.StatusOK, "application/json",
		"\n"+
			`{ "model": "m", "choices": [ {"index": 0, "message": {"role": "assistant", "content": [{"type": "text", "text": "whole"}]},
		"finish_reason": "stop"} ], "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3} }`))
	resp := complete(t, client(t, server), ask("hi"))
	assert.Equal(t, "whole", resp.Message.Content, resp)
	assert.Equal(t, 3, resp.Usage.TotalTokens, resp)
}

func TestEndOfContextEndsCall(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Hang())
	ctx, cancel := context.WithCancelCause(t.Context())
	lost := errors.New("lane lost")
	server.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		cancel(lost)
		return modeltest.Hang()
	})
	_, err := client(t, server).Complete(ctx, ask("hi"))
	assert.Truef(t, errors.Is(err, context.Canceled) && errors.Is(err, lost),
		"err = %v, want the context's end and its cause", err)
}

func TestNewRejectsInvalidConfig(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		config models.Config
		want   string
	}{
		"no scheme":   {models.Config{BaseURL: "localhost:11434/v1", Model: "m"}, "OPENAI_BASE_URL"},
		"no host":     {models.Config{BaseURL: "http:///v1", Model: "m"}, "OPENAI_BASE_URL"},
		"unparsable":  {models.Config{BaseURL: "http://[::1", Model: "m"}, "OPENAI_BASE_URL"},
		"credentials": {models.Config{BaseURL: "https://u:hunter2@host/v1", Model: "m"}, "OPENAI_API_KEY"},
		"other setting": {models.Config{
			BaseURL: "https://u:hunter2@host/v1", Model: "m", Settings: models.Settings{APIKey: "OTHER_KEY"},
		}, "move them to OTHER_KEY"},
		"query":         {models.Config{BaseURL: "https://host/v1?key=hunter2", Model: "m"}, "query"},
		"route":         {models.Config{BaseURL: "https://host/v1/chat/completions", Model: "m"}, "route"},
		"no model":      {models.Config{}, "AGENT_MODEL"},
		"key with line": {models.Config{Model: "m", APIKey: "hunter2\n"}, "OPENAI_API_KEY"},
		"price":         {models.Config{Model: "m", Prices: models.Prices{"m": {Prompt: -1}}}, "price"},
		"retry":         {models.Config{Model: "m", Retry: models.Retry{Attempts: -1}}, "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := models.New(test.config)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), test.want) && !strings.Contains(err.Error(), "hunter2"),
				"err = %v, want one about %s, without the secret", err, test.want)
		})
	}
}

// An image counts for much more than its quote, with some servers. Other prompts and models cost no more for that.
func TestDensityIsOfTextAndModel(t *testing.T) {
	t.Parallel()
	c := client(t, modeltest.New(t))
	text := ask("What is it?")
	picture := ask("What is it?")
	picture.Messages[0].Parts = []models.Part{{Image: &models.Image{URL: "https://host/picture"}}}
	c.ObserveUsage(c.Quote(picture), models.Usage{PromptTokens: 27_000})
	quote := c.Quote(text)
	assert.Equal(t, 1, c.Density(quote), "after an image")
	c.ObserveUsage(quote, models.Usage{PromptTokens: 2 * quote.PromptTokens})
	assert.Equal(t, 2, c.Density(quote), "after a text")
	text.Model = "other"
	assert.Equal(t, 1, c.Density(c.Quote(text)), "of another model")
}

// A provider may add a prompt of its own to each prompt. Long prompts reserve no multiple of it.
func TestDensityOfHiddenPrompt(t *testing.T) {
	t.Parallel()
	c := client(t, modeltest.New(t))
	reserved := func(tokens int) float64 {
		return math.Round(float64(tokens) * c.Density(models.Quote{Model: "m", PromptTokens: tokens}))
	}
	observe := func(tokens, counted int) {
		c.ObserveUsage(models.Quote{Model: "m", PromptTokens: tokens}, models.Usage{PromptTokens: counted})
	}
	observe(200, 8000)
	assert.Equal(t, 8000, reserved(200), "the same prompt")
	assert.Equal(t, 15_800, reserved(8000), "a longer prompt")
	observe(100_000, 157_800) // dense text
	assert.Equal(t, 8100, reserved(200), "a short prompt after dense text")
	assert.Equal(t, 157_800, reserved(100_000), "dense text")
	observe(100_000, 1_000_000)
	assert.Equal(t, 1_000_000, reserved(100_000), "more than text can be")
	assert.Equal(t, 800_400, reserved(200), "a short prompt after that")
}

// One wrong count of a server would otherwise forbid all later calls, and so its own correction.
func TestDensityForgetsOverhead(t *testing.T) {
	t.Parallel()
	c := client(t, modeltest.New(t))
	synctest.Test(t, func(t *testing.T) {
		quote := models.Quote{Model: "m", PromptTokens: 1000}
		c.ObserveUsage(quote, models.Usage{PromptTokens: 250_000})
		time.Sleep(9 * time.Minute)
		c.ObserveUsage(quote, models.Usage{PromptTokens: 1500})
		assert.Equal(t, 250, math.Round(c.Density(quote)))
		time.Sleep(2 * time.Minute)
		assert.Equal(t, 1, c.Density(quote))
	})
}

func TestQuoteExceedsUsage(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("fine"))
	c := client(t, server)
	req := ask(strings.Repeat("some ordinary words ", 50))
	req.Tools = []models.Tool{{Name: "f", Parameters: json.RawMessage(`{}`)}}
	req.MaxTokens = 100
	quote := c.Quote(req)
	tokens, cost := quote.PromptTokens+quote.AnswerTokens, quote.PromptUSD+float64(quote.AnswerTokens)*quote.TokenUSD
	resp := complete(t, c, req)
	assert.Truef(t, tokens >= resp.Usage.TotalTokens && tokens <= 1000 && cost >= resp.CostUSD && cost <= 0.001,
		"quoted %d tokens, $%v; used %d, $%v", tokens, cost, resp.Usage.TotalTokens, resp.CostUSD)
	req.MaxTokens = 0
	for model, want := range map[string]int{"": models.DefaultMaxTokens, "o3": models.ThinkingMaxTokens} {
		req.Model = model
		assert.Equal(t, want, c.Quote(req).AnswerTokens, model)
	}
	req.Model = "unknown"
	if q := c.Quote(req); q.PromptUSD != 0 || q.TokenUSD != 0 || q.PromptTokens == 0 {
		t.Errorf("a model without a price is quoted at %+v", q)
	}
}

const (
	hello  = `data: {"choices":[{"index":0,"delta":{"content":"hello"}}]}` + "\n\n"
	finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
)

func events(body string) modeltest.Reply {
	return modeltest.Raw(http.StatusOK, "text/event-stream", body)
}

func TestStreamFormatsOfServers(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"more comments than go-openai allows": strings.Repeat(": OPENROUTER PROCESSING\n\n", 1000) + hello +
			finish + "data: [DONE]\n\n",
		"more blanks than go-openai allows": strings.Repeat("\n", 1000) + hello + finish + "data: [DONE]\n\n",
		"event names and ids": "event: message\nid: 1\n" + hello +
			"event: message\nid: 2\n" + finish + "data: [DONE]\n\n",
		"no end marker":                 hello + finish,
		"no finish reason":              hello + "data: [DONE]\n\n",
		"a cut after the finish reason": hello + finish + "data: {\"usa",
		"carriage returns":              strings.ReplaceAll(hello+finish, "\n", "\r\n"),
		"a null error in every chunk":   strings.ReplaceAll(hello+finish, `{"choices"`, `{"error":null,"choices"`),
		"usage as null in every chunk":  strings.ReplaceAll(hello+finish, `{"choices"`, `{"usage":null,"choices"`),
		"another choice":                hello + `data: {"choices":[{"index":1,"delta":{"content":"no"}}]}` + "\n\n" + finish,
		"chunks without choices":        "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n" + hello + finish,
		"a whole message at the end of it": "data: {\"choices\":[]}\n\n" +
			strings.ReplaceAll(hello, "delta", "message") + finish,
		"finish reason together with last text": strings.ReplaceAll(hello, `"}}]`, `"},"finish_reason":"stop"}]`),
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, events(body))
			resp := complete(t, client(t, server, func(c *models.Config) { c.Retry.Attempts = 1 }), ask("hi"))
			assert.Equal(t, "hello", resp.Message.Content, resp)
			assert.Equal(t, "stop", resp.FinishReason, resp)
		})
	}
}

func TestStreamErrorFormats(t *testing.T) {
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
			assert.Truef(t, err != nil && strings.HasSuffix(err.Error(), "too hot"), "err = %v, want the server's words", err)
		})
	}
}
