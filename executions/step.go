package executions

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// StepError is the recorded error of a step. The first run and every replay return the same values, so a flow may
// branch on Class. It does not wrap the original error.
type StepError struct {
	Step    string `json:"-"`
	Class   string `json:"class"`
	Message string `json:"message"`
	// Until is the time after which a retry may succeed; zero if unknown.
	Until time.Time `json:"until,omitzero"`
}

// Error returns the message of the error that ended the step.
func (e *StepError) Error() string { return e.Message }

// ErrorClass returns a stable word for the kind of error.
func (e *StepError) ErrorClass() string { return e.Class }

// ClassUnknown is the class of a call with an unknown outcome.
const ClassUnknown = "unknown"

type scopeKey struct{}

// Scope returns a context for a branch whose steps have their own keys. Each parallel branch needs a scope, because the
// order of steps in different branches differs between runs. Scope replaces a slash in the name by an underscore.
func Scope(ctx context.Context, name string) context.Context {
	return withScope(ctx, scopeOf(ctx)+strings.ReplaceAll(name, "/", "_")+"/")
}

// withScope sets the key prefix of the steps under ctx, including slashes.
func withScope(ctx context.Context, prefix string) context.Context {
	return context.WithValue(ctx, scopeKey{}, prefix)
}

// StepKey returns the key of the step that contains ctx. It is empty outside steps.
func StepKey(ctx context.Context) string { return strings.TrimSuffix(scopeOf(ctx), "/") }

type gateKey struct{}

// Gate returns a context under which every step without a checkpoint calls gate first. gate may wait durably, so a run
// can yield to another run between two steps. The step returns an error of gate.
func Gate(ctx context.Context, gate func(ctx context.Context) error) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// passGate calls the gate of ctx, if any, in a scope of its own. The waits of a gate differ between runs, so they must
// not share keys with other steps.
func passGate(ctx context.Context, s stepSpec) error {
	gate, _ := ctx.Value(gateKey{}).(func(ctx context.Context) error)
	if gate == nil {
		return nil
	}
	inner := withScope(Gate(ctx, nil), gatePrefix(s.key))
	_, err := RetryTransient(inner, func(ctx context.Context) (struct{}, error) { return struct{}{}, gate(ctx) })
	return err
}

func scopeOf(ctx context.Context) string {
	s, _ := ctx.Value(scopeKey{}).(string)
	return s
}

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

// runStep runs every kind of step except StepTx.
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
			"the process died, or another branch waited, during the call of %s; nobody knows whether it took effect, and it "+
				"is not safe to repeat", name)})
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

// stepScope returns the context of the steps within a step.
func stepScope(ctx context.Context, s stepSpec) context.Context { return withScope(ctx, s.key+"/") }

