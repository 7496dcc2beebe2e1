package flows_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// waitActions are the actions that wait, with the variables that they set.
var waitActions = map[string]struct {
	action    string
	kind      string
	variables []string
}{
	"response": {`actionType: wait_for_response`, "response", []string{"lastResponse"}},
	"document": {
		`actionType: request_document, parameters: {documents: INE}`, "document",
		[]string{"documentUrls", "documents"},
	},
	"signature": {
		`actionType: request_signature, parameters: {document: a.pdf}`, "signature",
		[]string{"signedDocumentUrl", "signedAt"},
	},
	"test":  {`actionType: assign_test, parameters: {test: sql}`, "test", []string{"testScore", "testResult"}},
	"event": {`actionType: wait_for_event, parameters: {key: never}`, "event", []string{"eventData"}},
	"child": {`actionType: trigger_agent, parameters: {flow: sleeper}`, "agent", []string{}},
}

const sleepingFlow = "name: sleeper\nactions: [{actionType: wait_for_event, parameters: {key: wake}}]"

func TestTimedOutRequestIsClosed(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - {actionType: assign_test, parameters: {test: sql}, timeout: 1h, onTimeout: continue}
  - {actionType: wait_for_event, parameters: {key: never}}`))
	id := w.startInThread(t, "a", nil)
	awaitWaiting(t, w.pool, id, 1)
	pgtest.Equal(t, w.pool, "pending", `select status from agent_requests`)
	expireWait(t, w, id, 1)
	awaitWaiting(t, w.pool, id, 2)
	pgtest.Equal(t, w.pool, "closed", `select status from agent_requests`)
}

func TestTimeoutContinueSetsNull(t *testing.T) {
	t.Parallel()
	for name, c := range waitActions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestProcess(t, sleepingFlow, flowYAML("a", `
  - {id: ask, `+c.action+`, saveAs: got, timeout: 1h, onTimeout: continue, timeoutActions: [{actionType: set, parameters: {variables: {told: "{{timedOut}}"}}}]}
  - {actionType: set, parameters: {variables: {after: "{{timedOut}}"}}}`))
			id := w.startInThread(t, "a", nil)
			x := awaitWaiting(t, w.pool, id, 1)
			assert.Truef(t, *x.WaitingFor == c.kind && strings.Contains(string(x.WaitingData), `"timeout": "1h"`) &&
				strings.Contains(string(x.WaitingData), `"action": "ask"`), "waits for %s, data %s", *x.WaitingFor, x.WaitingData)
			expireWait(t, w, id, 1)
			got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
			assert.Truef(t, got["timedOut"] == true && got["told"] == true && got["after"] == true, "variables %v", got)
			for _, name := range c.variables {
				value, known := got[name]
				assert.Truef(t, known && value == nil, "%s is %v (%v)", name, value, known)
			}
		})
	}
}

func TestWaitingDataHasDefaultTimeout(t *testing.T) {
	t.Parallel()
	for kind, want := range map[string]string{"response": "24h", "document": "7d", "child": "1h"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			w := newTestProcess(t, sleepingFlow, flowYAML("a", "\n  - {"+waitActions[kind].action+"}"))
			x := awaitWaiting(t, w.pool, w.startInThread(t, "a", nil), 1)
			assert.Contains(t, string(x.WaitingData), `"timeout": "`+want+`"`, `"threadId": "maria"`)
		})
	}
}

func TestTimeoutFailEndsExecution(t *testing.T) {
	t.Parallel()
	for name, c := range waitActions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestProcess(t, sleepingFlow, flowYAML("a", `
  - {id: ask, `+c.action+`, timeout: 90m, timeoutActions: [{actionType: send_message, parameters: {message: "We will call you."}}]}
  - {actionType: fail, parameters: {message: never}}`))
			id := w.startInThread(t, "a", nil)
			expireWait(t, w, id, 1)
			x := enginetest.Await(t, w.pool, id, executions.Timeout)
			want := "action ask (" + typeOf(c.action) + "): no " + c.kind + " came within 90m"
			assert.Truef(t, postgres.Deref(x.ErrorMessage) == want && postgres.Deref(x.FailedStep) == "ask" &&
				x.ResultSummary == "Timed out: "+want, "%q at %q, summary %q", postgres.Deref(x.ErrorMessage),
				postgres.Deref(x.FailedStep), x.ResultSummary)
			if !strings.HasSuffix(replies(t, w.pool), "We will call you.") {
				t.Errorf("the replies are %s", replies(t, w.pool))
			}
		})
	}
}

func typeOf(action string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(action, "actionType: "), ",")
	return name
}

// After a timeout, retry runs the timeoutActions and waits for the same event again, up to three times.
func TestTimeoutRetry(t *testing.T) {
	t.Parallel()
	for name, c := range waitActions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestProcess(t, sleepingFlow, flowYAML("a", `
  - {id: ask, `+c.action+`, timeout: 1h, onTimeout: retry, timeoutActions: [{actionType: send_message, parameters: {message: again}}]}`))
			id := w.startInThread(t, "a", nil)
			key := *awaitWaiting(t, w.pool, id, 1).WaitingKey
			for n := 1; n <= 4; n++ {
				assert.Equal(t, key, *awaitWaiting(t, w.pool, id, n).WaitingKey, "waits for", "not for")
				expireWait(t, w, id, n)
			}
			x := enginetest.Await(t, w.pool, id, executions.Timeout)
			if !strings.HasSuffix(postgres.Deref(x.ErrorMessage), "came within 1h, 4 times") ||
				strings.Count(replies(t, w.pool), "again") != 4 {
				t.Errorf("error %q, replies %s", postgres.Deref(x.ErrorMessage), replies(t, w.pool))
			}
		})
	}
}

func TestAnswerAfterRetry(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - {id: ask, actionType: wait_for_response, timeout: 1h, onTimeout: retry, timeoutActions: [{actionType: send_message, parameters: {message: "Still there?"}}]}
  - {actionType: send_message, parameters: {message: "You said {{lastResponse}}."}}`))
	id := w.startInThread(t, "a", nil)
	expireWait(t, w, id, 1)
	awaitWaiting(t, w.pool, id, 2)
	receiveMessage(t, w, "yes")
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Equal(t, "Still there? | You said yes.", replies(t, w.pool))
	assert.NoDiff(t, map[string]any{"lastResponse": "yes", "timedOut": false}, variables(t, x))
}

