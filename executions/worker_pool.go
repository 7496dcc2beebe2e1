package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Pauses of a crew.
const (
	// unknownFlowDelay is how long a flow that could not be found here is left to others.
	unknownFlowDelay = 5 * time.Second
	// notifyInterval is how often at most other processes are told that there is more than this one can take.
	notifyInterval = 20 * time.Millisecond
	// After so long executions are asked for again that somebody had locked; it doubles while they are.
	minMissDelay, maxMissDelay = 2 * time.Millisecond, time.Second
	// maxCompletingPerWorker is how many ends may be written beside the work of each worker.
	maxCompletingPerWorker = 4
)

// workerPool is this process's workers of one queue. Whenever something may be ready and workers are free, one
// statement claims as many executions as there are free workers, and each runs in a goroutine of its own: so what
// waits costs this process nothing, and a burst is taken in few round trips. What it cannot take, it tells others of.
type workerPool struct {
	e      *Engine
	queue  string
	size   int
	wake   chan struct{} // something may be ready
	notify chan struct{} // others should look
	// Of work alone:
	pollTimer *time.Timer   // its own next look; one, however often others have called for one meanwhile
	missDelay time.Duration // until another try for executions that were locked
	backlog   bool          // the last claim took as much as there were workers, so there may be more

	mu         sync.Mutex
	busy       int             // workers at work, and places set aside
	completing int             // runs whose function has returned, and whose end is being written
	starved    bool            // something may be ready that there was no worker for
	accepting  bool            // claims are made
	runCtx     context.Context // what they are run under
	skipUntil  map[string]time.Time
}

func newWorkerPool(e *Engine, queue string) *workerPool {
	return &workerPool{
		e: e, queue: queue, size: e.opts.Workers, wake: make(chan struct{}, 1), notify: make(chan struct{}, 1), skipUntil: map[string]time.Time{},
	}
}

// poll says that something may be ready.
func (c *workerPool) poll() { signal(c.wake) }

// notifyPeers says that other processes should look.
func (c *workerPool) notifyPeers() { signal(c.notify) }

// signal leaves a mark for whoever waits for one; more than one mark says nothing more.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run claims and runs what is ready until ctx ends. What it has claimed then is run under living.
func (c *workerPool) run(ctx, runCtx context.Context) {
	c.open(runCtx)
	defer c.close()
	c.poll() // what became ready while nobody was here
	interval := c.e.opts.SweepEvery
	if c.e.opts.PollOnly {
		interval = min(interval, 500*time.Millisecond)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-ticker.C: // for hints that were lost
		}
		for ctx.Err() == nil && c.dispatch(runCtx) {
		}
	}
}

// gatherDelay is how long workers that become free wait for those that become free with them, where there is a backlog.
const gatherDelay = 100 * time.Microsecond

// dispatch claims for the workers that are free, and reports whether there may be more for those still free.
func (c *workerPool) dispatch(runCtx context.Context) bool {
	free := c.freeWorkers()
	if c.backlog && free > 0 && free < c.size && sleep(runCtx, gatherDelay) {
		free = c.freeWorkers() // there is a backlog: workers that become free together take from it together
	}
	if free == 0 {
		c.notifyPeers()
		return false
	}
	worker, claimed, missed, err := c.claim(runCtx, free)
	if err != nil {
		c.e.log.WarnContext(runCtx, "ready executions not claimed", "queue", c.queue, "error", err)
		c.pollAfter(failureDelay)
		return false
	}
	for _, x := range claimed {
		c.startUnreserved(runCtx, x, worker)
	}
	c.backlog = len(claimed) == free
	if !missed {
		c.missDelay = 0
	} else if len(claimed) < free {
		c.missDelay = min(max(2*c.missDelay, minMissDelay), maxMissDelay)
		c.pollAfter(c.missDelay)
	}
	return len(claimed) == free
}

// pollAfter has the crew look after a pause, once, whatever it was told before. Did each try that fails bring about
// one more, then those of ticks and notifications would add to them, and there were ever more of them for as long as
// the database is away.
func (c *workerPool) pollAfter(delay time.Duration) {
	if c.pollTimer == nil {
		c.pollTimer = time.AfterFunc(delay, c.poll)
		return
	}
	c.pollTimer.Reset(delay)
}

