package workspace_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// fullWorkspace has one document of every kind.
const fullWorkspace = `
kind: automation
name: often
cron: "*/5 * * * *"
skill: two
arguments: {n: 3}
---
kind: skill
name: one
description: the first
handler: "sql:select 1 as one"
---
kind: skill
name: two
parameters: {type: object, properties: {n: {type: integer}}}
handler: "sql:"
config:
  query: |
    select @n::int as n
    order by 1
---
kind: objective
name: plan
goal: go on
review_every: 24h
steps: [first, second]
`

// pruneAll removes all that no file declares.
var pruneAll = workspace.Options{Prune: workspace.PruneAll}

func apply(t testing.TB, pool *pgxpool.Pool, w workspace.Workspace) workspace.Diff {
	t.Helper()
	diff, err := workspace.Apply(t.Context(), pool, w, pruneAll)
	require.NoError(t, err)
	return diff
}

// actions returns a diff as short texts: "create skill one".
func actions(d workspace.Diff) []string {
	list := []string{}
	for _, item := range d.Items {
		if item.Action != workspace.Unchanged {
			list = append(list, string(item.Action)+" "+item.Kind+" "+item.Name)
		}
	}
	return list
}

// versions returns the physical version of every row that a workspace may write.
func versions(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		select 'skill ' || name || ' ' || xmin || ' ' || ctid from agent_skills
		union all select 'automation ' || name || ' ' || xmin || ' ' || ctid from agent_automations
		union all select 'objective ' || name || ' ' || xmin || ' ' || ctid from agent_objectives
		union all select 'step ' || title || ' ' || xmin || ' ' || ctid from agent_objective_steps
		order by 1`)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

func TestApplyTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := load(t, "a.yaml", fullWorkspace)
	first := apply(t, pool, w)
	assert.NoDiff(t, []string{
		"create skill one", "create skill two", "create objective plan",
		"create automation often",
	}, actions(first))
	before := versions(t, pool)
	second := apply(t, pool, w)
	if !second.Empty() || len(second.Items) != len(first.Items) {
		t.Errorf("the second diff has %v in %d items", actions(second), len(second.Items))
	}
	assert.NoDiff(t, before, versions(t, pool))
}

func TestPlan(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	before := versions(t, pool)
	next := load(t, "a.yaml", strings.ReplaceAll(fullWorkspace, "the first", "the best")+"---\n"+goodSkill)
	planned, err := workspace.Plan(t.Context(), pool, next, pruneAll)
	require.NoError(t, err)
	assert.NoDiff(t, before, versions(t, pool))
	assert.NoDiff(t, apply(t, pool, next), planned)
	assert.True(t, !planned.Empty(), "the plan is empty")
}

func TestApplyReportsChanges(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	changed := strings.NewReplacer("the first", "the best", "order by 1", "order by n desc", "go on", "go further",
		"*/5 *", "*/6 *", "n: 3", "n: 4", "24h", "12h", "second]", "second, third]", "integer",
		"number").Replace(fullWorkspace)
	diff := apply(t, pool, load(t, "a.yaml", changed))
	var text bytes.Buffer
	require.NoError(t, diff.WriteText(&text))
	want := `~ skill one
    description: "the first" → "the best"
~ skill two
    config.query:
      - order by 1
      + order by n desc
    parameters.properties.n: {"type":"integer"} → {"type":"number"}
~ objective plan
    goal: "go on" → "go further"
    review_every_seconds: 86400 → 43200
    steps: ["first","second"] → ["first","second","third"]
~ automation often
    arguments.n: 3 → 4
    cron: "*/5 * * * *" → "*/6 * * * *"
0 to create, 4 to update, 0 to remove, 0 unchanged
`
	assert.NoDiff(t, want, text.String())
	raw, err := json.Marshal(diff.Items[0])
	require.NoError(t, err)
	wantJSON := `{"kind":"skill","name":"one","action":"update","changes":[{"field":"description","old":"the first","new":"the best"}]}`
	assert.Equal(t, wantJSON, string(raw), raw)
}

func TestADiffShowsTheChangeOfALongList(t *testing.T) {
	t.Parallel()
	long := `["` + strings.Repeat("a", 200) + `",{"b":`
	list := workspace.Change{Field: "cases", Old: []byte(long + `1}]`), New: []byte(long + `2}]`)}
	secret := workspace.Change{Field: "key", Old: []byte(`"[redacted]"`), New: []byte(`"[redacted]"`)}
	diff := workspace.Diff{Items: []workspace.Item{{
		Kind: "eval", Name: "e", Action: workspace.Update, Changes: []workspace.Change{list, secret},
	}}}
	var text strings.Builder
	require.NoError(t, diff.WriteText(&text))
	assert.Contains(t, text.String(), `    cases:
      -     "b": 1
      +     "b": 2
    key: "[redacted]" → "[redacted]"
