package executions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// MaxClaim bounds the number of executions that one ClaimRuns locks.
const MaxClaim = 100

// ClaimParams describe the executions that an external worker requests.
type ClaimParams struct {
	Flows []string // external, or external:NAME
	Owner string   // names one process of the worker
	TTL   time.Duration
	Max   int // number of locks, at most MaxClaim
	// Known are the ids of the locks that the worker has. ClaimRuns returns the owner's other live locks again, because
	// the response to an earlier call may be lost.
	Known []string
	Wait  time.Duration // maximum wait for the first execution; 0 returns at once
}

// ClaimRuns locks up to Max executions of the flows, as LockRun does, by priority and then by age. Without a ready
// execution it waits for the first one. It returns no lock after Wait, after the end of ctx, and while the agent is
// paused. Concurrent calls of different owners get different executions. Errors: ErrMalformed.
func (e *Engine) ClaimRuns(ctx context.Context, p ClaimParams) ([]RunLock, error) {
	if p.Wait <= 0 {
		return e.tryClaimRuns(ctx, p)
	}
	deadline := time.NewTimer(p.Wait)
	defer deadline.Stop()
	ready, unsubscribe := e.claimable.subscribe(ctx, p.Flows...) // before the first attempt, so it misses no start
	defer unsubscribe()
	for attempts := 0; ; attempts++ {
		locks, err := e.tryClaimRuns(ctx, p)
		if err != nil || len(locks) > 0 {
			return locks, err
		}
		if attempts == 0 {
			if err := recordIdle(ctx, e.pool, p); err != nil {
				e.log.WarnContext(ctx, "idle worker not recorded", "owner", p.Owner, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-deadline.C:
			return nil, nil
		case <-ready:
		}
	}
}

// recordIdle records that a worker waits for executions, for the Engine Room. It also deletes up to 20 rows that
// expired more than an hour ago.
func recordIdle(ctx context.Context, db postgres.DB, p ClaimParams) error {
	_, err := db.Exec(ctx, `
		with expired as (
		  delete from agent_idle_workers
		   where owner in (select i.owner from agent_idle_workers i
		                    where i.expires_at < clock_timestamp() - interval '1 hour' and i.owner <> @owner
		                    limit 20 for update skip locked))
		insert into agent_idle_workers as w (owner, flows, expires_at)
		values (@owner, @flows, clock_timestamp() + make_interval(secs => @wait))
		on conflict (owner) do update
		   set flows = excluded.flows, seen_at = clock_timestamp(), expires_at = excluded.expires_at,
		       since = case when w.expires_at < clock_timestamp() - interval '1 minute' then clock_timestamp()
		                    else w.since end`,
		postgres.Strict{"owner": p.Owner, "flows": p.Flows, "wait": (p.Wait + idleGrace).Seconds()})
	return err
}

// idleGrace is the longest expected pause of a worker between two calls of ClaimRuns.
const idleGrace = 10 * time.Second

// tryClaimRuns claims ready executions in one transaction.
func (e *Engine) tryClaimRuns(ctx context.Context, p ClaimParams) (locks []RunLock, err error) {
	err = postgres.InTx(ctx, e.pool, func(tx pgx.Tx) error {
		locks = nil
		ids, err := claimableRuns(ctx, tx, p)
		if err != nil {
			return err
		}
		for _, id := range ids {
			lock, refused, err := lockRun(ctx, tx, id, p.Owner, p.TTL)
			switch {
			case err != nil:
				return err
			case refused == nil: // otherwise the execution was locked or cancelled meanwhile
				locks = append(locks, lock)
			}
		}
		return nil
	})
	if errors.Is(explainPaused(ctx, e.pool, err), ErrPaused) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("claim executions for %s: %w", p.Owner, invalidArgument(err))
	}
	for _, lock := range locks {
		e.logLocked(ctx, lock, p.Owner)
	}
	return locks, nil
}

// claimableRuns returns the ids of the executions to lock: first those whose lock the owner holds but does not know,
// then ready ones. It takes the advisory lock of lock_agent_execution, so it skips executions that another transaction
// is locking.
func claimableRuns(ctx context.Context, tx pgx.Tx, p ClaimParams) ([]string, error) {
	rows, err := tx.Query(ctx, `
		(select w.execution_id::text
		   from agent_workers w join agent_executions x on x.id = w.execution_id and x.claimed_by = w.id
		  where w.kind = 'outside' and w.owner = @owner and w.expires_at > clock_timestamp()
		    and w.lock_id <> all (@known::text[]) and x.flow = any (@flows::text[])
		  limit @max)
		union all
		(select x.id::text
		   from (select r.id
		           from (select distinct u.flow from unnest(@flows::text[]) u (flow)) f
		          cross join lateral (
		                select e.id, e.priority from agent_executions e
		                 where e.flow = f.flow and e.is_external and e.status in ('pending', 'running')
		                   and e.claimed_by is null
		                 order by e.priority, e.id limit @scan_limit) r
		          order by r.priority, r.id) x
		  where pg_try_advisory_xact_lock(hashtextextended('run lock ' || x.id, 0))
		  limit @max)
		limit @max`, postgres.Strict{
		"owner": p.Owner, "known": p.Known, "flows": p.Flows, "max": p.Max, "scan_limit": p.Max + MaxClaim,
	})
	return postgres.Collect(rows, err, "find executions to claim", pgx.RowTo[string])
}

// readClaimable counts the ready executions of each flow, up to MaxClaim. It omits flows without ready executions.
func (e *Engine) readClaimable(ctx context.Context, flows []string) (map[string]int, error) {
	type count struct {
		Flow  string
		Ready int
	}
	rows, err := e.pool.Query(ctx, `
		select f.flow, r.ready
		  from unnest(@flows::text[]) f (flow)
		 cross join lateral (
		       select count(*)::int as ready
		         from (select from agent_executions e
		                where e.flow = f.flow and e.is_external and e.status in ('pending', 'running')
		                  and e.claimed_by is null
		                limit @max) x) r
		 where r.ready > 0`, postgres.Strict{"flows": flows, "max": MaxClaim})
	counts, err := postgres.Collect(rows, err, "count claimable executions", pgx.RowToStructByPos[count])
	readyByFlow := make(map[string]int, len(counts))
	for _, c := range counts {
		readyByFlow[c.Flow] = c.Ready
	}
	return readyByFlow, err
}
