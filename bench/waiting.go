package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	waitFlow   = "bench_wait"  // waits for an event, then ends
	delayFlow  = "bench_delay" // waits for a time, then ends
	atOnce     = 32            // callers of the concurrent rows
	warmup     = 200           // executions before anything is counted
	manyAtOnce = 30 * time.Minute
)

// waitBench is the benchmark of executions that wait.
type waitBench struct {
	*world

	n, events int
	errw      io.Writer

	mu      sync.Mutex
	resumed map[string]chan time.Time // who wants to know when an event's execution goes on
	wakes   atomic.Int64
	next    atomic.Int64
}

// waitResult is what was measured.
type waitResult struct {
	start               time.Duration // until all waited
	heap, resident      int64         // growth in bytes
	floors, ours        [2]samples    // by one caller and by several
	events, eventsEnd   time.Duration // until all had resumed, and until all had ended
	timers, timersEnd   time.Duration
	floorAll            time.Duration // as many rows through the floor, by several callers
	cpu                 [7]cpuTime    // of each part of the measurement, in its order
	goroutines, workers int
}

// waiting measures what executions that wait cost, and how soon they go on.
func waiting(ctx context.Context, args []string, out, errw io.Writer) error {
	b := &waitBench{errw: errw, resumed: map[string]chan time.Time{}}
	var workers int
	flags := flag.NewFlagSet("waiting", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.IntVar(&b.n, "n", 10000, "executions that wait")
	flags.IntVar(&b.events, "events", 2000, "events that are measured one by one")
	flags.IntVar(&workers, "workers", 10, "workers, as AGENT_WORKERS")
	if err := flags.Parse(args); err != nil {
		return err
	}
	flows := map[string]executions.Func{waitFlow: b.wait, delayFlow: b.delay}
	idle := &model{asked: func(string, time.Time) {}}
	return withWorld(ctx, workers, idle, flows, errw, func(ctx context.Context, w *world) error {
		b.world = w
		r, err := b.measure(ctx)
		if err != nil {
			return err
		}
		r.workers = workers
		b.print(out, r)
		return nil
	})
}

// wait is a flow that waits for the event that its input names.
func (b *waitBench) wait(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var key string
	if err := json.Unmarshal(input, &key); err != nil {
		return executions.Result{}, err
	}
	if _, err := executions.Wait(ctx, "go", executions.Event(key, 0)); err != nil {
		return executions.Result{}, err
	}
	b.note(key)
	return executions.Result{}, nil
}

// delay is a flow that waits for time to pass.
func (b *waitBench) delay(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	if _, err := executions.Wait(ctx, "go", executions.Delay(manyAtOnce)); err != nil {
		return executions.Result{}, err
	}
	b.wakes.Add(1)
	return executions.Result{}, nil
}

// note tells whoever delivered the event that its execution has gone on.
func (b *waitBench) note(key string) {
	at := time.Now()
	b.wakes.Add(1)
	b.mu.Lock()
	told := b.resumed[key]
	delete(b.resumed, key)
	b.mu.Unlock()
	if told != nil {
		told <- at
	}
}

// measure takes one figure after the other.
func (b *waitBench) measure(ctx context.Context) (r waitResult, err error) {
	f := &floor{pool: b.pool}
	if err := f.begin(ctx); err != nil {
		return r, err
	}
	defer f.end()
	steps := []struct {
		name string
		do   func() error
	}{
		{"warm up", func() error { return b.warm(ctx, f) }},
		{"floor", func() error { return f.measure(ctx, b.events, b.n, &r) }},
		{"begin waiting", func() error { return b.memory(ctx, &r) }},
		{"events, one caller", func() (err error) { r.ours[0], err = b.deliver(ctx, 1); return err }},
		{"events, several callers", func() (err error) { r.ours[1], err = b.deliver(ctx, atOnce); return err }},
		{"wake all by events", func() (err error) { r.events, r.eventsEnd, err = b.wakeAll(ctx); return err }},
		{"wake all by timers", func() (err error) { r.timers, r.timersEnd, err = b.ringAll(ctx); return err }},
	}
	for i, s := range steps {
		began := time.Now()
		before, err := cpu(ctx, b.pool)
		if err != nil {
			return r, err
		}
		if err := s.do(); err != nil {
			return r, fmt.Errorf("%s: %w", s.name, err)
		}
		after, err := cpu(ctx, b.pool)
		if err != nil {
			return r, err
		}
		r.cpu[i] = after.minus(before)
		fmt.Fprintf(b.errw, "%s: %s\n", s.name, time.Since(began).Round(time.Millisecond))
	}
	return r, nil
}

// warm lets every part work once, so that what it keeps is not counted as the cost of waiting.
func (b *waitBench) warm(ctx context.Context, f *floor) error {
	keys, err := b.begin(ctx, warmup)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if _, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", key, nil, ""); err != nil {
			return err
		}
	}
	if _, err := f.run(ctx, atOnce, warmup); err != nil {
		return err
	}
	return b.until(ctx, `select count(*) = 0 from agent_executions where status in ('pending', 'running', 'waiting')`)
}

