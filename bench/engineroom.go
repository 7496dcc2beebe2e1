package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// engineRoomBench measures the server time of the Engine Room's pages with a small and with a large log. No page's work
// may grow with the log, so both times must be about equal.
type engineRoomBench struct {
	small, large  int64 // rows of the activity log
	visits        int   // to each page
	watchDuration time.Duration
	only          *regexp.Regexp // pages to measure
	profile       string         // file of the CPU profile; empty for none
	oldest        time.Time      // of the oldest row
	pool          *pgxpool.Pool
	stderr        io.Writer
}

type pageResult struct {
	path         string
	small, large samples
	scanned      int64   // rows read by sequential scans of the large tables, at the larger size
	cpu          cpuTime // of all visits at the larger size; steady on a busy machine
}

func engineRoom(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := engineRoomBench{stderr: stderr}
	flags := newFlags("engine-room", stderr)
	flags.Int64Var(&b.small, "small", 10_000, "rows of the small activity log")
	flags.Int64Var(&b.large, "large", 10_000_000, "rows of the large activity log; a hundredth of it are executions")
	flags.IntVar(&b.visits, "visits", 20, "visits to each page")
	data := flags.String("data", "", "folder that keeps the database for later runs; default: a temporary one")
	flags.DurationVar(&b.watchDuration, "watched", 30*time.Second, "how long the overview is watched, by 0, 1 and 100 "+
		"viewers; 0 skips it")
	only := flags.String("pages", "", "pages to measure, as a regular expression; default: all")
	flags.StringVar(&b.profile, "cpuprofile", "", "file for a CPU profile")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.small < 1000 || b.large < b.small || b.visits < 1 {
		return errors.New("engine-room: -small must be at least 1000, -large at least -small, -visits at least 1")
	}
	var err error
	if b.only, err = regexp.Compile(*only); err != nil {
		return fmt.Errorf("engine-room: -pages: %w", err)
	}
	return withDatabase(ctx, pgserver.Config{Dir: *data}, 8, stderr, func(pool *pgxpool.Pool) error {
		b.pool = pool
		return b.run(ctx, out)
	})
}

func (b *engineRoomBench) run(ctx context.Context, out io.Writer) error {
	handler, err := b.handler()
	if err != nil {
		return err
	}
	return b.profiled(func() error {
		pages, err := b.measure(ctx, handler)
		if err != nil {
			return err
		}
		b.print(out, pages)
		return b.watchAll(ctx, out, handler)
	})
}

// watchAll measures 0, 1 and 100 viewers.
func (b *engineRoomBench) watchAll(ctx context.Context, out io.Writer, handler http.Handler) error {
	if b.watchDuration == 0 {
		return nil
	}
	var loads []viewerLoad
	for _, viewers := range []int{0, 1, 100} {
		fmt.Fprintf(b.stderr, "%d viewers\n", viewers)
		l, err := b.watch(ctx, handler, viewers)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	b.printLoads(out, loads)
	return nil
}

// measure visits all pages with both logs.
func (b *engineRoomBench) measure(ctx context.Context, handler http.Handler) ([]*pageResult, error) {
	filled, err := b.isFilled(ctx)
	if err != nil {
		return nil, err
	}
	if !filled {
		if err := b.fill(ctx, 0, b.small); err != nil {
			return nil, err
		}
	}
	if filled { // an earlier run left rows that housekeeping would count
		if err := b.countRest(ctx); err != nil {
			return nil, err
		}
	}
	paths, err := b.paths(ctx)
	if err != nil {
		return nil, err
	}
	pages := make([]*pageResult, 0, len(paths))
	for _, path := range paths {
		if b.only.MatchString(path) {
			pages = append(pages, &pageResult{path: path})
		}
	}
	if !filled {
		for _, p := range pages {
			if p.small, err = b.visit(ctx, handler, p.path); err != nil {
				return nil, err
			}
		}
		if err := b.fill(ctx, b.small, b.large); err != nil {
			return nil, err
		}
	}
	for _, p := range pages {
		if err := b.measureLarge(ctx, handler, p); err != nil {
			return nil, err
		}
	}
	return pages, nil
}

// measureLarge visits a page with the large log.
func (b *engineRoomBench) measureLarge(ctx context.Context, handler http.Handler, p *pageResult) error {
	before, err := b.sequentialReads(ctx)
	if err != nil {
		return err
	}
	p.cpu, err = measureCPU(ctx, b.pool, func() (err error) {
		p.large, err = b.visit(ctx, handler, p.path)
		return err
	})
	if err != nil {
		return err
	}
	after, err := b.sequentialReads(ctx)
	p.scanned = after - before
	return err
}

// profiled runs fn, and profiles it on request.
func (b *engineRoomBench) profiled(fn func() error) error {
	if b.profile == "" {
		return fn()
	}
	file, err := os.Create(b.profile)
	if err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return errors.Join(fmt.Errorf("profile: %w", err), file.Close())
	}
	err = fn()
	pprof.StopCPUProfile()
	return errors.Join(err, file.Close())
}