`)
}

func TestApplyRemovesOnlyDeclared(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	for name, source := range map[string]string{"own": "", "built": skills.SourceBuiltin} {
		_, err := skills.Put(t.Context(), pool, skills.Definition{Name: name, Handler: "builtin:x"}, source)
		require.NoError(t, err)
	}
	diff := apply(t, pool, load(t, "a.yaml", goodSkill))
	want := []string{
		"create skill a", "remove skill one", "remove skill two", "remove objective plan",
		"remove automation often",
	}
	assert.NoDiff(t, want, actions(diff))
	assert.Equal(t, "a built own", pgtest.Value[string](t, pool,
		`select string_agg(name, ' ' order by name) from agent_skills`))
	if again := apply(t, pool, load(t, "a.yaml", goodSkill)); !again.Empty() {
		t.Errorf("a second apply did %v", actions(again))
	}
}

func TestApplyKeepsWithoutPrune(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	before := versions(t, pool)
	kept, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", goodSkill), workspace.Options{})
	want := []string{"create skill a", "keep skill one", "keep skill two", "keep objective plan", "keep automation often"}
	if diff := cmp.Diff(want, actions(kept)); diff != "" || err != nil || kept.Empty() {
		t.Error(diff, err)
	}
	pgtest.Exec(t, pool, `delete from agent_skills where name = 'a'`)
	assert.NoDiff(t, before, versions(t, pool))
	one := workspace.Options{Prune: func(i workspace.Item) bool { return i.Name == "often" }}
	diff, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", goodSkill), one)
	want[4] = "remove automation often"
	if diff := cmp.Diff(want, actions(diff)); diff != "" || err != nil {
		t.Error(diff, err)
	}
	pgtest.Equal(t, pool, `["automation often"]`, `
		select input->>'pruned' from agent_activity where skill_name = 'apply_workspace' order by id desc limit 1`)
	again, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", goodSkill), workspace.Options{})
	if err != nil || !again.Empty() || again.Count(workspace.Keep) != 3 {
		t.Errorf("a further apply did %v, %v", actions(again), err)
	}
}

func TestApplyKeepsRuntimeState(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	_, err := skills.Disable(t.Context(), pool, "one", "self_heal", "failed thrice", map[string]int{"calls": 3})
	require.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_automations set enabled = false, disabled_by = 'admin', disabled_reason = 'not now',
		disabled_at = now()`)
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '2031-01-01', last_run_at = '2020-01-01',
		last_trace_id = 'hb_x' where name = 'often'`)
	pgtest.Exec(t, pool, `
		insert into agent_objective_evidence (step_id, given_by, reason) select id, 'admin', 'seen' from agent_objective_steps
		  where title = 'first'`)
	pgtest.Exec(t, pool, `update agent_objective_steps set status = 'done', result = 'seen', attempts = 1
		where title = 'first'`)
	pgtest.Exec(t, pool, `update agent_objectives set status = 'paused', round = 4, due_at = '2030-01-01'`)
	pgtest.Exec(t, pool, `insert into agent_memory (key, value) values ('k', '"v"')`)
	state := func() string {
		return pgtest.Value[string](t, pool, `
			select jsonb_build_array(
			  (select jsonb_build_array(enabled, disabled_by, disabled_reason, disabled_at, evidence) from agent_skills
			    where name = 'one'),
			  (select to_jsonb(a) - 'description' - 'updated_at' - 'revision' - 'arguments' from agent_automations a),
			  (select jsonb_agg(to_jsonb(s) order by position) from agent_objective_steps s where title <> 'third'),
			  (select jsonb_build_array(status, round, due_at) from agent_objectives),
			  (select to_jsonb(m) from agent_memory m))::text`)
	}
	before := state()
	changed := strings.NewReplacer("the first", "the best", "go on", "go further", "second]", "second, third]", "n: 3",
		"n: 4").Replace(fullWorkspace)
	if diff := apply(t, pool, load(t, "a.yaml", changed)); diff.Count(workspace.Update) != 3 {
		t.Errorf("the changed workspace did %v", actions(diff))
	}
	assert.NoDiff(t, before, state())
}

func TestPruneShowsThatAnObjectiveIsPaused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	pgtest.Exec(t, pool, `update agent_objectives set round = 2`)
	show := func(text string) string {
		var b strings.Builder
		require.NoError(t, apply(t, pool, load(t, "a.yaml", text)).WriteText(&b))
		return b.String()
	}
	assert.Contains(t, show(goodSkill), "- skill one\n", "- automation often\n", "- objective plan\n"+
		"    source: \"workspace\" → \"pruned\"\n    status: \"active\" → \"paused\"\n")
	assert.Contains(t, show(fullWorkspace), "~ objective plan\n"+
		"    source: \"pruned\" → \"workspace\"\n    status: \"paused\" → \"active\"\n")
}

func TestApplyKeepsAdminRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "all.yaml", fullWorkspace))
	by := objectives.Definition{Name: "plan", Goal: "go on, but slowly", ReviewEvery: "48h"}
	_, err := objectives.Put(t.Context(), pool, by, objectives.SourceAdmin)
	require.NoError(t, err)
	changed := strings.ReplaceAll(fullWorkspace, "select 1 as one", "select 2 as one")
	type act func(context.Context, postgres.Beginner, workspace.Workspace, workspace.Options) (workspace.Diff, error)
	for name, act := range map[string]act{"apply": workspace.Apply, "plan": workspace.Plan} {
		_, err := act(t.Context(), pool, load(t, "all.yaml", changed), workspace.Options{})
		problems, refused := errors.AsType[workspace.Problems](err)
		require.Truef(t, refused && len(problems) == 1 && problems[0].Line != 0, "%s: %v", name, err)
		for _, words := range []string{
			`goal is "go on, but slowly" there and "go on" in this file`,
			"review_every_seconds is 172800 there and 86400", "Copy its present state into the file",
		} {
			assert.Truef(t, strings.Contains(problems[0].Message, words),
				"%s: %q is not in %q", name, words, problems[0].Message)
		}
	}
	o, err := objectives.Get(t.Context(), pool, "plan")
	assert.Truef(t, err == nil && o.Goal == by.Goal, "it says %q, %v", o.Goal, err)
	s, err := skills.Get(t.Context(), pool, "one")
	assert.Truef(t, err == nil && !strings.Contains(s.Handler, "2"), "the rest was applied: %+v, %v", s, err)
	same := strings.NewReplacer("goal: go on", "goal: go on, but slowly", "24h", "48h", "[first, second]",
		"[first, second, third]")
	apply(t, pool, load(t, "all.yaml", same.Replace(fullWorkspace))) // the workspace takes over the row
	apply(t, pool, load(t, "all.yaml", fullWorkspace))
	o, err = objectives.Get(t.Context(), pool, "plan")
	assert.Truef(t, err == nil && o.Goal == "go on" && o.Source == objectives.SourceWorkspace,
		"it says %q, %v", o.Goal, err)
}

func TestApplyReschedules(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", fullWorkspace))
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '2031-01-01'`)
	apply(t, pool, load(t, "a.yaml", strings.ReplaceAll(fullWorkspace, "*/5 *", "*/6 *")))
	soon := pgtest.Value[string](t, pool, `select (next_run_at <= clock_timestamp() + interval '6 minutes')::text
		from agent_automations`)
	assert.Equal(t, "true", soon, "the automation keeps the time of its old schedule")
}