// A timeoutAction may end the flow.
func TestTimeoutActionEndsFlow(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - actionType: wait_for_response
    timeoutActions:
      - {actionType: set, parameters: {variables: {gone: true}}}
      - {actionType: end, parameters: {summary: "nobody there"}}
  - {actionType: fail, parameters: {message: never}}`))
	id := w.startInThread(t, "a", nil)
	expireWait(t, w, id, 1)
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Truef(t, x.ResultSummary == "nobody there" && variables(t, x)["gone"] == true,
		"%q %s", x.ResultSummary, x.Variables)
}

func TestMessageNeedsThread(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("talks", `
  - {id: hi, actionType: send_message, parameters: {message: hi}}`), flowYAML("asks", `
  - {actionType: assign_test, parameters: {test: sql, wait: false}}`))
	for name, want := range map[string]executions.Status{"talks": executions.Failed, "asks": executions.Completed} {
		x, _, err := w.Start(t.Context(), w.pool, executions.Spec{Flow: name, Surface: "flow"})
		require.NoError(t, err)
		got := enginetest.Await(t, w.pool, x.ID, want)
		if want == executions.Failed {
			assert.Equal(t, "action hi (send_message): "+flows.NoThread, postgres.Deref(got.ErrorMessage))
		}
	}
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_requests where kind = @kind`,
		postgres.Strict{"kind": "test"}))
	assert.Equal(t, 1, len(w.log.Lines("level=WARN", `msg="request not announced: no thread"`, "kind=test")))
}

