package executions_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// insertWaiting inserts an execution by plain SQL. It waits for an event of the key.
func insertWaiting(t *testing.T, pool *pgxpool.Pool, key, flow string, priority int) string {
	t.Helper()
	id := insertQueued(t, pool, flow, "flow", priority)
	n := mustClaim(t, pool, id, newWorker(t, pool))
	pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'event', 'event', @key, interval '1 day',
		null)`,
		postgres.Strict{"id": id, "claim": n, "key": key})
	return id
}

// delivery is the outcome of one event.
type delivery struct {
	N           int
	EventID     *string
	ExecutionID *string
	Claimed     *int64
	Held        bool
	Steps       []string
}

// The ways to deliver events.
const (
	singleDelivery = "one waits for locks"
	batchDelivery  = "a batch does not"
)

// deliverBatch delivers events like a process with free workers: each by the function for one event, or all in one
// batch.
func deliverBatch(t *testing.T, db postgres.DB, worker string, places int, by string, keys ...string) []delivery {
	t.Helper()
	ids := make([]*string, len(keys))
	names := make([]string, len(keys))
	for i, key := range keys {
		if name, id, ok := strings.Cut(key, "="); ok {
			keys[i], ids[i] = name, &id
		}
		names[i] = "EVENT_COMPLETED"
	}
	from := `unnest(@names::text[], @keys::text[], @ids::text[]) with ordinality v (name, key, id, n)
		 cross join lateral lanekeeper.deliver_agent_event(v.name, v.key, '{}', v.id, @worker,
		            case when v.n <= @places then '{background,interactive}'::text[] else '{}' end, '{left}') d`
	if by == batchDelivery {
		from = `lanekeeper.deliver_agent_events(@names, @keys, array_fill('{}'::jsonb, array[cardinality(@names::text[])]), @ids, @worker,
		            @places, @places, '{left}') v`
	}
	return pgtest.Rows[delivery](t, db, `
		select v.n::int, event_id::text, execution_id::text, (execution).claim, held, steps from `+from+` order by 1, 3`,
		postgres.Strict{"names": names, "keys": keys, "ids": ids, "worker": worker, "places": places})
}

// forSingleAndBatch calls a test for a single event and for a batch.
func forSingleAndBatch(t *testing.T, fn func(t *testing.T, pool *pgxpool.Pool, by string)) {
	t.Parallel()
	for _, by := range []string{singleDelivery, batchDelivery} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			fn(t, pgtest.DB(t), by)
		})
	}
}

// An event claims only executions that the queue would claim next.
func TestEventClaimsHeadOfQueue(t *testing.T) {
	forSingleAndBatch(t, func(t *testing.T, pool *pgxpool.Pool, by string) {
		me := newWorker(t, pool)
		cases := map[string]struct {
			before, after string // SQL; it replaces X by the execution
			flow          string
			places        int
			want          bool
		}{
			"nothing else":                  {flow: "flow", places: 2, want: true},
			"no free worker":                {flow: "flow"},
			"a flow that is left to others": {flow: "left", places: 2},
			"a flow for workers outside":    {flow: "external", places: 2},
			"a limit of its flow": {
				before: `insert into agent_limits values ('flow', 'flow', 9)`,
				after:  `delete from agent_limits`, flow: "flow", places: 2,
			},
			"a limit of its surface": {
				before: `insert into agent_limits values ('surface', 'flow', 9)`,
				after:  `delete from agent_limits`, flow: "flow", places: 2,
			},
			"something else is ready": {before: `insert into agent_executions (trace_id, surface, flow)
				values ('fl_x', 'flow', 'other')`, after: `delete from agent_executions where flow = 'other'`, flow: "flow", places: 2},
			"a limit delays a ready execution": {before: `insert into agent_executions (trace_id, surface, flow)
				values ('fl_x', 'flow', 'other'); insert into agent_limits
				values ('flow', 'other', 0)`, after: `delete from agent_executions where flow = 'other'; delete from agent_limits`, flow: "flow", places: 2, want: true},
			"a pause": {
				before: `select pause_agent('test')`, after: `select resume_agent()`,
				flow: "flow", places: 2,
			},
			"a lease that is over": {
				before: `update agent_workers set expires_at = clock_timestamp() where name = 'test'`,
				after:  `update agent_workers set expires_at = clock_timestamp() + interval '1 minute'`, flow: "flow", places: 2,
			},
		}
		for name, c := range cases {
			id := ""
			if c.flow == "external" {
				id = pgtest.Value[string](t, pool, `
					insert into agent_executions (trace_id, surface, flow) values ('fl_x', 'flow', 'external') returning id::text`)
				lock := pgtest.Value[string](t, pool, `select lock_id from lock_agent_execution(@id, 'somebody')`,
					postgres.Strict{"id": id})
				pgtest.Exec(t, pool, `select unlock_agent_execution(@id, @lock, 'waiting', '', null, 'event', @key)`,
					postgres.Strict{"id": id, "lock": lock, "key": name})
			} else {
				id = insertWaiting(t, pool, name, c.flow, 2)
			}
			execAll(t, pool, c.before)
			got := deliverBatch(t, pool, me, c.places, by, name)
			execAll(t, pool, c.after)
			x := getExecution(t, pool, id)
			require.Truef(t, len(got) == 1 && postgres.Deref(got[0].ExecutionID) == id && x.Status == executions.Running,
				"%s: delivered %+v, status %s", name, got, x.Status)
			switch claimed := got[0].Claimed != nil; {
			case claimed != c.want, claimed != (x.ClaimedBy != nil):
				t.Errorf("%s: claimed %t, want %t; the row is claimed by %q", name, claimed, c.want, postgres.Deref(x.ClaimedBy))
			case claimed && (*got[0].Claimed != x.Claim || got[0].Held || !slices.Equal(got[0].Steps, []string{"event"})):
				t.Errorf("%s: response %+v, the row has claim %d", name, got[0], x.Claim)
			}
			pgtest.Exec(t, pool, `delete from agent_executions`)
		}
	})
}

// execAll runs statements of a test.
func execAll(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	for s := range strings.SplitSeq(sql, ";") {
		if s != "" {
			pgtest.Exec(t, pool, s)
		}
	}
}

func TestResumedExecutionsAreOrderedByPriority(t *testing.T) {
	forSingleAndBatch(t, func(t *testing.T, pool *pgxpool.Pool, by string) {
		me := newWorker(t, pool)
		late, first := insertWaiting(t, pool, "k", "flow", 4), insertWaiting(t, pool, "k", "flow", 1)
		got := deliverBatch(t, pool, me, 1, by, "k")
		if by == batchDelivery { // a batch leaves out an event with two waiters
			require.Truef(t, len(got) == 1 && got[0].EventID == nil, "a batch delivered %+v", got)
			got = deliverBatch(t, pool, me, 1, singleDelivery, "k")
		}
		require.Equal(t, 2, len(got), got)
		if x := getExecution(t, pool, late); x.Status != executions.Running || x.ClaimedBy != nil {
			t.Errorf("the execution of lower priority is %s, claimed by %q", x.Status, postgres.Deref(x.ClaimedBy))
		}
		claimReady(t, pool, me, 1)
		assert.True(t, getExecution(t, pool, first).ClaimedBy != nil, "the execution of higher priority was not first")
	})
}

func TestDuplicateEventResumesOnce(t *testing.T) {
	forSingleAndBatch(t, func(t *testing.T, pool *pgxpool.Pool, by string) {
		me := newWorker(t, pool)
		one := insertWaiting(t, pool, "one", "flow", 2)
		first := deliverBatch(t, pool, me, 9, by, "one=id")
		two := insertWaiting(t, pool, "one", "flow", 2)
		again := deliverBatch(t, pool, me, 9, by, "one=id")
		assert.Truef(t, len(again) == 1 && again[0].ExecutionID == nil &&
			postgres.Deref(again[0].EventID) == postgres.Deref(first[0].EventID), "the repetition: %+v of %+v", again, first)
		assert.Equal(t, executions.Running, getExecution(t, pool, one).Status)
		assert.Equal(t, executions.Waiting, getExecution(t, pool, two).Status)
		assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_events where event = 'EVENT_COMPLETED'`))
		deliverBatch(t, pool, me, 9, by, "kept")
		assert.Equal(t, 1, pgtest.Value[int](t, pool,
			`select count(*) from agent_events where key = 'kept' and consumed_by is null`))
	})
}

