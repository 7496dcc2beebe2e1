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

// recorded returns the result of an earlier run of this step, if there is one. Before anything new is
// begun, it also looks whether the process shuts down, or the agent is paused.
func recorded[T any](ctx context.Context, r *run, s spec) (bool, T, error) {
	var value T
	if r.replay != nil {
		if err := r.replay.comeTo(ctx, r, s); err != nil {
			return true, value, err
		}
	}
	r.mu.Lock()
	point, ok := r.checkpoints[s.key]
	r.mu.Unlock()
	if !ok {
		if err := r.flushDeferred(ctx); err != nil {
			return true, value, err
		}
		if r.e.stopping() {
			r.stop(ErrDraining)
			return true, value, ErrDraining
		}
		if ctx.Err() != nil {
			value, err := tooLate[T](ctx, r, s)
			return true, value, err
		}
		if err := r.heldBack(ctx); err != nil {
			r.stop(err)
			return true, value, err
		}
		return false, value, nil
	}
	if point.Fingerprint != s.print && point.Fingerprint != "" && s.print != "" {
		return true, value, r.changed(s.key, fmt.Errorf("step %s has a record for another input: %w", s.key, ErrChanged))
	}
	if point.Failed {
		failure := &StepError{Step: s.key}
		if err := json.Unmarshal(point.Output, failure); err != nil {
			return true, value, fmt.Errorf("decode error of step %s: %w", s.key, err)
		}
		r.noteFailure(s.key)
		return true, value, failure
	}
	if err := json.Unmarshal(point.Output, &value); err != nil {
		return true, value, r.changed(s.key, fmt.Errorf("step %s: its record does not fit %s (%w): %w", s.key, reflect.TypeFor[T](), err, ErrChanged))
	}
	r.noteFailure("")
	return true, value, nil
}

// tooLate is a step that does not begin because its context has ended. Where the code has ended it, that is its
// result: a later run may come to it in time, and do what this one does without.
func tooLate[T any](ctx context.Context, r *run, s spec) (T, error) {
	var zero T
	if r.interrupts(ctx) {
		return zero, context.Cause(ctx)
	}
	return keep(context.WithoutCancel(ctx), r, s, nil, zero, asStepError(s.key, ctx.Err()))
}

// Changed ends the run, because a step's record belongs to another input than the code now has, and returns the error
// that says so. A step that depends on more than its [Input] finds that out by itself.
func Changed(ctx context.Context, step string) error {
	err := fmt.Errorf("step %s has a record for another input: %w", step, ErrChanged)
	if r, _ := runOf(ctx); r != nil {
		return r.changed(step, err)
	}
	return err
}

// changed ends a run whose record does not belong to its code. That cannot be handled by the flow: what
// it would do next is not what was begun.
func (r *run) changed(step string, err error) error {
	r.noteFailure(step)
	r.stop(err)
	return err
}

// open writes the intent of a step that has an activity row.
func (r *run) open(ctx context.Context, s spec, effect *Effect) error {
	if s.entry == nil {
		return nil
	}
	s.entry.ExecutionID, s.entry.Claim, s.entry.Step = r.exec.ID, r.exec.Claim, s.key
	if s.entry.Kind != activity.KindPhase {
		s.entry.IdempotencyKey = effect.Key
	}
	r.e.log.InfoContext(ctx, "action started", "action", s.entry.Skill, "step", s.key)
	lasting, end := r.lasting(ctx)
	defer end()
	err := r.write(lasting, func(b *pgx.Batch) {
		activity.OpenIn(ctx, b, *s.entry, &effect.ActivityID)
		if s.also != nil {
			s.also(b, s.key)
		}
	})
	return r.written(ctx, s, err, activity.Outcome{Status: activity.Running})
}

// lasting is ctx without the limits that the code has set: a write that they cut off might be there, and nobody would
// know of it.
func (r *run) lasting(ctx context.Context) (context.Context, func()) {
	if ctx.Done() == r.life.Done() {
		return ctx, func() {}
	}
	longer, end := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(r.life, func() { end(context.Cause(r.life)) })
	return longer, func() { stop(); end(nil) }
}

