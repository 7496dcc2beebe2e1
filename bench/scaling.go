package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// scalingBench measures the capacity of one PostgreSQL. It measures bytes and processor time at a smaller size, and
// extrapolates linearly to a larger size. It prints prediction and measurement. docs/scaling.md has one run's figures.
type scalingBench struct {
	engineRoomBench

	scales        [2]rowCounts // the smaller scale predicts the larger one
	processes     []int        // the two counts before the last one predict it
	idleDuration  time.Duration
	pacedDuration time.Duration
	rate          int // executions per second under the paced load
	backlog       int
	handler       http.Handler
	lockedStarts  atomic.Int64 // starts repeated after a lock timeout

	rowSizes    []rowSize
	nodeCosts   []nodesCost
	smallCost   nodesCost // one process, on the smaller database
	eventTimes  [2]time.Duration
	pages       []pageCost
	viewerLoads []viewerLoad
}

type rowCounts struct{ activity, waiting, threads int64 }

// fullScale is the size of -full.
var fullScale = rowCounts{activity: 30_000_000, waiting: 1_000_000, threads: 1_000_000}

func scaling(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := scalingBench{engineRoomBench: engineRoomBench{stderr: stderr}}
	if err := b.parse(args); err != nil {
		return err
	}
	config := pgserver.Config{MaxConnections: 100 + connsPerNode*b.processes[len(b.processes)-1]}
	return withDatabase(ctx, config, 16, stderr, func(pool *pgxpool.Pool) (err error) {
		b.pool = pool
		if b.handler, err = b.engineRoomBench.handler(); err != nil {
			return err
		}
		if err := b.measure(ctx); err != nil {
			return err
		}
		b.print(out)
		return nil
	})
}

func (b *scalingBench) parse(args []string) error {
	flags := newFlags("scaling", b.stderr)
	large := &b.scales[1]
	flags.Int64Var(&large.activity, "rows", 500_000, "rows of the activity log; a tenth of them predict the others")
	flags.Int64Var(&large.waiting, "waiting", 50_000, "waiting executions")
	flags.Int64Var(&large.threads, "threads", 20_000, "threads with ten messages each")
	full := flags.Bool("full", false, "30,000,000 rows of the log, 1,000,000 waiting executions, 1,000,000 threads: 35 GB")
	flags.IntVar(&b.visits, "visits", 10, "visits to each page")
	maxProcesses := flags.Int("processes", 64, "maximum number of processes; a quarter and half of it predict it")
	flags.DurationVar(&b.idleDuration, "idle", 20*time.Second, "duration of the idle measurement")
	flags.DurationVar(&b.pacedDuration, "for", 10*time.Second, "duration of the paced load")
	flags.DurationVar(&b.watchDuration, "watched", 10*time.Second, "how long the overview is watched, by 1, 10 and 100 "+
		"viewers")
	flags.IntVar(&b.rate, "rate", 100, "executions started a second under the paced load")
	flags.IntVar(&b.backlog, "backlog", 10_000, "executions started at once")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *full {
		*large = fullScale
	}
	if large.activity < 1000 || large.waiting < 100 || large.threads < 100 {
		return errors.New("scaling: -rows must be at least 1000, -waiting and -threads at least 100")
	}
	if *maxProcesses < 4 || b.backlog < 10 || b.rate < 1 || b.visits < 1 {
		return errors.New("scaling: -processes must be at least 4, -backlog 10, -rate and -visits 1")
	}
	b.scales[0] = rowCounts{activity: large.activity / 10, waiting: large.waiting / 10, threads: large.threads / 10}
	b.processes = []int{1, *maxProcesses / 4, *maxProcesses / 2, *maxProcesses}
	b.large = large.activity
	return nil
}

