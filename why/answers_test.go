package why_test

import (
	"fmt"
	"net/http"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// How executions begin. Each operation says whether it could be done.

func (s *scenario) tx(fn func(tx pgx.Tx) error) {
	s.t.Helper()
	if err := postgres.InTx(s.ctx(), s.pool, fn); err != nil {
		s.t.Fatal(err)
	}
}

// start begins an execution, as everybody does.
func (s *scenario) start(spec executions.Spec, parent *run, c cause) *run {
	s.t.Helper()
	var x executions.Execution
	s.tx(func(tx pgx.Tx) (err error) {
		x, _, err = s.engine.StartTx(s.ctx(), tx, spec)
		return err
	})
	return s.add(&run{id: x.ID, trace: x.TraceID, flow: x.Flow, surface: x.Surface, parent: parent, inherits: spec.Inherits}, c)
}

func (s *scenario) startOutside() bool {
	switch s.rng.IntN(4) {
	case 0:
		s.start(executions.Spec{Flow: "chat", Surface: trace.Chat, ThreadID: "talk"}, nil, cause{"message", "thread talk", ""})
	case 1:
		s.start(executions.Spec{Flow: "operate", Surface: trace.Operate}, nil, cause{"admin", "admin", ""})
	default:
		s.start(executions.Spec{Flow: "onboarding", Surface: trace.Flow, DedupeKey: s.name("order ")}, nil, cause{"outside", "outside", ""})
	}
	return true
}

// startChild begins a child, of the same trace or, as an API caller may, of another.
func (s *scenario) startChild() bool {
	p := s.some(working)
	if p == nil {
		return false
	}
	spec := executions.Spec{Flow: "child", Surface: trace.Flow, TraceID: trace.ID(p.trace), ParentID: p.id}
	if s.rng.IntN(5) == 0 {
		spec.TraceID = ""
	} else {
		spec.Awaited = s.rng.IntN(2) == 0
		spec.Inherits = spec.Awaited
	}
	s.start(spec, p, cause{"child", p.ref(), p.trace})
	return true
}

func (s *scenario) tick() bool {
	name := s.name("schedule")
	if err := s.engine.Put(s.ctx(), executions.Schedule{Name: name, Flow: "heartbeat", Surface: trace.Heartbeat, Cron: "@every 1h", Timezone: "UTC"}); err != nil {
		s.t.Fatal(err)
	}
	s.exec(`update agent_schedules set next_run_at = clock_timestamp() - interval '1 second' where name = $1`, name)
	if err := s.engine.Tick(s.ctx()); err != nil {
		s.t.Fatal(err)
	}
	id := value[string](s.world, `select id::text from agent_executions where dedupe_key > $1 || ' ' and dedupe_key < $1 || '!'`, name)
	s.add(&run{id: id, trace: s.traceOf(id), flow: "heartbeat", surface: "heartbeat"}, cause{"schedule", "schedule " + name, ""})
	return true
}

func (s *scenario) traceOf(id string) string {
	return value[string](s.world, `select trace_id from agent_executions where id = $1`, id)
}

func (s *scenario) deliverWebhook() bool {
	id := trace.New(trace.Webhook)
	var d webhooks.Delivery
	s.tx(func(tx pgx.Tx) (err error) {
		d, _, err = webhooks.Insert(s.ctx(), tx, webhooks.Endpoint{Name: "shop", Scheme: "standard"}, s.name("msg"), string(id),
			webhooks.Incoming{Header: http.Header{}, Body: []byte(`{}`)})
		return err
	})
	r := s.start(executions.Spec{Flow: "webhook", Surface: trace.Webhook, TraceID: id, Input: map[string]string{"delivery": d.ID}, DedupeKey: fmt.Sprintf("webhook %s %d", d.ID, d.Replays)},
		nil, cause{"webhook", "delivery " + d.ID, ""})
	s.tx(func(tx pgx.Tx) error { return webhooks.Link(s.ctx(), tx, d.ID, r.id) })
	return true
}

func (s *scenario) fork() bool {
	of := s.some(func(*run) bool { return true })
	if of == nil {
		return false
	}
	x, err := s.engine.Fork(s.ctx(), s.pool, executions.ForkSpec{ID: of.id})
	if err != nil {
		s.t.Fatal(err)
	}
	r := s.add(&run{id: x.ID, trace: x.TraceID, flow: x.Flow, surface: x.Surface, claim: 1, steps: of.steps}, cause{"fork", of.ref(), of.trace})
	s.fact(of.trace, "led to", "forked", of.ref(), r.ref())
	return true
}

// listen declares an automation for one of the scenario's events, sometimes for the end of any execution.
func (s *scenario) listen() bool {
	if len(s.autos) == 2 {
		return false
	}
	a := &automation{name: s.name("auto"), event: pick(s, s.keys)}
	if s.rng.IntN(4) == 0 {
		a.event = "AGENT_COMPLETED"
	}
	if _, err := automations.Put(s.ctx(), s.pool, automations.Definition{Name: a.name, Event: a.event, Skill: "pay"}, automations.SourceWorkspace); err != nil {
		s.t.Fatal(err)
	}
	a.id = value[string](s.world, `select id::text from agent_automations where name = $1`, a.name)
	s.autos = append(s.autos, a)
	return true
}

// started notes the runs that an event has made due.
func (s *scenario) started(e *event) {
	for _, a := range s.autos {
		if a.event != e.name && (e.name != "EVENT_COMPLETED" || a.event != e.key) || e.end != nil && e.end.flow == "automation" {
			continue
		}
		id := value[string](s.world, `select id::text from agent_automation_runs where automation_id = $1 and event_id = $2`, a.id, e.id)
		j := &job{id: id, trace: e.trace, byEvent: true, attempt: 1}
		s.jobs = append(s.jobs, j)
		s.causes[j.ref()] = cause{"event", e.ref(), ""}
		from := e.ref()
		if e.end != nil {
			from = e.end.ref()
		}
		if e.trace != "" {
			s.fact(e.trace, "led to", "started", from, j.ref())
		}
	}
}

// order has an automation run by hand: an admin's, or that of an execution.
func (s *scenario) order() bool {
	if len(s.autos) == 0 {
		return false
	}
	ctx, j := s.ctx(), &job{attempt: 1}
	c := cause{"admin", "admin", ""}
	if r := s.some(working); r != nil && s.rng.IntN(2) == 0 {
		ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(r.trace), ExecutionID: r.id})
		c, j.trace = cause{"asked", r.ref(), r.trace}, r.trace
	}
	got, err := automations.RunByHand(ctx, s.pool, pick(s, s.autos).name, "")
	if err != nil {
		s.t.Fatal(err)
	}
	j.id = got.ID
	s.jobs = append(s.jobs, j)
	s.causes[j.ref()] = c
	if j.trace != "" {
		s.fact(j.trace, "led to", "started", c.from, j.ref())
	}
	return true
}

