package runner

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// servePoll is the pause between polls for a run to play.
	servePoll = 2 * time.Second
	// serveTTL is the lifetime of a claim without a renewal.
	serveTTL = 15 * time.Second
	// serveRuns bounds the runs that a process plays at once, and serveTrials the trials of each.
	serveRuns, serveTrials = 4, 8
	// serveShadows bounds the shadows among these runs, because a shadow keeps its slot for its whole time.
	serveShadows = 2
	// interruptedTTL is the time after which servers end an interrupted run, and interruptedPoll the pause between polls
	// for such runs.
	interruptedTTL, interruptedPoll = 7 * 24 * time.Hour, time.Hour
	// expiryGrace is the time after its deadline in which a failing run is tried again.
	expiryGrace = time.Minute
)

// errClaimLost reports a claim that another server has taken over, or a run that has ended.
var errClaimLost = errors.New("the claim of the run was lost")

// claim is the right of this process to play a run. Until identifies the claim, because each claim and each renewal
// sets another time.
type claim struct {
	ID    string
	Lasts bool // a shadow that has not ended
	Until time.Time
}

// Serve plays the runs that were started with Options.Background, until ctx ends. A process plays a run while it renews
// its claim. If the process dies, the claim expires and another process claims the run. A run that cannot be played
// ends as undecided, or as failed if one of its trials failed. So does an interrupted run after interruptedTTL, because
// retention keeps unfinished runs with the texts of their turns.
func (r *Runner) Serve(ctx context.Context) error {
	var playing sync.WaitGroup
	defer playing.Wait()
	slots, shadows := make(chan struct{}, serveRuns), make(chan struct{}, serveShadows)
	var failures logging.Failures
	tick := time.NewTicker(servePoll)
	defer tick.Stop()
	var polled time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case slots <- struct{}{}:
		}
		if time.Since(polled) > interruptedPoll {
			polled = time.Now()
			if err := r.expireInterrupted(ctx); err != nil && ctx.Err() == nil {
				r.Logger.WarnContext(ctx, "interrupted runs of evals not ended, trying again in an hour", "error", err)
			}
		}
		c, err := r.claimRun(ctx, len(shadows) < serveShadows)
		failures.Log(ctx, r.Logger, "runs of evals not read, trying again", err)
		if err == nil && c.ID != "" {
			slot := make(chan struct{}, 1)
			if c.Lasts {
				slot = shadows
			}
			slot <- struct{}{}
			playing.Go(func() {
				defer func() { <-slot; <-slots }()
				r.serve(ctx, c)
			})
			continue
		}
		<-slots
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// expireInterrupted leaves interrupted runs to servers after interruptedTTL. Their time is over, so a server ends them.
// A run with a control ends its control.
func (r *Runner) expireInterrupted(ctx context.Context) error {
	_, err := r.Pool.Exec(ctx, `
		update agent_eval_runs
		   set served_until = clock_timestamp(), began_at = coalesce(began_at, created_at)
		 where status = 'running' and served_until is null and (kind = 'suite' or control_id is not null)
		   and greatest(began_at, created_at) < clock_timestamp() - @ttl::interval`,
		postgres.Strict{"ttl": interruptedTTL})
	if err != nil {
		return fmt.Errorf("find interrupted runs: %w", err)
	}
	return nil
}

// claimRun claims a run that no server plays, or returns an empty claim. It claims a shadow that has not ended only if
// shadows is set.
func (r *Runner) claimRun(ctx context.Context, shadows bool) (claim, error) {
	rows, err := r.Pool.Query(ctx, `
		with free as (
		  select r.id, x.lasts
		    from agent_eval_runs r
		   cross join lateral (
		         select r.kind = 'shadow' and not exists (
		                  select from agent_eval_shadows s
		                   where s.run_id = r.id and (s.stopped_at is not null or s.until <= clock_timestamp())) as lasts) x
		   where r.status = 'running' and r.served_until < statement_timestamp() and (@shadows or not x.lasts)
		   order by r.served_until limit 1 for update of r skip locked)
		update agent_eval_runs r set served_until = clock_timestamp() + @ttl::interval
		  from free f where r.id = f.id
		returning r.id::text, f.lasts, r.served_until`, postgres.Strict{"ttl": serveTTL, "shadows": shadows})
	claims, err := postgres.Collect(rows, err, "claim a run of an eval", pgx.RowToStructByPos[claim])
	if err != nil || len(claims) == 0 {
		return claim{}, err
	}
	return claims[0], nil
}

