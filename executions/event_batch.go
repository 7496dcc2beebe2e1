package executions

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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
