package why_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// This part models waits and the causes of their ends.

// resumed records the end of a wait and its cause.
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

// park has an execution wait, and reports whether it waits: the awaited event may exist already.
func (s *scenario) park(r *run, kind, key string) (waits bool) {
	w := &wait{kind: kind, key: key, step: r.next("wait")}
	var came *json.RawMessage
	err := s.pool.QueryRow(s.ctx(), `select lanekeeper.wait_agent_execution($1, $2, $3, $4, $5, '1 hour', '{}')`, r.id,
		r.claim, w.step, kind, key).Scan(&came)
	require.NoError(s.t, err)
	r.wait = w
	if came != nil {
		r.spent = 0
		return false
	}
	r.old = append(r.old, r.claim)
	r.claimed = false
	return true
}

// want checks whether an execution waits as expected.
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

// atOnce is a wait that ends at its start: the run continues under its claim.
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

// timer makes the timeout of a wait expire.
func (s *scenario) timer() bool {
	r := s.some(func(r *run) bool { return r.wait != nil })
	if r == nil {
		return false
	}
	s.exec(`update agent_executions set waiting_until = clock_timestamp() - interval '1 second' where id = $1`, r.id)
	s.sweep(r)
	return true
}

// sweep runs the engine's sweep: it releases claims of lost workers, resumes waits with a past timeout or a free lane,
// and sends queued messages.
func (s *scenario) sweep(due *run) {
	s.exec(`select lanekeeper.lose_agent_claims(id) from agent_workers where expires_at < clock_timestamp()`)
	s.exec(`select lanekeeper.sweep_agent_waits()`)
	s.exec(executions.ReleaseStaleThreads, postgres.Strict{"grace": 300.0})
	_, err := executions.FlushThreads(s.t.Context(), s.pool, slog.New(slog.DiscardHandler), 500)
	require.NoError(s.t, err)
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

// raise sends an event, from outside, from an execution or for a trace, through one of the interfaces for events.
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
		e.id = value[string](s.world, `select event_id::text from raise_agent_event($1, $2, '{}', null, $3)`,
			e.name, e.key, e.trace)
	case e.by == "outside" && s.rng.IntN(3) == 0:
		e.id = value[string](s.world, `select event_id::text from lanekeeper.deliver_agent_event($1, $2)`, e.name, e.key)
	case e.by == "outside" && s.rng.IntN(2) == 0:
		e.id = value[string](s.world, `select event_id::text
			from lanekeeper.deliver_agent_events(array[$1::text, $1], array[$2::text, 'other'], array['{}', '{}']::jsonb[],
			array[null, null]::text[], null, 0, 0, '{}') where n = 1`, e.name, e.key)
		if e.id == "" { // not plain: delivered separately
			e.id = value[string](s.world, `select event_id::text from lanekeeper.deliver_agent_event($1, $2)`, e.name, e.key)
		}
	default:
		err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
			got, err := s.engine.Deliver(ctx, tx, e.name, e.key, nil, "")
			e.id = got.EventID
			return err
		})
		require.NoError(s.t, err)
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

// ask requests an admin's approval. The execution waits for it, or any execution may use it.
func (s *scenario) ask() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	l := &approval{asker: r, parked: s.rng.IntN(2) == 0}
	l.id = value[string](s.world, `
		insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
		  arguments_hash, expires_at)
		select $1, $2, $3, $4, 'pay', revision, '{}', $3, clock_timestamp() + interval '1 day' from agent_skills
		  where name = 'pay' returning id::text`,
		r.trace, r.id, r.next(s.name("ask")), l.parked)
	s.approvals = append(s.approvals, l)
	s.fact(r.trace, "led to", "asked", r.ref(), "approval "+l.id)
	if l.parked {
		s.want(r, s.park(r, "approval", l.id), true)
	}
	return true
}

