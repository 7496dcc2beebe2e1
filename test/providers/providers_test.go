package providers_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// azure sets the options of Azure's classic API.
func azure(c *models.Config) {
	c.APIKey, c.Headers = "", map[string]string{"api-key": "azure-secret"}
	c.Query = map[string][]string{"api-version": {"2024-10-21"}}
}

// Every surface finishes at every provider. A provider rejects a part of the protocol at most once.
func TestEverySurfaceWithEveryProvider(t *testing.T) {
	type provider func(testing.TB, ...modeltest.Reply) *modeltest.Server
	for name, test := range map[string]struct {
		server  provider
		model   string
		change  func(*models.Config)
		learned []string // the requests that the provider rejects
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
			w := newTestEnv(t, test.server(t), test.model, test.change)
			w.server.Handle(w.modelReply)
			w.runHeartbeat(t)
			w.runSession(t)
			w.runChat(t)
			got := w.client.RejectedFeatures(test.model)
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

// runHeartbeat runs a heartbeat that completes the steps of an objective.
func (w *testEnv) runHeartbeat(t *testing.T) {
	t.Helper()
	x, err := w.engine.RunSync(t.Context(), heartbeat.Spec("nora"))
	require.NoError(t, err)
	require.Equal(t, executions.Completed, x.Status, x.ErrorMessage)
	assert.Equal(t, "completed", pgtest.Value[string](t, w.pool,
		`select status from agent_objectives where name = 'tidy'`), w.failures(t))
}

// sessionTurns is enough for a summary of the first ones.
const sessionTurns = 4

// runSession runs an admin's turns until the first are summarised and a request has the summary.
func (w *testEnv) runSession(t *testing.T) {
	t.Helper()
	s, err := w.operate.Session("", true)
	require.NoError(t, err)
	before := w.lookCalls.Load()
	for n := range sessionTurns {
		done, err := s.Turn(t.Context(), fmt.Sprintf("Turn %d. Count. %s", n, strings.Repeat("word ", 20)), false,
			func(operate.Event) {})
		if err != nil {
			t.Fatalf("turn %d: %v; failed calls: %s", n, err, w.failures(t))
		}
		require.Equal(t, string(reason.Answered), done.Ended, n, w.failures(t))
	}
	require.NoError(t, s.Close(context.WithoutCancel(t.Context())))
	assert.Equal(t, sessionTurns, w.lookCalls.Load()-before)
	sent := slices.ContainsFunc(w.server.Requests(), func(r modeltest.Request) bool {
		return !strings.Contains(r.Messages[0].Content, "You keep the summary") && strings.Contains(r.Body, sessionSummary)
	})
	if !sent {
		t.Errorf("no turn was given the summary; failed calls: %s", w.failures(t))
	}
}

// runChat sends a visitor's question. The model's first arguments are invalid JSON.
func (w *testEnv) runChat(t *testing.T) {
	t.Helper()
	config := openai.DefaultConfig("visitor")
	config.BaseURL = w.chat + "/v1"
	before := w.lookCalls.Load()
	got, err := openai.NewClientWithConfig(config).CreateChatCompletion(t.Context(), openai.ChatCompletionRequest{
		Model: "nora", Messages: []openai.ChatCompletionMessage{{Role: "user", Content: "Count the orders."}},
	})
	if err != nil {
		t.Fatalf("chat: %v; failed calls: %s", err, w.failures(t))
	}
	if text := got.Choices[0].Message.Content; text != "It is 42." || w.lookCalls.Load() != before+1 {
		t.Errorf("the visitor reads %q after %d calls; failed calls: %s", text, w.lookCalls.Load()-before, w.failures(t))
	}
	pgtest.Equal(t, w.pool, "1", `select count(*)::text from agent_activity where skill_name = 'look'
		and surface = 'chat' and status = 'error'`)
}

// failures returns the failed model calls of the log.
func (w *testEnv) failures(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `select coalesce(string_agg(error_message, '; '), 'none') from agent_activity
		where skill_name = 'model_call' and status = 'error'`)
}

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// testEnv is one process with all surfaces, on its own database, and a provider's server.
type testEnv struct {
	pool      *pgxpool.Pool
	server    *modeltest.Server
	client    *models.Client
	engine    *executions.Engine
	operate   *operate.Operate
	chat      string // its URL
	steps     []string
	lookCalls atomic.Int32 // calls of the skill look
}

// newTestEnv starts the process. change sets the options of the provider's client.
func newTestEnv(t *testing.T, server *modeltest.Server, model string, change func(*models.Config)) *testEnv {
	t.Helper()
	w := &testEnv{pool: pgtest.DB(t), server: server}
	w.client = newClient(t, server, model, change)
	loop := w.newLoop(t)
	keeper := lanes.NewKeeper(w.pool, lanes.Options{})
	var err error
	w.engine, err = executions.New(w.pool, executions.Options{
		Keeper: keeper, SweepEvery: 100 * time.Millisecond, LeaseTTL: 20 * time.Second, StopTimeout: 2 * time.Second,
	})
	require.NoError(t, err)
	quiet := slog.New(slog.DiscardHandler)
	beat := &heartbeat.Heartbeat{Pool: w.pool, Loop: loop, Heal: selfheal.Default(), Logger: quiet}
	require.NoError(t, beat.Register(w.engine))
	w.operate, err = operate.New(operate.Options{
		Pool: w.pool, Engine: w.engine, Keeper: keeper, Loop: loop, Poll: 20 * time.Millisecond, History: 200,
	})
	require.NoError(t, err)
	visitors := &chat.Chat{
		Pool: w.pool, Engine: w.engine, Loop: loop, Logger: quiet, Rate: -1,
		Agents: &agents.Directory{Settings: agents.Settings{Name: "nora"}},
	}
	require.NoError(t, visitors.Register(w.engine))
	w.chat = testkit.Serve(t, visitors.CompletionsHandler())
	testkit.Run(t, keeper.Run, w.engine.Run, visitors.Run)
	w.objective(t)
	return w
}

func newClient(t *testing.T, server *modeltest.Server, model string, change func(*models.Config)) *models.Client {
	t.Helper()
	config := models.Config{
		BaseURL: server.URL(), APIKey: "key-of-this-test", Model: model, Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 1},
	}
	if change != nil {
		change(&config)
	}
	client, err := models.New(config)
	require.NoError(t, err)
	return client
}

