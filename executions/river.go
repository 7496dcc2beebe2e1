package executions

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/lanekeeper/lanekeeper/migrations"
)

// maxWakeJobs bounds the wake-up jobs that River works concurrently. Each job only wakes a worker pool.
const maxWakeJobs = 100

// Queues. Interactive work has its own workers, because a priority cannot free busy workers.
const (
	Background  = "background"
	Interactive = "interactive"
)

// wakeArgs are the arguments of a job that wakes workers for an execution. Workers claim by the row, so the job may run
// late, twice or never.
type wakeArgs struct {
	ExecutionID string `json:"execution_id"`
	Wake        int    `json:"wake"`
}

// Kind names the job in River's table.
func (wakeArgs) Kind() string { return "execution_wake" }

// tickArgs are the arguments of the job that starts due schedules.
type tickArgs struct{}

// Kind names the job in River's table.
func (tickArgs) Kind() string { return "schedule_tick" }

// newRiverClient creates the River client of this process. It processes wake-up jobs and, on the leader, the tick.
func newRiverClient(pool *pgxpool.Pool, e *Engine) (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[wakeArgs]) error {
		e.notifyReady(job.Queue, 1)
		return nil
	}))
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[tickArgs]) error {
		return e.Tick(ctx)
	}))
	poll := 5 * time.Second // only for missed notifications
	if e.opts.PollOnly {
		poll = 500 * time.Millisecond
	}
	client, err := river.NewClient(riverDriver(pool, e.opts.Direct), &river.Config{
		Schema:  migrations.RiverSchema,
		Logger:  slog.New(&levelHandler{e.log.Handler(), slog.LevelWarn}),
		Workers: workers,
		Queues: map[string]river.QueueConfig{
			Background:  {MaxWorkers: maxWakeJobs},
			Interactive: {MaxWorkers: maxWakeJobs},
			"ticks":     {MaxWorkers: 1},
		},
		FetchCooldown:     5 * time.Millisecond,
		FetchPollInterval: poll,
		// Claims on rows make runs exclusive, so jobs need no timeout and River may rescue any job.
		JobTimeout:           -1,
		RescueStuckJobsAfter: 24 * time.Hour,
		PollOnly:             e.opts.PollOnly,
		PeriodicJobs: []*river.PeriodicJob{river.NewPeriodicJob(
			river.PeriodicInterval(time.Second),
			func() (river.JobArgs, *river.InsertOpts) {
				if !e.nextDue.scheduleDue(0) {
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

// riverDriver returns a driver that queries through pool and listens through direct, or through pool if direct is nil.
func riverDriver(pool, direct *pgxpool.Pool) riverdriver.Driver[pgx.Tx] {
	if direct == nil {
		return riverpgxv5.New(pool)
	}
	return &splitDriver{riverpgxv5.New(pool), riverpgxv5.New(direct)}
}

// splitDriver sends queries over its own pool and listens over the pool of direct.
type splitDriver struct {
	*riverpgxv5.Driver

	direct *riverpgxv5.Driver
}

// GetListener listens over the direct pool, because a pooler has no sessions.
func (d *splitDriver) GetListener(params *riverdriver.GetListenenerParams) riverdriver.Listener {
	return d.direct.GetListener(params)
}

// levelHandler drops records below a level.
type levelHandler struct {
	slog.Handler
	level slog.Level
}

func (h *levelHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.level && h.Handler.Enabled(ctx, l)
}

func (h *levelHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &levelHandler{h.Handler.WithAttrs(attrs), h.level}
}

func (h *levelHandler) WithGroup(name string) slog.Handler {
	return &levelHandler{h.Handler.WithGroup(name), h.level}
}
