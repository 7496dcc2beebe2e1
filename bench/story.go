package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// storyBench measures questions to a large log. It reads the story of a trace by the SQL of CONTRACTS.md, by `agent
// trace` and the API, and as a page. It also reads every view and listing of the dashboard. The floor is one row by its
// key. Traces are random, so most are not cached.
type storyBench struct {
	engineRoomBench
	traces int // number of traces to read
}

type question struct {
	name    string
	target  time.Duration // target of p99; 0 for none
	run     func(ctx context.Context) error
	repeats int
	times   samples
	scanned int64
}

func story(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := storyBench{engineRoomBench: engineRoomBench{stderr: stderr}}
	flags := newFlags("story", stderr)
	flags.Int64Var(&b.large, "rows", 10_000_000, "rows of the activity log; a hundredth of it are executions")
	flags.IntVar(&b.traces, "traces", 1000, "traces to read")
	flags.IntVar(&b.visits, "visits", 20, "runs of each view and listing")
	data := flags.String("data", "", "folder that keeps the database for later runs; default: a temporary one")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.large < 1000 || b.traces < 1 || b.visits < 1 {
		return errors.New("story: -rows must be at least 1000, -traces and -visits at least 1")
	}
	return b.withLog(ctx, *data, func() error {
		questions, err := b.questions()
		if err == nil {
			err = b.measureAll(ctx, questions)
		}
		if err == nil {
			b.printStory(out, questions)
		}
		return err
	})
}

// withLog runs fn on a database with the activity log. A folder keeps it for later runs.
func (b *storyBench) withLog(ctx context.Context, data string, fn func() error) error {
	return withDatabase(ctx, pgserver.Config{Dir: data}, 4, b.stderr, func(pool *pgxpool.Pool) error {
		b.pool = pool
		filled, err := b.isFilled(ctx)
		if err == nil && !filled {
			err = b.fill(ctx, 0, b.large)
		}
		if err != nil {
			return err
		}
		return fn()
	})
}

// randomTrace returns a random trace of insertExecutions.
func (b *storyBench) randomTrace() string {
	e := rand.Int64N(b.large / 100)
	return fmt.Sprintf("%s_01%024d", []string{"hb", "op", "ch", "wh", "fl"}[e%5], e)
}

// questions returns all questions, the floor first.
func (b *storyBench) questions() ([]*question, error) {
	handler, err := b.handler()
	if err != nil {
		return nil, err
	}
	const target = 10 * time.Millisecond
	all := []*question{
		{
			name: "floor: an execution by its key's trace, one row", repeats: b.traces,
			run: b.queryTrace(`select e.id from agent_executions e where e.trace_id = @trace limit 1`),
		},
		{name: "the story of a run by `trace_id`, SQL of the contract", target: target, repeats: b.traces, run: b.queryTrace(`
			select skill_name, status, duration_ms, token_usage, created_at from agent_activity where trace_id = @trace
			  order by created_at`)},
		{name: "the same by `conversation_id`", target: target, repeats: b.traces, run: b.queryTrace(`
			select skill_name, status, duration_ms, token_usage, created_at from agent_activity where conversation_id = @trace
			  order by created_at`)},
		{
			name: "`agent trace ID`, `GET /v1/traces/{id}`", target: target, repeats: b.traces,
			run: func(ctx context.Context) error {
				_, err := activity.TraceOf(ctx, b.pool, b.randomTrace())
				return err
			},
		},
		{
			name: "the page of a trace, whole", repeats: b.traces,
			run: func(ctx context.Context) error { return openPage(ctx, handler, "/traces/"+b.randomTrace()) },
		},
	}
	all = append(all, b.listings()...)
	for _, view := range []struct{ name, sql string }{
		{"agent_locks_live", `select * from agent_locks_live`},
		{"agent_thread_locks", `select * from agent_thread_locks`},
		{"agent_executions_by_status", `select * from agent_executions_by_status`},
		{"agent_executions_waiting", `select * from agent_executions_waiting limit 100`},
		{"agent_executions_stuck", `select * from agent_executions_stuck`},
		{"agent_spend", `select * from agent_spend where day >= current_date - 1`},
		{"agent_skill_health", `select * from agent_skill_health`},
	} {
		all = append(all, &question{name: "view `" + view.name + "`", repeats: b.visits, run: b.query(view.sql)})
	}
	return all, nil
}

