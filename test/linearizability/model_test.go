package linearizability_test

import (
	"fmt"
	"math"
	"slices"

	"github.com/anishathalye/porcupine"
)

// never is a moment that does not come: the end of a parked lease, or the latest end of a lease with an unknown end.
const never = math.MaxInt64

// state is the model's state of a lane. Moments are microseconds of the database's clock. An unknown value is a bound
// that later answers narrow: a token that is at least so large, a lease that ends between two moments.
type state struct {
	clock int64 // the earliest possible moment of the last change
	lease
	was    lease // the lease before an unawaited release; a crash may restore it
	family family
	over   bool // every answered operation has happened
}

// lease is the row of a lane.
type lease struct {
	owner  string // "" if the lane is free
	token  int64
	exact  bool // token is exact, not a lower bound
	from   int64
	to     int64 // the lease ends in [from, to]
	parked bool
}

// free is the state after a release.
func (s state) free(now int64) state {
	s.clock, s.owner, s.parked, s.was = now, "", false, lease{}
	s.token++
	s.from, s.to = now, now
	return s
}

// grantTo makes owner the holder of a lease that ends between two moments. A token of 0 is unknown.
func (s state) grantTo(owner string, token, now, from, to int64) state {
	s.clock, s.owner, s.parked, s.was = now, owner, false, lease{}
	s.from, s.to = from, to
	if token == 0 {
		s.token, s.exact = max(s.token+1, now), false
		return s
	}
	s.token, s.exact = token, true
	return s
}

// mayHaveToken reports whether the lane can have the token.
func (s state) mayHaveToken(token int64) bool {
	return token == s.token || !s.exact && token > s.token
}

// withToken is the state with the token from an answer.
func (s state) withToken(token int64) state {
	if token != 0 {
		s.token, s.exact = token, true
	}
	return s
}

// ifLive reports whether the lease can be live at some moment from now on, and returns the state if it is.
func (s state) ifLive(now int64) (state, bool) {
	if s.owner == "" || now >= s.to {
		return s, false
	}
	if s.from != never {
		s.from = max(s.from, now+1)
	}
	return s, true
}

// ifFree reports whether the lane can be free at some moment of [now, until]. It returns the state if it is, and the
// earliest such moment.
func (s state) ifFree(now, until int64) (state, int64, bool) {
	if s.owner == "" {
		return s, now, true
	}
	now = max(now, s.from)
	if now > until || s.from == never {
		return s, 0, false
	}
	s.to = min(s.to, until)
	return s, now, true
}

// step is the model: whether an operation can get its answer now, and the state of the lane after it.
func step(s state, o *op) (bool, state) {
	if o.Kind == kindOver {
		s.over = true
		return true, s
	}
	now := max(s.clock, o.from())
	if now > o.until() { // the state is of a later moment
		return s.over && o.Return == 0, s
	}
	if o.Return == 0 {
		after, counts := s.unanswered(o, now)
		return counts || s.over, after
	}
	switch o.Kind {
	case kindAcquire, kindTry, kindAwait, kindTake:
		if o.OK {
			return s.granted(o, now)
		}
		return s.refused(o, now)
	case kindRenew:
		return s.renewed(o, now)
	case kindRelease, kindBreak:
		return s.released(o, now)
	case kindWrite:
		return s.written(o, now)
	case kindPark, kindResume, kindClaim, kindFinish:
		return s.applyExecution(o, now)
	case kindSweep, kindLeave, kindOver, kindCrash, kindUnknown:
		return true, s
	}
	return false, s
}

// granted is a successful acquire: the owner has the lane already, or no owner has it.
func (s state) granted(o *op, now int64) (bool, state) {
	lo, hi := now, o.until()
	if o.Ends != 0 && o.Ends < parkedAfter {
		at := o.Ends - o.TTL // the function read its clock once
		if at < lo || at > hi {
			return false, s
		}
		lo, hi = at, at
	}
	if o.Lender != "" {
		return s.applyBorrow(o, lo, hi)
	}
	after, ok := s.ifLive(lo)
	mine := ok && s.owner == o.Owner && (o.Got == 0 || s.mayHaveToken(o.Got))
	free, at, ended := s.ifFree(lo, hi)
	ended = ended && (o.Got == 0 || o.Got > s.token) && s.family.depth == 0
	switch {
	case mine && s.parked:
		return o.Ends == 0 || o.Ends >= parkedAfter, after.withToken(o.Got)
	case mine:
		after.clock, after.from, after.to = lo, lo+o.TTL, hi+o.TTL
		after = after.withToken(o.Got)
		if o.Got == 0 && ended {
			after.exact = false // the lease may also have ended and been granted again
		}
		return true, after
	case ended:
		return true, free.grantTo(o.Owner, o.Got, at, at+o.TTL, hi+o.TTL)
	}
	return false, s
}

// refused is a failed acquire: another owner has the lane, or it is promised to a waiter, or an operation changes it.
// The last two are facts of the history, see mark.
func (s state) refused(o *op, now int64) (bool, state) {
	if o.Kind == kindTry {
		after, ok := s.ifLive(now)
		if ok && s.owner != o.Owner {
			return true, after
		}
		return o.contended || o.promised, s
	}
	if o.Holder == "" {
		return o.contended, s
	}
	if o.Got != 0 && !s.mayHaveToken(o.Got) {
		return false, s
	}
	after, ok := s.ifLive(now)
	if ok && s.owner == o.Holder && s.owner != o.Owner && o.Ends > now &&
		(s.parked && o.Ends >= parkedAfter || o.Ends >= after.from && o.Ends <= after.to) {
		if !s.parked {
			after.from, after.to = o.Ends, o.Ends
		}
		return true, after.withToken(o.Got)
	}
	if after, _, ok := s.ifFree(now, o.until()); ok && o.promised {
		return true, after.withToken(o.Got)
	}
	return false, s
}

