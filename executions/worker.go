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

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// workerLease is this process's lease. An expired lease never revives: the process registers a new lease.
type workerLease struct {
	id             string
	deadline       time.Time       // local monotonic time, counted from before the renewing statement
	orphanedClaims map[string]bool // claims without a run at the last renewal
}

// registerWorker registers this process under a new lease.
func (e *Engine) registerWorker(ctx context.Context) error {
	sentAt := time.Now()
	var id string
	err := cmp.Or(e.opts.Lease, e.pool).QueryRow(ctx, `
		insert into agent_workers (name, ttl_seconds, expires_at, go_flows)
		values (@name, @ttl::int, clock_timestamp() + make_interval(secs => @ttl::int), @flows)
		returning id::text`,
		postgres.Strict{
			"name": processName(), "ttl": int(e.opts.LeaseTTL.Seconds()), "flows": e.registeredFlows(),
		}).Scan(&id)
	if err != nil {
		return fmt.Errorf("register worker: %w", err)
	}
	e.mu.Lock()
	e.lease = &workerLease{id: id, deadline: sentAt.Add(e.opts.LeaseTTL)}
	e.mu.Unlock()
	return nil
}

// currentLease returns the lease and its deadline; nil when there is none.
func (e *Engine) currentLease() (w *workerLease, deadline time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease != nil {
		deadline = e.lease.deadline
	}
	return e.lease, deadline
}

// WorkerID returns the id of this process in agent_workers. Without a live lease, it registers the process first. A
// process whose row expired gets a new id.
func (e *Engine) WorkerID(ctx context.Context) (string, error) {
	e.registerMu.Lock()
	defer e.registerMu.Unlock()
	for range 2 {
		w, deadline := e.currentLease()
		if w != nil && time.Now().Before(deadline) {
			return w.id, nil
		}
		e.dropLease(w)
		if err := e.registerWorker(ctx); err != nil {
			return "", err
		}
	}
	return "", ErrLost
}

// dropLease drops a lease and stops its runs.
func (e *Engine) dropLease(w *workerLease) {
	if w == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease == w {
		e.lease = nil
	}
	for _, r := range e.runs {
		if r.worker == w.id {
			r.stop(ErrLost)
		}
	}
}

