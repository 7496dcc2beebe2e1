package why_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
	"github.com/lanekeeper/lanekeeper/why"
)

// These operations start executions. Each reports whether it was possible.

func (s *scenario) tx(fn func(tx pgx.Tx) error) {
	s.t.Helper()
	require.NoError(s.t, postgres.InTx(s.ctx(), s.pool, fn))
}

// start starts an execution.
func (s *scenario) start(spec executions.Spec, parent *run, c cause) *run {
	s.t.Helper()
	var x executions.Execution
	s.tx(func(tx pgx.Tx) (err error) {
		x, _, err = s.engine.StartTx(s.ctx(), tx, spec)
		return err
	})
	return s.add(&run{
		id: x.ID, trace: x.TraceID, flow: x.Flow, surface: x.Surface, parent: parent,
		inherits: spec.Inherits,
	}, c)
}

func (s *scenario) startOutside() bool {
	switch s.rng.IntN(4) {
	case 0:
		s.start(executions.Spec{Flow: "chat", Surface: trace.Chat, ThreadID: "talk"}, nil,
			cause{"message", "thread talk", ""})
	case 1:
		s.start(executions.Spec{Flow: "operate", Surface: trace.Operate}, nil, cause{"admin", "admin", ""})
	default:
		s.start(executions.Spec{Flow: "onboarding", Surface: trace.Flow, DedupeKey: s.name("order ")}, nil,
			cause{"outside", "outside", ""})
	}
	return true
}

// startChild starts a child of the same trace or, as an API caller may, of another.
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
	require.NoError(s.t, s.engine.PutSchedule(s.ctx(), executions.Schedule{
		Name: name, Flow: "heartbeat",
		Surface: trace.Heartbeat, Cron: "@every 1h", Timezone: "UTC",
	}))
	s.exec(`update agent_schedules set next_run_at = clock_timestamp() - interval '1 second' where name = $1`, name)
	require.NoError(s.t, s.engine.Tick(s.ctx()))
	id := value[string](s.world, `select id::text from agent_executions where dedupe_key > $1 || ' '
		and dedupe_key < $1 || '!'`, name)
	s.add(&run{id: id, trace: s.traceOf(id), flow: "heartbeat", surface: "heartbeat"},
		cause{"schedule", "schedule " + name, ""})
	return true
}

func (s *scenario) traceOf(id string) string {
	return value[string](s.world, `select trace_id from agent_executions where id = $1`, id)
}

