// Package admission bounds what requests may take before they cost anything.
//
// A [Budget] is a bounded amount: requests in work, turns under way, bytes in flight. [Budget.Take] takes a part of it at once
// or fails with [ErrFull]; nobody waits, and a client is told when to come again. Within a budget each name, such as a chat key or
// an address, has a share: one name cannot take what others need. A name that has nothing may take more than its share, so that
// one large body fits. A budget remembers only names that hold something, so its memory is bounded by its size.
//
// [Read] reads a body within its limit, its budget and its time. A body that says how long it is takes its whole length before
// the first byte is read; one that does not takes what it has grown to, at most [MostUnsized]. Bytes have to come evenly: at any moment a sender may be
// behind the pace that the limit of time asks for by [Grace] of it, so that a body that nobody sends is given up early.
//
// [Listen] bounds the connections of a server. When there are too many, the one that has been idle for longest is closed: one
// that has no request in work, whether it is new, kept alive, or sends its header slowly. So a new connection is always taken.
package admission

import (
	"errors"
	"sync"
)

// ErrFull reports a budget, or a share of it, of which not enough is left.
var ErrFull = errors.New("too much is under way")

// RetryAfter is what a client that met [ErrFull] is told, in seconds.
const RetryAfter = "2"

// Budget is an amount of which parts are taken and given back. It may be used from many goroutines.
type Budget struct {
	most int64

	mu   sync.Mutex
	used int64
	by   map[string]int64
}

// New returns a budget of so much.
func New(most int64) *Budget { return &Budget{most: most, by: map[string]int64{}} }

// Share says how much of a budget a name may have, unless it has nothing yet.
type Share struct {
	Name string
	Most int64
}

// Take takes n under each of the names, or nothing. The caller releases the hold.
func (b *Budget) Take(n int64, shares ...Share) (*Hold, error) {
	h := &Hold{budget: b, shares: shares, keepers: 1}
	if err := h.Add(n); err != nil {
		return nil, err
	}
	return h, nil
}

// Used is how much is taken.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// Hold is a part of a budget that was taken.
type Hold struct {
	budget  *Budget
	shares  []Share
	n       int64
	keepers int
}

// Add takes n more, or nothing.
func (h *Hold) Add(n int64) error {
	b := h.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > b.most && b.used > h.n {
		return ErrFull
	}
	for _, s := range h.shares {
		if has := b.by[s.Name]; has+n > s.Most && has > h.n {
			return ErrFull
		}
	}
	h.count(n)
	return nil
}

// count changes what the hold has. It is called with the budget's lock held.
func (h *Hold) count(n int64) {
	h.n += n
	h.budget.used += n
	for _, s := range h.shares {
		if h.budget.by[s.Name] += n; h.budget.by[s.Name] == 0 {
			delete(h.budget.by, s.Name)
		}
	}
}

// Keep has the hold last until Release was called once more.
func (h *Hold) Keep() {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.keepers++
}

// Release gives everything back, when nobody else keeps the hold. More calls than keepers do nothing.
func (h *Hold) Release() {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	if h.keepers--; h.keepers == 0 {
		h.count(-h.n)
	}
}
