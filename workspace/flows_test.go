package workspace_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/workspace"
)

const onboarding = `
kind: flow
name: onboarding
description: The first days.
actions:
  - actionType: send_message
    parameters:
      message: Hola
  - actionType: trigger_agent
    parameters: {flow: collector}
---
kind: flow
name: collector
actions:
  - {actionType: wait_for_response, timeout: 24h}
`

func TestApplyFlows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := apply(t, pool, load(t, "a.yaml", onboarding))
	assert.NoDiff(t, []string{"create flow collector", "create flow onboarding"}, actions(first))
	if second := apply(t, pool, load(t, "a.yaml", onboarding)); !second.Empty() {
		t.Errorf("applied again: %v", actions(second))
	}
	changed := load(t, "a.yaml", strings.Replace(onboarding, "Hola", "Buenos días", 1))
	diff, err := workspace.Plan(t.Context(), pool, changed, pruneAll)
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, diff.WriteText(&text))
	want := "~ flow onboarding\n    actions:\n      -       \"message\": \"Hola\"\n      +       \"message\": \"Buenos " +
		"días\"\n" +
		"    version: 1 → 2\n0 to create, 1 to update, 0 to remove, 1 unchanged\n"
	assert.Equal(t, want, text.String())
	apply(t, pool, changed)
	removed := apply(t, pool, load(t, "a.yaml", goodSkill))
	assert.NoDiff(t, []string{"create skill a", "remove flow collector", "remove flow onboarding"}, actions(removed))
	versions, err := flows.List(t.Context(), pool, flows.Filter{Name: "onboarding"})
	assert.Truef(t, err == nil && len(versions) == 2 && versions[0].Version == 2 && !versions[0].Current &&
		!versions[1].Current, "versions %+v, %v", versions, err)
	apply(t, pool, load(t, "a.yaml", onboarding))
	f, err := flows.Get(t.Context(), pool, "onboarding")
	assert.Truef(t, err == nil && f.Version == 3 && f.Source == workspace.Source, "back again: %+v, %v", f, err)
}

func TestInvalidFlows(t *testing.T) {
	t.Parallel()
	_, err := workspace.Load(files("f.yaml", `kind: flow
name: a
actions:
  - actionType: send_mesage
    parameters: {message: hi}
  - actionType: wait_for_response
    timeout: 8d
  - actionType: if
    parameters:
      condition: "1 +"
      then:
        - {actionType: send_message, parameters: {message: "{{a"}}
  - {actionType: end, id: x, id: y}
step: []
`))
	want := `f.yaml:4:17: actions[0].actionType: unknown actionType "send_mesage"; did you mean "send_message"?
f.yaml:7:14: actions[1].timeout: 8d is not allowed: a wait for response lasts more than 0 and at most 7d
f.yaml:10:18: actions[2].parameters.condition: unexpected token EOF (line 1, column 3)
f.yaml:12:60: actions[2].parameters.then[0].parameters.message: the template {{a is not closed with }} outside quotes
f.yaml:13:30: actions[3].id: is given twice, first in line 13
f.yaml:14:1: unknown key "step"; known are actions, channel, description, input, kind, labels, name, target, variables`
	assert.Truef(t, err != nil && err.Error() == want, "got\n%v\nnot\n%s", err, want)
}

func TestUnknownChildFlows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := flows.Put(t.Context(), pool,
		flows.Definition{Name: "beside", Actions: []any{map[string]any{"actionType": "end"}}})
	require.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_flows set source = 'api'`) // a prune leaves the flow
	text := `kind: flow
name: a
actions:
  - actionType: trigger_agent
    parameters:
      flow: colector
  - {actionType: trigger_agent, parameters: {flow: beside}}
  - {actionType: trigger_agent, parameters: {agent: "external:ocr"}}
  - {actionType: trigger_agent, parameters: {agent: collector}}
  - {actionType: trigger_agent, parameters: {agent: heartbeat}}
---
kind: flow
name: heartbeat
actions: [{actionType: end}]
---
kind: flow
name: billing
actions: [{actionType: end}]
`
	w := load(t, "a.yaml", text)
	w.GoFlows, w.Reserved = []string{"billing", "collector"}, []string{"heartbeat"}
	_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
	want := `a.yaml:6:13: actions[0].parameters.flow: unknown flow "colector"; did you mean "collector"?
a.yaml:13:7: name: "heartbeat" is a flow of the program itself; choose another name
a.yaml:17:7: name: "billing" is a flow of the program itself; choose another name`
	assert.Truef(t, err != nil && err.Error() == want, "got\n%v\nnot\n%s", err, want)
	_, err = flows.Get(t.Context(), pool, "a")
	assert.Error(t, err, "it was applied")
}

func TestUnknownSkillsOfFlows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	text := `kind: flow
name: calls
actions:
  - actionType: skill
    parameters:
      name: lookk
  - actionType: if
    parameters:
      condition: "true"
      then:
        - {actionType: reason, parameters: {prompt: hi, skills: [look, tell]}}
  - actionType: wait_for_response
    timeout: 1h
    onTimeout: continue
    timeoutActions:
      - {actionType: skill, parameters: {name: nothing_like_it}}
  - {actionType: skill, parameters: {name: look}}
---
kind: skill
name: look
description: Look.
handler: "sql: select 1 as n"
`
	_, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", text), pruneAll)
	want := `a.yaml:6:13: actions[0].parameters.name: there is no skill "lookk"; did you mean "look"?
a.yaml:11:72: actions[1].parameters.then[0].parameters.skills[1]: there is no skill "tell"
a.yaml:16:48: actions[2].timeoutActions[0].parameters.name: there is no skill "nothing_like_it"`
	assert.Truef(t, err != nil && err.Error() == want, "got\n%v\nnot\n%s", err, want)
	_, err = flows.Get(t.Context(), pool, "calls")
	assert.Error(t, err, "it was applied")
}

func TestUnknownFlowReferences(t *testing.T) {
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
  - automation: nightli
  - automation: nightly
  - flow: "external:a:b"
`
	w := load(t, "a.yaml", text)
	w.GoFlows = []string{"heartbeat"}
	_, err := workspace.Apply(t.Context(), pool, w, pruneAll)
	want := `a.yaml:7:10: handler: unknown flow "onboardin"; did you mean "onboarding"?
a.yaml:13:7: flow: unknown flow "heartbea"; did you mean "heartbeat"?
a.yaml:22:11: actions[2].flow: unknown flow "nothing_like_it"; known are onboarding; ` +
		"a flow in Go is known while a program that registers it runs\n" +
		`a.yaml:23:17: actions[3].automation: there is no automation "nightli"; did you mean "nightly"?
a.yaml:25:11: actions[5].flow: "external:a:b" is not external or external:NAME, with a NAME of letters, digits ` +
		"and ._- that begins with a letter or digit"
	assert.Truef(t, err != nil && err.Error() == want, "got\n%v\nnot\n%s", err, want)
}
