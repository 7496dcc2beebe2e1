package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// Func is a durable function. Each claim calls it from the beginning. Its context ends when the run stops: by a wait, a
// cancel, a pause, a lost claim, or a shutdown that takes longer than StopTimeout.
type Func func(ctx context.Context, input json.RawMessage) (Result, error)

// Result is the result of a durable function: a summary for people and a value for programs.
type Result struct {
	Summary string
	Value   any
}

// Options configure an Engine. Zero values are the defaults, except of Keeper.
type Options struct {
	Keeper   *lanes.Keeper      // required
	Listener *postgres.Listener // replaces polling by notifications; may be nil
	Logger   *slog.Logger
	Workers  int // executions per queue that the engine runs at once, besides those of RunSync; default 16
	// LeaseTTL is the lifetime of a worker's lease without renewal; default 30 s, in whole seconds, at most a day.
	// The engine renews it three times per TTL.
	LeaseTTL time.Duration
	// SweepEvery is the interval between sweeps for lost claims and notifications; default 5 s, at least 100 ms.
	SweepEvery time.Duration
	// StopTimeout bounds the time for running steps to finish during a shutdown; default 20 s.
	StopTimeout time.Duration
	// PollOnly runs River without LISTEN. The engine sets it behind a pooler if Direct is nil.
	PollOnly bool
	Direct   *pgxpool.Pool // connects to the server without the pooler, for LISTEN; may be nil
	// Lease is a pool for renewals of the worker's lease, so executions cannot use up its connections; may be nil.
	Lease    *pgxpool.Pool
	Observer Observer // may be nil
}

// Engine runs the executions of one process. Call Register, Fallback and Unforkable before Run, from one goroutine. All
// other methods are safe for concurrent use, also without Run.
type Engine struct {
	pool    *pgxpool.Pool
	opts    Options
	log     *slog.Logger
	river   *river.Client[pgx.Tx]
	keeper  *lanes.Keeper
	flowsMu sync.RWMutex
	flows   map[string]Func
	// fallback finds flows that are not in flows; may be nil.
	fallback   func(ctx context.Context, flow string) (Func, error)
	unforkable map[string]string // reason by flow
	// unknownFlows has the names of flows that a warning has reported as unknown in this process.
	unknownFlows sync.Map

	running       atomic.Bool
	registerMu    sync.Mutex // held during the registration of a lease, so the process registers one at a time
	mu            sync.Mutex
	lease         *workerLease
	runs          map[string]*run
	draining      bool
	sweepRequests chan struct{} // wakes the sweeper
	timerChanged  chan struct{} // wakes the sweeper to compute its pause again
	pools         map[string]*workerPool
	nextDue       dueTimes
	stuckLimiter  stuckWarnings
	batchers      batchers
	statuses      *poller[StatusChange] // of watched executions
	claimable     *poller[int]          // number of ready executions by flow, for waiting external workers
	paused        atomic.Bool           // the last state that this process read

	txSlots       chan struct{} // bounds open transactions
	retrySlot     chan struct{} // bounds concurrent retries of blocked writes to one
	firstTrySlots chan struct{} // bounds first attempts of keyed writes to half of the connections
	keyQueue      postgres.KeyQueue
}

// maxLease bounds how long a dead process keeps its executions.
const maxLease = 24 * time.Hour

