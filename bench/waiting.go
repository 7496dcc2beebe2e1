package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	waitFlow    = "bench_wait"  // waits for an event, then completes
	delayFlow   = "bench_delay" // waits for a duration, then completes
	manyCallers = 32            // callers of the concurrent rows
	warmup      = 200           // executions before the first measurement
	timerDelay  = 30 * time.Minute
)

var waitCallers = [2]int{1, manyCallers}

// waitBench measures executions that wait.
type waitBench struct {
	*testAgent

	n, events int
	stderr    io.Writer

	mu           sync.Mutex
	resumed      map[string]chan time.Time // by event
	resumedCount atomic.Int64
	next         atomic.Int64
}

type waitResult struct {
	start               time.Duration // until all executions waited
	heap, resident      int64         // growth in bytes
	floors, deliveries  [2]samples    // by waitCallers
	events, eventsEnd   time.Duration // until all had resumed, and until all had completed
	timers, timersEnd   time.Duration
	floorAll            time.Duration // for as many events of the floor, by manyCallers
	cpu                 [7]cpuTime    // of each part of the measurement, in its order
	goroutines, workers int
}

// waiting measures the cost of waiting executions, and the time until they resume.
func waiting(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := &waitBench{stderr: stderr, resumed: map[string]chan time.Time{}}
	var workers int
	flags := newFlags("waiting", stderr)
	flags.IntVar(&b.n, "n", 10000, "waiting executions")
	flags.IntVar(&b.events, "events", 2000, "events sent by each number of callers")
	flags.IntVar(&workers, "workers", 10, "workers, as AGENT_WORKERS")
	if err := flags.Parse(args); err != nil {
		return err
	}
	flows := map[string]executions.Func{waitFlow: b.wait, delayFlow: b.delay}
	idle := &modelServer{onCall: func(string, time.Time) {}}
	return withTestAgent(ctx, workers, idle, flows, stderr, func(ctx context.Context, w *testAgent) error {
		b.testAgent = w
		r, err := b.measure(ctx)
		if err != nil {
			return err
		}
		r.workers = workers
		b.print(out, r)
		return nil
	})
}

// wait is a flow that waits for the event in its input.
func (b *waitBench) wait(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var key string
	if err := json.Unmarshal(input, &key); err != nil {
		return executions.Result{}, err
	}
	if _, err := executions.Wait(ctx, "go", executions.Event(key, 0)); err != nil {
		return executions.Result{}, err
	}
	b.notifyResumed(key)
	return executions.Result{}, nil
}

// delay is a flow that waits for time to pass.
func (b *waitBench) delay(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	if _, err := executions.Wait(ctx, "go", executions.Delay(timerDelay)); err != nil {
		return executions.Result{}, err
	}
	b.resumedCount.Add(1)
	return executions.Result{}, nil
}

// notifyResumed notifies the caller that delivered the event.
func (b *waitBench) notifyResumed(key string) {
	resumedAt := time.Now()
	b.resumedCount.Add(1)
	b.mu.Lock()
	waiter := b.resumed[key]
	delete(b.resumed, key)
	b.mu.Unlock()
	if waiter != nil {
		waiter <- resumedAt
	}
}

func (b *waitBench) measure(ctx context.Context) (r waitResult, err error) {
	f := &eventFloor{pool: b.pool}
	if err := f.start(ctx); err != nil {
		return r, err
	}
	defer f.stop()
	steps := []struct {
		name string
		do   func() error
	}{
		{"warm up", func() error { return b.warmUp(ctx, f) }},
		{"floor", func() error { return f.measure(ctx, b.events, b.n, &r) }},
		{"start waiting", func() error { return b.measureMemory(ctx, &r) }},
		{"events, one caller", func() error { return b.measureDelivery(ctx, 0, &r) }},
		{"events, several callers", func() error { return b.measureDelivery(ctx, 1, &r) }},
		{"wake all by events", func() (err error) { r.events, r.eventsEnd, err = b.wakeAllByEvents(ctx); return err }},
		{"wake all by timers", func() (err error) { r.timers, r.timersEnd, err = b.wakeAllByTimers(ctx); return err }},
	}
	for i, s := range steps {
		began := time.Now()
		if r.cpu[i], err = measureCPU(ctx, b.pool, s.do); err != nil {
			return r, fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(b.stderr, "%s: %s\n", s.name, time.Since(began).Round(time.Millisecond))
	}
	return r, nil
}

// warmUp runs every part once, so its memory does not count as the cost of waiting.
func (b *waitBench) warmUp(ctx context.Context, f *eventFloor) error {
	keys, err := b.startWaiting(ctx, warmup)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if _, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", key, nil, ""); err != nil {
			return err
		}
	}
	if _, err := f.run(ctx, manyCallers, warmup); err != nil {
		return err
	}
	return pollQuery(ctx, b.pool, allFinished)
}

