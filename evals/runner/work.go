package runner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// pollInterval is the pause between polls of a trial that another process runs.
const pollInterval = 500 * time.Millisecond

// maxBackoff is the longest pause while the database is unavailable, before its random part.
const maxBackoff = 5 * time.Second

// errTimeout is the cause that ends the work on a run after its timeout.
var errTimeout = errors.New("the time of the run is over")

// Work plays the trials of a run that have no verdict, at most concurrent at once, and then ends the run. After the
// run's time, the remaining trials are undecided. Until then it waits for an unavailable database. Any process with the
// same Setup may call Work again for a run whose process died; another gets [ErrOtherSetup]. Work calls onTrial with
// trials that it played, possibly concurrently.
//
// Work first plays the control of a run. If the control does not follow its recorded turns, Work does not play the
// run's own trials, and they are undecided.
func (r *Runner) Work(ctx context.Context, run evals.Run, concurrent int, onTrial func(evals.Trial)) error {
	subject, err := evals.ReadSubject(ctx, r.Pool, run)
	if err != nil {
		return err
	}
	if run.Model == "" {
		if run, subject, err = r.completeRun(ctx, run, subject); err != nil {
			return err
		}
	}
	if subject.Setup != r.Setup {
		return fmt.Errorf("play run %s: %w", run.ID, ErrOtherSetup)
	}
	if run.Kind == evals.OfShadow {
		return r.workShadow(ctx, run, onTrial)
	}
	remaining, err := r.remainingTime(ctx, run, subject.Suite.Definition)
	if err != nil {
		return err
	}
	limited, stop := context.WithTimeoutCause(ctx, max(remaining, 0), errTimeout)
	defer stop()
	backoff := postgres.Backoff{First: pollInterval, Max: maxBackoff}
	for {
		err := r.workUntil(ctx, limited, run, subject, concurrent, onTrial)
		if err == nil || limited.Err() != nil || !postgres.Transient(err) {
			return err
		}
		r.Logger.WarnContext(ctx, "database unavailable, the run continues later", "run", run.ID, "error", err)
		backoff.Wait(limited)
	}
}

