package executions

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// RunSync inserts an execution that this process has claimed already and runs it in the calling goroutine
// until it ends, parks or is lost; then it returns the row as it stands. It is for work somebody waits
// for. When ctx ends first, the execution is cancelled, unless the database does not answer for as long as a lease
// lasts. If the process dies, another resumes it. The start, where this process has claimed it, does not wait for the
// disk: what is committed next makes it durable with itself, a record, the intent of a call, a lane, or the end,
// before which nobody is told anything. If the database crashes before any of these, the execution has never been,
// and RunSync returns ErrNotFound. ErrPaused when the agent is paused and the surface is not an attended one: then
// nothing was inserted.
func (e *Engine) RunSync(ctx context.Context, s Spec) (Execution, error) {
	return e.insertAndRun(ctx, s, e.readOrCancel)
}

// RunDetached is RunSync for work that is worth finishing when the caller has left: when ctx ends, the run is
// handed back and goes on elsewhere.
func (e *Engine) RunDetached(ctx context.Context, s Spec) (Execution, error) {
	return e.insertAndRun(ctx, s, e.readDetached)
}

// insertAndRun reads the row with read where its end is not known.
func (e *Engine) insertAndRun(ctx context.Context, s Spec, read func(ctx context.Context, id string) (Execution, error)) (Execution, error) {
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, err)
	}
	if ctx.Err() != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, context.Cause(ctx))
	}
	// An interrupt must not leave a row of which nobody here knows.
	insertCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.LeaseTTL)
	claimed, created, err := e.insertClaimed(insertCtx, s, worker)
	cancel()
	if err != nil {
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, explainPaused(ctx, e.pool, err))
	}
	if !created {
		return claimed, nil
	}
	var completed *Execution
	if claimed.ClaimedBy != nil {
		completed, err = e.executeSync(ctx, claimed, *claimed.ClaimedBy)
	} else { // this process's lease had ended by then, so it is in the queue: whoever has one runs it
		err = e.ClaimAndRun(ctx, claimed.ID)
	}
	switch {
	case err != nil:
		return Execution{}, fmt.Errorf("run %s: %w", s.Flow, err)
	case completed != nil:
		return *completed, nil
	}
	return explainMissing(read(ctx, claimed.ID))
}

// explainMissing says why an execution that has run here may be gone.
func explainMissing(x Execution, err error) (Execution, error) {
	if errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("what was run is gone, by a crash of the database before its start was on disk, or because it was removed: %w", err)
	}
	return x, err
}

// insertClaimed inserts an execution that this process has claimed, together with others that begin at the same time.
func (e *Engine) insertClaimed(ctx context.Context, s Spec, worker string) (Execution, bool, error) {
	alone := func() (Execution, error) {
		got, _, err := e.insertWithRetry(ctx, s, "running", worker)
		return got, err
	}
	if s.DedupeKey != "" || postgres.IsSealed(ctx) {
		return e.insertWithRetry(ctx, s, "running", worker)
	}
	o, err := s.insertParams(true)
	if err != nil {
		return Execution{}, false, err
	}
	got, err := e.batchers.starts.Do(ctx, o, alone)
	return got, err == nil, err
}

// InsertClaimed inserts, in a transaction of the caller's, an execution that this process has claimed. After
// the commit the caller runs it with RunClaimed, at once: a claim without a run is given to others after
// some seconds. The second return value is false when the dedupe key was taken; then there is nothing to run.
func (e *Engine) InsertClaimed(ctx context.Context, tx pgx.Tx, s Spec) (Execution, bool, error) {
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	claimed, created, err := s.insert(ctx, tx, "running", worker, "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return claimed, created, nil
}

// RunClaimed runs what InsertClaimed inserted, in the calling goroutine, until it ends, parks or is lost, and
// returns the row as it stands. When ctx ends first, the execution is cancelled; a ctx that does not end
// with the caller's connection lets it finish.
func (e *Engine) RunClaimed(ctx context.Context, claimed Execution) (Execution, error) {
	if claimed.ClaimedBy == nil {
		return Execution{}, fmt.Errorf("run %s: execution %s is claimed by nobody", claimed.Flow, claimed.ID)
	}
	completed, err := e.executeSync(ctx, claimed, *claimed.ClaimedBy)
	switch {
	case err != nil:
		return Execution{}, fmt.Errorf("run %s: %w", claimed.Flow, err)
	case completed != nil:
		return *completed, nil
	}
	return explainMissing(e.readOrCancel(ctx, claimed.ID))
}

// readOrCancel reads a row after its run, and cancels what a caller who has left will not see to its end.
func (e *Engine) readOrCancel(ctx context.Context, id string) (Execution, error) {
	if x, err := Get(ctx, e.pool, id); ctx.Err() == nil {
		return x, err
	}
	detached, cancel := e.detachedContext(ctx)
	defer cancel()
	if _, err := e.Cancel(detached, id, "interrupt", "the command was interrupted"); err != nil {
		return Execution{}, err
	}
	return Get(detached, e.pool, id)
}

// readDetached reads a row as its run has left it, also for a caller who has left.
func (e *Engine) readDetached(ctx context.Context, id string) (Execution, error) {
	if x, err := Get(ctx, e.pool, id); ctx.Err() == nil {
		return x, err
	}
	detached, cancel := e.detachedContext(ctx)
	defer cancel()
	return Get(detached, e.pool, id)
}

// detachedContext is for what remains to be done when the caller has left: it lasts as long as a lease, so that a
// database that hangs keeps nobody.
func (e *Engine) detachedContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), e.opts.LeaseTTL)
}

// ClaimAndRun claims an execution if it is ready and runs it in the calling goroutine until it ends, parks or is
// lost. One that is not ready, because it waits, has ended or somebody else was quicker, is left alone and
// no error. When ctx ends first, the run is handed back and goes on elsewhere.
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
		return nil // not ready: somebody else was quicker, or it waits, or it has ended
	case err != nil:
		return fmt.Errorf("claim execution %s: %w", id, err)
	}
	if _, err = e.executeSync(ctx, claimed, worker); errors.Is(err, errClaimTooLow) {
		return e.ClaimAndRun(ctx, id)
	}
	return err
}
