package executions

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Option configures a step.
type Option func(*stepSpec)

// Input sets the input of a step and records its fingerprint. A later run with another input fails with ErrChanged
// instead of returning the result for the earlier input.
func Input(v any) Option { return func(s *stepSpec) { s.input = v } }

// As sets the name of a Phase's activity row. The default is the name of the step.
func As(skill string) Option {
	return func(s *stepSpec) {
		if s.entry != nil {
			s.entry.Skill = skill
		}
	}
}

// stepSpec describes a step to run.
type stepSpec struct {
	name        string
	key         string
	input       any
	fingerprint string
	entry       *activity.Entry // the activity row; nil for none
	onIntent    func(b *pgx.Batch, step string)
	repeatable  bool                   // whether the step may run again after a crash
	complete    func(value any) Result // see EndTx; nil for other steps
}

// Step runs fn and records its result in a checkpoint. Later runs of the execution return the checkpoint without
// calling fn. Step records an error too, and returns it as *StepError. This includes the end of ctx by a timeout or a
// failure of another branch, before which Step may not call fn at all. If the process dies before the checkpoint, fn
// runs again, so effects on other systems belong in a Call. T must survive a round trip through encoding/json. A
// json.RawMessage in T has the form of jsonb from the first run on.
//
// The checkpoint is durable before the next step, wait or completion of the execution. Often the completion and the
// last checkpoint are one write. So a small result may be unwritten for a millisecond after Step has returned, or
// longer while the database is unavailable. A step after the flow has returned fails with ErrNotInExecution.
func Step[T any](ctx context.Context, name string, fn func(ctx context.Context) (T, error), opts ...Option) (T, error) {
	s := stepSpec{name: name, repeatable: true}
	for _, o := range opts {
		o(&s)
	}
	return runStep(ctx, s, func(ctx context.Context, _ *Effect) (T, error) { return RetryTransient(ctx, fn) })
}

// Phase is a Step with an activity row, which is the parent of the rows of its inner steps. The row contains its Input.
// After a crash the row remains running, and the next claim continues it.
func Phase[T any](
	ctx context.Context, name string, fn func(ctx context.Context, effect *Effect) (T, error), opts ...Option,
) (T, error) {
	s := stepSpec{name: name, repeatable: true, entry: &activity.Entry{Skill: name, Kind: activity.KindPhase}}
	for _, o := range opts {
		o(&s)
	}
	s.entry.Input = s.input
	return runStep(ctx, s, fn)
}

// Call describes an effect on another system: target, input and principal. The engine may repeat an Idempotent call
// under the same key, for example after a crash during the call.
type Call struct {
	activity.Entry
	Idempotent bool
	// OnIntent queues statements that commit with the intent, such as the use of an approval. The statements must be safe
	// to send twice for one step key.
	OnIntent func(b *pgx.Batch, step string)
}

// Effect is the state of a call that the engine and the function share.
type Effect struct {
	// Key is the idempotency key. It is the same for every attempt of this step of this execution, and unique to it.
	Key string
	// ActivityID is the id of the call's activity row.
	ActivityID string
	// The function may set the columns of the row below. Output defaults to the result.
	Status  activity.Status
	Output  any
	Usage   activity.Usage
	CostUSD float64
	Model   string
	LedTo   map[string]int // for a model call: number of calls by skill in the model's answer
	// OnResult queues statements that commit with the call's result or error. The statements must be safe to send twice.
	OnResult func(b *pgx.Batch)

	startedAt time.Time
}

// Do makes a call as a durable step. A running row of the activity log records the intent before fn. After fn, one
// transaction closes the row and writes the checkpoint. If an earlier claim was lost between the two, Do repeats an
// idempotent call under the same key. For any other call it returns a *StepError of class ClassUnknown without calling
// fn.
func Do[T any](
	ctx context.Context, name string, c Call, fn func(ctx context.Context, effect *Effect) (T, error),
) (T, error) {
	c.Kind = cmp.Or(c.Kind, activity.KindCall)
	return runStep(ctx, stepSpec{
		name: name, repeatable: c.Idempotent, entry: &c.Entry, input: c.Input, onIntent: c.OnIntent,
	}, fn)
}

