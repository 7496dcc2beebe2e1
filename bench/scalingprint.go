package main

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"
)

// predicted is where the line through two points is at x.
func predicted(x1, y1, x2, y2, x float64) float64 {
	if x1 == x2 {
		return y2
	}
	return y1 + (y2-y1)*(x-x1)/(x2-x1)
}

// off is by how much a prediction differs from what was measured.
func off(predicted, measured float64) string {
	if measured == 0 {
		return ""
	}
	return fmt.Sprintf("%+.0f %%", 100*(predicted-measured)/measured)
}

// print writes the tables.
func (b *scalingBench) print(out io.Writer) {
	var t strings.Builder
	large := b.sizes[1]
	fmt.Fprintf(&t, "%d rows of the activity log, %d executions that wait, %d threads; %d processors.\n",
		large.log, large.waiting, large.threads, runtime.NumCPU())
	t.WriteString("A prediction comes from the smaller measurements alone.\n\n")
	b.printBytes(&t)
	b.printFleets(&t)
	b.printReads(&t)
	fmt.Fprint(out, t.String())
}

func (b *scalingBench) printBytes(t *strings.Builder) {
	t.WriteString("| bytes for each | rows | heap | indexes | toast | in all |" +
		" rows then | MB predicted | MB measured | difference |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	for _, g := range b.grown {
		n := float64(g.rows[0])
		each := func(bytes int64) string { return fmt.Sprintf("%.0f", float64(bytes)/n) }
		s := g.size[0]
		expected, got := float64(s.total())/n*float64(g.rows[1])/1e6, float64(g.size[1].total())/1e6
		fmt.Fprintf(t, "| %s | %d | %s | %s | %s | %s | %d | %.1f | %.1f | %s |\n", g.noun, g.rows[0],
			each(s.heap), each(s.index), each(s.toast), each(s.total()), g.rows[1], expected, got, off(expected, got))
	}
}

func (b *scalingBench) printFleets(t *strings.Builder) {
	t.WriteString("\n| of the server, by processes |")
	for _, f := range b.fleets {
		fmt.Fprintf(t, " %d |", f.n)
	}
	n := len(b.fleets)
	fmt.Fprintf(t, " %d predicted | difference |\n|---|%s---|---|\n", b.fleets[n-1].n, strings.Repeat("---|", n))
	micros := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
	for _, row := range []struct {
		name, format string
		of           func(f fleetCost) float64
	}{
		{"connections", "%.0f", func(f fleetCost) float64 { return float64(f.connections) }},
		{"idle: transactions a second", "%.1f", func(f fleetCost) float64 { return f.transactions }},
		{"idle: processor time, % of a core", "%.2f", func(f fleetCost) float64 { return 100 * f.idle }},
		{
			fmt.Sprintf("each of %d executions a second, above idle: µs", b.rate), "%.0f",
			func(f fleetCost) float64 { return micros(f.paced) },
		},
		{
			fmt.Sprintf("each of %d executions at once: µs", b.backlog), "%.0f",
			func(f fleetCost) float64 { return micros(f.backlog) },
		},
	} {
		fmt.Fprintf(t, "| %s |", row.name)
		for _, f := range b.fleets {
			fmt.Fprintf(t, " "+row.format+" |", row.of(f))
		}
		last := b.fleets[n-3:]
		expected := predicted(float64(last[0].n), row.of(last[0]), float64(last[1].n), row.of(last[1]), float64(last[2].n))
		fmt.Fprintf(t, " "+row.format+" | %s |\n", expected, off(expected, row.of(last[2])))
	}
	t.WriteString("| executions a second, clients on the same processors |")
	for _, f := range b.fleets {
		fmt.Fprintf(t, " %.0f |", f.backlogRate)
	}
	t.WriteString(" | |\n")
	if again := b.again.Load(); again > 0 {
		fmt.Fprintf(t, "\nStarts that were made again, as they had met a lock for too long: %d.\n", again)
	}
}

func (b *scalingBench) printReads(t *strings.Builder) {
	micros := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
	now := b.fleets[0]
	t.WriteString("\n| µs of the server's connections | at a tenth of the rows | at all of them | ratio |\n")
	t.WriteString("|---|---|---|---|\n")
	row := func(name string, small, large float64) {
		fmt.Fprintf(t, "| %s | %.0f | %.0f | %.2f |\n", name, small, large, large/max(small, 1))
	}
	row("one process, idle, each second", 1e6*b.early.idle, 1e6*now.idle)
	row("an execution of one step, paced", micros(b.early.paced), micros(now.paced))
	row("an execution of one step, with a backlog", micros(b.early.backlog), micros(now.backlog))
	row("an event, until the execution that waited has ended", micros(b.events[0]), micros(b.events[1]))
	for _, p := range b.pages {
		row("a visit to `"+p.path+"`", micros(p.each[0]), micros(p.each[1]))
	}
	if len(b.watches) == 0 {
		return
	}
	t.WriteString("\n| open overviews | transactions a second | PostgreSQL, % of a core |" +
		" this process, both ends, % of a core |\n|---|---|---|---|\n")
	for _, l := range b.watches {
		fmt.Fprintf(t, "| %d | %.1f | %.1f | %.1f |\n", l.viewers, l.perSec, 100*l.server, 100*l.own)
	}
}
