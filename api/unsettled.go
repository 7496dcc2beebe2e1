package api

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// maxUnsettled is how many attempts are remembered; one more is left to its lease.
const maxUnsettled = 1000

// unsettled are attempts that are over, and of which the database could not be told: until their leases end, their keys would be in
// the way of the same requests sent again. Whoever comes next with a key tells it.
type unsettled struct {
	mu       sync.Mutex
	attempts []attempted
}

// attempted is an attempt that is over, and what becomes of its key.
type attempted struct {
	id    *identity
	as    settlement
	until time.Time // when its lease has ended
}

func (u *unsettled) add(id *identity, as settlement) {
	u.put([]attempted{{id, as, time.Now().Add(keyLease)}})
}

func (u *unsettled) put(attempts []attempted) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.attempts = append(u.attempts, attempts[:min(len(attempts), maxUnsettled-len(u.attempts))]...)
}

// settle tells the database of them, as far as it can be told.
func (u *unsettled) settle(ctx context.Context, db postgres.DB) {
	u.mu.Lock()
	todo := slices.DeleteFunc(u.attempts, func(a attempted) bool { return time.Now().After(a.until) })
	u.attempts = nil
	u.mu.Unlock()
	for i, a := range todo {
		if a.id.settle(ctx, db, a.as) != nil {
			u.put(todo[i:])
			return
		}
	}
}