// The id of an event with another key is refused alone: events of the same batch are delivered.
func TestUsedEventIDIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	me := newWorker(t, pool)
	id := insertWaiting(t, pool, "two", "flow", 2)
	deliverBatch(t, pool, me, 9, singleDelivery, "one=id")
	got := deliverBatch(t, pool, me, 9, batchDelivery, "two=id", "three")
	assert.Truef(t, len(got) == 2 && got[0].EventID == nil && got[1].EventID != nil,
		"a batch: %+v", got)
	for _, query := range []string{
		`select deliver_agent_event('EVENT_COMPLETED', 'two', '{}', 'id')`,
		`select deliver_agent_event('MESSAGE_RECEIVED', 'one', '{}', 'id')`,
		`select raise_agent_event('moon', 'one', '{}', 'id', '')`,
	} {
		_, err := pool.Exec(t.Context(), query)
		assert.Truef(t, postgres.IsCode(err, "22023"), "%s: error %v, want SQLSTATE 22023", query, err)
	}
	for query, says := range map[string]string{
		`select raise_agent_event('', 'one')`:      "needs a name, and a key that is not null",
		`select fence_agent_execution(null, null)`: "of execution null is stale",
	} {
		_, err := pool.Exec(t.Context(), query)
		assert.Contains(t, fmt.Sprint(err), says)
	}
	assert.Equal(t, executions.Waiting, getExecution(t, pool, id).Status)
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_events`))
}

// A batch never waits for a lock: it leaves out blocked events and reports them.
func TestEventBatchSkipsBlockedEvents(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	me := newWorker(t, pool)
	ids := map[string]string{}
	for _, key := range []string{"plain", "waits", "row", "lane", "twice"} {
		ids[key] = insertWaiting(t, pool, key, "flow", 2)
	}
	pgtest.Exec(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked, execution_id)
		values ('thread:t', @owner, 1, '9000-01-01', true, @id)`, postgres.Strict{"owner": ids["lane"] + "#2", "id": ids["lane"]})
	held := pgtest.Begin(t, pool)
	pgtest.Exec(t, held, `select pg_advisory_xact_lock(hashtextextended('wait event waits', 0)), 1 from agent_executions
		where id = @id for update`, postgres.Strict{"id": ids["row"]})
	got := deliverBatch(t, pool, me, 9, batchDelivery, "plain", "waits", "row", "lane", "twice", "twice",
		"a=same", "b=same", "nobody")
	delivered := map[int]bool{}
	for _, h := range got {
		delivered[h.N] = h.EventID != nil
	}
	for n, want := range []bool{true, false, false, false, true, false, true, false, true} {
		assert.Equal(t, want, delivered[n+1], n+1)
	}
	for key, id := range ids {
		want := executions.Waiting
		if key == "plain" || key == "twice" {
			want = executions.Running
		}
		assert.Equal(t, want, getExecution(t, pool, id).Status, key)
	}
	assert.Equal(t, 4, pgtest.Value[int](t, pool, `select count(*) from agent_events where event = 'EVENT_COMPLETED'`))
}

