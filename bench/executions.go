package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// eventFloor is the minimum work for a durable event. One committed statement inserts a row and notifies; another marks
// the row as consumed.
type eventFloor struct {
	pool *pgxpool.Pool

	mu      sync.Mutex
	waiters map[string]chan time.Time
	next    int
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
	listening, stop := context.WithCancel(ctx)
	heard := make(chan string, manyCallers)
	var at sync.WaitGroup
	for range manyCallers {
		at.Go(func() {
			for key := range heard {
				f.consume(listening, key)
			}
		})
	}
	at.Go(func() { forward(listening, conn, heard) })
	f.stop = func() {
		stop()
		at.Wait()
	}
	return nil
}

// forward passes on notifications until ctx ends.
func forward(ctx context.Context, conn *pgx.Conn, heard chan<- string) {
	defer close(heard)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return // ctx has ended
		}
		heard <- n.Payload
	}
}

// consume marks a row and notifies its sender.
func (f *eventFloor) consume(ctx context.Context, key string) {
	_, err := f.pool.Exec(ctx, `update bench_events set consumed_at = clock_timestamp() where key = @key`,
		postgres.Strict{"key": key})
	if err != nil {
		return
	}
	at := time.Now()
	f.mu.Lock()
	waiter := f.waiters[key]
	delete(f.waiters, key)
	f.mu.Unlock()
	if waiter != nil {
		waiter <- at
	}
}

// run sends n events. Each caller waits until the listener has consumed its event.
func (f *eventFloor) run(ctx context.Context, callers, n int) (samples, error) {
	first := f.next
	f.next += n
	took := make(samples, n)
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
		case at := <-consumed:
			took[i] = at.Sub(began)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return took, err
}

// measure sends single events, then events from many callers, then as many events as resume at once.
func (f *eventFloor) measure(ctx context.Context, events, all int, r *waitResult) (err error) {
	if r.floors[0], err = f.run(ctx, 1, events); err != nil {
		return err
	}
	if r.floors[1], err = f.run(ctx, manyCallers, events); err != nil {
		return err
	}
	began := time.Now()
	_, err = f.run(ctx, manyCallers, all)
	r.floorAll = time.Since(began)
	return err
}

// The flows of the benchmark, by their number of steps.
const (
	oneStep  = "bench_one"
	tenSteps = "bench_ten"
)

// engineBench measures executions from start to end.
type engineBench struct {
	*testAgent

	rounds, queued, orphans int
	turnDuration            time.Duration
	errw                    io.Writer
}

// stepsOf returns a flow of n steps with small results.
func stepsOf(n int) executions.Func {
	return func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		sum := 0
		for i := range n {
			got, err := executions.Step(ctx, "step "+strconv.Itoa(i), func(context.Context) (int, error) { return i, nil })
			if err != nil {
				return executions.Result{}, err
			}
			sum += got
		}
		return executions.Result{Value: sum}, nil
	}
}

// executionsBench measures the executions that a process starts and finishes per second, against the floor.
func executionsBench(ctx context.Context, args []string, out, errw io.Writer) error {
	b := &engineBench{errw: errw}
	flags := newFlags("executions", errw)
	var workers int
	flags.IntVar(&b.rounds, "rounds", 5, "turns of the floor and of executions")
	flags.DurationVar(&b.turnDuration, "for", 2*time.Second, "how long a turn lasts")
	flags.IntVar(&b.queued, "queued", 5000, "executions through the queue")
	flags.IntVar(&b.orphans, "orphans", 1000, "executions of a lost worker")
	flags.IntVar(&workers, "workers", 64, "workers, as AGENT_WORKERS")
	if err := flags.Parse(args); err != nil {
		return err
	}
	flows := map[string]executions.Func{oneStep: stepsOf(1), tenSteps: stepsOf(10)}
	idle := &modelServer{onCall: func(string, time.Time) {}}
	return withTestAgent(ctx, workers, idle, flows, errw, func(ctx context.Context, w *testAgent) error {
		b.testAgent = w
		return b.run(ctx, out)
	})
}

