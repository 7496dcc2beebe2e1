package retention_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// pieces prunes a kind a hundred rows at a time until nothing is left to do. It returns how many went in each piece.
func pieces(t *testing.T, db postgres.Beginner, kind string) (removed []int64) {
	t.Helper()
	for more := true; more; {
		n, again, err := retention.Prune(t.Context(), db, kind, 100, false)
		require.Truef(t, err == nil && len(removed) <= 50, "%v after %v", err, removed)
		removed, more = append(removed, n), again
	}
	return removed
}

func TestALongThreadGoesInPieces(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '30 days' where kind = 'messages'`)
	pgtest.Exec(t, pool, `
		insert into agent_threads (id, channel, updated_at, next_seq)
		select t, 'chat', now() - interval '60 days' + t * interval '1 hour', 1000 from generate_series(1, 4) t`)
	pgtest.Exec(t, pool, `
		with x as (insert into agent_executions (trace_id, surface, flow) values ('hb_x', 'flow', 'f') returning id)
		insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id)
		select t, n, n, 'user', n, 'received', case when t = 2 and n = 1 then x.id end from x, generate_series(1, 4) t,
		  generate_series(1, 150) n`)
	n, more, err := retention.Prune(t.Context(), pool, "messages", 100, false)
	assert.Truef(t, n == 100 && more && err == nil, "the first piece: %d, %v, %v", n, more, err)
	assert.Equal(t, 101, pgtest.Value[int](t, pool, `select min(seq) from agent_messages where thread_id = '1'`))
	for _, n := range pieces(t, pool, "messages") {
		assert.Truef(t, n <= 100, "a piece has deleted %d messages", n)
	}
	left := pgtest.Value[[]string](t, pool,
		`select array_agg(distinct thread_id) from agent_messages`)
	assert.Truef(t, len(left) == 1 && left[0] == "2",
		"threads %v have messages, want 2, in which an execution that goes on has spoken", left)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_threads`))
}

// over makes executions that ended two days ago, each with an event and so many checkpoints.
func over(t *testing.T, pool *pgxpool.Pool, executions, checkpoints int) {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		pgtest.Exec(t, tx, `set local session_replication_role = replica`)
		pgtest.Exec(t, tx, `
			with x as (
			  insert into agent_executions (id, trace_id, surface, flow, status, created_at, completed_at)
			  select lanekeeper.agent_uuid7(at), 'hb_' || n, 'flow', 'f', 'completed', at, at
			    from (select now() - interval '2 days' as at) a, generate_series(1, $1) n returning id),
			c as (insert into agent_checkpoints (execution_id, step, claim) select x.id, n, 1 from x, generate_series(1, $2) n)
			insert into agent_events (event, key, external_id, execution_id) select 'AGENT_COMPLETED', x.id,
			  'completed ' || x.id, x.id from x`,
			executions, checkpoints)
		return nil
	})
	require.NoError(t, err)
}

// A locked row keeps what it belongs to, and nothing else.
func TestOneLockedRowKeepsOnlyItsOwn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '1 day' where kind in ('executions', 'messages')`)
	over(t, pool, 4, 0)
	pgtest.Exec(t, pool, `
		insert into agent_threads (id, channel, updated_at, next_seq)
		select t, 'chat', now() - interval '2 days' + t * interval '1 hour', 1000 from generate_series(1, 4) t`)
	pgtest.Exec(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status) select t, 1, 1, 'user', '', 'received'
		  from generate_series(1, 4) t`)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_events order by external_id limit 1 for update`)
	pgtest.Exec(t, tx, `select from agent_messages where thread_id = '2' for update`)
	for _, kind := range []string{"executions", "messages"} {
		removed, _, err := retention.Prune(t.Context(), pool, kind, 100, false)
		assert.Truef(t, removed == 3 && err == nil, "beside a locked row %d %s are deleted, want 3: %v", removed, kind, err)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	for _, kind := range []string{"executions", "messages"} {
		removed, _, err := retention.Prune(t.Context(), pool, kind, 100, true)
		assert.Truef(t, removed == 1 && err == nil, "afterwards %d %s are deleted, want 1: %v", removed, kind, err)
	}
}

func TestManyCheckpointsGoInPieces(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '1 day' where kind = 'executions'`)
	over(t, pool, 3, 150)
	removed := pieces(t, pool, "executions")
	left := pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints`)
	assert.Truef(t, left == 0 && removed[0] == 3 && len(removed) == 6, "%d checkpoints are left after %v", left, removed)
}

// A row may change between the statement that finds it and the one that deletes it.
func TestARowThatChangedAfterItWasFoundStays(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('hb_x', 'flow', 'f')`)
	pgtest.Exec(t, pool, `insert into agent_budgets (scope, reserved_tokens) values ('run:x', 1)`)
	pgtest.Exec(t, pool, `update agent_retention set keep = '35 days' where kind = 'hour_counts'`)
	pgtest.Exec(t, pool, `insert into agent_activity_counts (span, start, kind, skill, surface, model)
		values ('hour', now(), 'call', '', '', '')`)
	pgtest.Exec(t, pool, `
		insert into agent_webhook_targets (id, name, url, secrets, events)
		  values ('00000000-0000-7000-8000-000000000001', 't', 'u', '{a}', '{*}')`)
	pgtest.Exec(t, pool, `
		insert into agent_webhook_outbox (target_id, event, payload, trace_id)
		  values ('00000000-0000-7000-8000-000000000001', 'e', '{}', 't')`)
	pgtest.Exec(t, pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		values ('e', '1', 't', 't', 'dead', '', '')`)
	pgtest.Exec(t, pool, `
		insert into agent_automations (id, name, cron, prompt)
		  values ('00000000-0000-7000-8000-000000000002', 'a', '* * * * *', 'p')`)
	pgtest.Exec(t, pool, `
		insert into agent_automation_runs (automation_id, scheduled_for, status)
		  values ('00000000-0000-7000-8000-000000000002', now(), 'dead')`)
	pgtest.Exec(t, pool, `
		insert into agent_channel_messages (channel, external_id, conversation, sender) values ('c', '1', 'c', 's')`)
	for kind, key := range map[string]string{
		"executions": `select id::text from agent_executions`, "budgets": `select scope from agent_budgets`,
		"hour_counts": `select ctid::text from agent_activity_counts`, "outbox": `select id::text from agent_webhook_outbox`,
		"deliveries":       `select id::text from agent_webhook_deliveries`,
		"automation_runs":  `select id::text from agent_automation_runs`,
		"channel_messages": `select id::text from agent_channel_messages`,
	} {
		keys := pgtest.Column[string](t, pool, key)
		if tag, err := pool.Exec(t.Context(), retention.Remove(kind), postgres.Strict{"keys": keys}); err != nil ||
			len(keys) != 1 || tag.RowsAffected() != 0 {
			t.Errorf("%s: %d rows of %v are deleted: %v", kind, tag.RowsAffected(), keys, err)
		}
	}
}
