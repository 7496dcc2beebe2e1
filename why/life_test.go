package why_test

import (
	"errors"
	"fmt"
	"slices"

	"github.com/lanekeeper/lanekeeper/activity"
)

// What executions do between their beginning and their end.

func (s *scenario) claim() bool {
	r := s.some(func(r *run) bool { return !r.over && !r.claimed && r.wait == nil })
	if r == nil {
		return false
	}
	s.claimed(r)
	return true
}

// claimed has a worker of its own take an execution.
func (s *scenario) claimed(r *run) {
	r.worker = value[string](s.world, `insert into agent_workers (name, expires_at) values ('test', clock_timestamp() + interval '1 hour') returning id::text`)
	r.claim = value[int64](s.world, `select claim from lanekeeper.claim_agent_execution($1, $2)`, r.id, r.worker)
	if r.claim == 0 {
		s.t.Fatalf("%s is not claimed", r.ref())
	}
	r.claimed = true
	s.interrupted(r)
}

// interrupted are the calls that were under way when a claim, or everything, was over.
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
	s.exec(`insert into agent_checkpoints (execution_id, step, claim, output) values ($1, $2, $3, '{"event": "none", "timed_out": true}')`, r.id, r.next("step"), r.claim)
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
	if err != nil {
		s.t.Fatal(err)
	}
	if s.rng.IntN(2) == 0 {
		r.open = append(r.open, step)
		return true
	}
	if err := activity.Close(s.ctx(), s.pool, id, e, activity.Outcome{}); err != nil {
		s.t.Fatal(err)
	}
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
		Usage: activity.Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion}, CostUSD: float64(micros) / 1e6,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	key := [2]string{r.trace, e.Model}
	if s.spend[key] == nil {
		s.spend[key] = &model{}
	}
	s.spend[key].calls++
	s.spend[key].tokens += int64(prompt + completion)
	s.spend[key].micros += micros
	return true
}

// late writes under a claim that is over: it is refused, and what it would have said is kept.
func (s *scenario) late() bool {
	r := s.some(func(r *run) bool { return len(r.old) > 0 })
	if r == nil {
		return false
	}
	e := s.entry(r, "pay", r.next("late"), pick(s, r.old))
	if _, err := activity.Note(s.ctx(), s.pool, e, activity.Outcome{}); !errors.Is(err, activity.ErrStale) {
		s.t.Fatalf("a late write: %v", err)
	}
	if err := activity.Reject(s.ctx(), s.pool, e, activity.Outcome{}); err != nil {
		s.t.Fatal(err)
	}
	s.fact(r.trace, "trouble", "stale", r.ref(), "step "+e.Step)
	return true
}

// lose takes the worker of an execution away, and sweeps.
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
	if _, err := s.engine.Cancel(s.ctx(), r.id, "admin", "the test says so"); err != nil {
		s.t.Fatal(err)
	}
	s.ended(r, "cancelled")
	return true
}

// ended is all that follows an end: who waits for it goes on, automations start, a target is told.
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
	s.exec(`select lanekeeper.deliver_agent_completion($1)`, r.id)
	for _, w := range s.runs {
		if w.wait != nil && w.wait.kind == "agent" && w.wait.key == r.id {
			s.resumed(w, e, "waited", r.ref())
		}
	}
	if status == "failed" && r.surface != "webhook" {
		s.told(r.trace, r.ref())
	}
	s.started(e)
}

// told notes the newest message to a target.
func (s *scenario) told(traceID, from string) {
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
		s.told(r.trace, "trace "+r.trace)
		return true
	}
	s.exec(`select lanekeeper.emit_agent_webhook('order.placed', $1, jsonb_build_object('execution_id', $2::text))`, r.trace, r.id)
	s.told(r.trace, r.ref())
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
	said := tied{r.trace, edge{"led to", "said", r.ref(), "thread talk"}}
	if !slices.Contains(s.facts, said) { // one row, however often it spoke
		s.facts = append(s.facts, said)
	}
	return true
}