// measureMemory starts the executions and measures the growth of the process until all wait.
func (b *waitBench) measureMemory(ctx context.Context, r *waitResult) error {
	heap, resident := memoryInUse()
	began := time.Now()
	if _, err := b.startWaiting(ctx, b.n+2*b.events); err != nil {
		return err
	}
	r.start = time.Since(began)
	grownHeap, grown := memoryInUse()
	r.heap, r.resident, r.goroutines = grownHeap-heap, grown-resident, runtime.NumGoroutine()
	return nil
}

// startWaiting starts executions and returns their events when all wait.
func (b *waitBench) startWaiting(ctx context.Context, n int) ([]string, error) {
	keys := make([]string, n)
	first := b.next.Add(int64(n)) - int64(n)
	err := callAll(ctx, manyCallers, n, func(ctx context.Context, i int) error {
		keys[i] = strconv.FormatInt(first+int64(i), 10)
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: waitFlow, Surface: trace.Flow, Input: keys[i]})
		return err
	})
	if err != nil {
		return nil, err
	}
	return keys, pollQuery(ctx, b.pool, nothingRuns)
}

// measureDelivery measures the time from Deliver until the function resumes, by waitCallers[row] callers.
func (b *waitBench) measureDelivery(ctx context.Context, row int, r *waitResult) error {
	keys, err := b.waitingKeys(ctx, b.events)
	if err != nil {
		return err
	}
	latencies := make(samples, len(keys))
	r.deliveries[row] = latencies
	return callAll(ctx, waitCallers[row], len(keys), func(ctx context.Context, i int) error {
		resumed := make(chan time.Time, 1)
		b.mu.Lock()
		b.resumed[keys[i]] = resumed
		b.mu.Unlock()
		began := time.Now()
		if _, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", keys[i], nil, ""); err != nil {
			return err
		}
		select {
		case resumedAt := <-resumed:
			latencies[i] = resumedAt.Sub(began)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

func (b *waitBench) waitingKeys(ctx context.Context, n int) (keys []string, err error) {
	err = b.pool.QueryRow(ctx, `
		select array(select waiting_key from agent_executions where status = 'waiting' and waiting_for = 'event'
		  order by id limit @n)`,
		postgres.Strict{"n": n}).Scan(&keys)
	return keys, err
}

func (b *waitBench) wakeAllByEvents(ctx context.Context) (resumed, ended time.Duration, err error) {
	keys, err := b.waitingKeys(ctx, b.n)
	if err != nil {
		return 0, 0, err
	}
	b.resumedCount.Store(0)
	began := time.Now()
	err = callAll(ctx, manyCallers, len(keys), func(ctx context.Context, i int) error {
		_, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", keys[i], nil, "")
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	return b.waitResumed(ctx, began, len(keys))
}

// wakeAllByTimers makes the timers of n executions due at once.
func (b *waitBench) wakeAllByTimers(ctx context.Context) (resumed, ended time.Duration, err error) {
	err = callAll(ctx, manyCallers, b.n, func(ctx context.Context, _ int) error {
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: delayFlow, Surface: trace.Flow})
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	if err := pollQuery(ctx, b.pool, nothingRuns); err != nil {
		return 0, 0, err
	}
	b.resumedCount.Store(0)
	if _, err := b.pool.Exec(ctx, `vacuum agent_executions`); err != nil { // autovacuum would have run by then
		return 0, 0, err
	}
	if _, err := b.pool.Exec(ctx,
		`update agent_executions set waiting_until = clock_timestamp() where status = 'waiting'`); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := b.engine.Sweep(ctx); err != nil {
		return 0, 0, err
	}
	return b.waitResumed(ctx, began, b.n)
}

// waitResumed waits until n executions have resumed, then until they have completed.
func (b *waitBench) waitResumed(ctx context.Context, began time.Time, n int) (resumed, ended time.Duration, err error) {
	if err := poll(ctx, time.Millisecond,
		func() (bool, error) { return b.resumedCount.Load() >= int64(n), nil }); err != nil {
		return 0, 0, err
	}
	resumed = time.Since(began)
	err = pollQuery(ctx, b.pool, allFinished)
	return resumed, time.Since(began), err
}

// eventFloor is the floor of a durable event: INSERT + NOTIFY, then UPDATE.
type eventFloor struct {
	pool *pgxpool.Pool

	mu      sync.Mutex
	waiters map[string]chan time.Time
	next    int
	failed  context.Context // ends with the listener or the first failed update
	stop    func()
}

// start creates the table and opens its own listening connection.
func (f *eventFloor) start(ctx context.Context) error {
	if _, err := f.pool.Exec(ctx,
		`create table bench_events (key text primary key, consumed_at timestamptz)`); err != nil {
		return err
	}
	conn, err := postgres.Dialer(f.pool)(ctx)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `listen bench_events`); err != nil {
		return errors.Join(err, conn.Close(ctx))
	}
	f.waiters = map[string]chan time.Time{}
	listening, stop := context.WithCancelCause(ctx)
	f.failed = listening
	notifications := make(chan string, manyCallers)
	var wg sync.WaitGroup
	for range manyCallers {
		wg.Go(func() {
			for key := range notifications {
				if err := f.consume(listening, key); err != nil {
					stop(fmt.Errorf("consume event %s: %w", key, err))
				}
			}
		})
	}
	wg.Go(func() { stop(forward(listening, conn, notifications)) })
	f.stop = func() {
		stop(nil)
		wg.Wait()
	}
	return nil
}

// forward passes on notifications until ctx ends or the connection fails.
func forward(ctx context.Context, conn *pgx.Conn, notifications chan<- string) error {
	defer close(notifications)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return fmt.Errorf("wait for notifications: %w", err)
		}
		notifications <- n.Payload
	}
}

// consume marks a row as consumed and wakes its sender.
func (f *eventFloor) consume(ctx context.Context, key string) error {
	_, err := f.pool.Exec(ctx, `update bench_events set consumed_at = clock_timestamp() where key = @key`,
		postgres.Strict{"key": key})
	if err != nil {
		return err
	}
	consumedAt := time.Now()
	f.mu.Lock()
	waiter := f.waiters[key]
	delete(f.waiters, key)
	f.mu.Unlock()
	if waiter != nil {
		waiter <- consumedAt
	}
	return nil
}

// run sends n events. Each caller waits until the listener has consumed its event.
func (f *eventFloor) run(ctx context.Context, callers, n int) (samples, error) {
	first := f.next
	f.next += n
	latencies := make(samples, n)
	err := callAll(ctx, callers, n, func(ctx context.Context, i int) error {
		key, consumed := strconv.Itoa(first+i), make(chan time.Time, 1)
		f.mu.Lock()
		f.waiters[key] = consumed
		f.mu.Unlock()
		began := time.Now()
		_, err := f.pool.Exec(ctx, `
			with v as (insert into bench_events (key) values (@key) returning key) select pg_notify('bench_events', key) from v`,
			postgres.Strict{"key": key})
		if err != nil {
			return err
		}
		select {
		case consumedAt := <-consumed:
			latencies[i] = consumedAt.Sub(began)
			return nil
		case <-f.failed.Done():
			return context.Cause(f.failed)
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return latencies, err
}

// measure sends single events, then events from many callers, then as many events as resume at once.
func (f *eventFloor) measure(ctx context.Context, events, all int, r *waitResult) (err error) {
	for i, callers := range waitCallers {
		if r.floors[i], err = f.run(ctx, callers, events); err != nil {
			return err
		}
	}
	began := time.Now()
	_, err = f.run(ctx, manyCallers, all)
	r.floorAll = time.Since(began)
	return err
}

// memoryInUse returns the heap and the resident size after a garbage collection.
func memoryInUse() (heap, residentBytes int64) {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse), resident(os.Getpid())
}
