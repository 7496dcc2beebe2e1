package randomflows_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// kind is the kind of an op.
type kind string

const (
	step     kind = "step"     // a Step that succeeds
	fails    kind = "fails"    // a Step that returns an error
	bounded  kind = "bounded"  // a Step that its own limit ends
	effect   kind = "effect"   // a StepTx that writes a row
	within   kind = "within"   // a StepTx that writes a row, with a step and a call in it
	call     kind = "call"     // a repeatable Do
	once     kind = "once"     // a non-repeatable Do
	delay    kind = "delay"    // a timer
	event    kind = "event"    // a wait for an event that comes
	never    kind = "never"    // a wait for an event that does not
	child    kind = "child"    // a child with a wait for its end
	aside    kind = "aside"    // a child without a wait
	children kind = "children" // two children at once, with a wait for each end
	show     kind = "show"     // SetVariables
	now      kind = "now"      // Now
	branches kind = "branches" // several at once
	phase    kind = "phase"
	nest     kind = "nest" // a Step that contains others
	scope    kind = "scope"
	loop     kind = "loop"
	lane     kind = "lane" // a lane with other contenders
)

// op is one operation of a flow.
type op struct {
	kind   kind
	name   string // of its step
	n      int    // its part of the result
	lasts  time.Duration
	times  int  // of a loop
	joined bool // of branches: an error of one stops the others
	parts  [][]op
	seed   uint64 // of a child
}

// seeds returns the seeds of children that run at once.
func (o op) seeds() []uint64 { return []uint64{o.seed, o.seed + 1} }

// names are few, so steps share them.
var names = []string{"a", "b", "a", "a#2", "c/d", "é"}

// laneNames are few, too. They are lanes of threads: an execution keeps them when a shutdown or a pause releases it. It
// would lose other lanes until it continues.
var laneNames = []string{"thread:one", "thread:two", "thread:three"}

// maxDepth is the maximum nesting of children and groups.
const maxDepth = 3

// plan draws the flow of a seed. The flow has at most one lane: each run acquires and releases all recorded lanes again
// (executions.Lane).
func plan(seed uint64, depth int) []op {
	r := rand.New(rand.NewPCG(seed, uint64(depth)))
	ops := draw(r, depth, 3+r.IntN(6), true)
	alone := false
	for i := range ops {
		if ops[i].kind == lane && alone {
			ops[i].kind = step
		}
		alone = alone || ops[i].kind == lane
	}
	return ops
}

// draw draws n ops. Parallel or repeated parts have no variables, since the last write would win, and no lanes, which
// belong to the execution. Loops have no children and events, since each has one name.
func draw(r *rand.Rand, depth, n int, top bool) []op {
	simple := []kind{step, step, step, fails, bounded, effect, within, call, once, delay, never, now}
	if top {
		simple = append(simple, show, lane)
	}
	grouped := []kind{branches, branches, phase, nest, scope, loop, event, event, child, aside, children}
	ops := make([]op, n)
	for i := range ops {
		k := simple[r.IntN(len(simple))]
		if depth < maxDepth && r.IntN(3) == 0 {
			k = grouped[r.IntN(len(grouped))]
		}
		o := op{
			kind: k, name: names[r.IntN(len(names))], n: r.IntN(1000),
			lasts: time.Duration(1+r.IntN(30)) * time.Millisecond, seed: r.Uint64(),
		}
		switch k {
		case branches:
			o.joined = r.IntN(2) == 0
			for range 2 + r.IntN(2) {
				o.parts = append(o.parts, draw(r, depth+1, 1+r.IntN(4), false))
			}
		case phase, nest, scope:
			o.parts = [][]op{draw(r, depth+1, 1+r.IntN(3), false)}
		case loop:
			o.times = 1 + r.IntN(20)
			o.parts = [][]op{drawPlain(r, 1+r.IntN(2))}
		case lane:
			o.name = laneNames[r.IntN(len(laneNames))]
			o.parts = [][]op{drawPlain(r, 1+r.IntN(2))}
		default:
		}
		ops[i] = o
	}
	return ops
}

