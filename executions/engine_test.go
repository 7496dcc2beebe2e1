package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// patience is how long a test waits for what must happen; it is long because machines are slow.
const patience = 90 * time.Second

// process is what one agent process would run.
type process struct {
	*executions.Engine
	pool  *pgxpool.Pool
	stop  func()
	flows map[string]executions.Func
}

// start runs an engine until the test ends or stop is called.
func start(t *testing.T, pool *pgxpool.Pool, flows map[string]executions.Func, change ...func(*executions.Options)) *process {
	t.Helper()
	p := prepare(t, pool, flows, change...)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return p.Run(running) })
	stopped := false
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := group.Wait(); err != nil {
			t.Errorf("engine: %v", err)
		}
	}
	t.Cleanup(p.stop)
	return p
}

// prepare makes an engine that does not run yet.
func prepare(t *testing.T, pool *pgxpool.Pool, flows map[string]executions.Func, change ...func(*executions.Options)) *process {
	t.Helper()
	opts := executions.Options{
		Keeper:     lanes.NewKeeper(pool, lanes.Options{}),
		SweepEvery: 100 * time.Millisecond,
		LeaseTTL:   3 * time.Second,
	}
	for _, c := range change {
		c(&opts)
	}
	engine, err := executions.New(pool, opts)
	if err != nil {
		t.Fatal(err)
	}
	for name, fn := range flows {
		if err := engine.Register(name, fn); err != nil {
			t.Fatal(err)
		}
	}
	return &process{Engine: engine, pool: pool, flows: flows}
}

// begin starts an execution of a flow.
func (p *process) begin(t *testing.T, flow string) string {
	t.Helper()
	x, created, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: flow, Surface: trace.Flow})
	if err != nil || !created {
		t.Fatalf("start %s: created %v, %v", flow, created, err)
	}
	return x.ID
}

// until waits for an execution to reach a status.
func until(t *testing.T, db postgres.DB, id string, want executions.Status) executions.Execution {
	t.Helper()
	var got executions.Execution
	pgtest.Eventually(t, patience, func() bool {
		var err error
		got, err = executions.Get(t.Context(), db, id)
		return err == nil && got.Status == want
	}, "execution becomes "+string(want))
	return got
}

func TestAFinishedStepIsNotRepeatedWhenTheRunIsClaimedAgain(t *testing.T) {
	pool := pgtest.DB(t)
	var first, second atomic.Int32
	p := start(t, pool, map[string]executions.Func{"two": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		n, err := executions.Step(ctx, "first", func(context.Context) (int, error) { return int(first.Add(1)), nil })
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(50*time.Millisecond)); err != nil {
			return executions.Result{}, err
		}
		_, err = executions.Step(ctx, "second", func(context.Context) (int, error) {
			second.Add(1)
			return 0, errors.New("as recorded")
		})
		return executions.Result{Summary: err.Error(), Value: n}, nil
	}})
	got := until(t, pool, p.begin(t, "two"), executions.Completed)
	if first.Load() != 1 || second.Load() != 1 || string(got.Result) != "1" || got.ResultSummary != "as recorded" {
		t.Errorf("first ran %d times, second %d times; result %s %q", first.Load(), second.Load(), got.Result, got.ResultSummary)
	}
}

// Told to stop before it has begun, an engine has worked until then: that is no error, and leaves no lease.
func TestAnEngineThatIsStoppedBeforeItBegins(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, run := range map[string]func(*executions.Engine) error{
		"run":  func(e *executions.Engine) error { return e.Run(ended) },
		"beat": func(e *executions.Engine) error { return e.Beat(ended) },
	} {
		e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
		if err != nil {
			t.Fatal(err)
		}
		if err := run(e); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_workers where expires_at > clock_timestamp()`); n != 0 {
		t.Errorf("%d leases are left", n)
	}
}

func TestAnEngineRunsOnce(t *testing.T) {
	t.Parallel()
	p := start(t, pgtest.DB(t), flow(func(context.Context) (executions.Result, error) { return ends(1, nil) }))
	until(t, p.pool, p.begin(t, "flow"), executions.Completed)
	if err := p.Run(t.Context()); err == nil {
		t.Error("a second Run beside the first")
	}
	until(t, p.pool, p.begin(t, "flow"), executions.Completed)
	p.stop()
	if err := p.Run(t.Context()); err == nil {
		t.Error("a Run after the shutdown, which would take no work and not say so")
	}
}

func TestOptionsThatCannotBeAreAnError(t *testing.T) {
	t.Parallel()
	keeper := lanes.NewKeeper(nil, lanes.Options{})
	for _, opts := range []executions.Options{{}, {Keeper: keeper, Workers: -1}, {Keeper: keeper, LeaseTTL: 100 * 365 * 24 * time.Hour}} {
		if _, err := executions.New(pgtest.DB(t), opts); err == nil {
			t.Errorf("an engine of %d workers and a lease of %s was made", opts.Workers, opts.LeaseTTL)
		}
	}
}