func (s *scenario) deliverWebhook() bool {
	id := trace.New(trace.Webhook)
	var d webhooks.Delivery
	s.tx(func(tx pgx.Tx) (err error) {
		d, _, err = webhooks.Insert(s.ctx(), tx, webhooks.Endpoint{Name: "shop", Scheme: "standard"},
			s.name("msg"), string(id),
			webhooks.Incoming{Header: http.Header{}, Body: []byte(`{}`)})
		return err
	})
	r := s.start(executions.Spec{
		Flow: "webhook", Surface: trace.Webhook, TraceID: id,
		Input: map[string]string{"delivery": d.ID}, DedupeKey: fmt.Sprintf("webhook %s %d", d.ID, d.Replays),
	},
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
	require.NoError(s.t, err)
	r := s.add(&run{id: x.ID, trace: x.TraceID, flow: x.Flow, surface: x.Surface, claim: 1, steps: of.steps},
		cause{"fork", of.ref(), of.trace})
	s.fact(of.trace, "led to", "forked", of.ref(), r.ref())
	return true
}

// listen declares an automation for one of the scenario's events, or sometimes for the end of any execution.
func (s *scenario) listen() bool {
	if len(s.autos) == 2 {
		return false
	}
	a := &automation{name: s.name("auto"), event: pick(s, s.keys)}
	if s.rng.IntN(4) == 0 {
		a.event = "AGENT_COMPLETED"
	}
	_, err := automations.Put(s.ctx(), s.pool, automations.Definition{Name: a.name, Event: a.event, Skill: "pay"})
	require.NoError(s.t, err)
	a.id = value[string](s.world, `select id::text from agent_automations where name = $1`, a.name)
	s.autos = append(s.autos, a)
	return true
}

// started records the runs that an event has made due.
func (s *scenario) started(e *event) {
	for _, a := range s.autos {
		if a.event != e.name && (e.name != "EVENT_COMPLETED" || a.event != e.key) || e.end != nil &&
			e.end.flow == "automation" {
			continue
		}
		id := value[string](s.world, `select id::text from agent_automation_runs where automation_id = $1 and event_id = $2`,
			a.id, e.id)
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

// order starts a manual run of an automation, as an admin or as an execution.
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
	got, err := automations.RunManually(ctx, s.pool, pick(s, s.autos).name, "")
	require.NoError(s.t, err)
	j.id = got.ID
	s.jobs = append(s.jobs, j)
	s.causes[j.ref()] = c
	if j.trace != "" {
		s.fact(j.trace, "led to", "started", c.from, j.ref())
	}
	return true
}

// carryOut executes a due run, or one whose last attempt failed. It uses a new execution, like the runner, or a running
// one, like the heartbeat.
func (s *scenario) carryOut() bool {
	for _, j := range s.jobs {
		if j.taken && !j.ended {
			continue
		}
		s.exec(`update agent_automation_runs set retry_at = clock_timestamp() where id = $1 and status = 'error'`, j.id)
		got, err := automations.GetRun(s.ctx(), s.pool, j.id)
		require.NoError(s.t, err)
		var r *run
		if inside := s.some(func(r *run) bool { // an execution makes one attempt of a run
			return r.claimed && r.flow != "automation" &&
				!slices.Contains(s.facts, fact{r.trace, edge{"did", "ran", j.ref(), r.ref()}})
		}); inside != nil && s.rng.IntN(3) == 0 {
			r = inside
			s.fact(r.trace, "did", "ran", j.ref(), r.ref())
		} else {
			if !j.byEvent {
				got.TraceID = "" // like the runner
			}
			r = s.start(runner.Spec("agent", got), nil, cause{"automation", j.ref(), ""})
		}
		run, ok, err := automations.ClaimRun(s.ctx(), s.pool, j.id, got.Attempt, r.id, r.trace)
		require.Truef(s.t, err == nil && ok, "take run %s: %v, %v", j.id, ok, err)
		if j.trace != "" {
			s.fact(j.trace, "led to", "ran", j.ref(), r.ref())
		}
		j.taken, j.ended, j.attempt = true, false, run.Attempt
		if s.rng.IntN(2) == 0 && j.attempt < 3 {
			_, ok, err := automations.Finish(s.ctx(), s.pool, j.id, j.attempt, automations.Result{Error: "it did not work"})
			require.Truef(s.t, err == nil && ok, "finish run %s: %v, %v", j.id, ok, err)
			j.ended = true
		}
		return true
	}
	return false
}

// clear removes everything that could affect the next scenario.
func (s *scenario) clear() {
	s.exec(`delete from agent_automations`)
	s.exec(`delete from agent_schedules`)
	s.exec(`update agent_executions set status = 'cancelled', claim = claim + 1
		where status in ('pending', 'running', 'waiting')`)
}

// expected returns all edges that why must have for a trace. It may have no others.
func (s *scenario) expected(traceID string) []edge {
	edges := []edge{{"trace", "trace", "", "trace " + traceID}}
	for _, f := range s.facts {
		if f.trace == traceID {
			edges = append(edges, f.edge)
		}
	}
	for _, r := range s.runs {
		if r.trace != traceID {
			continue
		}
		if r.parent != nil && r.parent.trace == traceID {
			edges = append(edges, edge{"did", "child", r.parent.ref(), r.ref()})
		} else {
			edges = append(edges, edge{"did", "run", "", r.ref()})
		}
		if r.wait != nil {
			edges = append(edges, edge{"waits", "waits", "", r.ref()})
			for _, by := range r.wait.by {
				edges = append(edges, edge{"waits", "blocked", by.ref(), r.ref()})
			}
		}
	}
	for _, l := range s.lanes {
		if h := l.holder(); h != nil && h.trace == traceID {
			edges = append(edges, edge{
				"lanes", map[bool]string{true: "held", false: "holds"}[l.expired],
				h.ref(), "lane " + l.name,
			})
		}
	}
	for key := range s.spend {
		if key[0] == traceID {
			edges = append(edges, edge{"spend", "spend", "trace " + traceID, "model " + key[1]})
		}
	}
	edges = append(edges, s.because(traceID)...)
	edges = append(edges, s.effects(traceID)...)
	return sorted(edges)
}

func sorted(edges []edge) []edge {
	slices.SortFunc(edges, func(a, b edge) int {
		return cmp.Or(strings.Compare(a.part, b.part), strings.Compare(a.kind, b.kind), strings.Compare(a.from, b.from),
			strings.Compare(a.to, b.to))
	})
	return edges
}

// because returns the chains of causes of the executions without a cause in the trace.
func (s *scenario) because(traceID string) []edge {
	var roots []*run
	for _, r := range s.runs {
		if r.trace == traceID && (r.parent == nil || r.parent.trace != traceID) {
			roots = append(roots, r)
		}
	}
	slices.SortFunc(roots, func(a, b *run) int { return strings.Compare(a.id, b.id) })
	var edges []edge
	seen := map[string]bool{}
	for _, root := range roots {
		var chain []edge
		inside := false
		for ref := root.ref(); ; {
			c, known := s.causes[ref]
			if !known || seen[ref] {
				break
			}
			if inside = c.trace == traceID; inside {
				break
			}
			chain = append(chain, edge{"because", c.kind, c.from, ref})
			ref = c.from
		}
		if inside {
			continue
		}
		for _, e := range chain {
			seen[e.to] = true
		}
		edges = append(edges, chain...)
	}
	return edges
}

// effects returns the effects of a trace beyond its own facts.
func (s *scenario) effects(traceID string) []edge {
	var edges []edge
	led := func(kind, from, to string) { edges = append(edges, edge{"led to", kind, from, to}) }
	for _, e := range s.events {
		if e.trace != traceID {
			continue
		}
		from := e.ref()
		if e.end != nil {
			from = e.end.ref()
		} else {
			led("raised", e.by, e.ref())
		}
		for _, r := range e.woken {
			if r.trace != traceID {
				led("resumed", from, r.ref())
			}
		}
	}
	for _, r := range s.runs {
		if r.parent != nil && r.parent.trace == traceID && r.trace != traceID {
			led("child", r.parent.ref(), r.ref())
		}
	}
	return edges
}

// This part models lanes and their owners, with loans.

// begins records that an owner holds a lane from now on.
func (s *scenario) begins(l *lane, r *run) {
	for _, w := range s.runs {
		if w.wait != nil && w.wait.kind == "lane" && w.wait.key == l.name && w != r {
			w.wait.by = append(w.wait.by, r)
		}
	}
}

// held records a hold that has ended.
func (s *scenario) held(l *lane) {
	h := l.holder()
	s.fact(h.trace, "lanes", "held", h.ref(), "lane "+l.name)
}

// giveBack ends the hold of the lane's owner. The lane returns to its lender, down to the given depth.
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

// lend has a holder start a child and wait for it, and the child borrow the lane.
func (s *scenario) lend() bool {
	for _, l := range s.lanes {
		r := l.holder()
		if r == nil || !r.claimed || l.expired {
			continue
		}
		spec := executions.Spec{
			Flow: "child", Surface: trace.Flow, TraceID: trace.ID(r.trace), ParentID: r.id,
			Awaited: true, Inherits: true,
		}
		child := s.start(spec, r, cause{"child", r.ref(), r.trace})
		s.want(r, s.park(r, "agent", child.id), true)
		s.claimed(child)
		return s.takes(l, child)
	}
	return false
}

// takes has an execution request a lane, and reports whether the execution then holds it.
func (s *scenario) takes(l *lane, r *run) bool {
	if got := value[bool](s.world, `select acquired
		from lanekeeper.acquire_agent_execution_lock($1,
		$2 || '#' || $3::bigint)`, l.name, r.id, r.claim); got != s.mayTake(l, r) {
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

// line returns the chain from the holder of a lane to a possible borrower, with the borrower; nil if it may not borrow.
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

// free applies the end of an execution, or its return to the queue, to its lanes.
func (s *scenario) free(r *run) {
	for _, l := range s.lanes {
		if i := slices.Index(l.stack, r); i >= 0 {
			s.giveBack(l, i)
		}
	}
}

// recall applies the end of a wait for a child.
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
	require.Truef(s.t, value[bool](s.world, `select break_agent_lock($1, 'the test says so')`, l.name),
		"%s is not broken", l.name)
	s.giveBack(l, 0)
	return true
}

// These are the actions of executions between start and completion.

func (s *scenario) claim() bool {
	r := s.some(func(r *run) bool { return !r.over && !r.claimed && r.wait == nil })
	if r == nil {
		return false
	}
	s.claimed(r)
	return true
}

// claimed has a new worker claim an execution.
func (s *scenario) claimed(r *run) {
	r.worker = value[string](s.world, `insert into agent_workers (name, expires_at)
		values ('test', clock_timestamp() + interval '1 hour') returning id::text`)
	r.claim = value[int64](s.world, `select claim from lanekeeper.claim_agent_execution($1, $2)`, r.id, r.worker)
	if r.claim == 0 {
		s.t.Fatalf("%s is not claimed", r.ref())
	}
	r.claimed = true
	s.interrupted(r)
}

// interrupted returns the calls that were running when a claim ended.
func (s *scenario) interrupted(r *run) {
	for _, step := range r.open {
		s.fact(r.trace, "trouble", "unknown", r.ref(), "step "+step)
	}
	r.open = nil
}

func (r *run) next(what string) string {
	r.steps++
	return fmt.Sprintf("%s %d", what, r.steps)
}

func (s *scenario) step() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	s.exec(`insert into agent_checkpoints (execution_id, step, claim, output)
		values ($1, $2, $3, '{"event": "none", "timed_out": true}')`, r.id, r.next("step"), r.claim)
	r.spent = 0
	return true
}

func (s *scenario) entry(r *run, skill, step string, claim int64) activity.Entry {
	return activity.Entry{TraceID: r.trace, ExecutionID: r.id, Claim: claim, Skill: skill, Step: step, Surface: r.surface}
}

func (s *scenario) call() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	step := r.next("call")
	e := s.entry(r, "pay", step, r.claim)
	id, err := activity.Open(s.ctx(), s.pool, e)
	require.NoError(s.t, err)
	if s.rng.IntN(2) == 0 {
		r.open = append(r.open, step)
		return true
	}
	require.NoError(s.t, activity.Close(s.ctx(), s.pool, id, e, activity.Outcome{}))
	return true
}

func (s *scenario) think() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	e := s.entry(r, "model", r.next("think"), r.claim)
	e.Kind, e.Model = activity.KindModel, pick(s, []string{"small", "large"})
	prompt, completion, micros := s.rng.IntN(1000), s.rng.IntN(1000), s.rng.Int64N(90_000)
	_, err := activity.Note(s.ctx(), s.pool, e, activity.Outcome{
		Usage:   activity.Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion},
		CostUSD: float64(micros) / 1e6,
	})
	require.NoError(s.t, err)
	key := [2]string{r.trace, e.Model}
	if s.spend[key] == nil {
		s.spend[key] = &model{}
	}
	s.spend[key].calls++
	s.spend[key].tokens += int64(prompt + completion)
	s.spend[key].micros += micros
	return true
}

