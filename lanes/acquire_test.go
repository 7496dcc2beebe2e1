package lanes_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// newListener returns a listener for notifications of lanes.
func newListener(t *testing.T, db *pgxpool.Pool) *postgres.Listener {
	t.Helper()
	listener := postgres.NewListener(pgtest.Dialer(t, db), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		assert.NoError(t, listener.Run(ctx))
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	ready, stop := listener.Subscribe("agent_lanes")
	t.Cleanup(stop)
	testkit.Receive(t, ready)
	return listener
}

// listeningKeeper returns a keeper that notifications wake.
func listeningKeeper(t *testing.T, db *pgxpool.Pool) *lanes.Keeper {
	t.Helper()
	k := lanes.NewKeeper(db, lanes.Options{Listener: newListener(t, db)})
	runKeeper(t, k)
	return k
}

// awaitQueueLength waits until a lane's queue has n waiters.
func awaitQueueLength(t *testing.T, db postgres.DB, lane string, n int) {
	t.Helper()
	pgtest.Until(t, db, n, `select count(*) from agent_lock_waiters where lane = $1`, lane)
}

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listeningKeeper(t, db)
	l := acquireLane(t, k, "x")

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
			assert.NoError(t, l.Release(t.Context()))
		})
		awaitQueueLength(t, db, "x", i+1)
	}
	require.NoError(t, l.Release(t.Context()))
	waiting.Wait()
	close(served)
	order := slices.Collect(drain(served))
	assert.Truef(t, slices.IsSorted(order) && len(order) == n, "served in the order %v", order)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_lock_waiters`))
}

func TestReleaseWakesWaiterAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listeningKeeper(t, db)
	bestOf(t, 600*time.Millisecond, func() time.Duration {
		l := acquireLane(t, k, "x")
		got := make(chan error, 1)
		go func() {
			l, err := k.AcquireWait(t.Context(), "x")
			if err == nil {
				err = l.Release(t.Context())
			}
			got <- err
		}()
		awaitQueueLength(t, db, "x", 1)
		place := func() time.Time { return pgtest.Value[time.Time](t, db, `select expires_at from agent_lock_waiters`) }
		first := place()
		pgtest.Eventually(t, func() bool { return place().After(first) }, "the second look")
		start := time.Now() // the third is due in 750 ms or more
		require.NoError(t, l.Release(t.Context()))
		assert.NoError(t, <-got)
		return time.Since(start)
	})
}

func drain[T any](c <-chan T) func(func(T) bool) {
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
	k, log := newKeeper(t, db)
	mustAcquire(t, db, "x", "a run that dies", 8)
	ends := pgtest.Value[time.Time](t, db, `select expires_at from agent_locks`)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	l, err := k.AcquireWait(ctx, "x")
	mustAcquired(t, l, err)
	got := l.ExpiresAt().Add(-pgtest.Value[time.Duration](t, db,
		`select ttl_seconds * 1000000000::bigint from agent_locks`))
	assert.Truef(t, !got.Before(ends), "got the lane of a dead holder at %s, want the end of its lease, %s", got, ends)
	log.want(t, 1, "level=WARN", `msg="lane busy"`, `holder="a run that dies"`)
	log.want(t, 1, `msg="lane stale, clearing"`)
}

func TestNewcomerDoesNotOvertakeWaiter(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "x", "a", 60)
	for _, waiter := range []string{"b", "c"} {
		require.True(t, !pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', $1)`, waiter), "granted twice")
	}
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'a')`)
	g := tryAcquire(t, db, "x", "d", 60)
	assert.Truef(t, !g.acquired && g.holder == "b", "a newcomer got %+v, want busy by b", g)
	assert.True(t, !pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'c')`), "c overtook b")
	assert.True(t, pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'b')`),
		"b did not get the lane in its turn")
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'b')`)
	pgtest.Exec(t, db, `select leave_agent_lock_queue('x', 'c')`)
	mustAcquire(t, db, "x", "d", 60)
}

// A waiter that acquires the lane with a plain try has no place in the queue after its release.
func TestAcquireRemovesQueueEntry(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "x", "a", 60)
	pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'b', 60, 3600)`)
	pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'c', 60, 3600)`)
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'a')`)
	mustAcquire(t, db, "x", "b", 60)
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'b')`)
	g := tryAcquire(t, db, "x", "d", 60)
	assert.Truef(t, !g.acquired && g.holder == "c", "a newcomer got %+v, want busy by c, which waits", g)
	mustAcquire(t, db, "x", "c", 60)
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'c')`)
	mustAcquire(t, db, "x", "d", 60)
}

func TestAbandonedWaiterBlocksBriefly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "x", "a", 60)
	pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'killed', 60, 5)`)
	pgtest.Value[bool](t, db, `select acquired from await_agent_lock('x', 'patient', 60, 60)`)
	pgtest.Value[bool](t, db, `select release_agent_lock('x', 'a')`)
	assert.True(t, !tryAcquire(t, db, "x", "patient", 60).acquired, "overtook a waiter that was there a moment ago")
	pgtest.Eventually(t, func() bool { return tryAcquire(t, db, "x", "patient", 60).acquired },
		"the next in the queue is served")
}

