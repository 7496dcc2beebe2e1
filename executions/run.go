package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// run is one claim of one execution, while this process works on it.
type run struct {
	e         *Engine
	exec      Execution
	worker    string
	startedAt time.Time
	ctx       context.Context // ends when the run is stopped, or its caller leaves
	cancel    context.CancelCauseFunc

	mu                sync.Mutex
	checkpoints       map[string]Checkpoint
	interrupted       map[string]bool           // steps whose call an earlier claim left in flight
	occurrences       map[string]int            // occurrences of scope + name
	stepCount         int                       // steps that the code has come to
	latestStep        map[string]int            // which of them was the last, by scope
	leases            map[*lanes.Lease]struct{} // what the code holds; nil until it takes a lane
	variables         json.RawMessage           // as the code set them last; nil when it has not
	storedVariables   json.RawMessage           // those that the row has
	variablesInFlight bool                      // a write under way takes them along
	stopErr           error                     // why no further step may run
	completed         *completionResult         // set when a step has ended the run
	returned          bool                      // the function has: what it left behind takes no further steps
	failedStep        string
	onCompleted       func(row *Execution) // gets the row as it ended, where that is known without asking; nil when nobody wants it
	replay            *replayRecord        // the record of a replay, which does nothing new; nil in a real run

	recordMu   sync.Mutex  // held while what was put off is written
	deferTimer *time.Timer // of what is put off; nil before the first time
	deferred   *deferredCheckpoint
}

type runKey struct{}

// runFrom finds the run a context belongs to.
func runFrom(ctx context.Context) (*run, error) {
	r, ok := ctx.Value(runKey{}).(*run)
	if !ok {
		return nil, ErrNotInExecution
	}
	return r, nil
}

// flowContext is the context that the function is called with. Where a step of another run has called for this one,
// what is that step's stays there: keys that began with its own would be others when this run goes on in a worker.
func (r *run) flowContext(ctx context.Context) context.Context {
	if _, err := runFrom(ctx); err == nil {
		for _, key := range []any{scopeKey{}, gateKey{}, noWaitsKey{}} {
			ctx = context.WithValue(ctx, key, nil)
		}
	}
	return trace.With(context.WithValue(ctx, runKey{}, r), r.exec.span())
}

// Current returns the execution that ctx belongs to, as it was claimed; false outside executions.
func Current(ctx context.Context) (Execution, bool) {
	r, err := runFrom(ctx)
	if err != nil {
		return Execution{}, false
	}
	return r.exec, true
}

// laneOwner is that name as lanes know it.
func (r *run) laneOwner() lanes.Owner { return lanes.ClaimOwner(r.exec.ID, r.exec.Claim) }

// stop ends the run's context and refuses further steps.
func (r *run) stop(cause error) {
	r.mu.Lock()
	if r.stopErr == nil {
		r.stopErr = cause
	}
	r.mu.Unlock()
	r.cancel(cause)
}

// stopCause says why no further step may run, if so.
func (r *run) stopCause() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopErr
}

// executeSync runs an execution that was claimed by itself, or inserted claimed, and whose record is still to be
// read. It returns the row as it ended, where that is known without asking.
func (e *Engine) executeSync(ctx context.Context, x Execution, worker string) (completed *Execution, err error) {
	err = e.execute(ctx, claimedExecution{Execution: x, onCompleted: func(row *Execution) { completed = row }}, worker, func() {})
	return completed, err
}