// New creates an engine. It does not use the database yet.
func New(pool *pgxpool.Pool, opts Options) (*Engine, error) {
	if opts.Keeper == nil {
		return nil, errors.New("make engine: a lanes.Keeper is required")
	}
	if opts.Workers < 0 || opts.LeaseTTL > maxLease {
		return nil, fmt.Errorf("make engine: workers must be 0 (default) or more, the lease at most %s; got %d and %s",
			maxLease, opts.Workers, opts.LeaseTTL)
	}
	opts.Workers = cmp.Or(opts.Workers, 16)
	opts.LeaseTTL = max(cmp.Or(opts.LeaseTTL, 30*time.Second).Truncate(time.Second), time.Second)
	opts.SweepEvery = max(cmp.Or(opts.SweepEvery, 5*time.Second), 100*time.Millisecond)
	opts.StopTimeout = cmp.Or(opts.StopTimeout, 20*time.Second)
	opts.PollOnly = opts.PollOnly || opts.Direct == nil && postgres.Pooled(pool)
	if opts.Observer == nil {
		opts.Observer = noopObserver{}
	}
	e := &Engine{
		pool: pool, opts: opts, log: cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)), keeper: opts.Keeper,
		flows: map[string]Func{}, runs: map[string]*run{}, sweepRequests: make(chan struct{}, 1),
		timerChanged: make(chan struct{}, 1), pools: map[string]*workerPool{},
		txSlots: make(chan struct{}, max(1, pool.Config().MaxConns-1)), retrySlot: make(chan struct{}, 1),
		firstTrySlots: make(chan struct{}, max(1, pool.Config().MaxConns/2)),
	}
	for _, queue := range []string{Background, Interactive} {
		e.pools[queue] = newWorkerPool(e, queue)
	}
	e.batchers = newBatchers(e)
	e.statuses = newPoller(e.log, e.readStatus)
	e.claimable = newPoller(e.log, e.readClaimable)
	e.claimable.limit = func(ready int) int { return ready } // one worker for each ready execution
	var err error
	if e.river, err = newRiverClient(pool, e); err != nil {
		return nil, err
	}
	return e, nil
}

// Running reports whether Run was called and has not returned.
func (e *Engine) Running() bool { return e.running.Load() }

// Run claims and runs executions until ctx ends, then shuts down and returns nil. During a shutdown the engine claims
// no more executions, lets running steps finish within StopTimeout, and releases unfinished executions. Run survives a
// database outage. It returns an error if the engine runs already or was shut down.
func (e *Engine) Run(ctx context.Context) error {
	if e.stopping() || e.running.Swap(true) {
		return errors.New("run engine: it runs already or was shut down; make another with New")
	}
	defer e.running.Store(false)
	register := func() error {
		_, err := e.WorkerID(ctx)
		return err
	}
	switch err := e.retryStartup(ctx, register); {
	case ctxDone(ctx):
		e.endLease(context.WithoutCancel(ctx)) // ctx ended before the start
		return nil
	case err != nil:
		return err
	}
	// River and the lease continue after the end of ctx, until the shutdown is complete.
	runCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	switch err := e.retryStartup(ctx, func() error { return e.river.Start(runCtx) }); {
	case err != nil && ctxDone(ctx):
		e.endLease(context.WithoutCancel(ctx))
		return nil
	case err != nil:
		return fmt.Errorf("start River: %w", err)
	}
	group, _ := errgroup.WithContext(runCtx)
	group.Go(func() error { e.renewLoop(runCtx); return nil })
	group.Go(func() error { e.sweepLoop(ctx); return nil })
	group.Go(func() error { e.listenLoop(runCtx); return nil })
	group.Go(func() error { e.watchPause(runCtx); return nil })
	var pollers sync.WaitGroup
	for _, pool := range e.pools {
		group.Go(func() error { pool.notifyLoop(runCtx); return nil })
		pollers.Go(func() { pool.run(ctx, runCtx) })
	}
	<-ctx.Done()
	e.drain(runCtx, &pollers)
	stop()
	return group.Wait()
}

// ctxDone reports whether ctx has ended.
func ctxDone(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return true
	default:
		return false
	}
}

// retryStartup calls start, and retries while the database is unavailable. A failed start must leave nothing running.
func (e *Engine) retryStartup(ctx context.Context, start func() error) error {
	for {
		err := start()
		if err == nil || !postgres.Transient(err) || ctx.Err() != nil {
			return err
		}
		e.warnUnavailable(ctx, err)
		if !sleep.For(ctx, time.Second) {
			return err
		}
	}
}

