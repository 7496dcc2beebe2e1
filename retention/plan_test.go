package retention_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// seedSQL inserts 20,000 rows of every kind, spread over the last 200 days.
const seedSQL = `
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

// TestBatchReadsByIndex checks that a batch finds its rows by index in large tables. It scans no table, and reads
// few rows beyond the examined rows.
func TestBatchReadsByIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createPartitions(t, pool)
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), seedSQL, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	require.NoError(t, err)
	pgtest.Exec(t, pool, `analyze`)
	pgtest.Exec(t, pool, `update agent_retention set keep = min_keep * 2`)
	kinds := pgtest.Value[[]string](t, pool, `select array_agg(kind order by kind) from agent_retention`)
	for _, keep := range []string{"14 days", "90 days"} {
		pgtest.Exec(t, pool, `update agent_retention set keep = $1::text::interval where kind = 'activity'`, keep)
		for _, kind := range kinds {
			wantRemoved := 100
			if kind == "executions" && keep == "90 days" {
				wantRemoved = 0 // this batch deletes checkpoints of executions that are already deleted
			}
			if kind == "evals" || kind == "eval_labels" {
				wantRemoved = 0 // no rows exist
			}
			checkReads(t, pool, kind, wantRemoved, pruneHundred(kind))
			checkReads(t, pool, kind, 0, pruneHundred(kind))
		}
	}
	checkReads(t, pool, "months", 0, func(ctx context.Context, db postgres.Beginner) (int64, error) {
		_, err := retention.Retirable(ctx, db, "")
		return 0, err
	})
}

// pruneHundred returns a function that deletes up to a hundred rows of a kind.
func pruneHundred(kind string) func(ctx context.Context, db postgres.Beginner) (int64, error) {
	return func(ctx context.Context, db postgres.Beginner) (int64, error) {
		removed, _, err := retention.Prune(ctx, db, kind, 100, false)
		return removed, err
	}
}

// checkReads runs a deletion and checks that it scans no table and reads few rows.
func checkReads(t *testing.T, pool postgres.Beginner, name string, wantRemoved int,
	run func(context.Context, postgres.Beginner) (int64, error),
) {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		before, err := readTableStats(t, tx)
		if err != nil {
			return err
		}
		removed, err := run(t.Context(), tx)
		if err != nil {
			return err
		}
		assert.Truef(t, removed >= int64(wantRemoved/4), "%s: %d rows", name, removed)
		after, err := readTableStats(t, tx)
		for table, n := range after {
			seq, rows := n.Seq-before[table].Seq, n.Rows-before[table].Rows
			if seq > 0 && table != "agent_trial_transactions" || rows > 4000 { // this table has a row for each open trial
				t.Errorf("%s scans %s %d times, and reads %d rows of it", name, table, seq, rows)
			}
		}
		return err
	})
	require.NoError(t, err, name)
}

// tableStats counts the sequential scans of a table by this session, and the rows read.
type tableStats struct {
	Table     string
	Seq, Rows int64
}

// readTableStats returns the statistics of all tables that grow.
func readTableStats(t *testing.T, db postgres.DB) (map[string]tableStats, error) {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		select relname::text, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables
		 where relname like 'agent_%' and relname !~ '^agent_(retention|activity_counted|activity_retired|webhook_targets|automations$)' `)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[tableStats])
	stats := map[string]tableStats{}
	for _, r := range list {
		stats[r.Table] = r
	}
	return stats, err
}

// pruneAll prunes a kind, a hundred rows at a time, until no old rows are left. It returns the number of deleted rows
// of each batch.
func pruneAll(t *testing.T, db postgres.Beginner, kind string) (removed []int64) {
	t.Helper()
	for more := true; more; {
		n, hasMore, err := retention.Prune(t.Context(), db, kind, 100, false)
		require.Truef(t, err == nil && len(removed) <= 50, "%v after %v", err, removed)
		removed, more = append(removed, n), hasMore
	}
	return removed
}

func TestLongThreadIsDeletedInBatches(t *testing.T) {
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
	assert.Truef(t, n == 100 && more && err == nil, "the first batch: %d rows, more %v, %v", n, more, err)
	assert.Equal(t, 101, pgtest.Value[int](t, pool, `select min(seq) from agent_messages where thread_id = '1'`))
	for _, n := range pruneAll(t, pool, "messages") {
		assert.Truef(t, n <= 100, "a batch deleted %d messages", n)
	}
	left := pgtest.Value[[]string](t, pool, `select array_agg(distinct thread_id) from agent_messages`)
	assert.Truef(t, len(left) == 1 && left[0] == "2",
		"threads %v have messages, want 2, because an unfinished execution has a message in it", left)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_threads`))
}

// seedEndedExecutions inserts executions that ended two days ago, each with an event and some checkpoints.
func seedEndedExecutions(t *testing.T, pool *pgxpool.Pool, executions, checkpoints int) {
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

// A locked row protects only the execution or the thread to which it belongs.
func TestLockedRowKeepsOnlyItsOwner(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '1 day' where kind in ('executions', 'messages')`)
	seedEndedExecutions(t, pool, 4, 0)
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
		assert.Truef(t, removed == 3 && err == nil, "with a locked row %d %s are deleted, want 3: %v", removed, kind, err)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	for _, kind := range []string{"executions", "messages"} {
		removed, _, err := retention.Prune(t.Context(), pool, kind, 100, true)
		assert.Truef(t, removed == 1 && err == nil, "after the unlock %d %s are deleted, want 1: %v", removed, kind, err)
	}
}

func TestCheckpointsAreDeletedInBatches(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '1 day' where kind = 'executions'`)
	seedEndedExecutions(t, pool, 3, 150)
	removed := pruneAll(t, pool, "executions")
	left := pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints`)
	assert.Truef(t, left == 0 && removed[0] == 3 && len(removed) == 6, "%d checkpoints are left after %v", left, removed)
}

// A pass with Restart begins with the oldest row, even if an earlier pass left checkpoints.
func TestRestartBesideLeftCheckpoints(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `update agent_retention set keep = '1 day' where kind = 'executions'`)
	seedEndedExecutions(t, pool, 1, 600)
	_, more, err := retention.Prune(t.Context(), pool, "executions", 500, false)
	require.True(t, more && err == nil, more, err)
	pgtest.Exec(t, pool, `update agent_retention_passes set place_key = 'ffffffff-ffff-7fff-8fff-ffffffffffff'`)
	seedEndedExecutions(t, pool, 2, 0)
	done, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"executions"}, Restart: true})
	require.NoError(t, err)
	assert.Equal(t, int64(2), done[0].Removed)
	pgtest.Equal(t, pool, 0, `select count(*) from agent_checkpoints`)
}

// A row may change between the statement that finds it and the statement that deletes it.
func TestChangedRowIsNotDeleted(t *testing.T) {
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
		if tag, err := pool.Exec(t.Context(), retention.DeleteSQL(kind), postgres.Strict{"keys": keys}); err != nil ||
			len(keys) != 1 || tag.RowsAffected() != 0 {
			t.Errorf("%s: %d rows of %v are deleted: %v", kind, tag.RowsAffected(), keys, err)
		}
	}
}
