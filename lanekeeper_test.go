package lanekeeper_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// open returns a runtime on a database of the test.
func open(t *testing.T, opts ...lanekeeper.Option) (*lanekeeper.Runtime, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.DB(t)
	rt, err := lanekeeper.Open(t.Context(), pool, opts...)
	require.NoError(t, err)
	return rt, pool
}

// run runs a runtime until the test ends.
func run(t *testing.T, rt *lanekeeper.Runtime) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- rt.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-ended)
	})
}

// register registers a flow without options.
func register[In, Out any](
	t *testing.T, rt *lanekeeper.Runtime, name string, fn func(context.Context, In) (Out, error),
	opts ...lanekeeper.FlowOption,
) lanekeeper.Flow[In, Out] {
	t.Helper()
	flow, err := lanekeeper.Register(rt, name, fn, opts...)
	require.NoError(t, err)
	return flow
}

type order struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

type receipt struct {
	Order string `json:"order"`
	Keys  []string
	Total int
}

func (r receipt) String() string { return fmt.Sprintf("%s: %d cents", r.Order, r.Total) }

func TestFlowReturnsTypedResult(t *testing.T) {
	rt, pool := open(t)
	pay := register(t, rt, "pay", func(ctx context.Context, o order) (receipt, error) {
		r := receipt{Order: o.ID}
		for _, name := range []string{"reserve", "charge"} {
			key, err := lanekeeper.Step(ctx, name, func(ctx context.Context) (string, error) {
				return lanekeeper.StepKey(ctx), nil
			}, lanekeeper.Input(o))
			if err != nil {
				return r, err
			}
			r.Keys = append(r.Keys, key)
		}
		inner, err := lanekeeper.Step(ctx, "outer", func(ctx context.Context) (string, error) {
			return lanekeeper.Step(ctx, "inner", func(ctx context.Context) (string, error) {
				return lanekeeper.StepKey(ctx), nil
			}, lanekeeper.Untraced())
		}, lanekeeper.Input(o))
		if err != nil || inner != "" {
			return r, fmt.Errorf("the key of an untraced step is %q, %w", inner, err)
		}
		total, err := lanekeeper.Step(ctx, "sum", func(context.Context) (int, error) { return o.Cents, nil },
			lanekeeper.Untraced())
		r.Total = total
		return r, err
	})
	nothing := register(t, rt, "nothing", func(context.Context, order) (*receipt, error) { return nil, nil })
	run(t, rt)
	none, err := nothing.Start(t.Context(), order{})
	require.NoError(t, err)
	empty, err := none.Wait(t.Context())
	assert.Truef(t, err == nil && empty == nil, "a nil result, whose String panics: %v, %v", empty, err)
	h, err := pay.Start(t.Context(), order{"n-7", 250}, lanekeeper.Key("n-7"))
	require.NoError(t, err)
	got, err := h.Wait(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "n-7", got.Order)
	assert.Equal(t, 250, got.Total)
	require.Equal(t, 2, len(got.Keys))
	assert.Truef(t, got.Keys[0] != "" && got.Keys[0] != got.Keys[1], "keys of steps: %q", got.Keys)
	again, err := pay.Start(t.Context(), order{"n-7", 250}, lanekeeper.Key("n-7"))
	require.NoError(t, err)
	assert.Equal(t, h.ID(), again.ID())
	assert.Equal(t, h.TraceID(), again.TraceID())
	steps := pgtest.Column[string](t, pool, `
		select skill_name || ' ' || status || ' ' || (input ->> 'id') from agent_activity where trace_id = $1
		 order by created_at, id`, h.TraceID())
	assert.Equal(t, "reserve success n-7,charge success n-7,outer success n-7", strings.Join(steps, ","), steps)
	s := pgtest.Value[string](t, pool, `select result_summary from agent_executions where id = $1::uuid`, h.ID())
	assert.Equal(t, "n-7: 250 cents", s, "the summary")
}

