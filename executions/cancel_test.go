package executions_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

func TestCancelEndsPendingAndWaitingExecutions(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	for range 2 {
		status, err := executions.Cancel(t.Context(), pool, id, "ana", "not wanted")
		if err != nil || status != executions.Cancelled {
			t.Errorf("cancel: %s, %v", status, err)
		}
	}
	got := get(t, pool, id)
	if str(got.CancelledBy) != "ana" || str(got.CancelReason) != "not wanted" || str(got.ResultType) != "cancelled" || got.CompletedAt == nil {
		t.Errorf("got %+v", got)
	}
	waits := pending(t, pool)
	n := mustClaim(t, pool, waits, worker(t, pool))
	exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'key', '1 hour', null)`, postgres.Strict{"id": waits, "claim": n})
	if status, err := executions.Cancel(t.Context(), pool, waits, "ana", ""); err != nil || status != executions.Cancelled {
		t.Errorf("cancel: %s, %v", status, err)
	}
	mustDeliver(t, pool, "key", `{}`)
	if now := get(t, pool, waits); now.Status != executions.Cancelled || now.WaitingFor != nil {
		t.Errorf("after the event: %+v", now)
	}
	for _, id := range []string{id, waits} {
		if n := completions(t, pool, id); n != 1 {
			t.Errorf("%d AGENT_COMPLETED", n)
		}
	}
}

func TestCancelOfWhatIsNotThereOrHasEnded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, id := range []string{"01a1fc71-3adb-78b8-86ab-983dc5c92f7f", "nonsense", ""} {
		if _, err := executions.Cancel(t.Context(), pool, id, "ana", ""); !errors.Is(err, executions.ErrNotFound) {
			t.Errorf("cancel %q: %v", id, err)
		}
		if _, err := executions.Get(t.Context(), pool, id); !errors.Is(err, executions.ErrNotFound) {
			t.Errorf("get %q: %v", id, err)
		}
	}
	id := pending(t, pool)
	n := mustClaim(t, pool, id, worker(t, pool))
	exec(t, pool, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`, postgres.Strict{"id": id, "claim": n})
	if status, err := executions.Cancel(t.Context(), pool, id, "ana", ""); err != nil || status != executions.Completed {
		t.Errorf("cancel of a completed one: %s, %v", status, err)
	}
	if n := completions(t, pool, id); n != 1 {
		t.Errorf("%d AGENT_COMPLETED", n)
	}
}

func TestCancelStopsAStepInTheMiddle(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		options func(t *testing.T, pool *pgxpool.Pool) func(*executions.Options)
		cancel  func(ctx context.Context, p *process, id string) error
	}{
		"told by a notification": {
			func(t *testing.T, pool *pgxpool.Pool) func(*executions.Options) {
				l := listener(t, pool)
				return func(o *executions.Options) { o.Listener, o.LeaseTTL = l, time.Hour }
			},
			func(ctx context.Context, p *process, id string) error { return cancelByOther(ctx, p, id) },
		},
		"told by the renewal": {
			func(*testing.T, *pgxpool.Pool) func(*executions.Options) { return func(*executions.Options) {} },
			func(ctx context.Context, p *process, id string) error { return cancelByOther(ctx, p, id) },
		},
		"told by itself": {
			func(*testing.T, *pgxpool.Pool) func(*executions.Options) {
				return func(o *executions.Options) { o.LeaseTTL = time.Hour }
			},
			func(ctx context.Context, p *process, id string) error {
				_, err := p.Cancel(ctx, id, "ana", "")
				return err
			},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			entered, ended := make(chan struct{}), make(chan error, 1)
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "automation:a"); err != nil {
					return executions.Result{}, err
				}
				return ends(executions.Phase(ctx, "plan", func(ctx context.Context, _ *executions.Effect) (int, error) {
					return executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}},
						func(ctx context.Context, _ *executions.Effect) (int, error) {
							close(entered)
							<-ctx.Done()
							ended <- context.Cause(ctx)
							return 0, ctx.Err()
						})
				}))
			}), c.options(t, pool))
			id := p.begin(t, "flow")
			receive(t, entered)
			if err := c.cancel(t.Context(), p, id); err != nil {
				t.Fatal(err)
			}
			select {
			case cause := <-ended:
				if !errors.Is(cause, executions.ErrCancelled) {
					t.Errorf("the step was stopped with %v", cause)
				}
			case <-time.After(patience): // far below a lease of an hour
				t.Fatalf("the step was not stopped within %s", patience)
			}
			p.stop()
			want := []row{{"plan", "plan", "phase", "error", "cancelled", ""}, {"pay", "plan/pay", "call", "unknown", "cancelled", ""}}
			if diff := cmp.Diff(want, rows(t, pool, id)); diff != "" {
				t.Errorf("activity (-want +got):\n%s", diff)
			}
			if value[bool](t, pool, `select is_agent_lock_held('automation:a')`) || open(t, pool) != 0 || completions(t, pool, id) != 1 {
				t.Errorf("%d open rows, %d AGENT_COMPLETED, lane held: %v", open(t, pool), completions(t, pool, id),
					value[bool](t, pool, `select is_agent_lock_held('automation:a')`))
			}
			points, err := executions.Checkpoints(t.Context(), pool, id)
			if err != nil || len(points) != 0 {
				t.Errorf("recorded %v, %v", points, err)
			}
		})
	}
}

