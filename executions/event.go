package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// event is an event to deliver.
type event struct {
	name, key string
	data      json.RawMessage
	id        *string
	source    string // see eventSource
}

// lockName describes the key that another transaction may hold: the id of the event, or the wait that the event ends.
func (ev event) lockName() string {
	if ev.id == nil {
		return fmt.Sprintf("the wait for %s %.300q", ev.name, ev.key)
	}
	return fmt.Sprintf("event id %.300q", *ev.id)
}

// deliverLocal delivers an event in a process that runs executions. The same statement claims the resumed executions if
// this process has free workers and no queued execution comes first, so the flow continues after one round trip. All
// other resumed executions are queued.
func (e *Engine) deliverLocal(ctx context.Context, ev event) (result Delivered, err error) {
	single := func() (Delivered, error) { return e.deliverSingle(ctx, ev) }
	err = e.serializeKey(ctx, ev.lockName(), func() (err error) {
		// A replay must not join a batch. The source of an event is a setting of its own statement.
		if postgres.IsSealed(ctx) || ev.source != "" {
			result, err = single()
		} else {
			result, err = e.batchers.events.Do(ctx, ev, single)
		}
		return err
	})
	return result, err
}

// deliverSingle delivers one event in a statement of its own, and retries while another transaction blocks it.
func (e *Engine) deliverSingle(ctx context.Context, ev event) (result Delivered, err error) {
	err = e.retryKey(ctx, ev.lockName(), func(ctx context.Context) error {
		results, err := e.deliverBatch(ctx, []event{ev})
		if err == nil {
			result = results[0].Value
		}
		return err
	})
	return result, err
}

// slotTimeout bounds how long workers stay reserved for resumed executions. A statement that takes longer waits for a
// lock, and other executions need the workers meanwhile.
const slotTimeout = 100 * time.Millisecond

// slots are workers that are reserved for executions which a statement claims.
type slots struct {
	e                       *Engine
	background, interactive int // number of reserved workers

	mu       sync.Mutex
	released bool
	unused   map[string]int
	timer    *time.Timer
}

// reserveSlots reserves up to n free workers of each queue, for at most slotTimeout.
func (e *Engine) reserveSlots(n int) *slots {
	s := &slots{e: e, background: e.pools[Background].reserve(n), interactive: e.pools[Interactive].reserve(n)}
	s.unused = map[string]int{Background: s.background, Interactive: s.interactive}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(slotTimeout, s.release)
	return s
}

// start runs a claimed execution in one of the slots.
func (s *slots) start(x claimedExecution, worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pool := s.e.pools[x.Queue]
	if s.released { // the pool may exceed its size for a while
		pool.startUnreserved(pool.runContext(), x, worker)
		return
	}
	s.unused[x.Queue]--
	pool.startReserved(pool.runContext(), x, worker)
}

// release frees the unused slots.
func (s *slots) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer.Stop()
	if s.released {
		return
	}
	s.released = true
	for queue, n := range s.unused {
		s.e.pools[queue].release(n)
	}
}