// newLoop offers one skill, look, with a schema for its arguments.
func (w *testEnv) newLoop(t *testing.T) *reason.Loop {
	t.Helper()
	look := func(context.Context, skills.Call) (any, error) {
		w.lookCalls.Add(1)
		return map[string]int{"rows": 42}, nil
	}
	registry, err := skills.New(skills.Options{Builtins: map[string]skills.Builtin{"look": look}, Pool: w.pool})
	require.NoError(t, err)
	_, err = skills.Put(t.Context(), w.pool, skills.Definition{
		Name: "look", Handler: "builtin:look", Description: "Count rows.", Scope: skills.ScopeBoth, Idempotent: true,
		Parameters: map[string]any{
			"type": "object", "required": []string{"limit"}, "additionalProperties": false,
			"properties": map[string]any{"limit": map[string]any{"type": "integer"}},
		},
	}, skills.SourceWorkspace)
	require.NoError(t, err)
	return &reason.Loop{Pool: w.pool, Model: w.client, Skills: registry, Logger: slog.New(slog.DiscardHandler)}
}

// objective declares an objective with two steps.
func (w *testEnv) objective(t *testing.T) {
	t.Helper()
	_, err := objectives.Put(t.Context(), w.pool, objectives.Definition{
		Name: "tidy", Goal: "Keep the tables small.", Steps: []string{"look", "judge"},
	}, objectives.SourceWorkspace)
	require.NoError(t, err)
	o, err := objectives.Get(t.Context(), w.pool, "tidy")
	require.NoError(t, err)
	all, err := objectives.Steps(t.Context(), w.pool, o.ID)
	require.NoError(t, err)
	for _, s := range all {
		w.steps = append(w.steps, s.ID)
	}
}

// modelReply is the model. If asked to count, it first calls look with wrong arguments, then corrects itself.
func (w *testEnv) modelReply(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	var prompt string // the prompt of this turn
	answers := 0      // given since
	for _, m := range req.Messages {
		switch m.Role {
		case openai.ChatMessageRoleUser:
			prompt, answers = m.Content, 0
		case openai.ChatMessageRoleAssistant:
			answers++
		}
	}
	last := req.Messages[len(req.Messages)-1].Content
	complete := func(step int) modeltest.Reply {
		return modeltest.ToolCall("look", `{"limit":3}`).
			AndCall("complete_step", fmt.Sprintf(`{"step_id":%q,"result":"42 rows"}`, w.steps[step]))
	}
	switch {
	case strings.Contains(req.Messages[0].Content, "You keep the summary"):
		return modeltest.Text(sessionSummary)
	case strings.Contains(last, "INVALID_PARAMS"):
		return modeltest.ToolCall("look", `{"limit":3}`)
	case strings.Contains(prompt, "Objective tidy") && answers < len(w.steps):
		return complete(answers)
	case strings.Contains(prompt, "Count") && answers == 0:
		return modeltest.MalformedCall("look")
	case strings.Contains(prompt, "Turn"):
		return modeltest.Text(strings.Repeat("word ", 60))
	}
	return modeltest.Text("It is 42.")
}

// sessionSummary is the model's summary of the session.
const sessionSummary = "The admin counts."
