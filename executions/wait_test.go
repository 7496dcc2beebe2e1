package executions_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// awaits is a flow that waits for the event whose key is its input, and ends with the outcome.
func awaits(timeout time.Duration) map[string]executions.Func {
	return map[string]executions.Func{"flow": func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var key string
		if err := json.Unmarshal(input, &key); err != nil {
			return executions.Result{}, err
		}
		return ends(executions.Wait(ctx, "event", executions.Event(key, timeout)))
	}}
}

func (p *process) beginWith(t *testing.T, input any) string {
	t.Helper()
	x, _, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: "flow", Surface: trace.Flow, Input: input})
	if err != nil {
		t.Fatal(err)
	}
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
	if err := deliver(t.Context(), db, key, data, ""); err != nil {
		t.Fatal(err)
	}
}

func outcome(t *testing.T, x executions.Execution) executions.Outcome {
	t.Helper()
	var out executions.Outcome
	err := json.Unmarshal(x.Result, &out)
	if err != nil {
		t.Fatalf("result %s: %v", x.Result, err)
	}
	if out.Data, err = compact(out.Data); err != nil {
		t.Fatal(err)
	}
	return out
}

// compact undoes how jsonb writes.
func compact(data json.RawMessage) (json.RawMessage, error) {
	var b bytes.Buffer
	err := json.Compact(&b, data)
	return b.Bytes(), err
}

func TestAnEventEndsTheWaitThatCameBeforeOrAfterIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(0))
	mustDeliver(t, pool, "early", `{"n": 1}`)
	early := until(t, pool, p.beginWith(t, "early"), executions.Completed)
	if out := outcome(t, early); string(out.Data) != `{"n":1}` || out.Event != "EVENT_COMPLETED" || out.TimedOut || early.WaitNumber != 0 {
		t.Errorf("event before its wait: %+v, waits %d", out, early.WaitNumber)
	}
	id := p.beginWith(t, "late")
	until(t, pool, id, executions.Waiting)
	got, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "late", json.RawMessage(`{"n": 2}`), "once")
	if err != nil || len(got.Resumed) != 1 || got.Resumed[0] != id {
		t.Fatalf("delivered %+v, %v", got, err)
	}
	again, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "late", json.RawMessage(`{"n": 3}`), "once")
	if err != nil || len(again.Resumed) != 0 || again.EventID != got.EventID {
		t.Errorf("delivered again %+v, %v", again, err)
	}
	if out := outcome(t, until(t, pool, id, executions.Completed)); string(out.Data) != `{"n":2}` || out.EventID != got.EventID {
		t.Errorf("event after its wait: %+v", out)
	}
}

