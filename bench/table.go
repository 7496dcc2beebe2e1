package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"
)

// samples are measured times.
type samples []time.Duration

// at is a quantile; 0 of nothing.
func (s samples) at(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(float64(len(sorted))*q), len(sorted)-1)]
}

// show is a quantile for a table, in milliseconds.
func (s samples) show(q float64) string {
	return fmt.Sprintf("%.1f", float64(s.at(q).Microseconds())/1000)
}

// print writes the table. The ratios are against the way that is shipped.
func (b *chatBench) print(out io.Writer, ways []way, results []result, idle, loaded samples) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d background runs at any time (%d model calls of %s each), %d workers, a visitor every %s for %s; %d processors.\n",
		b.background, backgroundCalls, b.latency, b.workers, b.every, b.lasts, runtime.NumCPU())
	t.WriteString("Milliseconds from the visitor's request.\n\n")
	t.WriteString("| | visitors | run started p50 | p99 | first model call p50 | p99 | × shipped p50 | p99 | background runs/s |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	shipped := results[1].model
	for i, r := range results {
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %s | %.1f | %.1f | %.1f |\n", ways[i].name, len(r.model), r.started.show(0.5), r.started.show(0.99),
			r.model.show(0.5), r.model.show(0.99), ratio(r.model, shipped, 0.5), ratio(r.model, shipped, 0.99), float64(r.background)/b.lasts.Seconds())
	}
	for _, f := range []struct {
		name string
		s    samples
	}{{"floor: one-row UPDATE by pgx, idle", idle}, {"floor, under the load of the second row", loaded}} {
		fmt.Fprintf(&t, "| %s | %d | %s | %s | | | | | |\n", f.name, len(f.s), fmt.Sprintf("%.3f", f.s.at(0.5).Seconds()*1000), fmt.Sprintf("%.3f", f.s.at(0.99).Seconds()*1000))
	}
	fmt.Fprintf(&t, "\nFirst text at the client, as shipped: p50 %s ms, p99 %s ms, of which the model takes %s.\n",
		results[1].text.show(0.5), results[1].text.show(0.99), b.latency)
	fmt.Fprint(out, t.String())
}

func ratio(a, b samples, q float64) float64 {
	if b.at(q) == 0 {
		return 0
	}
	return float64(a.at(q)) / float64(b.at(q))
}