func TestTalks(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		actions string
		talks   bool
	}{
		"message":          {`{actionType: send_message, parameters: {message: hi}}`, true},
		"invitation":       {`{actionType: open_thread}`, true},
		"response":         {`{actionType: wait_for_response}`, true},
		"own words":        {`{actionType: assign_test, parameters: {test: sql, message: hi}}`, true},
		"request":          {`{actionType: assign_test, parameters: {test: sql}}`, false},
		"failure":          {`{actionType: fail, parameters: {message: hi}}`, false},
		"in a branch":      {`{actionType: if, parameters: {condition: "1 > 2", then: [{actionType: open_thread}]}}`, false},
		"at a timeout":     {`{actionType: assign_test, parameters: {test: sql}, timeoutActions: [{actionType: open_thread}]}`, false},
		"with a condition": {`{actionType: open_thread, when: threadId != nil}`, false},
		"later":            {`{actionType: assign_test, parameters: {test: sql}}, {actionType: open_thread}`, true},
		"after a branch": {
			`{actionType: if, parameters: {condition: "1 > 2", then: [{actionType: fail, parameters: {message: hi}}]}}, {actionType: open_thread}`,
			false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.talks, flows.Talks(parseYAML(t, "name: a\nactions: ["+test.actions+"]")))
		})
	}
}

func TestConversation(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: greet
input: {type: object, required: [name], properties: {name: {type: string}, city: {type: string, default: Lima}}}
variables: {tries: 1}
actions:
  - {id: hello, actionType: send_message, parameters: {message: "Hola {{input.name}} de {{input.city}}, intento {{tries}}"}}
  - {id: ask, actionType: wait_for_response, saveAs: color, parameters: {timeout: 24h, onTimeout: continue}}
  - actionType: send_message
    when: color == "rojo"
    parameters: {message: "Tu color es {{ lastResponse }}"}
  - {actionType: send_message, when: 'color == "azul"', parameters: {message: never}}
`)
	id := w.startInThread(t, "greet", map[string]any{"name": "María"})
	x := awaitWaiting(t, w.pool, id, 1)
	assert.Truef(t, *x.WaitingFor == "response" && *x.WaitingKey == "maria",
		"waits for %s of %s", *x.WaitingFor, *x.WaitingKey)
	receiveMessage(t, w, "rojo")
	x = enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Equal(t, "Hola María de Lima, intento 1 | Tu color es rojo", replies(t, w.pool))
	want := map[string]any{"tries": 1.0, "lastResponse": "rojo", "color": "rojo", "timedOut": false}
	assert.NoDiff(t, want, variables(t, x))
	assert.Equal(t, "send_message, wait_for_response, send_message, send_message skipped", phaseStatuses(t, w.pool, id))
	assert.Equal(t, "Flow greet (version 1) completed.", x.ResultSummary)
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select flow_version from agent_executions where id = @id`,
		postgres.Strict{"id": id}))
}

