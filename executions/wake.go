package executions

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

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
