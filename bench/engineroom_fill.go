package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// batchRows is the number of rows per transaction.
const batchRows = 250_000

// fill grows the activity log to `to` rows over the last thirty days. Each execution is the root of a trace of a
// hundred rows. Some rows are model calls, some failed. Every tenth execution has a thread with messages.
func (b *engineRoomBench) fill(ctx context.Context, from, to int64) error {
	if b.oldest.IsZero() {
		b.oldest = time.Now().Add(-29 * 24 * time.Hour)
	}
	statements := []string{insertSkills, insertExecutions, insertActivity, insertThreads, insertMessages}
	if err := b.insertBatches(ctx, "rows", statements, from, to, batchRows,
		postgres.Strict{"of": b.large, "base": b.oldest}); err != nil {
		return err
	}
	if err := b.insertBatches(ctx, "traces of 2,000 spans", []string{insertSpansTrace}, 0, 1, 1,
		postgres.Strict{"trace": spansTrace}); err != nil {
		return err
	}
	if _, err := b.pool.Exec(ctx, "vacuum analyze"); err != nil {
		return fmt.Errorf("analyze: %w", err)
	}
	if err := b.countLog(ctx); err != nil {
		return err
	}
	if _, err := b.pool.Exec(ctx, "vacuum analyze"); err != nil { // of the counts, as autovacuum would have
		return fmt.Errorf("analyze the counts: %w", err)
	}

	if _, err := b.pool.Exec(ctx, "checkpoint"); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// countLog counts the log from its beginning, as housekeeping does. Filled rows skipped the triggers that announce rows
// to count. There is no other writer, so the count is complete.
func (b *engineRoomBench) countLog(ctx context.Context) error {
	_, err := b.pool.Exec(ctx, `
		with c as (delete from agent_activity_counts), d as (delete from agent_activity_durations)
		update agent_activity_counted set counted_upto = default, candidate = null, candidate_xid = null, checked_upto = default`)
	if err != nil {
		return fmt.Errorf("reset the counts: %w", err)
	}
	return b.countRest(ctx)
}

// countRest counts the uncounted rows.
func (b *engineRoomBench) countRest(ctx context.Context) error {
	began, rows := time.Now(), 0
	for {
		counted, _, err := activity.CountPass(ctx, b.pool, 50_000, time.Millisecond)
		if err != nil {
			return err
		}
		rows += counted
		// A pass reports a next position even if no row is left to count.
		var left bool
		if err := b.pool.QueryRow(ctx, `
			select exists (select from agent_activity a
			  where a.id >= (select c.counted_upto from agent_activity_counted c))`).Scan(&left); err != nil {
			return fmt.Errorf("find uncounted rows: %w", err)
		}
		if !left {
			fmt.Fprintf(b.stderr, "counted %d rows (%s)\n", rows, time.Since(began).Round(time.Second))
			return nil
		}
	}
}

// insertBatches runs the statements for each batch of rows in a transaction without triggers, which would reject
// made-up rows.
func (b *engineRoomBench) insertBatches(
	ctx context.Context, rows string, statements []string, from, to, batch int64, args postgres.Strict,
) error {
	began := time.Now()
	for start := from; start < to; start += batch {
		end := min(start+batch, to)
		batchArgs := postgres.Strict{"from": start, "to": end}
		maps.Copy(batchArgs, args)
		err := postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "set local session_replication_role = replica"); err != nil {
				return err
			}
			for _, sql := range statements {
				if _, err := tx.Exec(ctx, sql, batchArgs); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("insert %s %d to %d: %w", rows, start, end, err)
		}
		fmt.Fprintf(b.stderr, "inserted %d of %d %s (%s)\n", end, to, rows, time.Since(began).Round(time.Second))
	}
	return nil
}

