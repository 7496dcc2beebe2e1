package executions

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/lanekeeper/lanekeeper/migrations"
)

// hintsAtOnce is how many hints River hands over together; each takes no time.
const hintsAtOnce = 100

// The queues. Interactive work has workers of its own, because a priority cannot free busy ones.
const (
	Background  = "background"
	Interactive = "interactive"
)

// wakeArgs is a hint to look at an execution. It carries no work: the row is the truth, so a hint may
// come late, twice or never.
type wakeArgs struct {
	ExecutionID string `json:"execution_id"`
	Wake        int    `json:"wake"`
}

// Kind names the job in River's table.
func (wakeArgs) Kind() string { return "execution_wake" }

// tickArgs asks to start what schedules have become due.
type tickArgs struct{}

// Kind names the job in River's table.
func (tickArgs) Kind() string { return "schedule_tick" }

// newRiver makes this process's River client: hints, and the leader's tick.
func newRiver(pool *pgxpool.Pool, e *Engine) (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[wakeArgs]) error {
		e.ready(job.Queue, 1)
		return nil
	}))
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[tickArgs]) error {
		return e.Tick(ctx)
	}))
	poll := 5 * time.Second // only for what a notification was missed for
	if e.opts.PollOnly {
		poll = 500 * time.Millisecond
	}
	client, err := river.NewClient(driver(pool, e.opts.Direct), &river.Config{
		Schema:  migrations.RiverSchema,
		Logger:  quiet(e.log),
		Workers: workers,
		Queues: map[string]river.QueueConfig{
			Background:  {MaxWorkers: hintsAtOnce},
			Interactive: {MaxWorkers: hintsAtOnce},
			"ticks":     {MaxWorkers: 1},
		},
		FetchCooldown:     5 * time.Millisecond,
		FetchPollInterval: poll,
		// The row's claim is what makes a run single, so a tick may take as long as it likes, and a job
		// that River believes stuck may be handed out again.
		JobTimeout:           -1,
		RescueStuckJobsAfter: 24 * time.Hour,
		PollOnly:             e.opts.PollOnly,
		PeriodicJobs: []*river.PeriodicJob{river.NewPeriodicJob(
			river.PeriodicInterval(time.Second),
			func() (river.JobArgs, *river.InsertOpts) {
				if !e.due.passed() {
					return nil, nil
				}
				return tickArgs{}, &river.InsertOpts{Queue: "ticks", MaxAttempts: 1}
			}, nil)},
	})
	if err != nil {
		return nil, fmt.Errorf("make River client: %w", err)
	}
	return client, nil
}

// Look is for who has made executions ready by a function of the database, after the commit: the workers of this
// process, of both queues, look at once. It takes no time and never fails; other processes are told of what is too much for this one.
func (e *Engine) Look() {
	for _, c := range e.crews {
		c.look()
	}
}

// ready says that n executions of a queue may be ready: the workers of this process look at once, and where they are
// too few, other processes are told.
func (e *Engine) ready(queue string, n int) {
	c := e.crews[queue]
	if c == nil {
		return
	}
	c.look()
	if !c.has(n) {
		c.spread()
	}
}

// works reports whether this process claims what is ready, so that it needs no hint in the transaction.
func (e *Engine) works() bool {
	for _, c := range e.crews {
		if !c.isOpen() {
			return false
		}
	}
	return true
}

// hint is one wake-up to insert.
type hint struct {
	ID       string
	Wake     int
	Queue    string
	Priority int
}

func (h hint) options() *river.InsertOpts {
	return &river.InsertOpts{Queue: h.Queue, Priority: h.Priority, MaxAttempts: 1}
}

// sendHints inserts wake-ups in the transaction that made the executions ready.
func (e *Engine) sendHints(ctx context.Context, tx pgx.Tx, hints []hint) error {
	switch len(hints) {
	case 0:
		return nil
	case 1:
		h := hints[0]
		if _, err := e.river.InsertTx(ctx, tx, wakeArgs{h.ID, h.Wake}, h.options()); err != nil {
			return fmt.Errorf("hint execution %s: %w", h.ID, err)
		}
		return nil
	}
	jobs := make([]river.InsertManyParams, len(hints))
	for i, h := range hints {
		jobs[i] = river.InsertManyParams{Args: wakeArgs{h.ID, h.Wake}, InsertOpts: h.options()}
	}
	if _, err := e.river.InsertManyFastTx(ctx, tx, jobs); err != nil {
		return fmt.Errorf("hint %d executions: %w", len(hints), err)
	}
	return nil
}
