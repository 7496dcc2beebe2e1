package executions

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// errOtherInput is the ErrChanged of a step that has a record for another input.
var errOtherInput = fmt.Errorf("its input differs between runs (time, randomness, settings), or %w", ErrChanged)

// recordedResult returns the recorded result of a step if the step has a checkpoint. Otherwise it checks whether a
// shutdown, a pause or the end of ctx prevents the step. done is false if the step is to run.
func recordedResult[T any](ctx context.Context, r *run, s stepSpec) (done bool, value T, err error) {
	if r.replay != nil {
		if err := r.replay.reach(ctx, r, s); err != nil {
			return true, value, err
		}
	}
	r.mu.Lock()
	checkpoint, ok := r.checkpoints[s.key]
	r.mu.Unlock()
	if !ok {
		if s.entry == nil || r.replay != nil { // for other steps, openActivity writes the deferred checkpoint
			if err := r.flushDeferred(ctx); err != nil {
				return true, value, err
			}
		}
		if r.e.stopping() {
			r.stop(ErrDraining)
			return true, value, ErrDraining
		}
		if ctx.Err() != nil {
			value, err := recordExpired[T](ctx, r, s)
			return true, value, err
		}
		if err := r.checkPaused(ctx); err != nil {
			r.stop(err)
			return true, value, err
		}
		return false, value, nil
	}
	if checkpoint.Fingerprint != s.fingerprint && checkpoint.Fingerprint != "" && s.fingerprint != "" {
		return true, value, Changed(ctx, s.key)
	}
	if checkpoint.Failed {
		failure := &StepError{Step: s.key}
		if err := json.Unmarshal(checkpoint.Output, failure); err != nil {
			return true, value, fmt.Errorf("decode error of step %s: %w", s.key, err)
		}
		r.setFailedStep(s.key)
		return true, value, failure
	}
	if err := json.Unmarshal(checkpoint.Output, &value); err != nil {
		if _, wait := any(value).(Outcome); wait {
			err = fmt.Errorf("step %s has a record, but not of a wait: %w", s.key, ErrChanged)
			return true, value, r.failChanged(s.key, err)
		}
		return true, value, r.failChanged(s.key, fmt.Errorf("step %s: its record does not fit %s (%w): %w", s.key,
			reflect.TypeFor[T](), err, ErrChanged))
	}
	r.setFailedStep("")
	return true, value, nil
}

// recordExpired records the error of a step that cannot start because the flow ended its context. If the run was
// stopped, recordExpired records nothing, because a later run may start the step in time.
func recordExpired[T any](ctx context.Context, r *run, s stepSpec) (T, error) {
	var zero T
	if r.endedExternally(ctx) {
		return zero, context.Cause(ctx)
	}
	return recordResult(context.WithoutCancel(ctx), r, s, nil, zero, asStepError(s.key, ctx.Err()))
}

// Changed fails the execution because a step's checkpoint belongs to another input, and returns the error. Use it for a
// step that depends on more than its [Input].
func Changed(ctx context.Context, step string) error {
	err := fmt.Errorf("step %s has a record for another input: %w", step, errOtherInput)
	if r, _ := runFrom(ctx); r != nil {
		return r.failChanged(step, err)
	}
	return err
}

// failChanged stops a run because a checkpoint contradicts its code. The execution fails even if the flow ignores err.
func (r *run) failChanged(step string, err error) error {
	r.setFailedStep(step)
	r.stop(err)
	return err
}

// openActivity records the intent of a step that has an activity row.
func (r *run) openActivity(ctx context.Context, s stepSpec, effect *Effect) error {
	if s.entry == nil {
		return nil
	}
	s.entry.ExecutionID, s.entry.Claim, s.entry.Step = r.exec.ID, r.exec.Claim, s.key
	if s.entry.Kind != activity.KindPhase {
		s.entry.IdempotencyKey = effect.Key
	}
	r.e.log.InfoContext(ctx, "action started", "action", s.entry.Skill, "step", s.key)
	detached, end := r.untilRunEnds(ctx)
	defer end()
	recordErr, err := r.writeWithDeferred(detached, func(b *pgx.Batch) {
		activity.OpenIn(ctx, b, *s.entry, &effect.ActivityID)
		if s.onIntent != nil {
			s.onIntent(b, s.key)
		}
	})
	if recordErr != nil {
		return recordErr
	}
	return r.handleWriteError(ctx, s, err, activity.Outcome{Status: activity.Running})
}

// untilRunEnds returns a context that ends with the run, without the timeouts and cancels of the flow. A write that
// those interrupt would have an unknown outcome.
func (r *run) untilRunEnds(ctx context.Context) (context.Context, func()) {
	if ctx.Done() == r.ctx.Done() {
		return ctx, func() {}
	}
	detached, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(r.ctx, func() { cancel(context.Cause(r.ctx)) })
	return detached, func() { stop(); cancel(nil) }
}

