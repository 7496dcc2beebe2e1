// Command bench measures figures that users notice, and the least possible cost (the floor) of each figure in the same
// run.
//
//	go run ./bench chat-priority
//	go run ./bench waiting
//	go run ./bench engine-room
//	go run ./bench lanes
//	go run ./bench idle
//	go run ./bench story
//	go run ./bench why
//	go run ./bench executions
//	go run ./bench turn
//	go run ./bench scaling
//
// Every benchmark starts its own durable PostgreSQL in a temporary folder. It runs the product's packages against that
// server in this process. All figures of a table come from one run on one machine. So ratios carry over to other
// machines, but absolute figures do not. Results go to stdout as a Markdown table, progress to stderr. Benchmarks of
// single operations are Go benchmarks next to the code (`make bench` runs both).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/heap"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
)

func main() {
	pgserver.GuardMain()
	heap.SetMinimumHeap()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

var benchmarks = map[string]func(ctx context.Context, args []string, out, stderr io.Writer) error{
	"chat-priority": chatPriority,
	"waiting":       waiting,
	"engine-room":   engineRoom,
	"lanes":         lanesBench,
	"idle":          idle,
	"story":         story,
	"why":           whyBenchmark,
	"turn":          turn,
	"executions":    executionsBench,
	"scaling":       scaling,
}

func run(ctx context.Context, args []string, out, stderr io.Writer) error {
	if len(args) > 0 {
		if benchmark, ok := benchmarks[args[0]]; ok {
			return benchmark(ctx, args[1:], out, stderr)
		}
	}
	return fmt.Errorf("specify a benchmark: %s", strings.Join(slices.Sorted(maps.Keys(benchmarks)), ", "))
}

func newFlags(name string, stderr io.Writer) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	return flags
}

type samples []time.Duration

// quantile returns 0 for no samples.
func (s samples) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(float64(len(sorted))*q), len(sorted)-1)]
}

// millis formats milliseconds for a table.
func (s samples) millis(q float64) string {
	return fmt.Sprintf("%.1f", float64(s.quantile(q).Microseconds())/1000)
}

// print writes the table. Ratios are against the shipped variant.
func (b *chatBench) print(out io.Writer, variants []variant, results []variantResult, idle, loaded samples) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d background runs at any time (%d model calls of %s each), %d workers, a visitor every %s for %s; "+
		"%d processors.\n",
		b.background, backgroundCalls, b.modelLatency, b.workers, b.interval, b.duration, runtime.NumCPU())
	t.WriteString("Milliseconds from the visitor's request.\n\n")
	t.WriteString("| | visitors | run started p50 | p99 | first model call p50 | p99 | × shipped p50 | p99 | background " +
		"runs/s |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	shipped := results[1].model
	for i, r := range results {
		fmt.Fprintf(&t, "| %s | %d | %s | %s | %s | %s | %.1f | %.1f | %.1f |\n", variants[i].name, len(r.model),
			r.started.millis(0.5), r.started.millis(0.99),
			r.model.millis(0.5), r.model.millis(0.99), ratio(r.model, shipped, 0.5), ratio(r.model, shipped, 0.99),
			float64(r.background)/b.duration.Seconds())
	}
	for _, f := range []struct {
		name string
		s    samples
	}{{"floor: one-row UPDATE by pgx, idle", idle}, {"floor, under the load of the second row", loaded}} {
		fmt.Fprintf(&t, "| %s | %d | %s | %s | | | | | |\n", f.name, len(f.s), millis(f.s.quantile(0.5)),
			millis(f.s.quantile(0.99)))
	}
	fmt.Fprintf(&t, "\nFirst text at the client, as shipped: p50 %s ms, p99 %s ms, of which the model takes %s.\n",
		results[1].text.millis(0.5), results[1].text.millis(0.99), b.modelLatency)
	fmt.Fprint(out, t.String())
}

// millis formats milliseconds for a table.
func millis(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()*1000) }

func ratio(a, b samples, q float64) float64 {
	if b.quantile(q) == 0 {
		return 0
	}
	return float64(a.quantile(q)) / float64(b.quantile(q))
}

