package models_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
)

// conversation runs a call, its result with a correction, and an answer. It returns the last answer.
func conversation(t *testing.T, c *models.Client, model string) models.Response {
	t.Helper()
	req := models.Request{
		Model: model, Tools: []models.Tool{{Name: "sizes"}},
		Messages: []models.Message{
			{Role: models.RoleSystem, Content: "You are brief."},
			{Role: models.RoleSystem, Content: "What was said earlier, summarised: nothing."},
			{Role: models.RoleUser, Content: "Which table?"},
		},
	}
	first := complete(t, c, req)
	require.Equal(t, 1, len(first.Message.ToolCalls), first.Message)
	req.Messages = append(
		req.Messages,
		first.Message,
		models.Message{
			Role:       models.RoleTool,
			ToolCallID: first.Message.ToolCalls[0].ID,
			Content:    `{"error":"INVALID_PARAMS"}`,
		},
		models.Message{Role: models.RoleSystem, Content: "Tool call failed: INVALID_PARAMS. Schema: {}"},
	)
	var shown strings.Builder
	req.OnDelta = func(text string) { shown.WriteString(text) }
	last := complete(t, c, req)
	assert.Truef(t, last.Message.Content == "orders" && shown.String() == "orders",
		"answer = %q, shown %q", last.Message.Content, shown.String())
	return last
}

func replies() []modeltest.Reply {
	return []modeltest.Reply{modeltest.ToolCall("sizes", `{}`), modeltest.Text("orders")}
}

// Each fake rejects what the real provider rejects. A call, a correction and an answer still succeed.
func TestEveryProviderAcceptsCorrection(t *testing.T) {
	t.Parallel()
	type provider func(testing.TB, ...modeltest.Reply) *modeltest.Server
	for name, test := range map[string]struct {
		server  provider
		model   string
		refused int // requests that revealed a dialect
	}{
		"gpt-6-sol":        {modeltest.OpenAI, "gpt-6-sol", 1},
		"gpt-5.6-sol":      {modeltest.OpenAI, "gpt-5.6-sol", 1},
		"gemini 3":         {modeltest.Gemini, "gemini-3-pro", 0},
		"qwen on vllm":     {modeltest.QwenVLLM, "Qwen/Qwen3.5-27B", 0},
		"another on vllm":  {modeltest.QwenVLLM, "house/unheard-of", 1},
		"llama.cpp":        {modeltest.LlamaCpp, "local", 1},
		"mistral":          {modeltest.Mistral, "mistral-large-latest", 0},
		"unnamed mistral":  {modeltest.Mistral, "le-grand", 1},
		"kimi":             {modeltest.ReasoningWanted, "kimi-k2-thinking", 0},
		"deepseek":         {modeltest.ReasoningWanted, "deepseek-chat", 0},
		"unnamed deepseek": {modeltest.ReasoningWanted, "house-model", 1},
		"openrouter":       {modeltest.OpenRouter, "vendor/model", 0},
	} {
		t.Run(name, func(t *testing.T) {
			server := test.server(t, replies()...)
			conversation(t, client(t, server), test.model)
			assert.Equal(t, test.refused, len(server.Refused()))
		})
	}
}

// A malformed call is sent back with arguments that servers accept. The other members of its message are sent back,
// too.
func TestMembersOfMalformedCallAreSentBack(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*modeltest.Server{
		`"text":"Let me see."`:      modeltest.OpenRouter(t, modeltest.MalformedCall("sizes"), modeltest.Text("orders")),
		`"reasoning":"Let me see."`: modeltest.QwenVLLM(t, modeltest.MalformedCall("sizes"), modeltest.Text("orders")),
	} {
		conversation(t, client(t, server), "unnamed/qwen3.5")
		if sent := server.Requests()[1].Body; !strings.Contains(sent, name) || !strings.Contains(sent, `"arguments":"{}"`) {
			t.Errorf("%s is not in %s", name, sent)
		}
	}
	server := modeltest.OpenAI(t, modeltest.MalformedCall("sizes"), modeltest.Text("orders"))
	conversation(t, client(t, server), "gpt-6-sol")
	if items := server.Requests()[1].Items(); strings.Contains(strings.Join(items, ""), `{\"limit\"`) {
		t.Errorf("malformed arguments were sent back: %q", items)
	}
}

