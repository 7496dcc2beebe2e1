package lanes_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// enqueue adds owner to the queue of lane, as a waiter for a handover.
func enqueue(t *testing.T, db postgres.DB, lane, owner string, ttl int) {
	t.Helper()
	if pgtest.Value[bool](t, db, `select acquired from lanekeeper.acquire_or_enqueue_agent_lock($1, $2, $3, 60, true)`,
		lane, owner,
		ttl) {
		t.Fatalf("%s got %s without a wait", owner, lane)
	}
}

// awaitSecondPoll waits until the only waiter of a lane has polled twice. Its next poll is 750 ms away or more.
func awaitSecondPoll(t *testing.T, db postgres.DB, lane string) {
	t.Helper()
	awaitQueueLength(t, db, lane, 1)
	place := func() time.Time {
		return pgtest.Value[time.Time](t, db, `select coalesce(max(expires_at), 'epoch') from agent_lock_waiters
			where lane = $1`,
			lane)
	}
	first := place()
	pgtest.Eventually(t, func() bool { return place().After(first) }, "the second look")
}

// releaseLane releases a lane in SQL, and retries while the lane is blocked. It returns the successor: "" for none, or
// "not released".
func releaseLane(t *testing.T, db postgres.DB, lane, owner string, token int64) string {
	t.Helper()
	to := queryUnblocked[string](t, db, `select coalesce(lanekeeper.release_agent_lock($1, $2, $3, true), 'not released')`,
		lane, owner, token)
	if parts := strings.Split(to, "\t"); len(parts) == 4 {
		return parts[1]
	}
	return to
}

// awaitNotification returns the payload of the next notification of conn.
func awaitNotification(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	require.NoError(t, err)
	return n.Payload
}