// late writes under an expired claim. The database rejects the write and keeps its content.
func (s *scenario) late() bool {
	r := s.some(func(r *run) bool { return len(r.old) > 0 })
	if r == nil {
		return false
	}
	e := s.entry(r, "pay", r.next("late"), pick(s, r.old))
	_, err := activity.Note(s.ctx(), s.pool, e, activity.Outcome{})
	require.ErrorIs(s.t, err, activity.ErrStale, "a late write")
	require.NoError(s.t, activity.Reject(s.ctx(), s.pool, e, activity.Outcome{}))
	s.fact(r.trace, "trouble", "stale", r.ref(), "step "+e.Step)
	return true
}

// lose ends the worker of an execution, and sweeps.
func (s *scenario) lose() bool {
	r := s.some(func(r *run) bool { return r.claimed && r.spent < 3 })
	if r == nil {
		return false
	}
	s.exec(`update agent_workers set expires_at = clock_timestamp() - interval '1 second' where id = $1`, r.worker)
	s.lost(r)
	r.spent++
	s.sweep(nil)
	return true
}

// lost ends a claim without a wait or an end.
func (s *scenario) lost(r *run) {
	s.fact(r.trace, "trouble", "lost", "worker "+r.worker, r.ref())
	r.old = append(r.old, r.claim)
	r.claimed = false
}

