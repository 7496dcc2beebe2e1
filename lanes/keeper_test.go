package lanes_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// awaitLoss waits for the end of a lease and returns its time.
func awaitLoss(t *testing.T, l *lanes.Lease, within time.Duration) time.Time {
	t.Helper()
	select {
	case <-l.Context().Done():
	case <-time.After(within):
		t.Fatalf("the lease of %s still runs after %s", l.Lane(), within)
	}
	at := time.Now()
	if cause := context.Cause(l.Context()); !errors.Is(cause, lanes.ErrLost) {
		t.Errorf("the lease of %s ended with %v, want ErrLost", l.Lane(), cause)
	}
	select {
	case <-l.Lost(): // closes after the context, whose cause its readers expect
	case <-time.After(within):
		t.Errorf("Lost of %s is open", l.Lane())
	}
	return at
}

func TestRunRenewsLease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	runKeeper(t, k)
	l := acquireLane(t, k, "x", lanes.WithTTL(9*time.Second))
	first := l.ExpiresAt()
	pgtest.Eventually(t, func() bool {
		return l.Context().Err() != nil || pgtest.Value[bool](t, db, `select clock_timestamp() > $1::timestamptz`, first)
	}, "the first lease would have ended")
	require.NoError(t, context.Cause(l.Context()), "lost")
	if token := pgtest.Value[int64](t, db,
		`select fencing_token from agent_locks where expires_at > clock_timestamp()`); token != l.Token() {
		t.Errorf("token %d, want %d", token, l.Token())
	}
	if !l.ExpiresAt().After(first) {
		t.Errorf("ExpiresAt %s after renewals, %s before", l.ExpiresAt(), first)
	}
	log.want(t, 0, "lane lost")
}

func TestOneStatementRenewsAllLeases(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	runKeeper(t, k)
	const n = 20
	for i := range n {
		acquireLane(t, k, fmt.Sprint("x", i), lanes.WithTTL(12*time.Second))
	}
	start, sent := time.Now(), w.count("renew_agent_locks")
	pgtest.Eventually(t, func() bool { return w.count("renew_agent_locks") >= sent+3 }, "renewals go on")
	if took := time.Since(start); took < 5*time.Second { // some are renewed early, together with the first
		t.Errorf("3 renewals of %d leases within %s: want one every 4 s", n, took)
	}
	assert.Equal(t, n, pgtest.Value[int](t, db, `select count(*) from agent_locks_live`))
}

// The local clock starts before the call, so the work ends no later than the lease.
func TestLocalDeadlineCountsFromBeforeCall(t *testing.T) {
	t.Parallel()
	w := &faultyDB{DB: pgtest.DB(t), delay: 600 * time.Millisecond}
	k, log := newKeeper(t, w)
	least := bestOf(t, 2400*time.Millisecond, func() time.Duration {
		start := time.Now()
		l := acquireLane(t, k, "x", lanes.WithTTL(2*time.Second))
		took := awaitLoss(t, l, pgtest.Timeout).Sub(start)
		log.want(t, 1, "level=ERROR", `msg="lane lost"`, "lane=x", "owner="+l.Owner().String())
		assert.ErrorIs(t, l.Release(t.Context()), lanes.ErrLost)
		return took
	})
	assert.Truef(t, least >= 1900*time.Millisecond, "the work ended %s after the call, want 2 s", least)
}

// bestOf measures until one of a few tries is fast enough. On a busy machine each try may be late; a defect makes
// all of them late. It returns the shortest.
func bestOf(t *testing.T, limit time.Duration, try func() time.Duration) time.Duration {
	t.Helper()
	shortest := try()
	for n := 1; n < 6 && shortest > limit; n++ {
		shortest = min(shortest, try())
	}
	assert.Truef(t, shortest <= limit, "it took %s each time, want at most %s", shortest, limit)
	return shortest
}