func TestCorrectionIsSystemMessageUntilRejected(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, replies()...)
	conversation(t, client(t, server), "gpt-4o")
	sent := server.Requests()[1].Messages
	if last := sent[len(sent)-1]; last.Role != "system" || !strings.HasPrefix(last.Content, "Tool call failed") {
		t.Errorf("the correction was sent as %+v", last)
	}
	server = modeltest.Mistral(t, replies()...)
	conversation(t, client(t, server), "mistral-small")
	sent = server.Requests()[1].Messages
	want := "{\"error\":\"INVALID_PARAMS\"}\n\nTool call failed: INVALID_PARAMS. Schema: {}"
	if last := sent[len(sent)-1]; last.Role != "tool" || last.Content != want || len(sent) != 4 {
		t.Errorf("the correction was sent as %+v in %d messages", last, len(sent))
	}
}

// A message of the user stays without an answer if its turn failed.
func TestMessagesOfOneRoleAreJoinedAfterARefusal(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Refusal(400, "invalid_request_error", "",
		"Conversation roles must alternate user/assistant/user/assistant", 0), modeltest.Text("ok"))
	complete(t, client(t, server), models.Request{Messages: []models.Message{
		{Role: models.RoleUser, Content: "Hello?"}, {Role: models.RoleUser, Content: "Still there?"},
	}})
	sent := server.Requests()[1].Messages
	require.Equal(t, 1, len(sent), sent)
	assert.Equal(t, "Hello?\n\nStill there?", sent[0].Content)
}

func TestResponsesAPIIsLearnedPerModel(t *testing.T) {
	t.Parallel()
	server := modeltest.OpenAI(t, append(replies(), modeltest.Text("again"), modeltest.Text("other"))...)
	c := client(t, server)
	conversation(t, c, "gpt-5.6-sol")
	req := ask("go")
	req.Model, req.Tools = "gpt-5.6-sol", []models.Tool{{Name: "f"}}
	complete(t, c, req)
	req.Model = "gpt-4o"
	complete(t, c, req)
	var paths []string
	for _, r := range server.Requests() {
		paths = append(paths, r.Path)
	}
	want := []string{"/v1/responses", "/v1/responses", "/v1/responses", "/v1/chat/completions"}
	if !slices.Equal(paths, want) || len(server.Refused()) != 1 {
		t.Errorf("paths %v after %d refusals", paths, len(server.Refused()))
	}
}

func TestResponseItemsAreSentBackUnchanged(t *testing.T) {
	t.Parallel()
	server := modeltest.OpenAI(t, append(replies(), modeltest.Text("x"), modeltest.Text("x"))...)
	c := client(t, server, func(c *models.Config) { c.API = models.APIResponses })
	req := ask("go")
	req.Tools = []models.Tool{{Name: "sizes"}}
	first := complete(t, c, req).Message
	require.Truef(t, first.Opaque != nil && len(first.Opaque.Items) == 2, "opaque = %+v", first.Opaque)
	result := models.Message{Role: models.RoleTool, ToolCallID: first.ToolCalls[0].ID, Content: "3"}
	req.Messages = append(req.Messages, first, result)
	complete(t, c, req)
	items := server.Requests()[1].Items()
	assert.Truef(t, slices.Equal(items[1:3], first.Opaque.Items) &&
		strings.Contains(items[1], `"encrypted_content": "gAAAA<0>&"`), "sent back %q, want %q", items[1:3],
		first.Opaque.Items)
	edited := first
	edited.Content = "I was cut."
	req.Messages[1] = edited
	complete(t, c, req)
	other := req
	other.Model, other.Messages = "gpt-6-luna", slices.Clone(req.Messages)
	other.Messages[1] = first
	complete(t, c, other)
	for n, r := range server.Requests()[2:] {
		assert.Truef(t, !strings.Contains(r.Body, "gAAAA"),
			"request %d has the items of an edited message, or of another model: %s", n, r.Body)
	}
}

// responseEvents returns a stream of the Responses API with these events.
func responseEvents(events ...string) modeltest.Reply {
	var out strings.Builder
	for _, e := range events {
		out.WriteString("event: x\ndata: " + e + "\n\n")
	}
	return modeltest.Raw(http.StatusOK, "text/event-stream", out.String())
}