func TestFlowWaitsForEventsAndChildren(t *testing.T) {
	rt, _ := open(t)
	double := register(t, rt, "double", func(_ context.Context, n int) (int, error) {
		if n < 0 {
			return 0, errors.New("it is negative")
		}
		return 2 * n, nil
	})
	parent := register(t, rt, "parent", func(ctx context.Context, key string) (int, error) {
		n, err := lanekeeper.WaitEvent[int](ctx, "number", key, time.Minute)
		if err != nil {
			return 0, err
		}
		if err := lanekeeper.Sleep(ctx, "breath", 10*time.Millisecond); err != nil {
			return 0, err
		}
		return double.Call(ctx, "double", n)
	})
	run(t, rt)
	result := func(n int) (int, error) {
		key := fmt.Sprint("number ", n)
		h, err := parent.Start(t.Context(), key)
		require.NoError(t, err)
		require.NoError(t, rt.SendEvent(t.Context(), key, n, key))
		require.NoError(t, rt.SendEvent(t.Context(), key, 1000, key)) // same id
		return parent.Handle(h.ID()).Wait(t.Context())
	}
	got, err := result(21)
	require.NoError(t, err)
	assert.Equal(t, 42, got)
	_, err = result(-1)
	failed, ok := errors.AsType[*lanekeeper.FlowError](err)
	require.Truef(t, ok, "got %v, want a FlowError", err)
	assert.Equal(t, "failed", failed.Status)
	assert.Contains(t, failed.Message, "it is negative")
}

func TestChildHasOptionsOfItsFlow(t *testing.T) {
	rt, pool := open(t)
	child := register(t, rt, "child", func(_ context.Context, text string) (string, error) { return text, nil },
		lanekeeper.Interactive(), lanekeeper.MaxLostWorkers(2), lanekeeper.ProgressTimeout(time.Minute))
	parent := register(t, rt, "parent", func(ctx context.Context, text string) (string, error) {
		started, err := child.StartChild(ctx, "start", text)
		if err != nil {
			return "", err
		}
		if _, err := child.Call(ctx, "call", text); err != nil {
			return "", err
		}
		return started.Wait(ctx)
	})
	run(t, rt)
	h, err := parent.Start(t.Context(), "hello")
	require.NoError(t, err)
	_, err = h.Wait(t.Context())
	require.NoError(t, err)
	pgtest.Equal(t, pool, "interactive 2 60, interactive 2 60", `
		select string_agg(queue || ' ' || max_attempts || ' ' || progress_seconds, ', ')
		  from agent_executions where flow = 'child'`)
}

func TestStartedChildrenRunAtOnce(t *testing.T) {
	const n = 3
	rt, pool := open(t)
	var running atomic.Int32
	all := make(chan struct{})
	child := register(t, rt, "square", func(_ context.Context, i int) (int, error) {
		if running.Add(1) == n {
			close(all)
		}
		select {
		case <-all:
		case <-time.After(pgtest.Timeout):
			return 0, errors.New("the other children do not run")
		}
		if i == 2 {
			return 0, errors.New("no square of 2")
		}
		return i * i, nil
	})
	parent := register(t, rt, "parent", func(ctx context.Context, _ struct{}) ([]string, error) {
		var children []lanekeeper.Child[int]
		for i := range n {
			c, err := child.StartChild(ctx, fmt.Sprint("square ", i), i)
			if err != nil {
				return nil, err
			}
			children = append(children, c)
		}
		var results []string
		for _, c := range append(children, children[0]) { // a second wait returns the same
			square, err := c.Wait(ctx)
			failed, is := errors.AsType[*lanekeeper.FlowError](err)
			switch {
			case is:
				results = append(results, failed.Status+": "+failed.Message)
			case err != nil:
				return nil, err
			default:
				results = append(results, fmt.Sprint(square))
			}
		}
		return results, nil
	})
	run(t, rt)
	h, err := parent.Start(t.Context(), struct{}{})
	require.NoError(t, err)
	got, err := h.Wait(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "0,1,failed: no square of 2,0", strings.Join(got, ","))
	assert.Equal(t, n, pgtest.Value[int](t, pool, `select count(*) from agent_executions where parent_id = $1`, h.ID()))
}