func TestReleaseNotifiesOnlyWithWaiter(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn, err := pgtest.Dialer(t, db)(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	pgtest.Exec(t, conn, `listen agent_lanes`)
	for _, lane := range []string{"lonely", "wanted"} {
		mustAcquire(t, db, lane, "a", 60)
		if lane == "wanted" {
			pgtest.Value[bool](t, db, `select acquired from await_agent_lock($1, 'b')`, lane)
		}
		pgtest.Value[bool](t, db, `select release_agent_lock($1, 'a')`, lane)
	}
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	assert.Truef(t, err == nil && n.Payload == "wanted",
		"notification %+v, %v; want only for the lane that is waited for", n, err)
}

func TestTimeoutOrCancelLeavesQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	l := acquireLane(t, k, "x")

	_, err := k.AcquireWait(t.Context(), "x", lanes.WithTimeout(300*time.Millisecond))
	busy, ok := errors.AsType[*lanes.BusyError](err)
	assert.Truef(t, ok && busy.Holder == l.Owner().String(), "out of patience: %v, want the holder", err)
	awaitQueueLength(t, db, "x", 0)

	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := make(chan error, 1)
	go func() {
		_, err := k.AcquireWait(ctx, "x")
		gaveUp <- err
	}()
	awaitQueueLength(t, db, "x", 1)
	why := errors.New("shutting down")
	cancel(why)
	err = <-gaveUp
	assert.Truef(t, errors.Is(err, why) || errors.Is(err, context.Canceled), "cancelled: %v", err)
	awaitQueueLength(t, db, "x", 0)
}

// Events of other lanes, and handovers to other owners, cause no attempt: an attempt writes.
func TestUnrelatedNotificationsCauseNoAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	listener := newListener(t, db)
	k := lanes.NewKeeper(w, lanes.Options{Listener: listener})
	mustAcquire(t, db, "x", "a", 600)
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		_, err := k.AcquireWait(ctx, "x")
		assert.ErrorIs(t, err, context.Canceled)
	})
	awaitSecondPoll(t, db, "x")
	heard, stop := listener.Subscribe("agent_lanes")
	defer stop()
	before, began := w.count("acquire_or_enqueue_agent_lock"), time.Now()
	for range 30 {
		pgtest.Exec(t, db, `
			select pg_notify('agent_lanes', concat_ws(E'\t', 'x', 'b', n, 1)), pg_notify('agent_lanes', 'y' || n)
			  from generate_series(1, 20) n`)
		for payload := ""; payload != "y20"; {
			pgtest.Exec(t, db, `select pg_notify('agent_lanes', 'y20')`)
			payload = <-heard
		}
	}
	looks, most := w.count("acquire_or_enqueue_agent_lock")-before, int64(2+time.Since(began)/(750*time.Millisecond))
	assert.Truef(t, looks <= most, "the waiter looked %d times in %s, want %d at most", looks, time.Since(began), most)
	cancel()
	waiting.Wait()
}

// measureWAL returns the number of records and bytes of WAL that a query writes, including the functions that it calls.
func measureWAL(t testing.TB, db postgres.DB, query string) (records, bytes int64) {
	t.Helper()
	var plans []struct {
		Plan struct {
			Records int64 `json:"WAL Records"`
			Bytes   int64 `json:"WAL Bytes"`
		}
	}
	text := pgtest.Value[string](t, db, `explain (analyze, wal, costs off, timing off, summary off, format json) `+query)
	err := json.Unmarshal([]byte(text), &plans)
	require.Truef(t, err == nil && len(plans) == 1, "%v: %s", err, text)
	return plans[0].Plan.Records, plans[0].Plan.Bytes
}