func TestLeaseContextEndsDuringOutage(t *testing.T) {
	t.Parallel()
	w := &faultyDB{DB: pgtest.DB(t)}
	k, log := newKeeper(t, w)
	runKeeper(t, k)
	bestOf(t, 2400*time.Millisecond, func() time.Duration {
		l := acquireLane(t, k, "x", lanes.WithTTL(2*time.Second))
		renewed := w.count("renew_agent_locks")
		pgtest.Eventually(t, func() bool { return w.count("renew_agent_locks") > renewed || l.Context().Err() != nil },
			"a renewal")
		w.disconnected.Store(true)
		start := time.Now()
		took := awaitLoss(t, l, pgtest.Timeout).Sub(start)
		log.want(t, 1, `msg="lane lost"`, "owner="+l.Owner().String())
		w.disconnected.Store(false) // so the release succeeds
		err := l.Release(t.Context())
		assert.True(t, err == nil || errors.Is(err, lanes.ErrLost), err)
		return took
	})
}

func TestLeaseSurvivesShortOutage(t *testing.T) {
	t.Parallel()
	w := &faultyDB{DB: pgtest.DB(t)}
	k, log := newKeeper(t, w)
	runKeeper(t, k)
	l := acquireLane(t, k, "x", lanes.WithTTL(20*time.Second))
	w.disconnected.Store(true)
	pgtest.Eventually(t, func() bool { return len(log.Lines("lanes not renewed")) > 0 }, "a renewal fails")
	w.disconnected.Store(false)
	ends := l.ExpiresAt()
	pgtest.Eventually(t, func() bool { return l.ExpiresAt().After(ends) || l.Context().Err() != nil },
		"renewed again")
	assert.NoError(t, context.Cause(l.Context()), "lost")
}

func TestBreakCancelsLeaseContext(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	runKeeper(t, k)
	l := acquireLane(t, k, "x", lanes.WithTTL(9*time.Second))
	other := acquireLane(t, k, "y", lanes.WithTTL(9*time.Second))
	broken, err := lanes.Break(t.Context(), db, "x", "stuck")
	require.Truef(t, err == nil && broken, "Break: %v, %v", broken, err)
	if at, end := awaitLoss(t, l, pgtest.Timeout), l.ExpiresAt(); !at.Before(end) {
		t.Errorf("the work ended at %s, with its lease at %s", at, end)
	}
	assert.NoError(t, other.Context().Err(), "another lane ended too")
	log.want(t, 1, "level=ERROR", `msg="lane lost"`, "lane=x")
	broken, err = lanes.Break(t.Context(), db, "x", "stuck")
	assert.Truef(t, err == nil && !broken, "Break of a free lane: %v, %v", broken, err)
}

// A break reaches its holder by notification, long before the next renewal.
func TestBreakNotifiesHolder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listeningKeeper(t, db)
	bestOf(t, time.Second, func() time.Duration {
		l := acquireLane(t, k, "x", lanes.WithTTL(time.Hour))
		other := acquireLane(t, k, "y", lanes.WithTTL(time.Hour))
		began := time.Now()
		pgtest.Exec(t, db, `select set_config('lanekeeper.actor', '{"by": "root"}', true), break_agent_lock('x', 'stuck')`)
		took := awaitLoss(t, l, pgtest.Timeout).Sub(began)
		if cause := context.Cause(l.Context()); !errors.Is(cause, lanes.ErrLost) || other.Context().Err() != nil ||
			!strings.HasSuffix(cause.Error(), "root broke it: stuck") {
			t.Errorf("the work ended with %v, that in another lane with %v", cause, other.Context().Err())
		}
		assert.NoError(t, other.Release(t.Context()))
		return took
	})
}

// The process acquires the lane again before it notices the loss.
func TestBreakCancelsOnlyEarlierHold(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	old := acquireLane(t, k, "x", lanes.WithTTL(9*time.Second))
	_, err := lanes.Break(t.Context(), db, "x", "stuck")
	require.NoError(t, err)
	l := acquireLane(t, k, "x", lanes.WithTTL(9*time.Second))
	runKeeper(t, k)
	if at, end := awaitLoss(t, old, pgtest.Timeout), old.ExpiresAt(); !at.Before(end) {
		t.Errorf("the old work ended at %s, with its lease at %s", at, end)
	}
	assert.NoError(t, context.Cause(l.Context()), "the new hold ended")
}

