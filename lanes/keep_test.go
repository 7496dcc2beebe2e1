package lanes_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// ended waits for the end of a lease and returns when it came.
func ended(t *testing.T, l *lanes.Lease, within time.Duration) time.Time {
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
	case <-l.Lost():
	default:
		t.Errorf("Lost of %s is open", l.Lane())
	}
	return at
}

func TestRunKeepsALeaseBeyondItsTTL(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	run(t, k)
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(4*time.Second))
	acquired(t, l, err)
	first := l.ExpiresAt()
	pgtest.Eventually(t, soon, func() bool {
		return l.Context().Err() != nil || get[bool](t, db, `select clock_timestamp() > $1::timestamptz`, first)
	}, "the first lease would have ended")
	if cause := context.Cause(l.Context()); cause != nil {
		t.Fatalf("lost: %v", cause)
	}
	if token := get[int64](t, db, `select fencing_token from agent_locks where expires_at > clock_timestamp()`); token != l.Token() {
		t.Errorf("token %d, want %d", token, l.Token())
	}
	if !l.ExpiresAt().After(first) {
		t.Errorf("ExpiresAt %s after renewals, %s before", l.ExpiresAt(), first)
	}
	log.want(t, 0, "lane lost")
}

func TestOneStatementRenewsEverything(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, _ := keeper(t, w)
	run(t, k)
	const n = 20
	for i := range n {
		l, err := k.Acquire(t.Context(), fmt.Sprint("x", i), lanes.WithTTL(6*time.Second))
		acquired(t, l, err)
	}
	start, sent := time.Now(), w.count("renew_agent_locks")
	pgtest.Eventually(t, soon, func() bool { return w.count("renew_agent_locks") >= sent+3 }, "renewals go on")
	if took := time.Since(start); took < 2500*time.Millisecond { // some are asked for early, together with the first
		t.Errorf("3 renewals of %d leases within %s: want one every 2 s", n, took)
	}
	if live := get[int](t, db, `select count(*) from agent_locks_live`); live != n {
		t.Errorf("%d of %d lanes are held", live, n)
	}
}

// The local clock starts before the call, so the work ends no later than the lease.
func TestTheLocalEndCountsFromBeforeTheCall(t *testing.T) {
	t.Parallel()
	w := &wire{DB: pgtest.DB(t), delay: 600 * time.Millisecond}
	k, log := keeper(t, w)
	least := onceWithin(t, 2400*time.Millisecond, func() time.Duration {
		start := time.Now()
		l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(2*time.Second))
		acquired(t, l, err)
		took := ended(t, l, soon).Sub(start)
		log.want(t, 1, "level=ERROR", `msg="lane lost"`, "lane=x", "owner="+l.Owner().String())
		if err := l.Release(t.Context()); !errors.Is(err, lanes.ErrLost) {
			t.Errorf("release: %v, want ErrLost", err)
		}
		return took
	})
	if least < 1900*time.Millisecond {
		t.Errorf("the work ended %s after the call, want 2 s", least)
	}
}

// onceWithin measures until one of a few tries is done within a time. On a busy machine each may be late, where a
// defect makes all of them late. It returns the shortest.
func onceWithin(t *testing.T, most time.Duration, try func() time.Duration) time.Duration {
	t.Helper()
	least := try()
	for n := 1; n < 6 && least > most; n++ {
		least = min(least, try())
	}
	if least > most {
		t.Errorf("it took %s each time, want at most %s", least, most)
	}
	return least
}

func TestWorkEndsInTimeWhenTheDatabaseIsGone(t *testing.T) {
	t.Parallel()
	w := &wire{DB: pgtest.DB(t)}
	k, log := keeper(t, w)
	run(t, k)
	onceWithin(t, 2400*time.Millisecond, func() time.Duration {
		l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(2*time.Second))
		acquired(t, l, err)
		renewed := w.count("renew_agent_locks")
		pgtest.Eventually(t, soon, func() bool { return w.count("renew_agent_locks") > renewed }, "a renewal")
		w.cut.Store(true)
		start := time.Now()
		took := ended(t, l, soon).Sub(start)
		log.want(t, 1, `msg="lane lost"`, "owner="+l.Owner().String())
		w.cut.Store(false) // for the release
		if err := l.Release(t.Context()); err != nil && !errors.Is(err, lanes.ErrLost) {
			t.Error(err)
		}
		return took
	})
}

func TestALeaseSurvivesAShortOutage(t *testing.T) {
	t.Parallel()
	w := &wire{DB: pgtest.DB(t)}
	k, log := keeper(t, w)
	run(t, k)
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(9*time.Second))
	acquired(t, l, err)
	w.cut.Store(true)
	pgtest.Eventually(t, soon, func() bool { return len(log.find("lanes not renewed")) > 0 }, "a renewal fails")
	w.cut.Store(false)
	ends := l.ExpiresAt()
	pgtest.Eventually(t, soon, func() bool { return l.ExpiresAt().After(ends) || l.Context().Err() != nil }, "renewed again")
	if cause := context.Cause(l.Context()); cause != nil {
		t.Errorf("lost: %v", cause)
	}
}