// The order of waits may differ between runs, for example in goroutines. A wait never returns the record of another
// child.
func TestWaitBelongsToItsChild(t *testing.T) {
	rt, pool := open(t)
	child := register(t, rt, "child", func(ctx context.Context, i int) (string, error) {
		return lanekeeper.WaitEvent[string](ctx, "wait", fmt.Sprint("go ", i), time.Hour)
	})
	var runs atomic.Int32
	parent := register(t, rt, "parent", func(ctx context.Context, _ struct{}) ([]string, error) {
		var children []lanekeeper.Child[string]
		for i := range 2 {
			c, err := child.StartChild(lanekeeper.Scope(ctx, "start"), "child", i)
			if err != nil {
				return nil, err
			}
			children = append(children, c)
		}
		results := make([]string, 2)
		first := int(runs.Add(1)) % 2 // of the first run: the second child
		for _, i := range []int{first, 1 - first} {
			var err error
			if results[i], err = children[i].Wait(ctx); err != nil {
				return nil, err
			}
		}
		return results, nil
	})
	run(t, rt)
	h, err := parent.Start(t.Context(), struct{}{})
	require.NoError(t, err)
	for _, i := range []int{1, 0} {
		pgtest.Until(t, pool, true, `
			select exists (
			  select from agent_executions p join agent_executions c on c.id::text = p.waiting_key
			   where p.id = $1 and c.input = to_jsonb($2::int))`, h.ID(), i)
		require.NoError(t, rt.SendEvent(t.Context(), fmt.Sprint("go ", i), fmt.Sprint("result ", i), ""))
	}
	got, err := h.Wait(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "result 0,result 1", strings.Join(got, ","))
}

func TestCancelOfParentCancelsStartedChildren(t *testing.T) {
	rt, pool := open(t)
	child := register(t, rt, "child", func(ctx context.Context, _ int) (int, error) {
		return 0, lanekeeper.Sleep(ctx, "long", time.Hour)
	})
	parent := register(t, rt, "parent", func(ctx context.Context, _ struct{}) (int, error) {
		awaited, err := child.StartChild(ctx, "awaited", 1)
		if err != nil {
			return 0, err
		}
		if _, err := child.StartChild(ctx, "other", 2); err != nil {
			return 0, err
		}
		return awaited.Wait(ctx)
	})
	run(t, rt)
	h, err := parent.Start(t.Context(), struct{}{})
	require.NoError(t, err)
	pgtest.Until(t, pool, 3, `select count(*) from agent_executions where status = 'waiting'`)
	pgtest.Equal(t, pool, "t true", `
		select concat_ws(' ', waiting_until > clock_timestamp() + interval '23 hours', waiting_data -> 'patient')
		  from agent_executions
		 where id = $1`, h.ID())
	require.NoError(t, h.Cancel(t.Context(), "not needed"))
	pgtest.Equal(t, pool, 2, `
		select count(*)
		  from agent_executions
		 where parent_id = $1
		   and status = 'cancelled'
		   and cancel_reason = 'its parent was cancelled: not needed'`, h.ID())
}

func TestScheduleStartsFlow(t *testing.T) {
	type schedule = lanekeeper.Schedule[string]
	rt, pool := open(t)
	report := register(t, rt, "report", func(_ context.Context, text string) (string, error) { return text, nil })
	often := schedule{Name: "often", Cron: "@every 1s", Input: "sales"}
	daily := schedule{Name: "daily", Cron: "0 9 * * *", Timezone: "Europe/Madrid"}
	require.NoError(t, report.SetSchedules(t.Context(), often, daily))
	run(t, rt)
	pgtest.Until(t, pool, true, `
		select count(*) >= 2
		  from agent_executions
		 where flow = 'report'
		   and status = 'completed'
		   and result = '"sales"'`)

	next := pgtest.Value[time.Time](t, pool, `select next_run_at from agent_schedules where name = 'report/daily'`)
	require.NoError(t, report.SetSchedules(t.Context(), daily))
	pgtest.Equal(t, pool, "report/daily", `select string_agg(name, ',') from agent_schedules where flow = 'report'`)
	pgtest.Equal(t, pool, next, `select next_run_at from agent_schedules where flow = 'report'`)

	for want, schedules := range map[string][]schedule{
		"a name of its own":         {daily, daily},
		`got ""`:                    {{Cron: "@daily"}},
		"2 fields instead of 5":     {often, {Name: "odd", Cron: "at nine"}},
		"find time zone \"Madrid\"": {{Name: "odd", Cron: "@daily", Timezone: "Madrid"}},
	} {
		assert.ErrorContains(t, report.SetSchedules(t.Context(), schedules...), want)
	}
	var group errgroup.Group // two versions of the program start at the same time
	for _, names := range []string{"abc", "cd"} {
		var schedules []schedule
		for name := range strings.SplitSeq(names, "") {
			schedules = append(schedules, schedule{Name: name, Cron: "@daily"})
		}
		group.Go(func() error {
			for range 20 {
				if err := report.SetSchedules(t.Context(), schedules...); err != nil {
					return err
				}
			}
			return nil
		})
	}
	assert.NoError(t, group.Wait())
	names := pgtest.Value[string](t, pool, `select string_agg(right(name, 1), '' order by name) from agent_schedules`)
	assert.Truef(t, names == "abc" || names == "cd", "the schedules of neither: %s", names)
	require.NoError(t, report.SetSchedules(t.Context(), daily))

	limited := lanekeeper.Remote[string, string](rt, "report", lanekeeper.ProgressTimeout(time.Minute))
	assert.ErrorContains(t, limited.SetSchedules(t.Context(), daily), "the default MaxLostWorkers and ProgressTimeout")

	heartbeat := lanekeeper.Remote[string, string](rt, "heartbeat")
	assert.ErrorContains(t, heartbeat.SetSchedules(t.Context(), daily), "Lanekeeper's own")
	pgtest.Equal(t, pool, 1, `select count(*) from agent_schedules where flow = 'report'`)
	require.NoError(t, limited.SetSchedules(t.Context()))
	pgtest.Equal(t, pool, 0, `select count(*) from agent_schedules where flow = 'report'`)
}

