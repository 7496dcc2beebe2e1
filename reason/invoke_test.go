package reason_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestFailingSkillIsToldToModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Too bad."))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		return nil, &skills.CallError{Class: "http_status", Message: "the service answered 503"}
	}
	x, got := w.completed(t)
	assert.Equal(t, `{"error":"http_status","message":"the service answered 503"}`, w.since(t, 1)[1].Content)
	if rows := named(w.rows(t, x), "probe"); len(rows) != 1 || rows[0].Class != "http_status" || got.Text != "Too bad." {
		t.Errorf("rows are %+v, outcome %+v", rows, got)
	}
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where skill_name = 'probe'
		and status = 'error'`))
}

func TestRuntimeToolThatFailsIsToldToModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("note", `{}`), modeltest.ToolCall("note", `{"x":1}`), modeltest.Text("ok"))
	w.turn.Tools = []reason.Tool{{
		Name: "note", Parameters: []byte(`{"type":"object","additionalProperties":false}`),
		Do: func(context.Context, json.RawMessage) (any, error) {
			return nil, &executions.StepError{Class: "refused", Message: "not now"}
		},
	}}
	w.completed(t)
	assert.Equal(t, `{"error":"refused","message":"not now"}`, w.since(t, 1)[1].Content)
	text := w.since(t, 2)[2].Content
	assert.Truef(t, strings.HasPrefix(text, "Tool call failed: INVALID_PARAMS. Schema: {"), "the correction is %s", text)
}

func TestOnlySkillsInScopeAndInServiceAreOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	noop := func(context.Context, skills.Call) (any, error) { return nil, nil }
	for name, scope := range map[string]string{
		"inner": skills.ScopeInternal, "outer": skills.ScopeExternal, "any": skills.ScopeBoth, "off": skills.ScopeInternal,
		"resting": skills.ScopeInternal, "tried": skills.ScopeInternal, "tried_outer": skills.ScopeExternal,
	} {
		w.builtins[name] = noop
		w.put(t, skills.Definition{Name: name, Scope: scope})
	}
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'admin' where name = 'off'`)
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal',
		disabled_at = clock_timestamp() where name in ('resting', 'tried', 'tried_outer')`)
	pgtest.Exec(t, w.pool, `update agent_skills set trial_at = clock_timestamp() where name like 'tried%'`)
	w.completed(t)
	offered := toolNames(w.model.Requests()[0])
	slices.Sort(offered)
	want := []string{"any", "inner", "probe", "sizes", "tried"}
	assert.Truef(t, slices.Equal(offered, want), "offered %q, want %q", offered, want)
}

func TestSkillTakenOutOfServiceDuringTurnIsNotCalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("ok"))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a disabled skill was called")
		return nil, nil
	}
	handle := modeltest.ToolCall("probe", `{}`)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n > 0 {
			return modeltest.Text("ok")
		}
		_, err := skills.Disable(t.Context(), w.pool, "probe", "admin", "it misbehaves", nil)
		assert.NoError(t, err)
		return handle
	})
	w.completed(t)
	text := w.since(t, 1)[1].Content
	assert.Truef(t, strings.Contains(text, `"error":"disabled"`) && strings.Contains(text, "it misbehaves"),
		"the model got %s", text)
}

func TestSkillOnTrialIsCalledOnceAndReturnsToService(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("ok"))
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal',
		disabled_at = clock_timestamp(), trial_at = clock_timestamp() where name = 'probe'`)
	x, got := w.completed(t)
	assert.Truef(t, slices.Equal(got.Calls, []string{"probe"}), "outcome is %+v", got)
	s, err := skills.Get(t.Context(), w.pool, "probe")
	assert.Truef(t, err == nil && s.Enabled, "skill is %+v, %v", s, err)
	rows := named(w.rows(t, x), "settle_trial")
	assert.Truef(t, len(rows) == 1 && rows[0].Status == "success", "rows are %+v", rows)
}

func TestTrialThatFailsIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`).AndCall("probe", `{}`), modeltest.Text("ok"))
	called := 0
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		called++
		return nil, errBroken
	}
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal',
		disabled_at = clock_timestamp(), trial_at = clock_timestamp() where name = 'probe'`)
	w.completed(t)
	added := w.since(t, 1)
	if called != 1 || !strings.Contains(added[1].Content, "it broke") ||
		!strings.Contains(added[2].Content, `"error":"disabled"`) {
		t.Errorf("called %d times; got %+v", called, added[1:])
	}
	s, err := skills.Get(t.Context(), w.pool, "probe")
	assert.Truef(t, err == nil && !s.Enabled && s.TrialAt == nil, "skill is %+v, %v", s, err)
}
