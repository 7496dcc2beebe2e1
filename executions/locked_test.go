package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// leftOpen begins a transaction, as a client that leaves it open does, and runs a statement in it.
func leftOpen(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) pgx.Tx {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, tx, sql, args...)
	return tx
}

// measure has callers do something n times each, and returns how long the slowest took of all but one in a hundred.
func measure(t *testing.T, callers, n int, do func(caller, i int) error) time.Duration {
	t.Helper()
	var mu sync.Mutex
	var took []time.Duration
	var group errgroup.Group
	for caller := range callers {
		group.Go(func() error {
			for i := range n {
				began := time.Now()
				if err := do(caller, i); err != nil {
					return err
				}
				mu.Lock()
				took = append(took, time.Since(began))
				mu.Unlock()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

// undisturbed fails where the slowest take longer than 100 ms, which is what is promised, and four times as long as
// they did by themselves: a machine on which much else runs is slow in both measurements. What it is about would cost
// as much as the transaction is open.
func undisturbed(t *testing.T, measured func(round string) time.Duration, calm time.Duration) {
	t.Helper()
	const promised, tries = 100 * time.Millisecond, 3
	for try := 1; ; try++ {
		held := measured(fmt.Sprint("held ", try))
		t.Logf("p99 %s, and %s before", held, calm)
		if held <= max(promised, 4*calm) {
			return
		}
		if try == tries { // something else may have taken the machine during one of them, and hardly during each
			t.Errorf("p99 is %s, and was %s before", held, calm)
			return
		}
	}
}

func TestAnEventInAnOpenTransactionDelaysNoOther(t *testing.T) {
	t.Parallel()
	const callers, each, repeats = 12, 150, 24
	for name, sql := range map[string]string{
		"id":     `select deliver_agent_event('EVENT_COMPLETED', 'somewhere', '{}', 'held')`,
		"insert": `insert into agent_events (event, key, external_id) values ('EVENT_COMPLETED', 'somewhere', 'held')`,
		"key":    `select deliver_agent_event('EVENT_COMPLETED', 'key', '{}')`,
		"waiter": `select from agent_executions where waiting_key = 'key' for update`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				_, err := executions.Wait(ctx, "wait", executions.Event("key", 0))
				return executions.Result{}, err
			}), func(o *executions.Options) { o.LeaseTTL = time.Minute })
			until(t, pool, p.begin(t, "flow"), executions.Waiting)
			deliver := func(round string) time.Duration {
				return measure(t, callers, each, func(caller, i int) error {
					key := fmt.Sprint(round, " ", caller, " ", i)
					_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", key, nil, key)
					return err
				})
			}
			calm := deliver("calm")
			tx := leftOpen(t, pool, sql)
			var repeated errgroup.Group
			for range repeats {
				repeated.Go(func() error {
					_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "key", nil, "held")
					return err
				})
			}
			pgtest.Eventually(t, patience, func() bool { return locksWanted(t, pool) > 0 }, "the repeats meet the transaction")
			undisturbed(t, deliver, calm)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := repeated.Wait(); err != nil {
				t.Error(err)
			}
			if n := value[int](t, pool, `select count(*) from agent_events where external_id = 'held'`); n != 1 {
				t.Errorf("the event is there %d times", n)
			}
		})
	}
}

// locksWanted is how many sessions of this database wait for a lock.
func locksWanted(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return value[int](t, pool, `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()`)
}

// Whichever pool a caller has, events and starts go over the engine's, which shares statements and bounds waits.
func TestEventsAndStartsOverAnotherPoolUseTheEnginesOwn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }))
	other, err := postgres.Reserve(t.Context(), pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	only, err := other.Acquire(t.Context()) // whoever wants a connection of it waits for ever
	if err != nil {
		t.Fatal(err)
	}
	defer only.Release()
	if _, err := p.Deliver(t.Context(), other, "EVENT_COMPLETED", "key", nil, "id"); err != nil {
		t.Error(err)
	}
	for _, key := range []string{"", "key"} {
		x, _, err := p.Start(t.Context(), other, executions.Spec{Flow: "flow", Surface: trace.Flow, DedupeKey: key})
		if err != nil {
			t.Fatal(err)
		}
		until(t, pool, x.ID, executions.Completed)
	}
}

