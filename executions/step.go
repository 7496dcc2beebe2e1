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

// StepError is the recorded error of a step. The first run and every replay return it alike, so a flow
// may decide on Class; the original error's identity is not kept.
type StepError struct {
	Step    string `json:"-"`
	Class   string `json:"class"`
	Message string `json:"message"`
	// Until, where set, is when what refused the step ends: another try may succeed then.
	Until time.Time `json:"until,omitzero"`
}

// Error is the message of the error that ended the step.
func (e *StepError) Error() string { return e.Message }

// ErrorClass is a stable word for the sort of error.
func (e *StepError) ErrorClass() string { return e.Class }

// ClassUnknown is the class of a call of which nobody knows whether it took effect.
const ClassUnknown = "unknown"

type scopeKey struct{}

// Scope names a branch: steps in it have keys of their own. Branches that run at the same time must each
// have one, because the order of their steps differs from run to run. A slash in the name counts as an underscore.
func Scope(ctx context.Context, name string) context.Context {
	return withScope(ctx, scopeOf(ctx)+strings.ReplaceAll(name, "/", "_")+"/")
}

// withScope is a scope whose keys begin so. What a step is made of has the step's own key before it, slashes and all.
func withScope(ctx context.Context, prefix string) context.Context {
	return context.WithValue(ctx, scopeKey{}, prefix)
}

// StepKey is the key of the step that ctx is inside of; empty outside of steps.
func StepKey(ctx context.Context) string { return strings.TrimSuffix(scopeOf(ctx), "/") }

type gateKey struct{}

// Gate returns a context in which gate is asked before every step that is not recorded yet. It may wait
// durably, which is how a run yields to another between two steps; its error stops the flow.
func Gate(ctx context.Context, gate func(ctx context.Context) error) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// passGate asks the gate in a scope of the step's own: which waits it makes differs from run to run, so
// they must not share keys with those of other steps.
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

// Option adds to a step.
type Option func(*stepSpec)

// Input names what the step works on. Its fingerprint is kept, and a later run that comes to the same
// step with another input fails with ErrChanged instead of taking a result that belongs to other work.
func Input(v any) Option { return func(s *stepSpec) { s.input = v } }

// As names the activity row of a Phase; without it the row has the name of the step.
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
	repeatable  bool                   // may be made again after a crash
	complete    func(value any) Result // what its transaction ends the run with; nil where the run goes on
}

// Step runs fn once and records its result; later runs of the execution get the record. An error is a result too and
// comes back as *StepError, also where a limit of time on ctx, or the failure of another branch, has ended fn or was
// there before it: then fn is not called. fn may run again when the process dies before the record is written, so
// effects on the world belong into Call. T must survive encoding/json; JSON that it holds as json.RawMessage is given
// back, from the first run on, as the database writes it.
//
// The record is durable before the execution begins or records anything else, such as the next step, a wait or its
// end, with which it shares a write where that follows at once. A small one may be yet to be written when Step
// returns, for a millisecond or as long as the database is away. What a flow leaves behind when it returns takes no
// steps: ErrNotInExecution.
func Step[T any](ctx context.Context, name string, fn func(ctx context.Context) (T, error), opts ...Option) (T, error) {
	s := stepSpec{name: name, repeatable: true}
	for _, o := range opts {
		o(&s)
	}
	return runStep(ctx, s, func(ctx context.Context, _ *Effect) (T, error) { return RetryTransient(ctx, fn) })
}

// Phase is a Step with an activity row of its own, under which the rows of the steps in it are filed. The row
// shows its Input. A crash leaves the row running; the next claim goes on with the same row.
func Phase[T any](ctx context.Context, name string, fn func(ctx context.Context, effect *Effect) (T, error), opts ...Option) (T, error) {
	s := stepSpec{name: name, repeatable: true, entry: &activity.Entry{Skill: name, Kind: activity.KindPhase}}
	for _, o := range opts {
		o(&s)
	}
	s.entry.Input = s.input
	return runStep(ctx, s, fn)
}

