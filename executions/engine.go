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
	"github.com/lanekeeper/lanekeeper/lanes"
)

// Func is a durable function. It is called from the top each time its execution is claimed, with a
// context that ends when the claim is lost or the execution cancelled.
type Func func(ctx context.Context, input json.RawMessage) (Result, error)

// Result is what a durable function ends with: a sentence for people and a value for programs.
type Result struct {
	Summary string
	Value   any
}

// Options configure an Engine. Zero values are the defaults.
type Options struct {
	Keeper   *lanes.Keeper      // required
	Listener *postgres.Listener // shortens waits; may be nil
	Logger   *slog.Logger
	Workers  int // executions of the background queue at once; default 16, the interactive queue has as many
	// LeaseTTL is how long a worker lives without renewing; default 30 s, in whole seconds, at most a day. It is
	// renewed every third of it.
	LeaseTTL time.Duration
	// SweepEvery is how often lost claims and hints are looked for; default 5 s, its floor is 100 ms.
	SweepEvery time.Duration
	// StopTimeout is how long steps under way may take to finish at a shutdown; default 20 s.
	StopTimeout time.Duration
	// PollOnly is River without LISTEN. Without Direct it is so in any case where the pool ends at a pooler.
	PollOnly bool
	Direct   *pgxpool.Pool // leads to the server itself, for LISTEN, where the pool ends at a pooler; may be nil
	// Lease renews the worker's lease over connections that no execution takes; may be nil.
	Lease    *pgxpool.Pool
	Observer Observer // may be nil
}

// Engine is one process's part in running executions. Register flows before Run; everything else may be
// called at any time, by any goroutine, also when Run is not running.
type Engine struct {
	pool   *pgxpool.Pool
	opts   Options
	log    *slog.Logger
	river  *river.Client[pgx.Tx]
	keeper *lanes.Keeper
	flows  map[string]Func
	// fallback finds flows that are not in flows; may be nil.
	fallback   func(ctx context.Context, flow string) (Func, error)
	unforkable map[string]string // why, by flow

	running       atomic.Bool
	registerMu    sync.Mutex // held while a lease is begun, so that there is one
	mu            sync.Mutex
	lease         *workerLease
	runs          map[string]*run
	draining      bool
	sweepRequests chan struct{} // sweep sooner
	timerChanged  chan struct{} // a timer is due sooner than was known
	pools         map[string]*workerPool
	nextDue       dueTimes
	stuckLimiter  stuckWarnings
	batchers      batchers
	paused        atomic.Bool // as far as this process knows

	txSlots       chan struct{} // has room for as many as may be open at once
	retrySlot     chan struct{} // has room for one write that has met a lock, and is made again
	firstTrySlots chan struct{} // has room for half as many first tries with keys as there are connections
	keyQueue      postgres.KeyQueue
}

// maxLease bounds how long the executions of a process that has died are left with it.
const maxLease = 24 * time.Hour

// New makes an engine. It does not touch the database yet.
func New(pool *pgxpool.Pool, opts Options) (*Engine, error) {
	if opts.Keeper == nil {
		return nil, errors.New("make engine: a lanes.Keeper is required")
	}
	if opts.Workers < 0 || opts.LeaseTTL > maxLease {
		return nil, fmt.Errorf("make engine: it cannot have %d workers and a lease of %s: no fewer than 0, for the default, and at most %s are possible",
			opts.Workers, opts.LeaseTTL, maxLease)
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
	var err error
	if e.river, err = newRiverClient(pool, e); err != nil {
		return nil, err
	}
	return e, nil
}

// Register names a durable function. A name that is taken, or empty, is an error, and what had it keeps it.
func (e *Engine) Register(flow string, fn Func) error {
	if flow == "" || fn == nil {
		return errors.New("register flow: a name and a function are required")
	}
	if _, taken := e.flows[flow]; taken {
		return fmt.Errorf("register flow %s: the name is taken", flow)
	}
	e.flows[flow] = fn
	return nil
}

// Fallback finds the functions of flows that were not registered, such as those that are data. find returns nil
// for a flow that it does not know; an error hands the execution back, to be tried again. Set it before Run.
func (e *Engine) Fallback(find func(ctx context.Context, flow string) (Func, error)) {
	e.fallback = find
}

// HasFlow reports whether a flow is registered, or the fallback finds it.
func (e *Engine) HasFlow(ctx context.Context, flow string) (bool, error) {
	fn, err := e.flow(ctx, flow)
	return fn != nil, err
}

// flow finds the function of a flow; nil when it is not known here.
func (e *Engine) flow(ctx context.Context, name string) (Func, error) {
	if fn := e.flows[name]; fn != nil || e.fallback == nil {
		return fn, nil
	}
	return e.fallback(ctx, name)
}

// Run works until ctx ends, then shuts down: it takes no more work, lets the steps under way finish within
// StopTimeout, hands unfinished executions back and returns nil. A database that goes away does not end it; it says
// so and goes on when it is back. One that runs, or was shut down, is an error: it would take no work and not say so.
func (e *Engine) Run(ctx context.Context) error {
	if e.stopping() || e.running.Swap(true) {
		return errors.New("run engine: it runs already, or has been shut down: make another with New")
	}
	defer e.running.Store(false)
	register := func() error {
		_, err := e.WorkerID(ctx) // which begins the worker's lease
		return err
	}
	switch err := e.retryStartup(ctx, register); {
	case ctxDone(ctx):
		e.endLease(context.WithoutCancel(ctx)) // it was told to stop before it had begun
		return nil
	case err != nil:
		return err
	}
	// River and the lease outlive ctx for as long as the shutdown takes.
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
	for _, c := range e.pools {
		group.Go(func() error { c.notifyLoop(runCtx); return nil })
		pollers.Go(func() { c.run(ctx, runCtx) })
	}
	<-ctx.Done()
	e.drain(runCtx, &pollers)
	stop()
	return group.Wait()
}

// ctxDone reports that ctx has ended, which is how an engine is told to stop.
func ctxDone(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return true
	default:
		return false
	}
}