func TestWaitTimesOut(t *testing.T) {
	rt, _ := open(t)
	late := register(t, rt, "late", func(ctx context.Context, _ struct{}) (string, error) {
		if err := lanekeeper.Sleep(ctx, "past", -time.Second); err != nil { // ends at once
			return "", err
		}
		return lanekeeper.WaitEvent[string](ctx, "never", "never", 20*time.Millisecond)
	})
	run(t, rt)
	h, err := late.Start(t.Context(), struct{}{})
	require.NoError(t, err)
	_, err = h.Wait(t.Context())
	failed, is := errors.AsType[*lanekeeper.FlowError](err)
	assert.Truef(t, is && failed.Status == "timeout", "got %v, want a timeout", err)
}

func TestStepRetriesBeforeRecordingError(t *testing.T) {
	rt, pool := open(t)
	calls := 0
	flaky := register(t, rt, "flaky", func(ctx context.Context, fails int) (string, error) {
		word, err := lanekeeper.Step(ctx, "call", func(context.Context) (string, error) {
			if calls++; calls <= fails {
				return "", fmt.Errorf("failure %d", calls)
			}
			return "done", nil
		}, lanekeeper.Retry(2, time.Millisecond))
		recorded, is := errors.AsType[*lanekeeper.StepError](err)
		if is {
			return recorded.Step + ": " + recorded.Message, nil
		}
		return word, err
	})
	run(t, rt)
	for fails, want := range map[int]string{2: "done", 9: "call: failure 3"} {
		calls = 0
		h, err := flaky.Start(t.Context(), fails)
		require.NoError(t, err)
		if got, err := h.Wait(t.Context()); err != nil || got != want || calls != 3 {
			t.Errorf("%d failures: %q after %d calls, %v; want %q after 3", fails, got, calls, err, want)
		}
	}
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_activity where status = 'error'`))
}

func TestStepTxRecordsStepWithEffect(t *testing.T) {
	rt, pool := open(t)
	pgtest.Exec(t, pool, `create table shop_orders (id text primary key, key text unique check (key <> ''))`)
	var mu sync.Mutex
	inside := 0
	book := register(t, rt, "book", func(ctx context.Context, id string) (string, error) {
		return lanekeeper.WithLane(ctx, "shop", time.Minute, func(ctx context.Context) (string, error) {
			mu.Lock()
			inside++
			alone := inside == 1
			mu.Unlock()
			defer func() { mu.Lock(); inside--; mu.Unlock() }()
			if !alone {
				return "", errors.New("another execution holds the lane, too")
			}
			return lanekeeper.StepTx(ctx, "insert", func(ctx context.Context, tx pgx.Tx) (string, error) {
				_, err := tx.Exec(ctx, `insert into shop_orders values ($1, $2)`, id, lanekeeper.StepKey(ctx))
				return id, err
			})
		})
	})
	run(t, rt)
	var handles []lanekeeper.Handle[string]
	for i := range 8 {
		h, err := book.Start(t.Context(), fmt.Sprint("order ", i))
		require.NoError(t, err)
		handles = append(handles, h)
	}
	for _, h := range handles {
		_, err := h.Wait(t.Context())
		assert.NoError(t, err)
	}
	assert.Equal(t, 8, pgtest.Value[int](t, pool, `select count(*) from shop_orders`))
}

func TestCalledChildBorrowsLane(t *testing.T) {
	rt, _ := open(t)
	locked := func(ctx context.Context, fn func(ctx context.Context) (string, error)) (string, error) {
		return lanekeeper.WithLane(ctx, "till", time.Second, fn)
	}
	child := register(t, rt, "child", func(ctx context.Context, _ struct{}) (string, error) {
		return locked(ctx, func(context.Context) (string, error) { return "counted", nil })
	})
	parent := register(t, rt, "parent", func(ctx context.Context, how string) (string, error) {
		return locked(ctx, func(ctx context.Context) (string, error) {
			if how == "call" {
				return child.Call(ctx, "count", struct{}{})
			}
			c, err := child.StartChild(ctx, "count", struct{}{})
			if err != nil {
				return "", err
			}
			return c.Wait(ctx)
		})
	})
	run(t, rt)
	h, err := parent.Start(t.Context(), "call")
	require.NoError(t, err)
	got, err := h.Wait(t.Context())
	assert.Truef(t, err == nil && got == "counted", "%q, %v", got, err)
	h, err = parent.Start(t.Context(), "start")
	require.NoError(t, err)
	_, err = h.Wait(t.Context())
	assert.ErrorContains(t, err, "lane busy")
}

func TestStartTxFollowsTransaction(t *testing.T) {
	rt, pool := open(t)
	echo := register(t, rt, "echo", func(_ context.Context, text string) (string, error) { return text, nil })
	run(t, rt)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	gone, err := echo.StartTx(t.Context(), tx, "gone")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = gone.Wait(t.Context())
	assert.ErrorIs(t, err, lanekeeper.ErrNotFound, "a start that was rolled back")
	tx, err = pool.Begin(t.Context())
	require.NoError(t, err)
	kept, err := echo.StartTx(t.Context(), tx, "kept")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	got, err := kept.Wait(t.Context())
	assert.Truef(t, err == nil && got == "kept", "%q, %v", got, err)
}

func TestUnstorableTextLeavesTransactionIntact(t *testing.T) {
	rt, pool := open(t)
	echo := register(t, rt, "echo", func(_ context.Context, text string) (string, error) { return text, nil })
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	const (
		inValue = "PostgreSQL cannot store the character U+0000: remove it from the value"
		inKey   = "PostgreSQL cannot store the character U+0000 or invalid UTF-8: remove it from the key or id"
	)
	_, err = echo.StartTx(t.Context(), tx, "a\x00b")
	assert.ErrorContains(t, err, inValue)
	_, err = echo.StartTx(t.Context(), tx, "ab", lanekeeper.Key("a\x00b"))
	assert.ErrorContains(t, err, inKey)
	_, err = echo.StartTx(t.Context(), tx, "ab", lanekeeper.Key("a\xff"))
	assert.ErrorContains(t, err, inKey)
	_, err = echo.StartTx(t.Context(), tx, `a\u0000b`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	assert.ErrorContains(t, rt.SendEvent(t.Context(), "a\x00b", 1, ""), inKey)
	assert.ErrorContains(t, rt.SendEvent(t.Context(), "ab", "a\x00b", ""), inValue)
	assert.ErrorContains(t, rt.SendEvent(t.Context(), "ab", 1, "a\x00b"), inKey)
}

func TestValueOver16MiBIsRefused(t *testing.T) {
	rt, _ := open(t)
	echo := register(t, rt, "echo", func(_ context.Context, text string) (string, error) { return text, nil })
	large := strings.Repeat("x", 16<<20)
	_, err := echo.Start(t.Context(), large)
	assert.ErrorContains(t, err, "start flow echo: the value has 16777218 bytes, more than 16 MiB")
	assert.ErrorContains(t, rt.SendEvent(t.Context(), "k", large, ""), "more than 16 MiB")
}

func TestHandleWaitsAndCancels(t *testing.T) {
	rt, _ := open(t)
	sleeper := register(t, rt, "sleeper", func(ctx context.Context, _ string) (string, error) {
		return "", lanekeeper.Sleep(ctx, "long", time.Hour)
	})
	run(t, rt)
	h, err := sleeper.Start(t.Context(), "")
	require.NoError(t, err)
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	_, err = h.Wait(short)
	assert.ErrorIs(t, err, context.DeadlineExceeded, "a wait of 50 ms")
	require.NoError(t, h.Cancel(t.Context(), "not needed\x00 any more"))
	_, err = h.Wait(t.Context())
	failed, is := errors.AsType[*lanekeeper.FlowError](err)
	assert.Truef(t, is && failed.Status == "cancelled" && failed.Message == "not needed any more", "got %v", err)
}

// A program that only starts flows shares the database with a program that runs them.
func TestOtherProgramRunsFlow(t *testing.T) {
	rt, pool := open(t)
	register(t, rt, "echo", func(_ context.Context, text string) (string, error) { return text, nil })
	run(t, rt)
	client, err := lanekeeper.Open(t.Context(), pool)
	require.NoError(t, err)
	h, err := lanekeeper.Remote[string, string](client, "echo", lanekeeper.ProgressTimeout(time.Millisecond)).Start(
		t.Context(), "hello")
	require.NoError(t, err)
	got, err := h.Wait(t.Context())
	assert.Truef(t, err == nil && got == "hello", "%q, %v", got, err)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select progress_seconds from agent_executions`), "rounded up")
}

