package executions

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// RunSync inserts an execution with a claim of this process. It runs the execution in the calling goroutine until it
// ends, waits or is lost, and returns the row. RunSync is for callers that wait for the result. If the dedupe key
// exists, RunSync returns that execution at once, in any status. When ctx ends first, RunSync cancels the execution,
// unless the database is unavailable for longer than a lease. If the process dies, another process resumes the
// execution.
//
// The insert may not wait for the disk. The next commit of the run makes it durable: a checkpoint, a call's intent, an
// acquired lane or the completion. The caller gets no result before that commit. If the server crashes before it, the
// execution never existed and RunSync returns ErrNotFound. While the agent is paused and the surface is not attended,
// RunSync inserts no execution and returns ErrPaused.
func (e *Engine) RunSync(ctx context.Context, s Spec) (Execution, error) {
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, err)
	}
	if ctx.Err() != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, context.Cause(ctx))
	}
	// An interrupt must not leave a row that no process runs.
	insertCtx, cancel := e.detachedContext(ctx)
	inserted, created, err := e.insertClaimed(insertCtx, s, worker)
	cancel()
	if err != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, explainPaused(ctx, e.pool, err))
	}
	if !created {
		return inserted, nil
	}
	if inserted.ClaimedBy != nil {
		return e.RunClaimed(ctx, &inserted)
	}
	// The lease of this process ended meanwhile, so the insert queued the execution.
	if err := e.ClaimAndRun(ctx, inserted.ID); err != nil && ctx.Err() == nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, err)
	}
	return explainMissing(e.readOrCancel(ctx, inserted.ID))
}

// explainMissing explains why an execution that ran here does not exist.
func explainMissing(x Execution, err error) (Execution, error) {
	if errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("the execution is gone: a database crash lost its start, or somebody removed it: %w", err)
	}
	return x, err
}

// insertClaimed inserts an execution with a claim of this process, in a batch with concurrent starts.
func (e *Engine) insertClaimed(
	ctx context.Context, s Spec, worker string,
) (x Execution, created bool, err error) {
	insertAlone := func() (Execution, error) {
		x, _, err := e.insertWithRetry(ctx, s, "running", worker)
		return x, err
	}
	if s.DedupeKey != "" || postgres.IsSealed(ctx) || activity.HasActor(ctx) {
		return e.insertWithRetry(ctx, s, "running", worker)
	}
	params, err := s.insertParams(true)
	if err != nil {
		return Execution{}, false, err
	}
	x, err = e.batchers.starts.Do(ctx, params, insertAlone)
	return x, err == nil, err
}

// InsertClaimed inserts an execution with a claim of this process, in the caller's transaction. Call RunClaimed right
// after the commit: other processes can claim an execution without a run after some seconds. created is false if the
// dedupe key exists; then the caller has nothing to run.
func (e *Engine) InsertClaimed(ctx context.Context, tx pgx.Tx, s Spec) (claimed Execution, created bool, err error) {
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	claimed, created, err = s.insert(ctx, tx, "running", worker, "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return claimed, created, nil
}

// RunClaimed runs an inserted execution in the calling goroutine until it ends, waits or is lost, and returns the row.
// When ctx ends first, RunClaimed cancels the execution. To let the execution finish, pass a ctx that outlives the
// caller's connection.
func (e *Engine) RunClaimed(ctx context.Context, claimed *Execution) (Execution, error) {
	if claimed.ClaimedBy == nil {
		return Execution{}, fmt.Errorf("run %s: execution %s has no claim; insert it with InsertClaimed",
			claimed.Flow, claimed.ID)
	}
	completed, err := e.executeSync(ctx, claimed, *claimed.ClaimedBy, true)
	switch {
	case err != nil && ctx.Err() == nil:
		return Execution{}, fmt.Errorf("run %s: %w", claimed.Flow, err)
	case completed != nil:
		return *completed, nil
	}
	return explainMissing(e.readOrCancel(ctx, claimed.ID))
}

// readOrCancel reads the row after its run. If the caller has left, readOrCancel cancels the execution first.
func (e *Engine) readOrCancel(ctx context.Context, id string) (Execution, error) {
	if ctx.Err() == nil {
		if x, err := Get(ctx, e.pool, id); ctx.Err() == nil { // ctx may end during the query
			return x, err
		}
	}
	if err := e.cancelInterrupted(ctx, id); err != nil {
		return Execution{}, err
	}
	detached, cancel := e.detachedContext(ctx)
	defer cancel()
	return Get(detached, e.pool, id)
}

// cancelInterrupted cancels an execution whose caller has left.
func (e *Engine) cancelInterrupted(ctx context.Context, id string) error {
	ctx, cancel := e.detachedContext(ctx)
	defer cancel()
	_, err := e.Cancel(ctx, id, "interrupt", "the caller left")
	return err
}

// detachedContext returns a context without ctx's cancellation that ends after one lease. So an unresponsive database
// does not block the caller for longer.
func (e *Engine) detachedContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), e.opts.LeaseTTL)
}

// ClaimAndRun claims a ready execution and runs it in the calling goroutine until it ends, waits or is lost. It returns
// nil for an execution that is not ready. When ctx ends first, ClaimAndRun releases the run, and another process
// continues the execution.
func (e *Engine) ClaimAndRun(ctx context.Context, id string) error {
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return err
	}
	rows, err := e.pool.Query(ctx, `select `+columns+` from lanekeeper.claim_agent_execution(@id, @worker)`,
		postgres.Strict{"id": id, "worker": worker})
	if err != nil {
		return fmt.Errorf("claim execution %s: %w", id, err)
	}
	claimed, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil // not ready: claimed elsewhere, waiting or ended
	case err != nil:
		return fmt.Errorf("claim execution %s: %w", id, err)
	}
	if _, err = e.executeSync(ctx, &claimed, worker, false); errors.Is(err, errClaimTooLow) {
		return e.ClaimAndRun(ctx, id) // see errClaimTooLow
	}
	return err
}