// recordResult records the result of a step and returns the recorded value or error, as every later run does. A value
// that the database cannot store becomes an error.
func recordResult[T any](
	ctx context.Context, r *run, s stepSpec, effect *Effect, value T, failure *StepError,
) (T, error) {
	var zero T
	var stored any = value
	if failure != nil {
		stored = failure
	}
	output, altered, err := encodeResult(stored)
	if err != nil {
		failure = unstorableResult(s, err)
		if output, altered, err = encode(failure); err != nil {
			return zero, fmt.Errorf("step %s: encode its error: %w", s.key, err)
		}
	}
	if r.canDefer(s, effect, output) {
		err = r.deferCheckpoint(ctx, &deferredCheckpoint{
			step: s, effect: effect, value: value, output: output, failure: failure,
		})
	} else {
		err = r.flushAndRecord(ctx, s, effect, value, output, failure)
	}
	switch {
	case failure == nil && unstorable(err): // such as a number that is too large for jsonb
		return recordResult(ctx, r, s, effect, zero, unstorableResult(s, err))
	case err != nil:
		return zero, err
	case failure != nil:
		r.setFailedStep(s.key)
		return zero, failure
	case altered:
		value, err = decode[T](output)
	}
	r.setFailedStep("")
	return value, err
}

func unstorableResult(s stepSpec, err error) *StepError {
	return &StepError{Step: s.key, Class: "result", Message: fmt.Sprintf(
		"the result of step %s cannot be stored: %v", s.key, err)}
}

// flushAndRecord writes the deferred checkpoint and then the result of a step.
func (r *run) flushAndRecord(
	ctx context.Context, s stepSpec, effect *Effect, value any, output json.RawMessage, failure *StepError,
) error {
	if err := r.flushDeferred(ctx); err != nil {
		return err
	}
	return r.recordStep(ctx, s, effect, value, output, failure)
}

// recordStep writes the checkpoint of a step and closes its activity row in one commit. It also writes after a stop,
// because only the database knows whether the claim is still live.
func (r *run) recordStep(
	ctx context.Context, s stepSpec, effect *Effect, value any, output json.RawMessage, failure *StepError,
) error {
	out := activity.Outcome{Status: activity.Success, Output: value}
	if effect != nil {
		out = effect.outcome(value)
	}
	if failure != nil {
		out.Message, out.Class = failure.Message, failure.Class
		if out.Status == activity.Success {
			out.Status, out.Output = activity.Error, nil
		}
		if effect != nil && effect.Output != nil {
			out.Output = effect.Output
		}
	}
	deadline := time.Now().Add(r.e.opts.LeaseTTL)
	writeErr := r.writeResult(context.WithoutCancel(ctx), deadline, s, effect, out, output, failure != nil)
	err := r.handleWriteError(ctx, s, writeErr, out)
	switch {
	case err == nil:
	case !time.Now().Before(deadline) && transient(writeErr) && !errors.Is(err, ErrStale):
		// The database was unavailable for a whole lease, which is not a result of the step. The run ends, and the worker
		// releases its orphaned claim.
		r.e.log.ErrorContext(ctx, "result not recorded", "step", s.key, "error", writeErr)
		if ctx.Err() != nil { // the renewal of the lease failed too
			return errors.Join(context.Cause(ctx), err)
		}
		r.stop(ErrLost)
		return ErrLost
	default:
		return err
	}
	if s.entry != nil && effect != nil {
		r.e.opts.Observer.ActivityClosed(*s.entry, out, time.Since(effect.startedAt))
	}
	if s.entry != nil {
		attrs := []any{"action", s.entry.Skill, "step", s.key, "status", string(out.Status)}
		if out.Message != "" {
			attrs = append(attrs, "error", out.Message)
		}
		r.e.log.InfoContext(ctx, "action completed", attrs...)
	}
	r.e.log.InfoContext(ctx, "checkpoint saved", "step", s.key)
	return nil
}

// writeResult commits a result, with retries until a deadline. A step without an activity row is written in a batch.
func (r *run) writeResult(
	ctx context.Context, deadline time.Time, s stepSpec, effect *Effect, out activity.Outcome,
	output json.RawMessage, failed bool,
) error {
	if s.entry == nil && (effect == nil || effect.OnResult == nil) {
		return r.writeCheckpoint(ctx, deadline, s, output, failed)
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	return r.write(ctx, func(b *pgx.Batch) {
		if s.entry != nil && effect != nil {
			activity.CloseIn(ctx, b, effect.ActivityID, *s.entry, out)
		}
		r.queueCheckpoint(b, s, output, failed)
		if effect != nil && effect.OnResult != nil { // last, because it may lock rows that many runs share, such as budgets
			effect.OnResult(b)
		}
	})
}

// handleWriteError handles the error of a durable write. After a stale write it stops the run and records the write as
// rejected.
func (r *run) handleWriteError(ctx context.Context, s stepSpec, err error, out activity.Outcome) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrStale), r.writeLost(ctx, s, err, out):
		cancelled := errors.Is(r.stopCause(), ErrCancelled)
		r.stop(ErrStale)
		entry := activity.Entry{Skill: s.name, Step: s.key, Claim: r.exec.Claim}
		if s.entry != nil {
			entry.Skill = s.entry.Skill
		}
		if !cancelled || out.Output != nil {
			r.recordRejected(ctx, entry, out)
		}
		return ErrStale
	default:
		return fmt.Errorf("step %s: %w", s.key, err)
	}
}

