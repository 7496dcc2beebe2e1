package executions_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// eventFlow is a flow that waits for the event whose key is its input. Its result is the outcome of the wait.
func eventFlow() map[string]executions.Func {
	return map[string]executions.Func{"flow": func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var key string
		if err := json.Unmarshal(input, &key); err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Wait(ctx, "event", executions.Event(key, 0)))
	}}
}

func (p *testEngine) startWithInput(t *testing.T, input any) string {
	t.Helper()
	x, _, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: "flow", Surface: trace.Flow, Input: input})
	require.NoError(t, err)
	return x.ID
}

// deliver sends an event by plain SQL.
func deliver(ctx context.Context, db postgres.DB, key, data, id string) error {
	_, err := db.Exec(ctx, `select deliver_agent_event('EVENT_COMPLETED', @key, @data, nullif(@id, ''))`,
		postgres.Strict{"key": key, "data": data, "id": id})
	return err
}

func mustDeliver(t *testing.T, db postgres.DB, key, data string) {
	t.Helper()
	require.NoError(t, deliver(t.Context(), db, key, data, ""))
}

// compact removes the spaces that jsonb writes.
func compact(data json.RawMessage) (json.RawMessage, error) {
	var b bytes.Buffer
	err := json.Compact(&b, data)
	return b.Bytes(), err
}

func TestConcurrentEventAndWaitLoseNoWakeup(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const rounds = 100
	w := newWorker(t, pool)
	ids := make([]string, rounds)
	claims := make([]int64, rounds)
	for i := range ids {
		ids[i] = insertPending(t, pool)
		claims[i] = mustClaim(t, pool, ids[i], w)
	}
	for i, id := range ids {
		group, ctx := errgroup.WithContext(t.Context())
		group.Go(func() error {
			_, err := pool.Exec(ctx,
				`select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', @key, '1 hour', null)`,
				postgres.Strict{"id": id, "key": id, "claim": claims[i]})
			return err
		})
		group.Go(func() error { return deliver(ctx, pool, id, `{}`, "") })
		require.NoError(t, group.Wait())
	}
	assert.Equal(t, 0,
		pgtest.Value[int](t, pool, `select count(*) from agent_executions where status = 'waiting'`), rounds)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_events where consumed_by is null`))
	assert.Equal(t, rounds, pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints where step = 'wait'`))
}

func TestEventResumesAllWaitersKeptEventOne(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow())
	one, two := p.startWithInput(t, "key"), p.startWithInput(t, "key")
	enginetest.Await(t, pool, one, executions.Waiting)
	enginetest.Await(t, pool, two, executions.Waiting)
	mustDeliver(t, pool, "key", `{}`)
	enginetest.Await(t, pool, one, executions.Completed)
	enginetest.Await(t, pool, two, executions.Completed)

	mustDeliver(t, pool, "old", `{}`)
	first := p.startWithInput(t, "old")
	enginetest.Await(t, pool, first, executions.Completed)
	second := p.startWithInput(t, "old")
	enginetest.Await(t, pool, second, executions.Waiting)
	assert.Equal(t, first, pgtest.Value[string](t, pool, `select consumed_by::text from agent_events where key = 'old'`))
}

func TestEventTimerAndCancelEndWaitOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	kinds := map[string]int{}
	for i := range 60 {
		id := insertPending(t, pool)
		n := mustClaim(t, pool, id, w)
		pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', @key, '0', null)`,
			postgres.Strict{"id": id, "key": id, "claim": n})
		acts := []func(ctx context.Context) error{
			func(ctx context.Context) error { return deliver(ctx, pool, id, `{}`, "") },
			func(ctx context.Context) error { return sweepOnce(ctx, pool) },
			func(ctx context.Context) error { _, err := cancelElsewhere(ctx, pool, id, "test", ""); return err },
		}
		group, ctx := errgroup.WithContext(t.Context())
		for j := range acts {
			group.Go(func() error { return acts[(i+j)%3](ctx) })
		}
		require.NoError(t, group.Wait())
		how := pgtest.Value[string](t, pool, `
			select coalesce((select case when (output->>'timed_out')::boolean then 'timer' else 'event' end
			                   from agent_checkpoints where execution_id = x.id), 'nothing')
			       || ', event ' || case when v.consumed_by is null then 'kept' else 'taken' end
			  from agent_executions x join agent_events v on v.key = x.id::text and v.event = 'EVENT_COMPLETED'
			 where x.id = @id`,
			postgres.Strict{"id": id})
		kinds[how]++
		if got := getExecution(t, pool, id); got.Status != executions.Cancelled || countCompletions(t, pool, id) != 1 {
			t.Fatalf("status %s, %d AGENT_COMPLETED", got.Status, countCompletions(t, pool, id))
		}
	}
	for how := range kinds {
		assert.Truef(t, how == "event, event taken" || how == "timer, event kept" || how == "nothing, event kept",
			"outcomes do not fit together: %v", kinds)
	}
}