// memory begins the executions and measures by how much the process has grown when all wait.
func (b *waitBench) memory(ctx context.Context, r *waitResult) error {
	heap, resident := used()
	began := time.Now()
	if _, err := b.begin(ctx, b.n+2*b.events); err != nil {
		return err
	}
	r.start = time.Since(began)
	grownHeap, grown := used()
	r.heap, r.resident, r.goroutines = grownHeap-heap, grown-resident, runtime.NumGoroutine()
	return nil
}

// begin starts executions by several callers and returns their events when all wait.
func (b *waitBench) begin(ctx context.Context, n int) ([]string, error) {
	keys := make([]string, n)
	first := b.next.Add(int64(n)) - int64(n)
	err := spread(ctx, atOnce, n, func(ctx context.Context, i int) error {
		keys[i] = strconv.FormatInt(first+int64(i), 10)
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: waitFlow, Surface: trace.Flow, Input: keys[i]})
		return err
	})
	if err != nil {
		return nil, err
	}
	return keys, b.until(ctx, `select count(*) = 0 from agent_executions where status in ('pending', 'running')`)
}

// deliver takes some of those that wait and measures, for each, the time from the call that delivers its event until
// its function goes on.
func (b *waitBench) deliver(ctx context.Context, callers int) (samples, error) {
	keys, err := b.waitingKeys(ctx, b.events)
	if err != nil {
		return nil, err
	}
	took := make(samples, len(keys))
	err = spread(ctx, callers, len(keys), func(ctx context.Context, i int) error {
		told := make(chan time.Time, 1)
		b.mu.Lock()
		b.resumed[keys[i]] = told
		b.mu.Unlock()
		began := time.Now()
		if _, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", keys[i], nil, ""); err != nil {
			return err
		}
		select {
		case at := <-told:
			took[i] = at.Sub(began)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return took, err
}

func (b *waitBench) waitingKeys(ctx context.Context, n int) (keys []string, err error) {
	err = b.pool.QueryRow(ctx, `
		select array(select waiting_key from agent_executions where status = 'waiting' and waiting_for = 'event' order by id limit @n)`,
		postgres.Strict{"n": n}).Scan(&keys)
	return keys, err
}

// wakeAll delivers the events of all that wait.
func (b *waitBench) wakeAll(ctx context.Context) (resumed, ended time.Duration, err error) {
	keys, err := b.waitingKeys(ctx, b.n)
	if err != nil {
		return 0, 0, err
	}
	b.wakes.Store(0)
	began := time.Now()
	err = spread(ctx, atOnce, len(keys), func(ctx context.Context, i int) error {
		_, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", keys[i], nil, "")
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	return b.awake(ctx, began, len(keys))
}

// ringAll lets the timers of as many executions become due at once.
func (b *waitBench) ringAll(ctx context.Context) (resumed, ended time.Duration, err error) {
	err = spread(ctx, atOnce, b.n, func(ctx context.Context, _ int) error {
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: delayFlow, Surface: trace.Flow})
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	if err := b.until(ctx, `select count(*) = 0 from agent_executions where status in ('pending', 'running')`); err != nil {
		return 0, 0, err
	}
	b.wakes.Store(0)
	if _, err := b.pool.Exec(ctx, `vacuum agent_executions`); err != nil { // as autovacuum would have, by then
		return 0, 0, err
	}
	if _, err := b.pool.Exec(ctx, `update agent_executions set waiting_until = clock_timestamp() where status = 'waiting'`); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := b.engine.Sweep(ctx); err != nil {
		return 0, 0, err
	}
	return b.awake(ctx, began, b.n)
}

// awake waits until n executions have gone on, and until they have ended.
func (b *waitBench) awake(ctx context.Context, began time.Time, n int) (resumed, ended time.Duration, err error) {
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for b.wakes.Load() < int64(n) {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return 0, 0, ctx.Err()
		}
	}
	resumed = time.Since(began)
	err = b.until(ctx, `select count(*) = 0 from agent_executions where status in ('pending', 'running', 'waiting')`)
	return resumed, time.Since(began), err
}

// until asks the database again and again.
func (b *waitBench) until(ctx context.Context, question string) error {
	return untilTrue(ctx, b.pool, question)
}

// untilTrue asks the database again and again.
func untilTrue(ctx context.Context, pool *pgxpool.Pool, question string) error {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		var yes bool
		if err := pool.QueryRow(ctx, question).Scan(&yes); err != nil || yes {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// spread calls fn for 0 to n-1 from so many callers.
func spread(ctx context.Context, callers, n int, fn func(ctx context.Context, i int) error) error {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range callers {
		group.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := fn(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

// used is the memory in use after a collection: the heap, and what the system counts as the process's (0 where it does
// not say).
func used() (heap, resident int64) {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	text, err := os.ReadFile("/proc/self/statm")
	if fields := strings.Fields(string(text)); err == nil && len(fields) > 1 {
		if pages, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
			resident = pages * int64(os.Getpagesize())
		}
	}
	return int64(m.HeapInuse), resident
}
