package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// newModelProcess starts a process with a model and two skills: double takes n, and careful needs an admin's approval.
func newModelProcess(
	t *testing.T, model func(openai.ChatCompletionRequest) modeltest.Reply, documents ...string,
) *testProcess {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		putFlow(t, pool, text)
	}
	server := modeltest.New(t)
	server.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply { return model(r) })
	client, err := models.New(models.Config{
		BaseURL: server.URL(), Model: "gpt-4o-mini", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 1, MaxWait: time.Second},
	})
	require.NoError(t, err)
	double := func(_ context.Context, c skills.Call) (any, error) {
		var args struct{ N int }
		if err := json.Unmarshal(c.Args, &args); err != nil {
			return nil, err
		}
		if args.N == 13 {
			return nil, errors.New("unlucky")
		}
		return map[string]any{"twice": 2 * args.N}, nil
	}
	registry, err := skills.New(skills.Options{
		Builtins: map[string]skills.Builtin{"double": double, "careful": double},
		Pool:     pool,
	})
	require.NoError(t, err)
	number := map[string]any{
		"type": "object", "required": []any{"n"},
		"properties": map[string]any{"n": map[string]any{"type": "integer"}},
	}
	for name, trust := range map[string]string{"double": skills.TrustAuto, "careful": skills.TrustApprove} {
		d := skills.Definition{Name: name, Handler: "builtin:" + name, Parameters: number, Trust: trust, Idempotent: true}
		_, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
		require.NoError(t, err)
	}
	return startProcess(t, pool, &reason.Loop{
		Pool: pool, Model: client, Skills: registry,
		Logger: slog.New(slog.DiscardHandler),
	})
}

func answerNothing(openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("nothing") }

func TestSkillAction(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, answerNothing, flowYAML("good", `
  - {actionType: skill, saveAs: got, parameters: {name: double, arguments: {n: "{{input.n}}"}}}
  - {actionType: set, parameters: {expressions: {four: got.twice * 2}}}`), flowYAML("lost", `
  - {id: s, actionType: skill, parameters: {name: tripple, arguments: {}}}`), flowYAML("bare", `
  - {id: s, actionType: skill, parameters: {name: double}}`))
	got := variables(t, enginetest.Await(t, w.pool, w.startInThread(t, "good", map[string]any{"n": 4}),
		executions.Completed))
	assert.NoDiff(t, map[string]any{"got": map[string]any{"twice": 8.0}, "four": 16.0}, got)
	for _, c := range []struct {
		flow  string
		input any
		want  string
	}{
		{"good", map[string]any{"n": 13}, "action skill 1: unlucky"},
		{"lost", nil, "action s (skill): there is no skill tripple"},
		{"bare", nil, "action s (skill): call double: invalid parameters: missing property 'n'"},
	} {
		x := enginetest.Await(t, w.pool, w.startInThread(t, c.flow, c.input), executions.Failed)
		assert.Truef(t, postgres.Deref(x.ErrorMessage) == c.want, "%s: %s", c.flow, postgres.Deref(x.ErrorMessage))
	}
}

// A flow may continue after a rejection. Its variables have the decision and the reason.
func TestFlowContinuesAfterRejection(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, answerNothing, flowYAML("a", `
  - {id: pay, actionType: skill, saveAs: got, parameters: {name: careful, arguments: {n: 2}, onRejection: continue}}
  - actionType: if
    parameters:
      condition: got == nil
      then: [{actionType: end, parameters: {summary: "{{approvalStatus}}: {{approvalReason}}"}}]`))
	id := w.startInThread(t, "a", nil)
	_, err := approvals.Decide(t.Context(), w.pool, *awaitWaiting(t, w.pool, id, 1).WaitingKey, false, "admin",
		"the photo shows no damage")
	require.NoError(t, err)
	assert.Equal(t, "rejected: the photo shows no damage", enginetest.Await(t, w.pool, id,
		executions.Completed).ResultSummary)
}

// why lists the waits of nested loops, even after a snapshot of the loop has replaced the steps of the iterations.
func TestWhyListsWaitsOfLoops(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, answerNothing, flowYAML("a", `
  - actionType: for_each
    parameters:
      items: [1, 2]
      actions:
        - {actionType: skill, parameters: {name: careful, arguments: {n: "{{item}}"}}}
        - {actionType: while, parameters: {condition: index < 1, actions: [{actionType: wait_for_response}]}}`))
	id := w.startInThread(t, "a", nil)
	for i := range 2 {
		_, err := approvals.Decide(t.Context(), w.pool, *awaitWaiting(t, w.pool, id, 2*i+1).WaitingKey, true, "ana", "")
		require.NoError(t, err)
		awaitWaiting(t, w.pool, id, 2*i+2)
		receiveMessage(t, w, "yes")
	}
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_checkpoints where waited_for is not null`)
	assert.NoDiff(t, []string{
		"approval: approved by ana, used, true", "an answer in thread maria: somebody wrote in thread maria, true",
		"approval: approved by ana, used, true", "an answer in thread maria: somebody wrote in thread maria, true",
	}, pgtest.Column[string](t, w.pool, `
		select regexp_replace(what, '^a waited .* for ', '') || ', ' || (from_ref ~ '^(approval|event) .')::text
		  from why(@trace) where part = 'waits' order by seq`, postgres.Strict{"trace": x.TraceID}))
}

// A flow calls a skill on trial. Otherwise a skill that only flows use would stay disabled.
func TestFlowCallsSkillOnTrial(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, answerNothing, flowYAML("f", `
  - {actionType: skill, parameters: {name: double, arguments: {n: 2}}}`))
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal',
		disabled_at = clock_timestamp() where name = 'double'`)
	if x := enginetest.Await(t, w.pool, w.startInThread(t, "f", nil), executions.Failed); !strings.Contains(
		postgres.Deref(x.ErrorMessage), "double is disabled") {
		t.Errorf("the flow with a disabled skill failed with %s", postgres.Deref(x.ErrorMessage))
	}
	pgtest.Exec(t, w.pool, `update agent_skills set trial_at = clock_timestamp() where name = 'double'`)
	enginetest.Await(t, w.pool, w.startInThread(t, "f", nil), executions.Completed)
}

