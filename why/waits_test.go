package why_test

import (
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Waits, and what ends them.

// resumed notes that a wait is over, and by what.
func (s *scenario) resumed(r *run, e *event, kind, by string) {
	s.fact(r.trace, "waits", kind, by, r.ref())
	w := r.wait
	for _, by := range w.by {
		s.fact(r.trace, "waits", "blocked", by.ref(), r.ref())
	}
	r.wait, r.spent = nil, 0
	if e != nil {
		e.taken = true
		e.woken = append(e.woken, r)
	}
	if w.kind == "agent" {
		for _, c := range s.runs {
			if c.id == w.key && c.parent == r && !c.over {
				c.inherits = false
			}
		}
		s.recall(r)
	}
}

// park lets an execution wait, and reports whether it does: what it waits for may have come.
func (s *scenario) park(r *run, kind, key string) (waits bool) {
	w := &wait{kind: kind, key: key, step: r.next("wait")}
	var came *json.RawMessage
	err := s.pool.QueryRow(s.ctx(), `select lanekeeper.wait_agent_execution($1, $2, $3, $4, $5, '1 hour', '{}')`, r.id, r.claim, w.step, kind, key).Scan(&came)
	if err != nil {
		s.t.Fatal(err)
	}
	r.wait = w
	if came != nil {
		r.spent = 0
		return false
	}
	r.old = append(r.old, r.claim)
	r.claimed = false
	return true
}

// want compares whether an execution waits with whether it should.
func (s *scenario) want(r *run, waits, should bool) {
	s.t.Helper()
	if waits != should {
		s.t.Fatalf("%s waits for %s %s: %v", r.ref(), r.wait.kind, r.wait.key, waits)
	}
}

func (s *scenario) waitForEvent() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	key := pick(s, s.keys)
	var there *event
	for _, e := range s.events {
		if e.name == "EVENT_COMPLETED" && e.key == key && !e.taken {
			there = e
			break
		}
	}
	s.want(r, s.park(r, "event", key), there == nil)
	if there != nil {
		s.atOnce(r, there, there.ref())
	}
	return true
}

// atOnce is a wait that was over when it began: the run goes on under its claim.
func (s *scenario) atOnce(r *run, e *event, by string) {
	s.fact(r.trace, "waits", "waited", by, r.ref())
	r.wait = nil
	if e != nil {
		e.taken = true
		e.woken = append(e.woken, r)
	}
}

func (s *scenario) waitForAgent() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	of := s.some(func(o *run) bool { return o != r })
	if own := s.some(func(o *run) bool { return o.parent == r && !o.over }); own != nil && s.rng.IntN(3) > 0 {
		of = own
	}
	if of == nil {
		return false
	}
	s.want(r, s.park(r, "agent", of.id), !of.over)
	for _, e := range s.events {
		if e.end == of {
			s.atOnce(r, e, of.ref())
		}
	}
	return true
}

func (s *scenario) waitForTime() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	s.want(r, s.park(r, "delay", r.id), true)
	return true
}

func (s *scenario) waitForLane() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	l := pick(s, s.lanes)
	h := l.holder()
	busy := h != nil && h != r && !l.expired
	s.want(r, s.park(r, "lane", l.name), busy)
	if !busy {
		s.atOnce(r, nil, "lane "+l.name)
		return true
	}
	r.wait.by = append(r.wait.by, h)
	return true
}

// timer lets the time of a wait be over.
func (s *scenario) timer() bool {
	r := s.some(func(r *run) bool { return r.wait != nil })
	if r == nil {
		return false
	}
	s.exec(`update agent_executions set waiting_until = clock_timestamp() - interval '1 second' where id = $1`, r.id)
	s.sweep(r)
	return true
}

// sweep takes the claims of lost workers away, resumes what waits for a time that has passed or a lane that is open, and
// sends what is queued, as the engine's sweep does.
func (s *scenario) sweep(due *run) {
	s.exec(`select lanekeeper.lose_agent_claims(id) from agent_workers where expires_at < clock_timestamp()`)
	s.exec(`select lanekeeper.sweep_agent_waits()`)
	s.exec(`select lanekeeper.clean_agent_threads(interval '10 seconds', interval '5 minutes')`)
	s.exec(`select lanekeeper.flush_agent_threads()`)
	if due != nil {
		s.resumed(due, nil, map[bool]string{true: "waited", false: "timed out"}[due.wait.kind == "delay"], "timer")
	}
	for _, r := range s.runs {
		if r.wait == nil || r.wait.kind != "lane" {
			continue
		}
		for _, l := range s.lanes {
			if l.name == r.wait.key && (l.holder() == nil || l.expired) {
				s.resumed(r, nil, "waited", "lane "+l.name)
				break
			}
		}
	}
}