// cancelByOther cancels as another process would.
func cancelByOther(ctx context.Context, p *process, id string) error {
	_, err := executions.Cancel(ctx, p.pool, id, "ana", "")
	return err
}

func TestEveryEndFreesLanesClosesRowsAndIsToldOnce(t *testing.T) {
	t.Parallel()
	for status, err := range map[executions.Status]error{
		executions.Completed: nil, executions.Failed: errors.New("no"), executions.Timeout: executions.ErrTimedOut,
	} {
		t.Run(string(status), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "thread:7"); err != nil {
					return executions.Result{}, err
				}
				x, _ := executions.Current(ctx)
				if _, err := activity.Open(ctx, pool, activity.Entry{Skill: "left open", Claim: x.Claim}); err != nil {
					return executions.Result{}, err
				}
				return executions.Result{}, err
			}))
			id := p.begin(t, "flow")
			until(t, pool, id, status)
			if value[bool](t, pool, `select is_agent_lock_held('thread:7')`) || open(t, pool) != 0 {
				t.Error("the lane is held, or a row is open")
			}
			if log := rows(t, pool, id); len(log) != 1 || log[0].Status != "unknown" || log[0].Class != string(status) {
				t.Errorf("activity %v", log)
			}
			freed := value[string](t, pool, `
				select string_agg(data->>'locks_released', ' ') from agent_events where event = 'AGENT_COMPLETED' and key = @id`,
				postgres.Strict{"id": id})
			if freed != "1" {
				t.Errorf("lanes freed per AGENT_COMPLETED: %q", freed)
			}
		})
	}
}

func TestALaneFollowsItsExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tokens := make(chan int64, 2)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		hold, err := executions.Lane(ctx, "objective:7")
		if err != nil {
			return executions.Result{}, err
		}
		defer func() { _ = hold.Release(context.WithoutCancel(ctx)) }() // also fires when the wait unwinds
		if _, err := executions.Lane(ctx, "heartbeat"); err != nil {
			return executions.Result{}, err
		}
		tokens <- hold.Token()
		return ends(executions.Wait(ctx, "event", executions.Event("key", 0)))
	}))
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	first := receive(t, tokens)
	p.stop()
	parked := func(lane string) bool {
		return value[bool](t, pool, `
			select parked and expires_at > clock_timestamp() + interval '1 year' from agent_locks
			 where lane = @lane and execution_id = @id`, postgres.Strict{"lane": lane, "id": id})
	}
	if !parked("objective:7") || parked("heartbeat") {
		t.Errorf("parked: objective %v, heartbeat %v", parked("objective:7"), parked("heartbeat"))
	}
	mustDeliver(t, pool, "key", `{}`)
	start(t, pool, p.flows, func(*executions.Options) {})
	until(t, pool, id, executions.Completed)
	second := receive(t, tokens)
	if second <= first {
		t.Errorf("token %d after %d", second, first)
	}
	if value[bool](t, pool, `select is_agent_lock_held('objective:7')`) {
		t.Error("the lane is held after the end")
	}
}

func TestAnOldTokenIsRefusedAfterANewClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	middle := newGate(t)
	tokens := make(chan int64, 2)
	next := make(chan struct{})
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		hold, err := executions.Lane(ctx, "pipeline:prices")
		if err != nil {
			return executions.Result{}, err
		}
		tokens <- hold.Token()
		if !middle.pass(ctx) {
			<-next
		}
		return executions.Result{}, nil
	})
	aside := prepare(t, pool, flows)
	wait := aside.runAside(t)
	id := middle.arrival(t)
	expire(t, pool, id)
	start(t, pool, flows)
	first, second := receive(t, tokens), receive(t, tokens)
	fence := func(token int64) error {
		_, err := pool.Exec(t.Context(), `select fence_agent_lock('pipeline:prices', @token)`, postgres.Strict{"token": token})
		return err
	}
	if err := fence(first); !postgres.IsCode(err, "LK001") {
		t.Errorf("the old token: %v", err)
	}
	if err := fence(second); err != nil || second <= first {
		t.Errorf("the new token %d after %d: %v", second, first, err)
	}
	middle.open()
	wait()
	if err := fence(second); err != nil {
		t.Errorf("the stale process freed the lane: %v", err)
	}
	close(next)
	until(t, pool, id, executions.Completed)
}

func TestAWaitForALaneEndsWhenItIsFree(t *testing.T) {
	t.Parallel()
	for _, notified := range []bool{true, false} {
		t.Run(fmt.Sprint("notified ", notified), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			var option func(*executions.Options)
			if notified {
				l := listener(t, pool)
				option = func(o *executions.Options) { o.Listener, o.SweepEvery = l, time.Hour }
			} else {
				option = func(*executions.Options) {}
			}
			exec(t, pool, `select acquire_agent_lock('operate', 'admin', 600)`)
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				for {
					if _, err := executions.Lane(ctx, "operate"); !errors.Is(err, lanes.ErrBusy) {
						return executions.Result{}, err
					}
					if _, err := executions.Wait(ctx, "operate", executions.LaneFree("operate", time.Hour)); err != nil {
						return executions.Result{}, err
					}
				}
			}), option)
			id := p.begin(t, "flow")
			until(t, pool, id, executions.Waiting)
			exec(t, pool, `select release_agent_lock('operate', 'admin')`)
			until(t, pool, id, executions.Completed) // notified: no sweep would come for an hour
		})
	}
}
