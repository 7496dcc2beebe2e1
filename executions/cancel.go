package executions

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// cancelTimeout bounds how long a cancel waits for a step that has its execution locked.
const cancelTimeout = time.Second

// Cancel ends an execution and returns its status: cancelled, or its earlier terminal status. It voids the claim, so
// the run records nothing more. Cancel notifies the process that runs the execution, and that process stops the current
// step.
//
// A step in a transaction (StepTx) locks the execution. Cancel notifies the step first and waits about a second. If the
// step still runs then, the cancel remains requested until the step's transaction ends, and the returned status is not
// terminal. CancelDetail names the open transactions.
func (e *Engine) Cancel(ctx context.Context, id, by, reason string) (Status, error) {
	notify := func() { e.stopIfCancelled(context.WithoutCancel(ctx), id) }
	var requested bool
	b := &pgx.Batch{}
	activity.QueueActor(ctx, b)
	b.Queue(`select lanekeeper.request_agent_cancel(@id, @by, @reason)`,
		postgres.Strict{"id": id, "by": by, "reason": reasonText(reason)}).QueryRow(
		func(row pgx.Row) error { return row.Scan(&requested) })
	err := e.pool.SendBatch(ctx, b).Close()
	if err != nil && !postgres.IsCode(err, "55P03") {
		_, err = cancelResult(id, nil, err)
		return "", err
	}
	deadline := time.Now().Add(cancelTimeout)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if requested {
			notify()
		}
		status, err := e.tryCancel(ctx, id, by, reason)
		if postgres.IsCode(err, "55P03") { // another transaction locks a row that the end changes
			b := &pgx.Batch{}
			activity.QueueActor(ctx, b)
			b.Queue(`select lanekeeper.request_agent_cancel(@id, @by, @reason, true)`,
				postgres.Strict{"id": id, "by": by, "reason": reasonText(reason)})
			err = e.pool.SendBatch(ctx, b).Close()
			switch {
			case err == nil:
				requested = true
				status, err = statusOf(ctx, e.pool, id)
			case postgres.IsCode(err, "55P03") && time.Now().Before(deadline) && sleep.For(ctx, pause):
				continue // another transaction completes an earlier request
			default:
				_, err = cancelResult(id, nil, err)
			}
		}
		if err == nil {
			notify()
		}
		if err != nil || status.Ended() || time.Now().After(deadline) || !sleep.For(ctx, pause) {
			return status, err
		}
	}
}

// tryCancel makes one attempt to cancel, and logs the end.
func (e *Engine) tryCancel(ctx context.Context, id, by, reason string) (Status, error) {
	status, ended, err := cancelOnce(ctx, e.pool, id, by, reason)
	if err == nil && status.Ended() {
		e.deliverCompletion(ctx, id)
		e.LogEnded(ctx, ended)
	}
	return status, err
}

// CancelTx cancels in the caller's transaction, in one attempt. If another transaction locks the execution, CancelTx
// only requests the cancel. ended are the executions that tx has ended so far: pass them to LogEnded after the commit.
func CancelTx(ctx context.Context, tx pgx.Tx, id, by, reason string) (_ Status, ended []Ended, err error) {
	return cancelOnce(ctx, tx, id, by, reason)
}

// cancelOnce cancels in one transaction: that of db, or its own.
func cancelOnce(ctx context.Context, db postgres.DB, id, by, reason string) (_ Status, ended []Ended, err error) {
	var status *string
	b := &pgx.Batch{}
	queueCancel(ctx, b, id, by, reason, &status)
	queueEnded(b, &ended)
	current, err := cancelResult(id, status, db.SendBatch(ctx, b).Close())
	return current, ended, err
}

