package executions

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	// unknownFlowDelay is how long this process skips a flow that it does not know.
	unknownFlowDelay = 5 * time.Second
	// notifyInterval is the shortest pause between two notifications of other processes.
	notifyInterval = 20 * time.Millisecond
	// minMissDelay is the first pause before the pool polls locked executions again. The pause doubles up to maxMissDelay.
	minMissDelay, maxMissDelay = 2 * time.Millisecond, time.Second
	// maxCompletingPerWorker bounds the completions per worker that are written while the workers run other executions.
	maxCompletingPerWorker = 4
)

// workerPool is this process's workers of one queue. One statement claims as many ready executions as workers are
// free. Each execution runs in its own goroutine. So waiting executions cost nothing here, and a burst takes few
// round trips. Work beyond the free workers is announced to other processes.
type workerPool struct {
	e      *Engine
	queue  string
	size   int
	wake   chan struct{} // an execution may be ready
	notify chan struct{} // other processes should poll
	// Used by run alone:
	pollTimer *time.Timer   // one timer for all requested polls
	missDelay time.Duration // pause before the next poll of locked executions
	backlog   bool          // the last claim used every free worker, so more may be ready
	failures  logging.Failures

	mu         sync.Mutex
	busy       int                  // working workers and reserved slots
	completing int                  // returned flows with a completion in flight
	starved    bool                 // an execution may be ready without a free worker
	accepting  bool                 // the pool may claim executions
	runCtx     context.Context      // context of the runs
	skipUntil  map[string]time.Time // when to claim an unknown flow again
}

func newWorkerPool(e *Engine, queue string) *workerPool {
	return &workerPool{
		e: e, queue: queue, size: e.opts.Workers, wake: make(chan struct{}, 1), notify: make(chan struct{}, 1),
		skipUntil: map[string]time.Time{},
	}
}

func (p *workerPool) poll() { signal(p.wake) }

// notifyPeers requests a notification of other processes.
func (p *workerPool) notifyPeers() { signal(p.notify) }

// signal wakes a receiver of ch. It merges pending signals.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run claims and runs ready executions until ctx ends. The runs use runCtx.
func (p *workerPool) run(ctx, runCtx context.Context) {
	p.open(runCtx)
	defer p.close()
	p.poll() // for executions that became ready before
	interval := p.e.opts.SweepEvery
	if p.e.opts.PollOnly {
		interval = min(interval, 500*time.Millisecond)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-ticker.C: // for lost notifications
		}
		for ctx.Err() == nil && p.dispatch(runCtx) {
		}
	}
}

// gatherDelay lets workers that become free together claim together while there is a backlog.
const gatherDelay = 100 * time.Microsecond

// dispatch claims for the free workers, and reports whether more may be ready.
func (p *workerPool) dispatch(runCtx context.Context) bool {
	free := p.freeWorkers()
	if p.backlog && free > 0 && free < p.size && sleep.For(runCtx, gatherDelay) {
		free = p.freeWorkers()
	}
	if free == 0 {
		p.notifyPeers()
		return false
	}
	worker, claimed, missed, err := p.claim(runCtx, free)
	p.failures.Log(runCtx, p.e.log, "ready executions not claimed", err, "queue", p.queue)
	if err != nil {
		p.pollAfter(failureDelay)
		return false
	}
	for _, x := range claimed {
		p.startUnreserved(runCtx, x, worker)
	}
	p.backlog = len(claimed) == free
	if !missed {
		p.missDelay = 0
	} else if len(claimed) < free {
		p.missDelay = min(max(2*p.missDelay, minMissDelay), maxMissDelay)
		p.pollAfter(p.missDelay)
	}
	return len(claimed) == free
}

// pollAfter polls once after a delay. One timer serves all requests. Otherwise failed polls would add up while the
// database is unavailable.
func (p *workerPool) pollAfter(delay time.Duration) {
	if p.pollTimer == nil {
		p.pollTimer = time.AfterFunc(delay, p.poll)
		return
	}
	p.pollTimer.Reset(delay)
}

// freeWorkers returns the number of free workers. When it is 0, the next free worker polls.
func (p *workerPool) freeWorkers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starved = p.busy >= p.size
	return p.size - p.busy
}

// hasFree reports whether a poll would use n free workers.
func (p *workerPool) hasFree(n int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepting && p.size-p.busy >= n
}

// idle reports whether no worker is busy.
func (p *workerPool) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.busy == 0 && p.completing == 0
}

// reserve reserves up to n slots for executions that a statement claims outside a poll. It returns their number.
func (p *workerPool) reserve(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.accepting {
		return 0
	}
	n = min(n, max(p.size-p.busy, 0))
	p.busy += n
	return n
}