// measure fills the database to both sizes and measures each.
func (b *scalingBench) measure(ctx context.Context) error {
	for scale := range b.scales {
		if err := b.grow(ctx, scale); err != nil {
			return err
		}
		if err := b.measurePages(ctx, scale); err != nil {
			return err
		}
		fmt.Fprintf(b.stderr, "one process, size %d\n", scale+1)
		cost, err := b.measureNodes(ctx, 1, &scale)
		if err != nil {
			return err
		}
		if scale == 0 {
			b.smallCost = cost
			continue
		}
		b.nodeCosts = append(b.nodeCosts, cost)
	}
	for _, n := range b.processes[1:] {
		fmt.Fprintf(b.stderr, "%d processes\n", n)
		cost, err := b.measureNodes(ctx, n, nil)
		if err != nil {
			return err
		}
		b.nodeCosts = append(b.nodeCosts, cost)
	}
	return b.measureViewers(ctx)
}

func (b *scalingBench) measureViewers(ctx context.Context) error {
	if b.watchDuration <= 0 {
		return nil
	}
	for _, viewers := range []int{1, 10, 100} {
		fmt.Fprintf(b.stderr, "%d viewers\n", viewers)
		var l viewerLoad
		cpu, elapsed, err := b.measureConnections(ctx, benchName, func() (err error) {
			l, err = b.watch(ctx, b.handler, viewers)
			return err
		})
		if err != nil {
			return err
		}
		l.server = cpu.Seconds() / elapsed.Seconds() // only connections that live until the end count
		b.viewerLoads = append(b.viewerLoads, l)
	}
	return nil
}

// pageCost is the server's processor time per visit of a page, at both sizes.
type pageCost struct {
	path string
	each [2]time.Duration
}

// measurePages visits the most used pages.
func (b *scalingBench) measurePages(ctx context.Context, scale int) error {
	paths := []string{"/", "/activity", "/traces", "/executions?status=waiting", "/threads", "/spend?days=30"}
	for i, path := range paths {
		cpu, _, err := b.measureConnections(ctx, benchName, func() error {
			_, err := b.visit(ctx, b.handler, path)
			return err
		})
		if err != nil {
			return err
		}
		if scale == 0 {
			b.pages = append(b.pages, pageCost{path: path})
		}
		b.pages[i].each[scale] = cpu / time.Duration(b.visits+1)
	}
	return nil
}

// relationSize is in bytes.
type relationSize struct{ heap, index, toast int64 }

func (s relationSize) total() int64 { return s.heap + s.index + s.toast }

func (s relationSize) minus(t relationSize) relationSize {
	return relationSize{s.heap - t.heap, s.index - t.index, s.toast - t.toast}
}

func (s relationSize) plus(t relationSize) relationSize {
	return relationSize{s.heap + t.heap, s.index + t.index, s.toast + t.toast}
}

// rowSize is the size of one kind of rows at both scales.
type rowSize struct {
	name string
	rows [2]int64
	size [2]relationSize
}

// The tables of each kind of rows, as a pattern of names. everything includes River's tables.
const (
	logTables       = `^agent_activity($|_\d|_default)`
	executionTables = `^agent_executions$`
	threadTables    = `^agent_(threads|messages)$`
	everything      = ``
)

// size sums the relations whose names match. A partition counts by its own name.
func (b *scalingBench) size(ctx context.Context, tables string) (s relationSize, err error) {
	err = b.pool.QueryRow(ctx, `
		select coalesce(sum(pg_table_size(c.oid) - t.size), 0)::bigint, coalesce(sum(pg_indexes_size(c.oid)), 0)::bigint,
		       coalesce(sum(t.size), 0)::bigint
		  from pg_class c join pg_namespace n on n.oid = c.relnamespace,
		       lateral (select coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0) as size) t
		 where c.relkind = 'r' and n.nspname !~ '^(pg_|information_schema)' and c.relname ~ @tables`,
		postgres.Strict{"tables": tables}).Scan(&s.heap, &s.index, &s.toast)
	if err != nil {
		return s, fmt.Errorf("measure the tables: %w", err)
	}
	return s, nil
}

