package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// piece is how many rows are made in a transaction.
const piece = 250_000

// fill brings the activity log from so many rows to so many, over the last thirty days: a hundredth as many
// executions, each the root of a trace with a hundred rows, some of model calls, some of them failed; for every
// tenth execution a thread with messages. Triggers are left out: they would check what is made up here.
func (b *room) fill(ctx context.Context, from, to int64) error {
	began := time.Now()
	if b.base.IsZero() {
		b.base = began.Add(-29 * 24 * time.Hour)
	}
	for at := from; at < to; at += piece {
		if err := b.fillPiece(ctx, at, min(at+piece, to)); err != nil {
			return fmt.Errorf("make rows %d to %d: %w", at, min(at+piece, to), err)
		}
		fmt.Fprintf(b.errw, "made %d of %d rows (%s)\n", min(at+piece, to), to, time.Since(began).Round(time.Second))
	}
	if _, err := b.pool.Exec(ctx, "vacuum analyze"); err != nil {
		return fmt.Errorf("analyze: %w", err)
	}
	if err := b.count(ctx); err != nil {
		return err
	}
	if _, err := b.pool.Exec(ctx, "vacuum analyze"); err != nil { // of the counts, as autovacuum would have
		return fmt.Errorf("analyze the counts: %w", err)
	}
	// What was filled in is on disk before anything is measured.
	if _, err := b.pool.Exec(ctx, "checkpoint"); err != nil {
		return fmt.Errorf("write what was made: %w", err)
	}
	return nil
}

// count counts the log as housekeeping does, from its beginning: rows that were filled in among those that were
// counted have not told of themselves, as triggers are left out. Nobody writes meanwhile, so nothing has to be left
// for later.
func (b *room) count(ctx context.Context) error {
	_, err := b.pool.Exec(ctx, `
		with c as (delete from agent_activity_counts), d as (delete from agent_activity_durations)
		update agent_activity_counted set counted_upto = default, candidate = null, candidate_xid = null, looked = default`)
	if err != nil {
		return fmt.Errorf("count the log anew: %w", err)
	}
	began, rows := time.Now(), 0
	for {
		counted, _, err := activity.CountPass(ctx, b.pool, 50_000, time.Millisecond)
		if err != nil {
			return err
		}
		rows += counted
		// A pass that says up to where the next one counts does not say that there is one to be.
		var left bool
		if err := b.pool.QueryRow(ctx, `
			select exists (select from agent_activity a where a.id >= (select c.counted_upto from agent_activity_counted c))`).Scan(&left); err != nil {
			return fmt.Errorf("look what is not counted: %w", err)
		}
		if !left {
			fmt.Fprintf(b.errw, "counted %d rows (%s)\n", rows, time.Since(began).Round(time.Second))
			return nil
		}
	}
}

func (b *room) fillPiece(ctx context.Context, from, to int64) error {
	return postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "set local session_replication_role = replica"); err != nil {
			return err
		}
		args := postgres.Strict{"from": from, "to": to, "of": b.large, "base": b.base}
		for _, sql := range []string{madeSkills, madeExecutions, madeActivity, madeThreads, madeMessages} {
			if _, err := tx.Exec(ctx, sql, args); err != nil {
				return err
			}
		}
		return nil
	})
}