func TestNoWakeUpIsLostWhenEventAndWaitMeet(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const rounds = 100
	w := worker(t, pool)
	ids := make([]string, rounds)
	claims := make([]int64, rounds)
	for i := range ids {
		ids[i] = pending(t, pool)
		claims[i] = mustClaim(t, pool, ids[i], w)
	}
	for i, id := range ids {
		group, ctx := errgroup.WithContext(t.Context())
		group.Go(func() error {
			_, err := pool.Exec(ctx, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', @key, '1 hour', null)`,
				postgres.Strict{"id": id, "key": id, "claim": claims[i]})
			return err
		})
		group.Go(func() error { return deliver(ctx, pool, id, `{}`, "") })
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_executions where status = 'waiting'`); n != 0 {
		t.Errorf("%d of %d wait for ever", n, rounds)
	}
	if n := value[int](t, pool, `select count(*) from agent_events where consumed_by is null`); n != 0 {
		t.Errorf("%d events are left", n)
	}
	if n := value[int](t, pool, `select count(*) from agent_checkpoints where step = 'wait'`); n != rounds {
		t.Errorf("%d outcomes", n)
	}
}

func TestOneEventWakesAllWhoWaitAndAnOldOneOnlyOne(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(0))
	one, two := p.beginWith(t, "key"), p.beginWith(t, "key")
	until(t, pool, one, executions.Waiting)
	until(t, pool, two, executions.Waiting)
	mustDeliver(t, pool, "key", `{}`)
	until(t, pool, one, executions.Completed)
	until(t, pool, two, executions.Completed)

	mustDeliver(t, pool, "old", `{}`)
	first := p.beginWith(t, "old")
	until(t, pool, first, executions.Completed)
	second := p.beginWith(t, "old")
	until(t, pool, second, executions.Waiting)
	if by := value[string](t, pool, `select consumed_by::text from agent_events where key = 'old'`); by != first {
		t.Errorf("the old event was taken by %s, not %s", by, first)
	}
}

func TestAWaitTimesOut(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(30*time.Millisecond))
	if out := outcome(t, until(t, pool, p.beginWith(t, "key"), executions.Completed)); !out.TimedOut || out.EventID != "" {
		t.Errorf("outcome %+v", out)
	}
	mustDeliver(t, pool, "key", `{}`)
	if n := value[int](t, pool, `select count(*) from agent_events where key = 'key' and consumed_by is null`); n != 1 {
		t.Errorf("the event that came too late is not kept")
	}
}

func TestATimedOutFlowEndsWithStatusTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) {
		return executions.Result{}, fmt.Errorf("approval: %w", executions.ErrTimedOut)
	}))
	if got := until(t, pool, p.begin(t, "flow"), executions.Timeout); str(got.ResultType) != "timeout" {
		t.Errorf("result type %q", str(got.ResultType))
	}
}

func TestEventTimerAndCancelEndAWaitOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	kinds := map[string]int{}
	for i := range 60 {
		id := pending(t, pool)
		n := mustClaim(t, pool, id, w)
		exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', @key, '0', null)`,
			postgres.Strict{"id": id, "key": id, "claim": n})
		acts := []func(ctx context.Context) error{
			func(ctx context.Context) error { return deliver(ctx, pool, id, `{}`, "") },
			func(ctx context.Context) error { return sweepOnce(ctx, pool) },
			func(ctx context.Context) error { _, err := executions.Cancel(ctx, pool, id, "test", ""); return err },
		}
		group, ctx := errgroup.WithContext(t.Context())
		for j := range acts {
			group.Go(func() error { return acts[(i+j)%3](ctx) })
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		how := value[string](t, pool, `
			select coalesce((select case when (output->>'timed_out')::boolean then 'timer' else 'event' end
			                   from agent_checkpoints where execution_id = x.id), 'nothing')
			       || ', event ' || case when v.consumed_by is null then 'kept' else 'taken' end
			  from agent_executions x join agent_events v on v.key = x.id::text and v.event = 'EVENT_COMPLETED' where x.id = @id`,
			postgres.Strict{"id": id})
		kinds[how]++
		if got := get(t, pool, id); got.Status != executions.Cancelled || completions(t, pool, id) != 1 {
			t.Fatalf("status %s, %d AGENT_COMPLETED", got.Status, completions(t, pool, id))
		}
	}
	for how := range kinds {
		if how != "event, event taken" && how != "timer, event kept" && how != "nothing, event kept" {
			t.Errorf("outcomes do not fit together: %v", kinds)
		}
	}
}

func TestAnOutcomeWhoseAnswerWasLostIsGivenAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	n := mustClaim(t, pool, id, worker(t, pool))
	mustDeliver(t, pool, "key", `{"n": 1}`)
	park := func() string {
		return value[string](t, pool, `select coalesce(lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'key', '1 hour', null)::text, 'waits')`,
			postgres.Strict{"id": id, "claim": n})
	}
	if first, second := park(), park(); first != second || !strings.Contains(first, `"n": 1`) {
		t.Errorf("first %s, second %s", first, second)
	}
}

