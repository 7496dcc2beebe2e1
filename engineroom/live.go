package engineroom

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sse"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// The event stream of a page, at /live and the page's path:
//
//   - hello comes first. Its data is the server's build, so a page of an older build can report the newer build.
//   - part is a changed part; data {id, html}. The event's id names the state of all parts of the page after the event.
//     Last-Event-ID, or ?seen= at first, names the state that the page has. A reconnected stream sends exactly the
//     parts that differ from that state.
//   - expired reports that the login has ended. Then the stream ends, as at shutdown.
//
// The server sends a ping every few seconds; its data is the server's time in milliseconds. Pings are events, because
// the page's script sees no comments. The script treats a silent stream as a dead server.

const (
	pingInterval = 3 * time.Second
	// reconnectDelay is the pause of a browser before it reconnects.
	reconnectDelay = time.Second
)

// live streams a page's changed parts.
func (room *Room) live(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayView(r); err != nil {
			room.Refuse(w, r, err)
			return
		}
		req := newPageRequest(r, p, "/live")
		if err := (&pageData{pageRequest: req}).loadSubject(r.Context(), p); err != nil {
			if refused, _ := problem.Of(err); refused.Status < http.StatusInternalServerError {
				room.Refuse(w, r, err) // the page does not exist; a temporary failure is shown in each part
				return
			}
		}
		seen := r.Header.Get("Last-Event-ID")
		if seen == "" {
			seen = r.URL.Query().Get("seen")
		}
		if r.Method == http.MethodHead {
			w.Header().Set("Content-Type", "text/event-stream")
			return // a browser reuses the connection as soon as it has the headers
		}
		sub, leave, err := room.hub.join(p, req, seen)
		if err != nil {
			room.Refuse(w, r, err)
			return
		}
		defer leave()
		h := w.Header()
		setSecurityHeaders(h)
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.write(sse.Event{Name: "hello", Data: build(), Retry: reconnectDelay}.Append(nil))
		if err := out.follow(r.Context(), sub, room.hub.pingInterval); err != nil {
			room.Logger.DebugContext(r.Context(), "viewer disconnected", "path", problem.Path(r), "error", err)
		}
	})
}

// stream is the response. After an error it writes nothing.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	err     error
}

// follow writes updates until the viewer leaves.
func (out *stream) follow(ctx context.Context, sub *subscriber, pingInterval time.Duration) error {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for out.flush(); out.err == nil; out.flush() {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				out.write(sse.Event{Name: "expired", Data: "login"}.Append(nil))
				out.flush()
			}
			return out.err
		case <-sub.notify:
			for _, event := range sub.pendingUpdates() {
				out.write(event)
			}
		case <-tick.C:
			out.write(sse.Event{Name: "ping", Data: strconv.FormatInt(time.Now().UnixMilli(), 10)}.Append(nil))
		}
	}
	return out.err
}

// encodePart returns the data of a part's event. All viewers share it.
func encodePart(name string, html []byte) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(struct {
		ID   string `json:"id"`
		HTML string `json:"html"`
	}{name, string(html)}); err != nil {
		panic(err) // a struct of two strings always encodes
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (out *stream) write(event []byte) {
	if out.err == nil {
		_, out.err = out.w.Write(event)
	}
}

func (out *stream) flush() {
	if out.err != nil {
		return
	}
	if err := out.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		out.err = err
	}
}

var digestPattern = regexp.MustCompile(`^[\w-]{12}$`)

// parseDigests returns the digests in the id of a state, one for each of n parts. An invalid digest becomes empty, and
// matches no part.
func parseDigests(state string, n int) []string {
	digests := strings.Split(state, ".")
	if len(digests) != n {
		return make([]string, n)
	}
	for i, d := range digests {
		if !digestPattern.MatchString(d) {
			digests[i] = ""
		}
	}
	return digests
}

// Bounds of the streams of a process. A viewer costs a connection and a goroutine; a topic costs the queries of its
// page.
const (
	maxTopics  = 300
	maxViewers = 3000
	// maxConcurrentReads bounds the concurrent reads of topics, so viewers cannot use all connections.
	maxConcurrentReads = 3
)

// hub has a topic for each viewed URL, and further topics for viewers without the scopes of linked pages. A topic lives
// while it has viewers.
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
	rows    rowHashes
	viewers int

	databaseDown atomic.Bool                     // the last check for changes failed
	failures     cached[monitor.Failures]        // of all streams
	lastFailing  atomic.Pointer[monitor.Failing] // as of the last read of them
	stop         func()                          // stops the goroutine of pollChanges and waits for it; nil if none runs
}

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
