package evals

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/trace"
)

// OutageSuite is the suite whose cases run after a successful trial has enabled a skill again.
const OutageSuite = "selfheal"

// maxOutageCalls is the number of calls of the failing skill that a case of an outage accepts.
const maxOutageCalls = 3

// FromOutage creates a case from a failure for which self-heal disabled a skill. The case has the request to the agent
// in the trace, and every call of the skill fails with the same error. If the trace has no request of a person, as in a
// heartbeat, the message of the case requests the call.
func FromOutage(skill string, f selfheal.Failure, t activity.Trace, name string) (Case, error) {
	class := cmp.Or(f.ErrorClass, "error")
	name = cmp.Or(name, fmt.Sprintf("%s fails: %s", skill, class))
	c, err := FromTrace(t, name)
	switch {
	case errors.Is(err, ErrNoCase):
		c = Case{Name: name, From: f.TraceID, Skills: map[string][]Stub{}}
	case err != nil:
		return c, err
	}
	if err != nil || trace.ID(t.TraceID).Surface() == trace.Heartbeat {
		args := "{}"
		if index := slices.IndexFunc(t.Activities, func(r activity.Row) bool { return r.ID == f.ActivityID }); index >= 0 {
			args = string(t.Activities[index].Input)
		}
		c.Messages = []Message{{User: fmt.Sprintf("Call %s with %s and say what came of it.", skill, args)}}
	}
	c.Skills[skill] = []Stub{{Error: cmp.Or(f.ErrorMessage, "it failed"), Class: class}}
	c.Expect = []Expectation{{Answer: &Answer{
		Expr: fmt.Sprintf("len(filter(calls, .skill == %q)) <= %d", skill, maxOutageCalls),
	}}}
	return c, nil
}

// OutageFile returns the beginning of a file with the suite of outages, up to its cases.
func OutageFile(surface string) string {
	return strings.Join([]string{
		"# What the agent does when a skill fails. These cases run when the skill comes back from its trial.",
		"kind: eval", "name: " + OutageSuite, "surface: " + surface, "trials: 1", "budget: {timeout: 5m}", "cases:", "",
	}, "\n")
}

// OutageCases returns the cases in which a skill fails.
func (d Definition) OutageCases(skill string) (cases []Case) {
	for _, c := range d.Cases {
		if slices.ContainsFunc(c.Skills[skill], func(s Stub) bool { return s.Error != "" }) {
			cases = append(cases, c)
		}
	}
	return cases
}
