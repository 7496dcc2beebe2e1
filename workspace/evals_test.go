package workspace_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

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
	assert.Truef(t, got.Version == 2 && len(s) == 2 && s[1].Error == "down", "the suite is %+v", got)
	old, err := evals.Version(t.Context(), pool, "returns", 1)
	assert.Truef(t, err == nil && old.Definition.Trials == 2, "version 1 is %+v: %v", old, err)
	apply(t, pool, load(t, "a.yaml", goodSkill))
	_, err = evals.Get(t.Context(), pool, "returns")
	assert.Error(t, err, "a suite that no file declares is still there")
}

// The labels of a judge are in a file of the workspace, and become part of the suite.
func TestLabelsOfAJudgeAreReadFromTheirFile(t *testing.T) {
	t.Parallel()
	judged := strings.Replace(suite, "      - within: {iterations: 3}\n",
		"      - judge: {rubric: Kind., labels: l/kind.jsonl}\n", 1)
	folder := func(labels string) fstest.MapFS {
		return fstest.MapFS{"e/a.yaml": {Data: []byte(judged)}, "e/l/kind.jsonl": {Data: []byte(labels)}}
	}
	w, err := workspace.Load(folder(`{"answer": "No.", "pass": false}`))
	require.NoError(t, err)
	j := w.Evals[0].Definition.Cases[0].Expect[1].Judge
	assert.Truef(t, len(j.Labelled) == 1 && j.Labelled[0] == (evals.JudgeLabel{Answer: "No."}), "the judge is %+v", j)
	for labels, want := range map[string]string{
		`{"answer": "No."}`: `e/a.yaml:15:40: cases[0].expect[1].judge.labels: label 1: must have "answer"`, "": "",
	} {
		_, err := workspace.Load(folder(labels))
		if got := fmt.Sprint(err); want == "" && err != nil || want != "" && !strings.HasPrefix(got, want) {
			t.Errorf("%s is refused by %v", labels, err)
		}
	}
	without := folder("")
	delete(without, "e/l/kind.jsonl")
	_, err = workspace.Load(without)
	assert.Error(t, err, "a missing file is accepted")
}

func TestAProblemOfAnEvalHasItsLine(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lines := func(text, of string) int { return strings.Count(text[:strings.Index(text, of)], "\n") + 1 }
	for was, now := range map[string]string{
		"skill: a,":       "skill: b,",
		"a: [{when":       "zz: [{when",
		"times: 1":        "tims: 1",
		"iterations: 3":   "latency: soon",
		"{error: down}":   "{when: {}}",
		"{user: \"Money":  "{usr: \"Money",
		"name: returns\n": "name: returns\nagent: nobody\n",
	} {
		text := strings.Replace(suite, was, now, 1)
		at := lines(text, strings.TrimPrefix(now, "name: returns\n"))
		w, err := workspace.Load(files("a.yaml", text))
		if err == nil {
			_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
		}
		problems, ok := err.(workspace.Problems) //nolint:errorlint // it is returned unchanged
		assert.Truef(t, ok && problems[0].Line == at, "%s is not reported at line %d: %v", now, at, err)
	}
}

