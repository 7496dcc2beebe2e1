package builtins_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const traceID = "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// call declares the builtins and calls one like the agent.
func call(t *testing.T, pool *pgxpool.Pool, name, args string) (map[string]any, error) {
	t.Helper()
	return callAs(t, pool, "agent", name, args)
}

// callAs calls a builtin as the agent.
func callAs(t *testing.T, pool *pgxpool.Pool, agent, name, args string) (map[string]any, error) {
	t.Helper()
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil)})
	require.NoError(t, err)
	skill, err := skills.Get(t.Context(), pool, name)
	require.NoError(t, err)
	ctx := trace.With(t.Context(), trace.Span{TraceID: traceID, Agent: agent, Surface: trace.Heartbeat})
	raw, err := registry.Invoke(ctx, skills.Call{Skill: skill, Args: json.RawMessage(args)})
	if err != nil {
		return nil, err
	}
	var answer map[string]any
	require.NoError(t, json.Unmarshal(raw, &answer))
	return answer, nil
}

// column returns one field of each row of the answer's list.
func column(t *testing.T, answer map[string]any, list, field string) string {
	t.Helper()
	rows, ok := answer[list].([]any)
	require.Truef(t, ok, "no list %s in %v", list, answer)
	var values []string
	for _, row := range rows {
		values = append(values, fmt.Sprint(row.(map[string]any)[field]))
	}
	return strings.Join(values, " ")
}

func TestPutDeclaresOnceAndLeavesWhatAWorkspaceDeclared(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	own := skills.Definition{Name: "recall", Handler: "sql:select 1 as one"}
	_, err := skills.Put(t.Context(), pool, own, skills.SourceWorkspace)
	require.NoError(t, err)
	var changed atomic.Int64
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			n, err := builtins.Put(t.Context(), pool)
			changed.Add(int64(n))
			return err
		})
	}
	require.NoError(t, group.Wait())
	assert.Equal(t, int64(len(builtins.Names())-1), changed.Load(), "8 processes changed", "rows")
	s, err := skills.Get(t.Context(), pool, "recall")
	assert.Truef(t, err == nil && s.Handler == "sql:select 1 as one" && s.Source == skills.SourceWorkspace,
		"the workspace's recall is %+v, %v", s, err)
	_, err = skills.Remove(t.Context(), pool, nil)
	require.NoError(t, err)
	n, err := builtins.Put(t.Context(), pool)
	assert.Truef(t, n == 1 && err == nil, "put %d rows, %v, after the workspace's was removed", n, err)
}

func TestEveryRowHasItsCode(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil)})
	require.NoError(t, err)
	all, err := registry.Available(t.Context(), pool, skills.ScopeInternal)
	require.NoError(t, err)
	var names []string
	for _, s := range all {
		names = append(names, s.Name)
		assert.Truef(t, s.Idempotent && s.Trust != skills.TrustApprove && s.Scope == skills.ScopeInternal,
			"%s is %s, %s, idempotent %v", s.Name, s.Trust, s.Scope, s.Idempotent)
	}
	assert.NoDiff(t, builtins.Names(), names)
	assert.NoDiff(t, builtins.Names(), slices.Sorted(maps.Keys(builtins.New(pool, nil, nil))))
	visible, err := registry.Available(t.Context(), pool, skills.ScopeExternal)
	assert.Truef(t, err == nil && len(visible) == 0, "visitors are offered %v, %v", visible, err)
}

