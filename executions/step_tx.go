package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StepTx runs fn in one transaction with the fence and the checkpoint. So the database has the effect of fn exactly if
// it has the checkpoint of a result. If fn fails, StepTx rolls its transaction back and records the error in another
// one. After a broken connection, deadlock or serialization failure, StepTx calls fn again in a new transaction. After
// a cancelled statement, it retries at most twice, as [RetryTransient] does.
func StepTx[T any](
	ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), opts ...Option,
) (T, error) {
	var zero T
	s := stepSpec{name: name}
	for _, o := range opts {
		o(&s)
	}
	r, err := s.start(ctx)
	if err != nil {
		return zero, err
	}
	if done, v, err := recordedResult[T](ctx, r, s); done {
		return v, err
	}
	if err := passGate(ctx, s); err != nil {
		return zero, err
	}
	cancelled := 0
	limited := func(ctx context.Context, tx pgx.Tx) (T, error) {
		value, err := fn(ctx, tx)
		if postgres.IsCode(err, "57014") {
			if cancelled++; cancelled > maxCancelRetries {
				err = asStepError("", err)
			}
		}
		return value, err
	}
	backoff := newBackoff()
	for retry := false; ; retry = true {
		value, err := tryTx(ctx, r, s, retry, limited)
		switch {
		case err == nil:
			return value, nil
		case errors.Is(err, errRecorded):
			_, value, err := recordedResult[T](ctx, r, s)
			return value, err
		case postgres.IsCode(err, "LK001") && s.complete != nil && retry && r.completedEarlier(ctx, s.key):
			_, value, err := recordedResult[T](ctx, r, s)
			return value, err
		case postgres.IsCode(err, "LK001"):
			r.stop(ErrStale)
			r.recordRejected(ctx, activity.Entry{Skill: s.name, Step: s.key, Claim: r.exec.Claim},
				activity.Outcome{Output: value})
			return zero, ErrStale
		case ctx.Err() != nil && !r.endedExternally(ctx): // the flow ended ctx: record that as the result
			expired := asStepError(s.key, ctx.Err())
			detached, end := r.untilRunEnds(ctx)
			defer end()
			ctx, fn = detached, func(context.Context, pgx.Tx) (T, error) { return zero, expired }
			continue
		case ctx.Err() != nil && r.writeLost(ctx, s, err, activity.Outcome{}):
			return zero, r.handleWriteError(ctx, s, ErrStale, activity.Outcome{Output: value})
		case ctx.Err() != nil:
			return zero, context.Cause(ctx)
		case !transient(err):
			return recordResult(ctx, r, s, nil, zero, asStepError(s.key, err))
		}
		r.e.warnUnavailable(ctx, err, "step", s.key)
		if !backoff.Wait(ctx) {
			return zero, context.Cause(ctx)
		}
	}
}

// errRecorded rolls back a retry that finds a checkpoint of its step, because an earlier transaction was committed.
var errRecorded = errors.New("step recorded already")

var errTxEnded = asStepError("", errors.New("the step ended its transaction, which StepTx commits or rolls back; "+
	"what it committed stays"))

// tryTx runs one transaction of a StepTx.
func tryTx[T any](
	ctx context.Context, r *run, s stepSpec, retry bool, fn func(ctx context.Context, tx pgx.Tx) (T, error),
) (value T, err error) {
	ctx, release, err := r.e.acquireTxSlot(ctx)
	if err != nil {
		return value, err
	}
	defer release()
	var variables json.RawMessage
	var completed *completionResult
	err = postgres.InTx(ctx, r.e.pool, func(tx pgx.Tx) error {
		if err := r.beginStep(ctx, tx, s, retry); err != nil {
			return err
		}
		var altered bool
		var output []byte
		if value, err = callTx(forbidWaits(stepScope(ctx, s), "the transaction of step "+s.key), tx, fn); err != nil {
			return err
		}
		if tx.Conn().PgConn().IsBusy() { // further statements would fail with an error that looks transient
			return asStepError("", errors.New("the transaction is still being read from: close the rows of its queries"))
		}
		if tx.Conn().PgConn().TxStatus() == 'I' { // by the text of a statement
			return errTxEnded
		}
		if output, altered, err = encodeResult(value); err != nil {
			return fmt.Errorf("encode the result of step %s: %w", s.key, err)
		}
		b := &pgx.Batch{}
		variables = r.pendingVariables()
		r.queueCheckpoint(b, s, output, false)
		r.queueVariablesUnlessLocked(b, &variables)
		if s.complete != nil {
			if completed, err = r.queueResult(b, s.complete(value)); err != nil {
				return err
			}
		}
		switch err := tx.SendBatch(ctx, b).Close(); {
		case errors.Is(err, pgx.ErrTxClosed):
			return errTxEnded
		case postgres.IsCode(err, "25P02"):
			return asStepError("", errors.New("a statement of the transaction failed, and the step did not return its error"))
		case err != nil:
			return err
		}
		if altered {
			value, err = decode[T](output)
		}
		return err
	})
	if err == nil && completed != nil {
		r.setCompleted(completed)
	}
	if err == nil {
		r.setStoredVariables(variables)
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", s.key)
	}
	return value, err
}

