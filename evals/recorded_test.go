package evals_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// A call may differ from the recorded one in letter case, spacing and null members of its arguments, and in nothing
// else.
func TestRecordedMatch(t *testing.T) {
	const recorded = `{"order":7,"name":"Ana  Maria","tags":["a","b"],"key":"[redacted]"}`
	for _, c := range []struct {
		skill, recorded, args string
		want                  bool
	}{
		{"s", recorded, `{"key":"x","tags":["a","B"],"name":" ana maria","order":7.0,"note":null}`, true},
		{"s", recorded, `{"key":"x","tags":["b","a"],"name":"Ana Maria","order":7}`, false},
		{"s", recorded, `{"key":"x","tags":["a","b"],"name":"Ana","order":7}`, false},
		{"s", recorded, `{"key":"x","tags":["a","b"],"name":"Ana Maria","order":"7"}`, false},
		{"s", recorded, `{"key":"x","tags":["a","b"],"name":"Ana Maria","order":7,"more":1}`, false},
		{"other", recorded, recorded, false},
		{"memory_write", `{"key":"k","value":"likes oak"}`, `{"key":"k","value":"oak it is"}`, true},
		{"memory_write", `{"key":"k","value":"likes oak"}`, `{"key":"j","value":"likes oak"}`, false},
	} {
		skill := strings.Replace(c.skill, "other", "s", 1)
		turn := evals.Recorded{Calls: []evals.RecordedCall{{Skill: skill, Args: json.RawMessage(c.recorded)}}}
		_, ok := turn.Match(c.skill, json.RawMessage(c.args), 0)
		assert.Truef(t, ok == c.want, "%s %s matches %s: %v", c.skill, c.args, c.recorded, ok)
	}
}

// A trial follows its turn only with the same calls in the same order, and the same decisions.
func TestRecordedFollows(t *testing.T) {
	call := func(skill string) evals.Call { return evals.Call{Skill: skill, Args: json.RawMessage(`{}`)} }
	denied := call("refund")
	denied.Approval = "denied"
	refused := call("no_such_skill")
	refused.Refused = true
	turn := evals.Recorded{Calls: []evals.RecordedCall{
		{Skill: "look", Args: json.RawMessage(`{}`)}, {Skill: "refund", Args: json.RawMessage(`{}`), Denied: true},
	}}
	for name, c := range map[string]struct {
		calls []evals.Call
		want  string
	}{
		"same":     {[]evals.Call{call("look"), refused, call("skill_search"), denied}, ""},
		"fewer":    {[]evals.Call{call("look")}, "refund was not called"},
		"more":     {[]evals.Call{call("look"), denied, call("look")}, "look was called besides the recorded calls"},
		"order":    {[]evals.Call{denied, call("look")}, "call 1 is refund; the recorded one is look"},
		"decision": {[]evals.Call{call("look"), call("refund")}, "call 2 of refund has another decision"},
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(turn.Follows(c.calls), "; ")
			assert.Truef(t, strings.HasPrefix(got, c.want) && (c.want == "") == (got == ""),
				"the reason is %q, want %q", got, c.want)
		})
	}
}
