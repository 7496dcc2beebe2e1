package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
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