// Call describes an effect on the world: what is called, with what, on whose behalf. Idempotent says
// that calling again under the same key does no harm, which is what happens after a crash in the middle.
type Call struct {
	activity.Entry
	Idempotent bool
	// OnIntent queues statements that commit together with the intent, such as the use of an approval. They
	// must bear being sent twice for one step, whose key it gets.
	OnIntent func(b *pgx.Batch, step string)
}

// Effect is what a call learns from the runtime and tells it.
type Effect struct {
	// Key is the idempotency key: the same for every try of this step of this execution, and no other's.
	Key string
	// ActivityID is the call's row.
	ActivityID string
	// What the row will say, beyond the result and the error. Output defaults to the result.
	Status  activity.Status
	Output  any
	Usage   activity.Usage
	CostUSD float64
	Model   string
	LedTo   map[string]int // of a model call: how often its answer calls each skill
	// OnResult queues statements that commit together with the call's result, or with its error. They must bear
	// being sent twice.
	OnResult func(b *pgx.Batch)

	startedAt time.Time
}

// Do makes a call as a durable step. Before fn acts, its intent is a running row of the activity log;
// after, the row and the checkpoint are finished in one transaction. When an earlier claim died between
// the two, an idempotent call is made again under the same key, and any other returns a *StepError of
// class ClassUnknown without being made.
func Do[T any](ctx context.Context, name string, c Call, fn func(ctx context.Context, effect *Effect) (T, error)) (T, error) {
	if c.Kind == "" {
		c.Kind = activity.KindCall
	}
	return runStep(ctx, stepSpec{name: name, repeatable: c.Idempotent, entry: &c.Entry, input: c.Input, onIntent: c.OnIntent}, fn)
}

// runStep is the one way in which a step happens.
func runStep[T any](ctx context.Context, s stepSpec, fn func(ctx context.Context, effect *Effect) (T, error)) (T, error) {
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
	if s.entry != nil { // else nobody is told
		effect.Key = r.idempotencyKey(s.key)
	}
	if !s.repeatable && r.interrupted[s.key] {
		return recordResult(ctx, r, s, nil, zero, &StepError{Step: s.key, Class: ClassUnknown, Message: fmt.Sprintf(
			"the process was lost while %s was called; nobody knows whether it took effect, and it is not safe to call it again", s.name)})
	}
	if err := r.openActivity(ctx, s, effect); err != nil {
		return zero, err
	}
	inner := stepScope(ctx, s)
	if !s.repeatable {
		inner = forbidWaits(inner, "the call "+s.key+", which is not idempotent, so that it cannot be begun again after the wait")
	}
	if effect.ActivityID != "" {
		inner = trace.WithActivity(inner, effect.ActivityID)
	}
	value, err := zero, ctx.Err() // which may have ended while the intent was written
	if err == nil {
		value, err = recoverPanic(inner, effect, fn)
		err = cmp.Or(err, effect.validateCost())
	}
	stop := r.stopCause()
	if errors.Is(stop, ErrParked) || errors.Is(stop, ErrDraining) && err != nil {
		return zero, stop
	}
	if err != nil && (stop != nil || r.endedExternally(ctx)) {
		return zero, r.abandon(ctx, s, effect, err)
	}
	if ctx.Err() != nil && r.ctx.Err() == nil { // the code's own limit, or another branch, has ended the step and not the run
		ctx = context.WithoutCancel(ctx)
	}
	if err != nil {
		return recordResult(ctx, r, s, effect, zero, asStepError(s.key, err))
	}
	return recordResult(ctx, r, s, effect, value, nil)
}

// endedExternally reports that a step is ended from outside, by the end of its run or the loss of a lane, so that its
// error is no result of it. What the code ends itself, by a timeout or because another branch has failed, has its
// error for a result.
func (r *run) endedExternally(ctx context.Context) bool {
	if r.ctx.Err() != nil { // first: the context of a hold hears of it a moment later
		return true
	}
	cause := context.Cause(ctx)
	return errors.Is(cause, lanes.ErrLost) || IsControl(cause) && !errors.Is(cause, context.Canceled)
}

// stepScope is the scope of the steps within a step.
func stepScope(ctx context.Context, s stepSpec) context.Context { return withScope(ctx, s.key+"/") }