func TestRequestActions(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: papers
actions:
  - {actionType: request_document, id: docs, parameters: {documents: [INE, "{{input.other}}"], message: "Sube INE: {{requestId}}"}}
  - {actionType: request_signature, parameters: {document: contract.pdf}}
  - {actionType: assign_test, saveAs: exam, parameters: {test: sql}}
  - {actionType: request_document, parameters: {documents: later, wait: false}}
`)
	id := w.startInThread(t, "papers", map[string]any{"other": "CURP"})
	key := *awaitWaiting(t, w.pool, id, 1).WaitingKey
	deliverEvent(t, w, "DOCUMENT_UPLOADED", key, `{"document": "CURP", "url": "u/curp"}`)
	deliverEvent(t, w, "DOCUMENT_UPLOADED", key, `{"document": "INE", "url": "u/ine"}`)
	deliverEvent(t, w, "SIGNATURE_COMPLETED", *awaitWaiting(t, w.pool, id, 2).WaitingKey,
		`{"url": "u/signed", "signedAt": "2026-01-01"}`)
	deliverEvent(t, w, "TEST_COMPLETED", *awaitWaiting(t, w.pool, id, 3).WaitingKey, `{"score": 80, "result": "passed"}`)
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	got := variables(t, x)
	open := pgtest.Value[string](t, w.pool, `select id::text from agent_requests where title = 'later'
		and execution_id = @id`, postgres.Strict{"id": id})
	want := map[string]any{
		"requestId": open, "documentUrls": []any{"u/ine", "u/curp"}, "documents": []any{
			map[string]any{"document": "INE", "url": "u/ine"}, map[string]any{"document": "CURP", "url": "u/curp"},
		}, "signedDocumentUrl": "u/signed", "signedAt": "2026-01-01",
		"testScore": 80.0, "testResult": "passed", "exam": map[string]any{"score": 80.0, "result": "passed"},
		"timedOut": false,
	}
	assert.NoDiff(t, want, got)
	assert.Equal(t, "Sube INE: "+key+" | Please sign this document: contract.pdf | A test is waiting "+
		"for you: sql | Please send us: later.", replies(t, w.pool))
}

func TestEventsAndDelays(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: calendar
actions:
  - {actionType: delay, parameters: {duration: "{{input.pause}}"}}
  - {actionType: delay, parameters: {until: "2020-01-01T00:00:00Z"}}
  - {actionType: wait_for_event, id: meet, saveAs: meeting, parameters: {key: "interview-{{input.n}}", timeout: 30d}}
`)
	id := w.startInThread(t, "calendar", map[string]any{"pause": "50ms", "n": 7})
	deliverEvent(t, w, "EVENT_COMPLETED", "interview-7", `{"room": 3}`)
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	want := map[string]any{
		"eventData": map[string]any{"room": 3.0}, "meeting": map[string]any{"room": 3.0},
		"timedOut": false,
	}
	assert.NoDiff(t, want, variables(t, x))
}

func TestEventDataMayBeAnyJSON(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("free", `
  - {actionType: wait_for_event, parameters: {key: "free-{{input.n}}"}}
`))
	for data, want := range map[string]any{
		`[1, {"a": null}]`: []any{1.0, map[string]any{"a": nil}}, `"done"`: "done", `7`: 7.0, `null`: nil,
	} {
		id := w.startInThread(t, "free", map[string]any{"n": data})
		deliverEvent(t, w, "EVENT_COMPLETED", "free-"+data, data)
		got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
		assert.Equal(t, "", cmp.Diff(map[string]any{"eventData": want, "timedOut": false}, got), data)
	}
}

func TestBranchesAndLoops(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: loops
variables: {sum: 0, names: [], n: 0}
actions:
  - actionType: for_each
    id: all
    parameters:
      items: "{{input.people}}"
      as: who
      actions:
        - actionType: if
          parameters:
            condition: who.age >= 18
            then: [{actionType: set, parameters: {expressions: {sum: sum + who.age}}}]
            else: [{actionType: set, parameters: {variables: {young: "{{who.name}} ({{index}})"}}}]
  - actionType: while
    id: count
    parameters: {condition: n < 40, max: 50, actions: [{actionType: set, parameters: {expressions: {n: n + 1}}}]}
  - {actionType: delay, parameters: {duration: 10ms}}
  - actionType: switch
    parameters:
      value: "{{sum}}"
      cases:
        - {equals: 1, actions: [{actionType: fail, parameters: {message: no}}]}
        - {condition: sum > 100, actions: [{actionType: fail, parameters: {message: no}}]}
        - {equals: 50, actions: [{actionType: set, parameters: {variables: {chosen: fifty}}}]}
      default: [{actionType: fail, parameters: {message: no}}]
  - actionType: switch
    parameters: {cases: [{condition: "false", actions: []}], default: [{actionType: set, parameters: {variables: {last: "{{chosen}}"}}}]}
  - {actionType: if, parameters: {condition: "false", then: [{actionType: fail, parameters: {message: no}}]}}
  - {actionType: end, parameters: {summary: "Sum {{sum}}", result: {sum: "{{sum}}"}}}
  - {actionType: fail, parameters: {message: never}}
`)
	id := w.startInThread(t, "loops", map[string]any{"people": []any{
		map[string]any{"name": "Ana", "age": 20},
		map[string]any{"name": "Leo", "age": 9},
		map[string]any{"name": "Eva", "age": 30},
	}})
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	want := map[string]any{
		"sum": 50.0, "names": []any{}, "n": 40.0, "young": "Leo (1)",
		"chosen": "fifty", "last": "fifty",
	}
	assert.NoDiff(t, want, variables(t, x))
	assert.Equal(t, "Sum 50", x.ResultSummary, x.Result)
	assert.Equal(t, `{"sum": 50}`, string(x.Result), x.Result)
}

// A variable may have the name of an allowed function (count, last) or of another function (now) of the language.
func TestVariableNamedLikeFunction(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: named
variables: {count: 0, now: 3, last: 0}
actions:
  - actionType: while
    parameters:
      condition: count < 2
      actions: [{actionType: set, parameters: {expressions: {count: count + 1}}}]
  - actionType: for_each
    parameters: {items: [1, 2], as: len, actions: [{actionType: set, parameters: {expressions: {last: last + len}}}]}
  - actionType: set
    parameters: {expressions: {result: "count + count(input.filter, # > count) + now + input.filter[0] + (max ?? 100)"}}
`)
	id := w.startInThread(t, "named", map[string]any{"filter": []any{10, 1, 20}})
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	want := map[string]any{"count": 2.0, "now": 3.0, "last": 3.0, "result": 117.0}
	assert.NoDiff(t, want, variables(t, x))
}

