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
// branch on Class. The original error is not kept.
type StepError struct {
	Step    string `json:"-"`
	Class   string `json:"class"`
	Message string `json:"message"`
	// Until, where set, is the time from which a retry may succeed.
	Until time.Time `json:"until,omitzero"`
}

// Error is the message of the error that ended the step.
func (e *StepError) Error() string { return e.Message }

// ErrorClass is a stable word for the kind of error.
func (e *StepError) ErrorClass() string { return e.Class }

// ClassUnknown is the class of a call with an unknown outcome.
const ClassUnknown = "unknown"

type scopeKey struct{}

// Scope names a branch, whose steps have keys of their own. Parallel branches each need a scope, because the order of
// their steps differs between runs. A slash in the name counts as an underscore.
func Scope(ctx context.Context, name string) context.Context {
	return withScope(ctx, scopeOf(ctx)+strings.ReplaceAll(name, "/", "_")+"/")
}

// withScope sets the key prefix of the steps under ctx, slashes included.
func withScope(ctx context.Context, prefix string) context.Context {
	return context.WithValue(ctx, scopeKey{}, prefix)
}

// StepKey is the key of the step that contains ctx; empty outside steps.
func StepKey(ctx context.Context) string { return strings.TrimSuffix(scopeOf(ctx), "/") }

type gateKey struct{}

// Gate returns a context that calls gate before every step without a checkpoint. gate may wait durably, so a run can
// yield to another run between two steps. An error of gate stops the flow.
func Gate(ctx context.Context, gate func(ctx context.Context) error) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// passGate calls the gate in a scope of the step. The waits of a gate differ between runs, so they must not share
// keys with other steps.
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

// Input names the input of a step and records its fingerprint. A later run with another input fails with ErrChanged
// instead of a wrong result.
func Input(v any) Option { return func(s *stepSpec) { s.input = v } }

// As names the activity row of a Phase; the default is the name of the step.
func As(skill string) Option {
	return func(s *stepSpec) {
		if s.entry != nil {
			s.entry.Skill = skill
		}
	}
}

// stepSpec is a step about to run.
type stepSpec struct {
	name        string
	key         string
	input       any
	fingerprint string
	entry       *activity.Entry // nil: no activity row
	onIntent    func(b *pgx.Batch, step string)
	repeatable  bool                   // may run again after a crash
	complete    func(value any) Result // result of the execution that the step's transaction completes; nil for none
}

// Step runs fn once and records its result. Later runs of the execution get the record. An error is a result too and
// returns as *StepError. So are a timeout of ctx and a failure of another branch; if they come first, Step does not
// call fn. If the process dies before the record, fn may run again, so effects on the world belong into Call. T must
// survive encoding/json. A json.RawMessage in it has the database's form from the first run on.
//
// The record is durable before the execution's next step, wait or end. An end right after the step shares its write.
// When Step returns, a small result may be unwritten for a millisecond, or while the database is unavailable. Steps
// after the flow has returned fail with ErrNotInExecution.
func Step[T any](ctx context.Context, name string, fn func(ctx context.Context) (T, error), opts ...Option) (T, error) {
	s := stepSpec{name: name, repeatable: true}
	for _, o := range opts {
		o(&s)
	}
	return runStep(ctx, s, func(ctx context.Context, _ *Effect) (T, error) { return RetryTransient(ctx, fn) })
}

// Phase is a Step with an activity row, which is the parent of its inner steps' rows. The row shows its Input. After a
// crash the row stays running, and the next claim continues it.
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

// Call describes an effect on the world: target, input and principal. The engine may repeat an Idempotent call under
// the same key, for example after a crash during the call.
type Call struct {
	activity.Entry
	Idempotent bool
	// OnIntent queues statements that commit with the intent, such as the use of an approval. The statements must be safe
	// to send twice for one step key.
	OnIntent func(b *pgx.Batch, step string)
}

// Effect is the state of a call that the runtime and the function share.
type Effect struct {
	// Key is the idempotency key: the same for every attempt of this step of this execution, and unique to it.
	Key string
	// ActivityID is the call's row.
	ActivityID string
	// Further columns of the row. Output defaults to the result.
	Status  activity.Status
	Output  any
	Usage   activity.Usage
	CostUSD float64
	Model   string
	LedTo   map[string]int // of a model call: the number of calls of each skill in its answer
	// OnResult queues statements that commit with the call's result or error. The statements must be safe to send twice.
	OnResult func(b *pgx.Batch)

	startedAt time.Time
}

