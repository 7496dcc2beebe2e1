package lanekeeper

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
)

// StepOption configures a step.
type StepOption func(*stepOptions)

type stepOptions struct {
	input    any
	untraced bool
	retries  int
	pause    time.Duration
}

// Input shows the input of a step in the trace, and records the input's fingerprint. A later run that reaches the step
// with another input fails, because the recorded result belongs to the recorded input.
func Input(v any) StepOption { return func(o *stepOptions) { o.input = v } }

// Untraced records only the result: the step makes one write instead of two, and has no activity row and no [StepKey].
func Untraced() StepOption { return func(o *stepOptions) { o.untraced = true } }

// Retry calls the function up to n more times after an error. The first retry follows after pause, and each further
// pause is twice as long. The process waits during the pauses, so keep them under a minute; use [Sleep] for longer
// pauses. Steps and children inside the function begin anew in each call. A panic is not retried, and StepTx ignores
// this option.
func Retry(n int, pause time.Duration) StepOption {
	return func(o *stepOptions) { o.retries, o.pause = n, pause }
}

type stepKey struct{}

// StepKey is the idempotency key of the running step: the same in every attempt of this step of this execution, and
// unique to it. It is empty outside steps.
func StepKey(ctx context.Context) string {
	key, _ := ctx.Value(stepKey{}).(string)
	return key
}

// Step runs fn once and records its result. Later runs of the flow get the record. An error is a result too, and Step
// returns it as a *[StepError]. fn may run again if the process dies, or another branch waits, before the record: see
// [StepKey]. Order distinguishes steps of one name, so parallel branches each need a [Scope]. T must survive
// encoding/json: the first run gets the value of fn, and later runs get the decoded record. In both, U+FFFD replaces
// U+0000. Step also records the error of a ctx that the flow limited itself, such as a timeout.
func Step[T any](
	ctx context.Context, name string, fn func(ctx context.Context) (T, error), opts ...StepOption,
) (T, error) {
	var o stepOptions
	for _, option := range opts {
		option(&o)
	}
	call := func(ctx context.Context) (T, error) { return retry(ctx, o, fn) }
	if o.untraced {
		var input []executions.Option
		if o.input != nil {
			input = append(input, executions.Input(o.input))
		}
		value, err := executions.Step(ctx, name, func(ctx context.Context) (T, error) {
			return call(context.WithValue(ctx, stepKey{}, "")) // not the key of an enclosing step
		}, input...)
		return value, stepError(err)
	}
	entry := executions.Call{Entry: activity.Entry{Skill: name, Input: o.input}, Idempotent: true}
	value, err := executions.Do(ctx, name, entry, func(ctx context.Context, effect *executions.Effect) (T, error) {
		return call(context.WithValue(ctx, stepKey{}, effect.Key))
	})
	return value, stepError(err)
}

// retry calls fn until it succeeds, the retries are used up, or the run ends.
func retry[T any](ctx context.Context, o stepOptions, fn func(ctx context.Context) (T, error)) (T, error) {
	for pause, retries := o.pause, o.retries; ; pause, retries = 2*pause, retries-1 {
		value, err := fn(ctx)
		if err == nil || retries <= 0 || executions.IsControl(err) || ctx.Err() != nil {
			return value, err
		}
		select {
		case <-ctx.Done():
			return value, err
		case <-time.After(pause):
		}
	}
}

// StepTx runs fn in a transaction that also records the step, so the database has both or neither. If fn fails, its
// transaction is rolled back, and StepTx records the error. StepTx may call fn again in a new transaction, after a
// broken connection, a deadlock or a serialization failure. fn neither commits nor rolls back. Inside [WithLane] the
// transaction fails if the lane was lost.
func StepTx[T any](
	ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), opts ...StepOption,
) (T, error) {
	var o stepOptions
	for _, option := range opts {
		option(&o)
	}
	var input []executions.Option
	if o.input != nil {
		input = append(input, executions.Input(o.input))
	}
	hold, _ := ctx.Value(holdKey{}).(*executions.Hold)
	value, err := executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (value T, err error) {
		if hold != nil {
			if err := hold.Fence(ctx, tx); err != nil {
				return value, err
			}
		}
		return fn(context.WithValue(ctx, stepKey{}, executions.IdempotencyKey(ctx)), tx)
	}, input...)
	return value, stepError(err)
}

// WaitEvent suspends the flow until [Runtime.SendEvent] or POST /v1/events (EVENT_COMPLETED) sends an event with key.
// An earlier event that ended no other wait ends this wait at once. A timeout of 0 is 7 days; the longest timeout is 30
// days. After the timeout WaitEvent returns [ErrTimedOut]. name is the step's name. key has at most 2,400 bytes.
func WaitEvent[T any](ctx context.Context, name, key string, timeout time.Duration) (data T, err error) {
	out, err := executions.Wait(ctx, name, executions.Event(key, timeout))
	switch {
	case err != nil:
		return data, err
	case out.TimedOut:
		return data, fmt.Errorf("wait %s for event %s: %w", name, key, ErrTimedOut)
	}
	return data, decode(out.Data, &data, "data of event "+key)
}

// Sleep suspends the flow for d, by the database's clock; at most 30 days. The flow continues within seconds of that
// time. For a d of 0 or less, Sleep returns at once. name is the step's name.
func Sleep(ctx context.Context, name string, d time.Duration) error {
	_, err := executions.Wait(ctx, name, executions.Delay(max(d, 1)))
	return err
}

// Now is the database's time, recorded: the same in every run of the execution.
func Now(ctx context.Context) (time.Time, error) { return executions.Now(ctx) }

// Scope names a branch of a flow. Parallel branches need a scope each, because the order of their steps differs between
// runs.
func Scope(ctx context.Context, name string) context.Context { return executions.Scope(ctx, name) }

type holdKey struct{}

// WithLane runs fn while the execution holds a lane. No other execution, surface or program on the database holds the
// lane meanwhile. WithLane queues for the lane until the timeout. Then it returns an error without recording it; return
// that error from the flow. The lane outlives the process: the process that continues the execution takes the lane
// over. A wait in fn keeps the lane until its lease ends, an hour at most. After that another owner may acquire the
// lane, and the flow queues for it again before it continues. A wait keeps a lane whose name begins with thread:,
// automation: or objective: until the wait ends. fn's context ends when the lane is lost; then no step starts. Hold one
// lane at a time, or acquire several lanes in one order everywhere. A child of [Flow.Call] in fn borrows the lane.
//
// A flow in the queue keeps its worker. If fn waits for a child while such flows keep all workers, the child does not
// run before their timeout.
func WithLane[T any](
	ctx context.Context, lane string, timeout time.Duration, fn func(ctx context.Context) (T, error),
) (value T, err error) {
	hold, err := executions.LaneWait(ctx, lane, timeout)
	if err != nil {
		return value, err
	}
	value, err = fn(context.WithValue(hold.Context(), holdKey{}, hold))
	if released := hold.Release(ctx); err == nil {
		err = released
	}
	return value, err
}