// isFilled reports whether an earlier run left the large log here.
func (b *engineRoomBench) isFilled(ctx context.Context) (filled bool, err error) {
	err = b.pool.QueryRow(ctx, "select count(*) >= $1 from agent_executions", b.large/100).Scan(&filled)
	if err != nil {
		return false, fmt.Errorf("count executions: %w", err)
	}
	return filled, nil
}

// handler serves the pages without a login.
func (b *engineRoomBench) handler() (http.Handler, error) {
	room, err := engineroom.New(engineroom.Options{Pool: b.pool, Agent: "bench"})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	return mux, nil
}

// visit requests a page, after one uncounted request.
func (b *engineRoomBench) visit(ctx context.Context, handler http.Handler, path string) (samples, error) {
	var latencies samples
	for i := range b.visits + 1 {
		req := httptest.NewRequestWithContext(ctx, http.MethodGet, path, http.NoBody)
		response := httptest.NewRecorder()
		began := time.Now()
		handler.ServeHTTP(response, req)
		elapsed := time.Since(began)
		if response.Code != http.StatusOK {
			return nil, fmt.Errorf("GET %s: status %d: %.500s", path, response.Code, response.Body)
		}
		if strings.Contains(response.Body.String(), "This could not be read") {
			return nil, fmt.Errorf("GET %s: a part could not be read", path)
		}
		if i > 0 {
			latencies = append(latencies, elapsed)
		}
	}
	fmt.Fprintf(b.stderr, "%-60s p50 %s ms\n", path, latencies.millis(0.5))
	return latencies, nil
}

// paths returns the pages, with filters that use different indexes.
func (b *engineRoomBench) paths(ctx context.Context) ([]string, error) {
	var trace, execution, thread, skill, wide string
	err := b.pool.QueryRow(ctx, `
		select e.trace_id, e.id::text, (select t.id from agent_threads t order by t.updated_at desc limit 1),
		       (select s.name from agent_skills s order by s.name limit 1),
		       (select a.trace_id from agent_activity a order by a.id limit 1)
		  from agent_executions e order by e.id desc limit 1`).Scan(&trace, &execution, &thread, &skill, &wide)
	if err != nil {
		return nil, fmt.Errorf("choose pages: %w", err)
	}
	return []string{
		"/", "/activity", "/activity?status=error", "/activity?surface=webhook&status=error", "/activity?skill=" +
			url.QueryEscape(skill),
		"/activity?lane=none", "/traces", "/traces?surface=heartbeat", "/traces?surface=chat&status=failed",
		"/traces/" + trace, "/traces/" + wide, "/traces/" + spansTrace, "/traces/" + spansTrace + "?part=panel",
		"/executions", "/executions?status=completed", "/executions?status=waiting", "/executions?flow=flow_7&status=failed",
		"/executions/" + execution, "/threads", "/threads/" + url.PathEscape(thread), "/approvals", "/skills",
		"/skills/" + url.PathEscape(skill),
		"/automations", "/objectives", "/memory", "/deliveries", "/spend", "/spend?days=30", "/spend?by=model",
		"/spend/" + time.Now().UTC().AddDate(0, 0, -1).Format(time.DateOnly), "/charts?range=90d",
		"/executions?flow=flow_7&failed=1", "/audit", "/lanes", "/operate",
		"/find?q=" + execution[24:], "/find?q=skill_7", "/find?q=abc12", "/executions?trace_id=" + execution[24:],
		"/traces?trace=" + trace[21:],
	}, nil
}

// sequentialReads counts the rows that sequential scans of the large tables have read.
func (b *engineRoomBench) sequentialReads(ctx context.Context) (n int64, err error) {
	if err := b.flushStatistics(ctx); err != nil {
		return 0, err
	}
	err = b.pool.QueryRow(ctx, `
		select coalesce(sum(seq_tup_read), 0)::bigint from pg_stat_user_tables
		 where relname ~ '^agent_(activity|executions|messages|threads|checkpoints)'
		   and relname not in ('agent_activity_open', 'agent_activity_counted')`).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("read the statistics: %w", err)
	}
	return n, nil
}

// flushStatistics reconnects, which makes every backend report its statistics.
func (b *engineRoomBench) flushStatistics(ctx context.Context) error {
	b.pool.Reset()
	return b.pool.Ping(ctx)
}

