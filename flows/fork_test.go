package flows_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
)

// Another input that a kept action has not worked on is refused at once, with the action's name, however the flow is seen to change.
func TestAForkWhoseInputContradictsARecordIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("greets", `
  - {id: greet, actionType: send_message, parameters: {message: "Hola {{input.name}}"}}
  - {id: more, when: input.more, actionType: send_message, parameters: {message: "Algo mas"}}
  - {id: each, actionType: for_each, parameters: {items: "{{input.items}}", actions: [{id: item, actionType: send_message, parameters: {message: "{{item}}"}}]}}
  - {id: decide, actionType: if, parameters: {condition: input.vip, then: [{id: vip, actionType: send_message, parameters: {message: "Bienvenida"}}]}}
  - {id: compose, actionType: set, parameters: {expressions: {greeting: "input.name2 + '!'"}}}
  - {id: bye, actionType: send_message, parameters: {message: "Adios {{input.farewell}}"}}`))
	thread(t, w.pool)
	was := map[string]any{"name": "Ana", "more": true, "items": []string{"a", "b"}, "vip": true, "name2": "Ana", "farewell": ""}
	id := w.begin(t, "greets", was)
	until(t, w.pool, id, executions.Completed)
	w.stop()
	fresh := process(t, w.pool, nil)
	for name, c := range map[string]struct {
		change any
		step   string
	}{
		"name":     {"Eva", "greet"},
		"more":     {false, "more"},
		"items":    {[]string{"a"}, "each"},
		"vip":      {false, "decide"},
		"name2":    {"Bea", "compose"},
		"farewell": {"!", ""},
	} {
		input := maps.Clone(was)
		input[name] = c.change
		text, err := json.Marshal(input)
		if err != nil {
			t.Fatal(err)
		}
		x, err := fresh.Fork(t.Context(), w.pool, executions.ForkSpec{ID: id, From: "bye", Input: text})
		_, latest := fresh.Fork(t.Context(), w.pool, executions.ForkSpec{ID: id, From: "bye", Input: text, Latest: true})
		if fmt.Sprint(latest) != fmt.Sprint(err) {
			t.Errorf("%s, the current version: %v, want %v", name, latest, err)
		}
		switch {
		case c.step == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.step == "":
			until(t, w.pool, x.ID, executions.Completed)
		case !errors.Is(err, executions.ErrChanged) || !strings.Contains(err.Error(), c.step):
			t.Errorf("%s: %v", name, err)
		}
	}
}

// An input that the flow does not take is refused at once, too, also where the step that looked at the first one is kept.
func TestAForkWithAnInputThatTheFlowDoesNotTakeIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `
name: greets
input: {type: object, required: [name], properties: {name: {type: string}}}
actions:
  - {id: greet, actionType: set, parameters: {variables: {hello: "Hola {{input.name}}"}}}`)
	id := w.begin(t, "greets", map[string]any{"name": "Ana"})
	until(t, w.pool, id, executions.Completed)
	for input, want := range map[string]string{`{}`: "name", `[1]`: "object", `{"name": "Eva"}`: ""} {
		_, err := w.Fork(t.Context(), w.pool, executions.ForkSpec{ID: id, From: "greet", Input: json.RawMessage(input)})
		if want == "" && err != nil || want != "" && (!errors.Is(err, executions.ErrNoFork) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", input, err)
		}
	}
	if n := value[int](t, w.pool, `select count(*)::int from agent_executions`); n != 2 {
		t.Errorf("%d executions, want the first and one fork", n)
	}
}

// A whole number stays what it is over a wait, however large, and the flow goes on.
func TestALargeNumberIsKeptOverAWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("numbers", `
  - {id: take, actionType: set, parameters: {expressions: {id: "input.id"}}}
  - {id: wait, actionType: wait_for_event, parameters: {key: go}}
  - {id: say, actionType: send_message, parameters: {message: "{{id}}"}}`))
	id := w.begin(t, "numbers", json.RawMessage(`{"id": 123456789012345678}`))
	until(t, w.pool, id, executions.Waiting)
	if _, err := w.Deliver(t.Context(), w.pool, "EVENT_COMPLETED", "go", nil, ""); err != nil {
		t.Fatal(err)
	}
	until(t, w.pool, id, executions.Completed)
	if said := value[string](t, w.pool, `select content from agent_messages order by id desc limit 1`); said != "123456789012345678" {
		t.Errorf("it says %s", said)
	}
}
