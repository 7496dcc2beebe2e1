package executions_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// stopping stops a process in the background.
func stopping(p *process) (wait func()) {
	var group errgroup.Group
	group.Go(func() error { p.stop(); return nil })
	return func() { _ = group.Wait() }
}

func TestAShutdownLetsTheStepFinishAndHandsTheRunBack(t *testing.T) {
	t.Parallel()
	for _, now := range []bool{false, true} {
		name := map[bool]string{false: "taken from the queue", true: "run now"}[now]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			first := newGate(t)
			var firsts, seconds atomic.Int32
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "automation:a"); err != nil {
					return executions.Result{}, err
				}
				_, err := executions.Step(ctx, "first", func(ctx context.Context) (int, error) {
					first.pass(ctx)
					return int(firsts.Add(1)), ctx.Err()
				})
				if err != nil {
					return executions.Result{}, err
				}
				return ends(executions.Step(ctx, "second", func(context.Context) (int, error) { return int(seconds.Add(1)), nil }))
			}))
			ran := func() {}
			if now {
				pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
				wait := p.runAside(t)
				ran = func() { wait() }
			} else {
				p.begin(t, "flow")
			}
			id := first.arrival(t)
			wait := stopping(p)
			pgtest.Eventually(t, patience, func() bool { return p.Live() != nil }, "the shutdown has begun")
			first.open()
			wait()
			ran()
			got := get(t, pool, id)
			points, err := executions.Checkpoints(t.Context(), pool, id)
			if err != nil || len(points) != 1 || points[0].Step != "first" || seconds.Load() != 0 {
				t.Errorf("recorded %v, %v; the second step ran %d times", points, err, seconds.Load())
			}
			if got.Status != executions.Running || got.ClaimedBy != nil || got.Attempt != 0 {
				t.Errorf("status %s, claimed by %q, attempt %d", got.Status, str(got.ClaimedBy), got.Attempt)
			}
			if value[bool](t, pool, `select is_agent_lock_held('automation:a')`) {
				t.Error("its lane is held")
			}
			if value[bool](t, pool, `select exists (select from agent_workers where expires_at > clock_timestamp())`) {
				t.Error("the worker's lease goes on")
			}
			start(t, pool, p.flows)
			until(t, pool, id, executions.Completed)
			if firsts.Load() != 1 || seconds.Load() != 1 {
				t.Errorf("first ran %d times, second %d times", firsts.Load(), seconds.Load())
			}
		})
	}
}

func TestAShutdownCancelsAStepThatTakesTooLong(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	entered := make(chan string, 1)
	var calls atomic.Int32
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}, Idempotent: true},
			func(ctx context.Context, _ *executions.Effect) (int32, error) {
				if n := calls.Add(1); n > 1 {
					return n, nil
				}
				x, _ := executions.Current(ctx)
				entered <- x.ID
				<-ctx.Done()
				return 0, ctx.Err()
			}))
	})
	p := start(t, pool, flows, func(o *executions.Options) { o.StopTimeout = 200 * time.Millisecond })
	p.begin(t, "flow")
	id := receive(t, entered)
	began := time.Now()
	p.stop()
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("the shutdown took %s", took)
	}
	if got := get(t, pool, id); got.Status != executions.Running || got.ClaimedBy != nil || got.Attempt != 0 {
		t.Errorf("status %s, claimed by %q, attempt %d", got.Status, str(got.ClaimedBy), got.Attempt)
	}
	start(t, pool, flows)
	if got := until(t, pool, id, executions.Completed); string(got.Result) != "2" {
		t.Errorf("result %s", got.Result)
	}
}

func TestRunNowThatIsInterruptedIsCancelled(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ctx, cancel := context.WithCancel(t.Context())
	p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		cancel()
		<-ctx.Done()
		return executions.Result{}, ctx.Err()
	}))
	got, err := p.RunNow(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
	if err != nil || got.Status != executions.Cancelled || str(got.CancelledBy) != "interrupt" {
		t.Errorf("status %s by %q, %v", got.Status, str(got.CancelledBy), err)
	}
}

func TestBeatKeepsTheLeaseWithoutTakingWork(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, flow(nothing))
	ctx, cancel := context.WithCancel(t.Context())
	var group errgroup.Group
	group.Go(func() error { return p.Beat(ctx) })
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	first := value[time.Time](t, pool, `select expires_at from agent_workers`)
	id := p.begin(t, "flow")
	pgtest.Eventually(t, patience, func() bool {
		return value[time.Time](t, pool, `select expires_at from agent_workers`).After(first)
	}, "the lease is renewed")
	cancel()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if got := get(t, pool, id); got.Status != executions.Pending {
		t.Errorf("status %s", got.Status)
	}
	if value[bool](t, pool, `select exists (select from agent_workers where expires_at > clock_timestamp())`) {
		t.Error("the lease goes on")
	}
}

// lefts calls a function when a run is over.
type lefts func()

func (f lefts) Left(executions.Execution)                            { f() }
func (lefts) Began(executions.Execution)                             {}
func (lefts) Lost(executions.Execution)                              {}
func (lefts) Ended(executions.Execution, executions.Status)          {}
func (lefts) Closed(activity.Entry, activity.Outcome, time.Duration) {}

// What remains to be done for a caller who has left is given up when the database does not answer.
func TestACallerWhoHasLeftIsNotKeptByADatabaseThatHangs(t *testing.T) {
	t.Parallel()
	for _, here := range []bool{false, true} {
		name := map[bool]string{false: "RunNow", true: "RunHere"}[here]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			ctx, leave := context.WithCancel(t.Context())
			var locked pgx.Tx
			hang := lefts(func() {
				leave()
				var err error
				if locked, err = pool.Begin(t.Context()); err == nil {
					_, err = locked.Exec(t.Context(), `lock table agent_executions in access exclusive mode`)
				}
				if err != nil {
					t.Error(err)
				}
			})
			p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				_, err := executions.Wait(ctx, "long", executions.Delay(time.Hour))
				return executions.Result{}, err
			}), func(o *executions.Options) { o.LeaseTTL, o.Observer = time.Second, hang })
			run := map[bool]func(context.Context, executions.Spec) (executions.Execution, error){false: p.RunNow, true: p.RunHere}[here]
			returned := make(chan error, 1)
			go func() {
				_, err := run(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
				returned <- err
			}()
			if err := receive(t, returned); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("returned %v", err)
			}
			if err := locked.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