// Execution e is the root of the rows from 100·e. Rows are spread evenly over the time. An id is the row's time and its
// number.
const (
	insertSkills = `
		insert into agent_skills (name, description, tool_definition, handler)
		select 'skill_' || n, 'Skill number ' || n,
		       jsonb_build_object('type', 'function', 'function',
		         jsonb_build_object('name', 'skill_' || n, 'parameters', '{"type": "object"}'::jsonb)),
		       'builtin:noop'
		  from generate_series(0, 29) n where @from::bigint + @to::bigint + @of::bigint > 0 and @base::timestamptz is not null
		on conflict do nothing`
	insertExecutions = `
		insert into agent_executions (id, trace_id, surface, flow, status, thread_id, created_at, started_at, updated_at,
		  completed_at, waiting_for, waiting_key, waiting_until, wait_number, result_type, error_message)
		select overlay(lanekeeper.agent_uuid7_floor(x.at)::text placing lpad(to_hex(e), 12, '0') from 25)::uuid,
		       (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + e % 5] || '_01' || lpad(e::text, 24, '0'),
		       (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + e % 5], 'flow_' || e % 20, s.status,
		       case when e % 10 = 2 then 'visitor:' || e end, x.at, x.at, x.at + interval '1 minute',
		       case when s.status in ('completed', 'failed', 'cancelled') then x.at + interval '1 minute' end,
		       case when s.status = 'waiting' then 'event' end, case when s.status = 'waiting' then 'k' || e end,
		       case when s.status = 'waiting' then x.at + interval '30 days' end, (s.status = 'waiting')::int,
		       case s.status when 'completed' then 'success' when 'failed' then 'failure'
		         when 'cancelled' then 'cancelled' end,
		       case when s.status = 'failed' then 'it did not work' end
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x,
		       lateral (select case when e % 50 = 7 then 'failed' when e % 50 = 9 then 'waiting'
		         when e % 50 = 11 then 'cancelled' else 'completed' end as status) s
		on conflict do nothing`
	insertActivity = `
		insert into agent_activity (id, trace_id, execution_id, kind, surface, skill_name, purpose, status, input, output,
		  error_message, error_class, model, token_usage, cost_usd, duration_ms, lane, created_at, finished_at)
		select overlay(lanekeeper.agent_uuid7_floor(x.at)::text placing lpad(to_hex(n), 12, '0') from 25)::uuid,
		       (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + e % 5] || '_01' || lpad(e::text, 24, '0'),
		       overlay(lanekeeper.agent_uuid7_floor(x.began)::text placing lpad(to_hex(e), 12, '0') from 25)::uuid,
		       case when n % 10 = 0 then 'model' else 'call' end,
		         (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + e % 5],
		       case when n % 10 = 0 then 'model' else 'skill_' || n % 30 end, case when n % 10 = 0 then 'skill_' || n % 30
		         else '' end,
		       case when n % 97 = 0 then 'error' else 'success' end, jsonb_build_object('n', n, 'text', repeat('x', 100)),
		         '{"ok": true}',
		       case when n % 97 = 0 then 'refused' end, case when n % 97 = 0 then 'http_status' else '' end,
		       case when n % 10 = 0 then 'gpt-' || n % 3 else '' end,
		       case when n % 10 = 0 then '{"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}'
		         else '{}' end::jsonb,
		       case when n % 10 = 0 then 0.0012 else 0 end, 10 + n % 1000,
		         (array['heartbeat', 'operate', '', '', ''])[1 + e % 5],
		       x.at, x.at + interval '50 ms'
		  from generate_series(@from::bigint, @to::bigint - 1) n,
		       lateral (select n / 100 as e) y,
		       lateral (select @base::timestamptz + interval '29 days' * (n::numeric / @of::bigint)::float8 as at,
		                       @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as began) x`
	insertThreads = `
		insert into agent_threads (id, channel, participant, next_seq, created_at, updated_at)
		select 'visitor:' || e, 'chat', 'Visitor ' || e, 11, x.at, x.at
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x
		 where e % 10 = 2
		on conflict do nothing`
	insertMessages = `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, created_at, sent_at)
		select 'visitor:' || e, m, m, case when m % 2 = 1 then 'user' else 'assistant' end, 'message ' || m, 'chat',
		       'delivered', x.at, x.at
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e, generate_series(1, 10) m,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x
		 where e % 10 = 2
		on conflict do nothing`
)

// spansTrace is a trace of one failed run with 2,000 activities: 40 phases with calls in them.
const spansTrace = "fl_02000000000000000000000000"

const insertSpansTrace = `
	with e as (
	  insert into agent_executions (id, trace_id, surface, flow, status, failed_step, error_message, created_at,
	    started_at, completed_at)
	  select lanekeeper.agent_uuid7(at), @trace, 'flow', 'import', 'failed', 'batch 39',
	    'batch 39: shop 3 answered with status 503',
	         at, at, at + interval '5 minutes'
	    from (select clock_timestamp() - interval '1 hour' as at) m
	   where @from::bigint < @to::bigint and not exists (select from agent_executions x where x.trace_id = @trace)
	  returning id, created_at as at),
	p as (
	  insert into agent_activity (id, trace_id, execution_id, kind, surface, skill_name, step, created_at, finished_at,
	    duration_ms)
	  select lanekeeper.agent_uuid7(at + k * interval '7 s'), @trace, e.id, 'phase', 'flow', 'batch ' || k, 'batch ' || k,
	         at + k * interval '7 s', at + (k + 1) * interval '7 s', 7000
	    from e, generate_series(0, 39) k returning id, step, execution_id, created_at as at)
	insert into agent_activity (id, trace_id, execution_id, parent_id, kind, surface, skill_name, step, status,
	  error_message, model, purpose, token_usage, cost_usd, input, output, created_at, finished_at, duration_ms)
	select lanekeeper.agent_uuid7(p.at + j * interval '100 ms'), @trace, p.execution_id, p.id,
	       case when j % 5 = 0 then 'model' else 'call' end, 'flow', 'skill_' || j % 30, p.step || '/call ' || j,
	       case when j % 17 = 3 then 'error' else 'success' end,
	       case when j % 17 = 3 then 'shop ' || j || ' answered with status 503' end,
	       case when j % 5 = 0 then 'gpt-4o-mini' else '' end, 'flow import',
	       case when j % 5 = 0 then jsonb_build_object('total_tokens', j * 7919 % 5000) else '{}' end,
	       case when j % 5 = 0 then 0.001 * j else 0 end, jsonb_build_object('n', j, 'text', repeat('x', 100)),
	       '{"ok": true}', p.at + j * interval '100 ms', p.at + (j + 1) * interval '100 ms', 90 + j * 31 % 40
	  from p, generate_series(1, 49) j`