// Execution number e stands for the hundred rows from 100·e; the whole log is spread evenly over the time. An id is its
// time, made unique by its number.
const (
	madeSkills = `
		insert into agent_skills (name, description, tool_definition, handler)
		select 'skill_' || n, 'Skill number ' || n,
		       jsonb_build_object('type', 'function', 'function', jsonb_build_object('name', 'skill_' || n, 'parameters', '{"type": "object"}'::jsonb)),
		       'builtin:noop'
		  from generate_series(0, 29) n where @from::bigint + @to::bigint + @of::bigint > 0 and @base::timestamptz is not null
		on conflict do nothing`
	madeExecutions = `
		insert into agent_executions (id, trace_id, surface, flow, status, thread_id, created_at, started_at, updated_at, completed_at,
		                              waiting_for, waiting_key, waiting_until, wait_number, result_type, error_message)
		select overlay(lanekeeper.agent_uuid7_floor(x.at)::text placing lpad(to_hex(e), 12, '0') from 25)::uuid,
		       (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + e % 5] || '_01' || lpad(e::text, 24, '0'),
		       (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + e % 5], 'flow_' || e % 20, s.status,
		       case when e % 10 = 2 then 'visitor:' || e end, x.at, x.at, x.at + interval '1 minute',
		       case when s.status in ('completed', 'failed', 'cancelled') then x.at + interval '1 minute' end,
		       case when s.status = 'waiting' then 'event' end, case when s.status = 'waiting' then 'k' || e end,
		       case when s.status = 'waiting' then x.at + interval '30 days' end, (s.status = 'waiting')::int,
		       case s.status when 'completed' then 'success' when 'failed' then 'failure' when 'cancelled' then 'cancelled' end,
		       case when s.status = 'failed' then 'it did not work' end
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x,
		       lateral (select case when e % 50 = 7 then 'failed' when e % 50 = 9 then 'waiting' when e % 50 = 11 then 'cancelled' else 'completed' end as status) s
		on conflict do nothing`
	madeActivity = `
		insert into agent_activity (id, trace_id, execution_id, kind, surface, skill_name, purpose, status, input, output, error_message,
		                            error_class, model, token_usage, cost_usd, duration_ms, lane, created_at, finished_at)
		select overlay(lanekeeper.agent_uuid7_floor(x.at)::text placing lpad(to_hex(n), 12, '0') from 25)::uuid,
		       (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + e % 5] || '_01' || lpad(e::text, 24, '0'),
		       overlay(lanekeeper.agent_uuid7_floor(x.began)::text placing lpad(to_hex(e), 12, '0') from 25)::uuid,
		       case when n % 10 = 0 then 'model' else 'call' end, (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + e % 5],
		       case when n % 10 = 0 then 'model' else 'skill_' || n % 30 end, case when n % 10 = 0 then 'skill_' || n % 30 else '' end,
		       case when n % 97 = 0 then 'error' else 'success' end, jsonb_build_object('n', n, 'text', repeat('x', 100)), '{"ok": true}',
		       case when n % 97 = 0 then 'refused' end, case when n % 97 = 0 then 'http_status' else '' end,
		       case when n % 10 = 0 then 'gpt-' || n % 3 else '' end,
		       case when n % 10 = 0 then '{"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}' else '{}' end::jsonb,
		       case when n % 10 = 0 then 0.0012 else 0 end, 10 + n % 1000, (array['heartbeat', 'operate', '', '', ''])[1 + e % 5],
		       x.at, x.at + interval '50 ms'
		  from generate_series(@from::bigint, @to::bigint - 1) n,
		       lateral (select n / 100 as e) y,
		       lateral (select @base::timestamptz + interval '29 days' * (n::numeric / @of::bigint)::float8 as at,
		                       @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as began) x`
	madeThreads = `
		insert into agent_threads (id, channel, participant, next_seq, created_at, updated_at)
		select 'visitor:' || e, 'chat', 'Visitor ' || e, 11, x.at, x.at
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x
		 where e % 10 = 2
		on conflict do nothing`
	madeMessages = `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, created_at, sent_at)
		select 'visitor:' || e, m, m, case when m % 2 = 1 then 'user' else 'assistant' end, 'message ' || m, 'chat', 'delivered', x.at, x.at
		  from generate_series(@from::bigint / 100, (@to::bigint - 1) / 100) e, generate_series(1, 10) m,
		       lateral (select @base::timestamptz + interval '29 days' * (e * 100.0 / @of::bigint)::float8 as at) x
		 where e % 10 = 2
		on conflict do nothing`
)