// keep records how a step ended and returns what every later run will get: the value, or the error. A
// value that cannot be stored is an error, too.
func keep[T any](ctx context.Context, r *run, s spec, effect *Effect, value T, failure *StepError) (T, error) {
	var zero T
	var kept any = value
	if failure != nil {
		kept = failure
	}
	output, mended, err := encode(kept)
	if err != nil {
		failure = &StepError{Step: s.key, Class: "result", Message: "the result cannot be stored: " + err.Error()}
		if output, mended, err = encode(failure); err != nil {
			return zero, fmt.Errorf("step %s: encode its error: %w", s.key, err)
		}
	}
	if r.canWait(s, effect, output) {
		err = r.putOff(ctx, &putOff{s: s, effect: effect, value: value, output: output, failure: failure})
	} else {
		err = r.record(ctx, s, effect, value, output, failure)
	}
	switch code := postgres.Code(err); {
	case failure == nil && (strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")): // a number, or a size, beyond jsonb
		return keep(ctx, r, s, effect, zero, &StepError{Step: s.key, Class: "result", Message: "the result cannot be stored: " + err.Error()})
	case err != nil:
		return zero, err
	case failure != nil:
		r.noteFailure(s.key)
		return zero, failure
	case mended:
		value, err = decode[T](output)
	}
	r.noteFailure("")
	return value, err
}

// record writes the result of a step, after what was put off.
func (r *run) record(ctx context.Context, s spec, effect *Effect, value any, output json.RawMessage, failure *StepError) error {
	if err := r.flushDeferred(ctx); err != nil {
		return err
	}
	return r.recordNow(ctx, s, effect, value, output, failure)
}

// recordNow writes the result of a step: its checkpoint, and the end of its activity row, in one commit. It
// is tried also when the run was stopped meanwhile: the database knows whether the claim still counts.
func (r *run) recordNow(ctx context.Context, s spec, effect *Effect, value any, output json.RawMessage, failure *StepError) error {
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
	until := time.Now().Add(r.e.opts.LeaseTTL)
	err := r.writeResult(context.WithoutCancel(ctx), until, s, effect, out, output, failure != nil)
	failed := r.written(ctx, s, err, out)
	switch {
	case failed == nil:
	case !time.Now().Before(until) && passing(err) && !errors.Is(failed, ErrStale):
		// The database could not be written to for as long as a lease lasts. That is no result of the step: the run
		// ends here, and its claim, which then has no run, is handed on.
		r.e.log.ErrorContext(ctx, "result not recorded", "step", s.key, "error", err)
		if ctx.Err() != nil { // it has ended already: nobody could renew the lease either
			return errors.Join(context.Cause(ctx), failed)
		}
		r.stop(ErrLost)
		return ErrLost
	default:
		return failed
	}
	if s.entry != nil && effect != nil {
		r.e.opts.Observer.Closed(*s.entry, out, time.Since(effect.began))
	}
	if s.entry != nil {
		r.e.log.InfoContext(ctx, "action completed", "action", s.entry.Skill, "step", s.key, "status", string(out.Status))
	}
	r.e.log.InfoContext(ctx, "checkpoint saved", "step", s.key)
	return nil
}

// writeResult is the commit of record, tried until then. A step that is nothing but its result shares it with others.
func (r *run) writeResult(ctx context.Context, until time.Time, s spec, effect *Effect, out activity.Outcome, output json.RawMessage, failed bool) error {
	if s.entry == nil && (effect == nil || effect.Settle == nil) {
		return r.keepPoint(ctx, until, s, output, failed)
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	return r.write(ctx, func(b *pgx.Batch) {
		if s.entry != nil && effect != nil {
			activity.CloseIn(ctx, b, effect.ActivityID, *s.entry, out)
		}
		if effect != nil && effect.Settle != nil {
			effect.Settle(b)
		}
		r.queueCheckpoint(b, s, output, failed)
	})
}

// written deals with the answer to a durable write.
func (r *run) written(ctx context.Context, s spec, err error, out activity.Outcome) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrStale), r.unheard(ctx, s, err, out):
		cancelled := errors.Is(r.poisoned(), ErrCancelled)
		r.stop(ErrStale)
		entry := activity.Entry{Skill: s.name, Step: s.key, Claim: r.exec.Claim}
		if s.entry != nil {
			entry.Skill = s.entry.Skill
		}
		if !cancelled || out.Output != nil {
			r.reject(ctx, entry, out)
		}
		return ErrStale
	default:
		return fmt.Errorf("step %s: %w", s.key, err)
	}
}