// writeLost reports whether a write without a response was not committed because the run had lost its claim. This
// happens to a process that was paused between request and response.
func (r *run) writeLost(ctx context.Context, s stepSpec, err error, out activity.Outcome) bool {
	if postgres.Code(err) != "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var lost bool
	queryErr := r.e.pool.QueryRow(ctx, `
		select x.claim <> @claim and x.wait_number = @wait_number
		   and not case when @is_intent
		                then exists (select from agent_activity a
		                              where a.execution_id = x.id and a.claim = @claim and a.step = @step)
		                else exists (select from agent_checkpoints c
		                              where c.execution_id = x.id and c.claim = @claim and c.step = @step) end
		  from agent_executions x where x.id = @id`,
		postgres.Strict{
			"id": r.exec.ID, "claim": r.exec.Claim, "wait_number": r.exec.WaitNumber, "step": s.key,
			"is_intent": out.Status == activity.Running,
		}).Scan(&lost)
	if queryErr != nil {
		r.e.log.WarnContext(ctx, "outcome of a write unknown", "step", s.key, "error", errors.Join(err, queryErr))
		return false
	}
	return lost
}

// abandon ends a step of a stopped run without a result, and returns the cause of the stop. The next claim closes the
// activity row of the call. If the claim was lost, abandon records the interrupted call as rejected.
func (r *run) abandon(ctx context.Context, s stepSpec, effect *Effect, cause error) error {
	stopped := cmp.Or(context.Cause(ctx), r.stopCause())
	if s.entry != nil && errors.Is(stopped, ErrLost) {
		out := effect.outcome(nil)
		out.Status, out.Message = activity.Unknown, cause.Error()
		r.recordRejected(ctx, activity.Entry{Skill: s.entry.Skill, Step: s.key, Claim: r.exec.Claim}, out)
	}
	return stopped
}

func (r *run) queueCheckpoint(b *pgx.Batch, s stepSpec, output json.RawMessage, failed bool) {
	w := checkpointWrite{
		id: r.exec.ID, step: s.key, fingerprint: s.fingerprint, claim: r.exec.Claim, failed: failed, output: output,
	}
	w.queue(b)
}

// setFailedStep stores the step that failed last. step is empty after a success.
func (r *run) setFailedStep(step string) {
	r.mu.Lock()
	r.failedStep = step
	r.mu.Unlock()
}

// idempotencyKey returns the idempotency key of a step of this execution.
func (r *run) idempotencyKey(step string) string {
	sum := sha256.Sum256([]byte(r.exec.ID + " " + step))
	return hex.EncodeToString(sum[:16])
}

// maxUSD bounds the cost of a call. A row of the activity log stores every lower cost, rounded to six places.
const maxUSD = 1e8 - 0.5

// validateCost rejects a cost that is NaN or that a row cannot store.
func (e *Effect) validateCost() error {
	if cost := e.CostUSD; !(math.Abs(cost) < maxUSD) {
		e.CostUSD = 0
		return &StepError{
			Class:   "result",
			Message: fmt.Sprintf("the call reported a cost of %v USD, which cannot be recorded", cost),
		}
	}
	return nil
}

// outcome returns the content of the activity row.
func (e *Effect) outcome(value any) activity.Outcome {
	out := activity.Outcome{
		Status: e.Status, Output: e.Output, Usage: e.Usage, CostUSD: e.CostUSD,
		Model: e.Model, LedTo: e.LedTo,
	}
	if out.Output == nil {
		out.Output = value
	}
	out.Status = cmp.Or(out.Status, activity.Success)
	return out
}

// recordRejected records a rejected write in the activity log, even if the context of the run has ended.
func (r *run) recordRejected(ctx context.Context, entry activity.Entry, out activity.Outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r.e.log.ErrorContext(ctx, "stale write rejected", "step", entry.Step, "claim", r.exec.Claim)
	if err := activity.Reject(ctx, r.e.pool, entry, out); err != nil {
		r.e.log.ErrorContext(ctx, "stale write not recorded", "step", entry.Step, "error", err)
	}
}