// start returns the run of ctx and computes the key of the step. It returns an error if the run has stopped.
func (s *stepSpec) start(ctx context.Context) (*run, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return nil, err
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

// nextKey returns the key of a step: its name, and from the second occurrence on its number. The third step "a" and a
// step named "a#3" get different keys. The caller holds r.mu.
func (r *run) nextKey(base string) string {
	if at := strings.LastIndexByte(base, '#'); at >= 0 && r.occurrences[base] == 0 {
		if n, err := strconv.Atoi(base[at+1:]); err == nil && n > 1 && n <= r.occurrences[base[:at]] {
			r.occurrences[base] = 1
		}
	}
	for {
		r.occurrences[base]++
		n := r.occurrences[base]
		if n == 1 {
			return base
		}
		if key := base + "#" + strconv.Itoa(n); r.occurrences[key] == 0 {
			return key
		}
	}
}

// resetKeys resets the occurrences of the inner steps of a step, so they get the same keys when the step is repeated.
func (r *run) resetKeys(step string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.occurrences, func(key string, _ int) bool { return strings.HasPrefix(key, step+"/") })
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

// snapshotInterval is the number of iterations of a Loop between two snapshots.
const snapshotInterval = 16

// snapshot is the checkpoint of a Loop: its state before an iteration.
type snapshot[S any] struct {
	Next  int  `json:"next"`
	State S    `json:"state"`
	Done  bool `json:"done"`
}

// Loop calls body with the state of the previous call until body returns true, and returns the last state. Use it for
// long loops: after every 16 iterations, a snapshot of the state replaces the checkpoints of their steps, so a claim
// replays at most 16 iterations. Each iteration is a scope. S must survive a round trip through encoding/json and
// contain everything that later iterations need.
func Loop[S any](
	ctx context.Context, name string, state S, body func(ctx context.Context, state S) (S, bool, error),
) (S, error) {
	s := stepSpec{name: name}
	r, err := s.start(ctx)
	if err != nil {
		return state, err
	}
	current := snapshot[S]{State: state}
	if err := r.replayLoop(ctx, s); err != nil {
		return state, err
	}
	r.mu.Lock()
	checkpoint, resumed := r.checkpoints[s.key]
	r.mu.Unlock()
	if resumed {
		if err := json.Unmarshal(checkpoint.Output, &current); err != nil {
			return state, r.failChanged(s.key, fmt.Errorf("loop %s: its checkpoint does not fit %T (%w): %w", s.key,
				state, err, ErrChanged))
		}
	}
	for !current.Done {
		current.State, current.Done, err = body(withScope(ctx, fmt.Sprintf("%s@%d/", s.key, current.Next)), current.State)
		if err != nil {
			return current.State, err
		}
		current.Next++
		if current.Done || current.Next%snapshotInterval == 0 {
			stored, altered, err := r.snapshot(ctx, s, current)
			if err == nil && altered { // continue with the state as a replay decodes it
				current, err = decode[snapshot[S]](stored)
			}
			if err != nil {
				return current.State, err
			}
		}
	}
	return current.State, nil
}

// snapshot replaces the checkpoints of the iterations by one checkpoint with the loop's state and a list of their
// waits.
func (r *run) snapshot(ctx context.Context, s stepSpec, state any) (output json.RawMessage, altered bool, err error) {
	if r.replay != nil {
		return nil, false, r.replay.beyondRecord(r, s.key)
	}
	if err := r.flushDeferred(ctx); err != nil { // a later checkpoint must not precede the snapshot
		return nil, false, err
	}
	if output, altered, err = encode(state); err != nil {
		return nil, false, fmt.Errorf("loop %s: encode state: %w", s.key, err)
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.e.opts.LeaseTTL)
	defer cancel()
	err = r.write(bounded, func(b *pgx.Batch) {
		b.Queue(`
			with replaced as (
			  delete from agent_checkpoints
			   where execution_id = @id and starts_with(step, @prefix) and substr(step, length(@prefix) + 1) ~ '^[0-9]+/'
			  returning step, output, created_at, waited_for, waited_key, waited_since, waits),
			waits as (
			  select jsonb_agg(w.wait order by w.until) as all
			    from (select r.created_at as until, jsonb_build_object('step', r.step, 'kind', r.waited_for, 'key', r.waited_key,
			                   'since', r.waited_since, 'until', r.created_at, 'event_id', r.output ->> 'event_id',
			                   'event', r.output ->> 'event', 'timed_out', r.output ->> 'timed_out') as wait
			            from replaced r where r.waited_for is not null
			          union all
			          select (l ->> 'until')::timestamptz, l from replaced r, jsonb_array_elements(r.waits) l
			          order by 1 limit 1000) w)
			insert into agent_checkpoints as c (execution_id, step, claim, output, waits)
			select @id, @step, @claim, @output, w.all from waits w
			on conflict (execution_id, step) do update
			   set claim = excluded.claim, output = excluded.output, created_at = clock_timestamp(),
			       waits = case when excluded.waits is null or jsonb_array_length(c.waits) >= 1000 then c.waits
			                    else jsonb_path_query_array(coalesce(c.waits, '[]') || excluded.waits, '$[0 to 999]') end`,
			postgres.Strict{
				"id": r.exec.ID, "step": s.key, "claim": r.exec.Claim, "output": output, "prefix": s.key + "@",
			})
	})
	return output, altered, r.handleWriteError(ctx, s, err, activity.Outcome{Output: state})
}