// raise raises an event, from outside, by an execution or for a trace, in one of the ways in which events come.
func (s *scenario) raise() bool {
	e := &event{name: "EVENT_COMPLETED", key: pick(s, s.keys), by: "outside"}
	kind, ctx := "outside", s.ctx()
	switch r := s.some(working); {
	case r != nil && s.rng.IntN(2) == 0:
		kind, e.by, e.trace = "raised", r.ref(), r.trace
		ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(r.trace), ExecutionID: r.id})
	case s.rng.IntN(4) == 0:
		kind, e.trace = "raised", string(trace.New(trace.Operate))
		e.by = "trace " + e.trace
		s.traces = append(s.traces, e.trace)
	}
	switch {
	case e.by == "trace "+e.trace:
		if s.rng.IntN(2) == 0 {
			e.name = pick(s, s.keys) // an event of another name starts automations only
		}
		e.id = value[string](s.world, `select event_id::text from raise_agent_event($1, $2, '{}', null, $3)`, e.name, e.key, e.trace)
	case e.by == "outside" && s.rng.IntN(3) == 0:
		e.id = value[string](s.world, `select event_id::text from lanekeeper.deliver_agent_event($1, $2)`, e.name, e.key)
	case e.by == "outside" && s.rng.IntN(2) == 0:
		e.id = value[string](s.world, `select event_id::text from lanekeeper.deliver_agent_events(array[$1::text, $1], array[$2::text, 'other'], array['{}', '{}']::jsonb[], array[null, null]::text[], null, 0, 0, '{}') where n = 1`, e.name, e.key)
		if e.id == "" { // not plain: it goes by itself
			e.id = value[string](s.world, `select event_id::text from lanekeeper.deliver_agent_event($1, $2)`, e.name, e.key)
		}
	default:
		err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
			got, err := s.engine.Deliver(ctx, tx, e.name, e.key, nil, "")
			e.id = got.EventID
			return err
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	s.events = append(s.events, e)
	s.causes[e.ref()] = cause{kind, e.by, e.trace}
	for _, r := range s.runs {
		if r.wait != nil && r.wait.kind == "event" && r.wait.key == e.key && e.name == "EVENT_COMPLETED" {
			s.resumed(r, e, "waited", e.ref())
		}
	}
	s.started(e)
	return true
}

// ask asks an admin for leave: the execution waits for it, or anybody may use it.
func (s *scenario) ask() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	l := &leave{asker: r, parked: s.rng.IntN(2) == 0}
	l.id = value[string](s.world, `
		insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select $1, $2, $3, $4, 'pay', revision, '{}', $3, clock_timestamp() + interval '1 day' from agent_skills where name = 'pay' returning id::text`,
		r.trace, r.id, r.next(s.name("ask")), l.parked)
	s.leaves = append(s.leaves, l)
	s.fact(r.trace, "led to", "asked", r.ref(), "approval "+l.id)
	if l.parked {
		s.want(r, s.park(r, "approval", l.id), true)
	}
	return true
}

func (s *scenario) decide() bool {
	for _, l := range s.leaves {
		if l.decided || l.parked && l.asker.over {
			continue
		}
		s.exec(`select decide_agent_approval($1, true, 'admin', '')`, l.id)
		l.decided = true
		if l.parked && l.asker.wait != nil && l.asker.wait.key == l.id {
			s.resumed(l.asker, nil, "waited", "approval "+l.id)
		}
		return true
	}
	return false
}

// use uses leave that anybody may use.
func (s *scenario) use() bool {
	r := s.some(working)
	for _, l := range s.leaves {
		if r == nil || !l.decided || l.parked || l.used {
			continue
		}
		s.exec(`select lanekeeper.use_agent_approval($1, $2, $3)`, l.id, r.id, r.next("use"))
		l.used = true
		if r != l.asker {
			s.fact(r.trace, "because", "allowed", "approval "+l.id, r.ref())
		}
		if r.trace != l.asker.trace {
			s.fact(l.asker.trace, "led to", "allowed", "approval "+l.id, r.ref())
		}
		return true
	}
	return false
}

// request asks people for a signature, and waits for it.
func (s *scenario) request() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	id := value[string](s.world, `insert into agent_requests (kind, execution_id, trace_id) values ('signature', $1, $2) returning id::text`, r.id, r.trace)
	s.asked[id] = r
	s.fact(r.trace, "led to", "asked", r.ref(), "request "+id)
	s.want(r, s.park(r, "signature", id), true)
	return true
}

// sign answers a request.
func (s *scenario) sign() bool {
	for id, r := range s.asked {
		if r.over || r.wait == nil || r.wait.key != id {
			continue
		}
		e := &event{name: "SIGNATURE_COMPLETED", key: id, by: "outside", taken: true}
		e.id = value[string](s.world, `select event_id::text from deliver_agent_event('SIGNATURE_COMPLETED', $1, '{}')`, id)
		s.events = append(s.events, e)
		s.causes[e.ref()] = cause{"outside", "outside", ""}
		s.resumed(r, e, "waited", e.ref())
		delete(s.asked, id)
		return true
	}
	return false
}
