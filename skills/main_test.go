package skills_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// put stores a skill and returns its row.
func put(t *testing.T, pool *pgxpool.Pool, d skills.Definition) skills.Skill {
	t.Helper()
	_, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
	s, err := skills.Get(t.Context(), pool, d.Name)
	require.NoError(t, err)
	return s
}

func registry(t *testing.T, o skills.Options) *skills.Registry {
	t.Helper()
	r, err := skills.New(o)
	require.NoError(t, err)
	return r
}

// row returns the row of a definition without a database.
func row(t *testing.T, d skills.Definition) skills.Skill {
	t.Helper()
	parameters := d.Parameters
	if parameters == nil {
		parameters = map[string]any{"type": "object"}
	}
	tool, err := json.Marshal(map[string]any{"name": d.Name, "parameters": parameters})
	require.NoError(t, err)
	config, err := json.Marshal(d.Config)
	require.NoError(t, err)
	return skills.Skill{Name: d.Name, ToolDefinition: tool, Handler: d.Handler, Config: config, TimeoutMS: 5000}
}

func object(properties map[string]any, required ...string) map[string]any {
	schema := map[string]any{"type": "object"}
	if properties != nil {
		schema["properties"] = properties
	}
	if len(required) > 0 {
		schema["required"] = required
	}
	return schema
}

func sorted(list []string) []string {
	slices.Sort(list)
	return list
}

func TestFlowSkill(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	r := registry(t, skills.Options{Flow: skills.Flows(pool, e, "pilot")})
	greet := put(t, pool, skills.Definition{
		Name: "greet", Handler: "flow:greet", Config: map[string]any{"wait": true}, Timeout: "60s",
		Parameters: object(map[string]any{"name": map[string]any{"type": "string"}}, "name"),
	})
	start := put(t, pool, skills.Definition{Name: "start", Handler: "flow:slow"})
	slow := put(t, pool, skills.Definition{
		Name: "slow", Handler: "flow:slow", Config: map[string]any{"wait": true},
		Timeout: "200ms",
	})
	assert.True(t, greet.Idempotent, "a flow: skill is not idempotent")
	enginetest.Register(t, e, "greet", func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
		var in struct{ Name string }
		if err := json.Unmarshal(raw, &in); err != nil {
			return executions.Result{}, err
		}
		switch in.Name {
		case "nobody":
			return executions.Result{}, errors.New("there is nobody")
		case "too much":
			return executions.Result{}, errors.New(strings.Repeat("too much ", 40_000))
		}
		return executions.Result{Summary: "hello " + in.Name, Value: len(in.Name)},
			executions.SetVariables(ctx, map[string]string{"greeted": in.Name})
	})
	enginetest.Register(t, e, "slow", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Wait(ctx, "never", executions.Event("never", 0))
		return executions.Result{}, err
	})
	enginetest.Register(t, e, "caller", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		v, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "greet"}, Idempotent: true},
			func(ctx context.Context, effect *executions.Effect) (json.RawMessage, error) {
				return r.Invoke(ctx, skills.Call{
					Skill: greet, Args: json.RawMessage(`{"name": "Ana"}`),
					IdempotencyKey: effect.Key,
				})
			})
		return executions.Result{Value: v}, err
	})
	testkit.Run(t, e.Run)
	call := func(s skills.Skill, args, key string) (got skills.FlowAnswer) {
		t.Helper()
		raw, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(args), IdempotencyKey: key})
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(raw, &got))
		return got
	}
	got := call(greet, `{"name": "Eva"}`, "k1")
	assert.Truef(t, got.Status == executions.Completed && got.Summary == "hello Eva" &&
		string(got.Variables) == `{"greeted":"Eva"}` && string(got.Result) == "3", "answer %+v", got)
	assert.Equal(t, got.ExecutionID, call(greet, `{"name": "Eva"}`, "k1").ExecutionID)
	got = call(greet, `{"name": "`+strings.Repeat("x", 300<<10)+`"}`, "")
	assert.Truef(t, got.Status == executions.Completed && got.Variables == nil &&
		strings.HasPrefix(got.Summary, "hello x") && len(got.Summary) < 100<<10,
		"large variables: %.100s, a summary of %d bytes", got.Variables, len(got.Summary))
	for name, want := range map[string]string{"nobody": "is failed: there is nobody", "too much": "is failed: too much "} {
		_, err := r.Invoke(t.Context(), skills.Call{Skill: greet, Args: json.RawMessage(`{"name": "` + name + `"}`)})
		failed, ok := errors.AsType[*skills.CallError](err)
		assert.Truef(t, ok && failed.Class == skills.ClassFlowFailed && strings.HasPrefix(failed.Message, "execution ") &&
			strings.Contains(failed.Message, " of flow greet "+want), "the failed execution: %.200v", err)
	}
	if got := call(start, `{}`, ""); got.Status != executions.Pending && got.Status != executions.Running ||
		got.ExecutionID == "" {
		t.Errorf("without wait: %+v", got)
	}
	pgtest.Eventually(t, func() bool { return call(slow, `{}`, "").Status == executions.Waiting },
		"after the timeout, the answer has the current status")
	// The execution of a call inside an execution is its child.
	parent, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "caller", Surface: trace.Webhook, ThreadID: "t1"})
	require.NoError(t, err)
	pgtest.Eventually(t, func() bool {
		x, err := executions.Get(t.Context(), pool, parent.ID)
		return err == nil && x.Status == executions.Completed && json.Unmarshal(x.Result, &got) == nil
	}, "the caller ends")
	child, err := executions.Get(t.Context(), pool, got.ExecutionID)
	assert.Truef(t, err == nil && child.TraceID == parent.TraceID && *child.ParentID == parent.ID &&
		*child.ThreadID == "t1" && child.Surface == "webhook", "the child is %+v, %v", child, err)
}

func TestUnknownFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	r := registry(t, skills.Options{Flow: skills.Flows(pool, e, "pilot")})
	_, err := r.Invoke(t.Context(), skills.Call{Skill: row(t, skills.Definition{Name: "a", Handler: "flow:nothing"})})
	got, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(t, ok && got.Class == skills.ClassHandler &&
		got.Message == `there is no flow "nothing"; see agent flows ls`, "got %v", err)
	assert.Error(t, registry(t, skills.Options{}).Runnable(
		row(t, skills.Definition{Name: "a", Handler: "flow:nothing"})), "a registry without flows can run one")
	external := row(t, skills.Definition{Name: "b", Handler: "flow:external:import"})
	_, err = r.Invoke(t.Context(), skills.Call{Skill: external})
	assert.NoError(t, err, "a flow of external workers")
}

// Without the id of the execution, a model would start another one.
func TestBrokenWaitNamesExecution(t *testing.T) {
	t.Parallel()
	pool, other := pgtest.DB(t), pgtest.DB(t)
	db := struct{ postgres.Beginner }{pool} // the engine starts in it, and waits in the other one
	r := registry(t, skills.Options{Flow: skills.Flows(db, enginetest.New(t, other), "pilot")})
	_, err := r.Invoke(t.Context(), skills.Call{Skill: row(t, skills.Definition{
		Name: "a", Handler: "flow:external:import", Config: map[string]any{"wait": true}, Timeout: "20s",
	})})
	assert.ErrorContains(t, err, "wait for execution "+pgtest.Value[string](t, pool, `select id::text from agent_executions`))
}
