package why_test

import (
	"slices"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Lanes: who has which, with loans, as the model of the test has it.

// begins notes that somebody has a lane from here on.
func (s *scenario) begins(l *lane, r *run) {
	for _, w := range s.runs {
		if w.wait != nil && w.wait.kind == "lane" && w.wait.key == l.name && w != r {
			w.wait.by = append(w.wait.by, r)
		}
	}
}

// held notes a hold that is over.
func (s *scenario) held(l *lane) {
	h := l.holder()
	s.fact(h.trace, "lanes", "held", h.ref(), "lane "+l.name)
}

// giveBack ends the hold of whoever has the lane; it goes to whoever lent it, down to the given depth.
func (s *scenario) giveBack(l *lane, depth int) {
	s.held(l)
	l.stack, l.expired = l.stack[:depth], false
	if depth > 0 {
		s.begins(l, l.holder())
	}
}

func (s *scenario) takeLane() bool {
	r := s.some(working)
	return r != nil && s.takes(pick(s, s.lanes), r)
}

// lend has a holder start a child, wait for it, and the child borrow the lane.
func (s *scenario) lend() bool {
	for _, l := range s.lanes {
		r := l.holder()
		if r == nil || !r.claimed || l.expired {
			continue
		}
		spec := executions.Spec{Flow: "child", Surface: trace.Flow, TraceID: trace.ID(r.trace), ParentID: r.id, Awaited: true, Inherits: true}
		child := s.start(spec, r, cause{"child", r.ref(), r.trace})
		s.want(r, s.park(r, "agent", child.id), true)
		s.claimed(child)
		return s.takes(l, child)
	}
	return false
}

// takes has an execution ask for a lane, and reports whether it has it then.
func (s *scenario) takes(l *lane, r *run) bool {
	if got := value[bool](s.world, `select acquired from lanekeeper.acquire_agent_execution_lock($1, $2 || '#' || $3::bigint)`, l.name, r.id, r.claim); got != s.mayTake(l, r) {
		s.t.Fatalf("%s takes %s: %v", r.ref(), l.name, got)
	} else if !got {
		return false
	}
	line := s.line(l, r)
	switch {
	case l.holder() == r && !l.expired:
	case l.holder() == nil || l.expired:
		if l.holder() != nil {
			s.held(l)
		}
		l.stack, l.expired = []*run{r}, false
		s.begins(l, r)
	default:
		s.held(l) // lent
		l.stack = append(l.stack, line...)
		s.begins(l, r)
	}
	return true
}

func (s *scenario) mayTake(l *lane, r *run) bool {
	return l.holder() == nil || l.expired || l.holder() == r || s.line(l, r) != nil
}

// line is who is between the holder of a lane and who may borrow it, with the latter; nil when it may not.
func (s *scenario) line(l *lane, r *run) []*run {
	line := []*run{r}
	for c := r; c.inherits && c.parent != nil; c = c.parent {
		p := c.parent
		if p.over || p.wait == nil || p.wait.kind != "agent" || p.wait.key != c.id {
			return nil
		}
		if p == l.holder() {
			return line
		}
		line = slices.Insert(line, 0, p)
	}
	return nil
}

func (s *scenario) releaseLane() bool {
	for _, l := range s.lanes {
		r := l.holder()
		if r == nil || !r.claimed || l.expired {
			continue
		}
		if !value[bool](s.world, `select release_agent_lock($1, $2 || '#' || $3::bigint)`, l.name, r.id, r.claim) {
			s.t.Fatalf("%s does not release %s", r.ref(), l.name)
		}
		s.giveBack(l, len(l.stack)-1)
		return true
	}
	return false
}

// free is what the end of an execution, or its going back into the queue, does to its lanes.
func (s *scenario) free(r *run) {
	for _, l := range s.lanes {
		if i := slices.Index(l.stack, r); i >= 0 {
			s.giveBack(l, i)
		}
	}
}

// recall is what the end of a wait for a child does.
func (s *scenario) recall(r *run) {
	for _, l := range s.lanes {
		if i := slices.Index(l.stack, r); i >= 0 && i < len(l.stack)-1 {
			s.giveBack(l, i+1)
		}
	}
}

func (s *scenario) expireLane() bool {
	for _, l := range s.lanes {
		if len(l.stack) != 1 || l.expired || l.holder().wait != nil {
			continue
		}
		s.exec(`update agent_locks set expires_at = clock_timestamp() where lane = $1`, l.name)
		l.expired = true
		return true
	}
	return false
}

func (s *scenario) breakLane() bool {
	l := pick(s, s.lanes)
	if l.holder() == nil || l.expired {
		return false
	}
	if !value[bool](s.world, `select break_agent_lock($1, 'the test says so')`, l.name) {
		s.t.Fatalf("%s is not broken", l.name)
	}
	s.giveBack(l, 0)
	return true
}