// drawPlain draws the ops of a loop: they are quick, and have no names outside.
func drawPlain(r *rand.Rand, n int) []op {
	plain := []kind{step, fails, effect, call, once, delay}
	ops := make([]op, n)
	for i := range ops {
		ops[i] = op{
			kind: plain[r.IntN(len(plain))], name: names[r.IntN(len(names))], n: r.IntN(1000),
			lasts: time.Duration(1+r.IntN(5)) * time.Millisecond,
		}
	}
	return ops
}

// nextValue returns the value of a flow after one more op.
func nextValue(value, next int) int { return (value*31 + next) % 1_000_003 }

// expected is the model's result of an execution and of its descendants.
type expected struct {
	seed      uint64
	value     int
	variables string // the last ones set; {} for none
	effects   int
	calls     int
	once      int
	children  int
	families  []*expected // of the children
	events    []string    // keys
}

// model returns the result of a flow without faults.
func model(seed uint64, depth int) *expected {
	e := &expected{seed: seed, variables: "{}"}
	e.value = e.applyOps(plan(seed, depth), depth, keyOf(seed), 0)
	return e
}

// keyOf returns the prefix of a flow's event keys.
func keyOf(seed uint64) string { return strconv.FormatUint(seed, 36) }

// opPath returns the name of a place in a flow.
func opPath(path string, i int) string { return path + "." + strconv.Itoa(i) }

func (e *expected) applyOps(ops []op, depth int, path string, value int) int {
	for i, o := range ops {
		value = nextValue(value, e.applyOp(o, depth, opPath(path, i), value))
	}
	return value
}

func (e *expected) applyOp(o op, depth int, path string, value int) int {
	switch o.kind {
	case effect:
		e.effects++
	case within:
		e.effects++
		e.calls++
	case call:
		e.calls++
	case once:
		e.once++
	case event:
		e.events = append(e.events, path)
	case show:
		e.variables = variablesOf(value)
	case child, aside:
		e.children++
		c := model(o.seed, depth+1)
		e.families = append(e.families, c)
		if o.kind == child {
			return c.value
		}
	case children:
		all := 0
		for _, seed := range o.seeds() {
			e.children++
			c := model(seed, depth+1)
			e.families = append(e.families, c)
			all = nextValue(all, c.value)
		}
		return all
	case branches:
		all := 0
		for b, part := range o.parts {
			all = nextValue(all, e.applyOps(part, depth+1, opPath(path, b), 0))
		}
		return all
	case phase, nest, scope, lane:
		return e.applyOps(o.parts[0], depth+1, path, 0)
	case loop:
		all := 0
		for range o.times {
			all = e.applyOps(o.parts[0], depth+1, path, all)
		}
		return all
	case step, fails, bounded, delay, never, now:
	}
	return o.n
}

// variablesOf returns the variables that show sets.
func variablesOf(value int) string { return fmt.Sprintf(`{"value": %d}`, value) }

// keys returns the events of a flow and of its descendants.
func (e *expected) keys() []string {
	keys := e.events
	for _, c := range e.families {
		keys = append(keys, c.keys()...)
	}
	return keys
}

// receivedCall is a call that arrived.
type receivedCall struct{ kind, execution, step, key string }

// sink is the server of the calls. It is slow, so that processes die during some.
type sink struct {
	mu    sync.Mutex
	calls []receivedCall
}

// ServeHTTP counts a call.
func (s *sink) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	s.mu.Lock()
	s.calls = append(s.calls, receivedCall{q.Get("kind"), q.Get("execution"), q.Get("step"), q.Get("key")})
	s.mu.Unlock()
	time.Sleep(rand.N(30 * time.Millisecond))
}