// freeWorkers is how many workers have nothing to do. When there is none, the next one to finish will look again.
func (c *workerPool) freeWorkers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starved = c.busy >= c.size
	return c.size - c.busy
}

// hasFree reports whether a worker for n executions is free, which look would put to work.
func (c *workerPool) hasFree(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.accepting && c.size-c.busy >= n
}

// idle reports whether no worker is at work.
func (c *workerPool) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy == 0 && c.completing == 0
}

// reserve sets places aside for executions that are about to be claimed otherwise than from the queue, up to n, and
// says how many.
func (c *workerPool) reserve(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.accepting {
		return 0
	}
	n = min(n, max(c.size-c.busy, 0))
	c.busy += n
	return n
}

// release gives places back.
func (c *workerPool) release(n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	c.busy -= n
	starved := c.starved
	c.mu.Unlock()
	if starved {
		c.poll()
	}
}

func (c *workerPool) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.accepting
}

// open says that claims are made, and under which context they are run.
func (c *workerPool) open(runCtx context.Context) {
	c.mu.Lock()
	c.accepting, c.runCtx = true, runCtx
	c.mu.Unlock()
}

// close says that no more claims are made. Those that are being made are run all the same.
func (c *workerPool) close() {
	c.mu.Lock()
	c.accepting = false
	c.mu.Unlock()
}

// runContext is the context that claims are run under, also those that were being made when the crew closed.
func (c *workerPool) runContext() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runCtx
}

// startUnreserved puts a worker to a claimed execution.
func (c *workerPool) startUnreserved(runCtx context.Context, x claimedExecution, worker string) {
	c.mu.Lock()
	c.busy++
	c.mu.Unlock()
	c.startReserved(runCtx, x, worker)
}

// startReserved puts a worker, whose place is set aside, to a claimed execution. The worker is free when the function
// has returned: what remains is to write the end, and some ends may be written beside the work.
func (c *workerPool) startReserved(runCtx context.Context, x claimedExecution, worker string) {
	go func() {
		free := sync.OnceValue(c.flowReturned)
		err := c.e.execute(runCtx, x, worker, func() { free() })
		if err != nil && !errors.Is(err, errClaimTooLow) {
			c.e.log.WarnContext(runCtx, "execution not run to its end here", "execution", x.ID, "error", err)
		}
		c.runEnded(free())
	}()
}

// flowReturned says that a function has returned, and reports whether that made its worker free.
func (c *workerPool) flowReturned() bool {
	c.mu.Lock()
	if c.completing >= maxCompletingPerWorker*c.size {
		c.mu.Unlock()
		return false
	}
	c.completing++
	c.mu.Unlock()
	c.release(1)
	return true
}

// runEnded says that a run is over, of which the worker was made free before, or is now.
func (c *workerPool) runEnded(freed bool) {
	if !freed {
		c.release(1)
		return
	}
	c.mu.Lock()
	c.completing--
	c.mu.Unlock()
}

// skipFlow lets others have a flow that could not be found here, for a while.
func (c *workerPool) skipFlow(flow string) {
	c.mu.Lock()
	c.skipUntil[flow] = time.Now().Add(unknownFlowDelay)
	c.mu.Unlock()
	c.notifyPeers()
}

// skippedFlows lists the flows that are left to others.
func (c *workerPool) skippedFlows() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := []string{}
	for name, until := range c.skipUntil {
		if time.Now().After(until) {
			delete(c.skipUntil, name)
			continue
		}
		names = append(names, name)
	}
	return names
}

// notifyLoop tells other processes, not more often than is of use. A hint that is lost is made good by their own looks.
func (c *workerPool) notifyLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.notify:
		}
		if _, err := c.e.pool.Exec(ctx, `select pg_notify('agent_ready', @queue)`, postgres.Strict{"queue": c.queue}); err != nil && ctx.Err() == nil {
			c.e.log.WarnContext(ctx, "other processes not told of ready executions", "queue", c.queue, "error", err)
		}
		if !sleep(ctx, notifyInterval) {
			return
		}
	}
}

// claimedExecution is an execution of which this process has a claim, and what earlier claims have recorded.
type claimedExecution struct {
	Execution
	needsRecovery bool // lanes or calls of an earlier claim are open, or may have been interrupted
	checkpoints   map[string]Checkpoint
	interrupted   map[string]bool
	onCompleted   func(row *Execution) // gets the row as it ended, where that is known without asking; may be nil
}