func TestRepeatedWaitReturnsSameOutcome(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	n := mustClaim(t, pool, id, newWorker(t, pool))
	mustDeliver(t, pool, "key", `{"n": 1}`)
	park := func() string {
		return pgtest.Value[string](t, pool, `select coalesce(lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event',
			'key', '1 hour', null)::text, 'waits')`,
			postgres.Strict{"id": id, "claim": n})
	}
	if first, second := park(), park(); first != second || !strings.Contains(first, `"n": 1`) {
		t.Errorf("first %s, second %s", first, second)
	}
}

func TestStepAfterWaitFails(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var after atomic.Int32
	var cause error
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Wait(ctx, "event", executions.Event("key", 0)); err != nil {
			_, cause = executions.Step(ctx, "after", func(context.Context) (int, error) { after.Add(1); return 0, nil })
		}
		return executions.Result{Value: "ignored the park"}, nil
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	p.stop()
	got := getExecution(t, pool, id)
	assert.Truef(t, got.Status == executions.Waiting && after.Load() == 0 && errors.Is(cause, executions.ErrParked),
		"status %s, the step ran %d times and returned %v", got.Status, after.Load(), cause)
}

func TestWaitRejectsInvalidArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, w := range map[string]executions.WaitFor{
		"no time": executions.Delay(0), "too long": executions.Delay(executions.MaxWait + 1),
		"no key": executions.Event("", 0),
	} {
		p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
			return resultOf(executions.Wait(ctx, "pause", w))
		}))
		got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		assert.Truef(t, err == nil && got.Status == executions.Failed &&
			strings.Contains(postgres.Deref(got.ErrorMessage), "wait pause: "), "%s: status %s, %q, %v", name, got.Status,
			postgres.Deref(got.ErrorMessage), err)
	}
}

func TestDeliverRejectsInvalidArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	for name, c := range map[string]struct{ event, key, data string }{
		"unknown event": {"PIZZA", "key", "{}"}, "no event": {"", "key", "{}"}, "no key": {"EVENT_COMPLETED", "", "{}"},
		"timer's event": {"SCHEDULE_REACHED", "key", "{}"}, "bad data": {"EVENT_COMPLETED", "key", "{"},
	} {
		_, err := p.Deliver(t.Context(), pool, c.event, c.key, json.RawMessage(c.data), "")
		assert.Error(t, err, name, "was taken")
	}
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_events`))
}

// A wait of an earlier version may have a longer key.
func TestKeysOfWaitsAndEventsHaveOneLimit(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow())
	key := strings.Repeat("k", 2400)
	refused := p.startWithInput(t, key+"k")
	const status = `select status::text from agent_executions where id = $1::uuid`
	pgtest.Until(t, pool, "failed", status, refused)
	x, err := executions.Get(t.Context(), pool, refused)
	require.NoError(t, err)
	assert.Contains(t, postgres.Deref(x.ErrorMessage), "wait event: ", "the key of a wait has at most 2400 bytes")
	const limit = "has at most 2400 bytes"
	assert.ErrorContains(t, deliver(t.Context(), pool, key+"k", "{}", ""), limit)
	_, err = p.Deliver(t.Context(), pool, "EVENT_COMPLETED", key+"k", nil, "")
	assert.ErrorContains(t, err, limit)
	id := p.startWithInput(t, key)
	pgtest.Until(t, pool, "waiting", status, id)
	pgtest.Exec(t, pool, `update agent_executions set waiting_key = waiting_key || 'k' where id = $1::uuid`, id)
	mustDeliver(t, pool, key+"k", "{}")
	pgtest.Until(t, pool, "completed", status, id)
}

func TestBatchSkipsWaitWithLongKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		var skipped []int
		err := pool.QueryRow(ctx, `
			select array(select lanekeeper.wait_agent_executions(
			  array[@id]::uuid[], array[@claim]::bigint[], '{wait}', '{event}', array[repeat('k', 2401)], '{60}', '{null}', '{null}'))`,
			postgres.Strict{"id": x.ID, "claim": x.Claim}).Scan(&skipped)
		return resultOf(skipped, err)
	}))
	got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	require.NoError(t, err)
	assert.Equal(t, "[1]", string(got.Result), "skipped waits")
}

func TestWaitingNeedsNoGoroutines(t *testing.T) { // not parallel: it counts them
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow())
	enginetest.Await(t, pool, p.startWithInput(t, "first"), executions.Waiting)
	before := runtime.NumGoroutine()
	for i := range 500 {
		p.startWithInput(t, fmt.Sprint("key ", i))
	}
	pgtest.Until(t, pool, 501, `select count(*) from agent_executions where status = 'waiting'`)
	pgtest.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+50 }, // the others are River's
		fmt.Sprintf("goroutines stay near %d with 500 waiting", before))
}

// resumeSQL ends the wait of an execution, like the sweep.
const resumeSQL = `
	select count(*) = 1 from (
	  select x.id, case when x.waiting_for = 'agent' then lanekeeper.agent_uuid(x.waiting_key) end as child
	    from agent_executions x
	   where x.id = $1::uuid and x.status = 'waiting' for no key update) e,
	  lanekeeper.resume_agent_executions(array[e.id], array['{}'::jsonb], '{}', null, e.child) r`

func TestWaitNumberIsResumedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	n := mustClaim(t, pool, id, newWorker(t, pool))
	resume := func(number int) bool {
		return pgtest.Value[bool](t, pool, `
			select count(*) = 1
			  from (select x.id from agent_executions x
			         where x.id = @id and x.status = 'waiting' and x.wait_number = @number
			           for no key update) e
			 cross join lateral lanekeeper.resume_agent_executions(array[e.id], array['{}'::jsonb]) r`,
			postgres.Strict{"id": id, "number": number})
	}
	assert.True(t, !resume(0), "a running execution was resumed")
	pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'key', '1 hour', null)`,
		postgres.Strict{"id": id, "claim": n})
	assert.True(t, !resume(2) && resume(1) && !resume(1), "another number, or the same number twice, ended the wait")
	if x := getExecution(t, pool, id); x.Status != executions.Running || x.WaitNumber != 1 {
		t.Errorf("status %s, wait number %d", x.Status, x.WaitNumber)
	}
}

// waiter is an execution that the test runs by plain SQL.
type waiter struct {
	t      *testing.T
	pool   *pgxpool.Pool
	id     string
	worker string
	claim  int64
}

func newWaiter(t *testing.T, pool *pgxpool.Pool) *waiter {
	t.Helper()
	w := &waiter{t: t, pool: pool, id: insertPending(t, pool), worker: newWorker(t, pool)}
	w.claim = mustClaim(t, pool, w.id, w.worker)
	return w
}

// park waits for something. It returns the outcome if there is one already, else nil.
func (w *waiter) park(step, kind, key string) *executions.Outcome {
	w.t.Helper()
	text := pgtest.Value[*string](w.t, w.pool, `select lanekeeper.wait_agent_execution(@id, @claim, @step, @kind, @key,
		null, null)::text`,
		postgres.Strict{"id": w.id, "claim": w.claim, "step": step, "kind": kind, "key": key})
	return w.outcome(text)
}

func (w *waiter) outcome(text *string) *executions.Outcome {
	w.t.Helper()
	if text == nil {
		return nil
	}
	var out executions.Outcome
	require.NoError(w.t, json.Unmarshal([]byte(*text), &out))
	var err error
	out.Data, err = compact(out.Data)
	require.NoError(w.t, err)
	return &out
}

// resume claims the execution again and returns the outcome of its wait.
func (w *waiter) resume(step string) *executions.Outcome {
	w.t.Helper()
	x := getExecution(w.t, w.pool, w.id)
	require.Truef(w.t, x.Status == executions.Running, "the execution is %s in wait %s", x.Status, step)
	w.claim = mustClaim(w.t, w.pool, w.id, w.worker)
	return w.outcome(pgtest.Value[*string](w.t, w.pool, `select output::text from agent_checkpoints
		where execution_id = @id and step = @step`,
		postgres.Strict{"id": w.id, "step": step}))
}