// retryStartup begins something, also when the database goes away in that moment. What had begun of it by then has been
// stopped.
func (e *Engine) retryStartup(ctx context.Context, start func() error) error {
	for {
		err := start()
		if err == nil || !postgres.Transient(err) || ctx.Err() != nil {
			return err
		}
		e.warnUnavailable(ctx, err)
		if !sleep(ctx, time.Second) {
			return err
		}
	}
}

// KeepAlive keeps the worker's lease and hears of cancels until ctx ends, and takes no work: for a command that
// only calls RunSync. It returns when the lease has been given back.
func (e *Engine) KeepAlive(ctx context.Context) error {
	switch _, err := e.WorkerID(ctx); {
	case ctxDone(ctx):
		e.endLease(context.WithoutCancel(ctx))
		return nil
	case err != nil:
		return err
	}
	group, beating := errgroup.WithContext(ctx)
	group.Go(func() error { e.renewLoop(beating); return nil })
	group.Go(func() error { e.listenLoop(beating); return nil })
	group.Go(func() error { e.watchPause(beating); return nil })
	err := group.Wait()
	e.endLease(context.WithoutCancel(ctx))
	return err
}

// drain ends the work: new steps are refused, those under way may finish.
func (e *Engine) drain(ctx context.Context, pollers *sync.WaitGroup) {
	e.mu.Lock()
	e.draining = true
	e.mu.Unlock()
	soft, cancel := context.WithTimeout(ctx, e.opts.StopTimeout)
	defer cancel()
	claimed := make(chan struct{}) // what was being claimed is known
	go func() { pollers.Wait(); close(claimed) }()
	select {
	case <-claimed:
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

// notifyPeers tells other processes of what this one will not take.
func (e *Engine) notifyPeers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := e.pool.Exec(ctx, `select pg_notify('agent_ready', '')`); err != nil {
		e.log.WarnContext(ctx, "other processes not told of ready executions", "error", err)
	}
}

// waitForRuns waits for the runs to end, and stops them when soft does.
func (e *Engine) waitForRuns(ctx, soft context.Context) {
	if e.waitIdle(soft) {
		return
	}
	e.stopRuns(ErrDraining)
	hard, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	e.waitIdle(hard)
}

// waitIdle waits until this process runs nothing; false when ctx ended first.
func (e *Engine) waitIdle(ctx context.Context) bool {
	for {
		e.mu.Lock()
		n := len(e.runs)
		e.mu.Unlock()
		if n == 0 && e.pools[Background].idle() && e.pools[Interactive].idle() {
			return true
		}
		if !sleep(ctx, 5*time.Millisecond) {
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

// Live is nil while the worker's lease is live and the process does not shut down, so that it would do work; else it
// says why not: ErrDraining, ErrLost, or that there is no lease yet.
func (e *Engine) Live() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.draining:
		return ErrDraining
	case e.lease == nil:
		return errors.New("the worker has no lease yet")
	case time.Now().After(e.lease.deadline):
		return ErrLost
	default:
		return nil
	}
}

// requestSweep wakes the sweeper.
func (e *Engine) requestSweep() { signal(e.sweepRequests) }

// processName says who this process is, for people.
func processName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s pid %d", host, os.Getpid())
}

// Observer is told what happens to executions in this process, for metrics. Its methods must return at once.
type Observer interface {
	// Began and Left frame a run: a claim that this process works on.
	RunStarted(x Execution)
	RunFinished(x Execution)
	// Lost says that the claim went elsewhere under the run.
	ClaimLost(x Execution)
	// Ended says that the run has written the end of its execution, or that it was cancelled under it.
	ExecutionEnded(x Execution, status Status)
	// Closed says that the end of a step's activity was written.
	ActivityClosed(e activity.Entry, o activity.Outcome, took time.Duration)
}

// noopObserver is the Observer of an engine that has none.
type noopObserver struct{}

func (noopObserver) RunStarted(Execution)                                           {}
func (noopObserver) RunFinished(Execution)                                          {}
func (noopObserver) ClaimLost(Execution)                                            {}
func (noopObserver) ExecutionEnded(Execution, Status)                               {}
func (noopObserver) ActivityClosed(activity.Entry, activity.Outcome, time.Duration) {}
