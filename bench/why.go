package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/why"
)

// whyBench measures why(trace) in a large log, in turns with one row read by an index. Traces are random, so most are
// not cached. Each has a hundred actions, a lane and a wait for another trace's event; three of ten have a child.
type whyBench struct {
	storyBench
	sequentialRows int64 // rows read by sequential scans, by all questions
}

const whyTarget = 50 * time.Millisecond

func whyBenchmark(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := whyBench{storyBench: storyBench{engineRoomBench: engineRoomBench{stderr: stderr}}}
	flags := newFlags("why", stderr)
	flags.Int64Var(&b.large, "rows", 10_000_000, "rows of the activity log; a hundredth of it are executions")
	flags.IntVar(&b.traces, "traces", 1000, "traces to ask about")
	data := flags.String("data", "", "folder that keeps the database for later runs; default: a temporary one")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.large < 1000 || b.traces < 1 {
		return errors.New("why: -rows must be at least 1000, -traces at least 1")
	}
	return b.withLog(ctx, *data, func() error {
		if err := b.fillCauses(ctx); err != nil {
			return err
		}
		questions, err := b.measureInTurns(ctx)
		if err == nil {
			b.printWhy(out, questions)
		}
		return err
	})
}

// measureInTurns runs the questions in turns, so other load on the machine affects all.
func (b *whyBench) measureInTurns(ctx context.Context) ([]*question, error) {
	questions := []*question{
		{name: "floor: one row by an index", run: b.queryTrace(`select e.id from agent_executions e
			where e.trace_id = @trace limit 1`)},
		{
			name: "floor: the hundred actions of a trace by an index",
			run: b.queryTrace(`select a.id, a.kind, a.token_usage from agent_activity a where a.trace_id = @trace
				order by a.created_at`),
		},
		{name: "`select * from why(trace)`", target: whyTarget, run: b.queryTrace(`select * from why(@trace)`)},
		{name: "`agent why ID`, `GET /v1/traces/{id}/why`", target: whyTarget, run: func(ctx context.Context) error {
			_, err := why.Of(ctx, b.pool, b.randomTrace())
			return err
		}},
	}
	const warm = 20 // of each, to plan and to warm up
	before, err := b.sequentialReads(ctx)
	if err != nil {
		return nil, err
	}
	for i := range b.traces + warm {
		for _, q := range questions {
			began := time.Now()
			if err := q.run(ctx); err != nil {
				return nil, fmt.Errorf("%s: %w", q.name, err)
			}
			if i >= warm {
				q.times = append(q.times, time.Since(began))
			}
		}
	}
	after, err := b.sequentialReads(ctx)
	b.sequentialRows = after - before
	return questions, err
}

func (b *whyBench) printWhy(out io.Writer, questions []*question) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions; %d processors; milliseconds at the client.\n\n", b.large,
		b.large/100, runtime.NumCPU())
	t.WriteString("| question | n | p50 | p95 | p99 | p95 target | × floor p50 |\n|---|---|---|---|---|---|---|\n")
	for _, q := range questions {
		targetText := ""
		if q.target > 0 {
			targetText = "< " + millis(q.target)
		}
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %s | %.1f |\n", q.name, len(q.times), millis(q.times.quantile(0.5)),
			millis(q.times.quantile(0.95)), millis(q.times.quantile(0.99)),
			targetText, ratio(q.times, questions[0].times, 0.5))
	}
	fmt.Fprintf(&t, "\nRows read by sequential scans, by all of them: %d.\n", b.sequentialRows)
	fmt.Fprint(out, t.String())
}

// fillCauses gives each execution a lane, two steps and an event raised by the execution before it. Three of ten get a
// child in their trace. fillCauses keeps existing rows.
func (b *whyBench) fillCauses(ctx context.Context) error {
	statements := []string{insertEvents, insertLinks, insertCheckpoints, insertHolds, insertChildren}
	if err := b.insertBatches(ctx, "causes", statements, 0, b.large/100, batchRows/10, nil); err != nil {
		return err
	}
	if _, err := b.pool.Exec(ctx, "analyze"); err != nil {
		return fmt.Errorf("analyze: %w", err)
	}
	return nil
}

// executionsWithEvent selects the root executions of a batch, each with the id of its event.
const executionsWithEvent = `
	with x as materialized (
	  select e.id, e.trace_id, e.created_at, (('00000000-0000-7000-8000-' || right(e.id::text, 12))::uuid) as event
	    from generate_series(@from::bigint, @to::bigint - 1) g
	    join agent_executions e on e.trace_id = (array['hb', 'op', 'ch', 'wh', 'fl'])[1 + g % 5] || '_01' || lpad(g::text,
	      24, '0') and e.parent_id is null)`

const (
	insertEvents = executionsWithEvent + `
		insert into agent_events (id, event, key, consumed_by, created_at) select x.event, 'EVENT_COMPLETED',
		  'k' || right(x.trace_id, 9), x.id, x.created_at + interval '30 seconds' from x
		on conflict do nothing`
	// The previous execution raises the event.
	insertLinks = executionsWithEvent + `
		insert into agent_links (cause, kind, effect, at)
		select 'execution ' || p.id, 'raised', 'event ' || x.event, x.created_at + interval '30 seconds'
		  from x join lateral (select e.id from agent_executions e where e.id < x.id and e.parent_id is null
		    order by e.id desc limit 1) p on true
		on conflict do nothing`
	insertCheckpoints = executionsWithEvent + `
		insert into agent_checkpoints (execution_id, step, claim, output, created_at, waited_for, waited_key, waited_since)
		select x.id, s.step, 1, case when s.step = 'wait' then jsonb_build_object('event', 'EVENT_COMPLETED', 'event_id',
		  x.event, 'data', '{}'::jsonb, 'timed_out', false) else '{"ok": true}' end,
		       x.created_at + s.after, case when s.step = 'wait' then 'event' end, case
		         when s.step = 'wait' then 'k' || right(x.trace_id, 9) end,
		       case when s.step = 'wait' then x.created_at + interval '10 seconds' end
		  from x, (values ('first', interval '5 seconds'), ('wait', interval '30 seconds'),
		    ('second', interval '40 seconds')) s (step, after)
		on conflict do nothing`
	insertHolds = executionsWithEvent + `
		insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
		select 'lane ' || right(x.trace_id, 1), x.id, 1, x.created_at + interval '1 second',
		  x.created_at + interval '50 seconds', 'ended' from x
		on conflict do nothing`
	insertChildren = executionsWithEvent + `
		insert into agent_executions (id, trace_id, surface, flow, status, parent_id, created_at, started_at, updated_at,
		  completed_at, result_type)
		select (left(x.id::text, 23) || '-f' || right(x.id::text, 11))::uuid, x.trace_id, 'flow', 'child', 'completed', x.id,
		       x.created_at + interval '6 seconds', x.created_at + interval '6 seconds', x.created_at + interval '9 seconds',
		       x.created_at + interval '9 seconds', 'success'
		  from x where right(x.trace_id, 1) in ('0', '4', '8')
		on conflict do nothing`
)