// start finds the run, refuses steps of one that is over, and gives the step its key.
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
		return nil, fmt.Errorf("step %s: the flow has returned, and what goes on after it is %w", s.name, ErrNotInExecution)
	}
	var stop error
	if ctx.Err() != nil && r.endedExternally(ctx) { // the code's own limit is no reason to have no result
		stop = context.Cause(ctx)
	}
	if stop == nil {
		stop = r.lostLaneError()
	}
	if _, recorded := r.checkpoints[s.key]; stop == nil || recorded && r.ctx.Err() == nil {
		return r, nil
	}
	return nil, stop
}

// lostLaneError is an error while the run has lost a lane that it has not released: no step begins then, whatever its
// context. The caller holds r.mu.
func (r *run) lostLaneError() error {
	for lease := range r.leases {
		if leaseLost(lease) {
			return fmt.Errorf("lane %s: %w", lease.Lane(), context.Cause(lease.Context()))
		}
	}
	return nil
}

// nextKey gives a step its key: its name, and which of that name it is. The third of "a" and one that is called "a#3"
// must not have the same. The caller holds r.mu.
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

// resetKeys has the steps within a step get the keys again that they had, because it is begun anew.
func (r *run) resetKeys(step string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.occurrences, func(key string, _ int) bool { return strings.HasPrefix(key, step+"/") })
}

// Now is the database's time, recorded: the same in every run of the execution.
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

// snapshotInterval is how many iterations of a Loop lie between two snapshots.
const snapshotInterval = 16

// snapshot is the record of a Loop: its state before an iteration.
type snapshot[S any] struct {
	Next  int  `json:"next"`
	State S    `json:"state"`
	Done  bool `json:"done"`
}

// Loop calls body with the state that the call before returned, until body says that it is done, and
// returns the last state. It is for loops that may be long: after every 16 iterations the state takes the
// place of the records of the steps in them, so that a claim has at most 16 iterations to replay however
// many there were. Each iteration is a scope of its own. S must survive encoding/json, and body must put
// into its state whatever later iterations need.
func Loop[S any](ctx context.Context, name string, state S, body func(ctx context.Context, state S) (S, bool, error)) (S, error) {
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
			return state, r.failChanged(s.key, fmt.Errorf("loop %s: its record does not fit %T (%w): %w", s.key, state, err, ErrChanged))
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
			if err == nil && altered { // what goes on from the snapshot has no other state
				current, err = decode[snapshot[S]](stored)
			}
			if err != nil {
				return current.State, err
			}
		}
	}
	return current.State, nil
}

// snapshot records a loop's state in place of the steps of its iterations, in one transaction. The fence
// is the checkpoint's own.
func (r *run) snapshot(ctx context.Context, s stepSpec, state any) (output json.RawMessage, altered bool, err error) {
	if r.replay != nil {
		return nil, false, r.replay.beyondRecord(r, s.key)
	}
	if err := r.flushDeferred(ctx); err != nil { // lest a record comes after those that the state stands for
		return nil, false, err
	}
	if output, altered, err = encode(state); err != nil {
		return nil, false, fmt.Errorf("loop %s: encode state: %w", s.key, err)
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.e.opts.LeaseTTL)
	defer cancel()
	err = r.write(bounded, func(b *pgx.Batch) {
		b.Queue(`
			insert into agent_checkpoints as c (execution_id, step, claim, output) values (@id, @step, @claim, @output)
			on conflict (execution_id, step) do update
			   set claim = excluded.claim, output = excluded.output, created_at = clock_timestamp()`,
			postgres.Strict{"id": r.exec.ID, "step": s.key, "claim": r.exec.Claim, "output": output})
		b.Queue(`
			delete from agent_checkpoints
			 where execution_id = @id and starts_with(step, @prefix) and substr(step, length(@prefix) + 1) ~ '^[0-9]+/'`,
			postgres.Strict{"id": r.exec.ID, "prefix": s.key + "@"})
	})
	return output, altered, r.handleWriteError(ctx, s, err, activity.Outcome{Output: state})
}
