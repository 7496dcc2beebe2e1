package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// run is one claim of one execution on which this process works.
type run struct {
	e         *Engine
	exec      Execution
	worker    string
	startedAt time.Time
	ctx       context.Context // ends when the run is stopped or its caller's context ends
	cancel    context.CancelCauseFunc

	mu                sync.Mutex
	checkpoints       map[string]Checkpoint
	interrupted       map[string]bool           // steps whose call an earlier claim left in flight
	occurrences       map[string]int            // number of started steps by scope + name
	stepCount         int                       // number of started steps
	latestStep        map[string]int            // number of the last started step by scope
	leases            map[*lanes.Lease]struct{} // held lanes; nil until the first one
	variables         json.RawMessage           // set by the last SetVariables; nil without a call
	storedVariables   json.RawMessage           // stored in the row
	variablesInFlight bool                      // a write in flight stores the variables
	stopErr           error                     // reason why no further step may start; nil while the run is live
	completed         *completionResult         // set when a step has completed the execution
	returned          bool                      // the flow has returned, so no further step may start
	failedStep        string
	onCompleted       func(row *Execution) // see claimedExecution
	callerLeft        func() bool          // see claimedExecution
	replay            *replayRecord        // the record of a replay; nil in a real run

	recordMu   sync.Mutex  // held while a deferred checkpoint is written
	deferTimer *time.Timer // flushes the deferred checkpoint; nil before the first one
	deferred   *deferredCheckpoint
}

type runKey struct{}

// runFrom returns the run of ctx. Outside a run it returns ErrNotInExecution.
func runFrom(ctx context.Context) (*run, error) {
	r, ok := ctx.Value(runKey{}).(*run)
	if !ok {
		return nil, ErrNotInExecution
	}
	return r, nil
}

// flowContext returns the context of the flow. If ctx belongs to a step of another run, flowContext drops that step's
// scope, gate and ban on waits. Otherwise a resumed run would compute other step keys.
func (r *run) flowContext(ctx context.Context) context.Context {
	if _, err := runFrom(ctx); err == nil {
		for _, key := range []any{scopeKey{}, gateKey{}, noWaitsKey{}} {
			ctx = context.WithValue(ctx, key, nil)
		}
	}
	ctx = activity.WithActor(ctx, activity.Actor{}) // the actor who started the execution does not act in the run
	return trace.With(context.WithValue(ctx, runKey{}, r), r.exec.span())
}

// Current returns the execution of ctx with the values at its claim. It returns false outside executions.
func Current(ctx context.Context) (Execution, bool) {
	r, err := runFrom(ctx)
	if err != nil {
		return Execution{}, false
	}
	return r.exec, true
}

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

// stopCause returns the reason why no further step may start; nil while the run is live.
func (r *run) stopCause() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopErr
}

// executeSync runs an execution whose checkpoints are not loaded yet. It returns the final row if the run knows it
// without a query. With cancelOnExit, it cancels the execution if ctx ends first.
func (e *Engine) executeSync(
	ctx context.Context, x *Execution, worker string, cancelOnExit bool,
) (completed *Execution, err error) {
	claim := claimedExecution{Execution: *x, onCompleted: func(row *Execution) { completed = row }}
	if cancelOnExit {
		claim.callerLeft = func() bool { return ctx.Err() != nil }
	}
	err = e.execute(ctx, &claim, worker, func() {})
	return completed, err
}

// execute runs a claimed execution until it ends, waits, is lost or is released. It calls returned after the flow has
// returned and before it writes the completion.
func (e *Engine) execute(ctx context.Context, claim *claimedExecution, worker string, returned func()) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &run{
		e: e, exec: claim.Execution, worker: worker, startedAt: time.Now(), ctx: ctx, cancel: cancel,
		occurrences: map[string]int{}, latestStep: map[string]int{}, checkpoints: claim.checkpoints,
		interrupted: claim.interrupted, onCompleted: claim.onCompleted, callerLeft: claim.callerLeft,
	}
	ctx = r.flowContext(ctx)
	flow, err := e.findFlow(ctx, r)
	if err != nil || flow == nil {
		return err
	}
	if err := r.loadState(ctx, claim.needsRecovery); err != nil {
		e.releaseClaim(ctx, r)
		if errors.Is(err, errClaimTooLow) {
			e.notifyReady(r.exec.Queue, 1)
		}
		return err
	}
	if !e.addRun(r) {
		e.releaseClaim(ctx, r)
		return nil
	}
	defer e.removeRun(r)
	e.opts.Observer.RunStarted(r.exec)
	defer func() { e.opts.Observer.RunFinished(r.exec) }()
	r.logStart(ctx)
	return r.callAndFinish(ctx, flow, returned)
}

