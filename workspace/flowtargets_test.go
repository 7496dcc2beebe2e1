package workspace_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func TestUnknownFlowsOfSkillsAutomationsAndWebhooksAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	text := `kind: flow
name: onboarding
actions: [{actionType: end}]
---
kind: skill
name: hire
handler: flow:onboardin
config: {wait: true}
---
kind: automation
name: nightly
cron: "@daily"
flow: heartbea
---
kind: webhook
name: jobs
scheme: standard
secrets: ["${SECRET}"]
actions:
  - flow: onboarding
  - flow: external:import
  - flow: nothing_like_it
`
	w := load(t, "a.yaml", text)
	w.GoFlows = []string{"heartbeat"}
	_, err := workspace.Apply(t.Context(), pool, w, pruning)
	want := `a.yaml:7:10: handler: unknown flow "onboardin"; did you mean "onboarding"?
a.yaml:13:7: flow: unknown flow "heartbea"; did you mean "heartbeat"?
a.yaml:22:11: actions[2].flow: unknown flow "nothing_like_it"; known are heartbeat, onboarding`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nnot\n%s", err, want)
	}
}
