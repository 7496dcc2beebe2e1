package lanes_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

const execution = "018f0000-0000-7000-8000-00000000000a"

func TestBusyErrorNamesHolder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	first := acquireLane(t, k, "heartbeat")
	_, err := k.Acquire(t.Context(), "heartbeat")
	busy, ok := errors.AsType[*lanes.BusyError](err)
	require.Truef(t, ok && errors.Is(err, lanes.ErrBusy), "error %v, want a BusyError", err)
	assert.Equal(t, "heartbeat", busy.Lane)
	assert.Equal(t, first.Owner().String(), busy.Holder)
	assert.Truef(t, busy.ExpiresAt.Equal(first.ExpiresAt()), "busy until %s, want %s", busy.ExpiresAt, first.ExpiresAt())
	assert.Truef(t, strings.HasPrefix(err.Error(), "acquire heartbeat: lane busy: held by run/"), "error text %q", err)
	log.want(t, 1, "level=INFO", `msg="lane acquired"`, "lane=heartbeat", "owner="+first.Owner().String())
	log.want(t, 1, "level=WARN", `msg="lane busy"`, "lane=heartbeat", "owner=run/", "holder="+first.Owner().String())
	assert.NoError(t, first.Release(t.Context()))
	log.want(t, 1, "level=INFO", `msg="lane released"`, "lane=heartbeat", "owner="+first.Owner().String())
	log.want(t, 0, "stale")
}

// A skipped run never frees the lane that it did not get.
func TestFailedAcquireReleasesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	late := acquireLane(t, k, "x")
	expire(t, db, "x")
	acquireLane(t, k, "x")
	want := laneRow(t, db, "x")
	_, err := k.Acquire(t.Context(), "x")
	assert.ErrorIs(t, err, lanes.ErrBusy)
	assert.ErrorIs(t, late.Release(t.Context()), lanes.ErrLost)
	assert.Equal(t, want, laneRow(t, db, "x"))
}

func TestTakeoverIsLogged(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	mustAcquire(t, db, "x", "a dead run", 60)
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '90 seconds'`)
	acquireLane(t, k, "x")
	log.want(t, 1, "level=WARN", `msg="lane stale, clearing"`, "lane=x", `holder="a dead run"`, "age=1m30")
}

func TestOwnersAreUnique(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	id := trace.New(trace.Heartbeat)
	ctx := trace.With(t.Context(), trace.Span{TraceID: id})
	a, err := k.Acquire(ctx, "a")
	mustAcquired(t, a, err)
	b, err := k.Acquire(ctx, "b")
	mustAcquired(t, b, err)
	if !strings.HasPrefix(a.Owner().String(), string(id)+"/") || a.Owner() == b.Owner() {
		t.Errorf("owners %s and %s of trace %s", a.Owner(), b.Owner(), id)
	}
	assert.Equal(t, string(id), pgtest.Value[string](t, db, `select trace_id from agent_locks_live where lane = 'a'`), id)
	for name, owner := range map[string]lanes.Owner{
		"zero": {}, "constant": lanes.ClaimOwner("heartbeat-cron", 1), "no claim": lanes.ClaimOwner(execution, 0),
	} {
		_, err := k.AcquireAs(t.Context(), owner, "c")
		assert.ErrorIs(t, err, lanes.ErrInvalid, name, "owner", "want ErrInvalid")
		_, err = k.AcquireWaitAs(t.Context(), owner, "c")
		assert.ErrorIs(t, err, lanes.ErrInvalid, name, "owner waits", "want ErrInvalid")
	}
	assert.Equal(t, execution+"#7", lanes.ClaimOwner(execution, 7).String())
}

func TestReleaseIsLoggedUnderTraceOfAcquisition(t *testing.T) {
	t.Parallel()
	log := new(logs)
	k := lanes.NewKeeper(pgtest.DB(t), lanes.Options{Logger: slog.New(logging.Handler(slog.NewTextHandler(log, nil)))})
	id := trace.New(trace.Operate)
	lease, err := k.Acquire(trace.With(t.Context(), trace.Span{TraceID: id}), "operate")
	mustAcquired(t, lease, err)
	require.NoError(t, lease.Release(t.Context()))
	log.want(t, 1, `msg="lane released"`, "trace_id="+string(id))
}

func TestTTLDependsOnLaneName(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	for lane, want := range map[string]int{
		"heartbeat": 300, "operate": 300, "webhook:github:1": 300, "automation:1": 300, "objective:1": 300,
		"thread:1": 600, "pipeline:prices": 3600, "consolidate:a:2024:11": 3600, "heartbeat:x": 3600, "threads": 3600,
	} {
		acquireLane(t, k, lane)
		assert.Equal(t, want, pgtest.Value[int](t, db, `select ttl_seconds from agent_locks where lane = $1`, lane), lane)
	}
	acquireLane(t, k, "short", lanes.WithTTL(1500*time.Millisecond))
	assert.Equal(t, 2, pgtest.Value[int](t, db, `select ttl_seconds from agent_locks where lane = 'short'`))
}

func TestInvalidInputIsErrInvalid(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	for name, err := range map[string]error{
		"lane":         errOf(k.Acquire(t.Context(), "")),
		"long lane":    errOf(k.Acquire(t.Context(), strings.Repeat("x", 256))),
		"zero ttl":     errOf(k.Acquire(t.Context(), "x", lanes.WithTTL(0))),
		"negative ttl": errOf(k.Acquire(t.Context(), "x", lanes.WithTTL(-time.Millisecond))),
		"long ttl":     errOf(k.Acquire(t.Context(), "x", lanes.WithTTL(31*24*time.Hour))),
		"endless ttl":  errOf(k.Acquire(t.Context(), "x", lanes.WithTTL(1<<62))),
		"waiting":      errOf(k.AcquireWait(t.Context(), "a\nb")),
		"no text":      errOf(k.Acquire(t.Context(), "a\x00b")),
		"no UTF-8":     errOf(k.AcquireWait(t.Context(), "a\xffb")),
		"reason":       errOf(lanes.Break(t.Context(), db, "x", " ")),
		"no reason":    errOf(lanes.Break(t.Context(), db, "x", "\x00")),
	} {
		ours := !strings.HasPrefix(name, "no ") && name != "reason"
		assert.Truef(t, errors.Is(err, lanes.ErrInvalid) && (!ours || strings.Contains(err.Error(), "is not valid: ")),
			"%s: %v, want ErrInvalid with the database's words", name, err)
	}
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_locks`))
}

