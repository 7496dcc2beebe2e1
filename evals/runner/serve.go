package runner

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// servePoll is the pause between polls for a run to play.
	servePoll = 2 * time.Second
	// serveTTL is the lifetime of a claim without a renewal.
	serveTTL = 15 * time.Second
	// serveRuns bounds the runs that a process plays at once, and serveTrials the trials of each.
	serveRuns, serveTrials = 4, 8
)

// Serve plays the runs that were started with Options.Background, until ctx ends. One process at a time plays a run. If
// it dies, another one claims the run.
func (r *Runner) Serve(ctx context.Context) error {
	var playing sync.WaitGroup
	defer playing.Wait()
	slots := make(chan struct{}, serveRuns)
	tick := time.NewTicker(servePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case slots <- struct{}{}:
		}
		run, err := r.claimRun(ctx)
		if err != nil && ctx.Err() == nil {
			r.Logger.WarnContext(ctx, "runs of evals not read, trying again", "error", err)
		}
		if err == nil && run != "" {
			playing.Go(func() {
				defer func() { <-slots }()
				r.serve(ctx, run)
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

// claimRun claims a run that no server plays; empty for none.
func (r *Runner) claimRun(ctx context.Context) (string, error) {
	rows, err := r.Pool.Query(ctx, `
		update agent_eval_runs set served_until = clock_timestamp() + @ttl::interval
		 where id = (select id from agent_eval_runs where status = 'running' and served_until < statement_timestamp()
		              order by served_until limit 1 for update skip locked)
		returning id::text`, postgres.Strict{"ttl": serveTTL})
	ids, err := postgres.Collect(rows, err, "claim a run of an eval", pgx.RowTo[string])
	if err != nil || len(ids) == 0 {
		return "", err
	}
	return ids[0], nil
}

// serve plays a claimed run, and renews the claim meanwhile.
func (r *Runner) serve(ctx context.Context, id string) {
	work, stop := context.WithCancel(ctx)
	var renewal sync.WaitGroup
	defer renewal.Wait()
	defer stop()
	renewal.Go(func() { r.renew(work, id) })
	run, err := evals.GetRun(work, r.Pool, id)
	if err == nil {
		err = r.Work(work, run, serveTrials, func(evals.Trial) {})
	}
	switch {
	case ctx.Err() != nil: // another server goes on at once
		err = r.hold(context.WithoutCancel(ctx), id, 0)
		if err == nil {
			return
		}
		fallthrough
	case err != nil:
		r.Logger.WarnContext(ctx, "run of an eval not played, trying again", "run", id, "error", err)
	}
}

// renew renews the claim until ctx ends.
func (r *Runner) renew(ctx context.Context, id string) {
	tick := time.NewTicker(serveTTL / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := r.hold(ctx, id, serveTTL); err != nil && ctx.Err() == nil {
			r.Logger.WarnContext(ctx, "claim of a run not renewed, trying again", "run", id, "error", err)
		}
	}
}

// hold claims a run for a time from now.
func (r *Runner) hold(ctx context.Context, id string, ttl time.Duration) error {
	_, err := r.Pool.Exec(ctx, `
		update agent_eval_runs set served_until = clock_timestamp() + @ttl::interval where id = @id and status = 'running'`,
		postgres.Strict{"ttl": ttl, "id": id})
	if err != nil {
		return fmt.Errorf("hold run %s: %w", id, err)
	}
	return nil
}
