package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/why"
)

// storyBench measures what people ask of a large log: the story of one trace, by the SQL that CONTRACTS.md gives, by
// what `agent trace` and GET of a trace read, and as a page; and every view and listing of the dashboard. The floor
// is one row by its key. Traces are drawn from the whole log, so most are not in memory.
type storyBench struct {
	room
	often int // the story of a trace, floor and story in turns
}

// asked is one question and how it fared.
type asked struct {
	name    string
	limit   time.Duration // p99 that is asked for; 0 when none
	ask     func(ctx context.Context) error
	often   int
	took    samples
	scanned int64
}

func story(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := storyBench{room: room{errw: errw}}
	flags := flag.NewFlagSet("story", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.Int64Var(&b.large, "rows", 10_000_000, "rows of the activity log; a hundredth of it are executions")
	flags.IntVar(&b.often, "traces", 1000, "traces whose story is asked for")
	flags.IntVar(&b.visits, "visits", 20, "how often each view and listing is asked")
	data := flags.String("data", "", "folder that keeps the database, to measure it again without filling it; empty for one that is removed")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.large < 1000 || b.often < 1 || b.visits < 1 {
		return errors.New("story: -rows is at least 1000, -traces and -visits at least 1")
	}
	server, err := pgserver.Start(ctx, pgserver.Config{
		Dir: *data, Ephemeral: *data == "", Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b.pool, err = postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: 4, ApplicationName: "bench"})
	if err != nil {
		return err
	}
	defer b.pool.Close()
	if _, err := migrations.Up(ctx, b.pool); err != nil {
		return err
	}
	filled, err := b.filled(ctx)
	if err == nil && !filled {
		err = b.fill(ctx, 0, b.large)
	}
	if err != nil {
		return err
	}
	questions, err := b.questions()
	if err == nil {
		err = b.askAll(ctx, questions)
	}
	if err != nil {
		return err
	}
	b.printStory(out, questions)
	return nil
}

// anyTrace is a trace of the log, by chance: see madeExecutions.
func (b *storyBench) anyTrace() string {
	e := rand.Int64N(b.large / 100)
	return fmt.Sprintf("%s_01%024d", []string{"hb", "op", "ch", "wh", "fl"}[e%5], e)
}

// questions are what is asked, the floor first.
func (b *storyBench) questions() ([]*asked, error) {
	handler, err := b.handler()
	if err != nil {
		return nil, err
	}
	const limit = 10 * time.Millisecond
	all := []*asked{
		{name: "floor: an execution by its key's trace, one row", often: b.often, ask: b.read(`select e.id from agent_executions e where e.trace_id = @trace limit 1`)},
		{name: "the story of a run by `trace_id`, SQL of the contract", limit: limit, often: b.often, ask: b.read(`
			select skill_name, status, duration_ms, token_usage, created_at from agent_activity where trace_id = @trace order by created_at`)},
		{name: "the same by `conversation_id`", limit: limit, often: b.often, ask: b.read(`
			select skill_name, status, duration_ms, token_usage, created_at from agent_activity where conversation_id = @trace order by created_at`)},
		{name: "`agent trace ID`, `GET /v1/traces/{id}`", limit: limit, often: b.often, ask: func(ctx context.Context) error {
			_, err := activity.TraceOf(ctx, b.pool, b.anyTrace())
			return err
		}},
		{name: "the page of a trace, whole", often: b.often, ask: func(ctx context.Context) error { return open(ctx, handler, "/traces/"+b.anyTrace()) }},
	}
	for _, l := range b.listings() {
		all = append(all, &asked{name: l.name, often: b.visits, ask: l.ask})
	}
	for _, view := range []struct{ name, sql string }{
		{"agent_locks_live", `select * from agent_locks_live`},
		{"agent_thread_locks", `select * from agent_thread_locks`},
		{"agent_executions_by_status", `select * from agent_executions_by_status`},
		{"agent_executions_waiting", `select * from agent_executions_waiting limit 100`},
		{"agent_executions_stuck", `select * from agent_executions_stuck`},
		{"agent_spend", `select * from agent_spend where day >= current_date - 1`},
		{"agent_skill_health", `select * from agent_skill_health`},
	} {
		all = append(all, &asked{name: "view `" + view.name + "`", often: b.visits, ask: b.rows(view.sql)})
	}
	return all, nil
}

// listing is a question with a name.
type listing struct {
	name string
	ask  func(ctx context.Context) error
}

// listings are what the dashboard's pages, the commands and the API read beside the views.
func (b *storyBench) listings() []listing {
	week := time.Now().Add(-7 * 24 * time.Hour)
	recent := func(f activity.Filter) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			_, _, err := activity.Recent(ctx, b.pool, f)
			return err
		}
	}
	return []listing{
		{"`agent trace ls`, `GET /v1/traces`", func(ctx context.Context) error {
			_, _, err := activity.Traces(ctx, b.pool, activity.TraceFilter{})
			return err
		}},
		{"`GET /v1/activity`", recent(activity.Filter{})},
		{"`GET /v1/activity?surface=webhook&status=error`", recent(activity.Filter{Surface: "webhook", Status: activity.Error})},
		{"spend of 7 days by skill, of the page", func(ctx context.Context) error {
			_, err := activity.CountedSpend(ctx, b.pool, activity.SpendFilter{Since: week, By: activity.BySkill})
			return err
		}},
		{"health of the skills, of the page", func(ctx context.Context) error {
			_, err := activity.CountedHealth(ctx, b.pool, activity.HealthFilter{})
			return err
		}},
	}
}