func errOf[T any](_ T, err error) error { return err }

func TestNestedHoldsAreCounted(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	owner := liveClaim(t, db)
	outer, err := k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour))
	mustAcquired(t, outer, err)
	inner, err := k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Second))
	mustAcquired(t, inner, err)
	assert.Equal(t, 3600, pgtest.Value[int](t, db, `select ttl_seconds from agent_locks`))
	for range 2 { // idempotent: the second must not count for the outer hold
		assert.NoError(t, inner.Release(t.Context()))
	}
	if inner.Context().Err() == nil || outer.Context().Err() != nil {
		t.Errorf("after the inner release: inner %v, outer %v", inner.Context().Err(), outer.Context().Err())
	}
	held, err := lanes.Held(t.Context(), db, "x")
	assert.Truef(t, err == nil && held, "after the inner release: held %v, %v", held, err)
	assert.NoError(t, outer.Release(t.Context()))
	held, err = lanes.Held(t.Context(), db, "x")
	assert.Truef(t, err == nil && !held, "after the outer release: held %v, %v", held, err)
}

func TestReleasedLeaseIsNotRenewed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	owner := liveClaim(t, db)
	var outer, inner, other *lanes.Lease
	for _, lease := range []**lanes.Lease{&outer, &inner, &other} {
		var err error
		*lease, err = k.AcquireAs(t.Context(), owner, "thread:nested")
		require.NoError(t, err)
	}
	require.NoError(t, inner.Release(t.Context()))
	assert.ErrorIs(t, inner.Renew(t.Context()), lanes.ErrLost, "the released inner lease")
	assert.NoError(t, outer.Renew(t.Context()), "the outer lease")
	require.NoError(t, errors.Join(outer.Release(t.Context()), other.Release(t.Context())))
	assert.ErrorIs(t, outer.Renew(t.Context()), lanes.ErrLost)
}

func TestReleaseWorksWithCancelledContext(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := newKeeper(t, db)
	ctx, cancel := context.WithCancel(t.Context())
	l, err := k.Acquire(ctx, "x")
	mustAcquired(t, l, err)
	cancel()
	assert.Error(t, l.Context().Err(), "the lease's context outlives its parent")
	for range 2 {
		assert.NoError(t, l.Release(ctx))
	}
	assert.True(t, !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "not released")
	log.want(t, 1, "lane released")
}

// A release that did not reach the database can be repeated, and meanwhile its owner can come back.
func TestReleaseIsRetriedAfterOutage(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, _ := newKeeper(t, w)
	l := acquireLane(t, k, "x")
	w.disconnected.Store(true)
	err := l.Release(t.Context())
	assert.Truef(t, err != nil && !errors.Is(err, lanes.ErrLost), "release without a database: %v", err)
	assert.Error(t, l.Context().Err(), "work continues after Release")
	w.disconnected.Store(false)
	assert.NoError(t, l.Release(t.Context()))
	assert.True(t, !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "not released")
}