func (s *scenario) handBack() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	s.exec(`select lanekeeper.release_agent_claim($1, $2)`, r.id, r.claim)
	s.lost(r)
	s.free(r)
	return true
}

func (s *scenario) end() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	status := pick(s, []string{"completed", "completed", "failed"})
	s.exec(`select lanekeeper.complete_agent_execution($1, $2, $3, 'done', null, null, null)`, r.id, r.claim, status)
	s.ended(r, status)
	return true
}

func (s *scenario) cancel() bool {
	r := s.some(func(r *run) bool {
		return !r.over && !slices.ContainsFunc(s.runs, func(c *run) bool { return c.parent == r && !c.over })
	})
	if r == nil {
		return false
	}
	_, err := s.engine.Cancel(s.ctx(), r.id, "admin", "the test says so")
	require.NoError(s.t, err)
	s.ended(r, "cancelled")
	return true
}

// ended applies all effects of a completion: waiting executions resume, automations start, a target gets a message.
func (s *scenario) ended(r *run, status string) {
	if r.claim > 0 {
		r.old = append(r.old, r.claim)
	}
	r.over, r.claimed, r.wait = true, false, nil
	s.interrupted(r)
	s.free(r)
	e := &event{name: "AGENT_COMPLETED", key: r.id, trace: r.trace, end: r}
	e.id = value[string](s.world, `select id::text from agent_events where external_id = 'completed ' || $1`, r.id)
	s.events = append(s.events, e)
	s.causes[e.ref()] = cause{"end", r.ref(), r.trace}
	s.exec(`select lanekeeper.resume_agent_waiters('agent', $1)`, r.id)
	for _, w := range s.runs {
		if w.wait != nil && w.wait.kind == "agent" && w.wait.key == r.id {
			s.resumed(w, e, "waited", r.ref())
		}
	}
	if status == "failed" && r.surface != "webhook" {
		s.recordMessage(r.trace, r.ref())
	}
	s.started(e)
}

