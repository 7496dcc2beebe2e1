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
	heartbeat = 3 * time.Second
	// again is the browser's delay before it reconnects.
	again = time.Second
)

// live streams a page's changed parts.
func (room *Room) live(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayView(r); err != nil {
			room.Refuse(w, r, err)
			return
		}
		v := newVisit(r, p, "/live")
		if err := (&show{visit: v}).find(r.Context(), p); err != nil {
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
		who, leave, err := room.hub.join(p, v, seen)
		if err != nil {
			room.Refuse(w, r, err)
			return
		}
		defer leave()
		h := w.Header()
		guard(h)
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.write(sse.Event{Name: "hello", Data: build(), Retry: again}.Append(nil))
		if err := out.follow(r.Context(), who, room.hub.heartbeat); err != nil {
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
func (out *stream) follow(ctx context.Context, who *viewer, quiet time.Duration) error {
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	for out.flush(); out.err == nil; out.flush() {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				out.write(sse.Event{Name: "expired", Data: "login"}.Append(nil))
				out.flush()
			}
			return out.err
		case <-who.news:
			for _, event := range who.pendingUpdates() {
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
		panic(err) // two texts are always JSON
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

var markForm = regexp.MustCompile(`^[\w-]{12}$`)

// marks returns the digests in a state's name. An empty digest matches no part.
func marks(state string, n int) []string {
	list := strings.Split(state, ".")
	if len(list) != n {
		return make([]string, n)
	}
	for i, mark := range list {
		if !markForm.MatchString(mark) {
			list[i] = ""
		}
	}
	return list
}

// Bounds of the streams of a process. A viewer costs a connection and a goroutine; a topic costs the queries of its
// page.
const (
	mostTopics  = 300
	mostViewers = 3000
	// maxConcurrentReads bounds the concurrent reads of topics, so viewers cannot use all connections.
	maxConcurrentReads = 3
)

// hub has a topic for each viewed URL, and further topics for viewers without the scopes of linked pages. A topic lives
// while it has viewers.
type hub struct {
	room          *Room
	reading       chan struct{} // a semaphore of maxConcurrentReads
	heartbeat     time.Duration
	pollInterval  time.Duration // interval of the check for changes
	retryInterval time.Duration // retry interval of a failed part
	idleRefresh   time.Duration // refresh interval of a part without activity
	readLimit     time.Duration // timeout of a part
	pulseLimit    time.Duration // timeout of the check for changes, and of parts after it failed
	most          struct{ topics, viewers int }

	mu      sync.Mutex
	topics  map[string]*topic
	rows    rowMemory
	viewers int

	away     atomic.Bool                     // the last check for changes failed
	failures recent[monitor.Failures]        // of all streams
	failing  atomic.Pointer[monitor.Failing] // as of the last read of them
	stop     func()                          // stops the pulse goroutine and waits for it; nil without one
}

func newHub(room *Room) *hub {
	h := &hub{
		room: room, reading: make(chan struct{}, maxConcurrentReads), topics: map[string]*topic{},
		heartbeat: heartbeat, pollInterval: 200 * time.Millisecond, retryInterval: 5 * time.Second,
		idleRefresh: 30 * time.Second,
		readLimit:   15 * time.Second,
		pulseLimit:  5 * time.Second,
	}
	h.most.topics, h.most.viewers = mostTopics, mostViewers
	return h
}

// join subscribes to a page's URL; seen names the viewer's state. The caller must call leave.
func (h *hub) join(p page, v *visit, seen string) (who *viewer, leave func(), err error) {
	parts := p.live()
	if len(parts) == 0 {
		return nil, nil, problem.New(http.StatusNotFound, "this page has no live updates")
	}
	who = &viewer{news: make(chan struct{}, 1), since: time.Now(), marks: marks(seen, len(parts)), fresh: v.fresh}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := v.URL + v.lacks
	t := h.topics[key]
	if h.viewers >= h.most.viewers || t == nil && len(h.topics) >= h.most.topics {
		return nil, nil, problem.New(http.StatusServiceUnavailable, "too many pages have live updates; this "+
			"page has none for now").
			Kind("too-many-viewers", "Too many viewers")
	}
	first := t == nil
	if first {
		t = newTopic(h, p, v, parts)
		h.topics[key] = t
	}
	h.viewers++
	who.topic = t
	t.add(who)
	if first { // starts with the viewer, so both share the first read
		t.stop = owned(t.run)
	}
	if h.stop == nil {
		h.stop = owned(h.pulse)
	}
	return who, func() { h.leave(key, t, who) }, nil
}

// leave ends the topic with its last viewer, and the pulse with the last topic.
func (h *hub) leave(key string, t *topic, who *viewer) {
	var stops []func()
	h.mu.Lock()
	h.viewers--
	if t.remove(who) == 0 {
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

// owned runs fn in a goroutine; stop ends it and waits.
func owned(fn func(ctx context.Context)) (stop func()) {
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

// viewer is one stream. A topic only notifies it of changes, so a slow viewer gets the latest state without a backlog.
type viewer struct {
	topic *topic
	news  chan struct{}
	since time.Time // earlier reads may be older than the viewer's state
	marks []string
	fresh bool // the viewer has just written
}

// pendingUpdates returns the events of the parts that the viewer lacks.
func (who *viewer) pendingUpdates() [][]byte {
	t := who.topic
	t.mu.Lock()
	defer t.mu.Unlock()
	var list [][]byte
	for i := range t.parts {
		s := &t.parts[i]
		if s.read.Before(who.since) || s.mark == who.marks[i] {
			continue
		}
		data := s.dataSince(&t.hub.rows, who.marks[i])
		who.marks[i] = s.mark
		list = append(list, s.eventFor(strings.Join(who.marks, "."), data))
	}
	return list
}