// execute runs a claimed execution until it ends, parks, is lost or is handed back. It calls returned when the function
// has returned, before that end is written.
func (e *Engine) execute(ctx context.Context, claim claimedExecution, worker string, returned func()) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	claimed := claim.Execution
	r := &run{
		e: e, exec: claimed, worker: worker, startedAt: time.Now(), ctx: ctx, cancel: cancel,
		occurrences: map[string]int{}, latestStep: map[string]int{}, checkpoints: claim.checkpoints, interrupted: claim.interrupted, onCompleted: claim.onCompleted,
	}
	ctx = r.flowContext(ctx)
	flow, err := e.flow(ctx, claimed.Flow)
	if err != nil || flow == nil {
		e.pools[claimed.Queue].skipFlow(claimed.Flow)
	}
	if err != nil {
		e.releaseClaim(ctx, r)
		return fmt.Errorf("find flow %s: %w", claimed.Flow, err)
	}
	if flow == nil {
		e.log.WarnContext(ctx, "flow is not known here, left to a process that knows it", "flow", claimed.Flow)
		e.releaseClaim(ctx, r)
		return nil
	}
	if err := r.loadState(ctx, claim.needsRecovery); err != nil {
		e.releaseClaim(ctx, r)
		if errors.Is(err, errClaimTooLow) {
			e.notifyReady(claimed.Queue, 1)
		}
		return err
	}
	if !e.addRun(r) {
		e.releaseClaim(ctx, r)
		return nil
	}
	defer e.removeRun(r)
	e.opts.Observer.RunStarted(r.exec)
	defer e.opts.Observer.RunFinished(r.exec)
	r.logStart(ctx)
	result, err := r.callFlow(ctx, flow)
	r.mu.Lock()
	r.returned = true
	r.mu.Unlock()
	returned()
	// From here on the database decides about the execution's lanes: renewing them would find them gone.
	e.keeper.Drop(r.laneOwner())
	err = r.finish(ctx, result, err)
	if stopped := r.stopCause(); ctx.Err() != nil && !errors.Is(stopped, ErrParked) {
		r.releaseCancelledLanes(ctx)
	}
	return err
}

// releaseCancelledLanes frees what a stopped run took when its execution had ended already, by a cancel: nobody else
// would before the lease of the lane ends.
func (r *run) releaseCancelledLanes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := r.e.pool.Exec(ctx, `
		select lanekeeper.release_agent_execution_locks(x.id) from agent_executions x where x.id = @id and x.completed_at is not null`,
		postgres.Strict{"id": r.exec.ID})
	if err != nil {
		r.e.log.WarnContext(ctx, "lanes of a stopped run not looked at", "error", err)
	}
}

// loadState makes the run ready to go on where an earlier claim stopped.
func (r *run) loadState(ctx context.Context, needsRecovery bool) error {
	known := r.checkpoints != nil
	if !known || needsRecovery {
		r.checkpoints, r.interrupted = map[string]Checkpoint{}, map[string]bool{}
	}
	if r.exec.Claim == 1 || known && !needsRecovery {
		return nil
	}
	if err := r.load(ctx, needsRecovery); err != nil {
		return err
	}
	if len(r.interrupted) > 0 && r.exec.Claim <= 2*int64(r.exec.WaitNumber)+1 {
		return errClaimTooLow
	}
	return nil
}

// errClaimTooLow hands a claim back so that the next one has a higher number. Whoever claims looks for interrupted
// calls only where the number is higher than waits alone make it, which is so once a claim was lost; but a call is
// interrupted as well when another branch begins to wait beside it, and may be waited beside again before its branch
// comes to it.
var errClaimTooLow = errors.New("the claim's number does not tell of an interrupted call")

// load reads, in one round trip, what earlier claims have recorded. Of a run that is held, lanes and calls are still
// those of an earlier claim.
func (r *run) load(ctx context.Context, needsRecovery bool) error {
	b := &pgx.Batch{}
	args := postgres.Strict{"id": r.exec.ID}
	if needsRecovery {
		claim := postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim}
		b.Queue(`select lanekeeper.fence_agent_execution(@id, @claim)`, claim)
		b.Queue(`select lanekeeper.claim_agent_locks(@id)`, args)
		b.Queue(`select lanekeeper.recover_agent_activity(@id, @claim)`, claim)
	}
	b.Queue(`select step, claim, fingerprint, failed, output, created_at from agent_checkpoints where execution_id = @id`,
		args).Query(func(rows pgx.Rows) error {
		checkpoints, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Checkpoint])
		for _, c := range checkpoints {
			r.checkpoints[c.Step] = c
		}
		return err
	})
	b.Queue(`
		select step from agent_activity
		 where execution_id = @id and status = 'unknown' and error_class = 'interrupted' and step <> ''`,
		args).Query(func(rows pgx.Rows) error {
		steps, err := pgx.CollectRows(rows, pgx.RowTo[string])
		for _, s := range steps {
			r.interrupted[s] = true
		}
		return err
	})
	if err := r.e.pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("load execution %s: %w", r.exec.ID, err)
	}
	return nil
}

// addRun lists the run as this process's; false when the process shuts down.
func (e *Engine) addRun(r *run) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.draining {
		return false
	}
	e.runs[r.exec.ID] = r
	return true
}

