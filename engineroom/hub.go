package engineroom

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// hub has a topic for each viewed URL. Viewers without the scopes of linked pages have topics of their own, and so has
// each viewer of a page that is perViewer. A topic lives while it has viewers.
type hub struct {
	room          *Room
	readSlots     chan struct{} // a semaphore of maxConcurrentReads
	pingInterval  time.Duration
	pollInterval  time.Duration // interval of the check for changes
	retryInterval time.Duration // retry interval of a failed part
	idleRefresh   time.Duration // refresh interval of a part without activity
	readTimeout   time.Duration // timeout of a part
	pollTimeout   time.Duration // timeout of the check for changes, and of parts after it failed
	limits        struct{ topics, viewers int }

	mu      sync.Mutex
	topics  map[string]*topic
	viewers int

	rows         rowHashes                       // has its own mutex
	databaseDown atomic.Bool                     // the last check for changes failed
	failures     cached[monitor.Failures]        // of all streams
	lastFailing  atomic.Pointer[monitor.Failing] // as of the last read of them
	stop         func()                          // stops the goroutine of pollChanges and waits for it; nil if none runs
}

// Bounds of the streams of a process. A viewer costs a connection and a goroutine; a topic costs the queries of its
// page.
const (
	maxTopics  = 300
	maxViewers = 3000
	// maxConcurrentReads bounds the concurrent reads of topics, so viewers cannot use all connections.
	maxConcurrentReads = 3
)

func newHub(room *Room) *hub {
	h := &hub{
		room: room, readSlots: make(chan struct{}, maxConcurrentReads), topics: map[string]*topic{},
		pingInterval: pingInterval, pollInterval: 200 * time.Millisecond, retryInterval: 5 * time.Second,
		idleRefresh: 30 * time.Second,
		readTimeout: 15 * time.Second,
		pollTimeout: 5 * time.Second,
	}
	h.limits.topics, h.limits.viewers = maxTopics, maxViewers
	return h
}

// join subscribes to a page's URL; seen names the viewer's state. The caller must call leave.
func (h *hub) join(p page, req *pageRequest, seen string) (sub *subscriber, leave func(), err error) {
	parts := p.liveParts()
	if len(parts) == 0 {
		return nil, nil, problem.New(http.StatusNotFound, "this page has no live updates")
	}
	sub = &subscriber{
		notify: make(chan struct{}, 1), since: time.Now(), digests: parseDigests(seen, len(parts)),
		fromPrimary: req.fromPrimary,
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := req.URL + req.missingScopes
	if p.perViewer && req.viewer != nil {
		key += "\n" + req.viewer.Name
	}
	t := h.topics[key]
	if h.viewers >= h.limits.viewers || t == nil && len(h.topics) >= h.limits.topics {
		return nil, nil, problem.New(http.StatusServiceUnavailable, "too many pages have live updates; this "+
			"page has none for now").
			Kind("too-many-viewers", "Too many viewers")
	}
	isFirst := t == nil
	if isFirst {
		t = newTopic(h, p, req, parts)
		h.topics[key] = t
	}
	h.viewers++
	sub.topic = t
	t.add(sub)
	if isFirst { // starts with the viewer, so both share the first read
		t.stop = runInBackground(t.run)
	}
	if h.stop == nil {
		h.stop = runInBackground(h.pollChanges)
	}
	return sub, func() { h.leave(key, t, sub) }, nil
}

// leave stops the topic after its last viewer, and pollChanges after the last topic.
func (h *hub) leave(key string, t *topic, sub *subscriber) {
	var stops []func()
	h.mu.Lock()
	h.viewers--
	if t.remove(sub) == 0 {
		delete(h.topics, key)
		stops = append(stops, t.stop)
	}
	if len(h.topics) == 0 && h.stop != nil {
		stops = append(stops, h.stop)
		h.stop = nil
	}
	h.mu.Unlock()
	for _, stop := range stops {
		stop()
	}
}

// runInBackground runs fn in a goroutine; stop ends it and waits.
func runInBackground(fn func(ctx context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// subscriber is the stream of one viewer. A topic only notifies it of changes, so a slow viewer gets the latest state
// without a backlog.
type subscriber struct {
	topic       *topic
	notify      chan struct{}
	since       time.Time // earlier reads may be older than the viewer's state
	digests     []string
	fromPrimary bool // the viewer has just written
}

// pendingUpdates returns events for the parts that have changed since the viewer's state.
func (sub *subscriber) pendingUpdates() [][]byte {
	t := sub.topic
	t.mu.Lock()
	defer t.mu.Unlock()
	var list [][]byte
	for i := range t.parts {
		s := &t.parts[i]
		if s.readStart.Before(sub.since) || s.digest == sub.digests[i] {
			continue
		}
		data := s.dataFor(&t.hub.rows, sub.digests[i])
		sub.digests[i] = s.digest
		list = append(list, s.eventFor(strings.Join(sub.digests, "."), data))
	}
	return list
}
