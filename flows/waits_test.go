package flows_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// waiting are the actions that wait, each with what it sets.
var waiting = map[string]struct {
	action string
	kind   string
	sets   []string
}{
	"response":  {`actionType: wait_for_response`, "response", []string{"lastResponse"}},
	"document":  {`actionType: request_document, parameters: {documents: INE}`, "document", []string{"documentUrls", "documents"}},
	"signature": {`actionType: request_signature, parameters: {document: a.pdf}`, "signature", []string{"signedDocumentUrl", "signedAt"}},
	"test":      {`actionType: assign_test, parameters: {test: sql}`, "test", []string{"testScore", "testResult"}},
	"event":     {`actionType: wait_for_event, parameters: {key: never}`, "event", []string{"eventData"}},
	"child":     {`actionType: trigger_agent, parameters: {flow: sleeper}`, "agent", []string{}},
}

const sleeper = "name: sleeper\nactions: [{actionType: wait_for_event, parameters: {key: wake}}]"

func TestATimeoutThatContinuesSetsNull(t *testing.T) {
	t.Parallel()
	for name, c := range waiting {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, sleeper, flow("a", `
  - {id: ask, `+c.action+`, saveAs: got, timeout: 1h, onTimeout: continue, timeoutActions: [{actionType: set, parameters: {variables: {told: "{{timedOut}}"}}}]}
  - {actionType: set, parameters: {variables: {after: "{{timedOut}}"}}}`))
			id := w.begin(t, "a", nil)
			x := waits(t, w.pool, id, 1)
			if *x.WaitingFor != c.kind || !strings.Contains(string(x.WaitingData), `"timeout": "1h"`) || !strings.Contains(string(x.WaitingData), `"action": "ask"`) {
				t.Errorf("waits for %s, data %s", *x.WaitingFor, x.WaitingData)
			}
			late(t, w, id, 1)
			got := variables(t, until(t, w.pool, id, executions.Completed))
			if got["timedOut"] != true || got["told"] != true || got["after"] != true {
				t.Errorf("variables %v", got)
			}
			for _, name := range c.sets {
				if value, known := got[name]; !known || value != nil {
					t.Errorf("%s is %v (%v)", name, value, known)
				}
			}
		})
	}
}

func TestATimeoutThatFailsEndsTheExecutionAsTimedOut(t *testing.T) {
	t.Parallel()
	for name, c := range waiting {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, sleeper, flow("a", `
  - {id: ask, `+c.action+`, timeout: 90m, timeoutActions: [{actionType: send_message, parameters: {message: "We will call you."}}]}
  - {actionType: fail, parameters: {message: never}}`))
			id := w.begin(t, "a", nil)
			late(t, w, id, 1)
			x := until(t, w.pool, id, executions.Timeout)
			want := "action ask (" + typeOf(c.action) + "): no " + c.kind + " came within 90m"
			if deref(x.ErrorMessage) != want || deref(x.FailedStep) != "ask" || x.ResultSummary != "Timed out: "+want {
				t.Errorf("%q at %q, summary %q", deref(x.ErrorMessage), deref(x.FailedStep), x.ResultSummary)
			}
			if !strings.HasSuffix(said(t, w.pool), "We will call you.") {
				t.Errorf("said %s", said(t, w.pool))
			}
		})
	}
}

func typeOf(action string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(action, "actionType: "), ",")
	return name
}

// Retry waits three times more, for the same thing, with the timeoutActions before each.
func TestATimeoutThatRetries(t *testing.T) {
	t.Parallel()
	for name, c := range waiting {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, sleeper, flow("a", `
  - {id: ask, `+c.action+`, timeout: 1h, onTimeout: retry, timeoutActions: [{actionType: send_message, parameters: {message: again}}]}`))
			id := w.begin(t, "a", nil)
			key := *waits(t, w.pool, id, 1).WaitingKey
			for n := 1; n <= 4; n++ {
				if x := waits(t, w.pool, id, n); *x.WaitingKey != key {
					t.Errorf("waits for %s, not for %s", *x.WaitingKey, key)
				}
				late(t, w, id, n)
			}
			x := until(t, w.pool, id, executions.Timeout)
			if !strings.HasSuffix(deref(x.ErrorMessage), "came within 1h, 4 times") || strings.Count(said(t, w.pool), "again") != 4 {
				t.Errorf("%q, said %s", deref(x.ErrorMessage), said(t, w.pool))
			}
		})
	}
}

func TestAnAnswerAfterARetryCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("a", `
  - {id: ask, actionType: wait_for_response, timeout: 1h, onTimeout: retry, timeoutActions: [{actionType: send_message, parameters: {message: "Still there?"}}]}
  - {actionType: send_message, parameters: {message: "You said {{lastResponse}}."}}`))
	id := w.begin(t, "a", nil)
	late(t, w, id, 1)
	waits(t, w.pool, id, 2)
	answer(t, w, "yes")
	x := until(t, w.pool, id, executions.Completed)
	if got := said(t, w.pool); got != "Still there? | You said yes." {
		t.Errorf("said %s", got)
	}
	if diff := cmp.Diff(map[string]any{"lastResponse": "yes", "timedOut": false}, variables(t, x)); diff != "" {
		t.Error(diff)
	}
}

// A timeoutAction may end the flow.
func TestATimeoutActionEndsTheFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("a", `
  - actionType: wait_for_response
    timeoutActions:
      - {actionType: set, parameters: {variables: {gone: true}}}
      - {actionType: end, parameters: {summary: "nobody there"}}
  - {actionType: fail, parameters: {message: never}}`))
	id := w.begin(t, "a", nil)
	late(t, w, id, 1)
	x := until(t, w.pool, id, executions.Completed)
	if x.ResultSummary != "nobody there" || variables(t, x)["gone"] != true {
		t.Errorf("%q %s", x.ResultSummary, x.Variables)
	}
}

func TestWithoutAThreadNothingIsSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("talks", `
  - {id: hi, actionType: send_message, parameters: {message: hi}}`), flow("asks", `
  - {actionType: assign_test, parameters: {test: sql, wait: false}}`))
	for name, want := range map[string]executions.Status{"talks": executions.Failed, "asks": executions.Completed} {
		x, _, err := w.Start(t.Context(), w.pool, executions.Spec{Flow: name, Surface: "flow"})
		if err != nil {
			t.Fatal(err)
		}
		got := until(t, w.pool, x.ID, want)
		if want == executions.Failed && deref(got.ErrorMessage) != "action hi (send_message): this execution has no thread to talk in; start it with one" {
			t.Errorf("%q", deref(got.ErrorMessage))
		}
	}
	if n := value[int](t, w.pool, `select count(*) from agent_requests where kind = @kind`, postgres.Strict{"kind": "test"}); n != 1 {
		t.Errorf("%d requests", n)
	}
}
