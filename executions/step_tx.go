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

// StepTx runs fn in a transaction that also holds the fence and the checkpoint: the effect is in the
// database exactly when the step is recorded. fn may be called again, in a new transaction, when the
// connection breaks or the transaction had to give way.
func StepTx[T any](ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), opts ...Option) (T, error) {
	var zero T
	s := spec{name: name}
	for _, o := range opts {
		o(&s)
	}
	r, err := s.begin(ctx)
	if err != nil {
		return zero, err
	}
	if done, v, err := recorded[T](ctx, r, s); done {
		return v, err
	}
	if err := passGate(ctx, s); err != nil {
		return zero, err
	}
	backoff := newBackoff()
	for again := false; ; again = true {
		value, err := tryTx(ctx, r, s, again, fn)
		switch {
		case err == nil:
			return value, nil
		case errors.Is(err, errRecorded):
			_, value, err := recorded[T](ctx, r, s)
			return value, err
		case postgres.IsCode(err, "LK001") && s.end != nil && again && r.endedBefore(ctx, s.key):
			_, value, err := recorded[T](ctx, r, s)
			return value, err
		case postgres.IsCode(err, "LK001"):
			r.stop(ErrStale)
			r.reject(ctx, activity.Entry{Skill: s.name, Step: s.key, Claim: r.exec.Claim}, activity.Outcome{Output: value})
			return zero, ErrStale
		case ctx.Err() != nil && !r.interrupts(ctx): // the code's own limit: what it has come to shows when the server has done with it
			over := asStepError(s.key, ctx.Err())
			longer, end := r.lasting(ctx)
			defer end()
			ctx, fn = longer, func(context.Context, pgx.Tx) (T, error) { return zero, over }
			continue
		case ctx.Err() != nil && r.unheard(ctx, s, err, activity.Outcome{}):
			return zero, r.written(ctx, s, ErrStale, activity.Outcome{Output: value})
		case ctx.Err() != nil:
			return zero, context.Cause(ctx)
		case !passing(err): // of the transaction; what the function was told is its own
			return keep(ctx, r, s, nil, zero, asStepError(s.key, err))
		}
		r.e.warnUnavailable(ctx, err, "step", s.key)
		if !backoff.Wait(ctx) {
			return zero, context.Cause(ctx)
		}
	}
}

// errRecorded ends a transaction that finds its step done: an earlier one's commit had arrived after all.
var errRecorded = errors.New("step recorded already")

// tryTx is one transaction of a StepTx. The lock makes a second try wait for a first whose connection
// broke while the server still works on it.
func tryTx[T any](ctx context.Context, r *run, s spec, again bool, fn func(ctx context.Context, tx pgx.Tx) (T, error)) (value T, err error) {
	ctx, leave, err := r.e.enterTx(ctx)
	if err != nil {
		return value, err
	}
	defer leave()
	var text json.RawMessage
	var done *finished
	err = postgres.InTx(ctx, r.e.pool, func(tx pgx.Tx) error {
		first := &pgx.Batch{}
		if s.end != nil {
			r.queueLockForEnd(first)
		}
		first.Queue(`
			select set_config('lock_timeout', @patience, true), lanekeeper.fence_agent_execution(@id, @claim), set_config('lock_timeout', o.was, true),
			       pg_advisory_xact_lock(hashtextextended('step ' || @id::text || @step, 0))
			  from (select current_setting('lock_timeout') as was offset 0) o`,
			postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "step": s.key, "patience": lockPatience})
		if err := tx.SendBatch(ctx, first).Close(); err != nil {
			return err
		}
		if again {
			if err := r.reread(ctx, tx, s.key); err != nil {
				return err
			}
		}
		var mended bool
		var out []byte
		if value, err = callTx(withoutWaits(inside(ctx, s), "the transaction of step "+s.key), tx, fn); err != nil {
			return err
		}
		if tx.Conn().PgConn().IsBusy() { // whatever is sent now is refused, and looks as if it could be tried again
			return asStepError("", errors.New("the transaction is still being read from: close the rows of its queries"))
		}
		if out, mended, err = encode(value); err != nil {
			return fmt.Errorf("encode result: %w", err)
		}
		b := &pgx.Batch{}
		text = r.unwritten()
		r.queueCheckpoint(b, s, out, false)
		r.queueVariablesUnlessLocked(b, &text)
		if s.end != nil {
			if done, err = r.queueCompletion(b, s.end(value)); err != nil {
				return err
			}
		}
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		if mended {
			value, err = decode[T](out)
		}
		return err
	})
	if err == nil && done != nil {
		r.completed(done)
	}
	if err == nil {
		r.haveShown(text)
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", s.key)
	}
	return value, err
}

