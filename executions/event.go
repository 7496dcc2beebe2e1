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

// lockName names the key that another transaction may hold: the event's id, or the wait that it ends.
func (ev event) lockName() string {
	if ev.id == nil {
		return fmt.Sprintf("the wait for %s %.300q", ev.name, ev.key)
	}
	return fmt.Sprintf("event id %.300q", *ev.id)
}

// deliverLocal delivers an event in a process that runs executions. The same statement claims the resumed executions
// while this process has free workers and no queued execution comes first. So one round trip lies between an event and
// the waiting code. The statement queues all other resumed executions.
func (e *Engine) deliverLocal(ctx context.Context, ev event) (Delivered, error) {
	deliverOne := func(ctx context.Context) (Delivered, error) {
		result, err := e.deliverBatch(ctx, []event{ev})
		if err != nil {
			return Delivered{}, err
		}
		return result[0].Value, nil
	}
	single := func() (result Delivered, err error) {
		err = e.retryKey(ctx, ev.lockName(), func(ctx context.Context) (err error) {
			result, err = deliverOne(ctx)
			return err
		})
		return result, err
	}
	// A replay must not join a batch. An event with a source sets it for its own statement.
	var result Delivered
	err := e.serializeKey(ctx, ev.lockName(), func() (err error) {
		if postgres.IsSealed(ctx) || ev.source != "" {
			result, err = single()
		} else {
			result, err = e.batchers.events.Do(ctx, ev, single)
		}
		return err
	})
	return result, err
}

// slotTimeout bounds how long workers stay reserved for resumed executions. A lock blocks a slower statement, and other
// executions need the workers.
const slotTimeout = 100 * time.Millisecond

// slots are workers of each queue that are reserved for resumed executions.
type slots struct {
	e                       *Engine
	background, interactive int // number of reserved workers

	mu       sync.Mutex
	released bool
	unused   map[string]int
	timer    *time.Timer
}

func (e *Engine) reserveSlots(n int) *slots {
	s := &slots{e: e, background: e.pools[Background].reserve(n), interactive: e.pools[Interactive].reserve(n)}
	s.unused = map[string]int{Background: s.background, Interactive: s.interactive}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(slotTimeout, s.release)
	return s
}

func (s *slots) start(x claimedExecution, worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pool := s.e.pools[x.Queue]
	if s.released { // there may be one worker too many for a while
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

// deliverBatch delivers events in one transaction. In a batch of several, it leaves out events that would wait for a
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
	queued := map[string]int{} // executions that stay in each queue
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
	for queue, position := range queued {
		e.notifyReady(queue, position)
	}
	return results, nil
}

// queryEvents runs the statement: for one event, which waits for locks, or for several.
func (e *Engine) queryEvents(ctx context.Context, events []event, worker string, reserved *slots) (pgx.Rows, error) {
	skip := append(e.pools[Background].skippedFlows(), e.pools[Interactive].skippedFlows()...)
	if len(events) == 1 {
		ev := events[0]
		return e.pool.Query(ctx, `
		select `+deliveredColumns+`
		  from (select `+deliveredRow+`
			          from (select set_config('lock_timeout', @lock_timeout, true) as lock_timeout,
			            set_config('lanekeeper.raised_by', @raiser, true) offset 0) s
			         cross join lateral lanekeeper.deliver_agent_event(case when s.lock_timeout <> '' then @event end, @key, @data,
			           @id, @worker,
			                    array_remove(array[case when @background > 0 then 'background' end, case
			                      when @interactive > 0 then 'interactive' end], null),
			                    @skip) d) x`,
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
		          from lanekeeper.deliver_agent_events(@events, @keys, (@data::text[])::jsonb[], @ids, @worker, @background,
		            @interactive, @skip) d) x`,
		postgres.Strict{
			"events": names, "keys": keys, "data": data, "ids": ids, "worker": worker, "background": reserved.background,
			"interactive": reserved.interactive, "skip": skip,
		})
}

// deliveredColumns are the columns of a delivery, of rows x made of deliveredRow.
const (
	deliveredColumns = columns + `, ` + checkpointColumns + `, n, event_id::text, execution_id::text, woken_queue`
	deliveredRow     = `(d.execution).*, d.held, d.steps, d.claims, d.prints, d.failed, d.outputs, d.times, d.n, d.event_id, d.execution_id,
		d.queue as woken_queue`
)

// Delivered is the result of an event.
type Delivered struct {
	EventID string   `json:"event_id"`
	Resumed []string `json:"resumed"` // executions whose wait it ended
}

// Deliver records an event and ends every wait for it. If no execution waits for the event, the database keeps it for
// the first wait. id makes repeated deliveries count once. If db is a pool, Deliver uses the engine's own pool. In a
// process that runs executions, one statement delivers the event and claims the resumed executions while workers are
// free. Concurrent events share the commit. WithLockTimeout bounds the wait for an open transaction that holds the id
// or the wait. In a caller's transaction, the commit notifies workers.
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

// eventSource names the source of an event, for why(): the execution or trace of ctx; empty for external events.
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

// deliver runs the statement and returns the wake-ups of the resumed executions. The planner expects a thousand rows
// of the function; the limit prevents a full scan.
func deliver(ctx context.Context, db postgres.DB, args postgres.Strict) (result Delivered, wakeups []wakeup, err error) {
	rows, err := db.Query(ctx, `
		with by as materialized (select set_config('lanekeeper.raised_by', @raiser, true) as raiser)
		select d.event_id::text, d.execution_id::text, x.wake, x.queue, x.priority
		  from by cross join lateral lanekeeper.deliver_agent_event(@event, @key, @data, case when by.raiser is not null
		    then @id::text end) d
		  left join lateral (select n.wake, n.queue, n.priority from agent_executions n where n.id = d.execution_id limit 1) x
		    on true`, args)
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
