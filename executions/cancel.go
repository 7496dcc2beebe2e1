package executions

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// cancelTimeout is how long a cancel waits for a step that has its execution locked to stop.
const cancelTimeout = time.Second

// Cancel ends an execution now, whatever it does, and returns the status it has then: cancelled, or the
// terminal status it had already. The claim is void at once, so nothing more is recorded; the process
// that runs it is told and stops its step.
//
// A step in a transaction (StepTx) has the execution locked. It is told first, and the cancel waits for it for up to
// a second. One that has not stopped by then delays nobody: the status is that of an execution that has not ended,
// the cancel is requested, and it is completed when that transaction ends. See CancelDetail for what is in the way.
func (e *Engine) Cancel(ctx context.Context, id, by, reason string) (Status, error) {
	notify := func() { e.stopIfCancelled(context.WithoutCancel(ctx), id) }
	return cancel(ctx, e.pool, id, by, reason, notify, func() (Status, error) {
		var status *string
		var ends []endedExecution
		b := &pgx.Batch{}
		b.Queue(cancelSQL, postgres.Strict{"id": id, "by": by, "reason": reason}).QueryRow(func(row pgx.Row) error { return row.Scan(&status) })
		queueEnded(b, &ends)
		err := e.pool.SendBatch(ctx, b).Close() // which sets status
		now, err := cancelResult(id, status, err)
		if err == nil && now.Ended() {
			e.deliverCompletion(ctx, id)
			e.logEnded(ctx, ends)
		}
		return now, err
	})
}

// Cancel is Engine.Cancel for a process that runs no engine.
func Cancel(ctx context.Context, db postgres.DB, id, by, reason string) (Status, error) {
	return cancel(ctx, db, id, by, reason, func() {}, func() (Status, error) {
		var status *string
		err := db.QueryRow(ctx, cancelSQL, postgres.Strict{"id": id, "by": by, "reason": reason}).Scan(&status)
		return cancelResult(id, status, err)
	})
}

// CancelTx is Cancel in a transaction of the caller's. It tries once: of an execution that another transaction has
// locked the cancel is requested when the caller's transaction commits.
func CancelTx(ctx context.Context, tx pgx.Tx, id, by, reason string) (Status, error) {
	var status *string
	err := tx.QueryRow(ctx, cancelSQL, postgres.Strict{"id": id, "by": by, "reason": reason}).Scan(&status)
	return cancelResult(id, status, err)
}

const cancelSQL = `select lanekeeper.cancel_agent_execution(@id, @by, @reason)`

// cancel requests a cancel where the execution is locked, tells who runs it, and tries until it has ended, for a while.
func cancel(ctx context.Context, db postgres.DB, id, by, reason string, notify func(), attempt func() (Status, error)) (Status, error) {
	var requested bool
	err := db.QueryRow(ctx, `select lanekeeper.request_agent_cancel(@id, @by, @reason)`,
		postgres.Strict{"id": id, "by": by, "reason": reason}).Scan(&requested)
	if err != nil && !postgres.IsCode(err, "55P03") {
		_, err = cancelResult(id, nil, err)
		return "", err
	}
	until := time.Now().Add(cancelTimeout)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if requested {
			notify()
		}
		status, err := attempt()
		if postgres.IsCode(err, "55P03") { // something else that follows from the end is locked
			if _, err = db.Exec(ctx, `select lanekeeper.request_agent_cancel(@id, @by, @reason, true)`, postgres.Strict{"id": id, "by": by, "reason": reason}); err == nil {
				requested = true
				status, err = statusOf(ctx, db, id)
			}
		}
		if err == nil {
			notify()
		}
		if err != nil || status.Ended() || time.Now().After(until) || !sleep(ctx, pause) {
			return status, err
		}
	}
}

// statusOf is the status of an execution.
func statusOf(ctx context.Context, db postgres.DB, id string) (Status, error) {
	x, err := Get(ctx, db, id)
	return x.Status, err
}

// CancelDetail says why a cancel is not completed yet: which transactions of other sessions work on executions and
// have been open for longest.
func CancelDetail(ctx context.Context, db postgres.DB) (string, error) {
	open, err := postgres.OpenTransactions(ctx, db, "agent_executions")
	if err != nil {
		return "", fmt.Errorf("look who has executions locked: %w", err)
	}
	detail := "another transaction has the execution locked, and it is cancelled when that ends"
	if open != "" {
		detail += "; it may be " + open
	}
	return detail, nil
}

// cancelResult is what a cancel has come to.
func cancelResult(id string, status *string, err error) (Status, error) {
	switch {
	case postgres.IsCode(err, "22P02") || (err == nil && status == nil):
		return "", fmt.Errorf("cancel execution %s: %w", id, ErrNotFound)
	case err != nil:
		return "", fmt.Errorf("cancel execution %s: %w", id, err)
	}
	return Status(*status), nil
}

// stopIfCancelled stops a run of this process whose execution was cancelled, or is to be.
func (e *Engine) stopIfCancelled(ctx context.Context, id string) {
	e.mu.Lock()
	r := e.runs[id]
	e.mu.Unlock()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	var cancelled bool
	err := e.pool.QueryRow(ctx, `
		select exists (select from agent_executions x where x.id = @id and x.status = 'cancelled')
		    or exists (select from agent_cancel_requests c where c.execution_id = @id)`, postgres.Strict{"id": id}).Scan(&cancelled)
	if err == nil && cancelled {
		r.stop(ErrCancelled)
	}
}

// completeCancel cancels an execution whose run was stopped, where that is requested: its transaction has just been
// rolled back, and the server may not be done with that. The sweep does it where this cannot.
func (e *Engine) completeCancel(ctx context.Context, id string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer stop()
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if done, err := e.tryCompleteCancel(ctx, id); done || err != nil && ctx.Err() != nil || !sleep(ctx, pause) {
			return
		}
	}
}

// tryCompleteCancel is one try. It reports that there is nothing left to do.
func (e *Engine) tryCompleteCancel(ctx context.Context, id string) (done bool, err error) {
	var ends []endedExecution
	b := &pgx.Batch{}
	b.Queue(`
		select case when c.execution_id is null then true
		            when not lanekeeper.request_agent_cancel(@id, null, '')
		              then lanekeeper.cancel_agent_execution(@id, c.cancelled_by, c.cancel_reason) is distinct from ''
		            else false end
		  from (values (true)) one left join agent_cancel_requests c on c.execution_id = @id`,
		postgres.Strict{"id": id}).QueryRow(func(row pgx.Row) error { return row.Scan(&done) })
	queueEnded(b, &ends)
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
		return false, fmt.Errorf("complete cancel of execution %s: %w", id, err)
	}
	if len(ends) > 0 {
		e.deliverCompletion(ctx, id)
		e.logEnded(ctx, ends)
	}
	return done, nil
}

// completeCancels completes all that are requested and can be. Each is a transaction: one that cannot delays no other,
// and no sweep.
func (e *Engine) completeCancels(ctx context.Context) error {
	rows, err := e.pool.Query(ctx, `select c.execution_id::text from agent_cancel_requests c order by c.requested_at limit 1000`)
	if err != nil {
		return fmt.Errorf("list requested cancels: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("list requested cancels: %w", err)
	}
	for _, id := range ids {
		switch _, err := e.tryCompleteCancel(ctx, id); {
		case ctx.Err() != nil, postgres.Broken(err), err != nil && postgres.Code(err) == "":
			return err
		case err != nil && !postgres.IsCode(err, "55P03"):
			e.log.WarnContext(ctx, "requested cancel not completed yet", "execution", id, "error", err)
		}
	}
	return nil
}