// The keeper soon retries a renewal if another session has locked the row, well before the end of the lease.
func TestRenewalOfLockedRowIsRetried(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, log := newKeeper(t, w)
	l := acquireLane(t, k, "x", lanes.WithTTL(9*time.Second))
	stranger := pgtest.Begin(t, db)
	pgtest.Exec(t, stranger, `select from agent_locks where lane = 'x' for update`)
	runKeeper(t, k)
	pgtest.Eventually(t, func() bool { return w.count("renew_agent_locks") >= 2 }, "the row is asked again")
	commit(t, stranger)
	ends := l.ExpiresAt()
	pgtest.Eventually(t, func() bool { return l.ExpiresAt().After(ends) || l.Context().Err() != nil }, "renewed")
	assert.NoError(t, context.Cause(l.Context()), "lost")
	log.want(t, 0, "lane lost")
}

// noLoss fails the test when a loss is counted.
type noLoss struct{ testing.TB }

func (noLoss) LaneWaited(string, time.Duration, bool) {}
func (o noLoss) LaneLost(lane string)                 { o.Errorf("the loss of %s is counted", lane) }

func TestLossOfThreadLaneCancelsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	log := new(logs)
	k := lanes.NewKeeper(db, lanes.Options{Logger: slog.New(slog.NewTextHandler(log, nil)), Observer: noLoss{TB: t}})
	runKeeper(t, k)
	l := acquireLane(t, k, "thread:1", lanes.WithTTL(5*time.Second))
	ends := l.ExpiresAt()
	assert.NoError(t, l.Renew(t.Context()))
	assert.True(t, l.ExpiresAt().After(ends), "Renew did not prolong the lease")
	select {
	case <-l.Lost():
	case <-time.After(pgtest.Timeout):
		t.Fatal("an idle thread keeps its lane")
	}
	if l.Context().Err() != nil {
		t.Errorf("the work of a thread was cancelled: %v", context.Cause(l.Context()))
	}
	assert.ErrorIs(t, l.Renew(t.Context()), lanes.ErrLost)
	assert.NoError(t, l.Release(t.Context()), "release")
	log.want(t, 0, "level=ERROR")
}

// Waiters poll the lane of a dead process while the sweep releases it.
func TestLaneOfDeadProcessIsReleased(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	process := pgtest.Value[string](t, db, `insert into agent_workers (expires_at) values (clock_timestamp())
		returning id::text`)
	mustAcquire(t, db, "x", "run/1@"+process, 60)
	look := pgtest.Begin(t, db)
	pgtest.Exec(t, look, `update agent_locks set waited_until = clock_timestamp() where lane = 'x'`)
	var under sync.WaitGroup
	under.Go(func() {
		_, err := db.Exec(t.Context(), `select lanekeeper.lose_agent_claims(id) from agent_workers`)
		assert.NoError(t, err)
	})
	pgtest.AwaitBlocked(t, db, 1, "lose_agent_claims")
	commit(t, look)
	under.Wait()
	g := tryAcquire(t, db, "x", "b", 60)
	assert.Truef(t, g.acquired, "%s still has the lane", g.holder)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_workers`))
}

// The sweep does not wait for a transaction that locks the row for long.
func TestSweepDoesNotWaitForLockedLane(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	process := pgtest.Value[string](t, db, `insert into agent_workers (expires_at) values (clock_timestamp())
		returning id::text`)
	token := mustAcquire(t, db, "x", "run/1@"+process, 60)
	write := pgtest.Begin(t, db)
	pgtest.Exec(t, write, `select fence_agent_lock('x', $1)`, token)
	pgtest.Exec(t, db, `select lanekeeper.lose_agent_claims(id) from agent_workers`)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_workers`))
	pgtest.Exec(t, write, `select fence_agent_lock('x', $1)`, token)
}

func TestOneLaneIsReadWithoutTheOthers(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "operate", "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE", 300)
	pgtest.Exec(t, db, `
		insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at)
		select 'lane ' || n, 'a', n, clock_timestamp(), clock_timestamp() + interval '1 hour' from generate_series(1, 10000) n`)
	pgtest.Exec(t, db, `analyze agent_locks`)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	live, err := lanes.Get(t.Context(), tx, "operate")
	assert.Truef(t, err == nil && live != nil, "got %+v, %v", live, err)
	pgtest.Equal(t, tx, 0, `select pg_stat_get_xact_tuples_returned('agent_locks'::regclass)`)
}