func TestResponseEndEvents(t *testing.T) {
	t.Parallel()
	delta := `{"type":"response.output_text.delta","delta":"half"}`
	server := modeltest.New(
		t,
		responseEvents(delta, "[DONE]"),
		modeltest.Text("whole"),
		modeltest.Text("half").WithFinish(models.FinishLength),
		modeltest.Text("").WithFinish(models.FinishContentFilter),
		responseEvents(
			delta,
			`{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error","message":"oh"}}}`,
		),
		modeltest.Text("at last"),
		responseEvents(`{"type":"error","code":"invalid_request_error","message":"no good"}`),
		responseEvents(`{"type":"response.mcp_call_arguments.delta","delta":{"a":1}}`, delta,
			`{"type":"response.completed","response":{"status":"completed"}}`),
	)
	c := client(t, server, func(c *models.Config) { c.API = models.APIResponses })
	if resp := complete(t, c, ask("hi")); resp.Message.Content != "whole" || resp.Attempts != 2 {
		t.Errorf("a stream that was cut gave %q after %d attempts", resp.Message.Content, resp.Attempts)
	}
	if resp := complete(t, c, ask("hi")); resp.FinishReason != models.FinishLength || resp.Message.Opaque != nil {
		t.Errorf("max_output_tokens gave %q", resp.FinishReason)
	}
	assert.Equal(t, models.FinishContentFilter, complete(t, c, ask("hi")).FinishReason)
	if resp := complete(t, c, ask("hi")); resp.Message.Content != "at last" || resp.Attempts != 2 {
		t.Errorf("a failed response gave %q after %d attempts", resp.Message.Content, resp.Attempts)
	}
	_, err := c.Complete(t.Context(), ask("hi"))
	failure, ok := errors.AsType[*models.Error](err)
	assert.Truef(t, ok && !failure.Retryable && failure.Message == "no good", "err = %v", err)
	assert.Equal(t, "half", complete(t, c, ask("hi")).Message.Content, "beside the delta of another item")
}

func TestMissingResponsesRouteFallsBackToChat(t *testing.T) {
	t.Parallel()
	server := modeltest.NoResponses(
		t,
		modeltest.Refusal(400, "x", "", "use /v1/responses instead", 0),
		modeltest.Text("no"),
	)
	_, err := client(t, server, func(c *models.Config) { c.API = models.APIResponses }).Complete(t.Context(), ask("hi"))
	assert.Truef(t, err != nil && len(server.Requests()) == 0, "a protocol that was set was given up: %v", err)
	_, err = client(t, server).Complete(t.Context(), ask("hi"))
	if err == nil || len(server.Requests()) != 1 || len(server.Refused()) != 2 {
		t.Errorf("err = %v after %d and %d requests", err, len(server.Requests()), len(server.Refused()))
	}
}

func TestErrorInListKeepsCodeAndText(t *testing.T) {
	t.Parallel()
	const list = `[{"error":{"code":400,"message":"bad schema","status":"INVALID_ARGUMENT"}}]`
	for name, reply := range map[string]modeltest.Reply{
		"refusal":  modeltest.Raw(400, "application/json", list),
		"document": modeltest.Raw(200, "application/json", list),
		"event":    modeltest.Raw(200, "text/event-stream", "data: "+list+"\n\n"),
		"lines":    modeltest.Raw(200, "text/event-stream", ": wait\n\n"+strings.ReplaceAll(list, ",", ",\n")+"\n"),
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, reply)
			_, err := client(t, server).Complete(t.Context(), ask("hi"))
			failure, ok := errors.AsType[*models.Error](err)
			assert.Truef(t, ok && failure.Code == "INVALID_ARGUMENT" && failure.Message == "bad schema" && !failure.Retryable,
				"err = %v (%+v)", err, failure)
		})
	}
}

func TestReasoningKeepsItsFieldName(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*modeltest.Server{
		`"reasoning":"Let me see."`:                    modeltest.QwenVLLM(t, replies()...),
		`"text":"Let me see."`:                         modeltest.OpenRouter(t, replies()...),
		`"extra_content":` + modeltest.GeminiSignature: modeltest.Gemini(t, replies()...),
	} {
		c := client(t, server)
		last := conversation(t, c, "unnamed")
		sent := server.Requests()[1].Body
		assert.Truef(t, strings.Contains(sent, name) && !strings.Contains(sent, `"reasoning_content"`),
			"%s is not in %s", name, sent)
		assert.Truef(t, !strings.Contains(name, "see") || last.Message.Reasoning == "Let me see.",
			"reasoning = %q", last.Message.Reasoning)
	}
}