// A caller who does not want to wait for an open transaction is told what is held, and by whom.
func TestACallerSaysHowLongItWaitsForAnOpenTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	engines := map[string]*process{
		"works": start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil })),
		"calls": prepare(t, pool, nil),
	}
	tx := leftOpen(t, pool, `
		with e as (insert into agent_events (event, key, external_id) values ('EVENT_COMPLETED', 'somewhere', 'held'))
		insert into agent_executions (trace_id, surface, flow, dedupe_key) values ('fl_1', 'flow', 'other', 'held')`)
	exec(t, tx, `set local application_name = 'clumsy'`)
	for name, p := range engines {
		ctx := executions.WithLockPatience(t.Context(), 600*time.Millisecond)
		_, err := p.Deliver(ctx, pool, "EVENT_COMPLETED", "key", nil, "held")
		if locked, is := errors.AsType[*postgres.LockedError](err); !is || locked.What != `event id "held"` || !strings.Contains(locked.Holders, "clumsy") {
			t.Errorf("%s: event: %v", name, err)
		}
		_, _, err = p.Start(ctx, pool, executions.Spec{Flow: "flow", Surface: trace.Flow, DedupeKey: "held"})
		if locked, is := errors.AsType[*postgres.LockedError](err); !is || locked.What != `idempotency key "held"` || !strings.Contains(locked.Holders, "clumsy") {
			t.Errorf("%s: start: %v", name, err)
		}
	}
}

func TestADedupeKeyInAnOpenTransactionDelaysNoOtherStart(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }),
		func(o *executions.Options) { o.LeaseTTL = time.Minute })
	begin := func(round string) time.Duration {
		return measure(t, 12, 60, func(caller, i int) error {
			_, _, err := p.Start(t.Context(), pool, executions.Spec{
				Flow: "flow", Surface: trace.Flow, DedupeKey: fmt.Sprint(round, caller, " ", i),
			})
			return err
		})
	}
	calm := begin("calm")
	tx := leftOpen(t, pool, `insert into agent_executions (trace_id, surface, flow, dedupe_key) values ('fl_1', 'flow', 'other', 'held')`)
	var group errgroup.Group
	for i := range 24 {
		group.Go(func() (err error) {
			s := executions.Spec{Flow: "flow", Surface: trace.Flow, DedupeKey: "held"}
			if i%2 == 0 {
				_, err = p.RunHere(t.Context(), s)
			} else {
				_, _, err = p.Start(t.Context(), pool, s)
			}
			return err
		})
	}
	pgtest.Eventually(t, patience, func() bool { return locksWanted(t, pool) > 0 }, "they meet the transaction")
	undisturbed(t, begin, calm)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if n := value[int](t, pool, `select count(*) from agent_executions where dedupe_key = 'held'`); n != 1 {
		t.Errorf("%d executions have the key", n)
	}
}

// Runs whose rows somebody has locked do not take the connections of others.
func TestExecutionsLockedInAnOpenTransactionDelayNoOther(t *testing.T) {
	t.Parallel()
	const runs = 30
	pool := pgtest.DB(t)
	gates := make(chan struct{})
	p := start(t, pool, map[string]executions.Func{
		"held": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			if _, err := executions.Step(ctx, "wait", func(context.Context) (int, error) { <-gates; return 1, nil }); err != nil {
				return executions.Result{}, err
			}
			_, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}}, func(context.Context, *executions.Effect) (int, error) { return 1, nil })
			return executions.Result{}, err
		},
		"free": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			_, err := executions.Step(ctx, "one", func(context.Context) (int, error) { return 1, nil })
			return executions.Result{}, err
		},
	}, func(o *executions.Options) { o.LeaseTTL, o.Workers = time.Minute, 2*runs })
	run := func(string) time.Duration {
		return measure(t, 4, 300, func(int, int) error {
			_, err := p.RunHere(t.Context(), executions.Spec{Flow: "free", Surface: trace.Flow})
			return err
		})
	}
	var ids []string
	for range runs {
		ids = append(ids, p.begin(t, "held"))
	}
	for _, id := range ids {
		until(t, pool, id, executions.Running)
	}
	calm := run("calm")
	tx := leftOpen(t, pool, `select from agent_executions where id = any (@ids::uuid[]) for update`, postgres.Strict{"ids": ids})
	close(gates)
	pgtest.Eventually(t, patience, func() bool { return locksWanted(t, pool) > 0 }, "they meet the transaction")
	undisturbed(t, run, calm)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		until(t, pool, id, executions.Completed)
	}
}