func (s *scenario) decide() bool {
	for _, l := range s.approvals {
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

// use uses an approval that is open to any execution.
func (s *scenario) use() bool {
	r := s.some(working)
	for _, l := range s.approvals {
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

// request requests a signature from people, and waits for it.
func (s *scenario) request() bool {
	r := s.some(working)
	if r == nil {
		return false
	}
	id := value[string](s.world, `insert into agent_requests (kind, execution_id, trace_id) values ('signature', $1, $2)
		returning id::text`, r.id, r.trace)
	s.asked[id] = r
	s.fact(r.trace, "led to", "asked", r.ref(), "request "+id)
	s.want(r, s.park(r, "signature", id), true)
	return true
}

// sign answers a signature request.
func (s *scenario) sign() bool {
	for _, id := range slices.Sorted(maps.Keys(s.asked)) { // the order of a seed is always the same
		r := s.asked[id]
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

// operations returns the possible operations, with the weight of each.
func (s *scenario) operations() map[string]func() bool {
	return map[string]func() bool{
		"start": s.startOutside, "child": s.startChild, "another child": s.startChild, "tick": s.tick,
		"webhook": s.deliverWebhook, "fork": s.fork, "listen": s.listen,
		"order": s.order, "carry out": s.carryOut, "claim": s.claim, "claim again": s.claim, "claim once more": s.claim,
		"claim yet again": s.claim, "claim what is ready": s.claim, "go on": s.claim, "step": s.step,
		"call": s.call, "think": s.think,
		"late": s.late, "lose": s.lose, "lose again": s.lose, "hand back": s.handBack, "end": s.end, "cancel": s.cancel,
		"tell": s.tell, "say": s.say,
		"take lane": s.takeLane, "take a lane": s.takeLane, "take another lane": s.takeLane, "take one more lane": s.takeLane,
		"borrow lane": s.takeLane, "lend": s.lend, "lend on": s.lend, "release lane": s.releaseLane,
		"expire lane": s.expireLane,
		"break lane":  s.breakLane, "wait for event": s.waitForEvent, "wait for an event": s.waitForEvent,
		"wait for agent": s.waitForAgent, "wait for a child": s.waitForAgent,
		"wait for time": s.waitForTime, "wait for lane": s.waitForLane, "wait for a lane": s.waitForLane,
		"wait for the lane": s.waitForLane, "timer": s.timer, "raise": s.raise, "raise again": s.raise,
		"ask": s.ask, "decide": s.decide, "use": s.use, "request": s.request, "sign": s.sign, "crowd": s.crowd,
	}
}

// play runs n random operations.
func (s *scenario) play(n int) {
	all := s.operations()
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	s.startOutside()
	for tries := 0; n > 0 && tries < 1000; tries++ {
		name := pick(s, names)
		if all[name]() {
			s.log = append(s.log, name)
			n--
		}
	}
}

// scenarios is the number of scenarios.
func scenarios(t *testing.T) int {
	text := os.Getenv("AGENT_WHY_SCENARIOS")
	if text == "" {
		return 40
	}
	n, err := strconv.Atoi(text)
	require.Truef(t, err == nil && n >= 1, "AGENT_WHY_SCENARIOS is %q: give a number of 1 or more", text)
	return n
}

// Each scenario is a random piece of history, made by the functions and packages of the product. The test records the
// causes itself. why has exactly these rows for every trace of the scenario.
func TestEveryEdgeIsReportedAndNoOther(t *testing.T) {
	t.Parallel()
	n := scenarios(t)
	const atOnce = 2
	for shard := range atOnce {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			edges := map[string]int{}
			for seed := shard; seed < n; seed += atOnce {
				s := w.newScenario(uint64(seed))
				s.play(15 + s.rng.IntN(45))
				for _, id := range s.traceIDs() {
					s.compare(id, seed, edges)
				}
				s.clear()
				for _, e := range s.events {
					if len(e.woken) > 1 {
						edges["(an event that woke several)"]++
					}
				}
				if t.Failed() {
					return
				}
			}
			t.Logf("edges: %v", edges)
		})
	}
}

// compare runs why with any form of the id.
func (s *scenario) compare(traceID string, seed int, count map[string]int) {
	s.t.Helper()
	id := pick(s, []string{traceID, strings.ToLower(traceID), trace.ID(traceID).OTel()})
	rows, err := s.pool.Query(s.ctx(), `select part, kind, from_ref, to_ref, detail from why($1, 1000)`, id)
	require.NoError(s.t, err)
	var got []edge
	spent := map[[2]string]model{}
	var e edge
	var detail json.RawMessage
	_, err = pgx.ForEachRow(rows, []any{&e.part, &e.kind, &e.from, &e.to, &detail}, func() error {
		got = append(got, e)
		var d struct {
			Calls, Tokens int64
			CostUSD       json.Number `json:"cost_usd"`
			Ended, For    string
		}
		err := json.Unmarshal(detail, &d)
		count[strings.TrimRight(strings.Join([]string{e.part, e.kind, d.Ended, d.For}, " "), " ")]++
		if e.part != "spend" {
			return err
		}
		usd, _ := d.CostUSD.Float64()
		spent[[2]string{traceID, strings.TrimPrefix(e.to, "model ")}] = model{d.Calls, d.Tokens, int64(usd*1e6 + 0.5)}
		return err
	})
	require.NoError(s.t, err)
	diff := cmp.Diff(s.expected(traceID), sorted(got), cmp.AllowUnexported(edge{}))
	assert.Truef(s.t, diff == "", "scenario %d, why(%s), after %v (-truth +told):\n%s", seed, id, s.log, diff)
	want := map[[2]string]model{}
	for key, m := range s.spend {
		if key[0] == traceID {
			want[key] = *m
		}
	}
	diff = cmp.Diff(want, spent, cmp.AllowUnexported(model{}))
	assert.Truef(s.t, diff == "", "scenario %d: spend of %s (-truth +told):\n%s", seed, traceID, diff)
}