// unheard reports that a write got no answer and came too late: the claim is gone, and what it would have
// written is not there. So it is with a process that was paused between sending and hearing.
func (r *run) unheard(ctx context.Context, s spec, err error, out activity.Outcome) bool {
	if postgres.Code(err) != "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var late bool
	failure := r.e.pool.QueryRow(ctx, `
		select x.claim <> @claim and x.wait_number = @waits and not case when @opening
		         then exists (select from agent_activity a where a.execution_id = x.id and a.claim = @claim and a.step = @step)
		         else exists (select from agent_checkpoints c where c.execution_id = x.id and c.claim = @claim and c.step = @step) end
		  from agent_executions x where x.id = @id`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "waits": r.exec.WaitNumber, "step": s.key, "opening": out.Status == activity.Running}).Scan(&late)
	if failure != nil {
		r.e.log.WarnContext(ctx, "not known whether a write took effect", "step", s.key, "error", errors.Join(err, failure))
		return false
	}
	return late
}

// abandon leaves a step whose run was stopped in the middle: no result is recorded. A call's row is
// closed by whoever took the claim away; a lost one leaves a note of what was interrupted.
func (r *run) abandon(ctx context.Context, s spec, effect *Effect, cause error) error {
	stopped := cmp.Or(context.Cause(ctx), r.poisoned())
	if s.entry != nil && errors.Is(stopped, ErrLost) {
		out := effect.outcome(nil)
		out.Status, out.Message = activity.Unknown, cause.Error()
		r.reject(ctx, activity.Entry{Skill: s.entry.Skill, Step: s.key, Claim: r.exec.Claim}, out)
	}
	return stopped
}

// queueCheckpoint queues the record of a step.
func (r *run) queueCheckpoint(b *pgx.Batch, s spec, output json.RawMessage, failed bool) {
	(&point{id: r.exec.ID, step: s.key, print: s.print, claim: r.exec.Claim, failed: failed, output: output}).queue(b)
}

// noteFailure notes the step that failed last; empty when one has succeeded since.
func (r *run) noteFailure(step string) {
	r.mu.Lock()
	r.failedStep = step
	r.mu.Unlock()
}

// idempotencyKey names one step of one execution.
func (r *run) idempotencyKey(step string) string {
	sum := sha256.Sum256([]byte(r.exec.ID + " " + step))
	return hex.EncodeToString(sum[:16])
}

// mostUSD is what a row of the activity log cannot hold any more.
const mostUSD = 1e8

// account refuses a cost that is no amount, or more than a row holds: it would be in each sum with others.
func (e *Effect) account() error {
	if cost := e.CostUSD; !(math.Abs(cost) < mostUSD) {
		e.CostUSD = 0
		return &StepError{Class: "result", Message: fmt.Sprintf("the call says that it has cost %v USD, which cannot be recorded", cost)}
	}
	return nil
}

// outcome is what the activity row says.
func (e *Effect) outcome(value any) activity.Outcome {
	out := activity.Outcome{Status: e.Status, Output: e.Output, Usage: e.Usage, CostUSD: e.CostUSD, Model: e.Model, LedTo: e.LedTo}
	if out.Output == nil {
		out.Output = value
	}
	if out.Status == "" {
		out.Status = activity.Success
	}
	return out
}

// protect turns a panic in a step into its error.
func protect[T any](ctx context.Context, effect *Effect, fn func(context.Context, *Effect) (T, error)) (value T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &StepError{Class: "panic", Message: fmt.Sprintf("panic: %v", p)}
		}
	}()
	value, err = fn(ctx, effect)
	return value, examined(err)
}

// examined asks an error what it will be asked where nothing catches a panic. One that panics, as a nil pointer of
// the code's own type does, is a panic of the code.
func examined(err error) error {
	if err != nil {
		_, _ = err.Error(), errors.Is(err, errNever)
		var classed interface{ ErrorClass() string }
		if errors.As(err, &classed) {
			_ = classed.ErrorClass()
		}
	}
	return err
}

// errNever is no error's cause, so that all of them are asked.
var errNever = errors.New("never")

// asStepError reduces an error to what is recorded.
func asStepError(key string, err error) *StepError {
	failure := &StepError{Step: key, Class: "error", Message: postgres.Text(err.Error())}
	var classed interface{ ErrorClass() string }
	if given, ok := errors.AsType[*StepError](err); ok {
		failure.Until = given.Until
	}
	switch {
	case errors.As(err, &classed):
		failure.Class = postgres.Text(classed.ErrorClass())
	case errors.Is(err, context.DeadlineExceeded):
		failure.Class = "timeout"
	}
	return failure
}
