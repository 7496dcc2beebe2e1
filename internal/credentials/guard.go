package credentials

import (
	"container/list"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/clientip"
)

const (
	// freeTries is the number of failures after which an address waits.
	freeTries = 5
	// maxWait bounds the wait after a failure.
	maxWait = 30 * time.Second
	// forgetAfter is the time without a failure after which the guard forgets an address.
	forgetAfter = 10 * time.Minute
	// maxAddresses bounds the remembered addresses; the guard drops the oldest.
	maxAddresses = 8192
	// logEvery is the minimum time between two log lines of a kind.
	logEvery = 10 * time.Second
)

// Guard checks secrets and slows down guesses. It is safe for concurrent use.
type Guard struct {
	log *slog.Logger
	now func() time.Time

	mu       sync.Mutex
	bySource map[source]*list.Element
	order    *list.List // of *failures, the latest first
	logLines map[Kind]*lineState
}

// source identifies a count of failures.
type source struct {
	kind    Kind
	address string
}

// failures are the failures of a source, without a pause of forgetAfter between them.
type failures struct {
	source        source
	count         int
	lastAt, until time.Time
}

// lineState is the state of the log lines of a kind.
type lineState struct {
	next     time.Time // earliest time of the next line
	unlogged int
}

// NewGuard returns a guard without failures.
func NewGuard(log *slog.Logger) *Guard {
	return &Guard{
		log: log, now: time.Now, bySource: map[source]*list.Element{}, order: list.New(),
		logLines: map[Kind]*lineState{},
	}
}

// Check returns the name of the secret's key. ok is false for an invalid secret. The error is a [*Wait] if the address
// has to wait.
func (g *Guard) Check(r *http.Request, kind Kind, secret string, keys ...Key) (name string, ok bool, err error) {
	key, found := find(secret, keys)
	return key.Name, found, g.Judge(r, kind, found, key.strong)
}

// Judge counts an attempt that the caller has checked in constant time. strong marks an unguessable secret. If Judge
// returns an error, a [*Wait], the caller must not reveal the outcome.
func (g *Guard) Judge(r *http.Request, kind Kind, valid, strong bool) error {
	if valid && strong {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now, src := g.now(), source{kind, clientip.Key(r)}
	e, wait := g.lookup(src, now)
	switch {
	case wait > 0:
		g.report(r, src, e.Value.(*failures).count, now)
		return &Wait{wait}
	case !valid:
		g.addFailure(r, e, src, now)
	}
	return nil
}

// Knows reports whether the secret is one of the keys and its address need not wait. It counts nothing, so the caller
// must pass an unknown secret to Check for the same kind.
func (g *Guard) Knows(r *http.Request, kind Kind, secret string, keys ...Key) bool {
	key, found := find(secret, keys)
	if !found || key.strong {
		return found
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, wait := g.lookup(source{kind, clientip.Key(r)}, g.now())
	return wait <= 0
}

// lookup returns the failures of a source, or nil, and its remaining wait.
func (g *Guard) lookup(src source, now time.Time) (e *list.Element, wait time.Duration) {
	if e = g.bySource[src]; e == nil {
		return nil, 0
	}
	t := e.Value.(*failures)
	if now.Sub(t.lastAt) > forgetAfter {
		g.forget(e)
		return nil, 0
	}
	return e, t.until.Sub(now)
}

// addFailure counts a failure of a source. e is the source's element, or nil.
func (g *Guard) addFailure(r *http.Request, e *list.Element, src source, now time.Time) {
	if e == nil {
		e = g.order.PushFront(&failures{source: src})
		g.bySource[src] = e
		if g.order.Len() > maxAddresses {
			g.forget(g.order.Back())
		}
	}
	g.order.MoveToFront(e)
	t := e.Value.(*failures)
	t.count, t.lastAt = t.count+1, now
	if excess := t.count - freeTries; excess >= 0 {
		t.until = now.Add(min(maxWait, time.Second<<min(excess, 10)))
	}
	g.report(r, src, t.count, now)
}

func (g *Guard) forget(e *list.Element) { delete(g.bySource, g.order.Remove(e).(*failures).source) }

// report logs a failure, or counts it as unlogged.
func (g *Guard) report(r *http.Request, src source, failed int, now time.Time) {
	line := g.logLines[src.kind]
	if line == nil {
		line = &lineState{}
		g.logLines[src.kind] = line
	}
	if now.Before(line.next) {
		line.unlogged++
		return
	}
	g.log.WarnContext(r.Context(), "wrong credential", "kind", string(src.kind), "remote", src.address, "wrong_here",
		failed,
		"unlogged_before", line.unlogged)
	*line = lineState{next: now.Add(logEvery)}
}