// A skill that needs approval waits for an admin's decision.
func TestSkillWaitsForApproval(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, answerNothing, flowYAML("a", `
  - {id: pay, actionType: skill, saveAs: got, parameters: {name: careful, arguments: {n: 2}}}`))
	for _, approved := range []bool{true, false} {
		id := w.startInThread(t, "a", nil)
		key := *awaitWaiting(t, w.pool, id, 1).WaitingKey
		_, err := approvals.Decide(t.Context(), w.pool, key, approved, "admin", "because")
		require.NoError(t, err)
		if approved {
			got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
			assert.NoDiff(t, map[string]any{
				"got": map[string]any{"twice": 4.0}, "approvalStatus": "approved",
				"approvalReason": "because",
			}, got)
			continue
		}
		x := enginetest.Await(t, w.pool, id, executions.Failed)
		assert.Equal(t, "action pay (skill): skill careful was not approved: because", postgres.Deref(x.ErrorMessage))
	}
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_activity where skill_name = 'careful'
		and kind = 'call' and status = 'success'`))
}

// The model gets the flow's text and the named skills.
func TestReasonAction(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, func(r openai.ChatCompletionRequest) modeltest.Reply {
		last := r.Messages[len(r.Messages)-1]
		switch {
		case len(r.Tools) == 0:
			return modeltest.Text("about " + last.Content)
		case last.Role == openai.ChatMessageRoleTool:
			return modeltest.Text("with " + r.Tools[0].Function.Name + " " + last.Content)
		}
		return modeltest.ToolCall("double", `{"n": 3}`)
	}, flowYAML("a", `
  - {actionType: reason, parameters: {prompt: "{{input.what}}"}}
  - {actionType: reason, saveAs: second, parameters: {prompt: compute, skills: [double]}}`))
	got := variables(t, enginetest.Await(t, w.pool, w.startInThread(t, "a", map[string]any{"what": "cats"}),
		executions.Completed))
	assert.NoDiff(t, map[string]any{"answer": "about cats", "second": `with double {"twice":6}`}, got)
}

// putAgents stores definitions of agents.
func putAgents(t *testing.T, pool *pgxpool.Pool, all ...agents.Definition) {
	t.Helper()
	for _, d := range all {
		_, err := agents.Put(t.Context(), pool, d)
		require.NoError(t, err)
	}
}

func TestReasonWithNamedAgent(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, func(r openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Text(r.Model + ": " + r.Messages[0].Content)
	},
		flowYAML("a", `
  - {actionType: reason, saveAs: named, parameters: {prompt: hi, agent: billing}}
  - {actionType: reason, saveAs: own, parameters: {prompt: hi}}`), flowYAML("lost", `
  - {actionType: reason, parameters: {prompt: hi, agent: returns}}`))
	w.in.Loop.Agents = &agents.Directory{}
	putAgents(t, w.pool, agents.Definition{Name: "sales", Default: true, Instructions: "You are Nora."},
		agents.Definition{Name: "billing", Instructions: "You are Bill of {{Sol}}."})
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", nil), executions.Completed)
	got := variables(t, x)
	text := got["named"].(string)
	assert.Truef(t, strings.Contains(text, "You are Bill of {{Sol}}.") && !strings.Contains(text, "Nora"),
		"the prompt of the named agent is %q", text)
	if text := got["own"].(string); !strings.Contains(text, "You are Nora.") || strings.Contains(text, "Bill") {
		t.Errorf("the prompt of the execution's agent is %q", text)
	}
	rows, err := w.pool.Query(t.Context(), `
		select agent from agent_activity where execution_id = @id and kind = 'model'
		  order by id`, postgres.Strict{"id": x.ID})
	require.NoError(t, err)
	agentNames, err := pgx.CollectRows(rows, pgx.RowTo[*string])
	assert.Truef(t, err == nil && len(agentNames) == 2 && postgres.Deref(agentNames[0]) == "billing" &&
		postgres.Deref(agentNames[1]) != "billing", "rows name %v, %v", agentNames, err)
	lost := enginetest.Await(t, w.pool, w.startInThread(t, "lost", nil), executions.Failed)
	assert.Contains(t, postgres.Deref(lost.ErrorMessage), `there is no agent "returns"`)
}

// A model would answer without the tool, so an unknown skill fails the action before the model call.
func TestReasonRejectsUnknownSkill(t *testing.T) {
	t.Parallel()
	w := newModelProcess(t, func(openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("asked") }, flowYAML("a", `
  - {actionType: reason, parameters: {prompt: hello, skills: [nonexistent]}}`))
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", nil), executions.Failed)
	assert.Contains(t, postgres.Deref(x.ErrorMessage), `there is no skill "nonexistent"`)
}

func TestSkillActionNeedsLoop(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - {actionType: skill, parameters: {name: double}}`))
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", nil), executions.Failed)
	assert.Truef(t, strings.Contains(
		postgres.Deref(x.ErrorMessage), "without a reasoning loop"), "%s", postgres.Deref(x.ErrorMessage))
}

