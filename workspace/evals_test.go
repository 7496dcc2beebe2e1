package workspace_test

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/workspace"
)

const suite = goodSkill + `---
kind: eval
name: returns
trials: 2
cases:
  - name: not due
    messages: [{user: "Money back for order 7!"}]
    skills:
      a: [{when: {order: 7}, returns: {due: false}}, {error: down}]
    expect:
      - called: {skill: a, args: {order: 7}, times: 1}
      - within: {iterations: 3}
`

func TestApplyEvals(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := apply(t, pool, load(t, "a.yaml", suite))
	assert.NoDiff(t, []string{"create skill a", "create eval returns"}, actions(first))
	if second := apply(t, pool, load(t, "a.yaml", suite)); !second.Empty() {
		t.Errorf("applied again: %v", actions(second))
	}
	changed := apply(t, pool, load(t, "a.yaml", strings.Replace(suite, "trials: 2", "trials: 3", 1)))
	assert.NoDiff(t, []string{"update eval returns"}, actions(changed))
	got, err := evals.Get(t.Context(), pool, "returns")
	require.NoError(t, err)
	s := got.Definition.Cases[0].Skills["a"]
	assert.Equal(t, 2, got.Version)
	require.Equal(t, 2, len(s))
	assert.Equal(t, "down", s[1].Error)
	old, err := evals.Version(t.Context(), pool, "returns", 1)
	require.NoError(t, err)
	assert.Equal(t, 2, old.Definition.Trials)
	apply(t, pool, load(t, "a.yaml", goodSkill))
	_, err = evals.Get(t.Context(), pool, "returns")
	assert.ErrorIs(t, err, evals.ErrNotFound, "a suite that no file declares is still there")
}

func TestLabelsOfJudgeAreReadFromTheirFile(t *testing.T) {
	t.Parallel()
	judged := strings.Replace(suite, "      - within: {iterations: 3}\n",
		"      - judge: {rubric: Kind., labels: l/kind.jsonl}\n", 1)
	folder := func(labels string) fstest.MapFS {
		return fstest.MapFS{"e/a.yaml": {Data: []byte(judged)}, "e/l/kind.jsonl": {Data: []byte(labels)}}
	}
	w, err := workspace.Load(folder("\ufeff{\"answer\": \"No.\", \"pass\": false}\r\n"))
	require.NoError(t, err)
	j := w.Evals[0].Definition.Cases[0].Expect[1].Judge
	assert.NoDiff(t, []evals.JudgeLabel{{Answer: "No."}}, j.Labelled)
	_, err = workspace.Load(folder(""))
	assert.NoError(t, err, "an empty file of labels")
	_, err = workspace.Load(folder(`{"answer": "No."}`))
	assert.ErrorContains(t, err, `e/a.yaml:15:40: cases[0].expect[1].judge.labels: label 1: must have "answer"`)
	_, err = workspace.Load(folder(`{"answer": "\u0000", "pass": true}`))
	assert.ErrorContains(t, err, "label 1: has the character U+0000")
	without := folder("")
	delete(without, "e/l/kind.jsonl")
	_, err = workspace.Load(without)
	assert.Error(t, err, "a missing file is accepted")
}

func TestEvalProblemNamesItsLine(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lineOf := func(text, substring string) int {
		return strings.Count(text[:strings.Index(text, substring)], "\n") + 1
	}
	for name, test := range map[string]struct{ old, new, wrong string }{
		"unknown skill":    {"skill: a,", "skill: b,", "skill: b,"},
		"stub of no skill": {"a: [{when", "zz: [{when", "zz: [{when"},
		"unknown field":    {"times: 1", "tims: 1", "tims: 1"},
		"wrong type":       {"iterations: 3", "latency: soon", "latency: soon"},
		"empty stub":       {"{error: down}", "{when: {}}", "{when: {}}"},
		"zero character":   {"Money back", `Money\0back`, "Money"},
		"unknown role":     {`{user: "Money`, `{usr: "Money`, `{usr: "Money`},
		"unknown agent":    {"name: returns\n", "name: returns\nagent: nobody\n", "agent: nobody"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(suite, test.old, test.new, 1)
			w, err := workspace.Load(files("a.yaml", text))
			if err == nil {
				_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
			}
			problems, ok := err.(workspace.Problems) //nolint:errorlint // it is returned unchanged
			require.Truef(t, ok, "the error is %v", err)
			assert.Equal(t, lineOf(text, test.wrong), problems[0].Line, problems)
		})
	}
}

