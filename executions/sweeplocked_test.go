package executions_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// sweepPatience is far longer than a sweep takes, and far shorter than a client leaves a transaction open.
const sweepPatience = 30 * time.Second

// What another transaction has locked is left to a later sweep, and no other execution waits for it.
func TestASweepPassesOverWhatIsLocked(t *testing.T) {
	t.Parallel()
	const (
		lane = `select from agent_locks where lane = 'automation:a' for update`
		end  = `insert into agent_events (event, key, external_id)
		        select 'AGENT_COMPLETED', l.execution_id::text, 'completed ' || l.execution_id from agent_locks l where l.lane = 'automation:a'`
	)
	lost := func(t *testing.T, pool *pgxpool.Pool, set string) (held, free string) {
		gone := worker(t, pool)
		held, free = pending(t, pool), pending(t, pool)
		for _, id := range []string{held, free} {
			mustClaim(t, pool, id, gone)
			exec(t, pool, `update agent_executions set `+set+` where id = @id`, postgres.Strict{"id": id})
		}
		exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 minute' where id = @id`, postgres.Strict{"id": gone})
		return held, free
	}
	waits := func(t *testing.T, pool *pgxpool.Pool, wait string) (held, free string) {
		held, free = pending(t, pool), pending(t, pool)
		exec(t, pool, `update agent_executions set status = 'running'`)
		exec(t, pool, `update agent_executions set status = 'waiting', waiting_step = 'w', `+wait)
		return held, free
	}
	for name, one := range map[string]struct {
		lock    string
		prepare func(t *testing.T, pool *pgxpool.Pool) (held, free string)
		then    executions.Status
	}{
		"timer": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool, `waiting_for = 'delay', waiting_until = clock_timestamp() - interval '1 hour'`)
		}, executions.Running},
		"child": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool, `waiting_for = 'agent', waiting_key = lanekeeper.agent_uuid7()::text, waiting_until = clock_timestamp() - interval '1 hour'`)
		}, executions.Running},
		"lane wanted": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool, `waiting_for = 'lane', waiting_key = 'automation:free'`)
		}, executions.Running},
		"lost worker": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return lost(t, pool, `on_lost = 'fail'`)
		}, executions.Failed},
		"no progress": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			held, free := lost(t, pool, `on_lost = 'fail', progress_seconds = 1, updated_at = clock_timestamp() - interval '1 hour'`)
			exec(t, pool, `update agent_workers set expires_at = clock_timestamp() + interval '1 hour'`)
			return held, free
		}, executions.Failed},
		"end": {end, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return lost(t, pool, `on_lost = 'fail'`)
		}, executions.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := prepare(t, pool, flow(nothing))
			held, free := one.prepare(t, pool)
			exec(t, pool, `
				insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
				select 'automation:a', x.id || '#' || x.claim, 1, clock_timestamp(), clock_timestamp() + interval '1 hour', 3600, x.id
				  from agent_executions x where x.id = @id`, postgres.Strict{"id": held})
			before, err := executions.Get(t.Context(), pool, held)
			if err != nil {
				t.Fatal(err)
			}
			tx := leftOpen(t, pool, one.lock)
			ctx, cancel := context.WithTimeout(t.Context(), sweepPatience)
			defer cancel()
			if err := p.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			until(t, pool, free, one.then)
			if x, err := executions.Get(t.Context(), pool, held); err != nil || x.Status != before.Status || x.Claim != before.Claim {
				t.Errorf("what is locked: %+v, %v", x, err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			until(t, pool, held, one.then)
		})
	}
}