// listings returns the queries of pages, commands and the API besides views.
func (b *storyBench) listings() []*question {
	week := time.Now().Add(-7 * 24 * time.Hour)
	recent := func(f activity.Filter) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			_, _, err := activity.Recent(ctx, b.pool, f)
			return err
		}
	}
	return []*question{
		{name: "`agent trace ls`, `GET /v1/traces`", repeats: b.visits, run: func(ctx context.Context) error {
			_, _, err := activity.Traces(ctx, b.pool, activity.TraceFilter{})
			return err
		}},
		{name: "`GET /v1/activity`", repeats: b.visits, run: recent(activity.Filter{})},
		{
			name: "`GET /v1/activity?surface=webhook&status=error`", repeats: b.visits,
			run: recent(activity.Filter{Surface: "webhook", Status: activity.Error}),
		},
		{name: "spend of 7 days by skill, of the page", repeats: b.visits, run: func(ctx context.Context) error {
			_, err := activity.CountedSpend(ctx, b.pool, activity.SpendFilter{Since: week, By: activity.BySkill})
			return err
		}},
		{name: "health of the skills, of the page", repeats: b.visits, run: func(ctx context.Context) error {
			_, err := activity.CountedHealth(ctx, b.pool, activity.HealthFilter{})
			return err
		}},
	}
}

func (b *storyBench) queryTrace(sql string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		rows, err := b.pool.Query(ctx, sql, postgres.Strict{"trace": b.randomTrace()})
		return drain(rows, err)
	}
}

func (b *storyBench) query(sql string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		rows, err := b.pool.Query(ctx, sql)
		return drain(rows, err)
	}
}

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

func openPage(ctx context.Context, handler http.Handler, path string) error {
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, httptest.NewRequestWithContext(ctx, http.MethodGet, path, http.NoBody))
	if response.Code != http.StatusOK {
		return fmt.Errorf("GET %s: status %d: %.500s", path, response.Code, response.Body)
	}
	return nil
}

// measureAll runs every question, after one uncounted run of each.
func (b *storyBench) measureAll(ctx context.Context, questions []*question) error {
	for _, q := range questions {
		before, err := b.sequentialReads(ctx)
		if err != nil {
			return err
		}
		for i := range q.repeats + 1 {
			began := time.Now()
			if err := q.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", q.name, err)
			}
			if i > 0 {
				q.times = append(q.times, time.Since(began))
			}
		}
		after, err := b.sequentialReads(ctx)
		if err != nil {
			return err
		}
		q.scanned = (after - before) / int64(q.repeats+1)
		fmt.Fprintf(b.stderr, "%-60s p50 %s ms\n", q.name, q.times.millis(0.5))
	}
	return nil
}

func (b *storyBench) printStory(out io.Writer, questions []*question) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions; %d processors; milliseconds at the client.\n\n", b.large,
		b.large/100, runtime.NumCPU())
	t.WriteString("| question | n | p50 | p99 | p99 target | × floor p50 | rows read by sequential scans, each " +
		"|\n|---|---|---|---|---|---|---|\n")
	floor := questions[0].times
	for _, q := range questions {
		targetText := ""
		if q.target > 0 {
			targetText = "< " + millis(q.target)
		}
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %.1f | %d |\n", q.name, len(q.times), millis(q.times.quantile(0.5)),
			millis(q.times.quantile(0.99)), targetText, ratio(q.times, floor, 0.5), q.scanned)
	}
	fmt.Fprint(out, t.String())
}