// runStep runs a Step, Phase or Call.
func runStep[T any](
	ctx context.Context, s stepSpec, fn func(ctx context.Context, effect *Effect) (T, error),
) (T, error) {
	var zero T
	r, err := s.start(ctx)
	if err != nil {
		return zero, err
	}
	if r.replay != nil && r.replay.isUnderWay(s) {
		return zero, callUnderWay(ctx, r, s, fn)
	}
	if done, v, err := recordedResult[T](ctx, r, s); done {
		return v, err
	}
	if err := passGate(ctx, s); err != nil {
		return zero, err
	}
	effect := &Effect{startedAt: time.Now()}
	if s.entry != nil {
		effect.Key = r.idempotencyKey(s.key)
	}
	if !s.repeatable && r.interrupted[s.key] {
		name := s.name
		if s.entry != nil {
			name = cmp.Or(s.entry.Skill, name)
		}
		return recordResult(ctx, r, s, nil, zero, &StepError{Step: s.key, Class: ClassUnknown, Message: fmt.Sprintf(
			"the run was interrupted during the call of %s; nobody knows whether it took effect, and it is not safe to repeat",
			name)})
	}
	if err := r.openActivity(ctx, s, effect); err != nil {
		return zero, err
	}
	inner := stepScope(ctx, s)
	if !s.repeatable {
		inner = forbidWaits(inner, "the call "+s.key+", which is not idempotent and so cannot restart after the wait")
	}
	if effect.ActivityID != "" {
		inner = trace.WithActivity(inner, effect.ActivityID)
	}
	value, err := zero, ctx.Err() // ctx may have ended while the intent was written
	if err == nil {
		value, err = recoverPanic(inner, effect, fn)
		err = cmp.Or(err, effect.validateCost())
	}
	stopErr := r.stopCause()
	if errors.Is(stopErr, ErrParked) || errors.Is(stopErr, ErrDraining) && err != nil {
		return zero, stopErr
	}
	if err != nil && (stopErr != nil || r.endedExternally(ctx)) {
		return zero, r.abandon(ctx, s, effect, err)
	}
	if ctx.Err() != nil && r.ctx.Err() == nil { // the flow ended the step, not the run, so its result is recorded
		ctx = context.WithoutCancel(ctx)
	}
	if err != nil {
		return recordResult(ctx, r, s, effect, zero, asStepError(s.key, err))
	}
	return recordResult(ctx, r, s, effect, value, nil)
}

// endedExternally reports whether a step ended because its run was stopped or a lane was lost. The error of such a step
// is not recorded. A timeout of the flow or the failure of another branch is recorded.
func (r *run) endedExternally(ctx context.Context) bool {
	if r.ctx.Err() != nil { // ctx may end a moment later, if it is the context of a hold
		return true
	}
	cause := context.Cause(ctx)
	return errors.Is(cause, lanes.ErrLost) || IsControl(cause) && !errors.Is(cause, context.Canceled)
}

// start returns the run of ctx and computes the key of the step. It returns an error if the run has stopped.
func (s *stepSpec) start(ctx context.Context) (*run, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return nil, err
	}
	if s.name == "" {
		return nil, errors.New("a step needs a name")
	}
	if s.input != nil {
		text, err := json.Marshal(s.input)
		if err != nil {
			return nil, fmt.Errorf("step %s: encode input: %w", s.name, err)
		}
		sum := sha256.Sum256(text)
		s.fingerprint = hex.EncodeToString(sum[:8])
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	scope := scopeOf(ctx)
	r.stepCount++
	r.latestStep[scope] = r.stepCount
	s.key = r.nextKey(scope + s.name)
	if r.stopErr != nil {
		return nil, r.stopErr
	}
	if r.returned {
		return nil, fmt.Errorf("step %s called after its flow returned: %w", s.name, ErrNotInExecution)
	}
	var stopErr error
	if ctx.Err() != nil && r.endedExternally(ctx) { // the caller records the end of ctx by the flow as the result
		stopErr = context.Cause(ctx)
	}
	if stopErr == nil {
		stopErr = r.lostLaneError()
	}
	if _, recorded := r.checkpoints[s.key]; stopErr == nil || recorded && r.ctx.Err() == nil {
		return r, nil
	}
	return nil, stopErr
}

// lostLaneError returns an error if the run has lost a lane and not released its hold. The run then starts no step,
// under any context. The caller holds r.mu.
func (r *run) lostLaneError() error {
	for lease := range r.leases {
		if leaseLost(lease) {
			return fmt.Errorf("lane %s: %w", lease.Lane(), context.Cause(lease.Context()))
		}
	}
	return nil
}

// Now returns the database's time as a step: every run of the execution gets the same time.
func Now(ctx context.Context) (time.Time, error) {
	return Step(ctx, "now", func(ctx context.Context) (time.Time, error) {
		var now time.Time
		r, err := runFrom(ctx)
		if err != nil {
			return now, err
		}
		err = r.e.pool.QueryRow(ctx, `select clock_timestamp()`).Scan(&now)
		return now.UTC(), err // a replay decodes UTC from JSON
	})
}