func (e *Engine) removeRun(r *run) {
	e.mu.Lock()
	if e.runs[r.exec.ID] == r {
		delete(e.runs, r.exec.ID)
	}
	e.mu.Unlock()
}

// callFlow calls the durable function; a panic becomes an error.
func (r *run) callFlow(ctx context.Context, flow Func) (result Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			r.e.log.ErrorContext(ctx, "flow panicked", "flow", r.exec.Flow, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = &StepError{Class: "panic", Message: fmt.Sprintf("flow %s panicked: %v", r.exec.Flow, p)}
		}
	}()
	result, err = flow(ctx, r.exec.Input)
	return result, probeError(err)
}

// finish decides what the end of the function means for the execution.
func (r *run) finish(ctx context.Context, result Result, err error) error {
	if r.completed != nil {
		if r.completed.row != nil && r.onCompleted != nil {
			r.onCompleted(r.completed.row)
		}
		r.afterCompletion(ctx, Completed, nil, *r.completed)
		return nil
	}
	last := r.takeDeferred() // an error of a write of it that was under way has stopped the run
	stopErr, ended := r.stopCause(), ctx.Err() != nil
	if last != nil && (stopErr != nil || ended) {
		_ = r.recordDeferred(ctx, last) // an error has stopped the run
		last, stopErr = nil, r.stopCause()
	}
	switch {
	case errors.Is(stopErr, ErrParked):
		return nil
	case errors.Is(stopErr, ErrLost), errors.Is(stopErr, ErrStale):
		r.e.log.ErrorContext(ctx, "claim lost", "claim", r.exec.Claim)
		r.e.opts.Observer.ClaimLost(r.exec)
		if errors.Is(stopErr, ErrStale) { // a refused write may have lost its lane, and not the claim: others go on
			r.e.releaseClaim(ctx, r)
		}
		return nil
	case errors.Is(stopErr, ErrCancelled):
		r.e.completeCancel(ctx, r.exec.ID)
		r.e.log.InfoContext(ctx, "execution cancelled")
		r.e.opts.Observer.ExecutionEnded(r.exec, Cancelled)
		return nil
	case errors.Is(stopErr, ErrDraining):
		r.e.releaseClaim(ctx, r)
		return nil
	case errors.Is(stopErr, ErrChanged), errors.Is(stopErr, errUnrecorded):
		return r.complete(ctx, nil, Failed, Result{}, stopErr)
	}
	if ended && !errors.Is(context.Cause(ctx), lanes.ErrLost) {
		r.e.releaseClaim(ctx, r) // the caller went away: a shutdown, or an interrupt that RunSync turns into a cancel
		r.e.notifyReady(r.exec.Queue, 1)
		return nil
	}
	status := Completed
	switch {
	case errors.Is(err, ErrTimedOut):
		status = Timeout
	case err != nil:
		status = Failed
	}
	return r.complete(ctx, last, status, result, err)
}

// logStart says that the run begins, or goes on. A wait may have been ended by a sweep or by plain SQL, where nobody
// could say so, hence what ended it is said here, by whoever goes on.
func (r *run) logStart(ctx context.Context) {
	attrs := []any{"flow", r.exec.Flow, "claim", r.exec.Claim, "checkpoints", len(r.checkpoints)}
	if r.exec.Claim == 1 {
		r.e.log.InfoContext(ctx, "execution started", attrs...)
		return
	}
	if step, out, ok := r.lastWait(); ok {
		attrs = append(attrs, "step", step, "timed_out", out.TimedOut)
		if !out.TimedOut { // else the outcome names an event that has not come
			attrs = append(attrs, "event", out.Event)
		}
	}
	r.e.log.InfoContext(ctx, "execution resumed", attrs...)
	r.e.log.InfoContext(ctx, "continuing from checkpoint", "checkpoints", len(r.checkpoints))
}

// lastWait is the wait whose end made the execution ready: its outcome was recorded under the number that the park had
// made, and this claim is the next.
func (r *run) lastWait() (step string, out Outcome, ok bool) {
	for _, c := range r.checkpoints {
		if c.Claim != r.exec.Claim-1 || c.Failed {
			continue
		}
		if out, err := decode[Outcome](c.Output); err == nil && out.Event != "" {
			return c.Step, out, true
		}
	}
	return "", Outcome{}, false
}