func TestMisuseReturnsErrors(t *testing.T) {
	rt, _ := open(t)
	echo := register(t, rt, "echo", func(_ context.Context, text string) (string, error) { return text, nil })
	nested := register(t, rt, "nested", func(ctx context.Context, _ struct{}) (string, error) {
		h, err := echo.Start(ctx, "x")
		return h.ID(), err
	})
	_, duplicate := lanekeeper.Register(rt, "echo", func(context.Context, string) (string, error) { return "", nil })
	_, noFunction := lanekeeper.Register[int, int](rt, "nobody", nil)
	_, unprintable := lanekeeper.Register(rt, "a\x00b", func(context.Context, string) (string, error) { return "", nil })
	_, badPriority := echo.Start(t.Context(), "x", lanekeeper.Priority(9))
	_, badLimit := lanekeeper.Remote[string, string](rt, "echo", lanekeeper.MaxLostWorkers(-1)).Start(t.Context(), "x")
	_, reservedStart := lanekeeper.Remote[int, int](rt, "heartbeat").Start(t.Context(), 1)
	_, reservedName := lanekeeper.Register(rt, "heartbeat",
		func(context.Context, string) (string, error) { return "", nil })
	run(t, rt)
	h, err := lanekeeper.Remote[int, string](rt, "echo").Start(t.Context(), 7)
	require.NoError(t, err)
	_, mistyped := h.Wait(t.Context())
	n, err := nested.Start(t.Context(), struct{}{})
	require.NoError(t, err)
	_, inside := n.Wait(t.Context())
	_, late := lanekeeper.Register(rt, "late", func(context.Context, string) (string, error) { return "", nil })
	_, unknown := echo.Handle("00000000-0000-7000-8000-000000000000").Wait(t.Context())
	for want, err := range map[string]error{
		"registered already":                     duplicate,
		"Lanekeeper's own":                       reservedName,
		"starts it itself":                       reservedStart,
		"a function is required":                 noFunction,
		"without NUL":                            unprintable,
		"priority must be 1 to 4, got 9":         badPriority,
		"lost workers must be 1 or more, got -1": badLimit,
		`send event "": a key is required`:       rt.SendEvent(t.Context(), "", 1, ""),
		"decode the input of flow echo":          mistyped,
		"use Call":                               inside,
		"register before Run":                    late,
		"no such execution":                      unknown,
		"runs already":                           rt.Run(t.Context()),
	} {
		assert.ErrorContains(t, err, want)
	}
	assert.Equal(t, "execution 1 of flow echo: cancelled",
		(&lanekeeper.FlowError{Flow: "echo", ID: "1", Status: "cancelled"}).Error())
}

