package lanes_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// hears is a listener that hears of lanes.
func hears(t *testing.T, db *pgxpool.Pool) *postgres.Listener {
	t.Helper()
	listener := postgres.NewListener(pgtest.Dialer(t, db), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := listener.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	ready, stop := listener.Subscribe("agent_lanes")
	t.Cleanup(stop)
	select {
	case <-ready:
	case <-time.After(soon):
		t.Fatal("the listener does not listen")
	}
	return listener
}

// listening is a keeper that is woken by notifications.
func listening(t *testing.T, db *pgxpool.Pool) *lanes.Keeper {
	t.Helper()
	k := lanes.NewKeeper(db, lanes.Options{Listener: hears(t, db)})
	run(t, k)
	return k
}

// queued waits until n waiters stand in the queue of lane.
func queued(t *testing.T, db postgres.DB, lane string, n int) {
	t.Helper()
	pgtest.Eventually(t, soon, func() bool {
		return get[int](t, db, `select count(*) from agent_lock_waiters where lane = $1`, lane) == n
	}, "waiters in the queue")
}

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listening(t, db)
	l, err := k.Acquire(t.Context(), "x")
	acquired(t, l, err)

	const n = 6
	served := make(chan int, n)
	var waiting sync.WaitGroup
	for i := range n {
		waiting.Go(func() {
			l, err := k.AcquireWait(t.Context(), "x")
			if err != nil {
				t.Error(err)
				return
			}
			served <- i
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		queued(t, db, "x", i+1)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
	close(served)
	if order := slices.Collect(values(served)); !slices.IsSorted(order) || len(order) != n {
		t.Errorf("served in the order %v", order)
	}
	if left := get[int](t, db, `select count(*) from agent_lock_waiters`); left != 0 {
		t.Errorf("%d places are left in the queue", left)
	}
}

func TestAReleaseWakesTheWaiterAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listening(t, db)
	onceWithin(t, 600*time.Millisecond, func() time.Duration {
		l, err := k.Acquire(t.Context(), "x")
		acquired(t, l, err)
		got := make(chan error, 1)
		go func() {
			l, err := k.AcquireWait(t.Context(), "x")
			if err == nil {
				err = l.Release(t.Context())
			}
			got <- err
		}()
		queued(t, db, "x", 1)
		place := func() time.Time { return get[time.Time](t, db, `select expires_at from agent_lock_waiters`) }
		first := place()
		pgtest.Eventually(t, soon, func() bool { return place().After(first) }, "the second look")
		start := time.Now() // the third is due in 750 ms or more
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
		return time.Since(start)
	})
}

func values[T any](c <-chan T) func(func(T) bool) {
	return func(yield func(T) bool) {
		for v := range c {
			if !yield(v) {
				return
			}
		}
	}
}

func TestWaitersPollWithoutNotifications(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	mustTry(t, db, "x", "a run that dies", 3)
	ends := get[time.Time](t, db, `select expires_at from agent_locks`)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	l, err := k.AcquireWait(ctx, "x")
	acquired(t, l, err)
	if got := l.ExpiresAt().Add(-get[time.Duration](t, db, `select ttl_seconds * 1000000000::bigint from agent_locks`)); got.Before(ends) {
		t.Errorf("got the lane of a dead holder at %s, want the end of its lease, %s", got, ends)
	}
	log.want(t, 1, "level=WARN", `msg="lane busy"`, `holder="a run that dies"`)
	log.want(t, 1, `msg="lane stale, clearing"`)
}

func TestNobodyOvertakesAWaiter(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "x", "a", 60)
	for _, waiter := range []string{"b", "c"} {
		if get[bool](t, db, `select acquired from await_agent_lock('x', $1)`, waiter) {
			t.Fatal("granted twice")
		}
	}
	get[bool](t, db, `select release_agent_lock('x', 'a')`)
	if g := try(t, db, "x", "d", 60); g.acquired || g.holder != "b" {
		t.Errorf("a newcomer got %+v, want busy by b", g)
	}
	if get[bool](t, db, `select acquired from await_agent_lock('x', 'c')`) {
		t.Error("c overtook b")
	}
	if !get[bool](t, db, `select acquired from await_agent_lock('x', 'b')`) {
		t.Error("b did not get the lane in its turn")
	}
	get[bool](t, db, `select release_agent_lock('x', 'b')`)
	exec(t, db, `select leave_agent_lock_queue('x', 'c')`)
	mustTry(t, db, "x", "d", 60)
}

// Who waited and then takes the lane by a plain try is not waited for when it has given it back.
func TestATryEndsTheWaitOfItsOwner(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "x", "a", 60)
	get[bool](t, db, `select acquired from await_agent_lock('x', 'b', 60, 3600)`)
	get[bool](t, db, `select acquired from await_agent_lock('x', 'c', 60, 3600)`)
	get[bool](t, db, `select release_agent_lock('x', 'a')`)
	mustTry(t, db, "x", "b", 60)
	get[bool](t, db, `select release_agent_lock('x', 'b')`)
	if g := try(t, db, "x", "d", 60); g.acquired || g.holder != "c" {
		t.Errorf("a newcomer got %+v, want busy by c, who waits", g)
	}
	mustTry(t, db, "x", "c", 60)
	get[bool](t, db, `select release_agent_lock('x', 'c')`)
	mustTry(t, db, "x", "d", 60)
}