// run measures and prints.
func (b *engineBench) run(ctx context.Context, out io.Writer) error {
	lanes := &laneBench{pool: b.pool, rounds: b.rounds, turnDuration: b.turnDuration, errw: b.errw}
	if err := createFloor(ctx, b.pool); err != nil {
		return err
	}
	floor := func(ctx context.Context, caller int) error { return updateFloor(ctx, b.pool, caller) }
	var t strings.Builder
	fmt.Fprintf(&t, "Executions started and finished in one process, each write awaited; medians of %d turns of %s; %d "+
		"processors.\n\n", b.rounds, b.turnDuration, runtime.NumCPU())
	t.WriteString("| executions | callers | floor, commits/s | executions/s | ratio | processor time, floor | each " +
		"execution |\n|---|---|---|---|---|---|---|\n")
	for _, flow := range []string{oneStep, tenSteps} {
		for _, callers := range laneCallers {
			fmt.Fprintf(b.errw, "%s, %d callers\n", flow, callers)
			r := pairRates{callers: callers}
			ours := func(ctx context.Context, _ int) error {
				x, err := b.engine.RunSync(ctx, executions.Spec{Flow: flow, Surface: trace.Flow})
				if err == nil && x.Status != executions.Completed {
					err = fmt.Errorf("execution %s is %s", x.ID, x.Status)
				}
				return err
			}
			if err := lanes.alternate(ctx, &r, floor, ours); err != nil {
				return err
			}
			fmt.Fprintf(&t, "| %s | %d | %.0f | %.0f | %.2f | %s | %s |\n", flow, callers, median(r.floor), median(r.ours),
				median(r.ours)/median(r.floor),
				r.cpu[0].per(max(r.n[0], 1)), r.cpu[1].per(max(r.n[1], 1)))
		}
	}
	if err := b.measureQueueAndRecovery(ctx, &t, floor); err != nil {
		return err
	}
	_, err := io.WriteString(out, t.String())
	return err
}

func (b *engineBench) measureQueueAndRecovery(
	ctx context.Context, t *strings.Builder, floor func(context.Context, int) error,
) error {
	const callers = 32
	_, rate, err := callFor(ctx, callers, b.turnDuration, floor)
	if err != nil {
		return err
	}
	fmt.Fprintln(b.errw, "through the queue")
	began := time.Now()
	err = callAll(ctx, callers, b.queued, func(ctx context.Context, _ int) error {
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
		return err
	})
	if err != nil {
		return err
	}
	if err := pollQuery(ctx, b.pool, allEnded); err != nil {
		return err
	}
	queued := float64(b.queued) / time.Since(began).Seconds()
	fmt.Fprintf(t, "| %s, %d through the queue | %d | %.0f | %.0f | %.2f | | |\n", oneStep, b.queued, callers,
		rate, queued, queued/rate)
	fmt.Fprintln(b.errw, "recovery")
	took, err := b.measureRecovery(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(t, "\n%d executions of a lost worker, each in its first step: from the sweep to the last end: %s.\n",
		b.orphans, took.Round(time.Millisecond))
	return nil
}

// measureRecovery inserts executions of a worker whose lease has ended and waits until this process has run them.
func (b *engineBench) measureRecovery(ctx context.Context) (time.Duration, error) {
	_, err := b.pool.Exec(ctx, `
		with w as (insert into agent_workers (name, expires_at) values ('lost', clock_timestamp() + interval '1 hour')
		  returning id)
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		select 'fl_01' || lpad(n::text, 24, '0'), 'flow', @flow, 'running', w.id, 1 from w, generate_series(1, @n::int) n`,
		postgres.Strict{"flow": oneStep, "n": b.orphans})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if _, err := b.pool.Exec(ctx,
		`update agent_workers set expires_at = clock_timestamp() where name = 'lost'`); err != nil {
		return 0, err
	}
	if err := b.engine.Sweep(ctx); err != nil {
		return 0, err
	}
	err = pollQuery(ctx, b.pool, allEnded)
	return time.Since(began), err
}
