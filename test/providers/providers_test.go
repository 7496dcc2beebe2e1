package providers_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// azure is how Azure's classic API is spoken to.
func azure(c *models.Config) {
	c.APIKey, c.Headers = "", map[string]string{"api-key": "azure-secret"}
	c.Query = map[string][]string{"api-version": {"2024-10-21"}}
}

// Every surface finishes at every provider, and a provider refuses a part of the protocol once at most.
func TestEverySurfaceFinishesAtEveryProvider(t *testing.T) {
	type provider func(testing.TB, ...modeltest.Reply) *modeltest.Server
	for name, test := range map[string]struct {
		server  provider
		model   string
		change  func(*models.Config)
		learned []string // what the provider refuses
	}{
		"gpt-6-sol":        {modeltest.OpenAI, "gpt-6-sol", nil, []string{"over the Responses API"}},
		"gpt-5.6-sol":      {modeltest.OpenAI, "gpt-5.6-sol", nil, []string{"over the Responses API"}},
		"gpt-4o":           {modeltest.OpenAI, "gpt-4o", nil, nil},
		"gemini 3":         {modeltest.Gemini, "gemini-3-pro", nil, nil},
		"qwen vllm":        {modeltest.QwenVLLM, "Qwen/Qwen3.5-27B", nil, nil},
		"unknown vllm":     {modeltest.QwenVLLM, "house/own", nil, []string{"one system message"}},
		"qwen llama.cpp":   {modeltest.LlamaCpp, "qwen3.6-27b-q4", nil, nil},
		"llama.cpp":        {modeltest.LlamaCpp, "local", nil, []string{"one system message"}},
		"mistral":          {modeltest.Mistral, "mistral-large-latest", nil, nil},
		"unknown mistral":  {modeltest.Mistral, "le-grand", nil, []string{"one system message"}},
		"kimi":             {modeltest.ReasoningWanted, "kimi-k2-thinking", nil, nil},
		"deepseek":         {modeltest.ReasoningWanted, "deepseek-chat", nil, nil},
		"unknown deepseek": {modeltest.ReasoningWanted, "le-penseur", nil, []string{"with reasoning_content"}},
		"azure":            {modeltest.AzureClassic, "gpt-4o", azure, nil},
		"openrouter":       {modeltest.OpenRouter, "vendor/model", nil, nil},
		"ollama":           {modeltest.NoResponses, "gpt-oss:20b", nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, test.server(t), test.model, test.change)
			w.server.Handle(w.answer)
			w.heartbeatFinishes(t)
			w.sessionFinishes(t)
			w.chatFinishes(t)
			got := w.client.Learned(test.model)
			assert.Truef(t, slices.Equal(got, test.learned), "learned %q, want %q", got, test.learned)
			assert.Equal(t, len(test.learned), len(w.server.Refused()), lastRefused(w.server))
		})
	}
}

func lastRefused(server *modeltest.Server) string {
	all := server.Refused()
	if len(all) == 0 {
		return "none"
	}
	return all[len(all)-1].Body
}

// heartbeatFinishes runs a heartbeat that takes the steps of an objective.
func (w *world) heartbeatFinishes(t *testing.T) {
	t.Helper()
	x, err := w.engine.RunSync(t.Context(), heartbeat.Spec("nora"))
	require.NoError(t, err)
	require.Equal(t, executions.Completed, x.Status, x.ErrorMessage)
	assert.Equal(t, "completed", pgtest.Value[string](t, w.pool,
		`select status from agent_objectives where name = 'tidy'`), w.failures(t))
}

// turns are enough for the first to be summarised.
const turns = 4

// sessionFinishes takes turns of an admin until the first are summarised and the summary was sent.
func (w *world) sessionFinishes(t *testing.T) {
	t.Helper()
	s, err := w.operate.Session("", true)
	require.NoError(t, err)
	before := w.looked.Load()
	for n := range turns {
		done, err := s.Turn(t.Context(), fmt.Sprintf("Turn %d. Count. %s", n, strings.Repeat("word ", 20)), false,
			func(operate.Event) {})
		if err != nil {
			t.Fatalf("turn %d: %v; failed calls: %s", n, err, w.failures(t))
		}
		require.Equal(t, string(reason.Answered), done.Ended, n, w.failures(t))
	}
	require.NoError(t, s.Close(context.WithoutCancel(t.Context())))
	assert.Equal(t, turns, w.looked.Load()-before)
	sent := slices.ContainsFunc(w.server.Requests(), func(r modeltest.Request) bool {
		return !strings.Contains(r.Messages[0].Content, "You keep the summary") && strings.Contains(r.Body, summary)
	})
	if !sent {
		t.Errorf("no turn was given the summary; failed calls: %s", w.failures(t))
	}
}

// chatFinishes asks as a visitor; the model's first arguments are no JSON.
func (w *world) chatFinishes(t *testing.T) {
	t.Helper()
	config := openai.DefaultConfig("visitor")
	config.BaseURL = w.chat + "/v1"
	before := w.looked.Load()
	got, err := openai.NewClientWithConfig(config).CreateChatCompletion(t.Context(), openai.ChatCompletionRequest{
		Model: "nora", Messages: []openai.ChatCompletionMessage{{Role: "user", Content: "Count the orders."}},
	})
	if err != nil {
		t.Fatalf("chat: %v; failed calls: %s", err, w.failures(t))
	}
	if text := got.Choices[0].Message.Content; text != "It is 42." || w.looked.Load() != before+1 {
		t.Errorf("the visitor reads %q after %d calls; failed calls: %s", text, w.looked.Load()-before, w.failures(t))
	}
	refused := pgtest.Value[string](t, w.pool, `select count(*)::text from agent_activity where skill_name = 'look'
		and surface = 'chat' and status = 'error'`)
	assert.Equal(t, "1", refused)
}

// failures are the failed model calls of the log.
func (w *world) failures(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `select coalesce(string_agg(error_message, '; '), 'none') from agent_activity
		where skill_name = 'model_call' and status = 'error'`)
}
