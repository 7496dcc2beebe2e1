package randomflows_test

import (
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// tables store what only the test knows, and rows that flows write.
const tables = `
	create schema proof;
	create table proof.effects (execution_id uuid not null, step text not null);
	create table proof.calls (kind text not null, execution_id uuid not null, step text not null, key text not null);
	create table proof.expected (
	  seed text not null, root boolean not null, value int not null, variables jsonb not null,
	  effects int not null, calls int not null, once int not null, children int not null);
	create table proof.events (key text not null);
	create table proof.forks (id uuid not null, step text not null, value int not null);
	create table proof.alone (
	  n bigint generated always as identity, lane text not null, execution_id uuid not null, place text not null,
	  at text not null)`

// checks are the invariants. Each query lists its violations in words.
var checks = map[string]string{
	"each flow was run once": `
		select format('the flow of %s has %s executions', e.seed, count(x.id)) from proof.expected e
		  left join agent_executions x on x.input ->> 'seed' = e.seed and e.root = (x.parent_id is null)
		 group by e.seed having count(x.id) <> 1
		union all
		select format('execution %s is of a flow that nobody drew', x.id) from agent_executions x
		 where not exists (select from proof.expected e where e.seed = x.input ->> 'seed')`,
	"each ended with what the model says": `
		select format('execution %s of %s is %s with %s and %s, not completed with %s and %s: %s %s', x.id, e.seed, x.status,
		              x.result, x.variables, e.value, e.variables, x.failed_step, x.error_message)
		  from proof.expected e join agent_executions x on x.input ->> 'seed' = e.seed
		 where (x.status, x.result, x.variables) is distinct from ('completed', to_jsonb(e.value), e.variables)`,
	"a parent has its children": `
		select format('execution %s has %s children, not %s', x.id, c.n, e.children)
		  from proof.expected e join agent_executions x on x.input ->> 'seed' = e.seed
		  cross join lateral (select count(*) as n from agent_executions y where y.parent_id = x.id) c
		 where c.n <> e.children`,
	"an effect is there once": `
		select format('execution %s has %s effects of %s steps, not %s', x.id, c.n, c.steps, e.effects)
		  from proof.expected e join agent_executions x on x.input ->> 'seed' = e.seed
		  cross join lateral (select count(*) as n, count(distinct f.step) as steps from proof.effects f
		    where f.execution_id = x.id) c
		 where (c.n, c.steps) is distinct from (e.effects, e.effects)`,
	"a call that may be repeated was made, under one key": `
		select format('execution %s made %s calls under %s keys, not %s', x.id, c.steps, c.keys, e.calls)
		  from proof.expected e join agent_executions x on x.input ->> 'seed' = e.seed
		  cross join lateral (select count(distinct f.step) as steps, count(distinct f.key) as keys from proof.calls f
		                       where f.execution_id = x.id and f.kind = 'call') c
		 where (c.steps, c.keys) is distinct from (e.calls, e.calls)`,
	"a call that may not be repeated was made once, or is unknown": `
		select format('execution %s made %s calls of %s steps, and %s of %s are on record', x.id, c.n, c.steps, a.n, e.once)
		  from proof.expected e join agent_executions x on x.input ->> 'seed' = e.seed
		  cross join lateral (select count(*) as n, count(distinct f.step) as steps from proof.calls f
		    where f.execution_id = x.id and f.kind = 'once') c
		  cross join lateral (select count(*) as n, count(*) filter (where a.status = 'unknown') as unknown
		    from agent_activity a
		                       where a.execution_id = x.id and a.skill_name = 'once' and a.status in ('success', 'unknown')) a
		 where c.n <> c.steps or a.n <> e.once or c.steps < e.once - a.unknown or c.steps > e.once`,
	"a call is unknown only where a claim was lost": `
		select format('the call %s of execution %s is unknown under claim %s of %s', a.step, x.id, a.claim, x.claim)
		  from agent_activity a join agent_executions x on x.id = a.execution_id
		 where a.status = 'unknown' and (a.claim >= x.claim or a.error_class <> 'interrupted')`,
	"each end was told once": `
		select format('the end of execution %s was told %s times', x.id, count(v.id)) from agent_executions x
		  left join agent_events v on v.event = 'AGENT_COMPLETED' and v.execution_id = x.id
		    group by x.id having count(v.id) <> 1`,
	"each event ended one wait": `
		select format('the event %s came %s times and ended %s waits, of which %s are on record', e.key, count(v.id),
		              count(v.consumed_by), count(c.step))
		  from proof.events e left join agent_events v on v.event = 'EVENT_COMPLETED' and v.key = e.key
		  left join agent_checkpoints c on c.execution_id = v.consumed_by and c.output ->> 'event_id' = v.id::text
		 group by e.key having (count(v.id), count(v.consumed_by), count(c.step)) is distinct from (1, 1, 1)`,
	"who has a lane is alone in it": `
		select format('lane %s: execution %s %s at %s after execution %s began there', a.lane, a.execution_id, a.at, a.place,
		              a.other)
		  from (select a.*, lag(a.at, 1, 'ends') over w as before_, lag(a.execution_id || a.place) over w as other
		          from proof.alone a window w as (partition by a.lane order by a.n)) a
		 where a.at = 'begins' and a.before_ <> 'ends' or a.at = 'ends' and a.other is distinct
		   from a.execution_id || a.place`,
	"nothing is left": `
		select format('execution %s is claimed by %s', id, claimed_by) from agent_executions where claimed_by is not null
		union all
		select format('execution %s waits for %s', id, waiting_for) from agent_executions where waiting_for is not null
		union all
		select format('the call %s is open', activity_id) from agent_activity_open
		union all
		select format('%s of execution %s is running', step, execution_id) from agent_activity where status = 'running'
		union all
		select format('the end of %s was not told', execution_id) from agent_unpublished_completions
		union all
		select format('lane %s is held by %s', lane, locked_by) from agent_locks where locked_by <> '' or parked
		  or execution_id is not null`,
}

// expect stores the model's result of each flow and of its children.
func (w *testEnv) expect(seeds []uint64) {
	w.t.Helper()
	b := &pgx.Batch{}
	for _, seed := range seeds {
		e := model(seed, 0)
		e.write(b, true)
		for _, key := range e.keys() {
			b.Queue(`insert into proof.events values ($1)`, key)
		}
	}
	require.NoError(w.t, w.pool.SendBatch(w.t.Context(), b).Close())
}

func (e *expected) write(b *pgx.Batch, root bool) {
	b.Queue(`insert into proof.expected values ($1, $2, $3, $4, $5, $6, $7, $8)`,
		strconv.FormatUint(e.seed, 10), root, e.value, e.variables, e.effects, e.calls, e.once, e.children)
	for _, c := range e.families {
		c.write(b, false)
	}
}

// replays lists the executions whose replay differs from the record.
func (w *testEnv) replays() (found []string) {
	w.t.Helper()
	for _, id := range pgtest.Column[string](w.t, w.pool, `select id::text from agent_executions order by id`) {
		if differs := w.replay(id); differs != "" {
			found = append(found, differs)
		}
	}
	return found
}

// waitTimeout bounds every wait of a test, for busy machines.
const waitTimeout = 2 * time.Minute

// workers is the number of processes that run flows at once.
const workers = 3

// faultInjector makes the faults of the processes.
type faultInjector struct {
	t       testing.TB
	pool    *pgxpool.Pool
	sink    string
	proxies [workers]*proxy
	slots   [workers]*proctest.Process

	kills, stops, ends, cuts, pauses int
}

func newFaultInjector(w *testEnv, database string) *faultInjector {
	t := w.t
	t.Helper()
	x := &faultInjector{t: t, pool: w.pool, sink: w.url}
	for i := range workers {
		x.proxies[i] = newProxy(t, database)
		x.launch(i)
	}
	return x
}

// launch starts a process in a slot.
func (x *faultInjector) launch(i int) {
	x.t.Helper()
	program, err := os.Executable()
	require.NoError(x.t, err)
	environ := proctest.Environ(workerURL+"="+x.proxies[i].URL(""), workerSink+"="+x.sink)
	x.slots[i] = proctest.Start(x.t, waitTimeout, x.t.TempDir(), environ, program, "worker")
}

// injectFaults makes faults for a time, each kind equally often, and cuts more often.
func (x *faultInjector) injectFaults(lasts time.Duration) {
	var next []int
	for end := time.Now().Add(lasts); time.Now().Before(end); sleepAbout(500 * time.Millisecond) {
		i := rand.IntN(workers)
		p := x.slots[i]
		if !p.Running() { // its connection broke at its start
			x.launch(i)
			continue
		}
		if len(next) == 0 {
			next = rand.Perm(7)
		}
		sort := next[0]
		next = next[1:]
		switch sort {
		case 0:
			p.Kill()
			x.launch(i)
			x.kills++
		case 1:
			p.Signal(syscall.SIGSTOP)
			sleepAbout(lease)
			p.Signal(syscall.SIGCONT)
			x.stops++
		case 2:
			if code := p.Terminate(); code != 0 {
				x.t.Logf("a process that was asked to end ended with %d: %s", code, p.Err.Tail(5))
			}
			x.launch(i)
			x.ends++
		case 3:
			x.pauseAgent()
		default:
			x.cuts += x.proxies[i].cut()
		}
	}
	for i := range x.slots {
		for !x.waitWorking(i) {
			x.launch(i)
		}
	}
}

// waitWorking waits until the process of a slot works. It returns false if the connection broke at the start.
func (x *faultInjector) waitWorking(i int) bool {
	x.t.Helper()
	p := x.slots[i]
	begun := func() bool { return strings.Contains(p.Out.String(), "works") }
	pgtest.EventuallyWithin(x.t, waitTimeout, func() bool { return begun() || !p.Running() }, "a process begins to work")
	return begun() && p.Running()
}

// pauseAgent pauses the agent for a while.
func (x *faultInjector) pauseAgent() {
	ctx := x.t.Context()
	_, err := executions.PauseAll(ctx, x.pool, "somebody", "to see what is in the way")
	assert.NoError(x.t, err, "pause")
	sleepAbout(500 * time.Millisecond)
	_, err = executions.ResumeAll(ctx, x.pool, "somebody", "")
	assert.NoError(x.t, err, "resume")
	x.pauses++
}
