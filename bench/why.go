package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/why"
)

// whyBench measures what why(trace) takes in a large log, beside one row read by an index in turns with it. Traces are drawn from the whole
// log, so most are not in memory. Each has a hundred actions, a wait for an event that another trace raised, a lane, and three of ten have a child.
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

// askInTurns asks each question about one trace after the other, so that whatever else the machine does concerns all alike.
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