func TestReservedFlowHasNoParent(t *testing.T) {
	rt, pool := open(t)
	heartbeat := lanekeeper.Remote[int, int](rt, "heartbeat")
	call := register(t, rt, "call", func(ctx context.Context, in int) (int, error) {
		return heartbeat.Call(ctx, "beat", in)
	})
	start := register(t, rt, "start", func(ctx context.Context, in int) (string, error) {
		child, err := heartbeat.StartChild(ctx, "beat", in)
		return child.ID(), err
	})
	run(t, rt)
	called, err := call.Start(t.Context(), 1)
	require.NoError(t, err)
	_, err = called.Wait(t.Context())
	assert.ErrorContains(t, err, "starts it itself")
	started, err := start.Start(t.Context(), 1)
	require.NoError(t, err)
	_, err = started.Wait(t.Context())
	assert.ErrorContains(t, err, "starts it itself")
	n := pgtest.Value[int](t, pool, `select count(*) from agent_executions where flow = 'heartbeat'`)
	assert.Equal(t, 0, n, "heartbeats")
}

func TestOpenRequiresCurrentSchema(t *testing.T) {
	pool := pgtest.Empty(t)
	_, err := lanekeeper.Open(t.Context(), pool)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "lanekeeper.Migrate"), "an empty database: %v", err)
	require.NoError(t, lanekeeper.Migrate(t.Context(), pool))
	_, err = lanekeeper.Open(t.Context(), pool)
	assert.NoError(t, err)
	_, err = lanekeeper.Open(t.Context(), pgtest.Pool(t, pgtest.EmptyURL(t), postgres.Options{MaxConns: 1}))
	assert.ErrorContains(t, err, "set MaxConns")
	pool.Close()
	_, err = lanekeeper.Open(t.Context(), pool)
	assert.Truef(t, err != nil && !strings.Contains(err.Error(), "igrate"), "a closed pool: %v", err)
}

