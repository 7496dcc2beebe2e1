package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// inTx is a flow whose step is in a transaction: it writes a row, says so, and stays there until its context ends, or, if it is deaf, until leave is closed.
func inTx(entered chan struct{}, leave <-chan struct{}, deaf bool) map[string]executions.Func {
	return flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.StepTx(ctx, "step", func(ctx context.Context, tx pgx.Tx) (int, error) {
			if _, err := tx.Exec(ctx, `insert into effects values (1)`); err != nil {
				return 0, err
			}
			entered <- struct{}{}
			if deaf {
				<-leave
				return 1, nil
			}
			<-ctx.Done()
			return 0, context.Cause(ctx)
		}))
	})
}

func effectRows(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return value[int](t, pool, `select count(*) from effects`)
}

func TestACancelStopsAStepInATransaction(t *testing.T) {
	t.Parallel()
	for name, told := range map[string]struct {
		listens bool
		cancel  func(ctx context.Context, p *process, id string) (executions.Status, error)
		within  time.Duration // or four times as long as a cancel that no transaction is in the way of
	}{
		"by notification": {true, func(ctx context.Context, p *process, id string) (executions.Status, error) {
			return executions.Cancel(ctx, p.pool, id, "ana", "enough")
		}, 100 * time.Millisecond},
		"by itself": {false, func(ctx context.Context, p *process, id string) (executions.Status, error) {
			return p.Cancel(ctx, id, "ana", "enough")
		}, 100 * time.Millisecond},
		"by SQL": {true, func(ctx context.Context, p *process, id string) (status executions.Status, err error) {
			err = p.pool.QueryRow(ctx, `select cancel_agent_execution($1, 'ana', 'enough')`, id).Scan(&status)
			return status, err
		}, 0},
		"by renewal": {false, func(ctx context.Context, p *process, id string) (executions.Status, error) {
			return executions.Cancel(ctx, p.pool, id, "ana", "enough")
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			exec(t, pool, `create table effects (n int)`)
			entered := make(chan struct{}, 1)
			p := start(t, pool, inTx(entered, nil, false), func(o *executions.Options) {
				o.SweepEvery, o.LeaseTTL = time.Hour, 12*time.Second
				if told.listens {
					o.Listener = listener(t, pool)
				}
			})
			timed := func(id string) (executions.Status, time.Duration) {
				began := time.Now()
				status, err := told.cancel(t.Context(), p, id)
				if err != nil {
					t.Fatal(err)
				}
				return status, time.Since(began)
			}
			var id string
			for try := 1; ; try++ { // something else may take the machine during one of them, and hardly during each
				_, plain := timed(queued(t, pool, "other", "flow", 1)) // of an execution that nothing has locked
				id = p.begin(t, "flow")
				receive(t, entered)
				status, took := timed(id)
				t.Logf("answered after %s: %s; without a transaction after %s", took, status, plain)
				if told.within == 0 || status == executions.Cancelled && took <= max(told.within, 4*plain) {
					break
				}
				if try == 3 {
					t.Errorf("answered after %s: %s", took, status)
					break
				}
				until(t, pool, id, executions.Cancelled)
			}
			x := until(t, pool, id, executions.Cancelled)
			if str(x.CancelledBy) != "ana" || str(x.CancelReason) != "enough" || effectRows(t, pool) != 0 || completions(t, pool, id) != 1 {
				t.Errorf("%+v, %d effects", x, effectRows(t, pool))
			}
			// One that was noted while the cancel was completed elsewhere is left to the sweep.
			pgtest.Eventually(t, patience, func() bool {
				return p.Sweep(t.Context()) == nil && value[int](t, pool, `select count(*) from agent_cancel_requests`) == 0
			}, "no request is left")
		})
	}
}

