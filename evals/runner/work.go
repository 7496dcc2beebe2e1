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

// errTimeout ends the work on a run whose time has passed.
var errTimeout = errors.New("the time of the run is over")

// Work plays the undecided trials of a run, at most concurrent ones at once, and then decides the run. It may be called
// again, by any process, for a run whose process died. onTrial receives decided trials; it may be called concurrently.
//
// It plays the control of a run first. If the control does not follow its recorded turns, the trials of the run are
// undecided without being played.
func (r *Runner) Work(ctx context.Context, run evals.Run, concurrent int, onTrial func(evals.Trial)) error {
	subject, err := evals.SubjectOf(ctx, r.Pool, run)
	if err != nil {
		return err
	}
	if run.Model == "" {
		if run, subject, err = r.prepare(ctx, run, subject); err != nil {
			return err
		}
	}
	if subject.Setup != r.Setup {
		return fmt.Errorf("play run %s: %w", run.ID, ErrElsewhere)
	}
	if run.Kind == evals.OfShadow {
		return r.workShadow(ctx, run, onTrial)
	}
	left, err := r.begin(ctx, run, subject.Suite.Definition)
	if err != nil {
		return err
	}
	limited, stop := context.WithTimeoutCause(ctx, max(left, 0), errTimeout)
	defer stop()
	if run.ControlID != "" {
		obstacle, err := r.workControl(limited, run, concurrent, onTrial)
		switch timedOut := errors.Is(context.Cause(limited), errTimeout); {
		case err != nil && !timedOut:
			return err
		case err == nil && obstacle != "":
			return r.skip(ctx, run, obstacle)
		}
	}
	trials, err := evals.BriefTrials(ctx, r.Pool, run.ID, "")
	if err != nil {
		return err
	}
	err = r.calibrate(limited, run, subject, concurrent)
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
		return r.decide(ctx, run, errTimeout)
	}
	return r.decide(ctx, run, nil)
}

// playAll plays the undecided of some trials, until ctx ends.
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
			decided, err := r.await(ctx, run, t)
			if err == nil {
				onTrial(decided)
			}
			return err
		})
	}
	return group.Wait()
}

// await starts a trial, runs it here if no other process does, and waits for its verdict.
func (r *Runner) await(ctx context.Context, run evals.Run, t evals.Trial) (evals.Trial, error) {
	x, _, err := r.Engine.Start(ctx, r.Pool, r.spec(run, t))
	if err != nil {
		return t, err
	}
	decided := t
	err = r.follow(ctx, x.ID, func() (over bool, err error) {
		decided, err = r.decided(ctx, run, t, x.ID)
		return decided.Verdict != "", err
	})
	return decided, err
}

// follow runs an execution here if no other process does, until it is over.
func (r *Runner) follow(ctx context.Context, id string, over func() (bool, error)) error {
	for {
		if err := r.Engine.ClaimAndRun(ctx, id); err != nil {
			return err
		}
		if done, err := over(); done || err != nil {
			return err
		}
		if err := r.Engine.Sweep(ctx); err != nil { // frees the claims of processes that died
			return err
		}
		if !sleep.For(ctx, pollInterval) {
			return context.Cause(ctx)
		}
	}
}

// decided reads the verdict of a trial. An execution that ended without one is an error of the trial.
func (r *Runner) decided(ctx context.Context, run evals.Run, t evals.Trial, id string) (evals.Trial, error) {
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
		if err := store(ctx, r.Pool, run.ID, t); err != nil {
			return t, err
		}
	}
	return evals.GetTrial(ctx, r.Pool, run.ID, t.Case, t.Trial)
}

// decide ends a run. cause is the reason for open trials; nil if there are none. A trial without a verdict is
// undecided, and its execution is cancelled. A run never passes with a cause other than errTimeout.
func (r *Runner) decide(ctx context.Context, run evals.Run, cause error) error {
	if cause != nil {
		if err := r.cancelOpen(ctx, run, cause); err != nil {
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
		return r.noteEnd(ctx, tx, run, status)
	})
	if err != nil {
		return fmt.Errorf("decide run %s: %w", run.ID, err)
	}
	return nil
}

// cancelOpen cancels the executions of the open trials, and decides these.
func (r *Runner) cancelOpen(ctx context.Context, run evals.Run, cause error) error {
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
		if err := store(ctx, r.Pool, run.ID, t); err != nil {
			return err
		}
	}
	return nil
}
