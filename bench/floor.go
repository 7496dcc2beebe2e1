package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
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

// floor is the least that can be done to have a durable event handled: a row is inserted and announced with NOTIFY in
// one committed statement, and whoever hears of it marks it as consumed in another.
type floor struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	told map[string]chan time.Time
	next int
	stop func()
}

// begin makes the table and listens, on a connection of its own.
func (f *floor) begin(ctx context.Context) error {
	if _, err := f.pool.Exec(ctx, `create table bench_events (key text primary key, consumed_at timestamptz)`); err != nil {
		return err
	}
	conn, err := postgres.Dialer(f.pool)(ctx)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `listen bench_events`); err != nil {
		return errors.Join(err, conn.Close(ctx))
	}
	f.told = map[string]chan time.Time{}
	listening, stop := context.WithCancel(ctx)
	heard := make(chan string, atOnce)
	var at sync.WaitGroup
	for range atOnce {
		at.Go(func() {
			for key := range heard {
				f.consume(listening, key)
			}
		})
	}
	at.Go(func() { hear(listening, conn, heard) })
	f.stop = func() {
		stop()
		at.Wait()
	}
	return nil
}

func (f *floor) end() { f.stop() }

// hear passes notifications on until ctx ends.
func hear(ctx context.Context, conn *pgx.Conn, heard chan<- string) {
	defer close(heard)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return // whoever waits for an answer ends with ctx as well
		}
		heard <- n.Payload
	}
}

// consume marks a row, and tells who inserted it.
func (f *floor) consume(ctx context.Context, key string) {
	_, err := f.pool.Exec(ctx, `update bench_events set consumed_at = clock_timestamp() where key = @key`, postgres.Strict{"key": key})
	if err != nil {
		return
	}
	at := time.Now()
	f.mu.Lock()
	told := f.told[key]
	delete(f.told, key)
	f.mu.Unlock()
	if told != nil {
		told <- at
	}
}

