package lanes_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// If a session dies during a release, the keeper repeats it over another one, also after a wait for a fenced write.
func TestReleaseSurvivesKilledSession(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	bestOf(t, 2*time.Second, func() time.Duration {
		l := acquireLane(t, k, "x", lanes.WithTTL(time.Hour))
		write := pgtest.Begin(t, db)
		require.NoError(t, l.Fence(t.Context(), write))
		released := make(chan error, 1)
		go func() { released <- l.Release(t.Context()) }()
		pgtest.AwaitBlocked(t, db, 1, "release_agent_lock")
		pgtest.Exec(t, db, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()
			and wait_event_type = 'Lock' and query like '%release_agent_lock%' and pid <> pg_backend_pid()`)
		began := time.Now()
		commit(t, write)
		assert.NoError(t, <-released, "Release")
		assert.True(t, !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "the lane is still held")
		return time.Since(began)
	})
	assert.True(t, len(log.Lines("lane not released yet", "lane=x")) > 0, "no log line about a repeated release")
}

// A release without a response succeeded: the lane was not lost.
func TestReleaseWithLostResponseSucceeds(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, log := newKeeper(t, w)
	l := acquireLane(t, k, "x")
	w.dropResponses.Store(true)
	released := make(chan error, 1)
	go func() { released <- l.Release(t.Context()) }()
	pgtest.Eventually(t, func() bool { return len(log.Lines("lane not released yet")) > 0 }, "the response is lost")
	w.dropResponses.Store(false)
	assert.NoError(t, <-released, "Release")
	log.want(t, 1, "lane released", "lane=x")
	log.want(t, 0, "lane lost")
}

// An attempt without a response may have released the lane. A repeated Release then reports no loss.
func TestRepeatedReleaseAfterLostResponseSucceeds(t *testing.T) {
	t.Parallel()
	w := &faultyDB{DB: pgtest.DB(t)}
	k, log := newKeeper(t, w)
	l := acquireLane(t, k, "x")
	w.dropResponses.Store(true)
	require.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release without a response")
	w.dropResponses.Store(false)
	assert.NoError(t, l.Release(t.Context()), "the repeated Release")
	log.want(t, 1, "lane released", "lane=x")
	log.want(t, 0, "lane lost")
}

// The keeper completes a release that ran out of time, long before the lease expires.
func TestReleaseContinuesInBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, log := newKeeper(t, w)
	l := acquireLane(t, k, "x", lanes.WithTTL(time.Hour))
	w.disconnected.Store(true)
	err := l.ReleaseWithin(t.Context(), 100*time.Millisecond)
	assert.Truef(t, err != nil && !errors.Is(err, lanes.ErrLost), "a release without a database: %v", err)
	w.disconnected.Store(false)
	pgtest.Until(t, db, false, `select is_agent_lock_held('x')`)
	log.want(t, 1, "lane released", "lane=x")
	assert.NoError(t, l.Release(t.Context()), "Release afterwards")
}

// A release that cannot start, because an acquire of the same claim hangs, continues in the background.
func TestReleaseBehindHangingAcquireContinuesInBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	owner := liveClaim(t, db)
	l, err := k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour))
	mustAcquired(t, l, err)
	w.disconnected.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	hanging := make(chan error, 1)
	go func() {
		_, err := k.AcquireAs(ctx, owner, "x")
		hanging <- err
	}()
	pgtest.Eventually(t, func() bool { return w.count("acquire_agent_execution_lock") == 2 }, "the acquire hangs")
	w.disconnected.Store(false)
	assert.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release behind a hanging acquire")
	cancel()
	assert.Error(t, <-hanging, "the hanging acquire")
	pgtest.Until(t, db, false, `select is_agent_lock_held('x')`)
	assert.NoError(t, l.Release(t.Context()), "Release afterwards")
}

// The keeper does not repeat a release that no retry can make succeed, but the caller may.
func TestRefusedReleaseIsNotRetriedInBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	refused := acquireLane(t, k, "x", lanes.WithTTL(time.Hour))
	later := acquireLane(t, k, "y", lanes.WithTTL(time.Hour))
	pgtest.Exec(t, db, `alter function lanekeeper.release_agent_lock rename to away`)
	wantCode(t, refused.Release(t.Context()), "42883")
	pgtest.Exec(t, db, `alter function lanekeeper.away rename to release_agent_lock`)
	w.disconnected.Store(true)
	require.Error(t, later.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release without a database")
	w.disconnected.Store(false)
	pgtest.Until(t, db, false, `select is_agent_lock_held('y')`) // in the background, after the time for x
	assert.True(t, pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "the refused release was repeated")
	assert.NoError(t, refused.Release(t.Context()), "Release afterwards")
}

// A refusal ends a release in the background. A repeated Release can continue there.
func TestReleaseContinuesInBackgroundAfterRefusal(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	l := acquireLane(t, k, "x", lanes.WithTTL(time.Hour))
	w.disconnected.Store(true)
	require.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release without a database")
	pgtest.Exec(t, db, `alter function lanekeeper.release_agent_lock rename to away`)
	before := w.count("release_agent_lock(@")
	w.disconnected.Store(false)
	pgtest.Eventually(t, func() bool {
		return w.count("release_agent_lock(@") > before && postgres.IsCode(l.Release(t.Context()), "42883")
	}, "the release is refused in the background, and then here")
	pgtest.Exec(t, db, `alter function lanekeeper.away rename to release_agent_lock`)
	w.disconnected.Store(true)
	require.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "the repeated release without a database")
	w.disconnected.Store(false)
	pgtest.Until(t, db, false, `select is_agent_lock_held('x')`)
}

// An error without a SQLSTATE, as a connection pooler may send one, is retried.
func TestReleaseRetriesErrorWithoutCode(t *testing.T) {
	t.Parallel()
	w := &faultyDB{DB: pgtest.DB(t), responseErr: &pgconn.PgError{Message: "server closed"}}
	k, log := newKeeper(t, w)
	l := acquireLane(t, k, "x")
	w.dropResponses.Store(true)
	assert.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release without a response")
	w.dropResponses.Store(false)
	assert.NoError(t, l.Release(t.Context()), "the repeated Release")
	log.want(t, 0, "lane lost")
}

// An owner that acquires the lane again before the release succeeds keeps it.
func TestBackgroundReleaseKeepsLaterHold(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	owner := liveClaim(t, db)
	l, err := k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour))
	mustAcquired(t, l, err)
	w.disconnected.Store(true)
	assert.Error(t, l.ReleaseWithin(t.Context(), 100*time.Millisecond), "a release without a database")
	w.disconnected.Store(false)
	for { // the background may have released it
		if l, err = k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour)); !errors.Is(err, lanes.ErrBusy) {
			break
		}
	}
	mustAcquired(t, l, err)
	other := acquireLane(t, k, "y")
	before := w.count("release_agent_lock(@")
	err = other.Release(t.Context())
	assert.True(t, err == nil && w.count("release_agent_lock(@") != before, err)
	if cause := context.Cause(l.Context()); cause != nil || !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`) {
		t.Errorf("the later hold has ended: %v", cause)
	}
}

// An acquire has no response, and its lane cannot be released at once. The keeper releases it later.
func TestOrphanedLaneIsReleasedInBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, log := newKeeper(t, w)
	w.dropResponses.Store(true)
	pgtest.Exec(t, db, `alter function leave_agent_lock_queue rename to away`)
	pgtest.Exec(t, db, `create function leave_agent_lock_queue(text, text) returns void language plpgsql as $$ begin
		raise exception 'the server goes down' using errcode = '57P01'; end $$`)
	_, err := k.Acquire(t.Context(), "x", lanes.WithTTL(time.Hour))
	require.Error(t, err, "no error although the response was lost")
	log.want(t, 1, "lane may be held", "lane=x")
	require.True(t, pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`),
		"the statement did not reach the database: the test tests nothing")
	pgtest.Exec(t, db, `drop function leave_agent_lock_queue`)
	pgtest.Exec(t, db, `alter function away rename to leave_agent_lock_queue`)
	w.dropResponses.Store(false)
	pgtest.Until(t, db, false, `select is_agent_lock_held('x')`)
}

// leaveOpen runs a statement in a transaction that stays open, like a driver with autocommit off.
func leaveOpen(t *testing.T, db *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	pgtest.Exec(t, pgtest.Begin(t, db), query, args...)
}

// leavePrepared runs a statement in a transaction that stays prepared.
func leavePrepared(t *testing.T, db *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	if pgtest.Value[string](t, db, `show max_prepared_transactions`) == "0" {
		t.Skip("this server prepares no transactions")
	}
	id := strings.ReplaceAll(t.Name(), "/", " ") + time.Now().Format("150405.000000")
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, query, args...)
	pgtest.Exec(t, tx, `prepare transaction '`+id+`'`)
	_ = tx.Rollback(t.Context()) // the connection no longer has this transaction
	t.Cleanup(func() {
		_, err := db.Exec(context.Background(), `rollback prepared '`+id+`'`)
		assert.NoError(t, err)
	})
}

// leaveSavepoint runs a statement in a subtransaction of a transaction that stays open.
func leaveSavepoint(t *testing.T, db *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `savepoint a`)
	pgtest.Exec(t, tx, query, args...)
}

var openTransactions = map[string]func(t *testing.T, db *pgxpool.Pool, query string, args ...any){
	"open": leaveOpen, "prepared": leavePrepared, "savepoint": leaveSavepoint,
}

// A waiter in an open transaction blocks neither the holder nor others.
func TestUncommittedWaiterBlocksNobody(t *testing.T) {
	t.Parallel()
	for how, leave := range openTransactions {
		for what, query := range map[string]string{
			"first look": `select await_agent_lock('x', 'clumsy', 60)`,
			"handed":     `select lanekeeper.acquire_or_enqueue_agent_lock('x', 'clumsy', 60, 60, true)`,
			"second look": `with first as materialized (select await_agent_lock('x', 'clumsy', 60))
				select (select count(*) from first), await_agent_lock('x', 'clumsy', 60)`,
			"granted": `select acquire_agent_lock('y', 'clumsy', 60), await_agent_lock('x', 'clumsy', 60)`,
		} {
			t.Run(how+" "+what, func(t *testing.T) {
				t.Parallel()
				db := pgtest.DB(t)
				token := mustAcquire(t, db, "x", "a", 60)
				pgtest.Exec(t, db, `insert into agent_locks (lane, fencing_token, expires_at) values ('y', 1, clock_timestamp())`)
				leave(t, db, query)
				wantHolderUnaffected(t, db, token)
			})
		}
	}
}

// wantHolderUnaffected checks that a, the holder of lane x, can renew and release it, that the next owner can acquire
// it, and that Expire and Prune do not block.
func wantHolderUnaffected(t *testing.T, db *pgxpool.Pool, token int64) {
	t.Helper()
	hurry := pgtest.Begin(t, db)
	pgtest.Exec(t, hurry, `set local lock_timeout = '1s'`)
	assert.True(t, pgtest.Value[bool](t, hurry, `select renewed and not busy
		from lanekeeper.renew_agent_locks('{x}', '{a}', array[$1::bigint], '{60}')`, token),
		"the holder's renewal is held up")
	for what, query := range map[string]string{
		"renewal": `select renew_agent_lock('x', 'a', $1, 60)`,
		"refresh": `select acquired and fencing_token = $1 from acquire_agent_lock('x', 'a', 60)`,
	} {
		assert.Truef(t, pgtest.Value[bool](t, hurry, query, token), "%s is refused", what)
	}
	g := tryAcquire(t, hurry, "y", "another", 60)
	assert.True(t, g.token != 0 || !g.acquired, "a lane without a token")
	k, _ := newKeeper(t, hurry)
	_, err := k.Expire(t.Context(), "")
	assert.NoError(t, err)
	assert.NoError(t, lanes.Prune(t.Context(), hurry, 24*time.Hour))
	assert.True(t, pgtest.Value[bool](t, hurry, `select release_agent_lock('x', 'a', $1)`, token),
		"the holder cannot release")
	commit(t, hurry)
	mustAcquire(t, db, "x", "next", 60)
}

// A lane granted in an open transaction is busy for others at once. No other lane is affected.
func TestUncommittedGrantIsBusyForOthers(t *testing.T) {
	t.Parallel()
	for how, leave := range openTransactions {
		for what, before := range map[string]string{
			"first hold": `select 1`,
			"next hold":  `insert into agent_locks (lane, fencing_token, expires_at) values ('y', 1, clock_timestamp())`,
		} {
			t.Run(how+" "+what, func(t *testing.T) {
				t.Parallel()
				db := pgtest.DB(t)
				token := mustAcquire(t, db, "x", "a", 60)
				pgtest.Exec(t, db, before)
				leave(t, db, `select acquire_agent_lock('y', 'clumsy', 60)`)
				k, _ := newKeeper(t, db)
				_, err := k.Acquire(t.Context(), "y")
				assert.ErrorIs(t, err, lanes.ErrBusy, "Acquire", "want ErrBusy")
				wantHolderUnaffected(t, db, token)
			})
		}
	}
}

// A blocked release or break names the open transaction within about a second.
func TestBlockedReleaseNamesTransaction(t *testing.T) {
	t.Parallel()
	for how, leave := range openTransactions {
		for what, query := range map[string]string{
			"release": `select release_agent_lock('x', 'a')`,
			"free": `select lanekeeper.release_agent_lock('x', 'a', (select fencing_token from agent_locks where lane = 'x'),
				true)`,
			"break":    `select break_agent_lock('x', 'test')`,
			"quitting": `select lanekeeper.release_agent_lock('x', 'a', null, true) from leave_agent_lock_queue('x', 'a')`,
		} {
			for fences := 1; fences <= 2; fences++ {
				t.Run(how+" "+what+strings.Repeat(" shared", fences-1), func(t *testing.T) {
					t.Parallel()
					db := pgtest.DB(t)
					token := mustAcquire(t, db, "x", "a", 60)
					for range fences {
						leave(t, db, `select fence_agent_lock('x', $1)`, token)
					}
					before := laneRow(t, db, "x")
					_, err := db.Exec(t.Context(), query)
					pgErr, ok := errors.AsType[*pgconn.PgError](err)
					require.Truef(t, ok && pgErr.Code == "55P03" && pgErr.Hint != "", "%v, want SQLSTATE 55P03 with a hint", err)
					who := map[bool]string{true: "prepared transaction '", false: "pid "}[how == "prepared"]
					n := strings.Count(pgErr.Message, who)
					assert.Truef(t, n == fences && strings.Contains(pgErr.Message, " since 2") &&
						strings.Contains(pgErr.Message, `'x'`),
						"it says %q, want %d times %q, the lane and since when", pgErr.Message, fences, who)
					assert.Equal(t, before, laneRow(t, db, "x"))
				})
			}
		}
	}
}

// A renewal passes a fenced write, and names any other blocking transaction.
func TestBlockedRenewalNamesTransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	leaveOpen(t, db, `select from agent_locks where lane = 'x' for update`)
	_, err := db.Exec(t.Context(), `select renew_agent_lock('x', 'a', $1, 60)`, token)
	wantCode(t, err, "55P03")
	assert.ErrorContains(t, err, "pid ")
}

func TestBlockedBreakNamesTransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	l := acquireLane(t, k, "x")
	write := pgtest.Begin(t, db)
	require.NoError(t, l.Fence(t.Context(), write))
	broken, err := lanes.Break(t.Context(), db, "x", "stuck")
	held, ok := errors.AsType[*lanes.BlockedError](err)
	require.Truef(t, !broken && ok && errors.Is(err, lanes.ErrBlocked) && strings.Contains(held.Reason, "pid ") &&
		held.Hint != "", "Break: %v, %v", broken, err)
	commit(t, write)
	broken, err = lanes.Break(t.Context(), db, "x", "stuck")
	assert.Truef(t, err == nil && broken, "Break after the write: %v, %v", broken, err)
}

// A queue place that gets the lane in an open transaction blocks no other waiter.
func TestUncommittedHandoverBlocksNoWaiter(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	enqueue(t, db, "x", "b", 60)
	leaveOpen(t, db, `select lanekeeper.release_agent_lock('x', 'a', $1, true)`, token)
	hurry := pgtest.Begin(t, db)
	pgtest.Exec(t, hurry, `set local lock_timeout = '1s'`)
	enqueue(t, hurry, "x", "b", 60)
	enqueue(t, hurry, "x", "c", 60)
	commit(t, hurry)
}

// A place lasts a minute at most, so a dead waiter delays no one.
func TestQueueEntryLastsAMinuteAtMost(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "x", "a", 60)
	pgtest.Exec(t, db, `select await_agent_lock('x', 'gone', 60, 86400)`)
	assert.True(t, pgtest.Value[bool](t, db,
		`select expires_at < clock_timestamp() + interval '61 seconds' from agent_lock_waiters`),
		"the place in the queue lasts longer")
}