func TestApplyValidatesAutomationSkills(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := skills.Put(t.Context(), pool, skills.Definition{Name: "beside", Handler: "builtin:x"}, skills.SourceBuiltin)
	require.NoError(t, err)
	for name, c := range map[string]struct{ old, with, want string }{
		"no such skill":    {"skill: two", "skill: tow", `a.yaml:5:8: skill: there is no skill "tow"; did you mean "two"?`},
		"wrong argument":   {"n: 3", "n: three", `a.yaml:6:16: arguments.n: got string, want integer (skill two)`},
		"unknown argument": {"n: 3", "m: 3", `a.yaml:6:12: arguments: additional properties 'm' not allowed (skill two)`},
		"of a builtin": {
			"skill: two", "skill: beside",
			`a.yaml:6:12: arguments: additional properties 'n' not allowed (skill beside)`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := load(t, "a.yaml", strings.Replace(fullWorkspace, c.old, c.with, 1))
			_, planned := workspace.Plan(t.Context(), pool, w, pruneAll)
			_, applied := workspace.Apply(t.Context(), pool, w, pruneAll)
			for _, err := range []error{planned, applied} {
				assert.Truef(t, errors.As(err, new(workspace.Problems)) && err.Error() == c.want,
					"error is %v\nwant %s", err, c.want)
			}
			rows := versions(t, pool)
			assert.Truef(t, len(rows) == 1, "left behind: %v", rows)
		})
	}
	beside := strings.Replace(fullWorkspace, "skill: two\narguments: {n: 3}", "skill: beside", 1)
	diff := apply(t, pool, load(t, "a.yaml", beside))
	assert.True(t, !diff.Empty(), "an automation may not call a skill from beside the workspace")
}