// release frees n slots.
func (p *workerPool) release(n int) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	p.busy -= n
	starved := p.starved
	p.mu.Unlock()
	if starved {
		p.poll()
	}
}

func (p *workerPool) isOpen() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepting
}

// open accepts claims, and sets the context of their runs.
func (p *workerPool) open(runCtx context.Context) {
	p.mu.Lock()
	p.accepting, p.runCtx = true, runCtx
	p.mu.Unlock()
}

// close stops new claims. Claims in flight still run.
func (p *workerPool) close() {
	p.mu.Lock()
	p.accepting = false
	p.mu.Unlock()
}

// runContext returns the context of the runs, also after close.
func (p *workerPool) runContext() context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.runCtx
}

// startUnreserved takes a slot and starts a claimed execution.
func (p *workerPool) startUnreserved(runCtx context.Context, x claimedExecution, worker string) {
	p.mu.Lock()
	p.busy++
	p.mu.Unlock()
	p.startReserved(runCtx, x, worker)
}

// startReserved starts a claimed execution in a reserved slot. The return of the flow frees the worker, before the
// goroutine writes the completion. maxCompletingPerWorker bounds such completions.
func (p *workerPool) startReserved(runCtx context.Context, x claimedExecution, worker string) {
	go func() {
		freeWorker := sync.OnceValue(p.flowReturned)
		defer func() { p.runEnded(freeWorker()) }() // runs even if the flow ends the goroutine
		err := p.e.execute(runCtx, &x, worker, func() { freeWorker() })
		if err != nil && !errors.Is(err, errClaimTooLow) {
			p.e.log.WarnContext(trace.With(runCtx, x.span()), "execution not run to its end here", "error", err)
		}
	}()
}

// flowReturned reports whether the return of a flow frees its worker.
func (p *workerPool) flowReturned() bool {
	p.mu.Lock()
	if p.completing >= maxCompletingPerWorker*p.size {
		p.mu.Unlock()
		return false
	}
	p.completing++
	p.mu.Unlock()
	p.release(1)
	return true
}

// runEnded ends a run. freed says whether its worker is free already.
func (p *workerPool) runEnded(freed bool) {
	if !freed {
		p.release(1)
		return
	}
	p.mu.Lock()
	p.completing--
	p.mu.Unlock()
}

// skipFlow leaves an unknown flow to other processes for a while.
func (p *workerPool) skipFlow(flow string) {
	p.mu.Lock()
	p.skipUntil[flow] = time.Now().Add(unknownFlowDelay)
	p.mu.Unlock()
}

// skippedFlows lists the flows that this process leaves to other processes.
func (p *workerPool) skippedFlows() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	names := []string{}
	for name, until := range p.skipUntil {
		if time.Now().After(until) {
			delete(p.skipUntil, name)
			continue
		}
		names = append(names, name)
	}
	return names
}

// notifyLoop notifies other processes, at most once per notifyInterval. Their own polls cover a lost notification.
func (p *workerPool) notifyLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.notify:
		}
		if _, err := p.e.pool.Exec(ctx, `select pg_notify('agent_ready', @queue)`,
			postgres.Strict{"queue": p.queue}); err != nil && ctx.Err() == nil {
			p.e.log.WarnContext(ctx, "other processes not notified of ready executions", "queue", p.queue, "error", err)
		}
		if !sleep.For(ctx, notifyInterval) {
			return
		}
	}
}

// slotTimeout bounds how long workers stay reserved for resumed executions. A statement that takes longer waits for a
// lock, and other executions need the workers meanwhile.
const slotTimeout = 100 * time.Millisecond

// slots are workers that are reserved for executions which a statement claims.
type slots struct {
	e                       *Engine
	background, interactive int // number of reserved workers

	mu       sync.Mutex
	released bool
	unused   map[string]int
	timer    *time.Timer
}

// reserveSlots reserves up to n free workers of each queue, for at most slotTimeout.
func (e *Engine) reserveSlots(n int) *slots {
	s := &slots{e: e, background: e.pools[Background].reserve(n), interactive: e.pools[Interactive].reserve(n)}
	s.unused = map[string]int{Background: s.background, Interactive: s.interactive}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(slotTimeout, s.release)
	return s
}

// start runs a claimed execution in one of the slots.
func (s *slots) start(x claimedExecution, worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pool := s.e.pools[x.Queue]
	if s.released { // the pool may exceed its size for a while
		pool.startUnreserved(pool.runContext(), x, worker)
		return
	}
	s.unused[x.Queue]--
	pool.startReserved(pool.runContext(), x, worker)
}

// release frees the unused slots.
func (s *slots) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer.Stop()
	if s.released {
		return
	}
	s.released = true
	for queue, n := range s.unused {
		s.e.pools[queue].release(n)
	}
}