// read asks SQL about a trace.
func (b *storyBench) read(sql string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		rows, err := b.pool.Query(ctx, sql, postgres.Strict{"trace": b.anyTrace()})
		return drain(rows, err)
	}
}

// rows asks SQL.
func (b *storyBench) rows(sql string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		rows, err := b.pool.Query(ctx, sql)
		return drain(rows, err)
	}
}

// drain reads to the end.
func drain(rows pgx.Rows, err error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if _, err := rows.Values(); err != nil {
			return err
		}
	}
	return rows.Err()
}

// open asks for a page.
func open(ctx context.Context, handler http.Handler, path string) error {
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, path, http.NoBody))
	if answer.Code != http.StatusOK {
		return fmt.Errorf("GET %s: status %d: %.500s", path, answer.Code, answer.Body)
	}
	return nil
}

// askAll asks everything, each question once before that is not counted.
func (b *storyBench) askAll(ctx context.Context, questions []*asked) error {
	for _, q := range questions {
		before, err := b.scanned(ctx)
		if err != nil {
			return err
		}
		for i := range q.often + 1 {
			began := time.Now()
			if err := q.ask(ctx); err != nil {
				return fmt.Errorf("%s: %w", q.name, err)
			}
			if i > 0 {
				q.took = append(q.took, time.Since(began))
			}
		}
		after, err := b.scanned(ctx)
		if err != nil {
			return err
		}
		q.scanned = (after - before) / int64(q.often+1)
		fmt.Fprintf(b.errw, "%-60s p50 %s ms\n", q.name, q.took.show(0.5))
	}
	return nil
}

// printStory writes the table.
func (b *storyBench) printStory(out io.Writer, questions []*asked) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions; %d processors; milliseconds at the client.\n\n", b.large, b.large/100, runtime.NumCPU())
	t.WriteString("| question | n | p50 | p99 | p99 asked | × floor p50 | rows read by sequential scans, each |\n|---|---|---|---|---|---|---|\n")
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()*1000) }
	floor := questions[0].took
	for _, q := range questions {
		asked := ""
		if q.limit > 0 {
			asked = "< " + ms(q.limit)
		}
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %.1f | %d |\n", q.name, len(q.took), ms(q.took.at(0.5)), ms(q.took.at(0.99)), asked, ratio(q.took, floor, 0.5), q.scanned)
	}
	fmt.Fprint(out, t.String())
}