// A failed try is a read: the server writes nothing for any number of tries.
func TestFailedAcquireWritesNoWAL(t *testing.T) {
	t.Parallel()
	const tries = 200
	db := pgtest.DB(t)
	mustAcquire(t, db, "held", "holder", 3600)
	mustAcquire(t, db, "promised", "holder", 3600)
	pgtest.Exec(t, db, `select await_agent_lock('promised', 'first', 300, 3600)`)
	pgtest.Exec(t, db, `select release_agent_lock('promised', 'holder')`)
	mustAcquire(t, db, "locked", "holder", 3600)
	pgtest.Exec(t, db, `select release_agent_lock('locked', 'holder')`)
	lock := pgtest.Begin(t, db)
	pgtest.Exec(t, lock, `select 1 from agent_locks where lane = 'locked' for key share`)

	for _, lane := range []string{"held", "promised", "locked"} {
		for name, query := range map[string]string{
			"try": `select count(*) filter (where try_acquire_agent_lock('%[1]s', 'other ' || n, 300))
				from generate_series(1, %[2]d) n`,
			"acquire": `select count(*) filter (where a.acquired) from generate_series(1, %[2]d) n,
				acquire_agent_lock('%[1]s', 'other ' || n, 300) a`,
			"many": `select count(*) filter (where a.acquired) from generate_series(1, %[2]d) n,
				lanekeeper.acquire_agent_locks(array['%[1]s', '%[1]s'], array['other ' || n, 'another'], array[300, 300]) a`,
		} {
			t.Run(lane+"/"+name, func(t *testing.T) {
				before, sql := laneRow(t, db, lane), fmt.Sprintf(query, lane, tries)
				// Reading a page may prune it, once; WAL of the tries themselves would recur.
				if records, _ := measureWAL(t, db, sql); records != 0 {
					records, bytes := measureWAL(t, db, sql)
					assert.Truef(t, records == 0, "%d tries wrote %d records of WAL, %d bytes", tries, records, bytes)
				}
				assert.Equal(t, 0, pgtest.Value[int](t, db, sql))
				assert.Equal(t, before, laneRow(t, db, lane))
			})
		}
	}
	records, _ := measureWAL(t, db, `select acquire_agent_lock('free', 'a', 300)`)
	assert.True(t, records != 0, "a grant writes no WAL: the test does not measure it")
}

// acquireBatch acquires lanes with acquire_agent_locks, and returns the owners of the granted ones by lane.
func acquireBatch(t testing.TB, db postgres.DB, lanes, owners []string) map[string]string {
	t.Helper()
	granted := map[string]string{}
	rows, err := db.Query(t.Context(), `
		select a.n, a.acquired, coalesce(a.locked_by, '')
		  from lanekeeper.acquire_agent_locks($1, $2, array_fill(60, array[$3::int])) a`,
		lanes, owners, len(lanes))
	require.NoError(t, err)
	var n int64
	var acquired bool
	var holder string
	seen := map[int64]bool{}
	_, err = pgx.ForEachRow(rows, []any{&n, &acquired, &holder}, func() error {
		assert.Truef(t, !seen[n], "two answers to question %d", n)
		seen[n] = true
		if acquired && holder != owners[n-1] {
			t.Errorf("%s was granted to %s, asked by %s", lanes[n-1], holder, owners[n-1])
		}
		if acquired {
			granted[lanes[n-1]] += holder
		}
		return nil
	})
	require.Truef(t, err == nil && len(seen) == len(lanes), "%d answers to %d questions: %v", len(seen), len(lanes), err)
	return granted
}

// A batch keeps every rule of a single acquire: one owner, the order of the queue, growing tokens.
func TestAcquireBatchKeepsRules(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "held", "holder", 600)
	old := mustAcquire(t, db, "free", "before", 600)
	pgtest.Exec(t, db, `select release_agent_lock('free', 'before')`)
	mustAcquire(t, db, "expired", "dead", 600)
	expire(t, db, "expired")
	mustAcquire(t, db, "mine", "m", 600)
	mustAcquire(t, db, "promised", "holder", 600)
	pgtest.Exec(t, db, `select await_agent_lock('promised', 'first', 300, 3600)`)
	pgtest.Exec(t, db, `select release_agent_lock('promised', 'holder')`)
	mustAcquire(t, db, "locked", "holder", 600)
	pgtest.Exec(t, db, `select release_agent_lock('locked', 'holder')`)
	lock := pgtest.Begin(t, db)
	pgtest.Exec(t, lock, `select 1 from agent_locks where lane = 'locked' for key share`)

	got := acquireBatch(t, db, []string{"held", "free", "free", "expired", "mine", "new", "new", "promised", "locked"},
		[]string{"a", "b", "c", "d", "m", "e", "f", "g", "h"})
	want := map[string]string{"free": "b", "expired": "d", "mine": "m", "new": "e"}
	assert.Equal(t, len(want), len(got), got, want)
	for lane, owner := range want {
		assert.Truef(t, got[lane] == owner && pgtest.Value[string](t, db, `select locked_by from agent_locks where lane = $1`,
			lane) == owner, "%s was granted to %q, want %q", lane, got[lane], owner)
	}
	token := pgtest.Value[int64](t, db, `select fencing_token from agent_locks where lane = 'free'`)
	assert.Truef(t, token > old, "token %d after %d", token, old)
	before := laneRow(t, db, "free")
	_, err := db.Exec(t.Context(), `select lanekeeper.acquire_agent_locks(array['another', ''], array['a', 'b'], array[60,
		60])`)
	wantCode(t, err, "22023")
	_, err = db.Exec(t.Context(), `select lanekeeper.acquire_agent_locks(array['another', 'free'], array['a'], array[60,
		60])`)
	wantCode(t, err, "22023")
	assert.True(t, laneRow(t, db, "another") == "none" && laneRow(t, db, "free") == before, "a failed call changed a lane")
}

