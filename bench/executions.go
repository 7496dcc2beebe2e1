package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// The flows of the benchmark, by their number of steps.
const (
	oneStep  = "bench_one"
	tenSteps = "bench_ten"
)

// engineBench measures executions from start to end.
type engineBench struct {
	*testAgent

	rounds, queued, orphans int
	roundDuration           time.Duration
	stderr                  io.Writer
}

// stepFlow returns a flow of n steps with small results.
func stepFlow(n int) executions.Func {
	return func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		sum := 0
		for i := range n {
			value, err := executions.Step(ctx, "step "+strconv.Itoa(i), func(context.Context) (int, error) { return i, nil })
			if err != nil {
				return executions.Result{}, err
			}
			sum += value
		}
		return executions.Result{Value: sum}, nil
	}
}

// executionsBench compares executions/s of one process with the floor, the rate of committed updates.
func executionsBench(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := &engineBench{stderr: stderr}
	flags := newFlags("executions", stderr)
	var workers int
	flags.IntVar(&b.rounds, "rounds", 5, "rounds of the floor and of executions")
	flags.DurationVar(&b.roundDuration, "for", 2*time.Second, "duration of a round")
	flags.IntVar(&b.queued, "queued", 5000, "executions through the queue")
	flags.IntVar(&b.orphans, "orphans", 1000, "orphaned executions")
	flags.IntVar(&workers, "workers", 64, "workers, as AGENT_WORKERS")
	if err := flags.Parse(args); err != nil {
		return err
	}
	flows := map[string]executions.Func{oneStep: stepFlow(1), tenSteps: stepFlow(10)}
	idle := &modelServer{onCall: func(string, time.Time) {}}
	return withTestAgent(ctx, workers, idle, flows, stderr, func(ctx context.Context, w *testAgent) error {
		b.testAgent = w
		return b.run(ctx, out)
	})
}

// run measures and prints.
func (b *engineBench) run(ctx context.Context, out io.Writer) error {
	lanes := &laneBench{pool: b.pool, rounds: b.rounds, roundDuration: b.roundDuration, stderr: b.stderr}
	if err := createFloor(ctx, b.pool); err != nil {
		return err
	}
	floor := func(ctx context.Context, caller int) error { return updateFloor(ctx, b.pool, caller) }
	var t strings.Builder
	fmt.Fprintf(&t, "Executions started and finished in one process, each write awaited; medians of %d rounds of %s; %d "+
		"processors.\n\n", b.rounds, b.roundDuration, runtime.NumCPU())
	t.WriteString("| executions | callers | floor, commits/s | executions/s | ratio | processor time, floor | each " +
		"execution |\n|---|---|---|---|---|---|---|\n")
	for _, flow := range []string{oneStep, tenSteps} {
		for _, callers := range laneCallers {
			fmt.Fprintf(b.stderr, "%s, %d callers\n", flow, callers)
			r := pairRates{callers: callers}
			execute := func(ctx context.Context, _ int) error {
				x, err := b.engine.RunSync(ctx, executions.Spec{Flow: flow, Surface: trace.Flow})
				if err == nil && x.Status != executions.Completed {
					err = fmt.Errorf("execution %s is %s", x.ID, x.Status)
				}
				return err
			}
			if err := lanes.alternate(ctx, &r, floor, execute); err != nil {
				return err
			}
			fmt.Fprintf(&t, "| %s | %d | %.0f | %.0f | %.2f | %s | %s |\n", flow, callers, r.floor.median(), r.measured.median(),
				r.measured.median()/r.floor.median(), r.floor.cpuPerCall(), r.measured.cpuPerCall())
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
	_, rate, err := callFor(ctx, callers, b.roundDuration, floor)
	if err != nil {
		return err
	}
	fmt.Fprintln(b.stderr, "through the queue")
	began := time.Now()
	err = callAll(ctx, callers, b.queued, func(ctx context.Context, _ int) error {
		_, _, err := b.engine.Start(ctx, b.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
		return err
	})
	if err != nil {
		return err
	}
	if err := pollQuery(ctx, b.pool, allFinished); err != nil {
		return err
	}
	queued := float64(b.queued) / time.Since(began).Seconds()
	fmt.Fprintf(t, "| %s, %d through the queue | %d | %.0f | %.0f | %.2f | | |\n", oneStep, b.queued, callers,
		rate, queued, queued/rate)
	fmt.Fprintln(b.stderr, "recovery")
	elapsed, err := b.measureRecovery(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(t, "\n%d orphaned executions, each in its first step: from lease expiry to last completion: %s.\n",
		b.orphans, elapsed.Round(time.Millisecond))
	return nil
}

// measureRecovery inserts running executions of a live worker, expires its lease, and waits until this process has
// completed them.
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
	err = pollQuery(ctx, b.pool, allFinished)
	return time.Since(began), err
}
