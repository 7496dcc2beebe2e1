package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestBuiltinsAreThereWithoutBeingDeclared(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	contains(t, p.must("skills", "call", "recall", "--args", `{"query": "sizes"}`), `"memories": []`)
	contains(t, p.must("skills", "call", "objectives_list"), `"objectives": []`)
	contains(t, p.must("skills", "call", "recent_activity", "--args", `{"skill": "recall"}`), `"status": "success"`)
	contains(t, p.must("skills", "ls"), "objectives_list", "recall", "recent_activity")
}

func TestApplyKnowsTheBuiltins(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	dir := folder(t, map[string]string{"x.yaml": "kind: skill\nname: mine\nhandler: builtin:recal\n"})
	got := p.run("apply", dir)
	if got.code != 2 {
		t.Errorf("exit code %d, not 2", got.code)
	}
	contains(t, got.err, `/x.yaml:3:10: handler: unknown builtin "recal"; did you mean "recall"?`)
	dir = folder(t, map[string]string{
		"x.yaml": "kind: automation\nname: z\ncron: \"0 * * * *\"\nskill: recall\narguments: {limit: 3}\n",
	})
	p.must("apply", dir)
}

func TestABuiltinIsBackWhenTheWorkspaceNoLongerReplacesIt(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	p.must("apply", folder(t, map[string]string{"x.yaml": strings.Replace(goodSkill, "name: one", "name: recall", 1)}))
	contains(t, p.must("skills", "show", "recall"), "sql:")
	p.must("heartbeat")
	contains(t, p.must("skills", "show", "recall"), "sql:")
	p.must("apply", "--prune", folder(t, map[string]string{"x.yaml": goodSkill}))
	contains(t, p.must("skills", "show", "recall"), "builtin:recall")
}
