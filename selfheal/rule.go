package selfheal

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Policy holds the rule's numbers. The zero value is invalid; see Default.
type Policy struct {
	Failures  int           // consecutive failures that disable a skill
	Window    time.Duration // maximum age of the calls that count
	Rate      float64       // failure rate that disables a skill; above 0, at most 1
	RateCalls int           // number of newest calls for the rate
	Cooldown  time.Duration // from disabling to the trial
}

// Default is the policy of a fresh installation.
func Default() Policy {
	return Policy{Failures: 3, Window: 72 * time.Hour, Rate: 0.5, RateCalls: 20, Cooldown: 24 * time.Hour}
}

// Validate returns an error that names every invalid number.
func (p Policy) Validate() error {
	var problems []error
	check := func(wrong bool, text string) {
		if wrong {
			problems = append(problems, errors.New(text))
		}
	}
	check(p.Failures < 1, "failures must be at least 1")
	check(p.Window <= 0, "the window must be longer than 0")
	check(!(p.Rate > 0 && p.Rate <= 1), "the rate must be above 0 and at most 1")
	check(p.RateCalls < 1, "the number of calls for the rate must be at least 1")
	check(p.Cooldown < 0, "the cool-down must not be negative")
	if len(problems) == 0 {
		return nil
	}
	return fmt.Errorf("self-heal policy: %w", errors.Join(problems...))
}

// Call is a row of the view agent_skill_calls.
type Call struct {
	Skill  string
	Caller string // the thread, or the trace of a call without one
	At     time.Time
	Failed bool
}

// Decision is the rule's decision about a skill.
type Decision struct {
	ByStreak, ByRate bool
	Streak           int // consecutive failures up to now
	Recent, Failed   int // the newest calls, and the failures among them
}

// Tripped reports whether to disable the skill.
func (d Decision) Tripped() bool { return d.ByStreak || d.ByRate }

// Thresholds of the evidence that failures have another cause than the skill.
const (
	outageSkills = 3 // skills that worked before and fail together
	otherCallers = 3 // other callers for whom the skill succeeds
)

// Decide applies the rule to a skill. calls has the calls of all skills, newest first. It ignores calls of the skill
// before since.
func (p Policy) Decide(skill string, since time.Time, calls []Call) Decision {
	outage := outages(calls)
	var own []Call
	for i, c := range calls {
		if c.Skill == skill && !c.At.Before(since) && !outage[i] {
			own = append(own, c)
		}
	}
	streak, recent := slices.IndexFunc(own, func(c Call) bool { return !c.Failed }), own[:min(len(own), p.RateCalls)]
	if streak < 0 {
		streak = len(own)
	}
	d := Decision{Streak: streak, Recent: len(recent), Failed: failures(recent)}
	tooMany := func(calls []Call) bool { return float64(failures(calls)) >= p.Rate*float64(len(calls)) }
	if d.ByStreak = streak >= p.Failures; d.ByStreak {
		others, caller := withoutWorstCaller(own[:streak])
		d.ByStreak = len(others) > 0 || !succeedsForOthers(own, caller)
	}
	if d.ByRate = len(recent) == p.RateCalls && tooMany(recent); d.ByRate {
		others, caller := withoutWorstCaller(recent)
		d.ByRate = 2*failures(others) >= d.Failed || tooMany(others) || !succeedsForOthers(own, caller)
	}
	return d
}

func failures(calls []Call) (n int) {
	for _, c := range calls {
		if c.Failed {
			n++
		}
	}
	return n
}

// outages marks the failures of outages. An outage is a run of failures of several skills that had worked before,
// without a success of any skill in between.
func outages(calls []Call) []bool {
	marked, worked := make([]bool, len(calls)), map[string]bool{}
	for end := len(calls) - 1; end >= 0; {
		if !calls[end].Failed {
			worked[calls[end].Skill] = true
			end--
			continue
		}
		failing, start := map[string]bool{}, end
		for ; start >= 0 && calls[start].Failed; start-- {
			if worked[calls[start].Skill] {
				failing[calls[start].Skill] = true
			}
		}
		for i := start + 1; i <= end && len(failing) >= outageSkills; i++ {
			marked[i] = failing[calls[i].Skill]
		}
		end = start
	}
	return marked
}

// withoutWorstCaller returns the calls without those of the caller with the most failures, and that caller.
func withoutWorstCaller(calls []Call) (rest []Call, caller string) {
	failed := map[string]int{}
	for _, c := range calls {
		if !c.Failed {
			continue
		}
		if failed[c.Caller]++; failed[c.Caller] > failed[caller] {
			caller = c.Caller
		}
	}
	for _, c := range calls {
		if c.Caller != caller {
			rest = append(rest, c)
		}
	}
	return rest, caller
}

// succeedsForOthers reports whether calls of at least otherCallers callers other than caller succeeded.
func succeedsForOthers(calls []Call, caller string) bool {
	others := map[string]bool{}
	for _, c := range calls {
		if c.Caller != caller && !c.Failed {
			others[c.Caller] = true
		}
	}
	return len(others) >= otherCallers
}