func TestThinkBlockIsNotShown(t *testing.T) {
	t.Parallel()
	for _, chunks := range [][]string{
		{"<think>a</think>b"}, {"\n<th", "ink>a", "</thi", "nk>\n", "\nb"}, {"<think>", "a<", "/think>", "b"},
	} {
		var body strings.Builder
		for _, text := range chunks {
			body.WriteString(`data: {"choices":[{"delta":{"content":"` + strings.ReplaceAll(text, "\n", `\n`) + `"}}]}` + "\n\n")
		}
		server := modeltest.New(t, modeltest.Raw(200, "text/event-stream", body.String()+"data: [DONE]\n\n"))
		req := ask("hi")
		shown := ""
		req.OnDelta = func(text string) { shown += text }
		got := complete(t, client(t, server), req).Message
		assert.Truef(t, got.Content == "b" && shown == "b" && got.Reasoning == "a",
			"%q gave %q, shown %q, thought %q", chunks, got.Content, shown, got.Reasoning)
	}
	server := modeltest.New(t, modeltest.Text("<thin"), modeltest.Text("a <think> b"))
	for _, want := range []string{"<thin", "a <think> b"} {
		assert.Equal(t, want, complete(t, client(t, server), ask("hi")).Message.Content)
	}
}

func TestAzureClassicRequest(t *testing.T) {
	t.Parallel()
	server := modeltest.AzureClassic(t, modeltest.Text("ok"),
		modeltest.Refusal(400, "invalid_request_error", "content_filter", "The response was filtered.", 0))
	c := client(t, server, func(c *models.Config) {
		c.APIKey, c.Headers = "", map[string]string{"api-key": "azure-secret"}
		c.Query = map[string][]string{"api-version": {"2024-10-21"}}
	})
	resp := complete(t, c, ask("hi"))
	assert.Truef(t, resp.Message.Content == "ok", "answer = %+v", resp.Message)
	_, err := c.Complete(t.Context(), ask("hi"))
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "content_filter") && len(server.Requests()) == 2,
		"err = %v after %d requests", err, len(server.Requests()))
}

// Gemini counts its thoughts neither in the prompt nor in the completion, but bills them like the completion.
func TestReasoningOnlyInTotalIsPriced(t *testing.T) {
	t.Parallel()
	const usage = `{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":20,` +
		`"completion_tokens":10,"total_tokens":430}}`
	server := modeltest.New(t, modeltest.Raw(200, "application/json", usage))
	req := ask("hi")
	req.Model = "gemini-2.5-flash"
	resp := complete(t, client(t, server), req)
	assert.Equal(t, models.Usage{PromptTokens: 20, CompletionTokens: 410, TotalTokens: 430}, resp.Usage)
	assert.Equal(t, (20*0.3+410*2.5)/1e6, resp.CostUSD)
}

// A server without counts may send the largest number, and another one counts with a point.
func TestOddUsageDoesNotFailAnswer(t *testing.T) {
	t.Parallel()
	answer := func(usage string) modeltest.Reply {
		return modeltest.Raw(200, "application/json",
			`{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}],"usage":{`+usage+`}}`)
	}
	server := modeltest.New(t, answer(`"prompt_tokens":18446744073709551615,"completion_tokens":1,"total_tokens":0`),
		answer(`"prompt_tokens":20.0,"completion_tokens":1e1,"total_tokens":30`), answer(`"prompt_tokens":"many"`))
	c := client(t, server)
	for _, want := range []models.Usage{{}, {PromptTokens: 20, CompletionTokens: 10, TotalTokens: 30}, {}} {
		resp := complete(t, c, ask("hi"))
		assert.Truef(t, resp.Attempts == 1 && (resp.Usage == want || want == models.Usage{} && resp.Usage.Estimated),
			"%d attempts, usage %+v", resp.Attempts, resp.Usage)
	}
}

func TestCacheWritesArePriced(t *testing.T) {
	t.Parallel()
	const usage = `{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000,` +
		`"completion_tokens":10,"total_tokens":1010,"prompt_tokens_details":{` +
		`"cached_tokens":200,"cache_write_tokens":700}}}`
	server := modeltest.New(t, modeltest.Raw(200, "application/json", usage))
	req := ask("hi")
	req.Model = "gpt-5.6-sol"
	resp := complete(t, client(t, server), req)
	want := (100*4 + 200*0.40 + 700*5 + 10*20.0) / 1e6
	assert.Equal(t, 700, resp.Usage.CacheWriteTokens, resp.Usage)
	assert.Equal(t, want, resp.CostUSD, resp.Usage)
	long, _ := models.DefaultPrices().Of("gpt-6.1-sol")
	assert.Equal(t, (300_000*4+1000*15.0)/1e6, long.Cost(models.Usage{PromptTokens: 300_000, CompletionTokens: 1000}))
}

