//go:build unix

package soak_test

import (
	"fmt"
)

// scenario is a flow of which many executions run, or that they start as a child. Everything that it says is known
// beforehand: {n} is the number of the root, and what is heard from outside is part of what is said next, so that a
// message that is lost, repeated or given to another shows in the words.
type scenario struct {
	flow     string
	ends     string         // the status in the end
	says     []string       // in this order
	children map[string]int // how many of each flow it starts, itself
	pays     int            // calls of the skill that must not be repeated; after a crash in one the execution fails
	looks    int            // calls of the skill that may be repeated
	weight   int            // of 20 executions; 0 for one that is only a child
	private  bool           // has a thread of its own
}

// scenarios are all of them; flowsYAML is what they do.
var scenarios = []scenario{
	{
		flow: "talk", ends: "completed", looks: 1, weight: 5,
		says: []string{
			"{n} talk 1: hello", "{n} talk 2: how are you?", "{n} talk 3: heard [answer to {n} talk 2] looked {n}",
			"{n} talk 4: and now?",
			"{n} talk 5: heard [answer to {n} talk 4]",
		},
	},
	{
		flow: "papers", ends: "completed", pays: 1, weight: 3,
		says: []string{
			"{n} papers 1: welcome", "{n} papers 2: send both", "{n} papers 3: got [url {n} INE, url {n} CURP], sign",
			"{n} papers 4: got [signed {n}], a test",
			"{n} papers 5: got [{n}]", "{n} papers 6: got [event {n}]",
		},
	},
	{
		flow: "family", ends: "completed", looks: 1, weight: 3,
		children: map[string]int{"speaker": 1, "aside": 1, "failing": 1, "nested": 1},
		says: []string{
			"{n} family 1: begins", "{n} family 2: completed", "{n} family 3: failed", "{n} family 4: completed",
			"{n} family 5: ends",
		},
	},
	{
		flow: "speaker", ends: "completed",
		says: []string{"{n} speaker 1: a word?", "{n} speaker 2: heard [answer to {n} speaker 1]"},
	},
	{flow: "aside", ends: "completed", says: []string{"{n} aside 1: by the way"}},
	{flow: "failing", ends: "failed"},
	{
		flow: "nested", ends: "completed", children: map[string]int{"brief": 1},
		says: []string{"{n} nested 1: begins", "{n} nested 2: ends"},
	},
	{flow: "brief", ends: "completed", says: []string{"{n} brief 1: said"}},
	{
		flow: "late", ends: "completed", looks: 1, weight: 2, private: true, children: map[string]int{"slow": 1},
		says: []string{
			"{n} late 1: begins", "{n} late 2: nobody", "{n} late 3: nothing", "{n} late 4: send both", "{n} late 5: not all",
			"{n} late 6: goes on", "{n} late 7: ends",
		},
	},
	{flow: "slow", ends: "completed", says: []string{"{n} slow 1: at last"}},
	{
		flow: "overdue", ends: "timeout", looks: 1, weight: 2, children: map[string]int{"brief": 1},
		says: []string{"{n} overdue 1: begins", "{n} overdue 2: second", "{n} overdue 3: third", "{n} overdue 4: too late"},
	},
	{
		flow: "patient", ends: "completed", weight: 2,
		says: []string{
			"{n} patient 1: begins", "{n} patient 2: still nothing", "{n} patient 3: got [event {n}]",
			"{n} patient 4: ends",
		},
	},
	{
		flow: "stubborn", ends: "timeout", weight: 1,
		says: []string{
			"{n} stubborn 1: begins", "{n} stubborn 2: again", "{n} stubborn 3: again", "{n} stubborn 4: again",
			"{n} stubborn 5: again",
		},
	},
	{
		flow: "errands", ends: "completed", pays: 2, looks: 2, weight: 1, private: true,
		says: []string{"{n} errands 1: begins", "{n} errands 2: sum 171", "{n} errands 3: got [event {n}]"},
	},
	{
		flow: "stopped", ends: "cancelled", weight: 1, looks: 1, children: map[string]int{"stays": 1},
		says: []string{"{n} stopped 1: begins"},
	},
	{flow: "stays", ends: "cancelled"},
}

// of is the scenario of the n-th execution, and the thread in which it talks: several share one.
func of(n int) (s scenario, thread string) {
	at := n % 20
	for _, s := range scenarios {
		if at -= s.weight; at < 0 {
			if s.private {
				return s, fmt.Sprintf("p%d", n)
			}
			return s, fmt.Sprintf("t%d-%d", n/20, n%3)
		}
	}
	panic("the weights are not 20")
}

