package lanes_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// terminate ends the sessions that wait in a statement that contains text.
func terminate(t *testing.T, db *pgxpool.Pool, text string) {
	t.Helper()
	exec(t, db, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()
		and wait_event_type = 'Lock' and query like '%' || $1 || '%' and pid <> pg_backend_pid()`, text)
}

// A release whose session is killed is made over another one, also where it waited for a fenced write.
func TestAReleaseWhoseSessionIsKilledFreesTheLane(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	onceWithin(t, 2*time.Second, func() time.Duration {
		l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(time.Hour))
		acquired(t, l, err)
		write := begin(t, db)
		if err := l.Fence(t.Context(), write); err != nil {
			t.Fatal(err)
		}
		released := make(chan error, 1)
		go func() { released <- l.Release(t.Context()) }()
		blocked(t, db, "release_agent_lock")
		terminate(t, db, "release_agent_lock")
		began := time.Now()
		commit(t, write)
		if err := <-released; err != nil {
			t.Errorf("Release: %v", err)
		}
		if get[bool](t, db, `select is_agent_lock_held('x')`) {
			t.Error("the lane is still held")
		}
		return time.Since(began)
	})
	if len(log.find("lane not released yet", "lane=x")) == 0 {
		t.Error("no line says that it had to be tried again")
	}
}

// A release whose answer is lost has been made: the lane was not lost.
func TestAReleaseWhoseAnswerIsLostIsARelease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, log := keeper(t, w)
	l, err := k.Acquire(t.Context(), "x")
	acquired(t, l, err)
	w.lose.Store(true)
	released := make(chan error, 1)
	go func() { released <- l.Release(t.Context()) }()
	pgtest.Eventually(t, soon, func() bool { return len(log.find("lane not released yet")) > 0 }, "the answer is lost")
	w.lose.Store(false)
	if err := <-released; err != nil {
		t.Errorf("Release: %v", err)
	}
	log.want(t, 1, "lane released", "lane=x")
	log.want(t, 0, "lane lost")
}

// What Release could not do in its time the keeper does afterwards, long before the lease ends.
func TestAReleaseGoesOnInTheBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, log := keeper(t, w)
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(time.Hour))
	acquired(t, l, err)
	w.cut.Store(true)
	if err := l.ReleaseWithin(t.Context(), 100*time.Millisecond); err == nil || errors.Is(err, lanes.ErrLost) {
		t.Errorf("a release without a database: %v", err)
	}
	w.cut.Store(false)
	pgtest.Eventually(t, soon, func() bool { return !get[bool](t, db, `select is_agent_lock_held('x')`) }, "the lane is free")
	log.want(t, 1, "lane released", "lane=x")
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("Release afterwards: %v", err)
	}
}

// Who takes the lane again before the release has come through keeps it.
func TestAReleaseInTheBackgroundLeavesALaterHoldAlone(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, _ := keeper(t, w)
	owner := lanes.ClaimOwner(execution, 1)
	l, err := k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour))
	acquired(t, l, err)
	w.cut.Store(true)
	if err := l.ReleaseWithin(t.Context(), 100*time.Millisecond); err == nil {
		t.Error("a release without a database")
	}
	w.cut.Store(false)
	for { // the background may have released it
		if l, err = k.AcquireAs(t.Context(), owner, "x", lanes.WithTTL(time.Hour)); !errors.Is(err, lanes.ErrBusy) {
			break
		}
	}
	acquired(t, l, err)
	other, err := k.Acquire(t.Context(), "y")
	acquired(t, other, err)
	before := w.count("release_agent_lock(@")
	if err := other.Release(t.Context()); err != nil || w.count("release_agent_lock(@") == before {
		t.Error(err)
	}
	if cause := context.Cause(l.Context()); cause != nil || !get[bool](t, db, `select is_agent_lock_held('x')`) {
		t.Errorf("the later hold has ended: %v", cause)
	}
}

// An acquire whose answer is lost, and whose lane cannot be given back at once, is given back later.
func TestALaneOfWhichNobodyKnowsIsFreedInTheBackground(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, log := keeper(t, w)
	w.lose.Store(true)
	exec(t, db, `alter function leave_agent_lock_queue rename to away`)
	exec(t, db, `create function leave_agent_lock_queue(text, text) returns void language plpgsql as $$ begin
		raise exception 'the server goes down' using errcode = '57P01'; end $$`)
	if _, err := k.Acquire(t.Context(), "x", lanes.WithTTL(time.Hour)); err == nil {
		t.Fatal("no error although the answer was lost")
	}
	log.want(t, 1, "lane may be held", "lane=x")
	if !get[bool](t, db, `select is_agent_lock_held('x')`) {
		t.Fatal("the statement did not reach the database: the test tests nothing")
	}
	exec(t, db, `drop function leave_agent_lock_queue`)
	exec(t, db, `alter function away rename to leave_agent_lock_queue`)
	w.lose.Store(false)
	pgtest.Eventually(t, soon, func() bool { return !get[bool](t, db, `select is_agent_lock_held('x')`) }, "the lane is free")
}

// At its shutdown a process releases all lanes, though one is in use and a session is killed.
func TestReleaseAllIsTriedAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := keeper(t, db)
	var used *lanes.Lease
	for _, lane := range []string{"a", "b", "c"} {
		l, err := k.Acquire(t.Context(), lane, lanes.WithTTL(time.Hour))
		used = acquired(t, l, err)
	}
	write := begin(t, db)
	if err := used.Fence(t.Context(), write); err != nil {
		t.Fatal(err)
	}
	released := make(chan error, 1)
	go func() { released <- k.ReleaseAll(t.Context()) }()
	blocked(t, db, "release_agent_lock")
	terminate(t, db, "release_agent_lock")
	pgtest.Eventually(t, soon, func() bool { return get[int](t, db, `select count(*) from agent_locks_live`) == 1 }, "the others are free")
	commit(t, write)
	if err := <-released; err != nil {
		t.Error(err)
	}
	if n := get[int](t, db, `select count(*) from agent_locks_live`); n != 0 {
		t.Errorf("%d are held after ReleaseAll", n)
	}
}
