// Command bench measures what a person would notice, each figure beside the raw floor of the same run.
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
// Every benchmark starts a PostgreSQL of its own, durable as that of `agent dev`, in a temporary folder that is
// removed at the end, and runs the product's own packages against it in this process. What is compared is measured in
// one run on one machine, one after the other; absolute figures are the machine's, ratios carry over. Results go to
// stdout as a Markdown table, progress to stderr. Benchmarks of single operations are Go benchmarks beside the code
// (`make bench` runs both).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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

// run is the program.
func run(ctx context.Context, args []string, out, errw io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "chat-priority":
			return chatPriority(ctx, args[1:], out, errw)
		case "waiting":
			return waiting(ctx, args[1:], out, errw)
		case "engine-room":
			return engineRoom(ctx, args[1:], out, errw)
		case "lanes":
			return lanesBench(ctx, args[1:], out, errw)
		case "idle":
			return idle(ctx, args[1:], out, errw)
		case "story":
			return story(ctx, args[1:], out, errw)
		case "why":
			return whyBenchmark(ctx, args[1:], out, errw)
		case "turn":
			return turn(ctx, args[1:], out, errw)
		case "executions":
			return engineSpeed(ctx, args[1:], out, errw)
		case "scaling":
			return scaling(ctx, args[1:], out, errw)
		}
	}
	return errors.New("name a benchmark: chat-priority, waiting, engine-room, lanes, executions, turn, idle, scaling, " +
		"story, why")
}

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

// print writes the tables.
func (b *waitBench) print(out io.Writer, r waitResult) {
	var t strings.Builder
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()*1000) }
	fmt.Fprintf(&t, "%d executions wait for events; %d workers; %d processors.\n\n", b.n+2*b.events, r.workers, runtime.NumCPU())
	t.WriteString("| ms from the event until it is handled | events | p50 | p99 | × floor p50 | p99 |\n|---|---|---|---|---|---|\n")
	for i, callers := range []int{1, atOnce} {
		for _, row := range []struct {
			name string
			s    samples
		}{{"floor: insert and NOTIFY → consumed", r.floors[i]}, {"Deliver → the function goes on", r.ours[i]}} {
			fmt.Fprintf(&t, "| %s, callers: %d | %d | %s | %s | %.2f | %.2f |\n", row.name, callers, len(row.s), ms(row.s.at(0.5)), ms(row.s.at(0.99)),
				ratio(row.s, r.floors[i], 0.5), ratio(row.s, r.floors[i], 0.99))
		}
	}
	per := func(n int, d time.Duration) string {
		return fmt.Sprintf("%.2f s (%.0f/s)", d.Seconds(), float64(n)/d.Seconds())
	}
	fmt.Fprintf(&t, "\n| %d executions | |\n|---|---|\n", b.n)
	fmt.Fprintf(&t, "| floor: as many events, %d callers | %s |\n", atOnce, per(b.n, r.floorAll))
	fmt.Fprintf(&t, "| start until all wait (%d) | %s |\n", b.n+2*b.events, per(b.n+2*b.events, r.start))
	fmt.Fprintf(&t, "| process memory grows by | heap %.1f MB, resident %.1f MB; %d goroutines |\n", float64(r.heap)/1e6, float64(r.resident)/1e6, r.goroutines)
	fmt.Fprintf(&t, "| wake all by events, %d callers | %s; ended %s; × floor %.2f |\n", atOnce, per(b.n, r.events), per(b.n, r.eventsEnd), r.events.Seconds()/r.floorAll.Seconds())
	fmt.Fprintf(&t, "| wake all by timers | %s; ended %s |\n", per(b.n, r.timers), per(b.n, r.timersEnd))
	t.WriteString("\n| processor time for each | |\n|---|---|\n")
	for _, row := range []struct {
		name    string
		part, n int
	}{
		{"floor: event", 1, 2*b.events + b.n},
		{"start, until it waits", 2, b.n + 2*b.events},
		{"event, one caller, to its end", 3, b.events},
		{"event, several callers, to its end", 4, b.events},
		{"of all woken by events, to its end", 5, b.n},
		{"of all woken by timers, from its start to its end", 6, b.n},
	} {
		fmt.Fprintf(&t, "| %s | %s |\n", row.name, r.cpu[row.part].per(row.n))
	}
	fmt.Fprint(out, t.String())
}

// tick is the unit of times in /proc, which is the same on every Linux that Go supports.
const tick = 10 * time.Millisecond

// cpuTime is the processor time that was used so far, by the server and by this process. It says more than the time
// on the clock where others use the machine as well.
type cpuTime struct{ server, own time.Duration }

// cpu reads it; zero where the system does not say.
func cpu(ctx context.Context, pool *pgxpool.Pool) (cpuTime, error) {
	var pid int
	if err := pool.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
		return cpuTime{}, fmt.Errorf("ask for the server's processes: %w", err)
	}
	backend, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cpuTime{}, nil
	}
	var used cpuTime
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return cpuTime{}, fmt.Errorf("list processes: %w", err)
	}
	for _, path := range stats {
		p, ok := procStat(filepath.Base(filepath.Dir(path)))
		switch {
		case !ok: // it has ended
		case p.parent == backend.parent:
			used.server += p.used
		case p.pid == backend.parent:
			used.server += p.children
		case p.pid == strconv.Itoa(os.Getpid()):
			used.own = p.used
		}
	}
	return used, nil
}

func (t cpuTime) minus(u cpuTime) cpuTime { return cpuTime{t.server - u.server, t.own - u.own} }

// per says how much it is for each of n.
func (t cpuTime) per(n int) string {
	return fmt.Sprintf("%d µs server, %d µs own", (t.server / time.Duration(n)).Microseconds(), (t.own / time.Duration(n)).Microseconds())
}

type proc struct {
	pid, parent    string
	used, children time.Duration // its own time, and that of children that have ended
}

// procStat reads /proc/PID/stat; false when there is none.
func procStat(pid string) (proc, bool) {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return proc{}, false
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name, which may hold anything
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return proc{}, false
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
	return proc{pid: pid, parent: fields[1], used: ticks(11), children: ticks(13)}, true
}