// Do makes a call as a durable step. A running row of the activity log records its intent before fn. Afterwards one
// transaction closes the row and writes the checkpoint. If an earlier claim died between the two, Do repeats an
// idempotent call under the same key. Any other call returns a *StepError of class ClassUnknown without another
// attempt.
func Do[T any](
	ctx context.Context, name string, c Call, fn func(ctx context.Context, effect *Effect) (T, error),
) (T, error) {
	c.Kind = cmp.Or(c.Kind, activity.KindCall)
	return runStep(ctx, stepSpec{
		name: name, repeatable: c.Idempotent, entry: &c.Entry, input: c.Input,
		onIntent: c.OnIntent,
	}, fn)
}

// runStep runs every kind of step but StepTx.
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
				"is not safe to repeat",
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
	if ctx.Err() != nil && r.ctx.Err() == nil { // a timeout of the code or another branch ended the step, not the run
		ctx = context.WithoutCancel(ctx)
	}
	if err != nil {
		return recordResult(ctx, r, s, effect, zero, asStepError(s.key, err))
	}
	return recordResult(ctx, r, s, effect, value, nil)
}

// endedExternally reports a step that ended with its run or with a lost lane. The error of such a step is no result. A
// timeout of the code or the failure of another branch is a result.
func (r *run) endedExternally(ctx context.Context) bool {
	if r.ctx.Err() != nil { // the context of a hold ends a moment later
		return true
	}
	cause := context.Cause(ctx)
	return errors.Is(cause, lanes.ErrLost) || IsControl(cause) && !errors.Is(cause, context.Canceled)
}

// stepScope is the scope of the steps within a step.
func stepScope(ctx context.Context, s stepSpec) context.Context { return withScope(ctx, s.key+"/") }

// start finds the run, refuses a step of a stopped run, and computes the key.
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
	if ctx.Err() != nil && r.endedExternally(ctx) { // the caller records a timeout of the code as the result
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

// lostLaneError returns an error while the run has an unreleased lost lane: the run starts no step then, under any
// context. The caller holds r.mu.
func (r *run) lostLaneError() error {
	for lease := range r.leases {
		if leaseLost(lease) {
			return fmt.Errorf("lane %s: %w", lease.Lane(), context.Cause(lease.Context()))
		}
	}
	return nil
}

// nextKey returns the key of a step: its name and occurrence. The third "a" and a step named "a#3" get different
// keys. The caller holds r.mu.
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

// resetKeys lets the inner steps of a repeated step get their former keys.
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
		return now.UTC(), err // as it comes back from JSON
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

// Loop calls body with the state of the previous call until body is done, and returns the last state. Use it for long
// loops. After every 16 iterations, a snapshot of the state replaces the checkpoints of their steps. So a claim replays
// at most 16 iterations. Each iteration is a scope of its own. S must survive encoding/json and hold everything that
// later iterations need.
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
			if err == nil && altered { // continue with the stored state
				current, err = decode[snapshot[S]](stored)
			}
			if err != nil {
				return current.State, err
			}
		}
	}
	return current.State, nil
}

// snapshot replaces the checkpoints of the iterations by the loop's state and their waits, in one transaction. The
// snapshot has the fence of a checkpoint.
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
			with gone as (
			  delete from agent_checkpoints
			   where execution_id = @id and starts_with(step, @prefix) and substr(step, length(@prefix) + 1) ~ '^[0-9]+/'
			  returning step, output, created_at, waited_for, waited_key, waited_since, waits),
			waits as (
			  select jsonb_agg(w.wait order by w.until) as all
			    from (select g.created_at as until, jsonb_build_object('step', g.step, 'kind', g.waited_for, 'key', g.waited_key,
			                   'since', g.waited_since, 'until', g.created_at, 'event_id', g.output ->> 'event_id',
			                   'event', g.output ->> 'event', 'timed_out', g.output ->> 'timed_out') as wait
			            from gone g where g.waited_for is not null
			          union all
			          select (l ->> 'until')::timestamptz, l from gone g, jsonb_array_elements(g.waits) l
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
