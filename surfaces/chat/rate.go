package chat

import (
	"container/list"
	"crypto/sha256"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/lanekeeper/lanekeeper/internal/admission"
)

// mostVisitors is how many visitors are remembered; the one that was quiet longest is forgotten first.
const mostVisitors = 20_000

// guests is how many visitors one address may speak for.
const guests = 20

// limits bounds how much a visitor may send. Safe for concurrent use.
type limits struct {
	perMinute int
	mu        sync.Mutex
	known     map[visitorKey]*list.Element
	recent    *list.List // of *visitor, the latest first
}

// visitorKey is the digest of a visitor's name: what is remembered has a fixed size.
type visitorKey [sha256.Size]byte

type visitor struct {
	key   visitorKey
	quota *rate.Limiter
}

// newLimits allows so many messages a minute, a third of them at once; a negative number is no limit.
func newLimits(perMinute int) *limits {
	return &limits{perMinute: perMinute, known: map[visitorKey]*list.Element{}, recent: list.New()}
}

// take counts a message against a name whose share is some times the usual one; it returns how long to wait
// when that is too many.
func (l *limits) take(name string, share int) time.Duration {
	if l.perMinute < 0 {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := visitorKey(sha256.Sum256([]byte(name)))
	e := l.known[key]
	if e == nil {
		n := l.perMinute * share
		e = l.recent.PushFront(&visitor{key, rate.NewLimiter(rate.Limit(float64(n)/60), max(1, n/3))})
		l.known[key] = e
		if l.recent.Len() > mostVisitors {
			oldest := l.recent.Back()
			delete(l.known, l.recent.Remove(oldest).(*visitor).key)
		}
	}
	l.recent.MoveToFront(e)
	now := time.Now()
	wanted := e.Value.(*visitor).quota.ReserveN(now, 1)
	wait := wanted.DelayFrom(now)
	if wait > 0 {
		wanted.CancelAt(now)
	}
	return wait
}

// allow refuses a visitor who sends too much. The visitor is the key with the token that the request brings, else with
// the user that it names, else with its address. A client may make up any token and any user. So the address has a
// bound as well, for many, which comes first.
func (c *Chat) allow(r *http.Request, owner, user, token string) error {
	address := c.Address(r)
	who := "\x00" + user
	if token != "" {
		who = "\x00token " + token
	}
	var wait time.Duration
	if user == "" && token == "" {
		wait = c.limits.take(owner+"\x00@"+address, 1)
	} else if wait = c.limits.take(owner+"\x00@@"+address, guests); wait == 0 {
		wait = c.limits.take(owner+who, 1)
	}
	if wait == 0 {
		return nil
	}
	return &Refusal{
		Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: "rate_limit_exceeded",
		Message: "Too many messages. Please wait a moment.", RetryAfter: max(wait, time.Second),
	}
}

// enter finds a place for a turn among those that are under way here. It is bounded by key, address, and visitor or
// else thread, so that no one of them has all: what a message costs is due after it was taken, and also when its sender
// has left. A message that names neither visitor nor thread begins a thread of its own.
func (c *Chat) enter(r *http.Request, a Ask) (*admission.Hold, error) {
	turns := int64(c.Turns)
	few := min(turns/16, 16) // of one visitor
	shares := []admission.Share{
		{Name: "key " + a.Owner, Most: turns * 3 / 4},
		{Name: "address " + c.Address(r), Most: turns / 2},
	}
	switch {
	case a.Secret != "":
		shares = append(shares, admission.Share{
			Name: "visitor " + a.Owner + "\x00" + a.principal().Proof,
			Most: few,
		})
	case a.Name != "":
		shares = append(shares, admission.Share{Name: "thread " + a.Owner + "\x00" + a.Name, Most: few})
	}
	place, err := c.work.Take(1, shares...)
	if err != nil {
		return nil, &Refusal{
			Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: "rate_limit_exceeded",
			Message: "Too many messages are being answered. Please wait a moment.", RetryAfter: retrySoon,
		}
	}
	return place, nil
}