func (b *engineRoomBench) print(out io.Writer, pages []*pageResult) {
	fmt.Fprintf(out, "Server milliseconds of a page, %d visits each, without the network; %d rows of the activity log, "+
		"then %d, and a hundredth as many executions.\n\n",
		b.visits, b.small, b.large)
	fmt.Fprintln(out, "| page | p50 small | p99 small | p50 large | p95 large | p99 large | p50 large / small | processor: this "+
		"process, PostgreSQL | rows read by sequential scans |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|---|---|")
	for _, p := range pages {
		small, of := "| | |", "" // a kept log has no small size
		if len(p.small) > 0 {
			small = fmt.Sprintf("| %s | %s |", p.small.millis(0.5), p.small.millis(0.99))
			of = fmt.Sprintf("%.1f", ratio(p.large, p.small, 0.5))
		}
		each := time.Duration(b.visits + 1)
		fmt.Fprintf(out, "| `%s` %s %s | %s | %s | %s | %s, %s | %d |\n", p.path, small, p.large.millis(0.5),
			p.large.millis(0.95), p.large.millis(0.99), of, millis(p.cpu.own/each), millis(p.cpu.server/each), p.scanned)
	}
}

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

// viewerLoad is the cost of open overviews.
type viewerLoad struct {
	viewers  int
	process  float64 // share of a core used by this process, including the viewers
	server   float64 // share of a core used by PostgreSQL
	perSec   float64 // transactions a second
	received int64   // bytes sent to all viewers
}

// watch measures open overviews while writeActivities writes activities.
func (b *engineRoomBench) watch(ctx context.Context, handler http.Handler, viewers int) (viewerLoad, error) {
	served := httptest.NewServer(handler)
	defer served.Close()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	counts := make([]int64, viewers)
	for i := range viewers {
		group.Go(func() error { return receive(watching, served.URL+"/live/", &counts[i]) })
	}
	group.Go(func() error { return b.writeActivities(watching) })
	if err := pause(ctx, 3*time.Second); err != nil { // until all viewers are connected
		return viewerLoad{}, err
	}
	before, err := b.usage(ctx)
	if err != nil {
		return viewerLoad{}, err
	}
	if err := pause(ctx, b.watchDuration); err != nil {
		return viewerLoad{}, err
	}
	after, err := b.usage(ctx)
	if err != nil {
		return viewerLoad{}, err
	}
	stop()
	if err := group.Wait(); err != nil {
		return viewerLoad{}, err
	}
	l := viewerLoad{
		viewers: viewers, process: share(after.own-before.own, b.watchDuration),
		server: share(after.server-before.server, b.watchDuration),
		perSec: float64(after.transactions-before.transactions) / b.watchDuration.Seconds(),
	}
	for _, n := range counts {
		l.received += n
	}
	return l, nil
}

func share(cpu, elapsed time.Duration) float64 { return cpu.Seconds() / elapsed.Seconds() }

// receive reads a stream until ctx ends.
func receive(ctx context.Context, address string, n *int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("watch the overview: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("watch the overview: %s", resp.Status)
	}
	*n, err = io.Copy(io.Discard, resp.Body)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// writeActivities writes an activity twice a second.
func (b *engineRoomBench) writeActivities(ctx context.Context) error {
	for pause(ctx, 500*time.Millisecond) == nil {
		_, err := b.pool.Exec(ctx, `
			insert into agent_activity (trace_id, surface, skill_name, status, duration_ms, finished_at)
			values ('hb_01', 'heartbeat', 'skill_1', 'success', 12, clock_timestamp())`)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("write an activity: %w", err)
		}
	}
	return nil
}

type usage struct {
	cpuTime
	transactions int64
}

func (b *engineRoomBench) usage(ctx context.Context) (u usage, err error) {
	if u.cpuTime, err = usedCPU(ctx, b.pool); err != nil {
		return u, err
	}
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database
		where datname = current_database()`).Scan(&u.transactions)
	return u, err
}

func (b *engineRoomBench) printLoads(out io.Writer, loads []viewerLoad) {
	fmt.Fprintf(out, "\nOpen overviews over the large log, two activities a second, %s each. This process is also the "+
		"viewers' side.\n\n", b.watchDuration)
	fmt.Fprintln(out, "| viewers | this process, % of a core | PostgreSQL, % of a core | transactions/s | kB sent |")
	fmt.Fprintln(out, "|---|---|---|---|---|")
	for _, l := range loads {
		fmt.Fprintf(out, "| %d | %.2f | %.2f | %.1f | %d |\n", l.viewers, 100*l.process, 100*l.server,
			l.perSec, l.received/1000)
	}
}