// findFlow returns the function of the run's flow. If this process does not know the flow, findFlow releases the claim
// to other processes and returns nil.
func (e *Engine) findFlow(ctx context.Context, r *run) (Func, error) {
	name, pool := r.exec.Flow, e.pools[r.exec.Queue]
	flow, err := e.flow(ctx, name)
	if err == nil && flow != nil {
		return flow, nil
	}
	pool.skipFlow(name)
	e.releaseClaim(ctx, r)
	pool.notifyPeers()
	if err != nil {
		return nil, fmt.Errorf("find flow %s: %w", name, err)
	}
	level := slog.LevelWarn
	if _, known := e.unknownFlows.LoadOrStore(name, nil); known {
		level = slog.LevelDebug
	}
	e.log.Log(ctx, level, "flow unknown here, left to other processes", "flow", name)
	return nil, nil
}

// callAndFinish calls the flow and writes the end of the run. It also writes the end if the flow ends its goroutine.
func (r *run) callAndFinish(ctx context.Context, flow Func, returned func()) (err error) {
	var result Result
	flowErr := error(&StepError{Class: "error", Message: fmt.Sprintf(
		"flow %s ended its goroutine (runtime.Goexit, or FailNow of a test) instead of returning", r.exec.Flow)})
	defer func() {
		r.mu.Lock()
		r.returned = true
		r.mu.Unlock()
		returned()
		r.e.keeper.Drop(r.laneOwner()) // finish releases or parks the lanes, and a renewal would report them as lost
		err = r.finish(ctx, result, flowErr)
		if ctx.Err() != nil && !errors.Is(r.stopCause(), ErrParked) {
			r.releaseCancelledLanes(ctx)
		}
	}()
	result, flowErr = r.callFlow(ctx, flow)
	return nil
}

// releaseCancelledLanes releases lanes that a stopped run acquired after a cancel had ended its execution.
func (r *run) releaseCancelledLanes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := r.e.pool.Exec(ctx, `
		select lanekeeper.release_agent_execution_locks(x.id)
		  from agent_executions x where x.id = @id and x.completed_at is not null`,
		postgres.Strict{"id": r.exec.ID})
	if err != nil {
		r.e.log.WarnContext(ctx, "lanes of a stopped run not released", "error", err)
	}
}

// loadState loads the state that earlier claims recorded.
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

// errClaimTooLow releases a claim so that the next claim gets a higher number. Without lost claims, each wait raises
// the number by two: the wait itself, and the claim after it. The SQL functions look for interrupted calls only above
// that number. But a wait also interrupts the call of another branch, without a lost claim.
var errClaimTooLow = errors.New("the claim's number hides an interrupted call")

// load reads the checkpoints and interrupted calls of earlier claims in one round trip. With needsRecovery, load first
// takes over their lanes and open activities.
func (r *run) load(ctx context.Context, needsRecovery bool) error {
	b := &pgx.Batch{}
	args := postgres.Strict{"id": r.exec.ID}
	if needsRecovery {
		claim := postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim}
		b.Queue(`select fence_agent_execution(@id, @claim)`, claim)
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
		for _, step := range steps {
			r.interrupted[step] = true
		}
		return err
	})
	if err := r.e.pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("load execution %s: %w", r.exec.ID, err)
	}
	return nil
}

// addRun registers the run. It returns false while the process shuts down.
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
	e.statuses.wake(r.exec.ID)
}

