package lanes_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

const (
	racers = 32
	grants = 160
)

// wide is a pool with a connection for every racer.
func wide(t testing.TB) *pgxpool.Pool {
	t.Helper()
	db, err := postgres.Open(t.Context(), pgtest.URL(t), postgres.Options{MaxConns: racers + 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	return db
}

// arena notices two holders at once and tokens that do not grow.
type arena struct {
	t      *testing.T
	inside atomic.Int32
	mu     sync.Mutex
	tokens []int64
}

// hold is to be called by a holder, which leaves with the returned function. last is true
// when there were enough grants.
func (a *arena) hold(token int64) (last bool, leave func()) {
	if n := a.inside.Add(1); n != 1 {
		a.t.Errorf("%d holders at once", n)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.tokens); n > 0 && a.tokens[n-1] >= token {
		a.t.Errorf("grant %d has token %d after %d", n, token, a.tokens[n-1])
	}
	a.tokens = append(a.tokens, token)
	return len(a.tokens) >= grants, func() { a.inside.Add(-1) }
}

// race runs work in every racer until one of them says that it was the last.
func race(t *testing.T, work func(ctx context.Context, racer, round int) (last bool, err error)) {
	t.Helper()
	ctx, enough := context.WithCancel(t.Context())
	defer enough()
	var running sync.WaitGroup
	for racer := range racers {
		running.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				last, err := work(ctx, racer, round)
				if err != nil && ctx.Err() == nil {
					t.Error(err)
					enough()
				}
				if last {
					enough()
				}
			}
		})
	}
	running.Wait()
}

// Every third holder dies: its lease ends without a release.
func TestRaceOfPlainSQLSessions(t *testing.T) {
	t.Parallel()
	db := wide(t)
	a := &arena{t: t}
	race(t, func(ctx context.Context, racer, round int) (bool, error) {
		owner := fmt.Sprintf("racer %d.%d", racer, round)
		g, err := tryErr(ctx, db, "x", owner, 60)
		if err != nil || !g.acquired {
			return false, err
		}
		last, leave := a.hold(g.token)
		if _, err := db.Exec(ctx, `select fence_agent_lock('x', $1)`, g.token); err != nil {
			return last, err
		}
		leave()
		end := `select release_agent_lock('x', $1, $2)`
		if round%3 == 0 {
			end = `update agent_locks set expires_at = clock_timestamp() where lane = 'x' and locked_by = $1 and fencing_token = $2`
		}
		_, err = db.Exec(ctx, end, owner, g.token)
		return last, err
	})
	if len(a.tokens) < grants {
		t.Errorf("%d grants, want %d", len(a.tokens), grants)
	}
}

func TestRaceThroughGo(t *testing.T) {
	t.Parallel()
	db := wide(t)
	k := listening(t, db)
	a := &arena{t: t}
	race(t, func(ctx context.Context, racer, round int) (bool, error) {
		acquire := k.Acquire
		if racer%4 == 0 {
			acquire = k.AcquireWait
		}
		lease, err := acquire(ctx, "x")
		if errors.Is(err, lanes.ErrBusy) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		last, leave := a.hold(lease.Token())
		if cause := context.Cause(lease.Context()); cause != nil && ctx.Err() == nil {
			t.Errorf("a live lease is cancelled: %v", cause)
		}
		leave()
		return last, lease.Release(ctx)
	})
	if len(a.tokens) < grants {
		t.Errorf("%d grants, want %d", len(a.tokens), grants)
	}
	if live := get[int](t, db, `select count(*) from agent_locks_live`); live != 0 {
		t.Errorf("%d lanes are held after the race", live)
	}
	if waiting := get[int](t, db, `select count(*) from agent_lock_waiters`); waiting != 0 {
		t.Errorf("%d places in the queue are left after the race", waiting)
	}
}

func TestOneOwnerInManyGoroutinesIsOneHold(t *testing.T) {
	t.Parallel()
	db := wide(t)
	k, log := keeper(t, db)
	owner := lanes.ClaimOwner("018f0000-0000-7000-8000-000000000001", 1)
	outer, err := k.AcquireAs(t.Context(), owner, "x")
	acquired(t, outer, err)
	var running sync.WaitGroup
	for range 8 {
		running.Go(func() {
			for range 10 {
				inner, err := k.AcquireAs(t.Context(), owner, "x")
				if err != nil {
					t.Error(err)
					return
				}
				if inner.Token() != outer.Token() {
					t.Errorf("inner token %d, outer %d", inner.Token(), outer.Token())
				}
				if err := inner.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	running.Wait()
	if !get[bool](t, db, `select is_agent_lock_held('x')`) {
		t.Error("an inner release freed the outer hold")
	}
	log.want(t, 1, "lane acquired")
	log.want(t, 0, "lane lost")
	if n := strings.Join(log.find("lane released"), ""); n != "" {
		t.Errorf("released too early: %s", n)
	}
}