const gatedWorkspace = `
kind: agent
name: nora
instructions: Be kind.
keys: [web]
---
kind: skill
name: look
description: Looks.
scope: external
handler: "sql:select 1 as one"
---
kind: eval
name: manners
trials: 4
gate: {margin: 0.25}
cases:
  - {name: c1, messages: [{user: hi}], expect: [{answer: {contains: hi}}]}
`

var installation = evals.Installation{
	Agents: &agents.Directory{}, Model: "m", Scopes: map[string][]string{"chat": {"external"}}, Runtime: "v1",
}

func gatedApply(t testing.TB, pool *pgxpool.Pool, text string) (workspace.Diff, error) {
	t.Helper()
	return workspace.Apply(t.Context(), pool, load(t, "a.yaml", text), workspace.Options{
		Prune: workspace.PruneAll, Gate: &workspace.Gate{Installation: installation},
	})
}

// storedRun is a run of an eval: each case passes in some of its trials.
type storedRun struct {
	status         string // empty while it is running
	trials, passes int
	runtime        string // the installation's when empty
}

// storeRun stores a run of the candidate text.
func storeRun(t testing.TB, pool *pgxpool.Pool, text string, run storedRun) {
	t.Helper()
	in := installation
	in.Runtime = cmp.Or(run.runtime, in.Runtime)
	all, err := workspace.Candidates(t.Context(), pool, load(t, "a.yaml", text), pruneAll, in)
	require.NoError(t, err)
	for _, s := range all {
		pgtest.Exec(t, pool, `
			with run as (
			  insert into agent_eval_runs (suite, version, agent, agent_version, model, trials, subject, agent_digest,
			         suite_digest, runtime, status, finished_at)
			  select $1, 1, $2, 1, 'm', $3, $4, $5, $6, $7, coalesce(nullif($8, ''), 'running'),
			         case when $8 <> '' then now() end
			  returning id)
			insert into agent_eval_trials (run_id, case_name, trial, position, verdict)
			select run.id, c ->> 'name', n, p, case when n <= $9 then 'pass' else 'fail' end
			  from run, jsonb_array_elements($4::jsonb #> '{suite,definition,cases}') with ordinality x (c, p),
			       generate_series(1, $3) n`,
			s.Suite.Name, s.Agent.Name, run.trials, s, s.AgentDigest(), s.SuiteDigest(), s.Runtime, run.status, run.passes)
	}
}

// applyAccepted applies text, which passes the gate.
func applyAccepted(t testing.TB, pool *pgxpool.Pool, text string) {
	t.Helper()
	_, err := gatedApply(t, pool, text)
	assert.NoError(t, err, "the apply is refused")
}

// applyRefused applies text, which the gate refuses for one reason that contains want. The workspace stays as it is.
func applyRefused(t testing.TB, pool *pgxpool.Pool, text, want string) {
	t.Helper()
	_, err := gatedApply(t, pool, text)
	refused, ok := errors.AsType[*evals.GateError](err)
	require.Truef(t, ok, "the apply ends with %v, want a refusal: %s", err, want)
	require.Equal(t, 1, len(refused.Refusals), err)
	assert.Contains(t, refused.Refusals[0].String(), want)
}

// gatedWith returns the gated workspace with a replaced part.
func gatedWith(old, replacement string) string {
	return strings.Replace(gatedWorkspace, old, replacement, 1)
}

func TestGateRequiresRunOfAppliedVersion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	applyAccepted(t, pool, gatedWorkspace)           // the first apply needs no run
	for old, replacement := range map[string]string{ // no trial sees these changes
		"keys: [web]": "keys: [app]", "trials: 4": "trials: 3", "select 1 as one": "select 2 as one",
	} {
		applyAccepted(t, pool, gatedWith(old, replacement))
		applyAccepted(t, pool, gatedWorkspace)
	}
	const noRun = "manners: it has not run against this workspace"
	for old, replacement := range map[string]string{ // each trial sees these changes
		"Be kind.": "Be rude.", "Looks.": "Stares.", "keys: [web]": "model: other", "user: hi": "user: hello",
		"scope: external": "scope: both", "name: nora": "name: dora",
	} {
		applyRefused(t, pool, gatedWith(old, replacement), noRun)
	}
	changed := gatedWith("Be kind.", "Be rude.")
	storeRun(t, pool, changed, storedRun{trials: 4, passes: 4})
	applyRefused(t, pool, changed, noRun) // the run is still running
	storeRun(t, pool, changed, storedRun{status: "passed", trials: 3, passes: 3})
	applyRefused(t, pool, changed, noRun) // too few trials
	storeRun(t, pool, changed, storedRun{status: "passed", trials: 4, passes: 4, runtime: "v2"})
	applyRefused(t, pool, changed, noRun) // another runtime
	storeRun(t, pool, strings.Replace(changed, "Looks.", "Stares.", 1), storedRun{status: "passed", trials: 4, passes: 4})
	applyRefused(t, pool, changed, noRun) // another skill
	storeRun(t, pool, changed, storedRun{status: "passed", trials: 4, passes: 4})
	storeRun(t, pool, changed, storedRun{status: "failed", trials: 4, passes: 3})
	applyRefused(t, pool, changed, "manners: a pass rate of 0.75, below 1.00, in run") // the newest run counts
	storeRun(t, pool, changed, storedRun{status: "passed", trials: 4, passes: 4})
	applyAccepted(t, pool, changed)
}