// waitsForEvent reports whether an execution of the flow waits for the event "event {n}".
func (s scenario) waitsForEvent() bool {
	return s.flow == "papers" || s.flow == "patient" || s.flow == "errands"
}

const flowsYAML = `
kind: skill
name: look
description: May be repeated.
handler: "http:POST %s/look"
idempotent: true
parameters: {type: object, required: [n], properties: {n: {type: integer}, at: {type: string}}}
---
kind: skill
name: pay
description: Must not be repeated.
handler: "http:POST %s/pay"
parameters: {type: object, required: [n], properties: {n: {type: integer}, at: {type: string}}}
---
kind: webhook_target
name: post
url: "%s/post"
secrets: ["${SHOP_SECRET}"]
events: [skill.disabled]
---
kind: flow
name: talk
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} talk 1: hello"}}
  - {actionType: send_message, parameters: {message: "{{input.n}} talk 2: how are you?"}}
  - {actionType: wait_for_response, timeout: 24h, onTimeout: fail}
  - {actionType: set, parameters: {variables: {first: "{{lastResponse}}"}}}
  - {actionType: skill, saveAs: looked, parameters: {name: look, arguments: {n: "{{input.n}}", at: talk}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} talk 3: heard [{{first}}] looked {{looked.n}}"}}
  - {actionType: delay, parameters: {duration: 1s}}
  - {actionType: send_message, parameters: {message: "{{input.n}} talk 4: and now?"}}
  - {actionType: wait_for_response, timeout: 24h, onTimeout: fail}
  - {actionType: send_message, parameters: {message: "{{input.n}} talk 5: heard [{{lastResponse}}]"}}
---
kind: flow
name: papers
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} papers 1: welcome"}}
  - {actionType: request_document, timeout: 7d, parameters: {documents: [INE, CURP], message: "{{input.n}} papers 2: send both"}}
  - {actionType: set, parameters: {variables: {urls: "{{documentUrls}}"}}}
  - actionType: request_signature
    parameters: {document: contract.pdf, message: "{{input.n}} papers 3: got [{{urls}}], sign"}
  - {actionType: assign_test, parameters: {test: sql, message: "{{input.n}} papers 4: got [{{signedDocumentUrl}}], a test"}}
  - {actionType: send_message, parameters: {message: "{{input.n}} papers 5: got [{{testScore}}]"}}
  - {actionType: wait_for_event, parameters: {key: "event {{input.n}}"}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}", at: papers}}}
  - {actionType: delay, parameters: {duration: 300ms}}
  - {actionType: send_message, parameters: {message: "{{input.n}} papers 6: got [{{eventData.is}}]"}}
---
kind: flow
name: family
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} family 1: begins"}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: speaker, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} family 2: {{childExecutionStatus}}"}}
  - {actionType: trigger_agent, parameters: {flow: aside, waitForCompletion: false, input: {n: "{{input.n}}"}}}
  - {actionType: trigger_agent, parameters: {flow: failing, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} family 3: {{childExecutionStatus}}"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: family}}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: nested, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} family 4: {{childExecutionStatus}}"}}
  - {actionType: send_message, parameters: {message: "{{input.n}} family 5: ends"}}
---
kind: flow
name: speaker
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} speaker 1: a word?"}}
  - {actionType: wait_for_response, timeout: 24h}
  - {actionType: send_message, parameters: {message: "{{input.n}} speaker 2: heard [{{lastResponse}}]"}}
---
kind: flow
name: aside
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} aside 1: by the way"}}
---
kind: flow
name: failing
actions:
  - {actionType: fail, parameters: {message: as it should}}
---
kind: flow
name: nested
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} nested 1: begins"}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: brief, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} nested 2: ends"}}
---
kind: flow
name: brief
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} brief 1: said"}}
---
kind: flow
name: late
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} late 1: begins"}}
  - actionType: wait_for_response
    timeout: 1s
    onTimeout: continue
    timeoutActions: [{actionType: send_message, parameters: {message: "{{input.n}} late 2: nobody"}}]
  - actionType: wait_for_event
    parameters: {key: "late {{input.n}}"}
    timeout: 1s
    onTimeout: continue
    timeoutActions: [{actionType: send_message, parameters: {message: "{{input.n}} late 3: nothing"}}]
  - actionType: request_document
    parameters: {documents: [INE, CURP], message: "{{input.n}} late 4: send both"}
    timeout: 1s
    onTimeout: continue
    timeoutActions: [{actionType: send_message, parameters: {message: "{{input.n}} late 5: not all"}}]
  - {actionType: trigger_agent, timeout: 1s, onTimeout: continue, parameters: {flow: slow, input: {n: "{{input.n}}"}}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: late}}}
  - {actionType: assign_test, parameters: {test: sql, wait: false, message: "{{input.n}} late 6: goes on"}}
  - {actionType: set, parameters: {variables: {done: true}}}
  - {actionType: delay, parameters: {duration: 200ms}}
  - {actionType: send_message, when: done and timedOut, parameters: {message: "{{input.n}} late 7: ends"}}
---
kind: flow
name: slow
actions:
  - {actionType: wait_for_event, parameters: {key: "slow {{input.n}}"}}
  - {actionType: send_message, parameters: {message: "{{input.n}} slow 1: at last"}}
---
kind: flow
name: overdue
variables: {sum: 0}
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} overdue 1: begins"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: overdue}}}
  - {actionType: delay, parameters: {duration: 500ms}}
  - {actionType: set, parameters: {variables: {seen: true}}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: brief, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} overdue 2: second"}}
  - {actionType: for_each, parameters: {items: [1, 2, 3], actions: [{actionType: set, parameters: {expressions: {sum: sum + item}}}]}}
  - actionType: switch
    parameters:
      value: "{{sum}}"
      cases: [{equals: 6, actions: [{actionType: send_message, parameters: {message: "{{input.n}} overdue 3: third"}}]}]
  - actionType: wait_for_event
    parameters: {key: "late {{input.n}}"}
    timeout: 1s
    onTimeout: fail
    timeoutActions: [{actionType: send_message, parameters: {message: "{{input.n}} overdue 4: too late"}}]
  - {actionType: send_message, parameters: {message: "{{input.n}} overdue 5: never"}}
---
kind: flow
name: patient
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} patient 1: begins"}}
  - actionType: wait_for_event
    parameters: {key: "event {{input.n}}"}
    timeout: 7d
    onTimeout: retry
    timeoutActions: [{actionType: send_message, parameters: {message: "{{input.n}} patient 2: still nothing"}}]
  - {actionType: set, parameters: {variables: {is: "{{eventData.is}}"}}}
  - {actionType: delay, parameters: {duration: 300ms}}
  - {actionType: send_message, parameters: {message: "{{input.n}} patient 3: got [{{is}}]"}}
  - {actionType: if, parameters: {condition: timedOut, then: [{actionType: fail, parameters: {message: the event came}}]}}
  - {actionType: set, parameters: {variables: {a: 1}}}
  - {actionType: set, parameters: {expressions: {b: a + 1}}}
  - {actionType: delay, parameters: {duration: 300ms}}
  - {actionType: send_message, when: b == 2, parameters: {message: "{{input.n}} patient 4: ends"}}
---
kind: flow
name: stubborn
variables: {tries: 1}
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} stubborn 1: begins"}}
  - actionType: wait_for_event
    parameters: {key: "late {{input.n}}"}
    timeout: 500ms
    onTimeout: retry
    timeoutActions:
      - {actionType: set, parameters: {expressions: {tries: tries + 1}}}
      - {actionType: send_message, parameters: {message: "{{input.n}} stubborn {{tries}}: again"}}
---
kind: flow
name: errands
channel: webhook
target: post
variables: {sum: 0}
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} errands 1: begins"}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}", at: first}}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: first}}}
  - actionType: for_each
    parameters:
      items: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
      actions: [{actionType: set, parameters: {expressions: {sum: sum + item}}}]
  - {actionType: send_message, parameters: {message: "{{input.n}} errands 2: sum {{sum}}"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: second}}}
  - {actionType: wait_for_event, parameters: {key: "event {{input.n}}"}}
  - {actionType: delay, parameters: {duration: 300ms}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}", at: second}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} errands 3: got [{{eventData.is}}]"}}
---
kind: flow
name: stopped
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} stopped 1: begins"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}", at: stopped}}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: stays, input: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} stopped 2: never"}}
---
kind: flow
name: stays
actions:
  - {actionType: wait_for_event, parameters: {key: "never {{input.n}}"}}
  - {actionType: send_message, parameters: {message: "{{input.n}} stays 1: never"}}
`