// A call that a lost claim left in flight has no record, so the response cannot contain it. The response sets held, and
// the process reads the rest.
func TestResumedExecutionReportsLostClaim(t *testing.T) {
	forSingleAndBatch(t, func(t *testing.T, pool *pgxpool.Pool, by string) {
		me := newWorker(t, pool)
		for lost, key := range []string{"never", "once"} {
			id := insertPending(t, pool)
			if lost > 0 {
				loseWorker(t, pool, id, "")
			}
			pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'event', 'event', @key, interval '1 day',
				null)`,
				postgres.Strict{"id": id, "claim": mustClaim(t, pool, id, newWorker(t, pool)), "key": key})
			got := deliverBatch(t, pool, me, 1, by, key)
			assert.Truef(t, len(got) == 1 && got[0].Claimed != nil && got[0].Held == (lost > 0), "lost %s: %+v", key, got)
			pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim(@id, @claim)`,
				postgres.Strict{"id": id, "claim": *got[0].Claimed})
			held := func() bool {
				return pgtest.Value[bool](t, pool, `select held from lanekeeper.claim_agent_executions('background', @worker, 1)`,
					postgres.Strict{"worker": me})
			}
			assert.True(t, !held(), "a claim lost without a call in flight sets held")
			pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim(id, claim) from agent_executions where id = @id`,
				postgres.Strict{"id": id})
			pgtest.Exec(t, pool, `
				insert into agent_activity (trace_id, execution_id, skill_name, step, status, error_class)
				select trace_id, id, 'fetch', 'fetch', 'unknown', 'interrupted' from agent_executions
				 where id = @id`, postgres.Strict{"id": id})
			assert.True(t, held(), "a call that was interrupted is not said")
			pgtest.Exec(t, pool, `update agent_executions set status = 'completed' where id = @id`, postgres.Strict{"id": id})
		}
	})
}

func TestResumedExecutionKeepsLanes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertWaiting(t, pool, "k", "flow", 2)
	pgtest.Exec(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked, execution_id)
		values ('thread:t', @owner, 1, '9000-01-01', true, @id)`, postgres.Strict{"owner": id + "#2", "id": id})
	var owner atomic.Value
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		by, err := queryValue[string](ctx, pool, `select locked_by from agent_locks where lane = 'thread:t' and not parked
			and expires_at > clock_timestamp()`)
		owner.Store(by)
		return executions.Result{}, err
	}), neverSweep)
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "k", nil, "")
	require.NoError(t, err)
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, fmt.Sprintf("%s#%d", id, x.Claim), owner.Load().(string), x.Claim)
}