// The gate of the suite before the apply counts, so no apply can loosen the gate that it has to pass.
func TestApplyDoesNotLoosenItsOwnGate(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	applyAccepted(t, pool, gatedWorkspace)
	changed := gatedWith("Be kind.", "Be rude.")
	for old, replacement := range map[string]string{
		"gate: {margin: 0.25}\n": "", "gate: {margin": "gate: {pass_rate: 0.1, margin",
	} {
		looserGate := strings.Replace(changed, old, replacement, 1)
		storeRun(t, pool, looserGate, storedRun{status: "failed", trials: 4, passes: 2})
		applyRefused(t, pool, looserGate, "c1 (2/4)")
	}
	changedWithoutEval, _, _ := strings.Cut(changed, "---\nkind: eval")
	applyRefused(t, pool, changedWithoutEval, "it is removed together with a change of its agent")
	withoutEval, _, _ := strings.Cut(gatedWorkspace, "---\nkind: eval")
	applyAccepted(t, pool, withoutEval) // removed alone
	applyAccepted(t, pool, changedWithoutEval)
}

// A run with failed trials passes the gate if the statistics rate it as not worse than the present version.
func TestGateComparesWithPresentVersion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	text := gatedWorkspace
	for i := range 9 {
		text += fmt.Sprintf("  - {name: d%d, messages: [{user: hi}], expect: [{answer: {contains: hi}}]}\n", i)
	}
	applyAccepted(t, pool, text)
	storeRun(t, pool, text, storedRun{status: "failed", trials: 4, passes: 3})
	changed := strings.Replace(text, "Be kind.", "Be rude.", 1)
	storeRun(t, pool, changed, storedRun{status: "failed", trials: 4, passes: 1})
	applyRefused(t, pool, changed, "worse than the present version by 0.50")
	lowerPassRate := strings.Replace(changed, "margin: 0.25", "margin: 0.25, pass_rate: 0.2", 1)
	storeRun(t, pool, lowerPassRate, storedRun{status: "failed", trials: 4, passes: 1})
	applyRefused(t, pool, lowerPassRate, "worse than the present version by 0.50") // any rate suffices
	storeRun(t, pool, changed, storedRun{status: "failed", trials: 4, passes: 3})
	applyAccepted(t, pool, changed) // not worse by the margin
}

// Two applies run one after the other. The gate checks the second one against the state after the first.
func TestConcurrentAppliesDoNotPassGateTogether(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	applyAccepted(t, pool, gatedWorkspace)
	one, two := gatedWith("Be kind.", "Be brief."), gatedWith("Looks.", "Stares.")
	storeRun(t, pool, one, storedRun{status: "passed", trials: 4, passes: 4})
	storeRun(t, pool, two, storedRun{status: "passed", trials: 4, passes: 4})
	agent, _, _ := strings.Cut(one, "---\nkind: skill")
	_, rest, _ := strings.Cut(two, "---\n")
	var group sync.WaitGroup
	var errs [2]error
	for i, part := range []string{agent, rest} {
		w := load(t, "a.yaml", part)
		group.Go(func() {
			_, errs[i] = workspace.Apply(t.Context(), pool, w, workspace.Options{
				Gate: &workspace.Gate{Installation: installation}, // keeps the rest
			})
		})
	}
	group.Wait()
	_, refused := errors.AsType[*evals.GateError](errors.Join(errs[:]...))
	assert.Truef(t, refused && (errs[0] == nil || errs[1] == nil),
		"the applies end with %v and %v, want one refusal", errs[0], errs[1])
}