// deliverBatch delivers events in one transaction. In a batch of several events, it skips those that would wait for a
// lock.
func (e *Engine) deliverBatch(ctx context.Context, events []event) ([]batch.Result[Delivered], error) {
	if len(events) > 1 {
		bounded, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
		defer cancel()
		ctx = bounded
	}
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return nil, err
	}
	reserved := e.reserveSlots(len(events))
	defer reserved.release()
	rows, err := e.queryEvents(ctx, events, worker, reserved)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	results := batch.AllSkipped[Delivered](len(events))
	var claimed []claimedExecution
	queued := map[string]int{} // number of resumed but unclaimed executions by queue
	for rows.Next() {
		var position int
		var eventID, executionID, queue *string
		x, ok, err := scanClaimed(rows, []any{&position, &eventID, &executionID, &queue})
		if err != nil {
			return nil, err
		}
		if eventID != nil {
			results[position-1].Skipped = false
			results[position-1].Value.EventID = *eventID
		}
		if executionID != nil {
			results[position-1].Value.Resumed = append(results[position-1].Value.Resumed, *executionID)
		}
		switch {
		case ok:
			claimed = append(claimed, x)
		case queue != nil:
			queued[*queue]++
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for _, x := range claimed {
		reserved.start(x, worker)
	}
	for queue, n := range queued {
		e.notifyReady(queue, n)
	}
	return results, nil
}

// queryEvents runs the statement that delivers events. For a single event, the statement waits for locks.
func (e *Engine) queryEvents(ctx context.Context, events []event, worker string, reserved *slots) (pgx.Rows, error) {
	skip := append(e.pools[Background].skippedFlows(), e.pools[Interactive].skippedFlows()...)
	if len(events) == 1 {
		ev := events[0]
		return e.pool.Query(ctx, `
			select `+deliveredColumns+`
			  from (select `+deliveredRow+`
			          from (select set_config('lock_timeout', @lock_timeout, true) as lock_timeout,
			                       set_config('lanekeeper.raised_by', @raiser, true) offset 0) s
			         cross join lateral lanekeeper.deliver_agent_event(
			               case when s.lock_timeout <> '' then @event end, @key, @data, @id, @worker,
			               array_remove(array[case when @background > 0 then 'background' end,
			                                  case when @interactive > 0 then 'interactive' end], null), @skip) d) x`,
			postgres.Strict{
				"event": ev.name, "key": ev.key, "data": ev.data, "id": ev.id, "raiser": ev.source, "worker": worker,
				"background": reserved.background, "interactive": reserved.interactive, "skip": skip, "lock_timeout": lockTimeout,
			})
	}
	n := len(events)
	names, keys, data, ids := make([]string, n), make([]string, n), make([]*string, n), make([]*string, n)
	for i, ev := range events {
		names[i], keys[i], data[i], ids[i] = ev.name, ev.key, nullableJSON(ev.data), ev.id
	}
	return e.pool.Query(ctx, `
		select `+deliveredColumns+`
		  from (select `+deliveredRow+`
		          from lanekeeper.deliver_agent_events(@events, @keys, (@data::text[])::jsonb[], @ids, @worker,
		                                               @background, @interactive, @skip) d) x`,
		postgres.Strict{
			"events": names, "keys": keys, "data": data, "ids": ids, "worker": worker, "background": reserved.background,
			"interactive": reserved.interactive, "skip": skip,
		})
}

// deliveredRow expands a row d of the SQL functions that deliver events. deliveredColumns selects from such rows.
const (
	deliveredColumns = columns + `, ` + checkpointColumns + `, n, event_id::text, execution_id::text, woken_queue`
	deliveredRow     = `(d.execution).*, d.held, d.steps, d.claims, d.prints, d.failed, d.outputs, d.times, d.n,
		d.event_id, d.execution_id, d.queue as woken_queue`
)

// Delivered is the result of an event.
type Delivered struct {
	EventID string   `json:"event_id"`
	Resumed []string `json:"resumed"` // executions whose wait it ended
}

// Deliver records an event and ends every wait for it. If no execution waits for the event, the database keeps it for
// the first wait. Several deliveries with the same id count once.
//
// If db is a pool, Deliver uses the engine's own pool. In a process that runs executions, one statement delivers the
// event and claims the resumed executions while workers are free, and concurrent events share a commit. WithLockTimeout
// bounds the wait for an open transaction that holds the id or the wait. In a caller's transaction, the commit notifies
// workers.
func (e *Engine) Deliver(
	ctx context.Context, db postgres.Beginner, name, key string, data json.RawMessage, id string,
) (Delivered, error) {
	if len(data) == 0 {
		data = json.RawMessage("{}")
	}
	ev := event{name, key, data, null(id), eventSource(ctx)}
	var result Delivered
	var err error
	inTx := func(tx pgx.Tx) (err error) {
		result, err = e.deliverTx(ctx, tx, ev)
		return err
	}
	switch {
	case !isPool(db):
		err = postgres.InTx(ctx, db, inTx)
	case e.dispatching():
		result, err = e.deliverLocal(ctx, ev)
	default:
		err = e.withKey(ctx, ev.lockName(), func(ctx context.Context) error { return postgres.InTxWithin(ctx, e.pool, inTx) })
	}
	if isPool(db) {
		err = postgres.ExplainLock(ctx, e.pool, err, ev.lockName(), "agent_events", "agent_executions")
	}
	if err != nil {
		return Delivered{}, fmt.Errorf("deliver event %s: %w", name, err)
	}
	e.log.InfoContext(ctx, "event emitted", "event", name, "key", key, "resumed", len(result.Resumed))
	return result, nil
}

// deliverTx delivers an event in a transaction.
func (e *Engine) deliverTx(ctx context.Context, tx pgx.Tx, ev event) (Delivered, error) {
	result, wakeups, err := deliver(ctx, tx, postgres.Strict{
		"event": ev.name, "key": ev.key, "data": ev.data,
		"id": ev.id, "raiser": ev.source,
	})
	if err != nil {
		return Delivered{}, err
	}
	return result, e.insertWakeups(ctx, tx, wakeups)
}

// eventSource returns the source of an event for why(): the execution or trace of ctx. It is empty for external events.
func eventSource(ctx context.Context) string {
	span, inTrace := trace.From(ctx)
	switch {
	case !inTrace:
		return ""
	case span.ExecutionID != "":
		return "execution " + span.ExecutionID
	}
	return "trace " + string(span.TraceID)
}

// deliver delivers an event and returns the wake-ups of the resumed executions. The planner expects a thousand rows of
// the SQL function, so the query has a limit that prevents a full scan.
func deliver(
	ctx context.Context, db postgres.DB, args postgres.Strict,
) (result Delivered, wakeups []wakeup, err error) {
	rows, err := db.Query(ctx, `
		with source as materialized (select set_config('lanekeeper.raised_by', @raiser, true) as raiser)
		select d.event_id::text, d.execution_id::text, x.wake, x.queue, x.priority
		  from source s
		 cross join lateral lanekeeper.deliver_agent_event(
		       @event, @key, @data, case when s.raiser is not null then @id::text end) d
		  left join lateral (select e.wake, e.queue, e.priority from agent_executions e
		                      where e.id = d.execution_id limit 1) x on true`, args)
	if err != nil {
		return Delivered{}, nil, err
	}
	var executionID, queue *string
	var wake, priority *int
	_, err = pgx.ForEachRow(rows, []any{&result.EventID, &executionID, &wake, &queue, &priority}, func() error {
		if executionID != nil {
			result.Resumed = append(result.Resumed, *executionID)
			wakeups = append(wakeups, wakeup{*executionID, *wake, *queue, *priority})
		}
		return nil
	})
	if err != nil {
		return Delivered{}, nil, err
	}
	return result, wakeups, nil
}
