package flows_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// parseDefinition parses a definition like the API: unknown keys are errors.
func parseDefinition(text string) (flows.Definition, error) {
	var d flows.Definition
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	return d, decoder.Decode(&d)
}

// definitionCases are valid and invalid definitions, by the tested rule.
var definitionCases = map[string]struct {
	valid bool
	text  string
}{
	"minimal":                  {true, `{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": "hi"}}]}`},
	"no name":                  {false, `{"actions": [{"actionType": "send_message", "parameters": {"message": "hi"}}]}`},
	"bad name":                 {false, `{"name": "1 a", "actions": [{"actionType": "wait_for_response"}]}`},
	"reserved name":            {false, `{"name": "external", "actions": [{"actionType": "end"}]}`},
	"no actions":               {false, `{"name": "a", "actions": []}`},
	"actions missing":          {false, `{"name": "a"}`},
	"unknown key":              {false, `{"name": "a", "action": [], "actions": [{"actionType": "wait_for_response"}]}`},
	"unknown type":             {false, `{"name": "a", "actions": [{"actionType": "send_mesage", "parameters": {"message": "hi"}}]}`},
	"no type":                  {false, `{"name": "a", "actions": [{"parameters": {"message": "hi"}}]}`},
	"not an action":            {false, `{"name": "a", "actions": ["send_message"]}`},
	"unknown key of an action": {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "wen": "true"}]}`},
	"unknown parameter": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"mesage": "hi", "message": "x"}}]}`,
	},
	"missing parameter": {false, `{"name": "a", "actions": [{"actionType": "send_message", "parameters": {}}]}`},
	"no parameters":     {false, `{"name": "a", "actions": [{"actionType": "send_message"}]}`},
	"null parameter": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": null}}]}`,
	},
	"parameters null": {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "parameters": null}]}`},
	"number for text": {false, `{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": 5}}]}`},
	"empty text":      {false, `{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": ""}}]}`},
	"timeout among parameters": {
		true,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "parameters": {"timeout": "24h", "onTimeout": "continue"}}]}`,
	},
	"timeout beside parameters": {
		true,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "timeout": "1d12h", "onTimeout": "retry", "timeoutActions": [{"actionType": "send_message", "parameters": {"message": "there?"}}]}]}`,
	},
	"timeout twice": {
		false,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "timeout": "1h", "parameters": {"timeout": "24h"}}]}`,
	},
	"bad timeout":       {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "timeout": "a day"}]}`},
	"timeout as number": {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "timeout": 24}]}`},
	"bad onTimeout":     {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "onTimeout": "stop"}]}`},
	"timeout without a wait": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "timeout": "1h", "parameters": {"message": "hi"}}]}`,
	},
	"timeout parameter without a wait": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": "hi", "timeout": "1h"}}]}`,
	},
	"saveAs": {true, `{"name": "a", "actions": [{"actionType": "wait_for_response", "saveAs": "name"}]}`},
	"saveAs without a result": {
		false,
		`{"name": "a", "actions": [{"actionType": "delay", "saveAs": "x", "parameters": {"duration": "1h"}}]}`,
	},
	"saveAs reserved": {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "saveAs": "traceId"}]}`},
	"saveAs keyword":  {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "saveAs": "not"}]}`},
	"saveAs number":   {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "saveAs": 5}]}`},
	"bad id":          {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "id": "a b"}]}`},
	"open to a visitor": {
		true,
		`{"name": "a", "actions": [{"actionType": "open_thread", "saveAs": "link", "parameters": {"reusable": true, "expires": "3d"}}]}`,
	},
	"open to a key": {
		true,
		`{"name": "a", "actions": [{"actionType": "open_thread", "parameters": {"key": "site", "name": "{{input.user}}"}}]}`,
	},
	"open with invalid expires": {
		false,
		`{"name": "a", "actions": [{"actionType": "open_thread", "parameters": {"expires": "soon"}}]}`,
	},
	"when":          {true, `{"name": "a", "actions": [{"actionType": "wait_for_response", "id": "a-b", "when": "1 < 2"}]}`},
	"when true":     {true, `{"name": "a", "actions": [{"actionType": "wait_for_response", "when": true}]}`},
	"when a number": {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "when": 1}]}`},
	"when null":     {false, `{"name": "a", "actions": [{"actionType": "wait_for_response", "when": null}]}`},
	"child by flow": {
		true,
		`{"name": "a", "actions": [{"actionType": "trigger_agent", "parameters": {"flow": "b", "input": {"x": 1}, "waitForCompletion": false, "onFailure": "fail"}}]}`,
	},
	"child by agent": {
		true,
		`{"name": "a", "actions": [{"actionType": "trigger_agent", "timeout": "2h", "parameters": {"agent": "external:ocr", "canInheritLock": true}}]}`,
	},
	"child by both": {
		false,
		`{"name": "a", "actions": [{"actionType": "trigger_agent", "parameters": {"agent": "b", "flow": "b"}}]}`,
	},
	"child by neither": {false, `{"name": "a", "actions": [{"actionType": "trigger_agent", "parameters": {"input": {}}}]}`},
	"child with a text for a boolean": {
		false,
		`{"name": "a", "actions": [{"actionType": "trigger_agent", "parameters": {"flow": "b", "waitForCompletion": "yes"}}]}`,
	},
	"child with unknown onFailure": {
		false,
		`{"name": "a", "actions": [{"actionType": "trigger_agent", "parameters": {"flow": "b", "onFailure": "retry"}}]}`,
	},
	"one document": {
		true,
		`{"name": "a", "actions": [{"actionType": "request_document", "parameters": {"documents": "INE", "wait": false}}]}`,
	},
	"documents": {
		true,
		`{"name": "a", "actions": [{"actionType": "request_document", "parameters": {"documents": ["INE", "CURP"], "message": "{{requestId}}", "timeout": "30d"}}]}`,
	},
	"empty documents": {
		false,
		`{"name": "a", "actions": [{"actionType": "request_document", "parameters": {"documents": []}}]}`,
	},
	"documents of numbers": {
		false,
		`{"name": "a", "actions": [{"actionType": "request_document", "parameters": {"documents": [1]}}]}`,
	},
	"signature": {
		true,
		`{"name": "a", "actions": [{"actionType": "request_signature", "parameters": {"document": "https://x/{{input.id}}"}}]}`,
	},
	"test": {
		true,
		`{"name": "a", "actions": [{"actionType": "assign_test", "parameters": {"test": "sql", "channel": "log"}}]}`,
	},
	"bad channel": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": "a", "channel": "mail"}}]}`,
	},
	"target of chat": {
		false,
		`{"name": "a", "actions": [{"actionType": "send_message", "parameters": {"message": "a", "channel": "chat", "target": "x"}}]}`,
	},
	"target of webhook": {
		true,
		`{"name": "a", "channel": "webhook", "target": "crm", "actions": [{"actionType": "send_message", "parameters": {"message": "a", "channel": "webhook", "target": "x"}}]}`,
	},
	"target without channel": {false, `{"name": "a", "target": "crm", "actions": [{"actionType": "wait_for_response"}]}`},
	"event":                  {true, `{"name": "a", "actions": [{"actionType": "wait_for_event", "parameters": {"key": "{{input.id}}"}}]}`},
	"delay":                  {true, `{"name": "a", "actions": [{"actionType": "delay", "parameters": {"duration": "90m"}}]}`},
	"delay by a template": {
		true,
		`{"name": "a", "actions": [{"actionType": "delay", "parameters": {"duration": "{{input.pause}}"}}]}`,
	},
	"delay until": {
		true,
		`{"name": "a", "actions": [{"actionType": "delay", "parameters": {"until": "2026-01-31T09:00:00Z"}}]}`,
	},
	"delay until an invalid time": {
		false,
		`{"name": "a", "actions": [{"actionType": "delay", "parameters": {"until": "Monday"}}]}`,
	},
	"empty delay": {false, `{"name": "a", "actions": [{"actionType": "delay", "parameters": {}}]}`},
	"delay by both": {
		false,
		`{"name": "a", "actions": [{"actionType": "delay", "parameters": {"duration": "1h", "until": "2026-01-31T09:00:00Z"}}]}`,
	},
	"bad delay": {false, `{"name": "a", "actions": [{"actionType": "delay", "parameters": {"duration": "soon"}}]}`},
	"skill": {
		true,
		`{"name": "a", "actions": [{"actionType": "skill", "saveAs": "x", "parameters": {"name": "sizes", "arguments": {"limit": 5, "of": "{{input.of}}"}}}]}`,
	},
	"bad skill": {false, `{"name": "a", "actions": [{"actionType": "skill", "parameters": {"name": "a skill"}}]}`},
	"arguments of a list": {
		false,
		`{"name": "a", "actions": [{"actionType": "skill", "parameters": {"name": "sizes", "arguments": [1]}}]}`,
	},
	"reason": {
		true,
		`{"name": "a", "actions": [{"actionType": "reason", "parameters": {"prompt": "Sum up {{lastResponse}}", "skills": ["sizes"]}}]}`,
	},
	"reason with an agent": {
		true,
		`{"name": "a", "actions": [{"actionType": "reason", "parameters": {"prompt": "x", "agent": "sales"}}]}`,
	},
	"reason with a template agent": {
		false,
		`{"name": "a", "actions": [{"actionType": "reason", "parameters": {"prompt": "x", "agent": "{{who}}"}}]}`,
	},
	"reason with a bad skill": {
		false,
		`{"name": "a", "actions": [{"actionType": "reason", "parameters": {"prompt": "x", "skills": [1]}}]}`,
	},
	"set": {
		true,
		`{"name": "a", "actions": [{"actionType": "set", "parameters": {"variables": {"x": [1, null]}, "expressions": {"y": "1 + 1"}}}]}`,
	},
	"empty set": {false, `{"name": "a", "actions": [{"actionType": "set", "parameters": {}}]}`},
	"set a reserved variable": {
		false,
		`{"name": "a", "actions": [{"actionType": "set", "parameters": {"variables": {"input": 1}}}]}`,
	},
	"set an invalid name": {
		false,
		`{"name": "a", "actions": [{"actionType": "set", "parameters": {"expressions": {"a-b": "1"}}}]}`,
	},
	"if": {
		true,
		`{"name": "a", "actions": [{"actionType": "if", "parameters": {"condition": "true", "then": [], "else": [{"actionType": "end"}]}}]}`,
	},
	"if without then": {false, `{"name": "a", "actions": [{"actionType": "if", "parameters": {"condition": "true"}}]}`},
	"if with an invalid action": {
		false,
		`{"name": "a", "actions": [{"actionType": "if", "parameters": {"condition": "true", "then": [{"actionType": "delay"}]}}]}`,
	},
	"switch": {
		true,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"value": "{{x}}", "cases": [{"equals": null, "actions": []}, {"condition": "true", "actions": []}], "default": []}}]}`,
	},
	"switch without cases": {
		false,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"value": 1, "cases": []}}]}`,
	},
	"case by both": {
		false,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"cases": [{"equals": 1, "condition": "true", "actions": []}]}}]}`,
	},
	"case by neither": {
		false,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"cases": [{"actions": []}]}}]}`,
	},
	"case without actions": {
		false,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"cases": [{"equals": 1}]}}]}`,
	},
	"case with unknown key": {
		false,
		`{"name": "a", "actions": [{"actionType": "switch", "parameters": {"cases": [{"equals": 1, "action": [], "actions": []}]}}]}`,
	},
	"for each": {
		true,
		`{"name": "a", "actions": [{"actionType": "for_each", "parameters": {"items": "{{input.list}}", "as": "it", "actions": []}}]}`,
	},
	"for each of a list": {
		true,
		`{"name": "a", "actions": [{"actionType": "for_each", "parameters": {"items": [1, "{{x}}"], "actions": []}}]}`,
	},
	"for each of a text": {
		false,
		`{"name": "a", "actions": [{"actionType": "for_each", "parameters": {"items": "list", "actions": []}}]}`,
	},
	"for each with invalid variable": {
		false,
		`{"name": "a", "actions": [{"actionType": "for_each", "parameters": {"items": [], "as": "in", "actions": []}}]}`,
	},
	"while": {
		true,
		`{"name": "a", "actions": [{"actionType": "while", "parameters": {"condition": "index < 3", "max": 5, "actions": []}}]}`,
	},
	"while too often": {
		false,
		`{"name": "a", "actions": [{"actionType": "while", "parameters": {"condition": "true", "max": 10001, "actions": []}}]}`,
	},
	"while zero times": {
		false,
		`{"name": "a", "actions": [{"actionType": "while", "parameters": {"condition": "true", "max": 0, "actions": []}}]}`,
	},
	"while one and a half times": {
		false,
		`{"name": "a", "actions": [{"actionType": "while", "parameters": {"condition": "true", "max": 1.5, "actions": []}}]}`,
	},
	"end": {
		true,
		`{"name": "a", "actions": [{"actionType": "end", "parameters": {"status": "failed", "summary": "no", "result": {"a": 1}}}]}`,
	},
	"end with unknown status": {
		false,
		`{"name": "a", "actions": [{"actionType": "end", "parameters": {"status": "cancelled"}}]}`,
	},
	"fail": {true, `{"name": "a", "actions": [{"actionType": "fail", "parameters": {"message": "no"}}]}`},
	"input": {
		true,
		`{"name": "a", "input": {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}, "actions": [{"actionType": "end"}]}`,
	},
	"input that is no object": {false, `{"name": "a", "input": {"type": "array"}, "actions": [{"actionType": "end"}]}`},
	"input that is no schema": {
		false,
		`{"name": "a", "input": {"type": "object", "properties": {"x": {"type": "whole"}}}, "actions": [{"actionType": "end"}]}`,
	},
	"variables":                 {true, `{"name": "a", "variables": {"x": 1, "y": {"z": []}}, "actions": [{"actionType": "end"}]}`},
	"variables with a bad name": {false, `{"name": "a", "variables": {"x y": 1}, "actions": [{"actionType": "end"}]}`},
	"variables with reserved name": {
		false,
		`{"name": "a", "variables": {"threadId": 1}, "actions": [{"actionType": "end"}]}`,
	},
	"invalid nested action": {
		false,
		`{"name": "a", "actions": [{"actionType": "while", "parameters": {"condition": "true", "actions": [{"actionType": "if", "parameters": {"condition": "true", "then": [{"actionType": "nothing"}]}}]}}]}`,
	},
	"invalid timeout action": {
		false,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "timeoutActions": [{"actionType": "send_message"}]}]}`,
	},
	"timeoutActions not a list": {
		false,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "timeoutActions": {"actionType": "end"}}]}`,
	},
	"parameters that are a list": {
		false,
		`{"name": "a", "actions": [{"actionType": "wait_for_response", "parameters": []}]}`,
	},
	"labels":    {true, `{"name": "a", "labels": {"order": "{{input.order}}"}, "actions": [{"actionType": "end"}]}`},
	"bad label": {false, `{"name": "a", "labels": {"Order": "x"}, "actions": [{"actionType": "end"}]}`},
	"description and channel": {
		true,
		`{"name": "a", "description": "what it is for", "channel": "log", "actions": [{"actionType": "end", "parameters": {}}]}`,
	},
}

// The published schema agrees with Validate wherever a schema can express the rule.
func TestJSONSchemaAgreesWithValidate(t *testing.T) {
	raw, err := flows.JSONSchema()
	require.NoError(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	require.NoError(t, c.AddResource("flow.json", doc))
	schema, err := c.Compile("flow.json")
	require.NoError(t, err)
	for name, test := range definitionCases {
		t.Run(name, func(t *testing.T) {
			value, err := jsonschema.UnmarshalJSON(strings.NewReader(test.text))
			require.NoError(t, err)
			d, err := parseDefinition(test.text)
			if err == nil {
				err = flows.Validate(d)
			}
			assert.Equal(t, test.valid, (err == nil), err)
			err = schema.Validate(value)
			assert.Truef(t, (err == nil) == test.valid, "the schema says %v", err)
		})
	}
}

func TestEveryActionHasValidCase(t *testing.T) {
	for _, a := range flows.Actions() {
		found := false
		for _, test := range definitionCases {
			found = found || test.valid && strings.Contains(test.text, fmt.Sprintf("%q: %q", "actionType", a.Type))
		}
		assert.Truef(t, found, "no valid case has the action %s", a.Type)
	}
}

// An error begins with the path of the invalid key.
func TestValidateReportsPathAndReason(t *testing.T) {
	for name, c := range map[string]struct{ actions, want string }{
		"nearest type": {
			`[{"actionType": "send_mesage"}]`,
			`actions[0].actionType: unknown actionType "send_mesage"; did you mean "send_message"?`,
		},
		"nearest parameter": {
			`[{"actionType": "send_message", "parameters": {"message": "a", "chanel": "log"}}]`,
			`actions[0].parameters.chanel: unknown parameter "chanel"; did you mean "channel"?`,
		},
		"beginning of an action": {
			`[{"actionType": "wait"}]`,
			`actions[0].actionType: unknown actionType "wait"; did you mean "wait_for_event"?`,
		},
		"nearest key": {`[{"actionType": "end", "wen": "true"}]`, `actions[0].wen: unknown key "wen"; did you mean "when"?`},
		"too long": {
			`[{"actionType": "wait_for_response", "timeout": "8d"}]`,
			`actions[0].timeout: 8d is not allowed: a wait for response lasts more than 0 and at most 7d`,
		},
		"too long for a child": {
			`[{"actionType": "trigger_agent", "parameters": {"flow": "b", "timeout": "25h"}}]`,
			`actions[0].parameters.timeout: 25h is not allowed: a wait for agent lasts more than 0 and at most 24h`,
		},
		"too long a request": {
			`[{"actionType": "assign_test", "timeout": "31d", "parameters": {"test": "a"}}]`,
			`actions[0].timeout: 31d is not allowed: a wait for test lasts more than 0 and at most 30d`,
		},
		"too long a delay": {
			`[{"actionType": "delay", "parameters": {"duration": "31d"}}]`,
			`actions[0].parameters.duration: 31d is not allowed: a delay lasts more than 0 and at most 30d`,
		},
		"no time": {
			`[{"actionType": "wait_for_response", "timeout": "0s"}]`,
			`actions[0].timeout: 0s is not allowed: a wait for response lasts more than 0 and at most 7d`,
		},
		"same id": {
			`[{"id": "a", "actionType": "end"}, {"actionType": "if", "parameters": {"condition": "true", "then": [{"id": "a", "actionType": "end"}]}}]`,
			`actions[1].parameters.then[0].id: "a" is the id of actions[0] already`,
		},
		"bad expression": {
			`[{"actionType": "end", "when": "1 +"}]`,
			`actions[0].when: unexpected token EOF (line 1, column 3)`,
		},
		"assignment in one": {
			`[{"actionType": "end", "when": "timedOut = true"}]`,
			`actions[0].when: unexpected token "="; write == to compare (line 1, column 10)`,
		},
		"exponential value": {
			`[{"actionType": "end", "when": "let b = a + a; let c = b + b; let d = c + c; let e = d + d; let f = e + e; let g = f + f; let h = g + g; let i = h + h; i + i != ''"}]`,
			`actions[0].when: may build too large a value; use fewer let and toJSON`,
		},
		"template in one": {
			`[{"actionType": "end", "when": "{{a}}"}]`,
			`actions[0].when: is an expression, not a template: write variables without {{ }}`,
		},
		"open template": {
			`[{"actionType": "send_message", "parameters": {"message": "a {{name"}}]`,
			`actions[0].parameters.message: the template {{name is not closed with }} outside quotes`,
		},
		"strange template": {
			`[{"actionType": "send_message", "parameters": {"message": "{{a b}}"}}]`,
			`actions[0].parameters.message: the template {{a b}} is not the name of a variable: write {{name}}, {{a.b}} or {{name ?? "x"}}`,
		},
		"strange filter": {
			`[{"actionType": "send_message", "parameters": {"message": "{{a | upper}}"}}]`,
			`actions[0].parameters.message: the template {{a | upper}} knows no other filter than default: write {{name | default: "x"}}`,
		},
		"strange default": {
			`[{"actionType": "skill", "parameters": {"name": "a", "arguments": {"x": ["{{a ?? b}}"]}}}]`,
			`actions[0].parameters.arguments.x[0]: the template {{a ?? b}} has a default that is neither a text in quotes nor JSON`,
		},
		"loop within a loop": {
			`[{"actionType": "end", "when": "all(a, any(b, # == 1))"}]`,
			`actions[0].when: calls within a loop over a list are not offered; use for_each`,
		},
		"range": {
			`[{"actionType": "end", "when": "len(1..1000000) > 1"}]`,
			`actions[0].when: ranges are not offered; use for_each or while`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := parseDefinition(`{"name": "a", "actions": ` + c.actions + `}`)
			require.NoError(t, err)
			err = flows.Validate(d)
			assert.Truef(t, err != nil && err.Error() == c.want, "got\n%v\nnot\n%s", err, c.want)
		})
	}
}

func TestDefinitionLimits(t *testing.T) {
	deep := `{"actionType": "end"}`
	for range 12 {
		deep = `{"actionType": "if", "parameters": {"condition": "true", "then": [` + deep + `]}}`
	}
	many := strings.TrimSuffix(strings.Repeat(`{"actionType": "end"},`, 501), ",")
	for actions, want := range map[string]string{deep: "is nested more than 10 deep", many: "are 501 in all"} {
		d, err := parseDefinition(`{"name": "a", "actions": [` + actions + `]}`)
		require.NoError(t, err)
		assert.ErrorContains(t, flows.Validate(d), want)
	}
}

// The published schema cannot express this rule.
func TestWrongDefaultOfInput(t *testing.T) {
	d, err := parseDefinition(`{"name": "a", "actions": [{"actionType": "end"}],
		"input": {"type": "object", "properties": {"x": {"type": "integer", "default": "ten"}}}}`)
	require.NoError(t, err)
	assert.ErrorContains(t, flows.Validate(d), "input.properties.x.default: got string, want integer")
}

func TestTriggersListsChildFlows(t *testing.T) {
	d, err := parseDefinition(`{"name": "a", "actions": [
		{"actionType": "trigger_agent", "parameters": {"flow": "b"}},
		{"actionType": "wait_for_response", "timeoutActions": [{"actionType": "trigger_agent", "parameters": {"agent": "c"}}]},
		{"actionType": "switch", "parameters": {"cases": [{"condition": "true", "actions": [{"actionType": "trigger_agent", "parameters": {"agent": "d"}}]}]}}]}`)
	require.NoError(t, err)
	want := "map[actions[0].parameters.flow:b actions[1].timeoutActions[0].parameters.agent:c " +
		"actions[2].parameters.cases[0].actions[0].parameters.agent:d]"
	assert.Equal(t, want, fmt.Sprint(flows.Triggers(d)))
}

// Candidate is the flow's input.
type Candidate struct {
	Name string `json:"name"`
}

// Verdict is the child's decision.
type Verdict struct {
	Fit bool `json:"fit"`
}

// Onboard is a flow in Go: a durable function. Each claim of its execution calls it from the top. Recorded steps are
// not repeated.
func Onboard(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var candidate Candidate
	if err := json.Unmarshal(input, &candidate); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	x, _ := executions.Current(ctx)

	// Step: a computation that may differ from run to run. Its typed result is recorded.
	greeting, err := executions.Step(ctx, "greeting", func(context.Context) (string, error) {
		return "Hola " + candidate.Name + ". Tienes experiencia?", nil
	})
	if err != nil {
		return executions.Result{}, err
	}

	// Send: sends once, even if the process dies. The message is queued while another execution has the thread.
	if _, err := threads.Send(ctx, threads.Outgoing{ThreadID: *x.ThreadID, Content: greeting}); err != nil {
		return executions.Result{}, err
	}

	// Wait: parks the execution. Return its error. The answer causes a new claim, which calls the function again.
	out, err := executions.Wait(ctx, "answer", executions.Response(*x.ThreadID, 24*time.Hour))
	switch {
	case err != nil:
		return executions.Result{}, err
	case out.TimedOut:
		return executions.Result{Summary: "no answer"}, executions.ErrTimedOut
	}
	vars, err := requests.Variables("response", out)
	if err != nil {
		return executions.Result{}, err
	}
	if err := executions.SetVariables(ctx, vars); err != nil {
		return executions.Result{}, err
	}

	// Trigger: a child and its result. The child may speak in the thread while its parent waits.
	child, err := executions.Trigger(ctx, "evaluation", executions.Child{Flow: "evaluate", Input: vars, Wait: true})
	if err != nil {
		return executions.Result{}, err
	}
	if !child.Success { // the parent handles the child's failure
		return executions.Result{}, fmt.Errorf("evaluate %s: %s", candidate.Name, child.Error)
	}
	var verdict Verdict
	if err := json.Unmarshal(child.Result, &verdict); err != nil {
		return executions.Result{}, fmt.Errorf("read verdict: %w", err)
	}
	return executions.Result{Summary: "onboarded " + candidate.Name, Value: verdict}, nil
}

// Evaluate is the child.
func Evaluate(_ context.Context, input json.RawMessage) (executions.Result, error) {
	var decoded struct {
		LastResponse string `json:"lastResponse"`
	}
	if err := json.Unmarshal(input, &decoded); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	return executions.Result{Summary: "evaluated", Value: Verdict{Fit: decoded.LastResponse == "si"}}, nil
}

// A flow in Go is registered under its name, and started like any other.
func TestDocumentedGoFlowRuns(t *testing.T) {
	t.Parallel()
	w := startProcess(t, pgtest.DB(t), nil, func(e *executions.Engine) error {
		return errors.Join(e.Register("onboard", Onboard), e.Register("evaluate", Evaluate))
	})
	id := w.startInThread(t, "onboard", Candidate{Name: "María"})
	awaitWaiting(t, w.pool, id, 1)
	receiveMessage(t, w, "si")
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Truef(t, x.ResultSummary == "onboarded María" && string(x.Result) == `{"fit": true}`,
		"ended with %q %s", x.ResultSummary, x.Result)
}

// documentationRow returns the row of an action in docs/flows.md.
func documentationRow(a flows.Action) string {
	var parameters []string
	for _, p := range a.Parameters {
		name := "`" + p.Name + "`"
		if !p.Required {
			name = "[" + name + "]"
		}
		parameters = append(parameters, name+" "+p.About)
	}
	about := a.About
	if a.Waits != "" {
		about += " Waits for " + a.Waits + "."
	}
	return "| `" + a.Type + "` | " + strings.Join(parameters, "; ") + " | " + about + " |"
}

// docs/flows.md agrees with the code: its table lists Actions, its YAML is valid, and its Go is the code of this file.
func TestDocumentationMatchesCode(t *testing.T) {
	t.Parallel()
	page := readFile(t, "../docs/flows.md")
	for _, a := range flows.Actions() {
		if !strings.Contains(page, documentationRow(a)+"\n") {
			t.Errorf("docs/flows.md lacks the row:\n%s", documentationRow(a))
		}
	}
	yaml := regexp.MustCompile("(?s)```yaml\nkind: flow\n(.*?)```").FindStringSubmatch(page)
	require.True(t, yaml != nil, "docs/flows.md has no flow in YAML")
	assert.NoError(t, flows.Validate(parseYAML(t, yaml[1])), "docs/flows.md")
	code := readFile(t, "definition_test.go")
	from, to := strings.Index(code, "// Onboard is"), strings.Index(code, "// Evaluate is")
	assert.Contains(t, page, "```go\n"+strings.TrimSpace(code[from:to])+"\n```")
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}