func TestImagesOrPlaceholdersAreSent(t *testing.T) {
	t.Parallel()
	req := models.Request{
		Messages: []models.Message{{Role: models.RoleUser, Content: "What is it?", Parts: []models.Part{
			{Image: &models.Image{URL: "data:image/png;base64,AAAA"}},
		}}},
	}
	server := modeltest.New(t, modeltest.Text("a"), modeltest.Text("b"), modeltest.Text("c"),
		modeltest.Refusal(400, "x", "", "image input is not supported", 0), modeltest.Text("d"))
	req.Model = "gpt-4o"
	complete(t, client(t, server), req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	req.Model = "deepseek-chat"
	complete(t, client(t, server), req)
	req.Model = "unheard-of"
	complete(t, client(t, server), req)
	for n, want := range []string{
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`,
		`{"type":"input_image","image_url":"data:image/png;base64,AAAA","detail":"auto"}`,
		"An image was left out", "image_url", "An image was left out",
	} {
		body := server.Requests()[n].Body
		assert.Truef(t, strings.Contains(body, want), "request %d has no %s: %s", n, want, body)
	}
}

func TestSchemaIsSentUntilRejected(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("{}"), modeltest.Text("{}"),
		modeltest.Refusal(400, "x", "", "response_format is not supported", 0), modeltest.Text("{}"))
	req := ask("hi")
	req.Schema, req.Effort = &models.Schema{Name: "plan", Schema: []byte(`{"type":"object"}`)}, "low"
	c := client(t, server)
	complete(t, c, req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	complete(t, c, req)
	for n, want := range []string{
		`"response_format":{"json_schema":{"name":"plan","schema":{"type":"object"},"strict":false}`,
		`"text":{"format":{"type":"json_schema","name":"plan","schema":{"type":"object"},"strict":false}}`,
	} {
		body := server.Requests()[n].Body
		assert.Truef(t, strings.Contains(body, want), "request %d has no %s: %s", n, want, body)
	}
	assert.True(t, !strings.Contains(server.Requests()[3].Body, "response_format"), "a rejected member was sent again")
}

func TestExtraOverridesBody(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("ok"))
	complete(t, client(t, server, func(c *models.Config) {
		c.Extra = map[string]json.RawMessage{
			"top_k": json.RawMessage("7"), "stream_options": json.RawMessage("null"), "model": json.RawMessage(`"other"`),
		}
	}), ask("hi"))
	body := server.Requests()[0].Body
	assert.Truef(t, strings.Contains(body, `"top_k":7`) && !strings.Contains(body, "stream_options") &&
		strings.Contains(body, `"other"`), "sent %s", body)
}

// If a server rejects a member, the client omits it from the same request, and from later ones.
func TestRejectedMemberIsOmittedAfterwards(t *testing.T) {
	t.Parallel()
	half := float32(0.5)
	refuse := func(message string) modeltest.Reply { return modeltest.Refusal(400, "x", "", message, 0) }
	responses := func(c *models.Config) { c.API = models.APIResponses }
	thinking := []models.Message{
		{Role: models.RoleUser, Content: "go"},
		{Role: models.RoleAssistant, Reasoning: "hm", ToolCalls: []models.ToolCall{{ID: "c", Name: "f", Arguments: "{}"}}},
		{Role: models.RoleTool, ToolCallID: "c", Content: "3"},
	}
	for name, test := range map[string]struct {
		refusal modeltest.Reply
		member  string // that is refused
		learned string
		request models.Request
		change  func(*models.Config)
	}{
		"usage option": {
			refuse("Unknown parameter: stream_options"), `"stream_options"`, "without stream_options", ask("hi"),
			nil,
		},
		"usage option elsewhere": {
			modeltest.Raw(422, "application/json",
				`{"detail":[{"loc":["body","stream_options"],"msg":"extra fields not permitted"}]}`),
			`"stream_options"`, "without stream_options", ask("hi"), nil,
		},
		"limit": {
			refuse("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."), `"max_tokens":5`,
			"with max_completion_tokens",
			models.Request{Messages: ask("hi").Messages, MaxTokens: 5},
			nil,
		},
		"include": {refuse("include is not supported"), `"include"`, "without include", ask("hi"), responses},
		"store":   {refuse("Unknown parameter: 'store'"), `"store"`, "without store", ask("hi"), responses},
		"temperature": {
			refuse("temperature is not supported"), `"temperature"`, "without temperature",
			models.Request{Messages: ask("hi").Messages, Temperature: &half},
			nil,
		},
		"effort": {
			refuse("Unknown parameter: reasoning_effort"), `"reasoning_effort"`, "without reasoning effort",
			models.Request{Messages: ask("hi").Messages, Effort: "low"},
			nil,
		},
		"effort responses": {
			refuse("Unknown parameter: reasoning.effort"), `"effort"`, "without reasoning effort",
			models.Request{Messages: ask("hi").Messages, Effort: "low"},
			responses,
		},
		"reasoning": {
			refuse("reasoning_content is not supported"), `"reasoning_content"`, "without reasoning",
			models.Request{Model: "kimi-k2", Messages: thinking},
			nil,
		},
		"streaming": {refuse("stream is not supported"), `"stream":true`, "without streaming", ask("hi"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, test.refusal, modeltest.Text("a"), modeltest.Text("b"))
			c := client(t, server, func(c *models.Config) {
				if test.change != nil {
					test.change(c)
				}
			})
			var shown string
			test.request.OnDelta = func(text string) { shown += text }
			for range 2 {
				assert.True(t, complete(t, c, test.request).Usage.TotalTokens > 0)
			}
			assert.Equal(t, "ab", shown)
			for n, r := range server.Requests() {
				assert.Equal(t, n == 0, strings.Contains(r.Body, test.member), n, test.member, r.Body)
			}
			model := test.request.Model
			if model == "" {
				model = c.Model()
			}
			got := c.RejectedFeatures(model)
			assert.Truef(t, slices.Equal(got, []string{test.learned}), "learned %q, want %q", got, test.learned)
			got = c.RejectedFeatures("another")
			assert.Truef(t, got == nil, "learned %q of another model", got)
		})
	}
}

func TestRejectedOpaqueMembersAreNotSentBack(t *testing.T) {
	t.Parallel()
	const answer = `{"choices":[{"message":{"role":"assistant","content":"hi","reasoning_details":[{"type":"x","text":"t"}]},` +
		`"finish_reason":"stop"}]}`
	server := modeltest.New(t, modeltest.Raw(200, "application/json", answer),
		modeltest.Refusal(400, "x", "", "messages[1].reasoning_details: Extra inputs are not permitted", 0),
		modeltest.Text("ok"))
	c := client(t, server)
	req := ask("hi")
	req.Messages = append(req.Messages, complete(t, c, req).Message,
		models.Message{Role: models.RoleUser, Content: "and?"})
	complete(t, c, req)
	for n, want := range []bool{false, true, false} {
		assert.Equal(t, want, strings.Contains(server.Requests()[n].Body, "reasoning_details"), n)
	}
}

// asOpenAI connects to the server under the name of OpenAI's. For that name the client tries the Responses API first.
func asOpenAI(t *testing.T, server *modeltest.Server) func(*models.Config) {
	t.Helper()
	address := strings.TrimSuffix(strings.TrimPrefix(server.URL(), "http://"), "/v1")
	transport := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return func(c *models.Config) {
		c.BaseURL, c.Model, c.HTTPClient = "http://eu.api.openai.com/v1", "gpt-5.4", &http.Client{Transport: transport}
	}
}

func TestMissingRouteIsLearnedAndMissingModelIsNot(t *testing.T) {
	t.Parallel()
	server := modeltest.NoResponses(t, modeltest.Text("a"), modeltest.Text("b"))
	c := client(t, server, asOpenAI(t, server))
	complete(t, c, ask("hi"))
	complete(t, c, ask("hi"))
	if refused := len(server.Refused()); refused != 1 || c.API("gpt-5.4") != models.APIChat {
		t.Errorf("%d requests were refused, the protocol is %s", refused, c.API("gpt-5.4"))
	}
	server = modeltest.New(t, modeltest.Refusal(404, "x", "model_not_found", "The model `gpt-5.4` does not exist", 0))
	c = client(t, server, asOpenAI(t, server))
	if _, err := c.Complete(t.Context(), ask("hi")); err == nil || c.API("gpt-5.4") != models.APIResponses {
		t.Errorf("err = %v, the protocol is %s", err, c.API("gpt-5.4"))
	}
}