// recordMessage records the newest message to a target.
func (s *scenario) recordMessage(traceID, from string) {
	id := value[string](s.world, `select id::text from agent_webhook_outbox order by id desc limit 1`)
	s.fact(traceID, "led to", "told", from, "outgoing "+id)
}

func (s *scenario) tell() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	if s.rng.IntN(3) == 0 {
		s.exec(`select lanekeeper.emit_agent_webhook('order.placed', $1, '{}')`, r.trace)
		s.recordMessage(r.trace, "trace "+r.trace)
		return true
	}
	s.exec(`select lanekeeper.emit_agent_webhook('order.placed', $1, jsonb_build_object('execution_id', $2::text))`,
		r.trace, r.id)
	s.recordMessage(r.trace, r.ref())
	return true
}

func (s *scenario) say() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	s.exec(`
		with place as (update agent_threads set next_seq = next_seq + 1 where id = 'talk' returning next_seq - 1 as seq)
		insert into agent_messages (thread_id, seq, turn, role, content, execution_id, trace_id, status)
		select 'talk', seq, seq, 'assistant', 'hello', $1, $2, 'sent' from place`, r.id, r.trace)
	said := fact{r.trace, edge{"led to", "said", r.ref(), "thread talk"}}
	if !slices.Contains(s.facts, said) { // one row for all messages
		s.facts = append(s.facts, said)
	}
	return true
}

