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

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
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

// Poll wakes the workers of both queues. Call it after a commit that made executions ready by a SQL function. It never
// blocks or fails. If too few workers are free, other processes are notified.
func (e *Engine) Poll() {
	for _, pool := range e.pools {
		pool.poll()
	}
}

// notifyReady wakes the workers of a queue for n executions. It notifies other processes if too few workers are free,
// or if this process skips flows.
func (e *Engine) notifyReady(queue string, n int) {
	pool := e.pools[queue]
	if pool == nil {
		return
	}
	pool.poll()
	if !pool.hasFree(n) || len(pool.skippedFlows()) > 0 {
		pool.notifyPeers()
	}
}

// dispatching reports whether this process claims ready executions. Then its own writes need no River job.
func (e *Engine) dispatching() bool {
	for _, pool := range e.pools {
		if !pool.isOpen() {
			return false
		}
	}
	return true
}

// wakeup is a wake-up job to insert into River.
type wakeup struct {
	ID       string
	Wake     int
	Queue    string
	Priority int
}

func (w wakeup) insertOpts() *river.InsertOpts {
	return &river.InsertOpts{Queue: w.Queue, Priority: w.Priority, MaxAttempts: 1}
}

// insertWakeups inserts wake-up jobs in the transaction that made the executions ready.
func (e *Engine) insertWakeups(ctx context.Context, tx pgx.Tx, wakeups []wakeup) error {
	switch len(wakeups) {
	case 0:
		return nil
	case 1:
		w := wakeups[0]
		if _, err := e.river.InsertTx(ctx, tx, wakeArgs{w.ID, w.Wake}, w.insertOpts()); err != nil {
			return fmt.Errorf("wake execution %s: %w", w.ID, err)
		}
		return nil
	}
	jobs := make([]river.InsertManyParams, len(wakeups))
	for i, w := range wakeups {
		jobs[i] = river.InsertManyParams{Args: wakeArgs{w.ID, w.Wake}, InsertOpts: w.insertOpts()}
	}
	if _, err := e.river.InsertManyFastTx(ctx, tx, jobs); err != nil {
		return fmt.Errorf("wake %d executions: %w", len(wakeups), err)
	}
	return nil
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

// WakeTx wakes workers for executions that tx made ready by a SQL function, such as receive_agent_message. It ignores
// ids of executions that are not ready. The sweep finds missed executions within seconds.
func (e *Engine) WakeTx(ctx context.Context, tx pgx.Tx, ids ...string) error {
	if len(ids) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, `
		select x.id::text, x.wake, x.queue, x.priority
		  from agent_executions x
		 where x.id = any(@ids::uuid[]) and x.claimed_by is null and x.status = 'running'
		 order by x.id`,
		postgres.Strict{"ids": ids})
	ready, err := postgres.Collect(rows, err, "read ready executions", pgx.RowToStructByPos[wakeup])
	if err != nil {
		return err
	}
	return e.insertWakeups(ctx, tx, ready)
}

// LockClaim returns the claim number of a live lock of an external worker. Errors: ErrNotFound, ErrVoid with the
// reason.
func (e *Engine) LockClaim(ctx context.Context, id, lockID string) (int64, error) {
	var claim *int64
	err := e.pool.QueryRow(ctx, `
		select (select x.claim from agent_executions x
		         where x.id = @id and x.claim = agent_lock_claim(@id, @lock))`,
		postgres.Strict{"id": id, "lock": lockID}).Scan(&claim)
	if err != nil {
		return 0, fmt.Errorf("read lock of execution %s: %w", id, err)
	}
	if claim == nil {
		return 0, e.rejectVoidLock(ctx, id, lockID, "message", "", nil)
	}
	return *claim, nil
}

// listenLoop receives notifications of cancels, released lanes and ready executions.
func (e *Engine) listenLoop(ctx context.Context) {
	if e.opts.Listener == nil {
		return
	}
	cancels, stop := e.opts.Listener.Subscribe("agent_cancel")
	defer stop()
	laneReleases, stopLaneReleases := e.opts.Listener.Subscribe("agent_lanes")
	defer stopLaneReleases()
	wakeups, stopWakeups := e.opts.Listener.Subscribe("agent_wake") // sent by SQL functions
	defer stopWakeups()
	// sent by a process without free workers, or after an admission slot became free
	ready, stopReady := e.opts.Listener.Subscribe("agent_ready")
	defer stopReady()
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-cancels:
			e.onCancel(ctx, id)
		case payload := <-laneReleases:
			e.onLaneFreed(payload)
		case <-wakeups:
			e.Poll()
		case queue := <-ready:
			e.onReady(queue)
		}
	}
}

// onReady polls the named queue, or both queues if the name is empty.
func (e *Engine) onReady(queue string) {
	if pool := e.pools[queue]; pool != nil {
		pool.poll()
		return
	}
	e.Poll()
}

// onLaneFreed requests a sweep, which ends waits for the free lane. A lane that was handed over to a waiter is not
// free.
func (e *Engine) onLaneFreed(payload string) {
	if !lanes.IsHandover(payload) {
		e.requestSweep()
	}
}

// onCancel stops the named run. An empty name means that notifications may have been missed.
func (e *Engine) onCancel(ctx context.Context, id string) {
	ids := []string{id}
	if id == "" {
		ids = nil
		e.mu.Lock()
		for running := range e.runs {
			ids = append(ids, running)
		}
		e.mu.Unlock()
	}
	for _, running := range ids {
		e.stopIfCancelled(ctx, running)
	}
}

// stopping reports whether the process shuts down.
func (e *Engine) stopping() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.draining
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
