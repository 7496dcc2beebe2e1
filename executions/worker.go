package executions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// worker is this process's lease. An expired one never comes back: the process registers anew.
type worker struct {
	id       string
	deadline time.Time       // by the local monotonic clock, counted from before the call that prolonged it
	strays   map[string]bool // claims that the last renewal found without a run of this process
}

// register begins a new lease.
func (e *Engine) register(ctx context.Context) error {
	began := time.Now()
	var id string
	err := cmp.Or(e.opts.Lease, e.pool).QueryRow(ctx, `
		insert into agent_workers (name, ttl_seconds, expires_at)
		values (@name, @ttl::int, clock_timestamp() + make_interval(secs => @ttl::int)) returning id::text`,
		postgres.Strict{"name": name(), "ttl": int(e.opts.LeaseTTL.Seconds())}).Scan(&id)
	if err != nil {
		return fmt.Errorf("register worker: %w", err)
	}
	e.mu.Lock()
	e.worker = &worker{id: id, deadline: began.Add(e.opts.LeaseTTL)}
	e.mu.Unlock()
	return nil
}

// lease is the worker's lease and when it ends unless it is renewed; nil when there is none.
func (e *Engine) lease() (w *worker, until time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.worker != nil {
		until = e.worker.deadline
	}
	return e.worker, until
}

// Worker is the id of this process among the rows of agent_workers, registering it when it has none. It counts as
// dead when its row has expired; a process that wakes after that gets another.
func (e *Engine) Worker(ctx context.Context) (string, error) { return e.current(ctx) }

// current returns the live lease's id, registering one when there is none.
func (e *Engine) current(ctx context.Context) (string, error) {
	e.registering.Lock()
	defer e.registering.Unlock()
	for range 2 {
		w, until := e.lease()
		if w != nil && time.Now().Before(until) {
			return w.id, nil
		}
		e.lose(w)
		if err := e.register(ctx); err != nil {
			return "", err
		}
	}
	return "", ErrLost
}

// lose forgets a lease and stops everything that ran under it.
func (e *Engine) lose(w *worker) {
	if w == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.worker == w {
		e.worker = nil
	}
	for _, r := range e.runs {
		if r.worker == w.id {
			r.stop(ErrLost)
		}
	}
}

// retire ends the lease at a shutdown, so that nobody waits for it to expire.
func (e *Engine) retire(ctx context.Context) {
	e.mu.Lock()
	w := e.worker
	e.worker = nil
	e.mu.Unlock()
	if w == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := e.pool.Exec(ctx, `update agent_workers set expires_at = clock_timestamp() where id = @id`,
		postgres.Strict{"id": w.id}); err != nil {
		e.log.WarnContext(ctx, "worker lease not ended", "worker", w.id, "error", err)
	}
}

// renewLoop keeps the lease alive. When it cannot, the lease's own deadline stops the runs.
func (e *Engine) renewLoop(ctx context.Context) {
	every := e.opts.LeaseTTL / 3
	for {
		wait := every
		if err := e.renew(ctx); err != nil && ctx.Err() == nil {
			e.log.WarnContext(ctx, "worker lease not renewed", "error", err)
			wait = min(every, time.Second)
		}
		if !sleep(ctx, e.untilDeadline(wait)) {
			return
		}
	}
}

// untilDeadline shortens a pause so that a lease's end is noticed when it comes.
func (e *Engine) untilDeadline(wait time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.worker != nil {
		wait = min(wait, max(time.Until(e.worker.deadline), time.Millisecond))
	}
	return wait
}

// renew prolongs the lease and learns in the same statement which runs are still ours, so that a cancel
// or a takeover is noticed where no notification came through.
func (e *Engine) renew(ctx context.Context) error {
	w, until := e.lease()
	if w == nil || !time.Now().Before(until) {
		_, err := e.current(ctx)
		return err
	}
	began := time.Now()
	timed, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	var alive bool
	var mine, requested []string
	err := renewWorker(timed, cmp.Or(e.opts.Lease, e.pool), w.id, &alive, &mine, &requested)
	switch {
	case err != nil:
		return fmt.Errorf("renew worker: %w", err)
	case !alive:
		e.lose(w)
		_, err := e.current(ctx)
		return errors.Join(ErrLost, err)
	}
	for _, id := range requested {
		e.cancelled(ctx, id)
	}
	gone, strays := e.compare(w, began, mine)
	for _, r := range gone {
		e.ended(ctx, r)
	}
	for _, stray := range strays {
		e.log.WarnContext(ctx, "claim without a run", "claim", stray)
		id, claim, _ := strings.Cut(stray, "#")
		e.handBack(ctx, id, claim)
		e.Look() // this process may go on with it, under a claim that it knows of
	}
	return nil
}