// endLease ends the lease at a shutdown, so no other process waits for its expiry.
func (e *Engine) endLease(ctx context.Context) {
	e.mu.Lock()
	w := e.lease
	e.lease = nil
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

// renewLoop renews the lease. If renewals fail, the lease's deadline stops the runs.
func (e *Engine) renewLoop(ctx context.Context) {
	interval := e.opts.LeaseTTL / 3
	var failures logging.Failures
	for {
		pause := interval
		err := e.renew(ctx)
		failures.Log(ctx, e.log, "worker lease not renewed", err)
		if err != nil {
			pause = min(interval, time.Second)
		}
		if !sleep.For(ctx, e.clampToDeadline(pause)) {
			return
		}
	}
}

// clampToDeadline shortens a pause to end at the deadline of the lease.
func (e *Engine) clampToDeadline(pause time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease != nil {
		pause = min(pause, max(time.Until(e.lease.deadline), time.Millisecond))
	}
	return pause
}

// renew renews the lease and reads its claims in the same round trip. So it finds cancels and takeovers without a
// notification.
func (e *Engine) renew(ctx context.Context) error {
	w, deadline := e.currentLease()
	if w == nil || !time.Now().Before(deadline) {
		_, err := e.WorkerID(ctx)
		return err
	}
	sentAt := time.Now()
	renewCtx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	var alive bool
	var claims, cancels []string
	err := renewWorker(renewCtx, cmp.Or(e.opts.Lease, e.pool), w.id, &alive, &claims, &cancels)
	switch {
	case err != nil:
		return fmt.Errorf("renew worker: %w", err)
	case !alive:
		e.dropLease(w)
		_, err := e.WorkerID(ctx)
		return errors.Join(ErrLost, err)
	}
	lost, orphaned := e.reconcile(w, sentAt, claims)
	// What follows may wait for locks, or for connections that the runs use. The next renewal must not wait with it.
	ctx, done := context.WithTimeout(ctx, e.opts.LeaseTTL/3)
	defer done()
	for _, r := range lost {
		e.stopLostRun(ctx, r)
	}
	for _, id := range cancels {
		e.stopIfCancelled(ctx, id)
	}
	for _, claimKey := range orphaned {
		e.log.WarnContext(ctx, "claim without a run", "claim", claimKey)
		id, claim, _ := strings.Cut(claimKey, "#")
		e.releaseClaimOf(ctx, id, claim)
		e.Poll() // this process may claim its execution again
	}
	return nil
}

// renewWorker renews a live lease and reads its claims. The statement locks the row before it reads the clock.
func renewWorker(ctx context.Context, pool *pgxpool.Pool, id string, alive *bool, claims, cancels *[]string) error {
	b := &pgx.Batch{}
	args := postgres.Strict{"id": id}
	b.Queue(`select from agent_workers where id = @id for no key update`, args)
	b.Queue(`
		update agent_workers set expires_at = clock_timestamp() + make_interval(secs => ttl_seconds)
		 where id = @id and expires_at > clock_timestamp()`, args).Exec(func(tag pgconn.CommandTag) error {
		*alive = tag.RowsAffected() == 1
		return nil
	})
	b.Queue(`
		select array(
		         select e.id || '#' || e.claim from agent_executions e where e.claimed_by = @id),
		       array(
		         select c.execution_id::text from agent_cancel_requests c
		          where exists (select from agent_executions e where e.id = c.execution_id and e.claimed_by = @id))`,
		args).QueryRow(func(row pgx.Row) error { return row.Scan(claims, cancels) })
	return pool.SendBatch(ctx, b).Close()
}

// reconcile compares the database's claims of a worker with the runs of this process. It returns runs without a claim,
// and claims without a run for two renewals. Such claims remain after a lost response or a failed completion. No other
// process can claim their executions while this process lives.
func (e *Engine) reconcile(w *workerLease, sentAt time.Time, claims []string) (lost []*run, orphaned []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w.deadline = sentAt.Add(e.opts.LeaseTTL)
	held := make(map[string]bool, len(claims))
	running := make(map[string]bool, len(claims))
	for _, claim := range claims {
		held[claim] = true
	}
	for _, r := range e.runs {
		running[r.laneOwner().String()] = true
		if r.worker == w.id && r.startedAt.Before(sentAt) && !held[r.laneOwner().String()] {
			lost = append(lost, r)
		}
	}
	previous := w.orphanedClaims
	w.orphanedClaims = map[string]bool{}
	for claim := range held {
		if !running[claim] {
			w.orphanedClaims[claim] = true
			if previous[claim] {
				orphaned = append(orphaned, claim)
			}
		}
	}
	return lost, orphaned
}

// stopLostRun stops a run that lost its claim. The cause depends on the state of the execution. When ctx ends first, it
// leaves the run to the next renewal.
func (e *Engine) stopLostRun(ctx context.Context, r *run) {
	now, err := Get(ctx, e.pool, r.exec.ID)
	switch {
	case err == nil && now.Status == Cancelled:
		r.stop(ErrCancelled)
	case err == nil && now.Status == Waiting && now.WaitNumber > r.exec.WaitNumber:
		r.stop(ErrParked) // the run has just parked
	case err == nil && now.Status.Ended() && now.Claim == r.exec.Claim: // the run has just finished
	case err != nil && ctx.Err() != nil:
	default:
		r.stop(ErrLost)
	}
}

// releaseClaim releases an unfinished execution, so another process continues it at once.
func (e *Engine) releaseClaim(ctx context.Context, r *run) bool {
	return e.releaseClaimOf(context.WithoutCancel(ctx), r.exec.ID, r.exec.Claim)
}

// releaseClaimOf releases a claim. After a failure, the claim ends with the worker's lease or as an orphaned claim. It
// returns false if the claim is not live any more, or the release fails.
func (e *Engine) releaseClaimOf(ctx context.Context, id string, claim any) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tag, err := e.pool.Exec(ctx, `
		select lanekeeper.release_agent_claim(x.id, x.claim) from agent_executions x where x.id = @id and x.claim = @claim`,
		postgres.Strict{"id": id, "claim": claim})
	switch {
	case err != nil:
		e.log.WarnContext(ctx, "execution not released", "execution", id, "error", err)
		return false
	case tag.RowsAffected() == 0: // another claim has replaced this one
		return false
	}
	e.log.InfoContext(ctx, "execution released", "execution", id)
	return true
}