func TestAWaitingExecutionNeedsNoProcess(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(0))
	id := p.beginWith(t, "key")
	until(t, pool, id, executions.Waiting)
	p.stop()
	mustDeliver(t, pool, "key", `{"n": 1}`)
	if got := get(t, pool, id); got.Status != executions.Running || got.ClaimedBy != nil {
		t.Errorf("after the event: status %s, claimed by %s", got.Status, str(got.ClaimedBy))
	}
	start(t, pool, awaits(0))
	if out := outcome(t, until(t, pool, id, executions.Completed)); string(out.Data) != `{"n":1}` {
		t.Errorf("outcome %+v", out)
	}
}

func TestStepsAfterAParkFail(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var after atomic.Int32
	var told error
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Wait(ctx, "event", executions.Event("key", 0)); err != nil {
			_, told = executions.Step(ctx, "after", func(context.Context) (int, error) { after.Add(1); return 0, nil })
		}
		return executions.Result{Value: "ignored the park"}, nil
	}))
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	p.stop()
	if got := get(t, pool, id); got.Status != executions.Waiting || after.Load() != 0 || !errors.Is(told, executions.ErrParked) {
		t.Errorf("status %s, the step ran %d times and returned %v", got.Status, after.Load(), told)
	}
}

func TestWaitsCheckTheirArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, w := range map[string]executions.WaitFor{
		"no time": executions.Delay(0), "too long": executions.Delay(executions.MaxWait + 1), "no key": executions.Event("", 0),
	} {
		p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
			return ends(executions.Wait(ctx, "pause", w))
		}))
		got, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		if err != nil || got.Status != executions.Failed || !strings.Contains(str(got.ErrorMessage), "wait pause: ") {
			t.Errorf("%s: status %s, %q, %v", name, got.Status, str(got.ErrorMessage), err)
		}
	}
}

func TestEventsCheckTheirArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	for name, c := range map[string]struct{ event, key, data string }{
		"unknown event": {"PIZZA", "key", "{}"}, "no event": {"", "key", "{}"}, "no key": {"EVENT_COMPLETED", "", "{}"},
		"timer's event": {"SCHEDULE_REACHED", "key", "{}"}, "bad data": {"EVENT_COMPLETED", "key", "{"},
	} {
		if _, err := p.Deliver(t.Context(), pool, c.event, c.key, json.RawMessage(c.data), ""); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_events`); n != 0 {
		t.Errorf("%d events were written", n)
	}
}

func TestWaitingNeedsNoGoroutines(t *testing.T) { // not parallel: it counts them
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(0))
	until(t, pool, p.beginWith(t, "first"), executions.Waiting)
	before := runtime.NumGoroutine()
	for i := range 500 {
		p.beginWith(t, fmt.Sprint("key ", i))
	}
	waiting(t, pool, 501)
	pgtest.Eventually(t, patience, func() bool { return runtime.NumGoroutine() <= before+50 }, // the others are River's
		fmt.Sprintf("goroutines stay near %d with 500 waiting", before))
}

func waiting(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status = 'waiting'`) == n
	}, fmt.Sprintf("%d executions wait", n))
}

func TestAWaitNumberIsResumedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	n := mustClaim(t, pool, id, worker(t, pool))
	resume := func(number int) bool {
		return value[bool](t, pool, `select lanekeeper.resume_agent_execution(@id, @number, '{}')`, postgres.Strict{"id": id, "number": number})
	}
	if resume(0) {
		t.Error("a running execution was resumed")
	}
	exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'key', '1 hour', null)`, postgres.Strict{"id": id, "claim": n})
	if resume(2) || !resume(1) || resume(1) {
		t.Error("another number, or the same number twice, ended the wait")
	}
	if x := get(t, pool, id); x.Status != executions.Running || x.WaitNumber != 1 {
		t.Errorf("status %s, wait number %d", x.Status, x.WaitNumber)
	}
}