func TestCheckStart(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, "name: a\ninput: {type: object, required: [n], properties: {n: {type: integer}}, "+
		"additionalProperties: false}\nactions: [{actionType: end}]",
		"name: gone\nactions: [{actionType: end}]")
	_, err := flows.Remove(t.Context(), w.pool, []string{"a"})
	require.NoError(t, err)
	check := func(name, input string) error {
		return flows.CheckStart(t.Context(), w.pool, name, json.RawMessage(input))
	}
	for _, input := range []string{``, `null`, `{}`, `{"n": "1"}`, `{"n": 1, "m": 1}`, `[1]`, `{"n"`} {
		if _, ok := errors.AsType[*flows.InvalidInput](check("a", input)); !ok {
			t.Errorf("%s: %v", input, check("a", input))
		}
	}
	assert.NoError(t, check("a", `{"n": 1}`))
	assert.ErrorIs(t, check("gone", `{}`), flows.ErrRemoved)
	assert.NoError(t, check("of Go code", `{}`))
	// Start does not call CheckStart.
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", map[string]any{"n": "one"}), executions.Failed)
	assert.Truef(t, strings.HasPrefix(postgres.Deref(x.ErrorMessage), "flow a does not take this input"),
		"%s", postgres.Deref(x.ErrorMessage))
}

// A long loop resumes from its last snapshot with all its variables, and its records do not accumulate.
func TestLongLoopResumesFromSnapshot(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: a
variables: {n: 0, text: ""}
actions:
  - actionType: while
    id: count
    parameters:
      condition: n < 40
      actions:
        - {actionType: set, parameters: {expressions: {n: n + 1}}}
        - {actionType: set, when: n % 10 == 0, parameters: {expressions: {text: text + string(n)}}}
        - {actionType: delay, when: n == 37, parameters: {duration: 10ms}}
`)
	id := w.startInThread(t, "a", nil)
	got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
	assert.NoDiff(t, map[string]any{"n": 40.0, "text": "10203040"}, got)
	assert.Equal(t, 3, pgtest.Value[int](t, w.pool, `select count(*) from agent_checkpoints where execution_id = @id`,
		postgres.Strict{"id": id}))
}

func TestVariablesSizeLimit(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: a
variables: {text: aaaaaaaaaaaaaaaa}
actions:
  - {id: grow, actionType: while, parameters: {condition: "true", actions: [{id: twice, actionType: set, parameters: {expressions: {text: text + text}}}]}}
`)
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", nil), executions.Failed)
	assert.Truef(t, strings.HasPrefix(postgres.Deref(x.ErrorMessage), "action twice (set): the variables would be "),
		"%s", postgres.Deref(x.ErrorMessage))
}

func TestFlowLabelsExecutions(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: order
labels: {order: "{{input.order}}", customer: "{{input.customer ?? \"\"}}"}
actions: [{actionType: set, parameters: {variables: {done: true}}}]`)
	id := w.startInThread(t, "order", map[string]any{"order": 1001})
	enginetest.Await(t, w.pool, id, executions.Completed)
	pgtest.Equal(t, w.pool, "order=1001", `select string_agg(name || '=' || value, ' ') from agent_execution_labels`)
	labelled, _, err := w.Start(t.Context(), w.pool, executions.Spec{
		Flow: "order", Surface: trace.Flow, Input: map[string]any{"order": 1002, "customer": "Ana"},
		Labels: executions.Labels{"order": "mine"},
	})
	require.NoError(t, err)
	enginetest.Await(t, w.pool, labelled.ID, executions.Completed)
	pgtest.Equal(t, w.pool, "customer=Ana order=mine", `
		select string_agg(name || '=' || value, ' ' order by name) from agent_execution_labels
		 where execution_id::text = '`+labelled.ID+`'`) // a label given at the start stays
	d, err := parseDefinition(`{"name": "x", "labels": {"No": "y"}, "actions": [{"actionType": "set", "parameters": {"variables": {"a": 1}}}]}`)
	require.NoError(t, err)
	assert.ErrorContains(t, flows.Validate(d), "labels.No")
}