type inTxKey struct{}

// enterTx waits until a transaction may begin. They leave one connection of the pool to what is recorded within them:
// were all taken by transactions of which each waits for one more, none of them would ever end. One within another
// does not wait for those around it.
func (e *Engine) enterTx(ctx context.Context) (within context.Context, leave func(), err error) {
	if ctx.Value(inTxKey{}) != nil {
		return ctx, func() {}, nil
	}
	select {
	case e.transactions <- struct{}{}:
		return context.WithValue(ctx, inTxKey{}, true), func() { <-e.transactions }, nil
	case <-ctx.Done():
		return ctx, nil, context.Cause(ctx)
	}
}

// callTx calls the function of a StepTx. What it returns is its own error unless the database is in
// trouble: a timeout of something else that it asked must not look like one of the transaction.
func callTx[T any](ctx context.Context, tx pgx.Tx, fn func(ctx context.Context, tx pgx.Tx) (T, error)) (value T, err error) {
	value, err = protect(ctx, nil, func(ctx context.Context, _ *Effect) (T, error) { return fn(ctx, tx) })
	if err != nil && !tx.Conn().IsClosed() && (postgres.Code(err) == "" || !postgres.Transient(err)) && !postgres.IsCode(err, "LK001") {
		return value, asStepError("", err)
	}
	return value, err
}

// reread looks whether a step has been recorded meanwhile; errRecorded then. Steps within it that the try before has
// recorded are not made again.
func (r *run) reread(ctx context.Context, tx postgres.DB, step string) error {
	r.forget(step)
	if err := r.flushDeferred(ctx); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `
		select step, claim, fingerprint, failed, output, created_at from agent_checkpoints
		 where execution_id = @id and (step = @step or starts_with(step, @step || '/'))`, postgres.Strict{"id": r.exec.ID, "step": step})
	if err != nil {
		return err
	}
	points, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Checkpoint])
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, point := range points {
		r.checkpoints[point.Step] = point
	}
	if _, done := r.checkpoints[step]; done {
		return errRecorded
	}
	return nil
}

// EndTx is a [StepTx] whose transaction also ends the execution, as completed with the result of the value: the
// effect, its record and the end are in the database together or not at all. The flow returns after it; what it
// returns then is not looked at.
func EndTx[T any](
	ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), result func(value T) Result,
) (T, error) {
	return StepTx(ctx, name, fn, func(s *spec) {
		s.end = func(value any) Result { return result(value.(T)) } //nolint:forcetypeassert // the step's own
	})
}

// queueLockForEnd locks the row as an end does, before the fence locks it more weakly: whoever waits for it in
// between would deadlock with a lock that grows.
func (r *run) queueLockForEnd(b *pgx.Batch) {
	queuePatience(b)
	b.Queue(`select from agent_executions where id = @id and claim = @claim for update`, postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim})
	b.Queue(`set local lock_timeout to default`) // for the step's own statements
}

// queueCompletion queues the end of the run with a result.
func (r *run) queueCompletion(b *pgx.Batch, result Result) (*finished, error) {
	value, _, err := encode(result.Value)
	if err != nil {
		return nil, fmt.Errorf("encode result: %w", err)
	}
	done := &finished{}
	queuePatience(b)
	queueEnd(b, lastWrite{
		id: r.exec.ID, claim: r.exec.Claim, status: Completed, summary: postgres.Text(result.Summary), result: value, row: r.wantedRow(),
	}, done)
	return done, nil
}

// completed notes that a transaction has ended the run. Its lanes are the database's from here on.
func (r *run) completed(done *finished) {
	r.mu.Lock()
	r.done = done
	r.mu.Unlock()
	r.e.keeper.Drop(r.claimOwner())
}

// endedBefore reports whether an earlier try of the transaction has ended the run after all, though its answer was
// lost. Then the record is the step's result.
func (r *run) endedBefore(ctx context.Context, step string) bool {
	row, err := Get(ctx, r.e.pool, r.exec.ID)
	if err != nil || row.Status != Completed || row.Claim != r.exec.Claim {
		return false
	}
	if !errors.Is(r.reread(ctx, r.e.pool, step), errRecorded) {
		return false
	}
	r.completed(&finished{row: &row})
	return true
}