// A process may die between the claiming statement and the run. Its claims are released like any others.
func TestClaimsOfDeadProcessAreReleased(t *testing.T) {
	forSingleAndBatch(t, func(t *testing.T, pool *pgxpool.Pool, by string) {
		id := insertWaiting(t, pool, "k", "flow", 2)
		pgtest.Exec(t, pool, `update agent_executions set input = '"k"'`)
		dead := newWorker(t, pool)
		got := deliverBatch(t, pool, dead, 1, by, "k")
		require.Truef(t, got[0].Claimed != nil, "not claimed: %+v", got)
		expireLease(t, pool, id)
		sweep(t, pool)
		if x := getExecution(t, pool, id); x.ClaimedBy != nil || x.Attempt != 1 {
			t.Errorf("after the death the execution is claimed by %q, attempt %d", postgres.Deref(x.ClaimedBy), x.Attempt)
		}
		startEngine(t, pool, eventFlow())
		x := enginetest.Await(t, pool, id, executions.Completed)
		assert.Contains(t, string(x.Result), `"event": "EVENT_COMPLETED"`)
	})
}

// The planner finds a wait by its key, whatever the table statistics are.
func TestWaitsAreFoundByIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_executions (trace_id, surface, flow) select 'fl_x', 'flow', 'flow'
		from generate_series(1, 3000)`)
	pgtest.Exec(t, pool, `analyze agent_executions`) // while the table has no waits
	pgtest.Exec(t, pool, `update agent_executions set status = 'running'`)
	pgtest.Exec(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = id::text, waiting_step = 'event',
		                            claim = 2, wait_number = 1`)
	id := pgtest.Value[string](t, pool, `select max(id::text) from agent_executions`)
	me := newWorker(t, pool)
	read := func(tx postgres.DB) int {
		return pgtest.Value[int](t, tx, `select (idx_tup_fetch + seq_tup_read)::int from pg_stat_xact_user_tables
			where relname = 'agent_executions'`)
	}
	for name, sql := range map[string]string{
		"one": `select count(*) from lanekeeper.deliver_agent_event('EVENT_COMPLETED', @key, '{}', null, @worker,
			'{background}')`,
		"several": `select count(*) from lanekeeper.deliver_agent_events(array['EVENT_COMPLETED', 'EVENT_COMPLETED'],
			array[@key, 'other'], array['{}', '{}']::jsonb[], array[null, null]::text[], @worker, 1, 1, '{}')`,
		"in SQL": `select count(*) from deliver_agent_event('EVENT_COMPLETED', @key, '{}', nullif(@worker, ''))`,
		"at an end": `with c as (update agent_executions set status = 'cancelled' where id = @key::uuid and @worker <> ''
			returning 1) select count(*) from c`,
		"a parent": `select count(*) from lanekeeper.resume_agent_waiters('agent', @key, null, @worker <> '')`,
	} {
		t.Run(name, func(t *testing.T) {
			tx := pgtest.Begin(t, pool)
			before := read(tx)
			pgtest.Value[int](t, tx, sql, postgres.Strict{"key": id, "worker": me})
			n := read(tx) - before
			assert.Truef(t, n <= 100, "%d rows were read to find one wait", n)
		})
	}
}

