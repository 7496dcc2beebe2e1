package retention_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// much is 20,000 rows of everything, over the last 200 days.
const much = `
	create temp table n as
	  select n, at, lanekeeper.agent_uuid7(at) as id, 'hb_' || n / 4 as trace
	    from (select n, clock_timestamp() - interval '200 days' + n * interval '14 minutes' as at
	      from generate_series(1, 20000) n) x;
	insert into agent_webhook_targets (id, name, url, secrets, events)
	  values ('00000000-0000-7000-8000-000000000001', 't', 'u', '{a}', '{*}');
	insert into agent_automations (id, name, cron, prompt)
	  values ('00000000-0000-7000-8000-000000000002', 'a', '* * * * *', 'p');
	insert into agent_executions (id, trace_id, surface, flow, status, created_at, completed_at)
	  select id, trace, 'flow', 'f', case when n % 400 = 0 then 'waiting' else 'completed' end, at, case
	    when n % 400 > 0 then at end from n;
	insert into agent_checkpoints (execution_id, step, claim) select id, s, 1 from n, unnest(array['a', 'b', 'c']) s;
	insert into agent_status_changes (execution_id, n, status) select id, 1, 'running' from n;
	insert into agent_requests (id, kind, execution_id, trace_id) select id, 'test', id, trace from n;
	insert into agent_message_drafts (execution_id, claim, content) select id, 1, '' from n;
	insert into agent_events (id, event, key, external_id, execution_id, created_at) select id, 'AGENT_COMPLETED', id,
	  'completed ' || id, id, at from n;
	insert into agent_events (event, key, id, created_at) select 'EVENT_COMPLETED', n, lanekeeper.agent_uuid7(at), at
	  from n;
	insert into agent_approvals (id, trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
	  arguments_hash, status, expires_at, created_at)
	  select id, trace, id, n::text, n % 2 = 0, 's', 1, '{}', n::text, 'consumed', at, at from n;
	insert into agent_automation_runs (id, automation_id, scheduled_for, status, finished_at, created_at, claimed_at)
	  select id, '00000000-0000-7000-8000-000000000002', at, 'success', at, at, at from n;
	insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256,
	  finished_at)
	  select id, 'e', n, 't', 't', 'done', '', '', at from n;
	insert into agent_webhook_outbox (id, target_id, event, payload, trace_id, status, finished_at)
	  select id, '00000000-0000-7000-8000-000000000001', 'e', '{}', 't', 'sent', at from n;
	insert into agent_channel_messages (id, channel, external_id, conversation, sender, status, received_at, finished_at)
	  select id, 'c', n, 'c', 's', 'done', at, at from n;
	insert into agent_threads (id, channel, updated_at) select n, 'chat', at from n;
	insert into agent_messages (id, thread_id, role, content, status, seq, turn) select id, n, 'user', '', 'received', 1, 1
	  from n;
	insert into agent_budgets (scope, created_at) select 'run:' || n, at from n;
	insert into agent_activity (id, trace_id, execution_id, skill_name, created_at) select id, trace, id, 's', at from n;
	insert into agent_prompt_parts (digest, body, used_on) select sha256(n::text::bytea), '{}', at::date from n;
	insert into agent_prompts (activity_id, messages, created_at) select id, array[sha256(n::text::bytea)], at from n;
	insert into agent_activity_counts (span, start, kind, skill, surface, model) select 'hour', at, 'call', n, '', ''
	  from n;
	insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds) select 'thread:' || n,
	  'nobody', n, at, at, 60 from n;
	insert into agent_activity_open (activity_id, kind) select id, 'call' from n where n % 400 = 0;
	update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`

// TestAPieceReadsWhatItLooksAt, by index and no further, at any size of the tables: none is read from end to end, and
// of none are many more rows fetched than are looked at.
func TestAPieceReadsWhatItLooksAt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	partitions(t, pool)
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), much, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	require.NoError(t, err)
	pgtest.Exec(t, pool, `analyze`)
	pgtest.Exec(t, pool, `update agent_retention set keep = least * 2`)
	kinds := pgtest.Value[[]string](t, pool, `select array_agg(kind order by kind) from agent_retention`)
	for _, keep := range []string{"14 days", "90 days"} {
		pgtest.Exec(t, pool, `update agent_retention set keep = $1::text::interval where kind = 'activity'`, keep)
		for _, kind := range kinds {
			least := 100
			if kind == "executions" && keep == "90 days" {
				least = 0 // it is busy with the checkpoints of those that went before
			}
			if kind == "evals" || kind == "eval_labels" {
				least = 0 // there are none
			}
			readsLittle(t, pool, kind, least, piece(kind))
			readsLittle(t, pool, kind, 0, piece(kind))
		}
	}
	readsLittle(t, pool, "months", 0, func(ctx context.Context, db postgres.Beginner) (int64, error) {
		_, err := retention.Retirable(ctx, db, "")
		return 0, err
	})
}

// piece deletes up to a hundred rows of a kind.
func piece(kind string) func(ctx context.Context, db postgres.Beginner) (int64, error) {
	return func(ctx context.Context, db postgres.Beginner) (int64, error) {
		removed, _, err := retention.Prune(ctx, db, kind, 100, false)
		return removed, err
	}
}

// readsLittle runs what removes something, in the middle of what is old and not at once after what was removed before.
func readsLittle(t *testing.T, pool postgres.Beginner, what string, least int,
	run func(context.Context, postgres.Beginner) (int64, error),
) {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		before, err := reads(t, tx)
		if err != nil {
			return err
		}
		removed, err := run(t.Context(), tx)
		if err != nil {
			return err
		}
		assert.Truef(t, removed >= int64(least/4), "%s: %d rows", what, removed)
		after, err := reads(t, tx)
		for table, n := range after {
			if seq, rows := n.Seq-before[table].Seq, n.Rows-before[table].Rows; seq > 0 || rows > 4000 {
				t.Errorf("%s reads %s from end to end %d times, and %d rows of it", what, table, seq, rows)
			}
		}
		return err
	})
	require.NoError(t, err, what)
}

// tableRead is how often this session has read a table from end to end, and how many of its rows.
type tableRead struct {
	Table     string
	Seq, Rows int64
}

// reads looks at all tables that grow.
func reads(t *testing.T, db postgres.DB) (map[string]tableRead, error) {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		select relname::text, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables
		 where relname like 'agent_%' and relname !~ '^agent_(retention|activity_counted|activity_retired|webhook_targets|automations$)' `)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[tableRead])
	by := map[string]tableRead{}
	for _, r := range list {
		by[r.Table] = r
	}
	return by, err
}