// queueCancel queues a cancel by the actor of ctx. The batch sets status to the result.
func queueCancel(ctx context.Context, b *pgx.Batch, id, by, reason string, status **string) {
	activity.QueueActor(ctx, b)
	b.Queue(`select cancel_agent_execution(@id, @by, @reason)`,
		postgres.Strict{"id": id, "by": by, "reason": reasonText(reason)}).QueryRow(
		func(row pgx.Row) error { return row.Scan(status) })
}

// reasonText returns a reason that the database accepts: its first 1000 characters, without control characters except
// line feeds and tabs.
func reasonText(reason string) string {
	runes := []rune(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, postgres.Text(reason)))
	return string(runes[:min(len(runes), 1000)])
}

// statusOf reads the status of an execution.
func statusOf(ctx context.Context, db postgres.DB, id string) (Status, error) {
	x, err := Get(ctx, db, id)
	return x.Status, err
}

// CancelDetail explains an incomplete cancel: it names the longest open transactions on executions.
func CancelDetail(ctx context.Context, db postgres.DB) (string, error) {
	open, err := postgres.OpenTransactions(ctx, db, "agent_executions")
	if err != nil {
		return "", fmt.Errorf("list transactions that lock executions: %w", err)
	}
	detail := "another transaction has the execution locked; the cancel completes when that ends"
	if open != "" {
		detail += "; it may be " + open
	}
	return detail, nil
}

// cancelResult maps the result of a cancel query to a status or an error.
func cancelResult(id string, status *string, err error) (Status, error) {
	switch {
	case postgres.IsCode(err, "22P02", "22021") || (err == nil && status == nil):
		return "", fmt.Errorf("cancel execution %s: %w", id, ErrNotFound)
	case err != nil:
		return "", fmt.Errorf("cancel execution %s: %w", id, err)
	}
	return Status(*status), nil
}

// stopIfCancelled stops a run of this process whose execution is cancelled, or whose cancel is requested.
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
		    or exists (select from agent_cancel_requests c where c.execution_id = @id)`,
		postgres.Strict{"id": id}).Scan(&cancelled)
	if err == nil && cancelled {
		r.stop(ErrCancelled)
	}
}

// completeCancel completes a requested cancel after the run stopped. It retries, because the server may still hold the
// locks of the run's transaction, which was just rolled back. The sweep completes cancels that remain.
func (e *Engine) completeCancel(ctx context.Context, id string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer stop()
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if done, err := e.tryCompleteCancel(ctx, id); done || err != nil && ctx.Err() != nil || !sleep.For(ctx, pause) {
			return
		}
	}
}

// tryCompleteCancel makes one attempt to complete a cancel. done is false when another attempt is needed.
func (e *Engine) tryCompleteCancel(ctx context.Context, id string) (done bool, err error) {
	var ended []Ended
	b := &pgx.Batch{}
	b.Queue(`
		select case when c.execution_id is null then true
		            when not lanekeeper.request_agent_cancel(@id, null, '')
		              then cancel_agent_execution(@id, c.cancelled_by, c.cancel_reason) is distinct from ''
		            else false end
		  from (values (true)) one left join agent_cancel_requests c on c.execution_id = @id`,
		postgres.Strict{"id": id}).QueryRow(func(row pgx.Row) error { return row.Scan(&done) })
	queueEnded(b, &ended)
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
		return false, fmt.Errorf("complete cancel of execution %s: %w", id, err)
	}
	if len(ended) > 0 {
		e.deliverCompletion(ctx, id)
		e.LogEnded(ctx, ended)
	}
	return done, nil
}

// completeCancels completes the oldest 1,000 requested cancels, except blocked ones. Each cancel has its own
// transaction, so a blocked cancel does not prevent the others.
func (e *Engine) completeCancels(ctx context.Context) error {
	rows, err := e.pool.Query(ctx, `
		select c.execution_id::text from agent_cancel_requests c order by c.requested_at limit 1000`)
	ids, err := postgres.Collect(rows, err, "list requested cancels", pgx.RowTo[string])
	if err != nil {
		return err
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
