package models_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
)

// recorded is a step in the form of earlier versions: the JSON of go-openai's message.
const recorded = `{"role":"assistant","content":"I look <at> it.","reasoning_content":"Which table?","tool_calls":[
	{"id":"call_1","type":"function","function":{"name":"sizes","arguments":"{\"limit\":3}"}}]}`

func TestMessageOfEarlierVersionIsRead(t *testing.T) {
	t.Parallel()
	var m models.Message
	require.NoError(t, json.Unmarshal([]byte(recorded), &m))
	want := models.Message{
		Role: models.RoleAssistant, Content: "I look <at> it.", Reasoning: "Which table?",
		ToolCalls: []models.ToolCall{{ID: "call_1", Name: "sizes", Arguments: `{"limit":3}`}},
	}
	assert.NoDiff(t, want, m)
}

func TestEarlierVersionReadsMessage(t *testing.T) {
	t.Parallel()
	m := models.Message{
		Role: models.RoleAssistant, Content: "I look.", Reasoning: "Which?",
		Opaque:    &models.Opaque{Origin: "x", Items: []string{"{}"}},
		ToolCalls: []models.ToolCall{{ID: "call_1", Name: "sizes", Arguments: "{}", Opaque: &models.Opaque{Origin: "x"}}},
	}
	stored, err := json.Marshal(m)
	require.NoError(t, err)
	var old openai.ChatCompletionMessage
	require.NoError(t, json.Unmarshal(stored, &old), stored)
	assert.Truef(t, old.Content == m.Content && old.ReasoningContent == m.Reasoning && len(old.ToolCalls) == 1 &&
		old.ToolCalls[0].Function.Name == "sizes", "read %+v of %s", old, stored)
	var again models.Message
	if err := json.Unmarshal(stored, &again); err != nil || cmp.Diff(m, again) != "" {
		t.Errorf("read back (%v):\n%s", err, cmp.Diff(m, again))
	}
}

func TestMessagePartsKeepOrder(t *testing.T) {
	t.Parallel()
	m := models.Message{Role: models.RoleUser, Content: "Look:", Parts: []models.Part{
		{
			Image: &models.Image{URL: "data:image/png;base64,AAAA", Detail: "low"},
		}, {Text: "and"}, {Image: &models.Image{URL: "https://host/b.png"}},
	}}
	stored, err := json.Marshal(m)
	require.NoError(t, err)
	var again models.Message
	if err := json.Unmarshal(stored, &again); err != nil || cmp.Diff(m, again) != "" {
		t.Errorf("read back (%v):\n%s", err, cmp.Diff(m, again))
	}
	assert.Equal(t, "Look:\nand", m.Text())
}

func TestOpaqueFieldsAreHidden(t *testing.T) {
	t.Parallel()
	const secret = "gAAAAABencrypted"
	hidden := &models.Opaque{
		Origin:  "x",
		Members: map[string]string{"extra_content": `"` + secret + `"`},
		Items:   []string{secret},
	}
	m := models.Message{
		Role:      models.RoleAssistant,
		Content:   "yes",
		Opaque:    hidden,
		ToolCalls: []models.ToolCall{{Name: "f", Opaque: hidden}},
	}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("said", "message", m, "opaque", hidden)
	stored, err := json.Marshal(m)
	require.Truef(t, err == nil && strings.Contains(string(stored), secret), "a step must keep it: %s (%v)", stored, err)
	shown, err := json.Marshal(m.Shown())
	require.NoError(t, err)
	for name, text := range map[string]string{
		"shown": string(shown), "log": log.String(), "printed": fmt.Sprintf("%v %+v", m, m),
		"a step as it is shown": string(redact.JSON(json.RawMessage(stored), 0)),
	} {
		assert.Truef(t, !strings.Contains(text, secret), "%s: %s", name, text)
	}
	assert.True(t, m.ToolCalls[0].Opaque != nil, "showing a message took its members away")
}

