package executions

import (
	"context"
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
	pause time.Duration // until another try for executions that were locked; of work alone

	mu   sync.Mutex
	busy int
	more bool // something may be ready that there was no worker for
	open bool // claims are made
	skip map[string]time.Time
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
	c.setOpen(true)
	defer c.setOpen(false)
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

// fill claims for the workers that are free, and reports whether there may be more for those still free.
func (c *crew) fill(living context.Context) bool {
	free := c.free()
	if free == 0 {
		c.spread()
		return false
	}
	worker, claimed, missed, err := c.claim(living, free)
	if err != nil {
		c.e.log.WarnContext(living, "ready executions not claimed", "queue", c.queue, "error", err)
		time.AfterFunc(time.Second, c.look)
		return false
	}
	for _, x := range claimed {
		c.run(living, x, worker)
	}
	if !missed {
		c.pause = 0
	} else if len(claimed) < free {
		c.pause = min(max(2*c.pause, shortestMiss), longestMiss)
		time.AfterFunc(c.pause, c.look)
	}
	return len(claimed) == free
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
	return c.busy == 0
}

func (c *crew) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

func (c *crew) setOpen(open bool) {
	c.mu.Lock()
	c.open = open
	c.mu.Unlock()
}

// run puts a worker to a claimed execution.
func (c *crew) run(living context.Context, x claimed, worker string) {
	c.mu.Lock()
	c.busy++
	c.mu.Unlock()
	go func() {
		err := c.e.perform(living, x, worker)
		if err != nil {
			c.e.log.WarnContext(living, "execution not run to its end here", "execution", x.ID, "error", err)
		}
		c.mu.Lock()
		c.busy--
		more := c.more
		c.mu.Unlock()
		if more {
			c.look()
		}
	}()
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
	held        bool // lanes or calls of an earlier claim are still open
	checkpoints map[string]Checkpoint
	interrupted map[string]bool
}

// claim takes up to n ready executions, with their records, in one round trip and one transaction.
// Missed says that there were others, which somebody had locked.
func (c *crew) claim(ctx context.Context, n int) (worker string, took []claimed, missed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.e.opts.LeaseTTL)
	defer cancel()
	if worker, err = c.e.current(ctx); err != nil {
		return "", nil, false, err
	}
	b := &pgx.Batch{}
	b.Queue(`
		select `+columns+`, held
		  from (select (c.execution).*, c.held from claim_agent_executions(@worker, @queue, @n, @skip) c) x order by priority, id`,
		postgres.Strict{"worker": worker, "queue": c.queue, "n": n, "skip": c.skipped()}).Query(func(rows pgx.Rows) (err error) {
		took, err = pgx.CollectRows(rows, scanClaimed)
		return err
	})
	// What this transaction has claimed; its later statements see everything that was recorded before.
	b.Queue(`
		select k.execution_id::text, k.step, k.claim, k.fingerprint, k.failed, k.output, k.created_at
		  from agent_checkpoints k
		 where k.execution_id = any (coalesce(nullif(current_setting('lanekeeper.claimed', true), ''), '{}')::uuid[])`).Query(func(rows pgx.Rows) error { return fileCheckpoints(took, rows) })
	b.Queue(`
		select a.execution_id::text, a.step from agent_activity a
		 where a.execution_id = any (coalesce(nullif(current_setting('lanekeeper.claimed', true), ''), '{}')::uuid[])
		   and a.status = 'unknown' and a.error_class = 'interrupted' and a.step <> ''`).Query(func(rows pgx.Rows) error { return fileInterrupted(took, rows) })
	b.Queue(`select coalesce(current_setting('lanekeeper.missed', true), '') = 'yes'`).QueryRow(func(row pgx.Row) error { return row.Scan(&missed) })
	if err := c.e.pool.SendBatch(ctx, b).Close(); err != nil {
		return "", nil, false, err
	}
	return worker, took, missed, nil
}

// scanClaimed reads one claimed execution.
func scanClaimed(row pgx.CollectableRow) (claimed, error) {
	type wide struct {
		Execution
		Held bool
	}
	got, err := pgx.RowToStructByPos[wide](row)
	return claimed{got.Execution, got.Held, map[string]Checkpoint{}, map[string]bool{}}, err
}

// fileCheckpoints gives each execution its own.
func fileCheckpoints(took []claimed, rows pgx.Rows) error {
	byID := index(took)
	var id string
	var k Checkpoint
	_, err := pgx.ForEachRow(rows, []any{&id, &k.Step, &k.Claim, &k.Fingerprint, &k.Failed, &k.Output, &k.CreatedAt}, func() error {
		byID[id].checkpoints[k.Step] = k
		k.Output = nil // or the next row is read into the same memory
		return nil
	})
	return err
}

// fileInterrupted gives each execution the steps whose call an earlier claim left in flight.
func fileInterrupted(took []claimed, rows pgx.Rows) error {
	byID := index(took)
	var id, step string
	_, err := pgx.ForEachRow(rows, []any{&id, &step}, func() error {
		byID[id].interrupted[step] = true
		return nil
	})
	return err
}

func index(took []claimed) map[string]claimed {
	byID := make(map[string]claimed, len(took))
	for _, x := range took {
		byID[x.ID] = x
	}
	return byID
}