// A step that does not hear delays neither the cancel nor what it is told: it says who has the execution, and the cancel is completed when the step ends.
func TestACancelOfAStepThatDoesNotStopIsCompletedWithItsEnd(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `create table effects (n int)`)
	entered, leave := make(chan struct{}, 1), make(chan struct{})
	p := start(t, pool, inTx(entered, leave, true), func(o *executions.Options) { o.SweepEvery, o.LeaseTTL = time.Hour, time.Hour })
	id := p.begin(t, "flow")
	receive(t, entered)
	status, err := p.Cancel(t.Context(), id, "ana", "enough")
	if err != nil || status != executions.Running {
		t.Errorf("cancel: %s, %v", status, err)
	}
	if who, err := executions.CancelDetail(t.Context(), pool); err != nil || !strings.Contains(who, "idle in transaction") {
		t.Errorf("in the way: %q, %v", who, err)
	}
	close(leave)
	if x := until(t, pool, id, executions.Cancelled); str(x.CancelReason) != "enough" || effectRows(t, pool) != 0 {
		t.Errorf("%+v, %d effects", x, effectRows(t, pool))
	}
}

// What a client has locked is cancelled by the sweep, also what waits, and what its process died with.
func TestACancelOfWhatAClientHasLockedIsCompletedByTheSweep(t *testing.T) {
	t.Parallel()
	for name, lock := range map[string]string{
		"row":  `select from agent_executions for update`,
		"lane": `select from agent_locks for update`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "automation:a"); err != nil {
					return executions.Result{}, err
				}
				_, err := executions.Wait(ctx, "wait", executions.Event("key", 0))
				return executions.Result{}, err
			}))
			id := p.begin(t, "flow")
			until(t, pool, id, executions.Waiting)
			tx := leftOpen(t, pool, lock)
			if status, err := executions.Cancel(t.Context(), pool, id, "ana", "enough"); err != nil || status != executions.Waiting {
				t.Errorf("cancel: %s, %v", status, err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			until(t, pool, id, executions.Cancelled)
			if value[bool](t, pool, `select is_agent_lock_held('automation:a')`) {
				t.Error("its lane is held")
			}
		})
	}
}

// What was ready when its cancel was requested is not begun, and nobody asks for it again and again.
func TestAnExecutionWhoseCancelIsRequestedIsNotClaimed(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := queued(t, pool, "flow", "flow", 1)
	second := queued(t, pool, "flow", "flow", 2)
	exec(t, pool, `insert into agent_cancel_requests (execution_id, cancelled_by) values ($1, 'ana')`, first)
	tx := leftOpen(t, pool, `select 1`)
	if got := claimReady(t, tx, worker(t, pool), 10); len(got) != 1 || got[0] != second {
		t.Errorf("claimed %v of %s, which is to be cancelled, and %s", got, first, second)
	}
	if missed := value[string](t, tx, `select coalesce(current_setting('lanekeeper.missed', true), '')`); missed != "" {
		t.Error("the caller asks again at once")
	}
}

// A parent whose child is in a transaction is cancelled as soon, and the child with it.
func TestACancelStopsAChildInATransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `create table effects (n int)`)
	entered := make(chan struct{}, 1)
	flows := inTx(entered, nil, false)
	flows["parent"] = func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Trigger(ctx, "child", executions.Child{Flow: "flow", Wait: true})
		return executions.Result{}, err
	}
	p := start(t, pool, flows, func(o *executions.Options) {
		o.SweepEvery, o.LeaseTTL, o.Listener = time.Hour, time.Hour, listener(t, pool)
	})
	id := p.begin(t, "parent")
	receive(t, entered)
	until(t, pool, id, executions.Waiting)
	if status, err := executions.Cancel(t.Context(), pool, id, "ana", "enough"); err != nil || status != executions.Cancelled {
		t.Errorf("cancel: %s, %v", status, err)
	}
	child := value[string](t, pool, `select id::text from agent_executions where parent_id = @id`, postgres.Strict{"id": id})
	if x := until(t, pool, child, executions.Cancelled); str(x.CancelReason) != "its parent was cancelled: enough" || effectRows(t, pool) != 0 {
		t.Errorf("%+v, %d effects", x, effectRows(t, pool))
	}
	if _, err := executions.Cancel(t.Context(), pool, "01a1fc71-3adb-78b8-86ab-983dc5c92f7f", "ana", ""); !errors.Is(err, executions.ErrNotFound) {
		t.Errorf("cancel of nothing: %v", err)
	}
}
