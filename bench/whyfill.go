package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// fillCauses gives each execution of the log what why() tells of: the execution before it raised the event that it waited for, it had a lane,
// two steps, and, three of ten, a child in its trace. What is there stays.
func (b *whyBench) fillCauses(ctx context.Context) error {
	began := time.Now()
	for from := int64(0); from < b.large/100; from += piece / 10 {
		to := min(from+piece/10, b.large/100)
		err := postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "set local session_replication_role = replica"); err != nil {
				return err
			}
			for _, sql := range []string{madeEvents, madeLinks, madePoints, madeHolds, madeChildren} {
				if _, err := tx.Exec(ctx, sql, postgres.Strict{"from": from, "to": to}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("make causes of executions %d to %d: %w", from, to, err)
		}
	}
	fmt.Fprintf(b.errw, "made causes (%s)\n", time.Since(began).Round(time.Second))
	if _, err := b.pool.Exec(ctx, "analyze"); err != nil {
		return fmt.Errorf("analyze: %w", err)
	}
	return nil
}

// numbered are the root executions of a piece (see madeExecutions), each with the id of its event.
const numbered = `
	with x as materialized (
	  select e.id, e.trace_id, e.created_at, (('00000000-0000-7000-8000-' || right(e.id::text, 12))::uuid) as event
	    from generate_series(@from::bigint, @to::bigint - 1) g
	    join agent_executions e on e.trace_id = (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + g % 5] || '_01' || lpad(g::text, 24, '0') and e.parent_id is null)`

const (
	madeEvents = numbered + `
		insert into agent_events (id, event, key, consumed_by, created_at) select x.event, 'EVENT_COMPLETED', 'k' || right(x.trace_id, 9), x.id, x.created_at + interval '30 seconds' from x
		on conflict do nothing`
	// Who raised the event of an execution is the one before it.
	madeLinks = numbered + `
		insert into agent_links (cause, kind, effect, at)
		select 'execution ' || p.id, 'raised', 'event ' || x.event, x.created_at + interval '30 seconds'
		  from x join lateral (select e.id from agent_executions e where e.id < x.id and e.parent_id is null order by e.id desc limit 1) p on true
		on conflict do nothing`
	madePoints = numbered + `
		insert into agent_checkpoints (execution_id, step, claim, output, created_at, waited_for, waited_key, waited_since)
		select x.id, s.step, 1, case when s.step = 'wait' then jsonb_build_object('event', 'EVENT_COMPLETED', 'event_id', x.event, 'data', '{}'::jsonb, 'timed_out', false) else '{"ok": true}' end,
		       x.created_at + s.after, case when s.step = 'wait' then 'event' end, case when s.step = 'wait' then 'k' || right(x.trace_id, 9) end,
		       case when s.step = 'wait' then x.created_at + interval '10 seconds' end
		  from x, (values ('first', interval '5 seconds'), ('wait', interval '30 seconds'), ('second', interval '40 seconds')) s (step, after)
		on conflict do nothing`
	madeHolds = numbered + `
		insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
		select 'lane ' || right(x.trace_id, 1), x.id, 1, x.created_at + interval '1 second', x.created_at + interval '50 seconds', 'ended' from x
		on conflict do nothing`
	madeChildren = numbered + `
		insert into agent_executions (id, trace_id, surface, flow, status, parent_id, created_at, started_at, updated_at, completed_at, result_type)
		select (left(x.id::text, 23) || '-f' || right(x.id::text, 11))::uuid, x.trace_id, 'flow', 'child', 'completed', x.id, x.created_at + interval '6 seconds',
		       x.created_at + interval '6 seconds', x.created_at + interval '9 seconds', x.created_at + interval '9 seconds', 'success'
		  from x where right(x.trace_id, 1) in ('0', '4', '8')
		on conflict do nothing`
)