func TestEmbeddingsKeepOrderOfTexts(t *testing.T) {
	t.Parallel()
	server := modeltest.NewEmbeddings(t, func(text string) []float32 { return []float32{float32(len(text)), 1} })
	client, err := models.New(models.Config{
		BaseURL: server.URL(), Model: "small",
		Headers: map[string]string{"Api-Key": "k"},
	})
	require.NoError(t, err)
	got, err := client.Embed(t.Context(), []string{"a", "bbb", "cc"})
	assert.Truef(t, err == nil && slices.EqualFunc(got, []float32{1, 3, 2},
		func(v []float32, first float32) bool { return v[0] == first }), "got %v, %v", got, err)
	sent := server.Requests()[0]
	assert.Truef(t, sent.Model == "small" && sent.Header.Get("Api-Key") == "k", "sent %+v", sent)
	server.Refuse(func([]string) int { return http.StatusUnauthorized })
	_, err = client.Embed(t.Context(), []string{"a"})
	modelErr, ok := errors.AsType[*models.Error](err)
	assert.Truef(t, ok && modelErr.Status == 401 && strings.Contains(err.Error(), "AGENT_EMBEDDING_KEY"), "got %v", err)
}

func TestWrongNumberOfEmbeddingsIsError(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"chat answer":  `{"choices":[]}`,
		"too few":      `{"data":[{"index":0,"embedding":[1]}]}`,
		"same index":   `{"data":[{"index":0,"embedding":[1]},{"index":0,"embedding":[1]}]}`,
		"wrong index":  `{"data":[{"index":0,"embedding":[1]},{"index":7,"embedding":[1]}]}`,
		"empty vector": `{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[]}]}`,
		"web page":     `<html>`,
		"other form":   `{"data":[{"index":0,"embedding":"AAAA"},{"index":1,"embedding":[1]}]}`,
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte(answer))
		}))
		client, err := models.New(models.Config{BaseURL: server.URL, Model: "small"})
		require.NoError(t, err)
		got, err := client.Embed(t.Context(), []string{"a", "b"})
		assert.Error(t, err, name, got)
		server.Close()
	}
}

// The base URL of embeddings is another setting than that of the chat model.
func TestWebPageErrorNamesSettingOfBaseURL(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte(`<html>`))
	}))
	defer server.Close()
	client, err := models.New(models.Config{
		BaseURL: server.URL, Model: "small", Settings: models.Settings{BaseURL: "AGENT_EMBEDDING_BASE_URL"},
	})
	require.NoError(t, err)
	_, err = client.Embed(t.Context(), []string{"a"})
	require.Error(t, err)
	assert.Contains(t, err.Error(), "AGENT_EMBEDDING_BASE_URL")
	assert.Truef(t, !strings.Contains(err.Error(), "OPENAI_BASE_URL"), "got %v", err)
}

func TestPriceOfLongestMatchingName(t *testing.T) {
	t.Parallel()
	prices := models.Prices{
		"gpt-4o": {Prompt: 1}, "gpt-4o-mini": {Prompt: 2}, "gpt-4o-2024-05-13": {Prompt: 3}, "llama*": {Prompt: 4},
		"llama3:70b*": {Prompt: 5},
		"meta/own":    {Prompt: 6},
	}
	for model, want := range map[string]float64{
		"gpt-4o": 1, "gpt-4o-2024-08-06": 1, "gpt-4o-latest": 1, "gpt-4o@20240806": 1, "openai/gpt-4o": 1,
		"gpt-4o-mini": 2, "gpt-4o-mini-2024-07-18": 2, "gpt-4o-2024-05-13": 3, "llama3.1": 4, "llama3:70b-q4": 5,
		"meta/own": 6, "meta/llama2": 4,
	} {
		got, found := prices.Of(model)
		assert.Truef(t, found && got.Prompt == want, "price of %s = %v (%v), want %v", model, got.Prompt, found, want)
	}
	for _, model := range []string{
		"", "gpt-4", "gpt-4o-audio", "gpt-4o-mini-audio", "gpt-4o-5", "gpt-4o-",
		"GPT-4O", "xllama", "/",
	} {
		got, found := prices.Of(model)
		assert.Truef(t, !found, "%s was priced at %v", model, got.Prompt)
	}
}

