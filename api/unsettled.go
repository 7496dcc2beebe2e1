package api

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// maxUnsettled is how many attempts are remembered; one more is left to its lease.
	maxUnsettled = 1000
	// settlePause is the first pause before the database is told again; it doubles up to maxSettlePause.
	settlePause    = 50 * time.Millisecond
	maxSettlePause = 2 * time.Second
)

// unsettled are attempts that are over, and of which the database could not be told: until their leases end, their keys would be in
// the way of the same requests sent again, here and at other processes. Whoever comes next with a key tells it, and a goroutine does
// as soon as the database is back. The goroutine has ended when nothing is left to tell.
type unsettled struct {
	db   postgres.DB
	stop <-chan struct{} // ends the goroutine; nil is never

	telling  chan struct{} // holds a token while somebody tells
	mu       sync.Mutex
	attempts []attempted
	running  bool // the goroutine
}

// attempted is an attempt that is over, and what becomes of its key.
type attempted struct {
	id    *identity
	as    settlement
	until time.Time // when its lease has ended
}

func newUnsettled(db postgres.DB, stop <-chan struct{}) *unsettled {
	return &unsettled{db: db, stop: stop, telling: make(chan struct{}, 1)}
}

func (u *unsettled) add(id *identity, as settlement) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.attempts) >= maxUnsettled {
		return
	}
	u.attempts = append(u.attempts, attempted{id, as, time.Now().Add(keyLease)})
	if !u.running {
		u.running = true
		go u.run()
	}
}

// run tells until nothing is left.
func (u *unsettled) run() {
	pause := settlePause
	for {
		select {
		case <-u.stop:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxSettlePause)
		ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
		u.settle(ctx)
		cancel()
		u.mu.Lock()
		u.running = len(u.attempts) > 0
		left := u.running
		u.mu.Unlock()
		if !left {
			return
		}
	}
}

// left are the attempts whose leases have not ended.
func (u *unsettled) left() []attempted {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.attempts = slices.DeleteFunc(u.attempts, func(a attempted) bool { return time.Now().After(a.until) })
	return slices.Clone(u.attempts)
}

// settle tells the database of them, as far as it can be told. Who comes while another tells waits for that.
func (u *unsettled) settle(ctx context.Context) {
	if len(u.left()) == 0 {
		return
	}
	select {
	case u.telling <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-u.telling }()
	for _, a := range u.left() {
		if postgres.Again(ctx, func() error { return a.id.settle(ctx, u.db, a.as) }) != nil {
			return
		}
		u.mu.Lock()
		u.attempts = slices.DeleteFunc(u.attempts, func(other attempted) bool { return other.id == a.id })
		u.mu.Unlock()
	}
}