// testEnv is a database with the tables of the test, and an engine that runs nothing.
type testEnv struct {
	t      testing.TB
	pool   *pgxpool.Pool
	engine *executions.Engine
	sink   *sink
	url    string // of the sink
}

func newTestEnv(t testing.TB, url string) *testEnv {
	t.Helper()
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 12})
	w := &testEnv{t: t, pool: pool, sink: &sink{}}
	var err error
	w.engine, err = executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(t, err)
	server := testkit.Serve(t, w.sink)
	w.url = server
	require.NoError(t, w.engine.Register(flowName, player{w.url}.flow))
	pgtest.Exec(w.t, w.pool, tables)
	return w
}

// runSize returns the number of flows, and the duration of the faults.
func runSize(t *testing.T) (flows int, lasts time.Duration) {
	t.Helper()
	text := os.Getenv("AGENT_FLOWS")
	if text == "" {
		return 80, 10 * time.Second
	}
	flows, err := strconv.Atoi(text)
	require.Truef(t, err == nil && flows >= 1, "AGENT_FLOWS=%s: must be a number of flows, such as 1000", text)
	return flows, max(10*time.Second, time.Duration(flows)*time.Minute/500)
}

// seedOf returns the seed of a run.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("AGENT_FLOW_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	require.Truef(t, err == nil, "AGENT_FLOW_SEED=%s: %v", text, err)
	return seed
}

// TestRandomFlowsMatchModel runs random flows while the test kills, stops, ends and disconnects processes.
func TestRandomFlowsMatchModel(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newTestEnv(t, url)
	flows, lasts := runSize(t)
	seed := seedOf(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("drawn from AGENT_FLOW_SEED=%d", seed)
		}
	})
	x := newFaultInjector(w, url)
	r := rand.New(rand.NewPCG(seed, 0))
	seeds := make([]uint64, flows)
	for i := range seeds {
		seeds[i] = r.Uint64()
	}
	var group errgroup.Group
	group.Go(func() error { return w.startFlows(t.Context(), seeds, lasts*7/10) })
	x.injectFaults(lasts)
	require.NoError(t, group.Wait())
	w.waitSettled(waitTimeout + 4*lasts)
	w.storeCalls()
	w.reportViolations(seeds)
	w.checkForks(r)
	for _, p := range x.slots {
		p.Stop()
	}
	t.Logf("%d kills, %d stops, %d ends, %d connections broken, %d pauses", x.kills, x.stops, x.ends, x.cuts, x.pauses)
	assert.True(t, x.kills+x.stops+x.ends != 0 && x.cuts != 0,
		"there was no fault: the run covers nothing")
}

// startFlows starts a flow of each seed within a time. It delivers their events at random times, some of them twice.
func (w *testEnv) startFlows(ctx context.Context, seeds []uint64, within time.Duration) error {
	var group errgroup.Group
	group.SetLimit(32)
	start := time.Now()
	for i, seed := range seeds {
		sleepAbout(max(0, time.Until(start.Add(within*time.Duration(i)/time.Duration(len(seeds))))))
		_, _, err := w.engine.Start(ctx, w.pool, executions.Spec{
			Flow: flowName, Surface: trace.Flow, Input: flowInput{Seed: strconv.FormatUint(seed, 10)},
			DedupeKey: strconv.FormatUint(seed, 10), MaxAttempts: 50,
		})
		if err != nil {
			return err
		}
		for _, key := range model(seed, 0).keys() {
			for range 1 + rand.IntN(2) {
				group.Go(func() error {
					sleepAbout(2 * time.Second)
					_, err := w.engine.Deliver(ctx, w.pool, "EVENT_COMPLETED", key, json.RawMessage(dataOf(key)), key)
					return err
				})
			}
		}
	}
	return group.Wait()
}