func TestRecall(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_memory (category, key, value)
		select 'noise', 'orders ' || n, '"orders"' from generate_series(1, 600) n`)
	for i := range 12 {
		save(t, pool, "observation", fmt.Sprintf("size_%02d", i), "the orders table grows")
	}
	save(t, pool, "admin", "name", "orders are Ana's")
	for name, test := range map[string]struct {
		args, want string
		found      int
	}{
		"the last written": {`{}`, "name size_11", 10},
		"a category":       {`{"category": "admin"}`, "name", 1},
		"words":            {`{"query": "grows", "limit": 50}`, "size_11", 12},
		"words within":     {`{"query": "orders", "category": "admin", "limit": 1}`, "name", 1},
		"limit within":     {`{"query": "orders", "category": "observation", "limit": 2}`, "size_", 2},
		"limit with point": {`{"limit": 2.0}`, "name size_11", 2},
		"any word within":  {`{"query": "ana weather", "category": "admin"}`, "name", 1},
		"nothing":          {`{"query": "weather"}`, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := call(t, pool, "recall", test.args)
			require.NoError(t, err)
			keys := column(t, answer, "memories", "key")
			assert.Truef(t, strings.HasPrefix(keys, test.want) && len(strings.Fields(keys)) == test.found, "got %q", keys)
		})
	}
	for _, args := range []string{`{"limit": 0}`, `{"limit": 51}`, `{"question": "x"}`} {
		answer, err := call(t, pool, "recall", args)
		assert.Error(t, err, args, "answers", answer)
	}
}

func TestRecallLeavesOutWhatIsTooLong(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i := range 6 {
		save(t, pool, "general", fmt.Sprintf("long_%d", i), strings.Repeat("x", 60<<10))
	}
	answer, err := call(t, pool, "recall", `{}`)
	require.NoError(t, err)
	if keys := column(t, answer, "memories", "key"); keys != "long_5 long_4" || answer["left_out"] != 4.0 {
		t.Errorf("got %q and %v left out", keys, answer["left_out"])
	}
}

func save(t *testing.T, pool *pgxpool.Pool, category, key, value string) {
	t.Helper()
	_, err := memory.Save(t.Context(), pool, memory.Note{Category: category, Key: key, Value: value, TraceID: traceID})
	require.NoError(t, err)
}

func TestObjectivesList(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"tidy", "healthy"} {
		d := objectives.Definition{Name: name, Goal: strings.Repeat("be good ", 100), Steps: []string{"one", "two"}}
		_, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace)
		require.NoError(t, err)
	}
	o, err := objectives.Get(t.Context(), pool, "tidy")
	require.NoError(t, err)
	ok, err := objectives.SetStatus(t.Context(), pool, o.ID, objectives.Active, objectives.Paused)
	require.True(t, ok && err == nil, ok, err)
	for args, want := range map[string]string{
		`{}`: "healthy tidy", `{"status": "paused"}`: "tidy",
		`{"status": "failed"}`: "",
	} {
		answer, err := call(t, pool, "objectives_list", args)
		require.NoError(t, err)
		assert.Equal(t, want, column(t, answer, "objectives", "name"), args)
	}
	answer, err := call(t, pool, "objectives_list", `{}`)
	assert.Truef(t, err == nil && column(t, answer, "objectives", "pending") == "2 2" &&
		len(column(t, answer, "objectives", "goal")) <= 1000, "got %v, %v", answer, err)
	_, err = call(t, pool, "objectives_list", `{"status": "lost"}`)
	assert.Error(t, err, "an unknown status was accepted")
}

func TestRecentActivity(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	note := func(skill string, kind activity.Kind, o activity.Outcome) {
		e := activity.Entry{TraceID: traceID, Kind: kind, Skill: skill, Input: map[string]string{"secret": "stays here"}}
		_, err := activity.Note(t.Context(), pool, e, o)
		require.NoError(t, err)
	}
	note("sizes", activity.KindCall, activity.Outcome{Status: activity.Success})
	note("think", activity.KindModel, activity.Outcome{Status: activity.Success})
	note("ticket", activity.KindCall, activity.Outcome{Status: activity.Error, Message: strings.Repeat("no luck ", 100)})
	pgtest.Exec(t, pool, `insert into agent_activity (trace_id, surface, kind, skill_name, status)
		values ('ev_01JQZ8W3T5N7R9V1X3Z5B7D9F1', 'eval', 'call', 'tried', 'error')`)
	for args, want := range map[string]string{
		`{}`: "ticket sizes", `{"limit": 1.0}`: "ticket", `{"skill": "sizes"}`: "sizes", `{"status": "error"}`: "ticket",
		`{"status": "running"}`: "",
	} {
		answer, err := call(t, pool, "recent_activity", args)
		require.NoError(t, err)
		assert.Equal(t, want, column(t, answer, "activities", "skill"), args)
	}
	answer, err := call(t, pool, "recent_activity", `{"status": "error"}`)
	require.NoError(t, err)
	row := answer["activities"].([]any)[0].(map[string]any)
	got := slices.Sorted(maps.Keys(row))
	assert.Truef(t, slices.Equal(got,
		[]string{"duration_ms", "error", "skill", "status", "time", "trace_id"}), "a row has %v", got)
	assert.Truef(t, row["trace_id"] == traceID && len(row["error"].(string)) <= 310, "got %v", row)
}

// powers returns all permissions, as JSON.
func powers(t *testing.T, pool *pgxpool.Pool) (state string) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `
		select jsonb_pretty(jsonb_build_array(
		  (select jsonb_agg(to_jsonb(s) order by name) from agent_skills s),
		  (select jsonb_agg(to_jsonb(a) order by id) from agent_approvals a),
		  (select jsonb_agg(jsonb_build_array(name, enabled, disabled_by, decided_by, proposed_by) order by name)
		     from agent_automations where name in ('mine', 'off', 'wanted')),
		  (select jsonb_agg(jsonb_build_array(name, status, decided_by) order by name)
		     from agent_objectives where name in ('goal', 'paused', 'wish')),
		  (select jsonb_agg(jsonb_build_array(title, status) order by title) from agent_objective_steps),
		  (select count(*) from agent_objective_evidence where given_by <> '')))`).Scan(&state)
	require.NoError(t, err)
	return state
}

// governed returns a database with one of everything that only an admin may change.
func governed(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.DB(t)
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	for _, sql := range []string{
		`insert into agent_skills (name, tool_definition, handler, trust)
			values ('drop', '{"name":"drop"}', 'sql:select 1', 'approve')`,
		`insert into agent_skills (name, tool_definition, handler, enabled, disabled_by)
			values ('off', '{"name":"off"}', 'sql:select 1', false, 'admin')`,
		`insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		 values ('hb_1', 'drop', 1, '{}', 'h', clock_timestamp() + interval '1 day')`,
		`insert into agent_automations (name, skill_name) values ('mine', 'drop')`,
		`insert into agent_automations (name, skill_name, enabled, disabled_by) values ('off', 'drop', false, 'admin')`,
		`insert into agent_automations (name, skill_name, enabled, disabled_by, proposed_by)
			values ('wanted', 'drop', false, 'proposal', 'agent')`,
		`insert into agent_objectives (name, goal) values ('goal', 'g')`,
		`insert into agent_objectives (name, goal, status) values ('paused', 'g', 'paused')`,
		`insert into agent_objectives (name, goal, status, proposed_by) values ('wish', 'g', 'proposed', 'agent')`,
		`insert into agent_objective_steps (objective_id, position, title) select id, 1, 'step of ' || name
			from agent_objectives`,
	} {
		pgtest.Exec(t, pool, sql)
	}
	return pool
}

// The test tries every argument name and value that could grant power. It also calls the builtin past its schema.
func TestNoBuiltinCanChangeWhatAnybodyMayDo(t *testing.T) {
	t.Parallel()
	pool := governed(t)
	before := powers(t, pool)
	code := builtins.New(pool, nil, nil)
	ctx := trace.With(t.Context(), trace.Span{TraceID: traceID, Agent: "agent", Surface: trace.Heartbeat})
	for _, name := range builtins.Names() {
		skill, err := skills.Get(t.Context(), pool, name)
		require.NoError(t, err)
		for _, target := range []string{"drop", "off", "mine", "wanted", "goal", "paused", "wish", "memory_write"} {
			for _, step := range []string{"step of goal", "step of wish", "step of paused"} {
				args, err := json.Marshal(map[string]any{
					"name": target, "objective": target, "automation": target, "skill": "drop", "step": step,
					"step_id": step, "result": "done",
					"goal": "g", "note": "accepted by the admin", "status": "active", "enabled": true,
					"trust": "auto", "scope": "both",
					"handler": "sql:select 1", "disabled_by": "", "decided_by": "admin", "proposed_by": "", "approve": true,
					"decision": "approve",
					"accept":   true, "by": "admin", "given_by": "admin", "reason": "I say so",
					"evidence": []any{map[string]any{"by": "admin"}},
					"source":   "workspace", "cron": "@daily", "category": "skills", "key": target,
					"value": map[string]any{"trust": "auto"},
				})
				require.NoError(t, err)
				_, err = code[name](ctx, skills.Call{Skill: skill, Args: args})
				var refused *skills.CallError
				assert.Truef(t, err == nil || errors.As(err, &refused) && refused.Class == "invalid_params",
					"%s fails: %v", name, err)
			}
		}
		for _, power := range []string{
			"enabled", "trust", "scope", "handler", "disabled_by", "decided_by",
			"approve", "accept",
		} {
			assert.Truef(t, !strings.Contains(string(skill.Parameters()), fmt.Sprintf("%q:", power)), "%s takes %s", name, power)
		}
		require.Equal(t, "", cmp.Diff(before, powers(t, pool)), name)
	}
}

func TestMemoryIsWrittenByCompareAndSetAndOnceAfterACrash(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, step := range []struct{ args, want string }{
		{`{"key":"k","value":{"b":1,"a":[1.50]},"revision":0}`, "1"},
		{`{"key":"k","value":{"a":[1.5],"b":1},"revision":0}`, "1"}, // the same call again
		{`{"key":"k","value":2,"revision":0}`, "theirs 1"},
		{`{"key":"k","value":2}`, "theirs 1"},
		{`{"key":"k","value":2,"revision":1}`, "2"},
		{`{"key":"k","value":2,"revision":1}`, "2"},
		{`{"key":"k","value":4,"revision":1}`, "theirs 2"},
		{`{"key":"k","value":3,"revision":-1}`, "3"}, // whatever is stored
		{`{"key":"api_key","value":"hunter2"}`, "secret"},
		{`{"key":"","value":1}`, "key"},
		{`{"value":1}`, "key"},
	} {
		answer, err := call(t, pool, "memory_write", step.args)
		got := fmt.Sprint(answer["revision"])
		if theirs, is := answer["theirs"].(map[string]any); is {
			got = fmt.Sprint("theirs ", theirs["revision"])
		}
		if err != nil {
			got = err.Error()
		}
		assert.Truef(t, strings.Contains(got, step.want), "%s: got %s, want %s", step.args, got, step.want)
	}
	// An error that the caller can correct is no failure of the skill.
	_, err := call(t, pool, "memory_write", `{"key":"long","value":"`+strings.Repeat("x", 70000)+`"}`)
	refused, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(t, ok && refused.Class == "invalid_params", "a value that is too long: %v", err)
	answer, err := call(t, pool, "memory_forget", `{"key":"k"}`)
	assert.Truef(t, err == nil && answer["forgotten"] == nil && answer["error"] == "conflict",
		"what was not read is forgotten: %v, %v", answer, err)
	for _, want := range []bool{true, false} {
		answer, err := call(t, pool, "memory_forget", `{"key":"k","revision":3}`)
		assert.Truef(t, err == nil && answer["forgotten"] == want, "forget: %v, %v", answer, err)
	}
}

func TestProposalsWaitForAnAdmin(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 2 {
		answer, err := call(t, pool, "objective_propose",
			`{"name":"tidy","goal":"g","success_criteria":"c","steps":["one"],"priority":1.0,"review_every":"7d"}`)
		assert.Truef(t, err == nil && answer["status"] == "proposed", "got %v, %v", answer, err)
		answer, err = call(t, pool, "automation_propose",
			`{"name":"watch","signal":"pending_approvals > 3","prompt":"tell somebody"}`)
		assert.Truef(t, err == nil && answer["status"] == "proposal", "got %v, %v", answer, err)
	}
	o, err := objectives.Get(t.Context(), pool, "tidy")
	assert.Truef(t, err == nil && o.ProposedTrace == traceID && o.ProposedBy == "agent" && o.SuccessCriteria == "c" &&
		o.ReviewEverySeconds == 7*24*3600, "got %+v, %v", o, err)
	a, err := automations.Get(t.Context(), pool, "watch")
	assert.Truef(t, err == nil && !a.Enabled && a.DisabledBy == automations.Proposal && a.ProposedBy == "agent",
		"got %+v, %v", a, err)
	for args, want := range map[string]string{
		`{"name":"x","signal":"pending_aprovals > 3","prompt":"p"}`: "unknown name pending_aprovals",
		`{"name":"x","cron":"61 * * * *","prompt":"p"}`:             "cron: ",
		`{"name":"x","cron":"@daily","skill":"nope"}`:               "not found",
		`{"name":"watch","cron":"@daily","prompt":"p"}`:             "exists with another definition",
	} {
		_, err := call(t, pool, "automation_propose", args)
		assert.Truef(t, err != nil && strings.Contains(err.Error(), want), "%s: %v", args, err)
	}
}

// A proposal belongs to its proposer, but the default agent's follows whoever is the default.
func TestAcceptedProposalsBelongToTheirProposer(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, d := range []agents.Definition{{Name: "first", Default: true}, {Name: "second"}} {
		_, err := agents.Put(t.Context(), pool, d)
		require.NoError(t, err)
	}
	for agent, want := range map[string]string{"first": "", "second": "second", "unknown": ""} {
		_, err := callAs(t, pool, agent, "objective_propose", fmt.Sprintf(`{"name":%q,"goal":"g"}`, agent))
		require.NoError(t, err)
		_, err = callAs(t, pool, agent, "automation_propose",
			fmt.Sprintf(`{"name":%q,"signal":"pending_approvals > 3","prompt":"p"}`, agent))
		require.NoError(t, err)
		pgtest.Equal(t, pool, want+"|"+want, `
			select o.agent || '|' || a.agent from agent_objectives o join agent_automations a using (name) where name = $1`,
			agent)
	}
}

func TestAStepIsAdvancedByWhatWasDone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := objectives.Definition{Name: "tidy", Goal: "g", Steps: []string{"one", "two"}}
	_, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace)
	require.NoError(t, err)
	act := func(skill, status string) {
		pgtest.Exec(t, pool, `
			insert into agent_activity (trace_id, skill_name, status, surface)
			  values ($1, $2, $3, 'operate')`, traceID, skill, status)
	}
	advance := func(step string) string {
		answer, err := call(t, pool, "objective_advance",
			fmt.Sprintf(`{"objective":"tidy","step":%q,"result":"42 rows"}`, step))
		if err != nil {
			return err.Error()
		}
		return fmt.Sprint(answer["done"], " ", answer["objective_status"])
	}
	act("look", "pending_approval")
	act("objective_update", "success")
	assert.Contains(t, advance("one"), "nothing shows")
	act("look", "success")
	for _, step := range []struct{ title, want string }{
		{"one", "1 active"}, {"one", "1 active"}, {"two", "nothing shows"}, {"three", `no step "three"`},
	} {
		got := advance(step.title)
		assert.Truef(t, strings.Contains(got, step.want), "%s: got %s", step.title, got)
	}
	answer, err := call(t, pool, "objective_update", `{"objective":"tidy","note":"half","add_steps":["three"]}`)
	assert.Truef(t, err == nil && answer["note"] == "half", "got %v, %v", answer, err)
	for _, args := range []string{
		`{"objective":"tidy","add_steps":[" "]}`, `{"objective":"tidy","add_steps":["a","a"]}`,
		`{"objective":"tidy","note":"` + strings.Repeat("日", 2000) + `"}`,
	} {
		_, err := call(t, pool, "objective_update", args)
		refused, ok := errors.AsType[*skills.CallError](err)
		assert.Truef(t, ok && refused.Class == "invalid_params", "%.60s: %v", args, err)
	}
	act("look", "success")
	act("look", "success")
	advance("two")
	assert.Equal(t, "3 completed", advance("three"))
	pgtest.Exec(t, pool, `
		insert into agent_skills (name, description, tool_definition, handler)
		select 'other_' || n, 'x', jsonb_build_object('name', 'other_' || n, 'description', 'x'), 'builtin:x'
		  from generate_series(1, 1000) n`)
	answer, err = call(t, pool, "skill_list", `{"words":"memory delete"}`)
	assert.Truef(t, err == nil && column(t, answer, "skills", "name") == "memory_forget", "got %v, %v", answer, err)
}

func TestOtherAgentsObjectiveIsNotChanged(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, d := range []agents.Definition{{Name: "sales", Default: true}, {Name: "billing"}, {Name: "full"}} {
		_, err := agents.Put(t.Context(), pool, d)
		require.NoError(t, err)
	}
	for _, d := range []objectives.Definition{
		{Name: "bill", Goal: "Bill.", Agent: "billing", Steps: []string{"send"}}, {Name: "tidy", Goal: "Be tidy."},
	} {
		_, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace)
		require.NoError(t, err)
	}
	const want = `objective "bill" belongs to agent billing; only that agent and the default agent change it`
	_, err := callAs(t, pool, "full", "objective_update", `{"objective": "bill", "note": "mine"}`)
	assert.ErrorContains(t, err, want)
	_, err = callAs(t, pool, "full", "objective_advance", `{"objective": "bill", "step": "send", "result": "sent"}`)
	assert.ErrorContains(t, err, want)
	pgtest.Equal(t, pool, "", `select string_agg(note, '') from agent_objectives`)
	for _, allowed := range [][2]string{{"billing", "bill"}, {"sales", "bill"}, {"full", "tidy"}} {
		_, err := callAs(t, pool, allowed[0], "objective_update", fmt.Sprintf(`{"objective": %q, "add_steps": ["go"]}`,
			allowed[1]))
		assert.NoError(t, err)
	}
}