// A batch of releases neither waits nor fails. A lane that its owner cannot release now does not change.
func TestReleaseBatchSkipsOthers(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := []string{"mine", "stale", "theirs", "expired", "parked", "thread:1", "fenced", "also mine"}
	var tokens []int64
	var owners []string
	for _, name := range names {
		tokens, owners = append(tokens, mustAcquire(t, db, name, "a", 600)), append(owners, "a")
	}
	tokens[1]--
	owners[2] = "b"
	expire(t, db, "expired")
	pgtest.Exec(t, db, `update agent_locks set parked = true, expires_at = '9000-01-01' where lane = 'parked'`)
	write := pgtest.Begin(t, db)
	pgtest.Exec(t, write, `select fence_agent_lock('fenced', $1)`, tokens[6])
	before := map[string]string{}
	for _, name := range names {
		before[name] = laneRow(t, db, name)
	}
	released := pgtest.Column[int64](t, db, `select n
		from unnest($1::text[], $2::text[], $3::bigint[]) with ordinality w (lane, owner, token, n)
		where lanekeeper.release_agent_lock(w.lane, w.owner, w.token, true, false) is not null
		order by n`, names, owners, tokens)
	assert.Truef(t, slices.Equal(released, []int64{1, 6, 8}), "released %v, want 1, 6 and 8", released)
	for i, name := range names {
		freed := i == 0 || i == 5 || i == 7
		assert.Equal(t, freed, laneRow(t, db, name) != before[name], name)
	}
	assert.True(t, !pgtest.Value[bool](t, db, `
		select exists (
		  select from agent_locks
		   where lane in ('mine', 'also mine')
		     and (locked_by <> '' or expires_at > clock_timestamp() or fencing_token = any ($1)))`, tokens),
		"a released lane is still held, or its token is still valid")
}

// Concurrent callers share statements, and each gets its own result.
func TestConcurrentCallersShareStatements(t *testing.T) {
	t.Parallel()
	db := largePool(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	mustAcquire(t, db, "busy", "holder", 3600)
	round := func() {
		var running sync.WaitGroup
		for i := range numRacers {
			running.Go(func() {
				lane := fmt.Sprint("lane", i)
				if i%8 == 7 {
					lane = strings.Repeat("x", 256)
				} else if i%4 == 3 {
					lane = "busy"
				}
				lease, err := k.Acquire(t.Context(), lane)
				switch {
				case i%8 == 7:
					assert.ErrorIs(t, err, lanes.ErrInvalid)
				case i%4 == 3:
					b, ok := errors.AsType[*lanes.BusyError](err)
					assert.Truef(t, ok && b.Lane == "busy" && (b.Holder == "holder" || b.Holder == ""), "a lane that is held: %v", err)
				case err != nil || lease.Lane() != lane:
					t.Errorf("acquire %s: %v, %v", lane, lease, err)
				default:
					if holder := pgtest.Value[string](t, db, `select locked_by from agent_locks where lane = $1`,
						lane); holder != lease.Owner().String() {
						t.Errorf("%s is held by %q, want %s", lane, holder, lease.Owner())
					}
					assert.NoError(t, lease.Release(t.Context()), "release", lane)
				}
			})
		}
		running.Wait()
	}
	pgtest.Eventually(t, func() bool {
		round()
		return t.Failed() || w.count("acquire_agent_locks") > 0 && w.count("release_agent_lock(w.") > 0
	}, "a statement for several")
	assert.Equal(t, 0,
		pgtest.Value[int](t, db, `select count(*) from agent_locks where locked_by <> '' and lane <> 'busy'`))
}

// A release does not change how the next transaction of its connection commits.
func TestOnlyReleasesCommitAsynchronously(t *testing.T) {
	t.Parallel()
	db := pgtest.Pool(t, pgtest.URL(t), postgres.Options{MaxConns: 1})
	pgtest.Exec(t, db, `set synchronous_commit = on`)
	k, _ := newKeeper(t, db)
	lease, err := k.Acquire(t.Context(), "x")
	require.NoError(t, err)
	require.NoError(t, lease.Release(t.Context()))
	assert.Equal(t, "on", pgtest.Value[string](t, db, `select current_setting('synchronous_commit')`))
}