func TestApplyIsAtomic(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := load(t, "a.yaml", fullWorkspace)
	w.Objectives[0].Definition.ReviewEvery = "never" // no file can contain this value
	_, err := workspace.Apply(t.Context(), pool, w, pruneAll)
	assert.ErrorContains(t, err, "review_every")
	rows := versions(t, pool)
	assert.Truef(t, len(rows) == 0, "left behind: %v", rows)
}

func TestConcurrentApplies(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	one, other := load(t, "a.yaml", fullWorkspace), load(t, "a.yaml", goodSkill+"---\nkind: skill\nname: two\nhandler: "+
		"builtin:x\n---\nkind: automation\nname: often\ncron: '@daily'\nskill: a\n")
	for round := range 5 {
		group, ctx := errgroup.WithContext(t.Context())
		for i := range 8 {
			w := one
			if i%2 == 1 {
				w = other
			}
			group.Go(func() error {
				_, err := workspace.Apply(ctx, pool, w, pruneAll)
				return err
			})
		}
		require.NoError(t, group.Wait(), "round", round)
		names := pgtest.Value[string](t, pool, `select string_agg(name, ' ' order by name) from agent_skills`)
		require.Truef(t, names == "one two" || names == "a two", "round %d: skills are of both workspaces: %s", round, names)
	}
}

func TestApplyCancelled(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = workspace.Apply(t.Context(), tx, load(t, "a.yaml", goodSkill), pruneAll)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := workspace.Apply(ctx, pool, load(t, "a.yaml", fullWorkspace), pruneAll)
		done <- err
	}()
	cancel()
	assert.ErrorIs(t, <-done, context.Canceled)
}

func TestDiffHidesSecrets(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	file := func(header string) string {
		return "kind: skill\nname: a\nhandler: http:https://example.com/\nconfig: {headers: {X-Token: " + header + "}}\n"
	}
	const secret = "9f2c1e7ab34455d0aa"
	apply(t, pool, load(t, "a.yaml", file("old")))
	diff := apply(t, pool, load(t, "a.yaml", file(secret)))
	raw, err := json.Marshal(diff)
	require.NoError(t, err)
	assert.Truef(t, !diff.Empty() && !strings.Contains(string(raw), secret), "diff is %s", raw)
}

func TestApplyNamesProblemsOfAllChecks(t *testing.T) {
	t.Parallel()
	w := load(t, "a.yaml", `kind: skill
name: a
handler: sql:select nothing_here
---
kind: flow
name: b
actions: [{actionType: trigger_agent, parameters: {flow: nowhere}}]
---
kind: automation
name: c
cron: "@daily"
skill: missing
`)
	_, err := workspace.Apply(t.Context(), pgtest.DB(t), w, workspace.Options{})
	problems, ok := errors.AsType[workspace.Problems](err)
	require.Truef(t, ok && len(problems) == 3, "%v", err)
	for i, want := range []string{"nothing_here", "nowhere", "missing"} {
		assert.Contains(t, problems[i].Error(), want)
	}
}

func TestApplyWaitsForAnother(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = first.Rollback(context.WithoutCancel(t.Context())) }()
	require.NoError(t, workspace.Lock(t.Context(), first))
	var group errgroup.Group
	group.Go(func() error {
		return postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			pgtest.Exec(t, tx, `set local lock_timeout = '1ms'`)
			err := workspace.Lock(t.Context(), tx)
			if err == nil {
				assert.Equal(t, "1ms", pgtest.Value[string](t, tx, `select current_setting('lock_timeout')`))
			}
			return err
		})
	})
	pgtest.Until(t, pool, true, `select exists (select from pg_locks where locktype = 'advisory' and not granted
		and database = (select oid from pg_database where datname = current_database()))`)
	require.NoError(t, first.Rollback(t.Context()))
	require.NoError(t, group.Wait())
}
