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

// allow applies the rate limits to a message. The visitor is the key with its token, else its user, else its address. A
// client may invent tokens and users, so the address has a limit for many visitors, which is checked first. It also
// counts the messages that the visitor's own limit then refuses.
func (c *Chat) allow(r *http.Request, owner, user, token string) error {
	return c.allowRate(r, "messages", 1, owner, user, token)
}

// allowUpload applies the rate limits of uploads: a visitor may upload the files of all its messages.
func (c *Chat) allowUpload(r *http.Request, owner, token string) error {
	return c.allowRate(r, "files", maxFiles, owner+"\x00files", "", token)
}

// allowRate applies the rate limits to messages or files. A visitor has factor times the rate of messages.
func (c *Chat) allowRate(r *http.Request, kind string, factor int, owner, user, token string) error {
	address, name := c.Address(r), c.visitorName(r, owner, user, token)
	var wait time.Duration
	if user != "" || token != "" {
		wait = c.limits.reserve(owner+"\x00@@"+address, visitorsPerAddress)
	}
	if wait == 0 {
		wait = c.limits.reserve(name, factor)
	}
	if wait == 0 {
		return nil
	}
	return &Refusal{
		Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: codeRateLimit,
		Message: "Too many " + kind + ". Please wait a moment.", RetryAfter: max(wait, time.Second),
	}
}

// visitorName names a visitor for the limits. No user is named like an address or a token.
func (c *Chat) visitorName(r *http.Request, owner, user, token string) string {
	switch {
	case token != "":
		return owner + "\x00token " + token
	case user != "":
		return owner + "\x00user " + user
	}
	return owner + "\x00@" + c.Address(r)
}

// limits limits the rate of messages per visitor, and notes refusals. Safe for concurrent use.
type limits struct {
	perMinute int
	mu        sync.Mutex
	visitors  map[visitorKey]*list.Element
	recent    *list.List // of *visitor, the latest first
}

// newLimits allows perMinute messages, a third of them at once; negative: no limit.
func newLimits(perMinute int) *limits {
	return &limits{perMinute: perMinute, visitors: map[visitorKey]*list.Element{}, recent: list.New()}
}

// reserve counts a message for a name with share times the usual rate. It returns the wait until the message is
// allowed; 0: now.
func (l *limits) reserve(name string, share int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, now := l.visitor(name, share), time.Now()
	if l.perMinute < 0 {
		return 0
	}
	reservation := v.quota.ReserveN(now, 1)
	wait := reservation.DelayFrom(now)
	if wait > 0 { // a refused message does not use the quota
		reservation.CancelAt(now)
	}
	return wait
}

// visitor returns the entry of a name, which becomes the latest. The caller holds mu.
func (l *limits) visitor(name string, share int) *visitor {
	key := keyOf(name)
	e := l.visitors[key]
	if e == nil {
		n := l.perMinute * share
		e = l.recent.PushFront(&visitor{key: key, quota: rate.NewLimiter(rate.Limit(float64(n)/60), max(1, n/3))})
		l.visitors[key] = e
		if l.recent.Len() > maxVisitors {
			oldest := l.recent.Back()
			delete(l.visitors, l.recent.Remove(oldest).(*visitor).key)
		}
	}
	l.recent.MoveToFront(e)
	return e.Value.(*visitor)
}

// noteRefusal notes that the first attempt of a visitor's request was refused. It creates no entry: a client that
// invents visitors would evict the others.
func (l *limits) noteRefusal(name, digest string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.visitors[keyOf(name)]; e != nil {
		v := e.Value.(*visitor)
		v.refused, v.refusedAt = digest, time.Now()
	}
}

// sinceRefusal returns the time since the visitor's last refusal if that request was equal; otherwise 24 hours.
func (l *limits) sinceRefusal(name, digest string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.visitors[keyOf(name)]
	if e == nil || e.Value.(*visitor).refused != digest {
		return 24 * time.Hour
	}
	return time.Since(e.Value.(*visitor).refusedAt)
}

// maxVisitors bounds the visitors with a rate limiter. The least recently active one is evicted.
const maxVisitors = 20_000

// visitorsPerAddress is the limit of an address in limits of one visitor.
const visitorsPerAddress = 20

// visitorKey is the digest of a visitor's name, so each entry has a fixed size.
type visitorKey [sha256.Size]byte

func keyOf(name string) visitorKey { return sha256.Sum256([]byte(name)) }

type visitor struct {
	key       visitorKey
	quota     *rate.Limiter
	refused   string // the digest of the last request whose first attempt was refused
	refusedAt time.Time
}

// admit admits a turn to the active ones of this process. Its shares are those of the key, of the address, and of the
// visitor or else the thread, so none of them gets all. The turn counts until it ends, even if its client leaves.
func (c *Chat) admit(r *http.Request, a *UserMessage) (*admission.Hold, error) {
	turns := int64(c.Turns)
	perVisitor := min(turns/16, 16)
	shares := []admission.Share{
		{Name: "key " + a.Owner, Limit: turns * 3 / 4},
		{Name: "address " + c.Address(r), Limit: turns / 2},
	}
	switch {
	case a.Secret != "":
		shares = append(shares, admission.Share{
			Name:  "visitor " + a.Owner + "\x00" + a.principal().Proof,
			Limit: perVisitor,
		})
	case a.Name != "":
		shares = append(shares, admission.Share{Name: "thread " + a.Owner + "\x00" + a.Name, Limit: perVisitor})
	}
	hold, err := c.turnBudget.Acquire(1, shares...)
	if err != nil {
		return nil, &Refusal{
			Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: codeRateLimit,
			Message: "Too many messages are being answered. Please wait a moment.", RetryAfter: retryDelay,
		}
	}
	return hold, nil
}