func TestABrokenLaneEndsTheWork(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	run(t, k)
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(9*time.Second))
	acquired(t, l, err)
	other, err := k.Acquire(t.Context(), "y", lanes.WithTTL(9*time.Second))
	acquired(t, other, err)
	if broken, err := lanes.Break(t.Context(), db, "x", "stuck"); err != nil || !broken {
		t.Fatalf("Break: %v, %v", broken, err)
	}
	if at, end := ended(t, l, soon), l.ExpiresAt(); !at.Before(end) {
		t.Errorf("the work ended at %s, with its lease at %s", at, end)
	}
	if other.Context().Err() != nil {
		t.Error("another lane ended too")
	}
	log.want(t, 1, "level=ERROR", `msg="lane lost"`, "lane=x")
	if broken, err := lanes.Break(t.Context(), db, "x", "stuck"); err != nil || broken {
		t.Errorf("Break of a free lane: %v, %v", broken, err)
	}
}

// A break reaches its holder by notification, long before the next renewal.
func TestABrokenLaneReachesItsHolderAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k := listening(t, db)
	onceWithin(t, time.Second, func() time.Duration {
		l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(time.Hour))
		acquired(t, l, err)
		other, err := k.Acquire(t.Context(), "y", lanes.WithTTL(time.Hour))
		acquired(t, other, err)
		began := time.Now()
		if broken, err := lanes.Break(t.Context(), db, "x", "stuck"); err != nil || !broken {
			t.Fatalf("Break: %v, %v", broken, err)
		}
		took := ended(t, l, soon).Sub(began)
		if cause := context.Cause(l.Context()); !errors.Is(cause, lanes.ErrLost) || other.Context().Err() != nil {
			t.Errorf("the work ended with %v, that in another lane with %v", cause, other.Context().Err())
		}
		if err := other.Release(t.Context()); err != nil {
			t.Error(err)
		}
		return took
	})
}

// The process takes the lane again before it has noticed that it had lost it.
func TestABrokenLaneThatIsTakenAgainEndsTheOldWorkOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, _ := keeper(t, db)
	old, err := k.Acquire(t.Context(), "x", lanes.WithTTL(9*time.Second))
	acquired(t, old, err)
	if _, err := lanes.Break(t.Context(), db, "x", "stuck"); err != nil {
		t.Fatal(err)
	}
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(9*time.Second))
	acquired(t, l, err)
	run(t, k)
	if at, end := ended(t, old, soon), old.ExpiresAt(); !at.Before(end) {
		t.Errorf("the old work ended at %s, with its lease at %s", at, end)
	}
	if cause := context.Cause(l.Context()); cause != nil {
		t.Errorf("the new hold ended: %v", cause)
	}
}

// A row that a stranger has locked is asked again soon, well before the end of the lease.
func TestABusyRowIsAskedAgainSoon(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	w := &wire{DB: db}
	k, log := keeper(t, w)
	l, err := k.Acquire(t.Context(), "x", lanes.WithTTL(9*time.Second))
	acquired(t, l, err)
	stranger := begin(t, db)
	exec(t, stranger, `select from agent_locks where lane = 'x' for update`)
	run(t, k)
	pgtest.Eventually(t, soon, func() bool { return w.count("renew_agent_locks") >= 2 }, "the row is asked again")
	commit(t, stranger)
	ends := l.ExpiresAt()
	pgtest.Eventually(t, soon, func() bool { return l.ExpiresAt().After(ends) || l.Context().Err() != nil }, "renewed")
	if cause := context.Cause(l.Context()); cause != nil {
		t.Errorf("lost: %v", cause)
	}
	log.want(t, 0, "lane lost")
}

func TestThreadsAreRenewedByHandAndLosingThemCancelsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	run(t, k)
	l, err := k.Acquire(t.Context(), "thread:1", lanes.WithTTL(5*time.Second))
	acquired(t, l, err)
	ends := l.ExpiresAt()
	if err := l.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	if !l.ExpiresAt().After(ends) {
		t.Error("Renew did not prolong the lease")
	}
	select {
	case <-l.Lost():
	case <-time.After(soon):
		t.Fatal("an idle thread keeps its lane")
	}
	if l.Context().Err() != nil {
		t.Errorf("the work of a thread was cancelled: %v", context.Cause(l.Context()))
	}
	if err := l.Renew(t.Context()); !errors.Is(err, lanes.ErrLost) {
		t.Errorf("Renew of a lost lane: %v, want ErrLost", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("release: %v", err)
	}
	log.want(t, 0, "level=ERROR")
}