// callFlow calls the durable function and returns a panic as an error.
func (r *run) callFlow(ctx context.Context, flow Func) (result Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			r.e.log.ErrorContext(ctx, "flow panicked", "flow", r.exec.Flow, "panic", fmt.Sprint(p), "stack",
				string(debug.Stack()))
			err = &StepError{Class: "panic", Message: fmt.Sprintf("flow %s panicked: %v", r.exec.Flow, p)}
		}
	}()
	result, err = flow(ctx, r.exec.Input)
	return result, probeError(err)
}

// finish writes the end of the execution, or releases or drops the claim. result and err are those of the flow.
func (r *run) finish(ctx context.Context, result Result, err error) error {
	if r.completed != nil {
		if r.completed.row != nil && r.onCompleted != nil {
			r.onCompleted(r.completed.row)
		}
		r.afterCompletion(ctx, Completed, nil, *r.completed)
		return nil
	}
	last := r.takeDeferred()
	stopErr, ended := r.stopCause(), ctx.Err() != nil
	if last != nil && (stopErr != nil || ended) {
		_ = r.recordDeferred(ctx, last) // a failed write has stopped the run
		last, stopErr = nil, r.stopCause()
	}
	switch {
	case errors.Is(stopErr, ErrParked):
		return nil
	case errors.Is(stopErr, ErrLost), errors.Is(stopErr, ErrStale):
		// After ErrStale the claim may still be live: only a lane was lost.
		if !errors.Is(stopErr, ErrStale) || !r.e.releaseClaim(ctx, r) {
			r.e.log.ErrorContext(ctx, "claim lost", "claim", r.exec.Claim)
		}
		r.e.opts.Observer.ClaimLost(r.exec)
		return nil
	case errors.Is(stopErr, ErrCancelled):
		r.e.completeCancel(ctx, r.exec.ID)
		r.e.log.InfoContext(ctx, "execution cancelled")
		r.e.opts.Observer.ExecutionEnded(r.exec, Cancelled)
		return nil
	case errors.Is(stopErr, ErrChanged), errors.Is(stopErr, errNotRecorded):
		return r.complete(ctx, nil, Failed, Result{}, stopErr)
	case r.callerLeft != nil && r.callerLeft():
		// While this process holds the claim, no other process continues the execution.
		return r.e.cancelInterrupted(ctx, r.exec.ID)
	case errors.Is(stopErr, ErrDraining):
		r.e.releaseClaim(ctx, r)
		return nil
	}
	if ended && !errors.Is(context.Cause(ctx), lanes.ErrLost) {
		r.e.releaseClaim(ctx, r) // the process shuts down
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

// logStart logs the start or resumption of the run. A resumption names the event that ended the wait, because plain SQL
// may have delivered it without a log line.
func (r *run) logStart(ctx context.Context) {
	attrs := []any{"flow", r.exec.Flow, "claim", r.exec.Claim, "checkpoints", len(r.checkpoints)}
	if r.exec.Claim == 1 {
		r.e.log.InfoContext(ctx, "execution started", attrs...)
		return
	}
	if step, out, ok := r.lastWait(); ok {
		attrs = append(attrs, "step", step, "timed_out", out.TimedOut)
		if !out.TimedOut { // after a timeout, Event names an event that has not happened
			attrs = append(attrs, "event", out.Event)
		}
	}
	r.e.log.InfoContext(ctx, "execution resumed", attrs...)
	r.e.log.InfoContext(ctx, "continuing from checkpoint", "checkpoints", len(r.checkpoints))
}

// lastWait returns the outcome of the wait that made the execution ready. Its checkpoint has the claim number before
// this claim.
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

// Logger returns the logger of the engine that runs the execution of ctx. Outside executions it returns a logger that
// discards its records.
func Logger(ctx context.Context) *slog.Logger {
	r, err := runFrom(ctx)
	if err != nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.e.log
}

// Claim returns the id and claim number of the execution of ctx, for SQL functions that act for an execution. Outside
// executions, it returns ErrNotInExecution.
func Claim(ctx context.Context) (id string, claim int64, err error) {
	r, err := runFrom(ctx)
	if err != nil {
		return "", 0, err
	}
	return r.exec.ID, r.exec.Claim, nil
}
