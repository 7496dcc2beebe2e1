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
	// freeTries is how many wrong tries in a row cost nothing.
	freeTries = 5
	// maxWait is the longest wait after a wrong try.
	maxWait = 30 * time.Second
	// forgetAfter is after how long without a wrong try an address begins again.
	forgetAfter = 10 * time.Minute
	// maxAddresses is how many addresses are remembered, the latest ones.
	maxAddresses = 8192
	// logEvery is the time between two lines of a kind.
	logEvery = 10 * time.Second
)

// Guard checks secrets and slows down who guesses. Safe for concurrent use.
type Guard struct {
	log *slog.Logger
	now func() time.Time

	mu     sync.Mutex
	known  map[source]*list.Element
	recent *list.List // of *tries, the latest first
	lines  map[Kind]*lineState
}

// source is where tries are counted.
type source struct {
	kind    Kind
	address string
}

// tries are the wrong ones of a source.
type tries struct {
	from        source
	wrong       int
	last, until time.Time
}

// lineState is what the log has of a kind.
type lineState struct {
	next     time.Time // when the next line may come
	unlogged int
}

// NewGuard makes a guard that remembers nothing.
func NewGuard(log *slog.Logger) *Guard {
	return &Guard{
		log: log, now: time.Now, known: map[source]*list.Element{}, recent: list.New(),
		lines: map[Kind]*lineState{},
	}
}

// Check returns the name of the key that the secret opens. ok is false for a wrong one; the error is a [*Wait] where
// tries from the address are not answered for a while.
func (g *Guard) Check(r *http.Request, kind Kind, secret string, keys ...Key) (name string, ok bool, err error) {
	key, found := find(secret, keys)
	return key.Name, found, g.Judge(r, kind, found, key.strong)
}

// Judge counts a try whose outcome the caller has found out in constant time. strong says that a right one cannot be
// guessed. An error, a [*Wait], means that the outcome must not show.
func (g *Guard) Judge(r *http.Request, kind Kind, right, strong bool) error {
	if right && strong {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now, from := g.now(), source{kind, clientip.Key(r)}
	e, wait := g.waiting(from, now)
	switch {
	case wait > 0:
		g.report(r, from, e.Value.(*tries).wrong, now)
		return &Wait{wait}
	case !right:
		g.count(r, e, from, now)
	}
	return nil
}

// Knows reports whether the secret opens one of the keys, where that may show. It counts nothing: it is for a caller
// that has a wrong secret checked as of this kind next.
func (g *Guard) Knows(r *http.Request, kind Kind, secret string, keys ...Key) bool {
	key, found := find(secret, keys)
	if !found || key.strong {
		return found
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, wait := g.waiting(source{kind, clientip.Key(r)}, g.now())
	return wait <= 0
}

// waiting returns what is known of a source, nil for nothing, and how long it has to wait.
func (g *Guard) waiting(from source, now time.Time) (e *list.Element, wait time.Duration) {
	if e = g.known[from]; e == nil {
		return nil, 0
	}
	t := e.Value.(*tries)
	if now.Sub(t.last) > forgetAfter {
		g.forget(e)
		return nil, 0
	}
	return e, t.until.Sub(now)
}

// count notes a wrong try of a source, which e has already or nil.
func (g *Guard) count(r *http.Request, e *list.Element, from source, now time.Time) {
	if e == nil {
		e = g.recent.PushFront(&tries{from: from})
		g.known[from] = e
		if g.recent.Len() > maxAddresses {
			g.forget(g.recent.Back())
		}
	}
	g.recent.MoveToFront(e)
	t := e.Value.(*tries)
	t.wrong, t.last = t.wrong+1, now
	if over := t.wrong - freeTries; over >= 0 {
		t.until = now.Add(min(maxWait, time.Second<<min(over, 10)))
	}
	g.report(r, from, t.wrong, now)
}

func (g *Guard) forget(e *list.Element) { delete(g.known, g.recent.Remove(e).(*tries).from) }

// report writes the line of a wrong try, or counts it as one without.
func (g *Guard) report(r *http.Request, from source, wrong int, now time.Time) {
	line := g.lines[from.kind]
	if line == nil {
		line = &lineState{}
		g.lines[from.kind] = line
	}
	if now.Before(line.next) {
		line.unlogged++
		return
	}
	g.log.WarnContext(r.Context(), "wrong credential", "kind", string(from.kind), "remote", from.address, "wrong_here",
		wrong,
		"unlogged_before", line.unlogged)
	*line = lineState{next: now.Add(logEvery)}
}
