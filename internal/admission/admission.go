// Package admission bounds what requests may take before they cost anything.
//
// A [Budget] is a bounded amount: requests in work, turns under way, bytes in flight. [Budget.Take] takes a part of it
// at once or fails with [ErrFull]; nobody waits, and a client is told when to come again. Within a budget each name,
// such as a chat key or an address, has a share: one name cannot take what others need. One hold of a name may be
// larger than its share while the name has nothing else but what the reserve allows, so that one large body fits. A
// budget remembers only names that hold something, so its memory is bounded by its size.
//
// [Read] reads a body within its limit, its budget and its time. A body counts as its bytes arrive: what has arrived,
// at most as much again, and 1 KiB. A length that is only announced counts nothing, and neither does a body of which no
// byte has arrived. When half of an announced length is there, all of it is taken. A body without a Content-Length may
// have [MostUnsized]. Bytes have to come evenly: at any moment a sender may be behind the pace that the limit of time
// asks for by [Grace] of it, so that a body that nobody sends is given up early.
//
// A budget that [NewBytes] makes keeps a reserve, one [ReservePart] of it and of each share, for bodies that announce
// at most [Small].
//
// [Listen] bounds the connections of a server. When there are too many, the one that has been idle for longest is
// closed: one that has no request in work, whether it is new, kept alive, or sends its header or its body slowly. So a
// new connection is always taken.
package admission

import (
	"errors"
	"sync"
)

// ErrFull reports a budget, or a share of it, of which not enough is left.
var ErrFull = errors.New("too much is under way")

// RetryAfter is what a client that met [ErrFull] is told, in seconds.
const RetryAfter = "2"

// ReservePart is the part of a budget of bytes and of each share, one in so many, that bodies larger than [Small] leave
// free.
const ReservePart = 8

// Budget is an amount of which parts are taken and given back. It may be used from many goroutines.
type Budget struct {
	all     Share
	reserve bool

	mu sync.Mutex
	by map[string]*usage
}

// usage is what a name has. The name of the whole budget is empty.
type usage struct {
	n    int64
	over *Hold // the one that may exceed the share; nil for none
}

// New returns a budget of so much.
func New(most int64) *Budget { return &Budget{all: Share{Most: most}, by: map[string]*usage{}} }

// NewBytes returns a budget of so many bytes, with a reserve for small bodies.
func NewBytes(most int64) *Budget {
	b := New(most)
	b.reserve = true
	return b
}

// Share says how much of a budget a name may have. One hold may exceed it while the name has nothing else.
type Share struct {
	Name string
	Most int64
}

// Take takes n under each of the names, or nothing. The caller releases the hold.
func (b *Budget) Take(n int64, shares ...Share) (*Hold, error) { return b.take(n, false, shares) }

// take is Take. A large hold leaves the reserve free.
func (b *Budget) take(n int64, large bool, shares []Share) (*Hold, error) {
	h := &Hold{budget: b, shares: append([]Share{b.all}, shares...), keepers: 1, large: large && b.reserve}
	if err := h.Add(n); err != nil {
		return nil, err
	}
	return h, nil
}

// Used is how much is taken.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usage("").n
}

// usage is what a name has. It is called with the lock held.
func (b *Budget) usage(name string) usage {
	if u := b.by[name]; u != nil {
		return *u
	}
	return usage{}
}

// Hold is a part of a budget that was taken.
type Hold struct {
	budget  *Budget
	shares  []Share
	n       int64
	keepers int
	large   bool
}

// Add takes n more, or nothing.
func (h *Hold) Add(n int64) error {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	var exceeds []string
	for _, s := range h.shares {
		u := h.budget.usage(s.Name)
		switch {
		case u.counted(s.Most)+n <= h.bound(s.Most), u.over == h:
		case u.over == nil && u.n-h.n <= s.Most-h.bound(s.Most):
			exceeds = append(exceeds, s.Name)
		default:
			return ErrFull
		}
	}
	h.count(n)
	for _, name := range exceeds {
		h.budget.by[name].over = h
	}
	return nil
}

// bound is how much of a share the hold may fill.
func (h *Hold) bound(most int64) int64 {
	if h.large {
		return most - most/ReservePart
	}
	return most
}

// counted is what counts against others: not what the one hold that may exceed the share has beyond its bound.
func (u usage) counted(most int64) int64 {
	if u.over == nil {
		return u.n
	}
	return u.n - max(0, u.over.n-u.over.bound(most))
}

// count changes what the hold has. It is called with the budget's lock held.
func (h *Hold) count(n int64) {
	h.n += n
	for _, s := range h.shares {
		u := h.budget.by[s.Name]
		if u == nil {
			u = &usage{}
			h.budget.by[s.Name] = u
		}
		u.n += n
		if u.over == h && h.n == 0 {
			u.over = nil
		}
		if u.n == 0 {
			delete(h.budget.by, s.Name)
		}
	}
}

// Return gives back n of what the hold has.
func (h *Hold) Return(n int64) {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.count(-n)
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