// whyBench measures what why(trace) takes in a large log, beside one row read by an index in turns with it. Traces
// are drawn from the whole log, so most are not in memory. Each has a hundred actions, a wait for an event that
// another trace raised, a lane, and three of ten have a child.
type whyBench struct {
	storyBench
	sequential int64 // rows read by sequential scans, by all questions
}

// whyLimit is what is asked of it.
const whyLimit = 50 * time.Millisecond

func whyBenchmark(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := whyBench{storyBench: storyBench{room: room{errw: errw}}}
	flags := flag.NewFlagSet("why", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.Int64Var(&b.large, "rows", 10_000_000, "rows of the activity log; a hundredth of it are executions")
	flags.IntVar(&b.often, "traces", 1000, "traces that are asked about")
	data := flags.String("data", "", "folder that keeps the database, to measure it again without filling it; empty for one that is removed")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.large < 1000 || b.often < 1 {
		return errors.New("why: -rows is at least 1000, -traces at least 1")
	}
	server, err := pgserver.Start(ctx, pgserver.Config{
		Dir: *data, Ephemeral: *data == "", Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b.pool, err = postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: 4, ApplicationName: "bench"})
	if err != nil {
		return err
	}
	defer b.pool.Close()
	if _, err := migrations.Up(ctx, b.pool); err != nil {
		return err
	}
	filled, err := b.filled(ctx)
	if err == nil && !filled {
		err = b.fill(ctx, 0, b.large)
	}
	if err == nil {
		err = b.fillCauses(ctx)
	}
	if err != nil {
		return err
	}
	questions, err := b.askInTurns(ctx)
	if err != nil {
		return err
	}
	b.printWhy(out, questions)
	return nil
}

// askInTurns asks each question about one trace after the other, so that whatever else the machine does concerns all
// alike.
func (b *whyBench) askInTurns(ctx context.Context) ([]*asked, error) {
	questions := []*asked{
		{name: "floor: one row by an index", ask: b.read(`select e.id from agent_executions e where e.trace_id = @trace limit 1`)},
		{name: "floor: the hundred actions of a trace by an index", ask: b.read(`select a.id, a.kind, a.token_usage from agent_activity a where a.trace_id = @trace order by a.created_at`)},
		{name: "`select * from why(trace)`", limit: whyLimit, ask: b.read(`select * from why(@trace)`)},
		{name: "`agent why ID`, `GET /v1/traces/{id}/why`", limit: whyLimit, ask: func(ctx context.Context) error {
			_, err := why.Of(ctx, b.pool, b.anyTrace())
			return err
		}},
	}
	const warm = 20 // of each, to plan and to warm up
	before, err := b.scanned(ctx)
	if err != nil {
		return nil, err
	}
	for i := range b.often + warm {
		for _, q := range questions {
			began := time.Now()
			if err := q.ask(ctx); err != nil {
				return nil, fmt.Errorf("%s: %w", q.name, err)
			}
			if i >= warm {
				q.took = append(q.took, time.Since(began))
			}
		}
	}
	after, err := b.scanned(ctx)
	b.sequential = after - before
	return questions, err
}

// printWhy writes the table.
func (b *whyBench) printWhy(out io.Writer, questions []*asked) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions; %d processors; milliseconds at the client.\n\n", b.large, b.large/100, runtime.NumCPU())
	t.WriteString("| question | n | p50 | p95 | p99 | p95 asked | × floor p50 |\n|---|---|---|---|---|---|---|\n")
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()*1000) }
	for _, q := range questions {
		limit := ""
		if q.limit > 0 {
			limit = "< " + ms(q.limit)
		}
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %s | %.1f |\n", q.name, len(q.took), ms(q.took.at(0.5)), ms(q.took.at(0.95)), ms(q.took.at(0.99)),
			limit, ratio(q.took, questions[0].took, 0.5))
	}
	fmt.Fprintf(&t, "\nRows read by sequential scans, by all of them: %d.\n", b.sequential)
	fmt.Fprint(out, t.String())
}

// fillCauses gives each execution of the log what why() tells of: the execution before it raised the event that it
// waited for, it had a lane, two steps, and, three of ten, a child in its trace. What is there stays.
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