func (w *waiter) status() executions.Status { return getExecution(w.t, w.pool, w.id).Status }

// expireTimer makes the timer due and sweeps.
func (w *waiter) expireTimer() {
	w.t.Helper()
	pgtest.Exec(w.t, w.pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second'
		where id = @id`,
		postgres.Strict{"id": w.id})
	sweep(w.t, w.pool)
}

// request creates a request of the execution.
func (w *waiter) request(kind string, items ...string) string {
	w.t.Helper()
	if items == nil {
		items = []string{}
	}
	return pgtest.Value[string](w.t, w.pool, `
		insert into agent_requests (kind, execution_id, trace_id, items) values (@kind, @id, 'fl_x', @items)
		  returning id::text`,
		postgres.Strict{"kind": kind, "id": w.id, "items": items})
}

func deliverEvent(t *testing.T, db postgres.DB, event, key, data, id string) {
	t.Helper()
	pgtest.Exec(t, db, `select lanekeeper.deliver_agent_event(@event, @key, @data, nullif(@id, ''))`,
		postgres.Strict{"event": event, "key": key, "data": data, "id": id})
}

var eventByKind = map[string]string{
	"response": "MESSAGE_RECEIVED", "document": "DOCUMENT_UPLOADED", "signature": "SIGNATURE_COMPLETED",
	"test":  "TEST_COMPLETED",
	"event": "EVENT_COMPLETED", "approval": "APPROVAL_DECIDED", "agent": "AGENT_COMPLETED",
}

// For every kind of wait: an event before the wait, after it, twice or after the timeout gives one outcome.
func TestEveryKindOfWaitHasOneOutcome(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for kind, event := range eventByKind {
		for _, asked := range []bool{false, true} {
			if asked && kind != "document" && kind != "signature" && kind != "test" {
				continue
			}
			t.Run(fmt.Sprint(kind, " asked ", asked), func(t *testing.T) {
				w := newWaiter(t, pool)
				key := func(n string) string {
					switch {
					case asked && kind == "document":
						return w.request(kind, "cv")
					case asked:
						return w.request(kind)
					}
					return kind + n
				}
				late, twice, early := key("late"), key("twice"), key("early")
				require.True(t, w.park("1", kind, late) == nil, "an outcome of nothing")
				w.expireTimer()
				out := w.resume("1")
				assert.Truef(t, out.TimedOut, "timed out with %+v", out)
				deliverEvent(t, pool, event, late, `{"document": "cv", "url": "late"}`, "")
				assert.Equal(t, executions.Running, w.status())
				require.True(t, w.park("2", kind, twice) == nil, "an event of another wait ended this one")
				deliverEvent(t, pool, event, twice, `{"document": "cv", "url": "one"}`, kind+fmt.Sprint(asked))
				deliverEvent(t, pool, event, twice, `{"document": "cv", "url": "two"}`, kind+fmt.Sprint(asked))
				out = w.resume("2")
				assert.Truef(t, !out.TimedOut && out.Event == event && out.EventID != "" &&
					strings.Contains(string(out.Data), "one"), "outcome %+v", out)
				deliverEvent(t, pool, event, early, `{"document": "cv", "url": "one"}`, "")
				// with another id: a second event; a request ignores it
				deliverEvent(t, pool, event, early, `{"document": "cv", "url": "two"}`, "")
				first := w.park("3", kind, early)
				require.Truef(t, first != nil && !first.TimedOut && strings.Contains(string(first.Data), "one"),
					"an early event ended the wait with %+v", first)
				pgtest.Equal(t, pool, map[bool]int{false: 1, true: 0}[asked], `select count(*) from agent_events where key = @key and consumed_by is null`, postgres.Strict{"key": early})
				pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": w.id})
			})
		}
	}
}

func TestDocumentWaitEndsWithLastDocument(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, events := range map[string][]string{
		"one by one": {
			`{"document": "b", "url": "ub"}`, `{"document": "pet", "url": "up"}`,
			`{"document": "a", "url": "ua"}`,
		},
		"at once": {`{"documents": [{"document": "b", "url": "ub"}, {"name": "a", "url": "ua"}]}`},
		"one replaced": {
			`{"document": "b", "url": "old"}`, `{"document": "b", "url": "ub"}`,
			`{"document": "a", "url": "ua"}`,
		},
	} {
		w := newWaiter(t, pool)
		id := w.request("document", "a", "b")
		require.True(t, w.park("docs", "document", id) == nil, "nothing came yet")
		for i, data := range events {
			assert.Equal(t, executions.Waiting, w.status(), name, i)
			deliverEvent(t, pool, "DOCUMENT_UPLOADED", id, data, "")
		}
		out := w.resume("docs")
		var data struct{ DocumentURLs []string }
		err := json.Unmarshal(out.Data, &data)
		assert.Truef(t, err == nil && fmt.Sprint(data.DocumentURLs) == "[ua ub]", "%s: %s, %v", name, out.Data, err)
		if again := w.park("again", "document", id); again == nil || string(again.Data) != string(out.Data) {
			t.Errorf("%s: a second wait for the same event ended with %+v", name, again)
		}
	}
	pets := pgtest.Value[int](t, pool, `select count(*) from agent_requests where unexpected ? 'pet'
		and status = 'completed'`)
	n := pgtest.Value[int](t, pool, `select count(*) from agent_events where consumed_by is null`)
	assert.Truef(t, n == 0 && pets == 1, "%d events remain, %d unrequested documents are recorded", n, pets)
}

// An upload and the end of the execution run at once. Both lock the execution before the request.
func TestEventAndCancelDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 40 {
		w := newWaiter(t, pool)
		id := w.request("signature")
		w.park("sign", "signature", id)
		group, ctx := errgroup.WithContext(t.Context())
		group.Go(func() error {
			_, err := pool.Exec(ctx, `select deliver_agent_event('SIGNATURE_COMPLETED', @id, '{}')`, postgres.Strict{"id": id})
			return err
		})
		group.Go(func() error { _, err := cancelElsewhere(ctx, pool, w.id, "test", ""); return err })
		require.NoError(t, group.Wait())
	}
}

func TestCompletionClosesRequests(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w, other := newWaiter(t, pool), newWaiter(t, pool)
	id := w.request("test")
	require.True(t, other.park("other", "test", id) == nil, "nothing came yet")
	pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": w.id})
	assert.Equal(t, "closed", pgtest.Value[string](t, pool, `select status from agent_requests where id = @id`,
		postgres.Strict{"id": id}))
	deliverEvent(t, pool, "TEST_COMPLETED", id, `{"score": 1}`, "")
	out := other.resume("other")
	assert.Truef(t, string(out.Data) == `{"score":1}`, "the waiter for another execution's request got %+v", out)
}

// A wait without a timeout uses the default of its kind. A timeout above the limit is rejected, from Go and SQL.
func TestWaitTimeoutsByKind(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `select try_acquire_agent_lock('held', 'somebody')`) // so the wait for it does not end at once
	for _, kind := range []string{
		"response", "agent", "document", "signature", "test", "event",
		"approval", "delay", "lane",
	} {
		standard, longest := executions.Limits(kind)
		if standard > 0 {
			w := newWaiter(t, pool)
			pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'held', null, null)`,
				postgres.Strict{"id": w.id, "claim": w.claim, "kind": kind})
			got := pgtest.Value[float64](t, pool, `select extract(epoch from waiting_until - updated_at)::float8
				from agent_executions where id = @id`,
				postgres.Strict{"id": w.id})
			assert.Truef(t, math.Abs(got-standard.Seconds()) <= 1,
				"%s: the standard is %s here, %v s in the database", kind, standard, got)
		}
		w := newWaiter(t, pool)
		for timeout, fits := range map[time.Duration]bool{longest + time.Second: false, -time.Second: false, longest: true} {
			if !fits {
				_, err := pool.Exec(t.Context(), `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'k',
					make_interval(secs => @s), null)`,
					postgres.Strict{"id": w.id, "claim": w.claim, "kind": kind, "s": timeout.Seconds()})
				assert.Truef(t, postgres.IsCode(err, "22023"), "%s: %s was accepted: %v", kind, timeout, err)
			}
		}
		pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'k', make_interval(secs => @s),
			null)`,
			postgres.Strict{"id": w.id, "claim": w.claim, "kind": kind, "s": longest.Seconds()})
	}
}
