package evals_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// The arguments of a call may differ from the recorded ones in letter case, spacing, the form of a number and null
// members, where the record is redacted, and in the value of memory_write.
func TestRecordedMatch(t *testing.T) {
	const stored = `{"order":7,"name":"Ana  Maria","tags":["a","b"],"key":"[redacted]"}`
	for _, c := range []struct {
		called, skill, recorded, args string
		want                          bool
	}{
		{"s", "s", stored, `{"key":"x","tags":["a","B"],"name":" ana maria","order":7.0,"note":null}`, true},
		{"s", "s", stored, `{"key":"x","tags":["b","a"],"name":"Ana Maria","order":7}`, false},
		{"s", "s", stored, `{"key":"x","tags":["a","b"],"name":"Ana","order":7}`, false},
		{"s", "s", stored, `{"key":"x","tags":["a","b"],"name":"Ana Maria","order":"7"}`, false},
		{"s", "s", stored, `{"key":"x","tags":["a","b"],"name":"Ana Maria","order":7,"more":1}`, false},
		{"other", "s", stored, stored, false},
		{"memory_write", "memory_write", `{"key":"k","value":"likes oak"}`, `{"key":"k","value":"oak it is"}`, true},
		{"memory_write", "memory_write", `{"key":"k","value":"likes oak"}`, `{"key":"j","value":"likes oak"}`, false},
	} {
		turn := evals.Recorded{Calls: []evals.RecordedCall{{Skill: c.skill, Args: json.RawMessage(c.recorded)}}}
		_, ok := turn.Match(c.called, json.RawMessage(c.args), 0)
		assert.Truef(t, ok == c.want, "%s %s matches %s: %v", c.called, c.args, c.recorded, ok)
	}
}

// A repeated call gets the results in their order, and the last one again when they are used up.
func TestRecordedMatchOfRepeatedCall(t *testing.T) {
	args := json.RawMessage(`{}`)
	turn := evals.Recorded{Calls: []evals.RecordedCall{
		{Skill: "s", Args: args, Result: json.RawMessage(`1`)},
		{Skill: "t", Args: args},
		{Skill: "s", Args: args, Result: json.RawMessage(`2`)},
	}}
	for n, want := range []string{"1", "2", "2"} {
		call, ok := turn.Match("s", args, n)
		assert.Truef(t, ok && string(call.Result) == want, "call %d: %s, want %s", n, call.Result, want)
	}
}

// A trial follows its turn only with the same calls in the same order, and the same decisions.
func TestRecordedFollows(t *testing.T) {
	call := func(skill string) evals.Call { return evals.Call{Skill: skill, Args: json.RawMessage(`{}`)} }
	denied := call("refund")
	denied.Approval = "denied"
	refused := call("no_such_skill")
	refused.Refused = true
	changed := call("look")
	changed.Args = json.RawMessage(`{"at":"home"}`)
	turn := evals.Recorded{Calls: []evals.RecordedCall{
		{Skill: "look", Args: json.RawMessage(`{}`)}, {Skill: "refund", Args: json.RawMessage(`{}`), Denied: true},
	}}
	for name, c := range map[string]struct {
		calls []evals.Call
		want  string
	}{
		// refused calls, and tools that only read data of the turn, do not count
		"same":      {[]evals.Call{call("look"), refused, call("skill_search"), denied}, ""},
		"arguments": {[]evals.Call{changed, denied}, "call 1 of look has other arguments"},
		"fewer":     {[]evals.Call{call("look")}, "refund was not called"},
		"more":      {[]evals.Call{call("look"), denied, call("look")}, "look was called besides the recorded calls"},
		"order":     {[]evals.Call{denied, call("look")}, "call 1 is refund; the recorded one is look"},
		"decision":  {[]evals.Call{call("look"), call("refund")}, "call 2 of refund has another decision"},
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(turn.Follows(c.calls), "; ")
			assert.Truef(t, strings.HasPrefix(got, c.want) && (c.want == "") == (got == ""),
				"the reason is %q, want %q", got, c.want)
		})
	}
}
