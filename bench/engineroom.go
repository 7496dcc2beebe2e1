package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
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