// run sends n events by so many callers, each of which waits until its event is consumed.
func (f *floor) run(ctx context.Context, callers, n int) (samples, error) {
	first := f.next
	f.next += n
	took := make(samples, n)
	err := spread(ctx, callers, n, func(ctx context.Context, i int) error {
		key, told := strconv.Itoa(first+i), make(chan time.Time, 1)
		f.mu.Lock()
		f.told[key] = told
		f.mu.Unlock()
		began := time.Now()
		_, err := f.pool.Exec(ctx, `
			with v as (insert into bench_events (key) values (@key) returning key) select pg_notify('bench_events', key) from v`,
			postgres.Strict{"key": key})
		if err != nil {
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

// measure takes the floor of single events, and of as many as are woken together.
func (f *floor) measure(ctx context.Context, events, all int, r *waitResult) (err error) {
	if r.floors[0], err = f.run(ctx, 1, events); err != nil {
		return err
	}
	if r.floors[1], err = f.run(ctx, atOnce, events); err != nil {
		return err
	}
	began := time.Now()
	_, err = f.run(ctx, atOnce, all)
	r.floorAll = time.Since(began)
	return err
}

// The flows of the benchmark: what they do is their steps.
const (
	oneStep  = "bench_one"
	tenSteps = "bench_ten"
)

// engineBench is the benchmark of executions from their start to their end.
type engineBench struct {
	*world

	rounds, queued, orphans int
	lasts                   time.Duration
	errw                    io.Writer
}

// stepsOf are so many steps, each with a small result.
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

// engineSpeed measures how many executions a process starts and finishes in a second, beside the floor.
func engineSpeed(ctx context.Context, args []string, out, errw io.Writer) error {
	b := &engineBench{errw: errw}
	flags := flag.NewFlagSet("executions", flag.ContinueOnError)
	flags.SetOutput(errw)
	var workers int
	flags.IntVar(&b.rounds, "rounds", 5, "turns of the floor and of executions each")
	flags.DurationVar(&b.lasts, "for", 2*time.Second, "how long a turn lasts")
	flags.IntVar(&b.queued, "queued", 5000, "executions through the queue")
	flags.IntVar(&b.orphans, "orphans", 1000, "executions of a process that was lost")
	flags.IntVar(&workers, "workers", 64, "workers, as AGENT_WORKERS")
	if err := flags.Parse(args); err != nil {
		return err
	}
	flows := map[string]executions.Func{oneStep: stepsOf(1), tenSteps: stepsOf(10)}
	idle := &model{asked: func(string, time.Time) {}}
	return withWorld(ctx, workers, idle, flows, errw, func(ctx context.Context, w *world) error {
		b.world = w
		return b.run(ctx, out)
	})
}

// run measures and prints.
func (b *engineBench) run(ctx context.Context, out io.Writer) error {
	lanes := &laneBench{pool: b.pool, rounds: b.rounds, lasts: b.lasts, errw: b.errw}
	if err := lanes.prepare(ctx); err != nil {
		return err
	}
	floor := func(ctx context.Context, caller int) error {
		_, err := b.pool.Exec(ctx, `update bench_floor set n = n + 1 where name = @name`, postgres.Strict{"name": "x" + strconv.Itoa(caller)})
		return err
	}
	var t strings.Builder
	fmt.Fprintf(&t, "Executions started and finished in one process, each write awaited; medians of %d turns of %s; %d processors.\n\n", b.rounds, b.lasts, runtime.NumCPU())
	t.WriteString("| executions | callers | floor, commits/s | executions/s | ratio | processor time, floor | each execution |\n|---|---|---|---|---|---|---|\n")
	for _, flow := range []string{oneStep, tenSteps} {
		for _, callers := range laneCallers {
			fmt.Fprintf(b.errw, "%s, %d callers\n", flow, callers)
			r := rates{callers: callers}
			ours := func(ctx context.Context, _ int) error {
				x, err := b.engine.RunSync(ctx, executions.Spec{Flow: flow, Surface: trace.Flow})
				if err == nil && x.Status != executions.Completed {
					err = fmt.Errorf("execution %s is %s", x.ID, x.Status)
				}
				return err
			}
			if err := lanes.turns(ctx, &r, floor, ours); err != nil {
				return err
			}
			fmt.Fprintf(&t, "| %s | %d | %.0f | %.0f | %.2f | %s | %s |\n", flow, callers, median(r.floor), median(r.ours), median(r.ours)/median(r.floor),
				r.cpu[0].per(max(r.n[0], 1)), r.cpu[1].per(max(r.n[1], 1)))
		}
	}
	if err := b.more(ctx, &t, floor); err != nil {
		return err
	}
	_, err := io.WriteString(out, t.String())
	return err
}

// more measures the queue and the recovery.
func (b *engineBench) more(ctx context.Context, t *strings.Builder, floor func(context.Context, int) error) error {
	const callers = 32
	_, rate, err := during(ctx, callers, b.lasts, floor)
	if err != nil {
		return err
	}
	fmt.Fprintln(b.errw, "through the queue")
	began := time.Now()
	err = spread(ctx, callers, b.queued, func(ctx context.Context, _ int) error {
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
		return err
	})
	if err != nil {
		return err
	}
	if err := untilTrue(ctx, b.pool, `select not exists (select from agent_executions where status in ('pending', 'running', 'waiting'))`); err != nil {
		return err
	}
	queued := float64(b.queued) / time.Since(began).Seconds()
	fmt.Fprintf(t, "| %s, %d through the queue | %d | %.0f | %.0f | %.2f | | |\n", oneStep, b.queued, callers, rate, queued, queued/rate)
	fmt.Fprintln(b.errw, "recovery")
	took, err := b.recover(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(t, "\n%d executions of a process that was lost, each in its first step, from the sweep until all have ended: %s.\n", b.orphans, took.Round(time.Millisecond))
	return nil
}

// recover makes executions of a worker whose lease has ended, and lets this process take them over.
func (b *engineBench) recover(ctx context.Context) (time.Duration, error) {
	_, err := b.pool.Exec(ctx, `
		with w as (insert into agent_workers (name, expires_at) values ('lost', clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		select 'fl_01' || lpad(n::text, 24, '0'), 'flow', @flow, 'running', w.id, 1 from w, generate_series(1, @n::int) n`,
		postgres.Strict{"flow": oneStep, "n": b.orphans})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if _, err := b.pool.Exec(ctx, `update agent_workers set expires_at = clock_timestamp() where name = 'lost'`); err != nil {
		return 0, err
	}
	if err := b.engine.Sweep(ctx); err != nil {
		return 0, err
	}
	err = untilTrue(ctx, b.pool, `select not exists (select from agent_executions where status in ('pending', 'running', 'waiting'))`)
	return time.Since(began), err
}