// workUntil plays the open trials of a run until limited ends, and then ends the run.
func (r *Runner) workUntil(
	ctx, limited context.Context, run evals.Run, subject evals.Subject, concurrent int, onTrial func(evals.Trial),
) error {
	if run.ControlID != "" {
		reason, err := r.workControl(limited, run, concurrent, onTrial)
		switch timedOut := errors.Is(context.Cause(limited), errTimeout); {
		case err != nil && !timedOut:
			return err
		case err == nil && reason != "":
			return r.finishRun(ctx, run, errors.New(reason))
		}
	}
	trials, err := evals.BriefTrials(ctx, r.Pool, run.ID, "")
	if err != nil {
		return err
	}
	err = r.calibrateJudges(limited, run, subject, concurrent)
	if err != nil && !errors.Is(context.Cause(limited), errTimeout) {
		return err
	}
	err = r.playAll(limited, run, trials, concurrent, onTrial)
	if err != nil && !errors.Is(context.Cause(limited), errTimeout) {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if limited.Err() != nil {
		return r.finishRun(ctx, run, errTimeout)
	}
	return r.finishRun(ctx, run, nil)
}

// playAll plays the trials that have no verdict, until ctx ends.
func (r *Runner) playAll(ctx context.Context, run evals.Run, trials []evals.Trial, concurrent int,
	onTrial func(evals.Trial),
) error {
	var group errgroup.Group
	group.SetLimit(max(concurrent, 1))
	for _, t := range trials {
		if t.Verdict != "" || ctx.Err() != nil {
			continue
		}
		group.Go(func() error {
			verdict, err := r.playTrial(ctx, run, t)
			if err == nil {
				onTrial(verdict)
			}
			return err
		})
	}
	return group.Wait()
}

// playTrial starts the execution of a trial, runs it unless another process does, and waits for the verdict.
func (r *Runner) playTrial(ctx context.Context, run evals.Run, t evals.Trial) (evals.Trial, error) {
	x, _, err := r.Engine.Start(ctx, r.Pool, r.spec(run, t))
	if err != nil {
		return t, err
	}
	decided := t
	err = r.runUntil(ctx, x.ID, func() (done bool, err error) {
		decided, err = r.readVerdict(ctx, run, t, x.ID)
		return decided.Verdict != "", err
	})
	return decided, err
}

// runUntil runs an execution unless another process does, and polls until isDone returns true. If ctx ends, it returns
// the cause.
func (r *Runner) runUntil(ctx context.Context, id string, isDone func() (bool, error)) error {
	for {
		if err := r.Engine.ClaimAndRun(ctx, id); err != nil {
			return err
		}
		if done, err := isDone(); done || err != nil {
			return err
		}
		if err := r.Engine.Sweep(ctx); err != nil { // releases the claims of dead processes
			return err
		}
		if !sleep.For(ctx, pollInterval) {
			return context.Cause(ctx)
		}
	}
}

// readVerdict reads the verdict of a trial. If the execution ended without a verdict, the verdict is an error.
func (r *Runner) readVerdict(ctx context.Context, run evals.Run, t evals.Trial, id string) (evals.Trial, error) {
	x, err := executions.Get(ctx, r.Pool, id)
	if err != nil {
		return t, err
	}
	if x.CompletedAt != nil && x.Status != executions.Completed {
		why := "its execution ended " + string(x.Status)
		if x.ErrorMessage != nil {
			why += ": " + *x.ErrorMessage
		}
		t.TraceID, t.Verdict, t.Reasons, t.Calls = x.TraceID, evals.Error, []string{why}, []byte(`[]`)
		if err := storeVerdict(ctx, r.Pool, run.ID, t); err != nil {
			return t, err
		}
	}
	return evals.GetTrial(ctx, r.Pool, run.ID, t.Case, t.Trial)
}

// finishRun ends a run. cause is the reason for trials without a verdict, or nil. Such trials become undecided, and
// their executions are cancelled. With a cause other than errTimeout, a run never passes.
func (r *Runner) finishRun(ctx context.Context, run evals.Run, cause error) error {
	if cause != nil {
		if err := r.cancelUndecided(ctx, run, cause); err != nil {
			return err
		}
	}
	abandoned := cause != nil && !errors.Is(cause, errTimeout)
	err := postgres.InTx(ctx, r.Pool, func(tx pgx.Tx) error {
		var status string
		err := tx.QueryRow(ctx, `
			update agent_eval_runs r
			   set finished_at = clock_timestamp(),
			       status = (select case when bool_or(t.verdict in ('fail', 'diverged', 'error')) then 'failed'
			                             when @abandoned::bool or bool_or(t.verdict = 'undecided' or t.verdict is null)
			                             then 'undecided'
			                             else 'passed' end
			                   from agent_eval_trials t where t.run_id = r.id)
			 where id = @id and finished_at is null
			returning status`, postgres.Strict{"id": run.ID, "abandoned": abandoned}).Scan(&status)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil || !run.Background {
			return err
		}
		return r.recordEnd(ctx, tx, run, status)
	})
	if err != nil {
		return fmt.Errorf("decide run %s: %w", run.ID, err)
	}
	return nil
}

// cancelUndecided cancels the executions of the trials without a verdict, and marks the trials as undecided.
func (r *Runner) cancelUndecided(ctx context.Context, run evals.Run, cause error) error {
	trials, err := evals.BriefTrials(ctx, r.Pool, run.ID, "")
	if err != nil {
		return err
	}
	for _, t := range trials {
		if t.Verdict != "" {
			continue
		}
		var id *string
		err := r.Pool.QueryRow(ctx, `select max(id::text) from agent_executions where dedupe_key = @key`,
			postgres.Strict{"key": r.spec(run, t).DedupeKey}).Scan(&id)
		if err == nil && id != nil {
			_, err = r.Engine.Cancel(ctx, *id, "eval", cause.Error())
		}
		if err != nil {
			return fmt.Errorf("cancel trial %d of %s: %w", t.Trial, t.Case, err)
		}
		t.Verdict, t.Reasons, t.Calls = evals.UndecidedTrial, []string{cause.Error()}, []byte(`[]`)
		if err := storeVerdict(ctx, r.Pool, run.ID, t); err != nil {
			return err
		}
	}
	return nil
}