func TestAnAbandonedWaiterBlocksOnlyBriefly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "x", "a", 60)
	get[bool](t, db, `select acquired from await_agent_lock('x', 'killed', 60, 5)`)
	get[bool](t, db, `select acquired from await_agent_lock('x', 'patient', 60, 60)`)
	get[bool](t, db, `select release_agent_lock('x', 'a')`)
	if g := try(t, db, "x", "patient", 60); g.acquired {
		t.Error("overtook a waiter that was there a moment ago")
	}
	pgtest.Eventually(t, soon, func() bool { return try(t, db, "x", "patient", 60).acquired }, "the next in the queue is served")
}

func TestAReleaseNotifiesOnlyWhenSomebodyWaits(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn, err := pgtest.Dialer(t, db)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	exec(t, conn, `listen agent_lanes`)
	for _, lane := range []string{"lonely", "wanted"} {
		mustTry(t, db, lane, "a", 60)
		if lane == "wanted" {
			get[bool](t, db, `select acquired from await_agent_lock($1, 'b')`, lane)
		}
		get[bool](t, db, `select release_agent_lock($1, 'a')`, lane)
	}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	if err != nil || n.Payload != "wanted" {
		t.Errorf("notification %+v, %v; want only for the lane that is waited for", n, err)
	}
}

func TestGivingUpLeavesTheQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := keeper(t, db)
	l, err := k.Acquire(t.Context(), "x")
	acquired(t, l, err)

	_, err = k.AcquireWait(t.Context(), "x", lanes.WithPatience(300*time.Millisecond))
	if busy, ok := errors.AsType[*lanes.BusyError](err); !ok || busy.Holder != l.Owner().String() {
		t.Errorf("out of patience: %v, want the holder", err)
	}
	queued(t, db, "x", 0)

	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := make(chan error, 1)
	go func() {
		_, err := k.AcquireWait(ctx, "x")
		gaveUp <- err
	}()
	queued(t, db, "x", 1)
	why := errors.New("shutting down")
	cancel(why)
	if err := <-gaveUp; !errors.Is(err, why) && !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	queued(t, db, "x", 0)
}

// Much that happens in other lanes, or is handed to others in this one, makes nobody look, who would write each time.
func TestOtherLanesWakeNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	listener := hears(t, db)
	k := lanes.NewKeeper(w, lanes.Options{Listener: listener})
	mustTry(t, db, "x", "a", 600)
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if _, err := k.AcquireWait(ctx, "x"); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	settled(t, db, "x")
	heard, stop := listener.Subscribe("agent_lanes")
	defer stop()
	before, began := w.count("acquire_or_enqueue_agent_lock"), time.Now()
	for range 30 {
		exec(t, db, `
			select pg_notify('agent_lanes', concat_ws(E'\t', 'x', 'b', n, 1)), pg_notify('agent_lanes', 'y' || n) from generate_series(1, 20) n`)
		for payload := ""; payload != "y20"; {
			exec(t, db, `select pg_notify('agent_lanes', 'y20')`)
			payload = <-heard
		}
	}
	looks, most := w.count("acquire_or_enqueue_agent_lock")-before, int64(2+time.Since(began)/(750*time.Millisecond))
	if looks > most {
		t.Errorf("the waiter looked %d times in %s, want %d at most", looks, time.Since(began), most)
	}
	cancel()
	waiting.Wait()
}