// A release hands the lane to the first waiter. The waiter sends nothing more and then has its full TTL.
func TestReleaseHandsLaneOver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	here, _ := newKeeper(t, db)
	there := listeningKeeper(t, db)
	held := acquireLane(t, here, "x")
	got := acquireLater(t, there, "x", lanes.WithTTL(time.Hour))
	awaitSecondPoll(t, db, "x")
	enqueue(t, db, "x", "next", 60)
	require.NoError(t, held.Release(t.Context()))
	holder, token := pgtest.Value[string](t, db, `select locked_by from agent_locks`),
		pgtest.Value[int64](t, db, `select fencing_token from agent_locks`)
	if holder == "" || token <= held.Token() {
		t.Errorf("after the release %q has the lane under token %d, which was %d", holder, token, held.Token())
	}
	lease := <-got
	require.Truef(t, lease != nil && lease.Owner().String() == holder && lease.Token() == token && lease.Lane() == "x",
		"the waiter has %v, want the lease of %s under token %d", lease, holder, token)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_lock_waiters where owner <> 'next'`))
	pgtest.Until(t, db, true, `select expires_at > clock_timestamp() + interval '50 minutes' from agent_locks`)
	assert.NoError(t, lease.Fence(t.Context(), db))
	assert.NoError(t, lease.Release(t.Context()))
	assert.Equal(t, "next", pgtest.Value[string](t, db, `select locked_by from agent_locks`))
}

// An attempt before the notification may find the row locked by another attempt.
func TestHolderHasNoQueueEntry(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	enqueue(t, db, "x", "b", 60)
	require.Equal(t, "b", releaseLane(t, db, "x", "a", token))
	another := pgtest.Begin(t, db)
	pgtest.Exec(t, another, `update agent_locks set waited_until = clock_timestamp() + interval '5 seconds'
		where lane = 'x'`)
	enqueue(t, db, "x", "b", 60)
	commit(t, another)
	token = pgtest.Value[int64](t, db, `select fencing_token from agent_locks`)
	assert.Equal(t, "", releaseLane(t, db, "x", "b", token))
}

// A thread's lane has its own rules for parking, queue and delivery.
func TestThreadLaneIsNotHandedOver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "thread:1", "a", 60)
	enqueue(t, db, "thread:1", "b", 60)
	assert.Equal(t, "", releaseLane(t, db, "thread:1", "a", token))
}

// An ineligible waiter gets no handover: the lane is free and promised as usual.
func TestIneligibleWaitersGetNoHandover(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, c := range map[string]struct {
		first string // does this, and stays the first in the queue
		over  bool   // its place in the queue ends
		busy  string // runs in a transaction that is open meanwhile
		to    string
		tell  bool
	}{
		"one who did not ask for it": {first: `select await_agent_lock($1, 'b', 60, 60)`, tell: true},
		"a waiter whose place has expired": {
			first: `select lanekeeper.acquire_or_enqueue_agent_lock($1, 'b', 60, 60, true)`,
			over:  true, to: "c",
		},
		"one who looks just now": {
			first: `select lanekeeper.acquire_or_enqueue_agent_lock($1, 'b', 60, 60, true)`,
			busy:  `update agent_lock_waiters set expires_at = expires_at where lane = $1 and owner = 'b'`, tell: true,
		},
		"one who leaves just now": {
			first: `select lanekeeper.acquire_or_enqueue_agent_lock($1, 'b', 60, 60, true)`,
			busy:  `select lanekeeper.release_agent_lock($1, 'b', null, true) from leave_agent_lock_queue($1, 'b')`, tell: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			lane := strings.ReplaceAll(name, " ", "-")
			token := mustAcquire(t, db, lane, "a", 60)
			pgtest.Exec(t, db, c.first, lane)
			enqueue(t, db, lane, "c", 60)
			if c.over {
				pgtest.Exec(t, db, `update agent_lock_waiters set expires_at = clock_timestamp() where lane = $1 and owner = 'b'`,
					lane)
			}
			if c.busy != "" {
				tx := pgtest.Begin(t, db)
				pgtest.Exec(t, tx, c.busy, lane)
				defer commit(t, tx)
			}
			conn := listenConn(t, db)
			assert.Equal(t, c.to, releaseLane(t, db, lane, "a", token), "the lane went to")
			assert.Equal(t, c.to, pgtest.Value[string](t, db, `select locked_by from agent_locks where lane = $1`, lane))
			payload := awaitNotification(t, conn)
			assert.Equal(t, (payload == lane), c.tell, "notified", payload)
			assert.True(t, !tryAcquire(t, db, lane, "d", 60).acquired, "a newcomer overtakes the queue")
		})
	}
}

// listenConn is a connection that receives notifications of lanes.
func listenConn(t *testing.T, db *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pgtest.Dialer(t, db)(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // no statement is running
	pgtest.Exec(t, conn, `listen agent_lanes`)
	return conn
}

// Only its live owner hands a lane over, and the handover waits for a fenced write under its token.
func TestOnlyLiveHolderHandsOver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	enqueue(t, db, "x", "b", 60)
	before := laneRow(t, db, "x")
	for owner, token := range map[string]int64{"b": token, "a": token - 1, "c": token} {
		to := releaseLane(t, db, "x", owner, token)
		assert.Truef(t, to == "not released" && laneRow(t, db, "x") == before,
			"%s released the lane under token %d: %q", owner, token, to)
	}
	write := pgtest.Begin(t, db)
	pgtest.Exec(t, write, `select fence_agent_lock('x', $1)`, token)
	to := make(chan string, 1)
	go func() { to <- releaseLane(t, db, "x", "a", token) }()
	pgtest.AwaitBlocked(t, db, 1, "release_agent_lock")
	commit(t, write)
	assert.Equal(t, "b", <-to)
	_, err := db.Exec(t.Context(), `select fence_agent_lock('x', $1)`, token)
	wantCode(t, err, "LK001")
	expire(t, db, "x")
	assert.Equal(t, "not released", releaseLane(t, db, "x", "b",
		pgtest.Value[int64](t, db, `select fencing_token from agent_locks`)))
}

// A lease expires while its release waits for a fenced write. The release does not hand it over.
func TestExpiredLeaseIsNotHandedOver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 5)
	enqueue(t, db, "x", "b", 60)
	write := pgtest.Begin(t, db)
	pgtest.Exec(t, write, `select fence_agent_lock('x', $1)`, token)
	to := make(chan string, 1)
	go func() { to <- releaseLane(t, db, "x", "a", token) }()
	pgtest.AwaitBlocked(t, db, 1, "release_agent_lock")
	pgtest.Until(t, db, true, `select expires_at < clock_timestamp() from agent_locks`)
	commit(t, write)
	assert.Equal(t, "not released", <-to)
}

// The waiter has not confirmed a handover, so the lease is short in case it died.
func TestHandedOverLeaseIsShort(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for lane, ttl := range map[string]int{"long": 3600, "short": 2} {
		token := mustAcquire(t, db, lane, "a", 60)
		enqueue(t, db, lane, "dead", ttl)
		releaseLane(t, db, lane, "a", token)
		lasts := pgtest.Value[float64](t, db, `select extract(epoch from expires_at - locked_at)::float8 from agent_locks
			where lane = $1`, lane)
		assert.Truef(t, lasts == float64(min(ttl, 10)), "%s: the lease lasts %v s", lane, lasts)
	}
	enqueue(t, db, "short", "patient", 60)
	pgtest.Eventually(t, func() bool { return tryAcquire(t, db, "short", "patient", 60).acquired },
		"the next in the queue is served")
}

// A leaving waiter releases a lane that was just handed over, also during the handover.
func TestLeavingWaiterHoldsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	enqueue(t, db, "x", "b", 60)
	enqueue(t, db, "x", "c", 60)
	release := pgtest.Begin(t, db)
	require.Equal(t, "b", releaseLane(t, release, "x", "a", token))
	left := make(chan string, 1)
	go func() {
		left <- pgtest.Value[string](t, db, `select coalesce(lanekeeper.release_agent_lock('x', 'b', null, true), 'nothing')
			from leave_agent_lock_queue('x', 'b')`)
	}()
	pgtest.AwaitBlocked(t, db, 1, "leave_agent_lock_queue")
	commit(t, release)
	to := <-left
	assert.Truef(t, strings.HasPrefix(to, "x\tc\t"), "b left, and the lane went to %q", to)
	assert.Equal(t, "c", pgtest.Value[string](t, db, `select locked_by from agent_locks`))
	to = pgtest.Value[string](t, db, `select coalesce(lanekeeper.release_agent_lock('x', 'b', null, true), 'nothing')
		from leave_agent_lock_queue('x', 'b')`)
	assert.Equal(t, "nothing", to, "b left again, and the lane went to")
	pgtest.Value[string](t, db, `select lanekeeper.release_agent_lock('x', 'c', null, true)
		from leave_agent_lock_queue('x', 'c')`)
	assert.Equal(t, "", pgtest.Value[string](t, db, `select locked_by from agent_locks`))
}

// The owner of a transaction decides how it commits, not a function in it.
func TestReleaseKeepsCommitModeOfTransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, query := range map[string]string{
		"one":         `select lanekeeper.release_agent_lock('lonely', 'a', @lonely, true)`,
		"one, wanted": `select lanekeeper.release_agent_lock('wanted', 'a', @wanted, true)`,
		"many": `select lanekeeper.release_agent_lock('wanted', 'a', @wanted, true, false),
			lanekeeper.release_agent_lock('lonely', 'a', @lonely, true, false)`,
		"a queue": `select lanekeeper.release_agent_lock('lonely', 'a', null, true)
			from leave_agent_lock_queue('lonely', 'a')`,
		"release":        `select release_agent_lock('lonely', 'a')`,
		"a fenced write": `select release_agent_lock('lonely', 'a') from fence_agent_lock('lonely', @lonely)`,
	} {
		tx := pgtest.Begin(t, db)
		pgtest.Exec(t, tx, `set local synchronous_commit = on`)
		args := pgx.NamedArgs{
			"lonely": mustAcquire(t, tx, "lonely", "a", 60), "wanted": mustAcquire(t, tx, "wanted", "a", 60),
		}
		enqueue(t, tx, "wanted", "b", 60)
		pgtest.Exec(t, tx, query, args)
		assert.Equal(t, "on", pgtest.Value[string](t, tx, `show synchronous_commit`), name)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// The commit of a handover is synchronous: it is a grant. A release to no waiter is asynchronous.
func TestHandoverCommitsSynchronously(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, c := range map[string]struct {
		wanted bool
		mode   string
	}{"wanted": {true, "on"}, "lonely": {false, "off"}} {
		tx := pgtest.Begin(t, db)
		pgtest.Exec(t, tx, `set local synchronous_commit = on`)
		k, _ := newKeeper(t, tx) // alone, so each of its statements is in the transaction
		l := acquireLane(t, k, "x")
		if c.wanted {
			enqueue(t, tx, "x", "b", 60)
		}
		require.NoError(t, l.Release(t.Context()))
		assert.Equal(t, c.mode, pgtest.Value[string](t, tx, `show synchronous_commit`), name, "synchronous_commit")
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// Concurrent handovers behave like single ones.
func TestReleaseBatchHandsOver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := []string{"wanted", "lonely", "promised", "also wanted"}
	var owners []string
	var tokens []int64
	for _, name := range names {
		owners, tokens = append(owners, "a"), append(tokens, mustAcquire(t, db, name, "a", 60))
	}
	enqueue(t, db, "wanted", "b", 60)
	enqueue(t, db, "also wanted", "c", 60)
	pgtest.Exec(t, db, `select await_agent_lock('promised', 'd', 60, 60)`)
	n := pgtest.Value[int](t, db, `select count(lanekeeper.release_agent_lock(w.lane, w.owner, w.token, true, false))
		from unnest($1::text[], $2::text[], $3::bigint[]) w (lane, owner, token)`, names, owners, tokens)
	assert.Equal(t, len(names), n, "answers")
	for lane, want := range map[string]string{"wanted": "b", "also wanted": "c", "lonely": "", "promised": ""} {
		assert.Equal(t, want, pgtest.Value[string](t, db, `select locked_by from agent_locks where lane = $1`, lane), lane)
	}
	g := tryAcquire(t, db, "promised", "e", 60)
	assert.Truef(t, !g.acquired && g.holder == "d", "a newcomer got %+v, want busy by d", g)
}

// The claim of an execution may have ended at the handover. It acquires lanes itself, and only while it is live.
func TestExecutionClaimGetsNoHandover(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listeningKeeper(t, db)
	token := mustAcquire(t, db, "x", "a", 60)
	owner := liveClaim(t, db)
	other := lanes.ClaimOwner(strings.TrimSuffix(owner.String(), "#1"), 2)
	_, err := k.AcquireWaitAs(t.Context(), other, "y")
	wantCode(t, err, "LK001")
	_, err = k.AcquireAs(t.Context(), other, "y")
	wantCode(t, err, "LK001")
	pgtest.Equal(t, db, 0, `select count(*) from agent_locks where lane = 'y'`)
	got := make(chan *lanes.Lease, 1)
	go func() {
		lease, err := k.AcquireWaitAs(t.Context(), owner, "x")
		assert.NoError(t, err)
		got <- lease
	}()
	awaitSecondPoll(t, db, "x")
	assert.Equal(t, "", releaseLane(t, db, "x", "a", token))
	lease := <-got
	assert.Truef(t, lease != nil && lease.Owner() == owner, "got %v", lease)
}

// A waiter that misses the handover finds the lane at its next attempt. So does a waiter whose keeper does not renew.
func TestMissedHandoverIsFoundByPolling(t *testing.T) {
	t.Parallel()
	for name, heard := range map[string]bool{"not heard": false, "nothing is renewed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			notifications := postgres.NewListener(pgtest.Dialer(t, db), slog.New(slog.DiscardHandler))
			k := lanes.NewKeeper(db, lanes.Options{Listener: notifications})
			if heard {
				k = lanes.NewKeeper(db, lanes.Options{Listener: newListener(t, db)})
			} else {
				runKeeper(t, k)
			}
			token := mustAcquire(t, db, "x", "a", 60)
			got := acquireLater(t, k, "x", lanes.WithTTL(time.Hour))
			awaitSecondPoll(t, db, "x")
			heir := releaseLane(t, db, "x", "a", token)
			lease := <-got
			assert.Truef(t, lease != nil && lease.Owner().String() == heir &&
				!pgtest.Value[bool](t, db, `select expires_at < clock_timestamp() + interval '50 minutes' from agent_locks`),
				"got %v, want the whole lease of %s", lease, heir)
		})
	}
}

// A waiter ignores a notification of an expired lease. It also ignores a lease that exceeds maxHandover.
func TestLateOrForgedHandoverIsIgnored(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]string{"late": "-1 minute", "forged": "1 hour"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			k := listeningKeeper(t, db)
			mustAcquire(t, db, "x", "a", 60)
			got := acquireLater(t, k, "x")
			awaitSecondPoll(t, db, "x")
			place := pgtest.Value[time.Time](t, db, `select expires_at from agent_lock_waiters`)
			pgtest.Exec(t, db, `select pg_notify('agent_lanes',
				concat_ws(E'\t', 'x', w.owner, 1, (extract(epoch from clock_timestamp() + $1::text::interval) * 1000000)::bigint))
				from agent_lock_waiters w`, end)
			pgtest.Eventually(t, func() bool {
				return pgtest.Value[time.Time](t, db, `select coalesce(max(expires_at), 'epoch') from agent_lock_waiters`).After(
					place)
			}, "the waiter polls again")
			pgtest.Exec(t, db, `select release_agent_lock('x', 'a')`)
			lease := <-got
			assert.Truef(t, lease != nil && lease.Token() == pgtest.Value[int64](t, db, `select fencing_token from agent_locks`),
				"got %v", lease)
		})
	}
}

// A handed-over lease ends here no later than in the database: it counts from before the last attempt.
func TestHandoverDeadlineCountsFromBeforeAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db, delay: 600 * time.Millisecond}
	k := lanes.NewKeeper(w, lanes.Options{Listener: newListener(t, db)})
	runKeeper(t, k)
	bestOf(t, 1900*time.Millisecond, func() time.Duration {
		token := mustAcquire(t, db, "x", "a", 60)
		got := acquireLater(t, k, "x", lanes.WithTTL(2*time.Second))
		awaitSecondPoll(t, db, "x")
		w.disconnected.Store(true) // the keeper renews nothing
		defer w.disconnected.Store(false)
		start := time.Now()
		releaseLane(t, db, "x", "a", token)
		lease := <-got
		if lease == nil {
			t.FailNow()
		}
		took := awaitLoss(t, lease, pgtest.Timeout).Sub(start)
		expire(t, db, "x")
		return took
	})
}