// A locked row delays an event. The worker reserved for its execution becomes free meanwhile.
func TestBlockedEventReservesNoWorker(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow(), func(o *executions.Options) { o.Workers, o.LeaseTTL = 1, time.Minute })
	held := p.startWithInput(t, "held")
	enginetest.Await(t, pool, held, executions.Waiting)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select pg_advisory_xact_lock(hashtextextended('wait event held', 0))`)
	var group errgroup.Group
	group.Go(func() error {
		_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "held", nil, "")
		return err
	})
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[int](t, pool, `select count(*) from pg_locks where locktype = 'advisory' and not granted
			and database = (select oid from pg_database where datname = current_database())`) > 0
	}, "the event waits")
	mustDeliver(t, pool, "other", "{}")
	enginetest.Await(t, pool, p.startWithInput(t, "other"), executions.Completed)
	require.NoError(t, tx.Rollback(t.Context()))
	assert.NoError(t, group.Wait())
	enginetest.Await(t, pool, held, executions.Completed)
}

// An event sent in a replay must not reach the database in a batch with others.
func TestReplayedEventJoinsNoBatch(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow())
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	sealed, _ := postgres.WithoutDatabase(t.Context())
	group, ctx := errgroup.WithContext(t.Context())
	for caller := range 6 {
		group.Go(func() error {
			for i := range 20 {
				if caller == 0 {
					if _, err := p.Deliver(sealed, pool, "EVENT_COMPLETED", "sealed", nil, ""); err == nil {
						return errors.New("an event was delivered under a seal")
					}
					continue
				}
				if _, err := p.Deliver(ctx, pool, "EVENT_COMPLETED", fmt.Sprint(caller, "-", i), nil, ""); err != nil {
					return err
				}
			}
			return nil
		})
	}
	assert.NoError(t, group.Wait())
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_events where key = 'sealed'`))
}