// A FailNow of a test within a flow ends its goroutine without an error or a panic. The one worker is free for the next
// flow.
func TestGoexitFailsFlow(t *testing.T) {
	var log testkit.Log
	rt, _ := open(t, lanekeeper.WithWorkers(1), lanekeeper.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	leave := func(context.Context) (string, error) { runtime.Goexit(); return "", nil }
	flow := register(t, rt, "flow", func(ctx context.Context, where string) (string, error) {
		switch where {
		case "flow":
			return leave(ctx)
		case "step":
			return lanekeeper.Step(ctx, where, leave)
		case "transaction":
			return lanekeeper.StepTx(ctx, where, func(ctx context.Context, _ pgx.Tx) (string, error) { return leave(ctx) })
		case "lane":
			return lanekeeper.WithLane(ctx, where, time.Minute, leave)
		}
		return where, nil
	})
	run(t, rt)
	for _, where := range []string{"flow", "step", "transaction", "lane", "nowhere"} {
		h, err := flow.Start(t.Context(), where)
		require.NoError(t, err)
		got, err := h.Wait(t.Context())
		if where == "nowhere" {
			assert.Truef(t, err == nil && got == where, "%q, %v", got, err)
		} else {
			assert.ErrorContains(t, err, "failed: flow flow ended its goroutine")
		}
		pgtest.Eventually(t, func() bool { // a line of the program's own logger names the run
			return strings.Contains(log.String(), "trace_id="+h.TraceID()+" execution_id="+h.ID())
		}, "no line names the run")
	}
}

// The program of the README dies in its second step, and continues there after a restart.
func TestReadmeProgramSurvivesKill(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "shipping")
	out, err := exec.Command("go", "build", "-o", binary, "./examples/shipping").CombinedOutput()
	require.NoError(t, err, out)
	pool := pgtest.DB(t)
	program := func() (*exec.Cmd, *lines) {
		stdout := &lines{news: make(chan struct{}, 1)}
		p := exec.CommandContext(t.Context(), binary)
		p.Env = append(os.Environ(), "DATABASE_URL="+pool.Config().ConnString())
		p.Stdout, p.Stderr = stdout, os.Stderr
		require.NoError(t, p.Start())
		return p, stdout
	}
	first, stdout := program()
	stdout.until(t, "pack")
	require.NoError(t, first.Process.Kill())
	first.Wait() // its error is the kill
	second, more := program()
	more.until(t, "order-7 is on its way")
	require.NoError(t, second.Process.Kill())
	second.Wait()
	before, after := strings.Fields(stdout.String()), more.String()
	packKey := before[len(before)-1]
	assert.Contains(t, after, "pack order-7 "+packKey, "send order-7 ")
	assert.Truef(t, !strings.Contains(after, "charge"), "the recorded step runs again: %s", after)
}

// lines is the output of a program.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
	news chan struct{}
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.news <- struct{}{}:
	default:
	}
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// until waits for a text.
func (l *lines) until(t *testing.T, text string) {
	t.Helper()
	for limit := time.After(2 * time.Minute); !strings.Contains(l.String(), text); {
		select {
		case <-l.news:
		case <-limit:
			t.Fatalf("no %q in %q", text, l)
		}
	}
}