// grow fills the database from the previous scale to this one.
func (b *scalingBench) grow(ctx context.Context, scale int) error {
	var from rowCounts
	if scale > 0 {
		from = b.scales[scale-1]
	}
	to := b.scales[scale]
	for i, n := range []struct {
		name, tables string
		from, to     int64
		fill         func(ctx context.Context, from, to int64) error
	}{
		{"an execution that waits", executionTables, from.waiting, to.waiting, b.inBatches(insertWaiting, batchRows/5)},
		{"a thread with ten messages", threadTables, from.threads, to.threads, b.inBatches(insertTalk, batchRows/10)},
		{"a row of the activity log", logTables, from.activity, to.activity, b.fill},
	} {
		before, err := b.size(ctx, n.tables)
		if err != nil {
			return err
		}
		if err := n.fill(ctx, n.from, n.to); err != nil {
			return err
		}
		after, err := b.size(ctx, n.tables)
		if err != nil {
			return err
		}
		if scale == 0 {
			b.rowSizes = append(b.rowSizes, rowSize{name: n.name})
		}
		g := &b.rowSizes[i]
		g.rows[scale], g.size[scale] = n.to, after.minus(before)
		if scale > 0 {
			g.size[scale] = g.size[scale].plus(g.size[0])
		}
	}
	return nil
}

func (b *scalingBench) inBatches(statements []string, rows int64) func(ctx context.Context, from, to int64) error {
	return func(ctx context.Context, from, to int64) error {
		return b.insertBatches(ctx, "rows", statements, from, to, rows, nil)
	}
}

// insertWaiting inserts executions that wait for an event.
var insertWaiting = []string{`
	insert into agent_executions (trace_id, surface, flow, status, claim, input, waiting_for, waiting_key, waiting_step,
	                              wait_number, started_at)
	select 'fl_02' || lpad(n::text, 24, '0'), 'flow', '` + waitFlow + `', 'waiting', 1, to_jsonb('scaling-' || n), 'event',
	       'scaling-' || n, 'go', 1, clock_timestamp()
	  from generate_series(@from::bigint, @to::bigint - 1) n`}

// insertTalk inserts threads with ten messages of 200 characters.
var insertTalk = []string{`
	insert into agent_threads (id, channel, participant, next_seq)
	select 'guest:' || n, 'chat', 'Guest ' || n, 11 from generate_series(@from::bigint, @to::bigint - 1) n`, `
	insert into agent_messages (thread_id, seq, turn, role, content, channel, trace_id, status, sent_at)
	select 'guest:' || n, m, m, case when m % 2 = 1 then 'user' else 'assistant' end,
	       repeat(left(md5((n * 10 + m)::text), 20), 10), 'chat', 'ch_02' || lpad(n::text, 24, '0'), 'delivered',
	       clock_timestamp()
	  from generate_series(@from::bigint, @to::bigint - 1) n, generate_series(1, 10) m`}

// extrapolate returns the value at x of the line through two points.
func extrapolate(x1, y1, x2, y2, x float64) float64 {
	if x1 == x2 {
		return y2
	}
	return y1 + (y2-y1)*(x-x1)/(x2-x1)
}

// deviation formats the relative difference of a prediction.
func deviation(predicted, measured float64) string {
	if measured == 0 {
		return ""
	}
	return fmt.Sprintf("%+.0f %%", 100*(predicted-measured)/measured)
}

func (b *scalingBench) print(out io.Writer) {
	var t strings.Builder
	large := b.scales[1]
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions that wait, %d threads; %d processors.\n",
		large.activity, large.waiting, large.threads, runtime.NumCPU())
	t.WriteString("A prediction comes from the smaller measurements alone.\n\n")
	b.printBytes(&t)
	b.printNodes(&t)
	b.printReads(&t)
	fmt.Fprint(out, t.String())
}