func TestLiveListsHeldLanes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "heartbeat", "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE/01JD3V7K8ZQ6W2M5T9X4C1B0AE", 300)
	mustAcquire(t, db, "objective:1", execution+"#2", 300)
	pgtest.Exec(t, db, `update agent_locks set parked = true, expires_at = '9000-01-01' where lane = 'objective:1'`)
	mustAcquire(t, db, "over", "a", 60)
	expire(t, db, "over")

	live, err := lanes.Live(t.Context(), db)
	require.NoError(t, err)
	require.Equal(t, 2, len(live), live)
	first := live[0]
	assert.Truef(t, first.Lane == "heartbeat" && first.FencingToken == token && first.ExpiresIn != nil &&
		*first.ExpiresIn >= 290 && *first.ExpiresIn <= 300 && first.HeldFor >= 0 && first.HeldFor <= 10 &&
		first.ExecutionID == nil && first.TraceID != nil && *first.TraceID == "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE",
		"heartbeat shows as %+v", first)
	one, err := lanes.Get(t.Context(), db, "heartbeat")
	assert.Truef(t, err == nil && one != nil && one.FencingToken == token, "got %+v, %v", one, err)
	free, err := lanes.Get(t.Context(), db, "over")
	assert.Truef(t, err == nil && free == nil, "got %+v, %v", free, err)
	text, err := json.Marshal(live[1])
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(text, &got))
	delete(got, "held_for")
	delete(got, "fencing_token")
	want := map[string]any{
		"lane": "objective:1", "locked_by": execution + "#2", "execution_id": execution, "trace_id": nil, "expires_in": nil,
		"parked": true,
	}
	assert.NoDiff(t, want, got)
}

func TestBreakIsRecordedUnderHolderTrace(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "heartbeat", "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE/01JD3V7K8ZQ6W2M5T9X4C1B0AE", 300)
	broken, err := lanes.Break(t.Context(), db, "heartbeat", "it hangs")
	require.Truef(t, err == nil && broken, "Break: %v, %v", broken, err)
	pgtest.Equal(t, db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE it hangs heartbeat", `
		select trace_id || ' ' || (input ->> 'reason') || ' ' || lane from agent_activity`)
	held, err := lanes.Held(t.Context(), db, "heartbeat")
	assert.Truef(t, err == nil && !held, "held %v, %v", held, err)
}

// Expire soon clears and logs a lane with an expired lease. It leaves lanes that are held, parked or lent, and those of
// threads.
func TestExpireClearsExpiredLanes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	for _, lane := range []string{"ended", "just ended", "held", "thread:1", "lent"} {
		mustAcquire(t, db, lane, "gone", 60)
	}
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute'
		where lane in ('ended', 'thread:1', 'lent')`)
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'just ended'`)
	pgtest.Exec(t, db, `insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
		values ('lent', 1, $1, $1, 60)`, execution)
	pgtest.Exec(t, db, `insert into agent_lock_waiters (lane, owner, expires_at)
		values ('ended', 'gone too', clock_timestamp() - interval '2 minutes')`)
	token := pgtest.Value[int64](t, db, `select fencing_token from agent_locks where lane = 'ended'`)
	next, err := k.Expire(t.Context(), "")
	require.Truef(t, err == nil && next == "", "Expire: %q, %v", next, err)
	got := pgtest.Value[string](t, db, `select string_agg(lane, ',' order by lane) from agent_locks
		where locked_by = 'gone'`)
	assert.Equal(t, "held,just ended,lent,thread:1", got, "left")
	now := pgtest.Value[int64](t, db, `select fencing_token from agent_locks where lane = 'ended'`)
	assert.Truef(t, now > token, "its token is %d, before %d", now, token)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_lock_waiters`))
	log.want(t, 1, "level=WARN", `msg="lane stale, clearing"`, "lane=ended", "holder=gone", "age=1m0")
	mustAcquire(t, db, "ended", "next", 60)
}

// Expire examines each of any number of held lanes in its turn.
func TestExpireReadsInBatches(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		select 'lane ' || to_char(n, 'FM00000'), 'gone', 1, clock_timestamp() - interval '1 minute'
		from generate_series(1, 2500) n`)
	k, _ := newKeeper(t, db)
	after, looks := "", 0
	for ; looks == 0 || after != ""; looks++ {
		var err error
		after, err = k.Expire(t.Context(), after)
		require.NoError(t, err)
	}
	left := pgtest.Value[int](t, db, `select count(*) from agent_locks where locked_by <> ''`)
	assert.Truef(t, left == 0 && looks == 3, "%d are left after %d looks, want none after 3", left, looks)
}
