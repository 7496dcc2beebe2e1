// Package admission bounds the resources of requests before they cost anything.
//
// A [Budget] is a bounded amount: active requests, running turns, bytes in flight. [Budget.Acquire] acquires a part of
// it at once or fails with [ErrFull]. It never waits; the client learns when to retry. Within a budget each name, such
// as a chat key or an address, has a share: one name cannot exhaust the budget for others. While a name holds nothing
// else, one hold may exceed its share, except for the reserve. So one large body fits. The same holds for the whole
// budget. A budget stores only names with a hold, so its memory is bounded by its size.
//
// [Read] reads a body within its limit, its budget and its time. A body counts as its bytes arrive: the received bytes,
// at most as much again, and 1 KiB. An announced length alone counts nothing, and neither does a body without a
// received byte. When half of an announced length has arrived, the whole length is acquired. A body without a
// Content-Length may have [MostUnsized]. Bytes must arrive evenly: at any moment a sender may be behind the pace of the
// time limit by [Grace] of it. An unsent body therefore fails early.
//
// A budget made by [NewBytes] keeps a reserve, one [ReservePart] of it and of each share, for bodies that announce at
// most [Small].
//
// [Listen] bounds the idle connections of a server. It accepts each new connection. When there are too many, it closes
// the connection that has been idle longest. A connection is idle without an active request: if it is new, kept alive,
// or sends its header or its body.
package admission

import (
	"errors"
	"sync"
)

// ErrFull reports that too little of a budget, or of a share of it, is left.
var ErrFull = errors.New("too many requests are under way")

// RetryAfter is the pause, in seconds, that a client gets with [ErrFull].
const RetryAfter = "2"

// ReservePart is the fraction (one in so many) of a byte budget and of each share that bodies larger than [Small] leave
// free.
const ReservePart = 8

// Budget is an amount whose parts are acquired and returned. It may be used from many goroutines.
type Budget struct {
	all     Share
	reserve bool

	mu sync.Mutex
	by map[string]*usage
}

// usage is the acquired amount of a name. The whole budget has the name "".
type usage struct {
	n         int64
	exceeding *Hold // the hold that may exceed the share; nil for none
}

// New returns a budget of limit.
func New(limit int64) *Budget { return &Budget{all: Share{Limit: limit}, by: map[string]*usage{}} }

// NewBytes returns a budget of limit bytes, with a reserve for small bodies.
func NewBytes(limit int64) *Budget {
	b := New(limit)
	b.reserve = true
	return b
}

// Share limits a name's part of a budget. One hold may exceed it while the name has nothing else.
type Share struct {
	Name  string
	Limit int64
}

// Acquire acquires n under each of the names, or nothing. The caller releases the hold.
func (b *Budget) Acquire(n int64, shares ...Share) (*Hold, error) { return b.acquire(n, false, shares) }

// acquire implements Acquire. A large hold leaves the reserve free.
func (b *Budget) acquire(n int64, large bool, shares []Share) (*Hold, error) {
	h := &Hold{budget: b, shares: append([]Share{b.all}, shares...), keepers: 1, large: large && b.reserve}
	if err := h.Add(n); err != nil {
		return nil, err
	}
	return h, nil
}

// Used is the acquired amount.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usage("").n
}

// usage returns the usage of a name. The caller holds the lock.
func (b *Budget) usage(name string) usage {
	if u := b.by[name]; u != nil {
		return *u
	}
	return usage{}
}

// Hold is an acquired part of a budget.
type Hold struct {
	budget  *Budget
	shares  []Share
	n       int64
	keepers int
	large   bool
}

// Add acquires n more, or nothing.
func (h *Hold) Add(n int64) error {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	var exceeds []string
	for _, s := range h.shares {
		u := h.budget.usage(s.Name)
		switch {
		case u.counted(s.Limit)+n <= h.bound(s.Limit), u.exceeding == h:
		case u.exceeding == nil && u.n-h.n <= s.Limit-h.bound(s.Limit):
			exceeds = append(exceeds, s.Name)
		default:
			return ErrFull
		}
	}
	h.count(n)
	for _, name := range exceeds {
		h.budget.by[name].exceeding = h
	}
	return nil
}

// bound returns the maximum part of a share for the hold.
func (h *Hold) bound(limit int64) int64 {
	if h.large {
		return limit - limit/ReservePart
	}
	return limit
}

// counted returns the usage that counts against other holds. It counts an exceeding hold up to its bound.
func (u usage) counted(limit int64) int64 {
	if u.exceeding == nil {
		return u.n
	}
	return u.n - max(0, u.exceeding.n-u.exceeding.bound(limit))
}

// count changes the amount of the hold. The caller holds the budget's lock.
func (h *Hold) count(n int64) {
	h.n += n
	for _, s := range h.shares {
		u := h.budget.by[s.Name]
		if u == nil {
			u = &usage{}
			h.budget.by[s.Name] = u
		}
		u.n += n
		if u.exceeding == h && h.n == 0 {
			u.exceeding = nil
		}
		if u.n == 0 {
			delete(h.budget.by, s.Name)
		}
	}
}

// Return returns n of the hold to the budget.
func (h *Hold) Return(n int64) {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.count(-n)
}

// Keep makes the hold last until one more call of Release.
func (h *Hold) Keep() {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.keepers++
}

// Release returns the whole hold once no other keeper has it. More calls than keepers do nothing.
func (h *Hold) Release() {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	if h.keepers--; h.keepers == 0 {
		h.count(-h.n)
	}
}