// KeepAlive renews the worker's lease and receives cancels until ctx ends, then ends the lease. It claims nothing:
// use it in a command that only calls RunSync.
func (e *Engine) KeepAlive(ctx context.Context) error {
	switch _, err := e.WorkerID(ctx); {
	case ctxDone(ctx):
		e.endLease(context.WithoutCancel(ctx))
		return nil
	case err != nil:
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { e.renewLoop(groupCtx); return nil })
	group.Go(func() error { e.listenLoop(groupCtx); return nil })
	group.Go(func() error { e.watchPause(groupCtx); return nil })
	err := group.Wait()
	e.endLease(context.WithoutCancel(ctx))
	return err
}

// drain refuses new steps, waits for running steps up to StopTimeout, and ends the lease.
func (e *Engine) drain(ctx context.Context, pollers *sync.WaitGroup) {
	e.mu.Lock()
	e.draining = true
	e.mu.Unlock()
	soft, cancel := context.WithTimeout(ctx, e.opts.StopTimeout)
	defer cancel()
	claimsDone := make(chan struct{}) // closed when no claim is in flight
	go func() { pollers.Wait(); close(claimsDone) }()
	select {
	case <-claimsDone:
	case <-soft.Done():
	}
	if err := e.river.Stop(soft); err != nil {
		hard, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := e.river.StopAndCancel(hard); err != nil {
			e.log.WarnContext(ctx, "shutdown incomplete", "error", err)
		}
	}
	e.waitForRuns(ctx, soft)
	e.endLease(ctx)
	e.notifyPeers(ctx)
}

// notifyPeers notifies other processes of ready executions.
func (e *Engine) notifyPeers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := e.pool.Exec(ctx, `select pg_notify('agent_ready', '')`); err != nil {
		e.log.WarnContext(ctx, "other processes not notified of ready executions", "error", err)
	}
}

// waitForRuns waits for the runs to end. When soft ends, it stops the remaining runs.
func (e *Engine) waitForRuns(ctx, soft context.Context) {
	if e.waitIdle(soft) {
		return
	}
	e.stopRuns(ErrDraining)
	hard, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	e.waitIdle(hard)
}

// waitIdle waits until this process runs no execution. It returns false if ctx ends first.
func (e *Engine) waitIdle(ctx context.Context) bool {
	for {
		e.mu.Lock()
		n := len(e.runs)
		e.mu.Unlock()
		if n == 0 && e.pools[Background].idle() && e.pools[Interactive].idle() {
			return true
		}
		if !sleep.For(ctx, 5*time.Millisecond) {
			return false
		}
	}
}

// stopRuns stops every run.
func (e *Engine) stopRuns(cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.runs {
		r.stop(cause)
	}
}

// Live returns nil while the worker's lease is live and the process does not shut down. Otherwise it returns
// ErrDraining, ErrLost, or an error for a missing lease.
func (e *Engine) Live() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.draining:
		return ErrDraining
	case e.lease == nil:
		return errors.New("the worker has no lease")
	case time.Now().After(e.lease.deadline):
		return ErrLost
	default:
		return nil
	}
}

// processName returns the host name and pid of this process, for people.
func processName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s pid %d", host, os.Getpid())
}

// Observer receives the events of this process's executions, for metrics. Its methods must return at once.
type Observer interface {
	// RunStarted and RunFinished report the start and the end of a run: one claim that this process works on.
	RunStarted(x Execution)
	RunFinished(x Execution)
	// ClaimLost reports a run that stopped because it had lost its claim or a lane.
	ClaimLost(x Execution)
	// ExecutionEnded reports that the run wrote the end of its execution, or that a cancel ended it.
	ExecutionEnded(x Execution, status Status)
	// ActivityClosed reports that the activity row of a step was closed.
	ActivityClosed(e activity.Entry, o activity.Outcome, took time.Duration)
}

// noopObserver is the default Observer.
type noopObserver struct{}

func (noopObserver) RunStarted(Execution)                                           {}
func (noopObserver) RunFinished(Execution)                                          {}
func (noopObserver) ClaimLost(Execution)                                            {}
func (noopObserver) ExecutionEnded(Execution, Status)                               {}
func (noopObserver) ActivityClosed(activity.Entry, activity.Outcome, time.Duration) {}

// stopping reports whether the process shuts down.
func (e *Engine) stopping() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.draining
}