func TestWorkerIsFreeDuringCompletion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ran := make(chan string, 10)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		ran <- x.ID
		return executions.Result{}, nil
	}), func(o *executions.Options) { o.Workers, o.LeaseTTL = 1, time.Minute })
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `lock table agent_events in share mode`) // no execution can complete
	first, second := p.startFlow(t, "flow"), p.startFlow(t, "flow")
	both := []string{testkit.Receive(t, ran), testkit.Receive(t, ran)}
	slices.Sort(both) // a start with a free worker may overtake one without
	assert.NoDiff(t, []string{first, second}, both)
	require.NoError(t, tx.Rollback(t.Context()))
	enginetest.Await(t, pool, first, executions.Completed)
	enginetest.Await(t, pool, second, executions.Completed)
}

// The checkpoints returned with the claim equal the stored ones: for the wait only, and with earlier checkpoints.
func TestClaimedCheckpointsEqualStoredOnes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	me := newWorker(t, pool)
	for _, record := range []struct {
		before string
		steps  int
	}{
		{"", 1},
		{"early", 2},
		{"event", 1}, // an existing record under the name of the wait stays
	} {
		id := insertWaiting(t, pool, "k", "flow", 2)
		if record.before != "" {
			pgtest.Exec(t, pool, `
				insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
				select id, @step, claim, 'print', true, '{"a": 1}' from agent_executions
				 where id = @id`, postgres.Strict{"id": id, "step": record.before})
		}
		var steps []string
		var answered, stored string
		err := pool.QueryRow(t.Context(), `
			select steps, jsonb_build_array(claims, prints, failed, outputs, times)::text
			  from lanekeeper.deliver_agent_event('EVENT_COMPLETED', 'k', '{"b": 2}', null, @worker, '{background}')`,
			postgres.Strict{"worker": me}).Scan(&steps, &answered)
		require.NoError(t, err)
		err = pool.QueryRow(t.Context(), `
			select jsonb_build_array(jsonb_agg(c.claim order by s.n), jsonb_agg(c.fingerprint order by s.n),
			                         jsonb_agg(c.failed order by s.n), jsonb_agg(c.output order by s.n),
			                         jsonb_agg(c.created_at order by s.n))::text
			  from unnest(@steps::text[]) with ordinality s (step, n)
			  left join agent_checkpoints c on c.execution_id = @id and c.step = s.step`,
			postgres.Strict{"steps": steps, "id": id}).Scan(&stored)
		require.NoError(t, err)
		assert.Equal(t, record.steps, len(steps), record.before, steps)
		assert.Equal(t, stored, answered, record.before, steps)
		pgtest.Exec(t, pool, `delete from agent_executions`)
	}
}

