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
	// unknownFor is how long a flow that could not be found here is left to others.
	unknownFor = 5 * time.Second
	// tellEvery is how often at most other processes are told that there is more than this one can take.
	tellEvery = 20 * time.Millisecond
	// After so long executions are asked for again that somebody had locked; it doubles while they are.
	shortestMiss, longestMiss = 2 * time.Millisecond, time.Second
	// endsBeside is how many ends may be written beside the work of each worker.
	endsBeside = 4
)

// crew is this process's workers of one queue. Whenever something may be ready and workers are free, one statement
// claims as many executions as there are free workers, and each runs in a goroutine of its own: so what waits costs
// this process nothing, and a burst is taken in few round trips. What it cannot take, it tells others of.
type crew struct {
	e     *Engine
	queue string
	size  int
	wake  chan struct{} // something may be ready
	tell  chan struct{} // others should look
	// Of work alone:
	again *time.Timer   // its own next look; one, however often others have called for one meanwhile
	pause time.Duration // until another try for executions that were locked
	full  bool          // the last claim took as much as there were workers, so there may be more

	mu     sync.Mutex
	busy   int             // workers at work, and places set aside
	ending int             // runs whose function has returned, and whose end is being written
	more   bool            // something may be ready that there was no worker for
	open   bool            // claims are made
	living context.Context // what they are run under
	skip   map[string]time.Time
}

func newCrew(e *Engine, queue string) *crew {
	return &crew{
		e: e, queue: queue, size: e.opts.Workers, wake: make(chan struct{}, 1), tell: make(chan struct{}, 1), skip: map[string]time.Time{},
	}
}

// look says that something may be ready.
func (c *crew) look() { signal(c.wake) }

// spread says that other processes should look.
func (c *crew) spread() { signal(c.tell) }

// signal leaves a mark for whoever waits for one; more than one mark says nothing more.
func signal(mark chan struct{}) {
	select {
	case mark <- struct{}{}:
	default:
	}
}

// work claims and runs what is ready until ctx ends. What it has claimed then is run under living.
func (c *crew) work(ctx, living context.Context) {
	c.begins(living)
	defer c.ends()
	c.look() // what became ready while nobody was here
	poll := c.e.opts.SweepEvery
	if c.e.opts.PollOnly {
		poll = min(poll, 500*time.Millisecond)
	}
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-ticker.C: // for hints that were lost
		}
		for ctx.Err() == nil && c.fill(living) {
		}
	}
}

// fillGather is how long workers that become free wait for those that become free with them, where there is a backlog.
const fillGather = 100 * time.Microsecond

// fill claims for the workers that are free, and reports whether there may be more for those still free.
func (c *crew) fill(living context.Context) bool {
	free := c.free()
	if c.full && free > 0 && free < c.size && sleep(living, fillGather) {
		free = c.free() // there is a backlog: workers that become free together take from it together
	}
	if free == 0 {
		c.spread()
		return false
	}
	worker, claimed, missed, err := c.claim(living, free)
	if err != nil {
		c.e.log.WarnContext(living, "ready executions not claimed", "queue", c.queue, "error", err)
		c.lookAgain(afterFailure)
		return false
	}
	for _, x := range claimed {
		c.run(living, x, worker)
	}
	c.full = len(claimed) == free
	if !missed {
		c.pause = 0
	} else if len(claimed) < free {
		c.pause = min(max(2*c.pause, shortestMiss), longestMiss)
		c.lookAgain(c.pause)
	}
	return len(claimed) == free
}

// lookAgain has the crew look after a pause, once, whatever it was told before. Did each try that fails bring about
// one more, then those of ticks and notifications would add to them, and there were ever more of them for as long as
// the database is away.
func (c *crew) lookAgain(after time.Duration) {
	if c.again == nil {
		c.again = time.AfterFunc(after, c.look)
		return
	}
	c.again.Reset(after)
}

// free is how many workers have nothing to do. When there is none, the next one to finish will look again.
func (c *crew) free() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.more = c.busy >= c.size
	return c.size - c.busy
}

// has reports whether a worker for n executions is free, which look would put to work.
func (c *crew) has(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open && c.size-c.busy >= n
}

// idle reports whether no worker is at work.
func (c *crew) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy == 0 && c.ending == 0
}

// reserve sets places aside for executions that are about to be claimed otherwise than from the queue, up to n, and
// says how many.
func (c *crew) reserve(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.open {
		return 0
	}
	n = min(n, max(c.size-c.busy, 0))
	c.busy += n
	return n
}

// vacate gives places back.
func (c *crew) vacate(n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	c.busy -= n
	more := c.more
	c.mu.Unlock()
	if more {
		c.look()
	}
}

func (c *crew) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

// begins says that claims are made, and under which context they are run.
func (c *crew) begins(living context.Context) {
	c.mu.Lock()
	c.open, c.living = true, living
	c.mu.Unlock()
}

// ends says that no more claims are made. Those that are being made are run all the same.
func (c *crew) ends() {
	c.mu.Lock()
	c.open = false
	c.mu.Unlock()
}

// life is the context that claims are run under, also those that were being made when the crew closed.
func (c *crew) life() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.living
}

// run puts a worker to a claimed execution.
func (c *crew) run(living context.Context, x claimed, worker string) {
	c.mu.Lock()
	c.busy++
	c.mu.Unlock()
	c.begin(living, x, worker)
}