// beginStep fences the execution and locks the step with an advisory lock. So a retry waits for an earlier transaction
// that lost its connection but still runs. A retry also reads the checkpoints that earlier attempts committed.
func (r *run) beginStep(ctx context.Context, tx pgx.Tx, s stepSpec, retry bool) error {
	b := &pgx.Batch{}
	if s.complete != nil {
		r.queueCompletionLock(b)
	}
	b.Queue(`
		select set_config('lock_timeout', @lock_timeout, true), fence_agent_execution(@id, @claim),
		       set_config('lock_timeout', s.lock_timeout, true),
		       pg_advisory_xact_lock(hashtextextended('step ' || @id::text || @step, 0))
		  from (select current_setting('lock_timeout') as lock_timeout offset 0) s`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "step": s.key, "lock_timeout": lockTimeout})
	if err := tx.SendBatch(ctx, b).Close(); err != nil || !retry {
		return err
	}
	return r.reloadStep(ctx, tx, s.key)
}

type inTxKey struct{}

// acquireTxSlot waits until a transaction may begin. One connection of the pool remains free for writes within
// transactions, because transactions that each need one more connection would deadlock. A nested transaction does not
// wait.
func (e *Engine) acquireTxSlot(ctx context.Context) (within context.Context, release func(), err error) {
	if ctx.Value(inTxKey{}) != nil {
		return ctx, func() {}, nil
	}
	select {
	case e.txSlots <- struct{}{}:
		return context.WithValue(ctx, inTxKey{}, true), func() { <-e.txSlots }, nil
	case <-ctx.Done():
		return ctx, nil, context.Cause(ctx)
	}
}

// callTx calls the function of a StepTx. If the transaction did not cause the error, callTx converts the error to a
// StepError. So StepTx does not retry after a timeout of another server.
func callTx[T any](
	ctx context.Context, tx pgx.Tx, fn func(ctx context.Context, tx pgx.Tx) (T, error),
) (value T, err error) {
	value, err = recoverPanic(ctx, nil, func(ctx context.Context, _ *Effect) (T, error) { return fn(ctx, tx) })
	if err != nil && !tx.Conn().IsClosed() && (postgres.Code(err) == "" || !transient(err)) &&
		!postgres.IsCode(err, "LK001") {
		return value, asStepError("", err)
	}
	return value, err
}

// reloadStep reads the checkpoints of a step and its inner steps, so a retry does not repeat recorded inner steps. It
// returns errRecorded if the step itself has a checkpoint.
func (r *run) reloadStep(ctx context.Context, tx postgres.DB, step string) error {
	r.resetKeys(step)
	if err := r.flushDeferred(ctx); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `
		select step, claim, fingerprint, failed, output, created_at from agent_checkpoints
		 where execution_id = @id and (step = @step or starts_with(step, @step || '/'))`,
		postgres.Strict{"id": r.exec.ID, "step": step})
	if err != nil {
		return err
	}
	checkpoints, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Checkpoint])
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range checkpoints {
		r.checkpoints[c.Step] = c
	}
	if _, done := r.checkpoints[step]; done {
		return errRecorded
	}
	return nil
}

// EndTx is a [StepTx] whose transaction also completes the execution with result(value). So effect, checkpoint and
// completion are committed together or not at all. After a success the flow must return, and the engine ignores its
// return values.
func EndTx[T any](
	ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), result func(value T) Result,
) (T, error) {
	return StepTx(ctx, name, fn, func(s *stepSpec) {
		s.complete = func(value any) Result { return result(value.(T)) } //nolint:forcetypeassert // the step's own
	})
}

// queueCompletionLock locks the row as a completion does, before the fence takes a weaker lock. To acquire the stronger
// lock later could deadlock with a transaction that waits for the row.
func (r *run) queueCompletionLock(b *pgx.Batch) {
	queueLockTimeout(b)
	b.Queue(`select from agent_executions where id = @id and claim = @claim for update`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim})
	b.Queue(`set local lock_timeout to default`) // for the statements of fn
}

// queueResult queues the completion of the execution.
func (r *run) queueResult(b *pgx.Batch, result Result) (*completionResult, error) {
	value, _, err := encodeResult(result.Value)
	if err != nil {
		return nil, fmt.Errorf("encode result: %w", err)
	}
	done := &completionResult{}
	queueLockTimeout(b)
	queueCompletion(b, completion{
		id: r.exec.ID, claim: r.exec.Claim, status: Completed, summary: postgres.Text(result.Summary), result: value,
		claimed: r.claimedForCaller(),
	}, done)
	return done, nil
}

// setCompleted stores the completion that a transaction wrote. The transaction released the lanes, so the keeper drops
// their leases.
func (r *run) setCompleted(done *completionResult) {
	r.mu.Lock()
	r.completed = done
	r.mu.Unlock()
	r.e.keeper.Drop(r.laneOwner())
}

// completedEarlier reports whether an earlier transaction, whose response was lost, completed the execution. Then the
// checkpoint has the result of the step.
func (r *run) completedEarlier(ctx context.Context, step string) bool {
	row, err := Get(ctx, r.e.pool, r.exec.ID)
	if err != nil || row.Status != Completed || row.Claim != r.exec.Claim {
		return false
	}
	if !errors.Is(r.reloadStep(ctx, r.e.pool, step), errRecorded) {
		return false
	}
	r.setCompleted(&completionResult{row: &row})
	return true
}