// crowd has two executions of other traces wait for one event. A third execution sends it, through one of a worker's
// interfaces.
func (s *scenario) crowd() bool {
	by := s.some(working)
	if by == nil {
		return false
	}
	e := &event{name: "EVENT_COMPLETED", key: s.name("crowd"), by: by.ref(), trace: by.trace}
	var waiting []*run
	for range 2 {
		r := s.start(executions.Spec{Flow: "waits", Surface: trace.Flow}, nil, cause{"outside", "outside", ""})
		s.claimed(r)
		s.want(r, s.park(r, "event", e.key), true)
		waiting = append(waiting, r)
	}
	if s.rng.IntN(2) == 0 {
		// The case makes the delivery follow the setting, which names the sender.
		e.id = value[string](s.world, `
			with by as materialized (select set_config('lanekeeper.raised_by', $2, true) as raiser)
			select event_id::text
			  from by
			 cross join lateral lanekeeper.deliver_agent_event('EVENT_COMPLETED',
			         case when by.raiser is not null then $1 end)`, e.key, e.by)
	} else {
		ctx := trace.With(s.ctx(), trace.Span{TraceID: trace.ID(by.trace), ExecutionID: by.id})
		s.tx(func(tx pgx.Tx) error {
			got, err := s.engine.Deliver(ctx, postgres.Beginner(tx), e.name, e.key, nil, "")
			e.id = got.EventID
			return err
		})
	}
	s.events = append(s.events, e)
	s.causes[e.ref()] = cause{"raised", e.by, e.trace}
	for _, r := range waiting {
		s.resumed(r, e, "waited", e.ref())
	}
	s.started(e)
	return true
}

// A flow that sends an event is recorded as its cause, by every interface of a worker. An event from outside has no
// cause.
func TestFlowThatRaisesEventIsItsCause(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	waits := func(ctx context.Context, in json.RawMessage) (executions.Result, error) {
		var key string
		if err := json.Unmarshal(in, &key); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Wait(ctx, "wait", executions.Event(key, time.Hour))
		return executions.Result{}, err
	}
	raises := func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Step(ctx, "raise", func(ctx context.Context) (executions.Delivered, error) {
			return w.engine.Deliver(ctx, w.pool, "EVENT_COMPLETED", "inside", nil, "once")
		})
		return executions.Result{}, err
	}
	require.NoError(t, errors.Join(w.engine.Register("waits", waits), w.engine.Register("raises", raises)))
	ctx, stop := context.WithCancel(t.Context())
	var group errgroup.Group
	group.Go(func() error { return w.engine.Run(ctx) })
	defer func() {
		stop()
		err := group.Wait()
		assert.True(t, err == nil || errors.Is(err, context.Canceled), err)
	}()
	begin := func(flow, key string) executions.Execution {
		x, _, err := w.engine.Start(t.Context(), w.pool, executions.Spec{Flow: flow, Surface: trace.Flow, Input: key})
		require.NoError(t, err)
		return x
	}
	until := func(x executions.Execution, status string) {
		pgtest.Eventually(t, func() bool {
			return value[string](w, `select status from agent_executions where id = $1`, x.ID) == status
		}, x.Flow+" is "+status)
	}
	inside, outside := begin("waits", "inside"), begin("waits", "outside")
	until(inside, "waiting")
	until(outside, "waiting")
	raiser := begin("raises", "")
	_, err := w.engine.Deliver(t.Context(), w.pool, "EVENT_COMPLETED", "outside", nil, "")
	require.NoError(t, err)
	for x, by := range map[*executions.Execution]string{&inside: "execution " + raiser.ID, &outside: "outside"} {
		until(*x, "completed")
		answer, err := why.Of(t.Context(), w.pool, x.TraceID)
		require.NoError(t, err)
		var detail struct {
			By string `json:"raised_by"`
		}
		waited := answer.Of(why.Waits)
		assert.Truef(t, len(waited) == 1 && json.Unmarshal(waited[0].Detail, &detail) == nil && detail.By == by,
			"%s waited for %+v, want an event raised by %s", x.ID, waited, by)
	}
	answer, err := why.Of(t.Context(), w.pool, raiser.TraceID)
	require.NoError(t, err)
	led := answer.Of(why.LedTo)
	assert.Truef(t, len(led) == 2 && led[0].FromRef == "execution "+raiser.ID && led[1].ToRef == "execution "+inside.ID &&
		led[1].TraceID == inside.TraceID, "it led to %+v", led)
}