func TestInvalidPricesAreRejected(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		prices models.Prices
		want   string
	}{
		"negative":     {models.Prices{"m": {Prompt: 1, Completion: -2}}, "-2"},
		"no number":    {models.Prices{"m": {Cached: math.NaN()}}, `"m"`},
		"without end":  {models.Prices{"m": {Completion: math.Inf(1)}}, "+Inf"},
		"without name": {models.Prices{" ": {Prompt: 2}}, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := models.New(models.Config{Model: "m", Prices: test.prices})
			assert.Truef(t, err != nil && strings.Contains(err.Error(), test.want),
				"err = %v, want one about %s", err, test.want)
		})
	}
}

func TestWithCopiesPrices(t *testing.T) {
	t.Parallel()
	base := models.DefaultPrices()
	over := base.With(models.Prices{"gpt-4o": {Prompt: 99}, "mine": {Prompt: 1}})
	assert.Truef(t, over["gpt-4o"].Prompt == 99 && over["mine"].Prompt == 1 && over["o3"] == base["o3"],
		"merged = %v", over)
	assert.NoDiff(t, models.DefaultPrices(), base)
}

func TestRejectedSchemaBecomesInstructionOnce(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t,
		modeltest.Refusal(400, "invalid_request_error", "invalid_json_schema",
			"Invalid schema for response_format 'plan': additionalProperties is required", 0),
		modeltest.Text("{}"), modeltest.Text("{}"))
	c := client(t, server)
	req := ask("hi")
	req.Schema = &models.Schema{Name: "plan", Schema: []byte(`{"title":"refused"}`)}
	complete(t, c, req)
	req.Schema = &models.Schema{Name: "plan", Schema: []byte(`{"title":"taken"}`)}
	complete(t, c, req)
	sent := server.Requests()
	if body := sent[1].Body; strings.Contains(body, "response_format") || !strings.Contains(body, `\"refused\"`) {
		t.Errorf("after the refusal it sent %s", body)
	}
	if body := sent[2].Body; !strings.Contains(body, "response_format") || strings.Contains(body, "Form of the") {
		t.Errorf("another schema was sent as %s", body)
	}
}

func TestModelWithoutSchemasGetsInstruction(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("{}"), modeltest.Text("{}"))
	req := ask("hi")
	req.Model, req.Schema = "claude-sonnet-5", &models.Schema{Name: "plan", Schema: []byte(`{"title":"mine"}`)}
	complete(t, client(t, server), req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	for _, r := range server.Requests() {
		assert.Truef(t, !strings.Contains(r.Body, `"json_schema"`) && strings.Contains(r.Body, `\"mine\"`), "sent %s", r.Body)
	}
}

func TestAnyObjectSendsFormatAndInstruction(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("{}"), modeltest.Text("{}"))
	req := ask("hi")
	req.Schema = &models.Schema{}
	complete(t, client(t, server), req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	for _, r := range server.Requests() {
		assert.Truef(t, strings.Contains(r.Body, `{"type":"json_object"}`) && strings.Contains(r.Body, "one JSON object"),
			"sent %s", r.Body)
	}
}

func TestListPricesAreComplete(t *testing.T) {
	t.Parallel()
	list, date := models.ListPrices()
	_, err := time.Parse(time.DateOnly, date)
	assert.NoError(t, err, "the date", date)
	for model, p := range list {
		if model != "offline" && (p.Prompt <= 0 || p.Completion < p.Prompt || p.Cached <= 0 || p.Cached > p.Prompt ||
			p.Long.Over > 0 && (p.Long.Prompt < p.Prompt || p.Long.Completion < p.Completion || p.Long.Cached < p.Cached)) {
			t.Errorf("%s: %+v", model, p)
		}
	}
	p, ok := list.Of("anthropic/claude-sonnet-4-5-20250929")
	assert.Truef(t, ok && p.Completion == 15, "a dated version behind a provider: %+v %v", p, ok)
}