// waitSettled waits until everything has ended.
func (w *testEnv) waitSettled(limit time.Duration) {
	w.t.Helper()
	began := time.Now()
	pgtest.EventuallyWithin(w.t, limit, func() bool {
		left := 0
		err := w.pool.QueryRow(w.t.Context(), `select count(*) from agent_executions where completed_at is null`).Scan(&left)
		return err == nil && left == 0
	}, "every flow ends")
	w.t.Logf("the running work ended within %s", time.Since(began).Round(time.Millisecond))
}

// storeCalls stores what only the sink knows.
func (w *testEnv) storeCalls() {
	w.t.Helper()
	w.sink.mu.Lock()
	defer w.sink.mu.Unlock()
	for _, c := range w.sink.calls {
		pgtest.Exec(w.t, w.pool, `insert into proof.calls (kind, execution_id, step, key) values ($1, $2, $3, $4)`, c.kind,
			c.execution, c.step,
			c.key)
	}
}

// reportViolations reports every violation as an error.
func (w *testEnv) reportViolations(seeds []uint64) {
	w.t.Helper()
	w.expect(seeds)
	for name, sql := range checks {
		for i, found := range pgtest.Column[string](w.t, w.pool, sql) {
			if i == 10 {
				w.t.Errorf("%s: and more", name)
				break
			}
			w.t.Errorf("%s: %s", name, found)
		}
	}
	for _, found := range w.replays() {
		w.t.Error(found)
	}
}

// forkCount is the number of executions that the test forks at the end.
const forkCount = 60

// recordedStep is a recorded step of an execution without events. A fork with events would wait for new ones.
type recordedStep struct {
	ID, Step string
	Value    int
}

// checkForks forks executions from random recorded steps, without faults. Each fork has the result of its execution,
// and its replay equals its record.
func (w *testEnv) checkForks(r *rand.Rand) {
	w.t.Helper()
	ctx := w.t.Context()
	steps := pgtest.Rows[recordedStep](w.t, w.pool, `
		select x.id::text, c.step, (x.result #>> '{}')::int from agent_executions x
		  join agent_checkpoints c on c.execution_id = x.id
		 where not exists (select from agent_executions y join agent_events v on v.consumed_by = y.id
		   and v.event = 'EVENT_COMPLETED'
		                    where y.trace_id = x.trace_id)
		 order by x.id, c.step`)
	require.True(w.t, len(steps) > 0, "no steps to fork from")
	for range forkCount {
		s := steps[r.IntN(len(steps))]
		fork, err := w.engine.Fork(ctx, w.pool, executions.ForkSpec{ID: s.ID, From: s.Step})
		if err != nil {
			w.t.Errorf("fork of %s from %s: %v", s.ID, s.Step, err)
			continue
		}
		pgtest.Exec(w.t, w.pool, `insert into proof.forks values ($1, $2, $3)`, fork.ID, s.Step, s.Value)
	}
	w.waitSettled(waitTimeout)
	for _, found := range pgtest.Column[string](w.t, w.pool, wrongForks) {
		w.t.Error(found)
	}
	for _, id := range pgtest.Column[string](w.t, w.pool, `select id::text from proof.forks`) {
		assert.Equal(w.t, "", w.replay(id))
	}
}

// wrongForks lists the forks with another result.
const wrongForks = `
	select format('the fork %s from %s is %s with %s, not completed with %s: %s %s', f.id, f.step, x.status, x.result,
	              f.value, x.failed_step, x.error_message)
	  from proof.forks f left join agent_executions x on x.id = f.id
	 where (x.status, x.result) is distinct from ('completed', to_jsonb(f.value))`

// replay returns the difference between an execution's replay and its record, or "".
func (w *testEnv) replay(id string) string {
	got, err := w.engine.Replay(w.t.Context(), id)
	switch {
	case err != nil:
		return fmt.Sprintf("the replay of %s: %v", id, err)
	case !got.Equal:
		return fmt.Sprintf("the replay of %s: %+v", id, got.Divergence)
	}
	return ""
}