// claim takes up to n ready executions, with their records, in one round trip and one transaction.
// Missed says that there were others, which somebody had locked.
func (c *workerPool) claim(ctx context.Context, n int) (worker string, claimed []claimedExecution, missed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.e.opts.LeaseTTL)
	defer cancel()
	if worker, err = c.e.WorkerID(ctx); err != nil {
		return "", nil, false, err
	}
	rows, err := c.e.pool.Query(ctx, `
		select `+columns+`, `+checkpointColumns+`, missed
		  from (select (t.execution).*, t.held, t.steps, t.claims, t.prints, t.failed, t.outputs, t.times, t.missed
		          from lanekeeper.claim_agent_executions(@queue, @worker, @n, @skip) t) x order by priority, id`,
		postgres.Strict{"worker": worker, "queue": c.queue, "n": n, "skip": c.skippedFlows()})
	if err != nil {
		return "", nil, false, err
	}
	defer rows.Close()
	for rows.Next() {
		x, ok, err := scanClaimed(rows, []any{&missed})
		if err != nil {
			return "", nil, false, err
		}
		if ok {
			claimed = append(claimed, x)
		}
	}
	return worker, claimed, missed, rows.Err()
}

// checkpointColumns lists what a claim answers beside the row: whether it is held, and its checkpoints, side by side.
const checkpointColumns = `held, steps, claims, prints, failed, outputs, times`

// scanClaimed reads one claimed execution with its record, and further columns; false when the row has no execution.
func scanClaimed(rows pgx.Rows, extra []any) (claimedExecution, bool, error) {
	var x claimedExecution
	if rows.RawValues()[0] == nil {
		return x, false, rows.Scan(append(make([]any, numExecutionColumns+7), extra...)...)
	}
	var steps, prints []string
	var claims []int64
	var failed []bool
	var outputs []json.RawMessage
	var times []time.Time
	dest := append(x.scanTargets(), &x.needsRecovery, &steps, &claims, &prints, &failed, &outputs, &times)
	if err := rows.Scan(append(dest, extra...)...); err != nil {
		return x, false, err
	}
	x.checkpoints, x.interrupted = make(map[string]Checkpoint, len(steps)), map[string]bool{}
	for i, step := range steps {
		x.checkpoints[step] = Checkpoint{step, claims[i], prints[i], failed[i], outputs[i], times[i]}
	}
	return x, true, nil
}

// numExecutionColumns is how many columns an Execution has.
var numExecutionColumns = reflect.TypeFor[Execution]().NumField()

// scanTargets are the fields of an Execution, in the order of columns.
func (x *Execution) scanTargets() []any {
	v := reflect.ValueOf(x).Elem()
	dest := make([]any, v.NumField(), v.NumField()+16)
	for i := range dest {
		dest[i] = v.Field(i).Addr().Interface()
	}
	return dest
}

// Admission bounds how many executions of a flow, or of a surface, are run at once, by all processes together. The
// others stay ready in the queue, by priority and then by age, and can be cancelled there; a place that becomes free
// is taken at once. An execution that waits holds no place, and needs one again when its wait has ended.
//
// Two ways in are not held up, and are counted: runs that are inserted already claimed because somebody waits for
// them (RunSync, RunDetached, InsertClaimed: chat turns, for example), and runs that workers outside lock.
type Admission struct {
	Kind    string `json:"kind"` // flow or surface
	Name    string `json:"name"`
	Running int    `json:"running"` // 0 stops them
}

// SetLimits makes the limits what is given, for all processes, and no others. Executions that run already go on.
func (e *Engine) SetLimits(ctx context.Context, limits []Admission) error {
	if limits == nil {
		limits = []Admission{}
	}
	text, err := json.Marshal(limits)
	if err != nil {
		return fmt.Errorf("encode limits: %w", err)
	}
	if _, err := e.pool.Exec(ctx, `select set_agent_limits(@limits)`, postgres.Strict{"limits": json.RawMessage(text)}); err != nil {
		return fmt.Errorf("set limits of executions: %w", err)
	}
	e.Poll()
	return nil
}
