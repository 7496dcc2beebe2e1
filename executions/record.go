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
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// recordedResult returns the checkpoint of a step, if there is one. Before a new step starts, it checks for a
// shutdown and a pause.
func recordedResult[T any](ctx context.Context, r *run, s stepSpec) (bool, T, error) {
	var value T
	if r.replay != nil {
		if err := r.replay.reach(ctx, r, s); err != nil {
			return true, value, err
		}
	}
	r.mu.Lock()
	checkpoint, ok := r.checkpoints[s.key]
	r.mu.Unlock()
	if !ok {
		if s.entry == nil || r.replay != nil { // otherwise openActivity writes the deferred checkpoint
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
		return true, value, r.failChanged(s.key, fmt.Errorf("step %s has a record for another input: %w", s.key, ErrChanged))
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
		return true, value, r.failChanged(s.key, fmt.Errorf("step %s: its record does not fit %s (%w): %w", s.key,
			reflect.TypeFor[T](), err, ErrChanged))
	}
	r.setFailedStep("")
	return true, value, nil
}

// recordExpired records a step that cannot start because the code ended its context. After a stop from outside, the run
// records nothing: a later run may start the step in time.
func recordExpired[T any](ctx context.Context, r *run, s stepSpec) (T, error) {
	var zero T
	if r.endedExternally(ctx) {
		return zero, context.Cause(ctx)
	}
	return recordResult(context.WithoutCancel(ctx), r, s, nil, zero, asStepError(s.key, ctx.Err()))
}

// Changed ends the run because a step's checkpoint belongs to another input, and returns the error. Use it in a step
// that depends on more than its [Input].
func Changed(ctx context.Context, step string) error {
	err := fmt.Errorf("step %s has a record for another input: %w", step, ErrChanged)
	if r, _ := runFrom(ctx); r != nil {
		return r.failChanged(step, err)
	}
	return err
}

// failChanged ends a run whose checkpoint contradicts its code. The flow cannot handle this error.
func (r *run) failChanged(step string, err error) error {
	r.setFailedStep(step)
	r.stop(err)
	return err
}

// openActivity writes the intent of a step with an activity row.
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

// untilRunEnds returns ctx without the timeouts and cancels of the code. A write that those interrupt would have an
// unknown outcome.
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
	output, altered, err := encode(stored)
	if err != nil {
		failure = &StepError{Step: s.key, Class: "result", Message: "the result cannot be stored: " + err.Error()}
		if output, altered, err = encode(failure); err != nil {
			return zero, fmt.Errorf("step %s: encode its error: %w", s.key, err)
		}
	}
	if r.canDefer(s, effect, output) {
		err = r.deferCheckpoint(ctx, &deferredCheckpoint{
			step: s, effect: effect, value: value,
			output: output, failure: failure,
		})
	} else {
		err = r.flushAndRecord(ctx, s, effect, value, output, failure)
	}
	switch code := postgres.Code(err); {
	// a number, or a size, beyond jsonb
	case failure == nil && (strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")):
		return recordResult(ctx, r, s, effect, zero,
			&StepError{Step: s.key, Class: "result", Message: "the result cannot be stored: " + err.Error()})
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

// flushAndRecord writes the result of a step after the deferred checkpoint.
func (r *run) flushAndRecord(
	ctx context.Context, s stepSpec, effect *Effect, value any, output json.RawMessage, failure *StepError,
) error {
	if err := r.flushDeferred(ctx); err != nil {
		return err
	}
	return r.recordStep(ctx, s, effect, value, output, failure)
}

// recordStep writes the checkpoint of a step and closes its activity row in one commit. It also runs after a stop:
// the database knows whether the claim is still live.
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
		// The database was unavailable for a whole lease. That is no result of the step: the run ends, and the worker
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

// writeResult commits a result, with retries until a deadline. A step without an activity row shares a batch.
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
		if effect != nil && effect.OnResult != nil { // last: it may lock rows that many runs share, as a budget
			effect.OnResult(b)
		}
	})
}

// handleWriteError handles the outcome of a durable write.
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

// writeLost reports an unanswered write that came too late: the run lost its claim, and the database lacks the write.
// This happens to a process that was paused between request and answer.
func (r *run) writeLost(ctx context.Context, s stepSpec, err error, out activity.Outcome) bool {
	if postgres.Code(err) != "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var lost bool
	queryErr := r.e.pool.QueryRow(ctx, `
		select x.claim <> @claim and x.wait_number = @waits and not case when @opening
		         then exists (select from agent_activity a where a.execution_id = x.id and a.claim = @claim
		           and a.step = @step)
		         else exists (select from agent_checkpoints c where c.execution_id = x.id and c.claim = @claim
		           and c.step = @step) end
		  from agent_executions x where x.id = @id`,
		postgres.Strict{
			"id": r.exec.ID, "claim": r.exec.Claim, "waits": r.exec.WaitNumber, "step": s.key,
			"opening": out.Status == activity.Running,
		}).Scan(&lost)
	if queryErr != nil {
		r.e.log.WarnContext(ctx, "outcome of a write unknown", "step", s.key, "error", errors.Join(err, queryErr))
		return false
	}
	return lost
}

// abandon leaves a step of a stopped run without a result. The next claim closes the row of the step's call. A lost
// claim leaves a record of the interrupted call.
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
	(&checkpointWrite{
		id: r.exec.ID, step: s.key, fingerprint: s.fingerprint, claim: r.exec.Claim, failed: failed,
		output: output,
	}).queue(b)
}

// setFailedStep stores the step that failed last; empty after a success.
func (r *run) setFailedStep(step string) {
	r.mu.Lock()
	r.failedStep = step
	r.mu.Unlock()
}

// idempotencyKey identifies one step of one execution.
func (r *run) idempotencyKey(step string) string {
	sum := sha256.Sum256([]byte(r.exec.ID + " " + step))
	return hex.EncodeToString(sum[:16])
}

// maxUSD is the first cost that a row of the activity log cannot store.
const maxUSD = 1e8

// validateCost rejects a cost that is no amount or that a row cannot store. Such a cost would spoil every sum.
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

// outcome is the content of the activity row.
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

// recoverPanic turns a panic in a step into its error.
func recoverPanic[T any](
	ctx context.Context, effect *Effect, fn func(context.Context, *Effect) (T, error),
) (value T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &StepError{Class: "panic", Message: fmt.Sprintf("panic: %v", p)}
		}
	}()
	value, err = fn(ctx, effect)
	return value, probeError(err)
}

// probeError calls the methods of an error that the engine calls later outside a recover. A nil pointer of the code's
// own error type panics here.
func probeError(err error) error {
	if err != nil {
		_, _ = err.Error(), errors.Is(err, errProbe)
		var classified interface{ ErrorClass() string }
		if errors.As(err, &classified) {
			_ = classified.ErrorClass()
		}
	}
	return err
}

// errProbe matches no error, so errors.Is visits the whole chain.
var errProbe = errors.New("never")

// asStepError reduces an error to its recorded form.
func asStepError(key string, err error) *StepError {
	failure := &StepError{Step: key, Class: "error", Message: postgres.Text(err.Error())}
	var classified interface{ ErrorClass() string }
	if stepErr, ok := errors.AsType[*StepError](err); ok {
		failure.Until = stepErr.Until
	}
	switch {
	case errors.As(err, &classified):
		failure.Class = postgres.Text(classified.ErrorClass())
	case errors.Is(err, context.DeadlineExceeded):
		failure.Class = "timeout"
	}
	return failure
}