// renewWorker prolongs a lease that has not ended, and reads what is claimed under it. The row is locked before the
// clock is read.
func renewWorker(ctx context.Context, pool *pgxpool.Pool, id string, alive *bool, mine, requested *[]string) error {
	b := &pgx.Batch{}
	args := postgres.Strict{"id": id}
	b.Queue(`select from agent_workers where id = @id for no key update`, args)
	b.Queue(`
		update agent_workers set expires_at = clock_timestamp() + make_interval(secs => ttl_seconds)
		 where id = @id and expires_at > clock_timestamp()`, args).Exec(func(done pgconn.CommandTag) error {
		*alive = done.RowsAffected() == 1
		return nil
	})
	b.Queue(`
		select array(
		  select e.id || '#' || e.claim from agent_executions e where e.claimed_by = @id), array(
		  select c.execution_id::text from agent_cancel_requests c
		   where exists (select from agent_executions e where e.id = c.execution_id and e.claimed_by = @id))`,
		args).QueryRow(func(row pgx.Row) error { return row.Scan(mine, requested) })
	return pool.SendBatch(ctx, b).Close()
}

// compare sets the claims that the database has for a worker against the runs of this process: which
// runs have lost theirs, and which claims have had no run for two renewals. Such a claim was made, but
// the answer was lost with its connection, or its end could not be written; nobody else would take it
// away while this process lives.
func (e *Engine) compare(w *worker, began time.Time, mine []string) (gone []*run, strays []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w.deadline = began.Add(e.opts.LeaseTTL)
	held := make(map[string]bool, len(mine))
	running := make(map[string]bool, len(mine))
	for _, claim := range mine {
		held[claim] = true
	}
	for _, r := range e.runs {
		running[r.owner()] = true
		if r.worker == w.id && r.began.Before(began) && !held[r.owner()] {
			gone = append(gone, r)
		}
	}
	before := w.strays
	w.strays = map[string]bool{}
	for claim := range held {
		if !running[claim] {
			w.strays[claim] = true
			if before[claim] {
				strays = append(strays, claim)
			}
		}
	}
	return gone, strays
}

// ended stops a run whose claim is not in the database any more, for the reason that the row gives.
func (e *Engine) ended(ctx context.Context, r *run) {
	now, err := Get(ctx, e.pool, r.exec.ID)
	switch {
	case err == nil && now.Status == Cancelled:
		r.stop(ErrCancelled)
	case err == nil && now.Status == Waiting && now.WaitNumber > r.exec.WaitNumber:
		r.stop(ErrParked) // it has just parked
	case err == nil && now.Status.Ended() && now.Claim == r.exec.Claim: // it has just finished
	default:
		r.stop(ErrLost)
	}
}

// sleep waits for d; false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// giveUp hands an unfinished execution back, so that it goes on elsewhere at once.
func (e *Engine) giveUp(ctx context.Context, r *run) {
	e.handBack(context.WithoutCancel(ctx), r.exec.ID, r.exec.Claim)
}

// handBack gives a claim up. One that could not be given up is lost with the worker's lease, or found as
// a claim without a run.
func (e *Engine) handBack(ctx context.Context, id string, claim any) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	done, err := e.pool.Exec(ctx, `
		select lanekeeper.release_agent_claim(x.id, x.claim) from agent_executions x where x.id = @id and x.claim = @claim`,
		postgres.Strict{"id": id, "claim": claim})
	switch {
	case err != nil:
		e.log.WarnContext(ctx, "execution not handed back", "execution", id, "error", err)
		return
	case done.RowsAffected() == 0: // it has gone on under another claim
		return
	}
	e.log.InfoContext(ctx, "execution handed back", "execution", id)
}
