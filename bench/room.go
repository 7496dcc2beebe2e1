package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// room measures the pages of the Engine Room: what each takes the server with a small log and with a large one. A
// page may not do work that grows with the table, so the two have to be about the same.
type room struct {
	small, large int64 // rows of the activity log
	visits       int   // to each page
	watched      time.Duration
	base         time.Time // of the oldest row
	pool         *pgxpool.Pool
	errw         io.Writer
}

// visited is how a page fared.
type visited struct {
	path         string
	small, large samples
	scanned      int64 // rows read by sequential scans of the large tables, at the larger size
}

func engineRoom(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := room{errw: errw}
	flags := flag.NewFlagSet("engine-room", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.Int64Var(&b.small, "small", 10_000, "rows of the activity log at first")
	flags.Int64Var(&b.large, "large", 10_000_000, "rows of the activity log then; a hundredth of it are executions")
	flags.IntVar(&b.visits, "visits", 20, "visits to each page")
	data := flags.String("data", "", "folder that keeps the database, to measure it again without filling it; empty for one that is removed")
	flags.DurationVar(&b.watched, "watched", 30*time.Second, "how long the overview is watched, by nobody, one and a hundred")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.small < 1000 || b.large < b.small || b.visits < 1 {
		return errors.New("engine-room: -small is at least 1000, -large at least -small, -visits at least 1")
	}
	server, err := pgserver.Start(ctx, pgserver.Config{
		Dir: *data, Ephemeral: *data == "", Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b.pool, err = postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: 8, ApplicationName: "bench"})
	if err != nil {
		return err
	}
	defer b.pool.Close()
	if _, err := migrations.Up(ctx, b.pool); err != nil {
		return err
	}
	handler, err := b.handler()
	if err != nil {
		return err
	}
	pages, err := b.measure(ctx, handler)
	if err != nil {
		return err
	}
	b.print(out, pages)
	var loads []load
	for _, viewers := range []int{0, 1, 100} {
		fmt.Fprintf(errw, "%d viewers\n", viewers)
		l, err := b.watch(ctx, handler, viewers)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	b.printLoads(out, loads)
	return nil
}

// measure visits all pages at both sizes.
func (b *room) measure(ctx context.Context, handler http.Handler) ([]*visited, error) {
	filled, err := b.filled(ctx)
	if err != nil {
		return nil, err
	}
	if !filled {
		if err := b.fill(ctx, 0, b.small); err != nil {
			return nil, err
		}
	}
	paths, err := b.paths(ctx)
	if err != nil {
		return nil, err
	}
	pages := make([]*visited, 0, len(paths))
	for _, path := range paths {
		pages = append(pages, &visited{path: path})
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
		before, err := b.scanned(ctx)
		if err != nil {
			return nil, err
		}
		if p.large, err = b.visit(ctx, handler, p.path); err != nil {
			return nil, err
		}
		after, err := b.scanned(ctx)
		if err != nil {
			return nil, err
		}
		p.scanned = after - before
	}
	return pages, nil
}

// filled says whether an earlier run left the larger log here.
func (b *room) filled(ctx context.Context) (yes bool, err error) {
	err = b.pool.QueryRow(ctx, "select count(*) >= $1 from agent_executions", b.large/100).Scan(&yes)
	if err != nil {
		return false, fmt.Errorf("look what is there: %w", err)
	}
	return yes, nil
}

// handler is the room alone: who may enter is not measured.
func (b *room) handler() (http.Handler, error) {
	made, err := engineroom.New(engineroom.Options{Pool: b.pool, Agent: "bench"})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for _, r := range made.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	return mux, nil
}

// visit opens a page so often, once before that is not counted.
func (b *room) visit(ctx context.Context, handler http.Handler, path string) (samples, error) {
	var took samples
	for i := range b.visits + 1 {
		req := httptest.NewRequestWithContext(ctx, http.MethodGet, path, http.NoBody)
		answer := httptest.NewRecorder()
		began := time.Now()
		handler.ServeHTTP(answer, req)
		lasted := time.Since(began)
		if answer.Code != http.StatusOK {
			return nil, fmt.Errorf("GET %s: status %d: %.500s", path, answer.Code, answer.Body)
		}
		if strings.Contains(answer.Body.String(), "This could not be read") {
			return nil, fmt.Errorf("GET %s: a part could not be read", path)
		}
		if i > 0 {
			took = append(took, lasted)
		}
	}
	fmt.Fprintf(b.errw, "%-60s p50 %s ms\n", path, took.show(0.5))
	return took, nil
}

// paths are the pages, with filters that make a difference.
func (b *room) paths(ctx context.Context) ([]string, error) {
	var trace, execution, thread, skill, wide string
	err := b.pool.QueryRow(ctx, `
		select e.trace_id, e.id::text, (select t.id from agent_threads t order by t.updated_at desc limit 1),
		       (select a.skill_name from agent_activity a order by a.id desc limit 1),
		       (select a.trace_id from agent_activity a order by a.id limit 1)
		  from agent_executions e order by e.id desc limit 1`).Scan(&trace, &execution, &thread, &skill, &wide)
	if err != nil {
		return nil, fmt.Errorf("choose what to look at: %w", err)
	}
	return []string{
		"/", "/activity", "/activity?status=error", "/activity?surface=webhook&status=error", "/activity?skill=" + url.QueryEscape(skill),
		"/activity?lane=none", "/traces", "/traces?surface=heartbeat", "/traces?surface=chat&status=failed", "/traces/" + trace, "/traces/" + wide,
		"/executions", "/executions?status=completed", "/executions?status=waiting", "/executions?flow=flow_7&status=failed",
		"/executions/" + execution, "/threads", "/threads/" + url.PathEscape(thread), "/approvals", "/skills", "/skills/" + url.PathEscape(skill),
		"/automations", "/objectives", "/memory", "/deliveries", "/spend", "/spend?days=30", "/audit", "/lanes", "/operate",
	}, nil
}

// scanned is how many rows sequential scans of the large tables have read.
func (b *room) scanned(ctx context.Context) (n int64, err error) {
	if err := b.flushed(ctx); err != nil {
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

// flushed has every connection hand in its statistics, which a backend otherwise does when it has time.
func (b *room) flushed(ctx context.Context) error {
	b.pool.Reset()
	return b.pool.Ping(ctx)
}

// print writes the table.
func (b *room) print(out io.Writer, pages []*visited) {
	fmt.Fprintf(out, "Server milliseconds of a page, %d visits each, without the network; %d rows of the activity log, then %d, and a hundredth as many executions.\n\n",
		b.visits, b.small, b.large)
	fmt.Fprintln(out, "| page | p50 small | p99 small | p50 large | p99 large | p50 large / small | rows read by sequential scans |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|")
	for _, p := range pages {
		small, of := "| | |", "" // a log that was kept is large from the start
		if len(p.small) > 0 {
			small = fmt.Sprintf("| %s | %s |", p.small.show(0.5), p.small.show(0.99))
			of = fmt.Sprintf("%.1f", ratio(p.large, p.small, 0.5))
		}
		fmt.Fprintf(out, "| `%s` %s %s | %s | %s | %d |\n", p.path, small, p.large.show(0.5), p.large.show(0.99), of, p.scanned)
	}
}