// An acquire without a response must not keep the lane busy until its TTL. Nor must an acquire that commits and then
// gets an error, from a server that shuts down or a pooler that has lost it.
func TestLostResponseLeavesLaneFree(t *testing.T) {
	t.Parallel()
	for what, err := range map[string]error{
		"nothing": nil, "the server goes down": &pgconn.PgError{Code: "57P01"},
		"a pooler lost the server": &pgconn.PgError{Code: "08P01"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			w := &faultyDB{DB: db, responseErr: err}
			k, _ := newKeeper(t, w)
			w.dropResponses.Store(true)
			_, err := k.Acquire(t.Context(), "x")
			require.Error(t, err, "no error although the response was lost")
			w.dropResponses.Store(false)
			require.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from agent_locks where lane = 'x'`))
			assert.True(t, !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "a lane without a known owner is held")
		})
	}
}

// A caller who leaves during the grant must not leave the lane held. The grant commits after the caller's end: the
// statement here outlives its cancellation.
func TestCallerLeavingDuringGrantLeavesLaneFree(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	pgtest.Exec(t, db, `
		create function slowly() returns trigger language plpgsql as $$
		begin
			begin
				perform pg_advisory_xact_lock(42);
			exception when query_canceled then
				perform pg_sleep(0.5);
			end;
			return new;
		end $$`)
	pgtest.Exec(t, db, `create trigger slowly before insert on agent_locks for each row execute function slowly()`)
	gate := pgtest.Begin(t, db)
	pgtest.Exec(t, gate, `select pg_advisory_xact_lock(42)`)

	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 2)
	go func() {
		lease, err := k.Acquire(ctx, "x")
		if err == nil {
			err = lease.Release(ctx)
		}
		left <- err
	}()
	pgtest.AwaitBlocked(t, db, 1, "acquire_agent_lock")
	leave()
	select {
	case err := <-left:
		t.Errorf("the caller did not wait for the response: %v", err)
		left <- nil
	case <-time.After(200 * time.Millisecond):
	}
	commit(t, gate)
	assert.NoError(t, <-left)
	pgtest.Until(t, db, 1, `select count(*) from agent_locks where lane = 'x'`)
	assert.True(t, !pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "a lane without a known owner is held")
}

func TestFenceRejectsStaleWrites(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := newKeeper(t, db)
	l := acquireLane(t, k, "x")
	tx := pgtest.Begin(t, db)
	assert.NoError(t, l.Fence(t.Context(), tx), "fence of a live lease")
	commit(t, tx)
	expire(t, db, "x")
	mustAcquire(t, db, "x", "another", 60)
	assert.ErrorIs(t, l.Fence(t.Context(), pgtest.Begin(t, db)), lanes.ErrStale)
}

func TestDropForgetsLeasesOfExecution(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &faultyDB{DB: db}
	k, log := newKeeper(t, w)
	runKeeper(t, k)
	owner := liveClaim(t, db)
	outer, err := k.AcquireAs(t.Context(), owner, "objective:1", lanes.WithTTL(20*time.Second))
	mustAcquired(t, outer, err)
	step, err := k.AcquireAs(t.Context(), owner, "objective:1", lanes.WithTTL(9*time.Second))
	mustAcquired(t, step, err)
	if step.Token() != outer.Token() {
		t.Errorf("token %d, want %d of the outer hold", step.Token(), outer.Token())
	}
	assert.NoError(t, step.Release(t.Context()))
	ends := pgtest.Value[time.Time](t, db, `select expires_at from agent_locks`)
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[time.Time](t, db, `select expires_at from agent_locks`).After(ends)
	}, "the lease is renewed")
	want := pgtest.Value[string](t, db, `select locked_by || fencing_token from agent_locks`)
	k.Drop(owner)
	if err := context.Cause(outer.Context()); !errors.Is(err, context.Canceled) || errors.Is(err, lanes.ErrLost) {
		t.Errorf("a dropped lease ends with %v", err)
	}
	assert.NoError(t, outer.Release(t.Context()), "release of a dropped lease")
	got := pgtest.Value[string](t, db, `select locked_by || fencing_token from agent_locks`)
	assert.Truef(t, got == want && w.count("release_agent_lock(@") == 0,
		"Drop or Release touched the lane: %s, want %s", got, want)
	log.want(t, 0, "lane lost")
}

func TestDisabledLanesGrantEverything(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	log := new(logs)
	k := lanes.NewKeeper(db, lanes.Options{Disabled: true, Logger: slog.New(slog.NewTextHandler(log, nil))})
	runKeeper(t, k)
	a := acquireLane(t, k, "x")
	b, err := k.AcquireWait(t.Context(), "x")
	mustAcquired(t, b, err)
	assert.NoError(t, errors.Join(b.Fence(t.Context(), db), b.Renew(t.Context()), b.Release(t.Context())))
	if a.Context().Err() != nil || b.Context().Err() == nil {
		t.Errorf("contexts: held %v, released %v", a.Context().Err(), b.Context().Err())
	}
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_locks`))
	log.want(t, 1, "level=WARN", "lanes are off")
}