// carryOut takes a run that is due, or whose last attempt failed: in an execution of its own, as the runner does, or in one that is at work,
// as the heartbeat does.
func (s *scenario) carryOut() bool {
	for _, j := range s.jobs {
		if j.taken && !j.ended {
			continue
		}
		s.exec(`update agent_automation_runs set retry_at = clock_timestamp() where id = $1 and status = 'error'`, j.id)
		got, err := automations.GetRun(s.ctx(), s.pool, j.id)
		if err != nil {
			s.t.Fatal(err)
		}
		var r *run
		if inside := s.some(func(r *run) bool { // one execution makes one attempt of a run
			return r.claimed && r.flow != "automation" && !slices.Contains(s.facts, tied{r.trace, edge{"did", "ran", j.ref(), r.ref()}})
		}); inside != nil && s.rng.IntN(3) == 0 {
			r = inside
			s.fact(r.trace, "did", "ran", j.ref(), r.ref())
		} else {
			if !j.byEvent {
				got.TraceID = "" // as the runner does
			}
			r = s.start(runner.Spec("agent", got), nil, cause{"automation", j.ref(), ""})
		}
		run, ok, err := automations.Take(s.ctx(), s.pool, j.id, got.Attempt, r.id, r.trace)
		if err != nil || !ok {
			s.t.Fatalf("take run %s: %v, %v", j.id, ok, err)
		}
		if j.trace != "" {
			s.fact(j.trace, "led to", "ran", j.ref(), r.ref())
		}
		j.taken, j.ended, j.attempt = true, false, run.Attempt
		if s.rng.IntN(2) == 0 && j.attempt < 3 {
			if _, ok, err := automations.Finish(s.ctx(), s.pool, j.id, j.attempt, automations.Result{Error: "it did not work"}); err != nil || !ok {
				s.t.Fatalf("finish run %s: %v, %v", j.id, ok, err)
			}
			j.ended = true
		}
		return true
	}
	return false
}

// clear takes away what would concern the next scenario.
func (s *scenario) clear() {
	s.exec(`delete from agent_automations`)
	s.exec(`delete from agent_schedules`)
	s.exec(`update agent_executions set status = 'cancelled', claim = claim + 1 where status in ('pending', 'running', 'waiting')`)
}