// renewed is a renewal. It succeeds if the owner has a live lease under that token.
func (s state) renewed(o *op, now int64) (bool, state) {
	mine := s.owner != "" && s.owner == o.Owner && s.mayHaveToken(o.Token)
	after, ok := s.ifLive(now)
	switch {
	case o.OK && mine && ok && s.parked:
		return true, after.withToken(o.Token)
	case o.OK && mine && ok:
		after = after.withToken(o.Token)
		lo, hi := now, o.until()
		if o.Ends != 0 {
			lo, hi = o.Ends-o.TTL, o.Ends-o.TTL
			if lo < now || hi > o.until() || lo >= s.to {
				return false, s
			}
		}
		after.clock, after.from, after.to = lo, lo+o.TTL, hi+o.TTL
		return true, after
	case o.OK:
		return false, s
	case o.Busy:
		return o.contended, s
	}
	if !mine || !s.exact {
		return true, s
	}
	after, _, ok = s.ifFree(now, o.until())
	return ok, after
}

// released is a release by the owner, or a break by anyone.
func (s state) released(o *op, now int64) (bool, state) {
	mine := s.owner != "" && (o.Kind == kindBreak || s.owner == o.Owner && (o.Token == 0 || s.mayHaveToken(o.Token)))
	_, ok := s.ifLive(now)
	can := mine && ok && (!s.parked || o.Kind == kindBreak)
	switch {
	case o.Blind && can, o.OK && can:
		if s.family.depth > 0 && o.Kind == kindRelease {
			return true, s.returnToParent(now, o.until())
		}
		after := s.free(now)
		after.family = s.family.withoutLoan()
		switch {
		case o.Heir != "":
			return o.Got >= after.token && o.Ends > now && slices.Contains(o.heirs, o.Heir),
				after.grantTo(o.Heir, o.Got, now, o.Ends, o.Ends)
		case o.Passes:
			after.was = s.lease
		}
		return true, after
	case o.Blind:
		return true, s
	case o.OK:
		return false, s
	case !mine || s.parked || !s.exact:
		return true, s
	}
	after, _, ok := s.ifFree(now, o.until())
	return ok, after
}

// written is a fenced write. It succeeds under the live token only.
func (s state) written(o *op, now int64) (bool, state) {
	after, ok := s.ifLive(now)
	if o.OK {
		return ok && s.mayHaveToken(o.Token), after.withToken(o.Token)
	}
	if !s.mayHaveToken(o.Token) || !s.exact {
		return true, s
	}
	after, _, ok = s.ifFree(now, o.until())
	return ok, after
}

// unanswered is an operation without a received answer. It takes effect at this moment if it can. The second result
// reports whether it did.
func (s state) unanswered(o *op, now int64) (state, bool) {
	switch o.Kind {
	case kindAcquire, kindTry, kindAwait, kindTake:
		if after, ok := s.ifLive(now); ok && s.owner == o.Owner {
			if s.parked {
				return s, false
			}
			after.clock, after.from, after.to, after.exact = now, now+o.TTL, never, false
			return after, true
		}
		if after, at, ok := s.ifFree(now, o.until()); ok && s.family.depth == 0 {
			return after.grantTo(o.Owner, 0, at, at+o.TTL, never), true
		}
		return s.applyUnansweredBorrow(o, now)
	case kindRenew:
		if after, ok := s.ifLive(now); ok && s.owner == o.Owner && s.mayHaveToken(o.Token) && !s.parked {
			after.clock, after.from, after.to = now, now+o.TTL, never
			return after.withToken(o.Token), true
		}
	case kindRelease, kindBreak:
		blind := *o
		blind.Blind = true
		_, after := s.released(&blind, now)
		return after, after != s
	case kindPark, kindResume, kindClaim, kindFinish:
		blind := *o
		blind.Blind = true
		ok, after := s.applyExecution(&blind, now)
		return after, ok && after != s
	case kindWrite, kindSweep, kindLeave, kindOver, kindCrash, kindUnknown:
	}
	return s, false
}

// steps is step for operations with several outcomes. An expired loan may have returned. A crash may undo an unawaited
// release. An unanswered release may have handed the lane to any waiter.
func steps(s state, o *op) (all []any) {
	ok, after := step(s, o)
	if ok {
		all = append(all, after)
	}
	if back, expireLoan := s.expireLoan(o); expireLoan {
		if ok, after := step(back, o); ok {
			all = append(all, after)
		}
	}
	if ok && o.Return == 0 && o.Passes && after.owner == "" && s.owner != "" {
		for _, heir := range o.heirs {
			all = append(all, after.grantTo(heir, 0, after.clock, after.clock, never))
		}
	}
	if ok && o.Kind == kindCrash && s.was.owner != "" {
		after.lease, after.was = s.was, lease{}
		all = append(all, after)
	}
	return all
}

// laneModel is porcupine's model of one lane, from a first state.
func laneModel(first state) porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init:              func() []any { return []any{first} },
		Step:              func(s, in, _ any) []any { return steps(s.(state), in.(*op)) },
		DescribeOperation: func(in, _ any) string { return in.(*op).String() },
		DescribeState:     func(s any) string { return fmt.Sprintf("%+v", s) },
	}
	return m.ToModel()
}