func (b *scalingBench) printBytes(t *strings.Builder) {
	t.WriteString("| bytes for each | rows | heap | indexes | toast | in all |" +
		" rows then | MB predicted | MB measured | difference |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	for _, g := range b.rowSizes {
		n := float64(g.rows[0])
		each := func(bytes int64) string { return fmt.Sprintf("%.0f", float64(bytes)/n) }
		s := g.size[0]
		expected, got := float64(s.total())/n*float64(g.rows[1])/1e6, float64(g.size[1].total())/1e6
		fmt.Fprintf(t, "| %s | %d | %s | %s | %s | %s | %d | %.1f | %.1f | %s |\n", g.name, g.rows[0],
			each(s.heap), each(s.index), each(s.toast), each(s.total()), g.rows[1], expected, got, deviation(expected, got))
	}
}

func (b *scalingBench) printNodes(t *strings.Builder) {
	t.WriteString("\n| of the server, by processes |")
	for _, f := range b.nodeCosts {
		fmt.Fprintf(t, " %d |", f.n)
	}
	n := len(b.nodeCosts)
	fmt.Fprintf(t, " %d predicted | difference |\n|---|%s---|---|\n", b.nodeCosts[n-1].n, strings.Repeat("---|", n))
	for _, row := range []struct {
		name, format string
		value        func(f nodesCost) float64
	}{
		{"connections", "%.0f", func(f nodesCost) float64 { return float64(f.connections) }},
		{"idle: transactions a second", "%.1f", func(f nodesCost) float64 { return f.transactions }},
		{"idle: processor time, % of a core", "%.2f", func(f nodesCost) float64 { return 100 * f.idle }},
		{
			fmt.Sprintf("each of %d executions a second, above idle: µs", b.rate), "%.0f",
			func(f nodesCost) float64 { return micros(f.paced) },
		},
		{
			fmt.Sprintf("each of %d executions at once: µs", b.backlog), "%.0f",
			func(f nodesCost) float64 { return micros(f.backlog) },
		},
	} {
		fmt.Fprintf(t, "| %s |", row.name)
		for _, f := range b.nodeCosts {
			fmt.Fprintf(t, " "+row.format+" |", row.value(f))
		}
		last := b.nodeCosts[n-3:]
		expected := extrapolate(float64(last[0].n), row.value(last[0]), float64(last[1].n), row.value(last[1]),
			float64(last[2].n))
		fmt.Fprintf(t, " "+row.format+" | %s |\n", expected, deviation(expected, row.value(last[2])))
	}
	t.WriteString("| executions a second, clients on the same processors |")
	for _, f := range b.nodeCosts {
		fmt.Fprintf(t, " %.0f |", f.backlogRate)
	}
	t.WriteString(" | |\n")
	if repeated := b.lockedStarts.Load(); repeated > 0 {
		fmt.Fprintf(t, "\nStarts repeated after a lock timeout: %d.\n", repeated)
	}
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

func (b *scalingBench) printReads(t *strings.Builder) {
	now := b.nodeCosts[0]
	t.WriteString("\n| µs of the server's connections | at a tenth of the rows | at all of them | ratio |\n")
	t.WriteString("|---|---|---|---|\n")
	row := func(name string, small, large float64) {
		fmt.Fprintf(t, "| %s | %.0f | %.0f | %.2f |\n", name, small, large, large/max(small, 1))
	}
	row("one process, idle, each second", 1e6*b.smallCost.idle, 1e6*now.idle)
	row("an execution of one step, paced", micros(b.smallCost.paced), micros(now.paced))
	row("an execution of one step, with a backlog", micros(b.smallCost.backlog), micros(now.backlog))
	row("an event, until its execution has ended", micros(b.eventTimes[0]), micros(b.eventTimes[1]))
	for _, p := range b.pages {
		row("a visit to `"+p.path+"`", micros(p.each[0]), micros(p.each[1]))
	}
	if len(b.viewerLoads) == 0 {
		return
	}
	t.WriteString("\n| open overviews | transactions a second | PostgreSQL, % of a core |" +
		" this process, both ends, % of a core |\n|---|---|---|---|\n")
	for _, l := range b.viewerLoads {
		fmt.Fprintf(t, "| %d | %.1f | %.1f | %.1f |\n", l.viewers, l.perSec, 100*l.server, 100*l.process)
	}
}