// begin puts a worker, whose place is set aside, to a claimed execution. The worker is free when the function has
// returned: what remains is to write the end, and some ends may be written beside the work.
func (c *crew) begin(living context.Context, x claimed, worker string) {
	go func() {
		free := sync.OnceValue(c.returned)
		err := c.e.perform(living, x, worker, func() { free() })
		if err != nil && !errors.Is(err, errUnnumbered) {
			c.e.log.WarnContext(living, "execution not run to its end here", "execution", x.ID, "error", err)
		}
		c.settled(free())
	}()
}

// returned says that a function has returned, and reports whether that made its worker free.
func (c *crew) returned() bool {
	c.mu.Lock()
	if c.ending >= endsBeside*c.size {
		c.mu.Unlock()
		return false
	}
	c.ending++
	c.mu.Unlock()
	c.vacate(1)
	return true
}

// settled says that a run is over, of which the worker was made free before, or is now.
func (c *crew) settled(freed bool) {
	if !freed {
		c.vacate(1)
		return
	}
	c.mu.Lock()
	c.ending--
	c.mu.Unlock()
}

// leave lets others have a flow that could not be found here, for a while.
func (c *crew) leave(flow string) {
	c.mu.Lock()
	c.skip[flow] = time.Now().Add(unknownFor)
	c.mu.Unlock()
	c.spread()
}

// skipped lists the flows that are left to others.
func (c *crew) skipped() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := []string{}
	for name, until := range c.skip {
		if time.Now().After(until) {
			delete(c.skip, name)
			continue
		}
		names = append(names, name)
	}
	return names
}

// tellLoop tells other processes, not more often than is of use. A hint that is lost is made good by their own looks.
func (c *crew) tellLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.tell:
		}
		if _, err := c.e.pool.Exec(ctx, `select pg_notify('agent_ready', @queue)`, postgres.Strict{"queue": c.queue}); err != nil && ctx.Err() == nil {
			c.e.log.WarnContext(ctx, "other processes not told of ready executions", "queue", c.queue, "error", err)
		}
		if !sleep(ctx, tellEvery) {
			return
		}
	}
}

// claimed is an execution of which this process has a claim, and what earlier claims have recorded.
type claimed struct {
	Execution
	held        bool // lanes or calls of an earlier claim are open, or may have been interrupted
	checkpoints map[string]Checkpoint
	interrupted map[string]bool
	over        func(row *Execution) // gets the row as it ended, where that is known without asking; may be nil
}

// claim takes up to n ready executions, with their records, in one round trip and one transaction.
// Missed says that there were others, which somebody had locked.
func (c *crew) claim(ctx context.Context, n int) (worker string, took []claimed, missed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.e.opts.LeaseTTL)
	defer cancel()
	if worker, err = c.e.current(ctx); err != nil {
		return "", nil, false, err
	}
	rows, err := c.e.pool.Query(ctx, `
		select `+columns+`, `+recordedColumns+`, missed
		  from (select (t.execution).*, t.held, t.steps, t.claims, t.prints, t.failed, t.outputs, t.times, t.missed
		          from lanekeeper.claim_agent_executions(@queue, @worker, @n, @skip) t) x order by priority, id`,
		postgres.Strict{"worker": worker, "queue": c.queue, "n": n, "skip": c.skipped()})
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
			took = append(took, x)
		}
	}
	return worker, took, missed, rows.Err()
}

// recordedColumns lists what a claim answers beside the row: whether it is held, and its checkpoints, side by side.
const recordedColumns = `held, steps, claims, prints, failed, outputs, times`

// scanClaimed reads one claimed execution with its record, and further columns; false when the row has no execution.
func scanClaimed(rows pgx.Rows, further []any) (claimed, bool, error) {
	var x claimed
	if rows.RawValues()[0] == nil {
		return x, false, rows.Scan(append(make([]any, executionColumns+7), further...)...)
	}
	var steps, prints []string
	var claims []int64
	var failed []bool
	var outputs []json.RawMessage
	var times []time.Time
	into := append(x.targets(), &x.held, &steps, &claims, &prints, &failed, &outputs, &times)
	if err := rows.Scan(append(into, further...)...); err != nil {
		return x, false, err
	}
	x.checkpoints, x.interrupted = make(map[string]Checkpoint, len(steps)), map[string]bool{}
	for i, step := range steps {
		x.checkpoints[step] = Checkpoint{step, claims[i], prints[i], failed[i], outputs[i], times[i]}
	}
	return x, true, nil
}

// executionColumns is how many columns an Execution has.
var executionColumns = reflect.TypeFor[Execution]().NumField()

// targets are the fields of an Execution, in the order of columns.
func (x *Execution) targets() []any {
	v := reflect.ValueOf(x).Elem()
	into := make([]any, v.NumField(), v.NumField()+16)
	for i := range into {
		into[i] = v.Field(i).Addr().Interface()
	}
	return into
}

// Admission bounds how many executions of a flow, or of a surface, are run at once, by all processes together. The
// others stay ready in the queue, by priority and then by age, and can be cancelled there; a place that becomes free
// is taken at once. An execution that waits holds no place, and needs one again when its wait has ended.
//
// Two ways in are not held up, and are counted: runs that are inserted already claimed because somebody waits for
// them (RunNow, RunHere, InsertClaimed: chat turns, for example), and runs that workers outside lock.
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
	e.Look()
	return nil
}
