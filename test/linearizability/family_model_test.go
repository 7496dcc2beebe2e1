//go:build unix

package linearizability_test

import (
	"strconv"
	"strings"
)

// parkedEnd is a moment in the year 8307, microseconds: leases that last longer are parked.
const parkedEnd = 200_000_000_000_000_000

// parentTTL is for how long a parent takes its lane, microseconds: longer than any test.
const parentTTL = 3600 * 1_000_000

// family is what the model knows of the executions of a lane: one parent, and the child that it waits for.
type family struct {
	parent  string
	claim   int64  // of the parent
	claimed bool   // somebody runs it
	waits   string // the child that it waits for
	depth   int    // 1 while the lane is lent to a child
}

// without is the family when the lane was broken: nobody has lent it.
func (f family) without() family {
	f.depth = 0
	return f
}

// execution is the id in the name of an owner, empty for one that is none.
func execution(owner string) string {
	id, _, ok := strings.Cut(owner, "#")
	if !ok {
		return ""
	}
	return id
}

func (s state) parentOwner() string {
	return s.family.parent + "#" + strconv.FormatInt(s.family.claim, 10)
}

// toParent hands the lane to the parent under its present claim: parked while it waits.
func (s state) toParent(now, until int64) state {
	s.family.depth = 0
	s = s.give(s.parentOwner(), 0, now, now+parentTTL, add(until, parentTTL))
	if s.family.waits != "" {
		s.from, s.to, s.parked = never, never, true
	}
	return s
}

// add is a moment some time later.
func add(moment, later int64) int64 {
	if moment == never {
		return never
	}
	return moment + later
}

// giveBack is the end of a loan.
func (s state) giveBack(now, until int64) state { return s.toParent(now, until) }

// lapsed is the lane after a loan that expired went back, as it does when somebody looks at the lane or sweeps:
// sweeps are not in the histories, so it may have been before the operation that finds it so.
func (s state) lapsed(o *op) (state, bool) {
	if s.family.depth == 0 {
		return s, false
	}
	_, at, ok := s.gone(s.clock, o.until())
	if !ok {
		return s, false
	}
	return s.toParent(at, o.until()), true
}

// lends reports whether the parent has the lane, and waits for the owner.
func (s state) lends(owner string) bool {
	return s.parked && s.family.depth == 0 && s.owner != "" && execution(s.owner) == s.family.parent &&
		s.family.waits != "" && s.family.waits == execution(owner)
}

// borrowed is a take that was answered with a loan.
func (s state) borrowed(o *op, lo, hi int64) (bool, state) {
	if !s.lends(o.Owner) || o.Lender != s.family.parent || o.Got <= s.token {
		return false, s
	}
	s = s.give(o.Owner, o.Got, lo, lo+o.TTL, hi+o.TTL)
	s.family.depth = 1
	return true, s
}

func (s state) borrowedUnheard(o *op, now int64) (state, bool) {
	if o.Kind != kindTake || !s.lends(o.Owner) {
		return s, false
	}
	s = s.give(o.Owner, 0, now, now+o.TTL, never)
	s.family.depth = 1
	return s, true
}

// turned is what happens to an execution, and to the lane with it. The token of such an operation is the claim that it
// was made under, its owner the execution.
func (s state) turned(o *op, now int64) (bool, state) {
	if !o.OK && !o.Blind {
		return true, s // refused: it changes nothing
	}
	_, live := s.live(now)
	has := live && execution(s.owner) == o.Owner
	switch o.Kind {
	case kindClaim:
		return s.claimedAgain(o, now, has)
	case kindPark:
		if s.family.parent != o.Owner || s.family.claim != o.Token || s.family.waits != "" {
			return false, s
		}
		s.family.waits, s.family.claimed = o.Child, false
		s.family.claim++
		if has {
			s = s.toParent(now, o.until())
		}
		return true, s
	case kindResume:
		if s.family.parent != o.Owner || s.family.waits == "" {
			return false, s
		}
		s.family.waits = ""
		if s.family.depth > 0 || has && s.parked {
			s = s.toParent(now, o.until())
		}
		return true, s
	case kindFinish: // of a child: the parents of the scenes do not end
		switch {
		case s.family.depth > 0 && execution(s.owner) == o.Owner:
			return true, s.toParent(now, o.until())
		case execution(s.owner) == o.Owner:
			return true, s.free(now)
		}
		return true, s
	default:
		return false, s
	}
}

// claimedAgain gives the lane of the parent to its new claim.
func (s state) claimedAgain(o *op, now int64, has bool) (bool, state) {
	next := s.family.claim + 1
	if s.family.parent == "" {
		s.family.parent = o.Owner
	}
	if s.family.parent != o.Owner || s.family.claimed || s.family.waits != "" || !o.Blind && o.Got != next {
		return false, s
	}
	s.family.claim, s.family.claimed = next, true
	if has {
		s = s.toParent(now, o.until())
	}
	return true, s
}