const gated = `
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

// play stores a run of the candidate text. Each case passes in some of its trials. Without a status, the run is still
// running.
func play(t testing.TB, pool *pgxpool.Pool, in evals.Installation, text, status string, trials, passes int) {
	t.Helper()
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
			s.Suite.Name, s.Agent.Name, trials, s, s.AgentDigest(), s.SuiteDigest(), s.Runtime, status, passes)
	}
}

// refusal returns the reason why an apply of text is rejected, or "".
func refusal(t testing.TB, pool *pgxpool.Pool, text string) string {
	t.Helper()
	_, err := gatedApply(t, pool, text)
	refused, is := errors.AsType[*evals.GateError](err)
	switch {
	case err == nil:
		return ""
	case !is || len(refused.Refusals) != 1:
		t.Fatalf("the apply is rejected by %v", err)
	}
	return refused.Refusals[0].String()
}

func refuses(t testing.TB, pool *pgxpool.Pool, text, why string) {
	t.Helper()
	if got := refusal(t, pool, text); why == "" && got != "" || !strings.Contains(got, why) {
		t.Errorf("the apply is refused because %q, want %q", got, why)
	}
}

func with(was, now string) string { return strings.Replace(gated, was, now, 1) }

// The first apply passes. After that, each change visible to a trial needs a run, and other changes do not.
func TestAGateWantsARunOfExactlyWhatIsApplied(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	refuses(t, pool, gated, "")
	for was, now := range map[string]string{
		"keys: [web]": "keys: [app]", "trials: 4": "trials: 3", "select 1 as one": "select 2 as one",
	} {
		refuses(t, pool, with(was, now), "")
		refuses(t, pool, gated, "")
	}
	const none = "manners: it has not run against this workspace"
	for was, now := range map[string]string{
		"Be kind.": "Be rude.", "Looks.": "Stares.", "keys: [web]": "model: other", "user: hi": "user: hello",
		"scope: external": "scope: both", "name: nora": "name: dora",
	} {
		refuses(t, pool, with(was, now), none)
	}
	rude := with("Be kind.", "Be rude.")
	play(t, pool, installation, rude, "", 4, 4)
	refuses(t, pool, rude, none) // the run is still running
	play(t, pool, installation, rude, "passed", 3, 3)
	refuses(t, pool, rude, none) // too few trials
	other := installation
	other.Runtime = "v2"
	play(t, pool, other, rude, "passed", 4, 4)
	refuses(t, pool, rude, none)
	play(t, pool, installation, strings.Replace(rude, "Looks.", "Stares.", 1), "passed", 4, 4)
	refuses(t, pool, rude, none)
	play(t, pool, installation, rude, "passed", 4, 4)
	play(t, pool, installation, rude, "failed", 4, 3)
	refuses(t, pool, rude, "manners: a pass rate of 0.75, below 1.00, in run") // the newest run counts
	play(t, pool, installation, rude, "passed", 4, 4)
	refuses(t, pool, rude, "")
}

// The gate of the suite before the apply counts, so no apply can loosen the gate that it has to pass.
func TestAnApplyDoesNotLoosenItsOwnGate(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	refuses(t, pool, gated, "")
	rude := with("Be kind.", "Be rude.")
	for was, now := range map[string]string{
		"gate: {margin: 0.25}\n": "", "gate: {margin": "gate: {pass_rate: 0.1, margin",
	} {
		loose := strings.Replace(rude, was, now, 1)
		play(t, pool, installation, loose, "failed", 4, 2)
		refuses(t, pool, loose, "c1 (2/4)")
	}
	whole, _, _ := strings.Cut(rude, "---\nkind: eval")
	refuses(t, pool, whole, "it is removed together with a change of its agent")
	kept, _, _ := strings.Cut(gated, "---\nkind: eval")
	refuses(t, pool, kept, "") // removed alone
	refuses(t, pool, whole, "")
}

// A run with failed trials passes the gate if the statistics rate it as not worse than the present version.
func TestAGateComparesWithThePresentVersion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	text := gated
	for i := range 9 {
		text += fmt.Sprintf("  - {name: d%d, messages: [{user: hi}], expect: [{answer: {contains: hi}}]}\n", i)
	}
	refuses(t, pool, text, "")
	play(t, pool, installation, text, "failed", 4, 3)
	rude := strings.Replace(text, "Be kind.", "Be rude.", 1)
	play(t, pool, installation, rude, "failed", 4, 1)
	refuses(t, pool, rude, "worse than the present version by 0.50")
	low := strings.Replace(rude, "margin: 0.25", "margin: 0.25, pass_rate: 0.2", 1)
	play(t, pool, installation, low, "failed", 4, 1)
	refuses(t, pool, low, "worse than the present version by 0.50") // any rate suffices
	play(t, pool, installation, rude, "failed", 4, 3)
	refuses(t, pool, rude, "") // not worse by the margin
}

// Two applies run one after the other. The gate checks the second one against the state after the first.
func TestConcurrentAppliesDoNotPassTheGateTogether(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	refuses(t, pool, gated, "")
	one, two := with("Be kind.", "Be brief."), with("Looks.", "Stares.")
	play(t, pool, installation, one, "passed", 4, 4)
	play(t, pool, installation, two, "passed", 4, 4)
	agent, _, _ := strings.Cut(one, "---\nkind: skill")
	_, rest, _ := strings.Cut(two, "---\n")
	var group errgroup.Group
	results := make(chan error, 2)
	for _, part := range []string{agent, rest} {
		group.Go(func() error {
			_, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", part), workspace.Options{
				Gate: &workspace.Gate{Installation: installation}, // keeps the rest
			})
			results <- err
			return nil
		})
	}
	require.NoError(t, group.Wait())
	first, second := <-results, <-results
	_, refused := errors.AsType[*evals.GateError](errors.Join(first, second))
	assert.Truef(t, refused && (first == nil || second == nil),
		"the applies end with %v and %v, want one refusal", first, second)
}