func (b *waitBench) print(out io.Writer, r waitResult) {
	var t strings.Builder
	fmt.Fprintf(&t, "%d executions wait for events; %d workers; %d processors.\n\n", b.n+2*b.events,
		r.workers, runtime.NumCPU())
	t.WriteString("| ms from event to handling | events | p50 | p99 | × floor p50 | p99 |\n|---|---|---|---|---|---|\n")
	for i, callers := range waitCallers {
		for _, row := range []struct {
			name string
			s    samples
		}{{"floor: insert and NOTIFY → consumed", r.floors[i]}, {"Deliver → the function resumes", r.deliveries[i]}} {
			fmt.Fprintf(&t, "| %s, callers: %d | %d | %s | %s | %.2f | %.2f |\n", row.name, callers, len(row.s),
				millis(row.s.quantile(0.5)), millis(row.s.quantile(0.99)),
				ratio(row.s, r.floors[i], 0.5), ratio(row.s, r.floors[i], 0.99))
		}
	}
	per := func(n int, d time.Duration) string {
		return fmt.Sprintf("%.2f s (%.0f/s)", d.Seconds(), float64(n)/d.Seconds())
	}
	fmt.Fprintf(&t, "\n| %d executions | |\n|---|---|\n", b.n)
	fmt.Fprintf(&t, "| floor: as many events, %d callers | %s |\n", manyCallers, per(b.n, r.floorAll))
	fmt.Fprintf(&t, "| start until all wait (%d) | %s |\n", b.n+2*b.events, per(b.n+2*b.events, r.start))
	fmt.Fprintf(&t, "| growth of the process | heap %.1f MB, resident %.1f MB; %d goroutines |\n", float64(r.heap)/1e6,
		float64(r.resident)/1e6, r.goroutines)
	fmt.Fprintf(&t, "| wake all by events, %d callers | %s; ended %s; × floor %.2f |\n", manyCallers, per(b.n, r.events),
		per(b.n, r.eventsEnd), r.events.Seconds()/r.floorAll.Seconds())
	fmt.Fprintf(&t, "| wake all by timers | %s; ended %s |\n", per(b.n, r.timers), per(b.n, r.timersEnd))
	t.WriteString("\n| processor time of each | |\n|---|---|\n")
	for _, row := range []struct {
		name    string
		part, n int
	}{
		{"floor: event", 1, 2*b.events + b.n},
		{"start until it waits", 2, b.n + 2*b.events},
		{"event, one caller, to its end", 3, b.events},
		{"event, several callers, to its end", 4, b.events},
		{"woken with all by events, to its end", 5, b.n},
		{"woken with all by timers, start to end", 6, b.n},
	} {
		fmt.Fprintf(&t, "| %s | %s |\n", row.name, r.cpu[row.part].per(row.n))
	}
	fmt.Fprint(out, t.String())
}

// tick is the unit of times in /proc, on every Linux that Go supports.
const tick = 10 * time.Millisecond

// cpuTime is the processor time of the server and of this process. Other load on the machine affects it less than
// elapsed time.
type cpuTime struct{ server, own time.Duration }

// usedCPU returns 0 on systems without /proc.
func usedCPU(ctx context.Context, pool *pgxpool.Pool) (cpuTime, error) {
	var pid int
	if err := pool.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
		return cpuTime{}, fmt.Errorf("query the server's processes: %w", err)
	}
	backend, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cpuTime{}, nil
	}
	var total cpuTime
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return cpuTime{}, fmt.Errorf("list processes: %w", err)
	}
	for _, path := range stats {
		p, ok := procStat(filepath.Base(filepath.Dir(path)))
		switch {
		case !ok: // the process has ended
		case p.parent == backend.parent:
			total.server += p.cpu
		case p.pid == backend.parent:
			total.server += p.childrenCPU
		case p.pid == strconv.Itoa(os.Getpid()):
			total.own = p.cpu
		}
	}
	return total, nil
}

// measureCPU returns the processor time of fn.
func measureCPU(ctx context.Context, pool *pgxpool.Pool, fn func() error) (cpuTime, error) {
	before, err := usedCPU(ctx, pool)
	if err != nil {
		return cpuTime{}, err
	}
	if err := fn(); err != nil {
		return cpuTime{}, err
	}
	after, err := usedCPU(ctx, pool)
	return after.minus(before), err
}

func (t cpuTime) minus(u cpuTime) cpuTime { return cpuTime{t.server - u.server, t.own - u.own} }

func (t cpuTime) per(n int) string {
	return fmt.Sprintf("%d µs server, %d µs own", (t.server / time.Duration(n)).Microseconds(),
		(t.own / time.Duration(n)).Microseconds())
}

type process struct {
	pid, parent      string
	cpu, childrenCPU time.Duration // its own processor time, and that of its ended children
}

// procStat reads /proc/PID/stat. It returns false if there is none.
func procStat(pid string) (process, bool) {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return process{}, false
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name, which may hold any text
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return process{}, false
	}
	ticks := func(from int) (sum time.Duration) {
		for _, field := range fields[from : from+2] {
			n, err := strconv.ParseInt(field, 10, 64)
			if err == nil {
				sum += time.Duration(n) * tick
			}
		}
		return sum
	}
	return process{pid: pid, parent: fields[1], cpu: ticks(11), childrenCPU: ticks(13)}, true
}

// resident returns the resident memory of a process in bytes, 0 on systems without /proc.
func resident(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
