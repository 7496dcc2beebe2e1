package faults

import (
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/selfheal"
)

// Rule decides after each call whether to disable a skill. calls are newest first. The skill's calls before since do
// not count.
type Rule struct {
	Name   string
	Alarms func(skill string, since time.Time, calls []selfheal.Call) bool
}

// SelfHeal is the rule that decides in production.
func SelfHeal(p selfheal.Policy) Rule {
	return Rule{"self-heal", func(skill string, since time.Time, calls []selfheal.Call) bool {
		return p.Decide(skill, since, calls).Tripped()
	}}
}

// ThreeInARow is the rule to compare with.
func ThreeInARow() Rule {
	return Rule{"3 in a row", func(skill string, since time.Time, calls []selfheal.Call) bool {
		streak := 0
		for _, c := range calls {
			if c.Skill != skill {
				continue
			}
			if streak++; !c.Failed || c.At.Before(since) {
				return false
			}
			if streak == 3 {
				return true
			}
		}
		return false
	}}
}

// Outcome is the result of a rule for a trace.
type Outcome struct {
	Calls      int // of the skill, up to the end or the right alarm
	FalseAlarm bool
	Detected   bool // from FirstCall to LastCall
	Delay      int  // calls of the skill from FirstCall to the alarm, both included
}

// replayed bounds the newest calls that a rule reads, about as in production.
const replayed = 1000

// Replay applies a rule after every call of a trace. The first right alarm ends the trace; in a trace without a fault,
// any alarm ends it. After a false alarm before the fault, Replay enables the skill at once.
func Replay(r Rule, t Trace) (o Outcome) {
	newest := make([]selfheal.Call, len(t.Calls))
	for i, c := range t.Calls {
		newest[len(newest)-1-i] = c.Call
	}
	var since time.Time
	for i, c := range t.Calls {
		own, number := c.Skill == t.Skill, i+1
		if own {
			o.Calls++
			if t.MustDisable && number >= t.FirstCall {
				o.Delay++
			}
		}
		known := newest[len(newest)-number:]
		if !r.Alarms(t.Skill, since, known[:min(len(known), replayed)]) {
			continue
		}
		if t.MustDisable && number >= t.FirstCall {
			o.Detected = number <= t.LastCall
			return o
		}
		if o.FalseAlarm, since = true, c.At.Add(time.Microsecond); !t.MustDisable {
			return o
		}
	}
	return o
}

// Score sums up the outcomes of traces.
type Score struct {
	Name        string  `json:"name"` // of the shape, or of a part of the set
	Traces      int     `json:"traces"`
	Faults      int     `json:"faults"` // traces whose skill the rule must disable
	Detected    int     `json:"detected"`
	FalseAlarms int     `json:"false_alarms"` // at most one of each trace
	Calls       int     `json:"calls"`
	Precision   Rate    `json:"precision"`             // Detected of all alarms
	Recall      Rate    `json:"recall"`                // Detected of Faults
	Delay       float64 `json:"delay_calls"`           // median, of the detected
	PerThousand float64 `json:"false_alarms_per_1000"` // calls
	delays      []int   //
}

// Rate is a share with its 95 % interval (Wilson). Value is nil for a share of zero traces.
type Rate struct {
	Value *float64 `json:"value"`
	stats.Interval
}

func rate(c, n int) Rate {
	r := Rate{Interval: stats.Wilson(c, n)}
	if n > 0 {
		value := float64(c) / float64(n)
		r.Value = &value
	}
	return r
}

func (s *Score) add(t Trace, o Outcome) {
	s.Traces++
	s.Calls += o.Calls
	if t.MustDisable {
		s.Faults++
	}
	if o.FalseAlarm {
		s.FalseAlarms++
	}
	if o.Detected {
		s.Detected++
		s.delays = append(s.delays, o.Delay)
	}
}

func (s *Score) finish() {
	s.Precision, s.Recall = rate(s.Detected, s.Detected+s.FalseAlarms), rate(s.Detected, s.Faults)
	s.PerThousand = 1000 * float64(s.FalseAlarms) / float64(max(s.Calls, 1))
	slices.Sort(s.delays)
	if n := len(s.delays); n > 0 {
		s.Delay = float64(s.delays[(n-1)/2]+s.delays[n/2]) / 2
	}
}

// Result has the scores of a rule: by shape, then the halves, then the whole set.
type Result struct {
	Rule   string  `json:"rule"`
	Shapes []Score `json:"shapes"`
	Tuned  *Score  `json:"tuned,omitempty"` // nil if no trace is held out
	Held   *Score  `json:"held_out,omitempty"`
	All    Score   `json:"all"`
}

// Evaluate replays traces through a rule.
func Evaluate(r Rule, all []Trace) Result {
	result := Result{Rule: r.Name, Shapes: []Score{}, All: Score{Name: "all"}}
	tuned, held := Score{Name: "tuned"}, Score{Name: "held out"}
	for _, t := range all {
		o := Replay(r, t)
		i := slices.IndexFunc(result.Shapes, func(s Score) bool { return s.Name == t.Shape })
		if i < 0 {
			i, result.Shapes = len(result.Shapes), append(result.Shapes, Score{Name: t.Shape})
		}
		result.Shapes[i].add(t, o)
		result.All.add(t, o)
		if t.HeldOut {
			held.add(t, o)
		} else {
			tuned.add(t, o)
		}
	}
	for i := range result.Shapes {
		result.Shapes[i].finish()
	}
	result.All.finish()
	if held.Traces > 0 {
		tuned.finish()
		held.finish()
		result.Tuned, result.Held = &tuned, &held
	}
	return result
}
