package workspace_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

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

// The labels of a judge are in a file of the workspace, and become a part of the suite.
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