// In the condition of a while, index is 0 at the first check, even inside another loop.
func TestWhileIndexStartsAtZero(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: counts
variables: {sum: 0}
actions:
  - {actionType: while, parameters: {condition: index < 4, actions: [{actionType: set, parameters: {expressions: {sum: sum + index}}}]}}
  - actionType: for_each
    parameters:
      items: [a, b, c]
      actions: [{actionType: while, parameters: {condition: index < 2, actions: [{actionType: set, parameters: {expressions: {sum: sum + 100}}}]}}]
`)
	x := enginetest.Await(t, w.pool, w.startInThread(t, "counts", nil), executions.Completed)
	assert.NoDiff(t, map[string]any{"sum": 606.0}, variables(t, x))
}

// An action that ends the flow ends it from inside loops and branches, too.
func TestEndAndFailActions(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t,
		flowYAML("inner", `
  - actionType: for_each
    parameters:
      items: [1, 2, 3]
      actions:
        - {actionType: if, parameters: {condition: item == 2, then: [{actionType: end, parameters: {summary: "at {{item}}"}}]}}
        - {actionType: set, parameters: {variables: {seen: "{{item}}"}}}
  - {actionType: fail, parameters: {message: never}}`),
		flowYAML("failed", `
  - {actionType: end, parameters: {status: failed, summary: "not fit"}}`),
		flowYAML("late", `
  - {actionType: end, parameters: {status: timeout}}`),
		flowYAML("fails", `
  - {id: stop, actionType: fail, parameters: {message: "no {{input.what}}"}}`))
	x := enginetest.Await(t, w.pool, w.startInThread(t, "inner", nil), executions.Completed)
	diff := cmp.Diff(map[string]any{"seen": 1.0}, variables(t, x))
	assert.Truef(t, diff == "" && x.ResultSummary == "at 2", "%s%q", diff, x.ResultSummary)
	x = enginetest.Await(t, w.pool, w.startInThread(t, "failed", nil), executions.Failed)
	assert.Truef(t, postgres.Deref(
		x.ErrorMessage) == "not fit" && x.ResultSummary == "not fit", "failed with %q", postgres.Deref(x.ErrorMessage))
	enginetest.Await(t, w.pool, w.startInThread(t, "late", nil), executions.Timeout)
	x = enginetest.Await(t, w.pool, w.startInThread(t, "fails", map[string]any{"what": "way"}), executions.Failed)
	assert.Truef(t, postgres.Deref(x.ErrorMessage) == "action stop (fail): no way" &&
		postgres.Deref(x.FailedStep) == "stop",
		"failed with %q at %q", postgres.Deref(x.ErrorMessage), postgres.Deref(x.FailedStep))
}

// A runtime error of a template, an expression or a parameter fails the flow. The error names the action.
func TestRuntimeErrorNamesAction(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ action, message, class string }{
		"in a text": {
			`{actionType: send_message, id: hi, parameters: {message: "Hi {{nombre}}"}}`,
			`action hi (send_message): message: variable "nombre" is not known; set it before, or give it a default: {{nombre ?? "…"}}`, "template",
		},
		"misspelt": {
			`{actionType: set, parameters: {variables: {x: {y: ["{{colour.a}}"]}}}}`,
			`action set 1: variables: variable "colour.a" is not known, did you mean "color"?; set it before, or give it a default: {{colour.a ?? "…"}}`, "template",
		},
		"a member": {
			`{actionType: send_message, parameters: {message: "{{color.name}}"}}`,
			`action send_message 1: message: variable "color.name" is not known; set it before, or give it a default: {{color.name ?? "…"}}`, "template",
		},
		"null in a text": {
			`{actionType: send_message, parameters: {message: "a {{nothing}}"}}`,
			`action send_message 1: message: variable "nothing" is null; give it a default: {{nothing ?? "…"}}`, "template",
		},
		"in a condition": {
			`{actionType: send_message, when: colr == "a", parameters: {message: "{{b}}"}}`,
			`action send_message 1: when: variable "colr" is not known, did you mean "color"?; set it before, or write (colr ?? …)`, "template",
		},
		"not a condition": {
			`{actionType: if, parameters: {condition: color, then: []}}`,
			`action if 1: condition: color: is "red", not true or false`, "expression",
		},
		"infinite value": {
			`{actionType: set, parameters: {expressions: {x: 1 / 0}}}`,
			`action set 1: x: 1 / 0: +Inf is not a value that JSON has`, "expression",
		},
		"no list": {
			`{actionType: for_each, parameters: {items: "{{color}}", actions: []}}`,
			`action for_each 1: items: is "red", not a list`, "template",
		},
		"endless loop": {
			`{actionType: while, parameters: {condition: "true", max: 20, actions: []}}`,
			`action while 1: the condition still holds after 20 times`, "limit",
		},
		"an invalid delay": {
			`{actionType: delay, parameters: {duration: "{{color}}"}}`,
			`action delay 1: duration: "red" is not a duration: write 30s, 90m, 24h or 7d`, "delay",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestProcess(t, "name: a\nvariables: {color: red, nothing: null}\nactions:\n  - "+c.action)
			id := w.startInThread(t, "a", nil)
			x := enginetest.Await(t, w.pool, id, executions.Failed)
			assert.Equal(t, c.message, postgres.Deref(x.ErrorMessage))
			class := pgtest.Value[string](t, w.pool, `select error_class from agent_activity where execution_id = @id
				and status = 'error'`, postgres.Strict{"id": id})
			assert.Equal(t, c.class, class)
		})
	}
}

func TestTemplates(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: a
variables: {list: [1, two], deep: {a: [{b: 1.5}]}, "yes": true, big: 12345678901234, nothing: null}
actions:
  - actionType: set
    parameters:
      variables:
        whole: "{{list}}"
        text: "<{{list}}> <{{deep.a}}> <{{ deep.a.0.b }}> {{yes}} {{big}}"
        missing: "{{gone ?? 5}}"
        filter: "{{gone | default: 'x }} y'}} {{deep.z | default: \"q\"}} {{nothing ?? \"n\"}}"
        quoted: '{{"{{"}}name}}'
        kept: "{{nothing}}"
      expressions: {half: big / 2, safe: 'gone ?? "none"', some: 'any(list, # == "two")', far: 'deep?.q?.r', own: 'let k = 2; k * 3'}
`)
	x := enginetest.Await(t, w.pool, w.startInThread(t, "a", nil), executions.Completed)
	got := variables(t, x)
	want := map[string]any{
		"whole": []any{1.0, "two"}, "text": `<1, two> <[{"b":1.5}]> <1.5> true 12345678901234`, "missing": 5.0,
		"filter": "x }} y q n",
		"quoted": "{{name}}", "kept": nil, "half": 6172839450617.0, "safe": "none", "some": true, "far": nil, "own": 6.0,
	}
	for name, value := range want {
		assert.Equal(t, "", cmp.Diff(value, got[name]), name)
	}
}