// deliverDuring delivers an event that waits for the locked row of its execution. Meanwhile change runs; then the
// delivery continues.
func deliverDuring(t *testing.T, pool *pgxpool.Pool, worker, id string, change func(tx pgx.Tx)) []delivery {
	t.Helper()
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_executions where id = @id for update`, postgres.Strict{"id": id})
	done := make(chan []delivery, 1)
	go func() {
		defer close(done) // also on a failure
		done <- deliverBatch(t, pool, worker, 2, singleDelivery, "k")
	}()
	pgtest.AwaitBlocked(t, pool, 1, "deliver_agent_event")
	change(tx)
	require.NoError(t, tx.Commit(t.Context()))
	return <-done
}

// The function decides after it has locked the row.
func TestEventRechecksAfterLockWait(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change  func(t *testing.T, tx pgx.Tx, id, worker string)
		status  executions.Status
		claimed bool
	}{
		"nothing": {func(*testing.T, pgx.Tx, string, string) {}, executions.Running, true},
		"the lease of the worker ends": {func(t *testing.T, tx pgx.Tx, _, worker string) {
			pgtest.Exec(t, tx, `update agent_workers set expires_at = clock_timestamp() where id = @id`,
				postgres.Strict{"id": worker})
		}, executions.Running, false},
		"a limit is set": {func(t *testing.T, tx pgx.Tx, _, _ string) {
			pgtest.Exec(t, tx, `insert into agent_limits values ('flow', 'flow', 9)`)
		}, executions.Running, false},
		"it gets a lane": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			pgtest.Exec(t, tx, `
				insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked, execution_id)
				values ('thread:t', @owner, 1, '9000-01-01', true, @id)`, postgres.Strict{"owner": id + "#2", "id": id})
		}, executions.Running, true},
		"it has timed out": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			pgtest.Exec(t, tx,
				`select lanekeeper.resume_agent_executions(array[@id::uuid], array['{"timed_out": true}'::jsonb])`,
				postgres.Strict{"id": id})
		}, executions.Running, false},
		"it is cancelled": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			pgtest.Exec(t, tx, `update agent_executions set status = 'cancelled' where id = @id`, postgres.Strict{"id": id})
		}, executions.Cancelled, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			me, id := newWorker(t, pool), insertWaiting(t, pool, "k", "flow", 2)
			got := deliverDuring(t, pool, me, id, func(tx pgx.Tx) { c.change(t, tx, id, me) })
			x := getExecution(t, pool, id)
			assert.Truef(t, len(got) == 1 && (got[0].Claimed != nil) == c.claimed && (x.ClaimedBy != nil) == c.claimed &&
				x.Status == c.status, "response %+v, the execution is %s and claimed by %q",
				got, x.Status, postgres.Deref(x.ClaimedBy))
			consumed := pgtest.Value[bool](t, pool, `select consumed_by is not null from agent_events where key = 'k'`)
			mine := name != "it has timed out" && name != "it is cancelled"
			assert.Truef(t, consumed == mine && (got[0].ExecutionID != nil) == mine,
				"the event is consumed: %t, response %+v", consumed, got)
			assert.True(t, pgtest.Value[int](t, pool, `select count(*) from agent_locks where execution_id = @id and parked`,
				postgres.Strict{"id": id}) <= 0, "the lane did not stay with the execution")
		})
	}
}

// The source of an event is recorded for that event only, not for other events of the transaction.
func TestEventSourceIsRecordedPerEvent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 2 {
		insertWaiting(t, pool, "two", "flow", 2)
	}
	insertWaiting(t, pool, "one", "flow", 2)
	request := pgtest.Value[string](t, pool, `select lanekeeper.agent_uuid7()::text`)
	for name, event := range map[string][2]string{
		"no execution waits": {"EVENT_COMPLETED", "none"},
		"one waits":          {"EVENT_COMPLETED", "one"},
		"two wait":           {"EVENT_COMPLETED", "two"},
		"a test's kind":      {"AGENT_COMPLETED", request},
	} {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		var ids []string
		for i, raiser := range []string{"trace fl_a", ""} {
			ids = append(ids, pgtest.Value[string](t, tx, `
				with by as materialized (select set_config('lanekeeper.raised_by', @raiser, true) as raiser)
				select event_id::text from by cross
				  join lateral lanekeeper.deliver_agent_event(case when by.raiser is not null then @event end, @key,
				       '{"status": "completed", "result_type": "success"}', @id) limit 1`,
				postgres.Strict{"event": event[0], "key": event[1], "id": fmt.Sprint(name, i), "raiser": raiser}))
		}
		require.NoError(t, tx.Commit(t.Context()))
		for i, want := range []string{"trace fl_a", ""} {
			got := pgtest.Value[string](t, pool, `select coalesce(max(cause), '') from agent_links where kind = 'raised'
				and effect = 'event ' || @id`, postgres.Strict{"id": ids[i]})
			assert.Equal(t, want, got, name, i)
		}
	}
}

func (w *waiter) send(thread, text string) (queued bool) {
	w.t.Helper()
	return pgtest.Value[bool](w.t, w.pool, `select queued from lanekeeper.send_agent_message(@thread, @id, @claim, @text)`,
		postgres.Strict{"thread": thread, "id": w.id, "claim": w.claim, "text": text})
}

func receiveMessage(t *testing.T, db postgres.DB, thread, text string) {
	t.Helper()
	pgtest.Exec(t, db, `select lanekeeper.receive_agent_message(@thread, @text)`,
		postgres.Strict{"thread": thread, "text": text})
}

func outcomeData(out *executions.Outcome) string {
	if out == nil {
		return "nothing"
	}
	return string(out.Data)
}

// Only a message after the question answers it, also if it came before the wait began.
func TestOnlyLaterMessageAnswersQuestion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	w := newWaiter(t, pool)
	receiveMessage(t, pool, "t", "old")
	w.send("t", "how old are you?")
	if got := w.park("first", "response", "t"); got != nil {
		t.Fatalf("a message from before the question answered it: %s", outcomeData(got))
	}
	receiveMessage(t, pool, "t", "seven")
	if got := w.resume("first"); !strings.Contains(outcomeData(got), "seven") {
		t.Errorf("answered with %s", outcomeData(got))
	}
	w.send("t", "and your name?")
	receiveMessage(t, pool, "t", "Ana")
	receiveMessage(t, pool, "t", "or Eva")
	if got := w.park("second", "response", "t"); !strings.Contains(outcomeData(got), "Ana") {
		t.Errorf("answered with %s", outcomeData(got))
	}
	if got := w.park("third", "response", "t"); !strings.Contains(outcomeData(got), "Eva") { // it has no new question
		t.Errorf("answered with %s", outcomeData(got))
	}
}

// A message and a question come at nearly the same time. Their order in the thread decides, whatever their clocks say.
func TestThreadOrderDecidesAnswer(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	w := newWaiter(t, pool)
	w.send("t", "question")
	receiveMessage(t, pool, "t", "answer")
	pgtest.Exec(t, pool, `update agent_events set created_at = created_at - interval '1 second' where key = 't'`)
	if got := w.park("first", "response", "t"); !strings.Contains(outcomeData(got), "answer") {
		t.Errorf("answered with %s", outcomeData(got))
	}
	receiveMessage(t, pool, "t", "early")
	pgtest.Exec(t, pool, `update agent_events set created_at = created_at + interval '1 minute' where key = 't'`)
	w.send("t", "question again")
	if got := w.park("second", "response", "t"); got != nil {
		t.Errorf("answered with %s", outcomeData(got))
	}
}

// No message answers a question in the queue, and its timeout does not run.
func TestResponseTimeoutStartsAtSend(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	first, second := newWaiter(t, pool), newWaiter(t, pool)
	require.True(t, !first.send("t", "one"), "the first message was queued")
	require.True(t, second.send("t", "two") && second.park("wait", "response", "t") == nil,
		"the second message was not queued, or was answered")
	first.park("wait", "response", "t")
	receiveMessage(t, pool, "t", "answer to one")
	if got := first.resume("wait"); !strings.Contains(outcomeData(got), "answer to one") ||
		second.status() != executions.Waiting {
		t.Fatalf("the first got %s, the second is %s", outcomeData(got), second.status())
	}
	days := func() int {
		return pgtest.Value[int](t, pool, `select round(extract(epoch from waiting_until - clock_timestamp()) / 86400)::int
			from agent_executions where id = @id`,
			postgres.Strict{"id": second.id})
	}
	assert.Equal(t, 30, days())
	pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
		postgres.Strict{"id": first.id, "claim": first.claim})
	pgtest.Exec(t, pool, `select lanekeeper.flush_agent_thread('t')`)
	assert.Equal(t, 1, days())
	receiveMessage(t, pool, "t", "answer to two")
	if got := second.resume("wait"); !strings.Contains(outcomeData(got), "answer to two") {
		t.Errorf("the second got %s", outcomeData(got))
	}
}