// serve plays a claimed run, and renews the claim meanwhile.
func (r *Runner) serve(ctx context.Context, c claim) {
	work, stop := context.WithCancelCause(ctx)
	var renewal sync.WaitGroup
	renewal.Go(func() { r.renew(work, &c, stop) })
	run, err := evals.GetRun(work, r.Pool, c.ID)
	if err == nil {
		err = r.Work(work, run, serveTrials, func(evals.Trial) {})
	}
	stop(nil)
	renewal.Wait()
	switch {
	case errors.Is(context.Cause(work), errClaimLost):
		if err != nil {
			r.Logger.InfoContext(ctx, "claim of a run lost, leaving it to its owner", "run", c.ID)
		}
		return
	case ctx.Err() != nil: // release the claim, so that another server continues at once
		err = r.extendClaim(context.WithoutCancel(ctx), &c, 0)
		if errors.Is(err, errClaimLost) {
			return
		}
	case err != nil:
		var ended bool
		if ended, err = r.abandon(ctx, run, err); ended {
			return
		}
	}
	if err != nil {
		r.Logger.WarnContext(ctx, "run of an eval not played, trying again", "run", c.ID, "error", err)
	}
}

// abandon ends a run that cannot be played: at once for a permanent error, after its deadline for another error. If the
// run continues, abandon returns cause, joined with its own error.
func (r *Runner) abandon(ctx context.Context, run evals.Run, cause error) (ended bool, err error) {
	if run.ID == "" {
		return false, cause
	}
	if !errors.Is(cause, agents.ErrNotFound) && !errors.Is(cause, evals.ErrNotFound) && !errors.Is(cause, ErrUnpriced) {
		if expired, err := r.expired(ctx, run); err != nil || !expired {
			return false, cause
		}
	}
	runs := []evals.Run{run}
	if run.ControlID != "" {
		control, err := evals.GetRun(ctx, r.Pool, run.ControlID)
		if err != nil {
			return false, errors.Join(cause, err)
		}
		runs = []evals.Run{control, run}
	}
	for _, one := range runs {
		if err := r.finishRun(ctx, one, cause); err != nil {
			return false, errors.Join(cause, err)
		}
	}
	r.Logger.WarnContext(ctx, "run of an eval cannot be played, ended", "run", run.ID, "error", cause)
	return true, nil
}

// expired reports whether the deadline of a run and expiryGrace have passed. A run whose suite cannot be read expires
// after longestTurn.
func (r *Runner) expired(ctx context.Context, run evals.Run) (passed bool, err error) {
	timeout := longestTurn
	if subject, err := evals.ReadSubject(ctx, r.Pool, run); err == nil {
		timeout = subject.Suite.Definition.Timeout()
	}
	err = r.Pool.QueryRow(ctx, `
		select coalesce(least(s.until, s.stopped_at), coalesce(r.began_at, r.created_at) + @timeout::interval)
		       + @grace::interval < clock_timestamp()
		  from agent_eval_runs r
		  left join agent_eval_shadows s on s.run_id = r.id
		 where r.id = @id`,
		postgres.Strict{"id": run.ID, "timeout": timeout, "grace": expiryGrace}).Scan(&passed)
	if err != nil {
		return false, fmt.Errorf("read the deadline of run %s: %w", run.ID, err)
	}
	return passed, nil
}

// renew renews the claim until ctx ends. It calls stop if the claim is lost.
func (r *Runner) renew(ctx context.Context, c *claim, stop context.CancelCauseFunc) {
	tick := time.NewTicker(serveTTL / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// A cancelled update could succeed in the database without a new value of c.Until.
		limited, done := context.WithTimeout(context.WithoutCancel(ctx), serveTTL/3)
		err := r.extendClaim(limited, c, serveTTL)
		done()
		switch {
		case errors.Is(err, errClaimLost):
			stop(err)
			return
		case err != nil && ctx.Err() == nil:
			r.Logger.WarnContext(ctx, "claim of a run not renewed, trying again", "run", c.ID, "error", err)
		}
	}
}

// extendClaim sets the end of the claim to now plus ttl, or returns errClaimLost.
func (r *Runner) extendClaim(ctx context.Context, c *claim, ttl time.Duration) error {
	err := r.Pool.QueryRow(ctx, `
		update agent_eval_runs set served_until = clock_timestamp() + @ttl::interval
		 where id = @id and status = 'running' and served_until = @until
		returning served_until`, postgres.Strict{"ttl": ttl, "id": c.ID, "until": c.Until}).Scan(&c.Until)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errClaimLost
	}
	if err != nil {
		return fmt.Errorf("extend claim of run %s: %w", c.ID, err)
	}
	return nil
}
