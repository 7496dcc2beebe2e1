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

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/sse"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// The event stream of a page, at /live and the page's path:
//
//   - hello comes first; its data is the build of the server, so that a page of an older one can say so.
//   - part is a part that reads otherwise than what the page has; data {id, html}. The event's id names the state of
//     all parts of the page after it, so Last-Event-ID, or ?seen= at first, says what the page has, and a stream that
//     broke goes on with what differs from that: nothing is missing, nothing comes twice.
//   - expired says that the login is over. The stream ends, as it does at shutdown.
//
// A ping comes every few seconds; its data is the server's time in milliseconds. The browser sees no comments, and
// takes a stream without events for a dead server.

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
			if told, _ := problem.Of(err); told.Status < http.StatusInternalServerError {
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

// marks returns the digests in a state's name; an empty one matches no part.
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
	// maxConcurrentReads bounds the concurrent reads of topics, so that viewers cannot use up the connections.
	maxConcurrentReads = 3
)

// hub has a topic for each viewed URL, and others for viewers who lack scopes of linked pages. A topic lives while it
// has viewers.
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
		return nil, nil, problem.New(http.StatusNotFound, "nothing on this page changes by itself")
	}
	who = &viewer{news: make(chan struct{}, 1), since: time.Now(), marks: marks(seen, len(parts)), fresh: v.fresh}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := v.URL + v.lacks
	t := h.topics[key]
	if h.viewers >= h.most.viewers || t == nil && len(h.topics) >= h.most.topics {
		return nil, nil, problem.New(http.StatusServiceUnavailable, "too many pages are being watched; this one is not "+
			"updated by itself for now").
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
	if first { // started with the viewer, so that the first read is shared
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

// changes are kinds of changes that the pulse tells apart.
type changes uint8

const (
	logChanged     changes = 1 << iota // the log has another newest activity
	openChanged                        // an activity began or ended
	runsChanged                        // an execution began, was claimed, went on, or ended
	failureChanged                     // an activity or an execution failed, or what fails ran again
	asksChanged                        // another approval, request or pause stands open
	anyChange      = 1<<iota - 1
)

// pulse polls for changes, once for all topics, and notifies them.
func (h *hub) pulse(ctx context.Context) {
	tick := time.NewTicker(h.pollInterval)
	defer tick.Stop()
	var last [2]pulse
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := h.readPulse(ctx)
		if ctx.Err() != nil {
			return
		}
		h.away.Store(now[0].away)
		if changed := now[0].since(last[0]) | now[1].since(last[1]); changed != 0 {
			if changed&failureChanged != 0 {
				h.failures.forget()
			}
			if changed&asksChanged != 0 {
				h.room.waits.forget()
			}
			h.notifyTopics(changed)
			last = now
		}
	}
}

// readPulse reads the pulse of the source of pages. With a replica the second one is that of the primary, because some
// topics read from it nevertheless.
func (h *hub) readPulse(ctx context.Context) (now [2]pulse) {
	ctx, cancel := context.WithTimeout(ctx, h.pulseLimit)
	defer cancel()
	read := h.room.Read
	reading, from := read.Choose(ctx, false)
	failing := h.failing.Load()
	if now[0] = pulseOf(reading, read, failing); from.Replica() {
		now[1] = pulseOf(ctx, read, failing)
	}
	return now
}

// pulse has the state of each kind of change as a text, and the time of the newest failure.
type pulse struct {
	log, open, runs, asks string
	failing               string // the newest runs and calls of what fails
	failure               time.Time
	away                  bool // an outage is a change, too: parts show the failure, and later the recovery
}

// since tells what changed.
func (p pulse) since(last pulse) (c changes) {
	if p.away != last.away {
		return anyChange
	}
	for _, one := range []struct {
		is   bool
		kind changes
	}{
		{p.log != last.log, logChanged},
		{p.open != last.open, openChanged},
		{p.runs != last.runs, runsChanged},
		{p.asks != last.asks, asksChanged},
		{p.failure.After(last.failure) || p.failing != last.failing, failureChanged},
	} {
		if one.is {
			c |= one.kind
		}
	}
	return c
}

//go:embed pulse.sql
var pulseSQL string

//go:embed pulse_failing.sql
var pulseFailingSQL string

// pulseOf reads a pulse. Failures are searched among the newest activities and failed executions: an older one that
// fails late is seen when the shared failures are read again.
func pulseOf(ctx context.Context, db postgres.DB, failing *monitor.Failing) (p pulse) {
	err := db.QueryRow(ctx, pulseSQL).Scan(&p.log, &p.open, &p.runs, &p.asks, &p.failure)
	if err != nil {
		return pulse{away: true}
	}
	if failing == nil || len(failing.Flows)+len(failing.Calls) == 0 {
		return p
	}
	newest, err := postgres.RowsGeneric[struct{ Newest string }](ctx, db, "read newest runs of what fails",
		pulseFailingSQL, postgres.Strict{"flows": failing.Flows, "calls": failing.Calls})
	if err != nil {
		return pulse{away: true}
	}
	for _, n := range newest {
		p.failing += n.Newest + "\n"
	}
	return p
}

// notifyTopics makes the parts of every topic due that depend on what changed.
func (h *hub) notifyTopics(changed changes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.topics {
		t.moved(changed)
	}
}

// minRefreshAge is the least age of a part before a new viewer refreshes it. So many viewers after a restart cost one
// read.
const minRefreshAge = 250 * time.Millisecond

// topic is a viewed URL. Only its goroutine reads the parts.
type topic struct {
	hub  *hub
	page page
	seen *visit
	wake chan struct{} // signals changed due times
	stop func()        // stops the goroutine and waits for it

	mu      sync.Mutex
	parts   []state
	viewers map[*viewer]struct{}
	fresh   time.Time // end of reading from the primary, after a viewer's write
	replica bool      // the last read was from the replica
}

// state is the last read of a part.
type state struct {
	part
	data   string    // of its event
	mark   string    // digest of its HTML
	read   time.Time // start of the read; zero for never
	ended  time.Time // end of the read
	moved  bool      // something has changed since
	urgent bool      // something that the part is about has changed since
	hurry  time.Time // start of the last read that was urgent
	wanted bool      // a new viewer has another state
	failed bool      // the read failed
	// Of a large part: its HTML, and its event for a viewer that has it as of the mark since.
	html         []byte
	since, short string
	// The last event of the part, its id and its data. Viewers who have the same get the same bytes.
	event         []byte
	eventID, sent string
}

// viewer is one stream. It is only notified of changes, so a slow viewer gets the latest state, without a backlog.
type viewer struct {
	topic *topic
	news  chan struct{}
	since time.Time // earlier reads may be older than the viewer's state
	marks []string
	fresh bool // the viewer has just written
}

func newTopic(h *hub, p page, v *visit, parts []part) *topic {
	t := &topic{hub: h, page: p, seen: v, wake: make(chan struct{}, 1), viewers: map[*viewer]struct{}{}}
	for _, one := range parts {
		t.parts = append(t.parts, state{part: one})
	}
	return t
}

// add adds a viewer. Parts with a differing state are read again, because either side may be older.
func (t *topic) add(who *viewer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.viewers[who] = struct{}{}
	t.hub.failures.forget()
	if t.seen.memo != nil {
		t.seen.memo.hours.forget()
	}
	if who.fresh {
		t.fresh = time.Now().Add(replica.FreshFor)
	}
	for i := range t.parts {
		if s := &t.parts[i]; s.mark != who.marks[i] {
			s.wanted = true
			signal(t.wake)
		}
	}
}

// remove removes a viewer and returns the number left.
func (t *topic) remove(who *viewer) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.viewers, who)
	return len(t.viewers)
}

// moved makes the parts due that depend on what changed.
func (t *topic) moved(changed changes) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.parts {
		s := &t.parts[i]
		s.moved = true
		s.urgent = s.urgent || s.about&changed != 0 || s.about == 0 && s.every <= quickPart
	}
	signal(t.wake)
}

// signal sends without blocking; pending signals merge.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run reads the parts when due.
func (t *topic) run(ctx context.Context) {
	for {
		due, wait := t.due(time.Now())
		if len(due) > 0 {
			t.refresh(ctx, due)
			if ctx.Err() != nil {
				return
			}
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-t.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// due returns the parts to read now, or the wait until the next.
func (t *topic) due(now time.Time) (list []int, wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wait = t.hub.idleRefresh
	for i, s := range t.parts {
		in := s.next(t.hub.idleRefresh, t.hub.retryInterval).Sub(now)
		if in <= 0 {
			list = append(list, i)
			continue
		}
		wait = min(wait, in)
	}
	return list, wait
}

// A part is read as soon as what it is about has changed; one that names nothing, with an interval up to quickPart, as
// soon as anything has. After such a read it rests restFactor times as long as the read took, so at most 3 % of the
// time goes into these. Other changes wait for its interval.
const (
	quickPart  = 2 * time.Second
	minRest    = 100 * time.Millisecond
	restFactor = 30
)

// next returns when a part is due. It rests at least as long as the read took.
func (s state) next(calm, trouble time.Duration) time.Time {
	pause := s.every
	switch {
	case s.urgent:
		rest := min(s.every, max(minRest, restFactor*s.ended.Sub(s.read)))
		pause = max(min(s.every, minRest), s.hurry.Add(rest).Sub(s.ended))
	case s.moved:
	case s.failed:
		pause = max(trouble, s.every)
	case s.calm:
		pause = max(calm, s.every)
	}
	if s.wanted {
		pause = min(pause, minRefreshAge)
	}
	if s.read.IsZero() {
		return s.read
	}
	return s.ended.Add(max(pause, s.ended.Sub(s.read)))
}

// refresh reads parts and notifies the viewers of changed ones.
func (t *topic) refresh(ctx context.Context, due []int) {
	select {
	case t.hub.reading <- struct{}{}:
		defer func() { <-t.hub.reading }()
	case <-ctx.Done():
		return
	}
	began, v := t.markReadStart(due), *t.seen
	room := t.hub.room
	reading, from := room.Read.Choose(ctx, t.fromPrimary())
	opened := (&show{visit: &v}).find(reading, t.page)
	for _, i := range due {
		html, failed := t.render(reading, t.parts[i].part, &v, opened)
		if from.Replica() && (failed || from.Failed()) { // the rest is read from the primary
			reading, from = room.Read.Choose(ctx, true)
			opened = (&show{visit: &v}).find(reading, t.page)
			html, failed = t.render(reading, t.parts[i].part, &v, opened)
		}
		if ctx.Err() != nil {
			return
		}
		t.store(i, html, failed, began)
		if failed && opened == nil && t.hub.away.Load() {
			opened = context.DeadlineExceeded // the other parts would wait as long, and then say the same
		}
	}
	t.readFrom(from.Replica())
}

// fromPrimary reports whether to read from the primary.
func (t *topic) fromPrimary() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.page.follows || time.Now().Before(t.fresh)
}

// readFrom makes every part due after a change of the source, because a page has one source.
func (t *topic) readFrom(replica bool) {
	t.mu.Lock()
	changed := t.replica != replica
	t.replica = replica
	t.mu.Unlock()
	if changed {
		t.moved(anyChange)
	}
}

// markReadStart marks the start of a read: a viewer that joins later needs another.
func (t *topic) markReadStart(due []int) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, i := range due {
		s := &t.parts[i]
		if s.urgent {
			s.hurry = time.Now()
		}
		s.moved, s.urgent, s.wanted = false, false, false
	}
	return time.Now()
}

// render renders one part, or its error.
func (t *topic) render(ctx context.Context, one part, v *visit, opened error) (html []byte, failed bool) {
	limit := t.hub.readLimit
	if t.hub.away.Load() {
		limit = min(limit, t.hub.pulseLimit)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	room := t.hub.room
	err := opened
	var data any
	if err == nil {
		data, err = one.read(ctx, v)
	}
	if err == nil {
		html, err = room.fill(t.page, one, data, v)
	}
	if err == nil {
		return html, false
	}
	if html, err = room.renderTrouble(ctx, t.page, one, err); err != nil {
		room.Logger.ErrorContext(ctx, "page part not rendered", "page", t.page.name, "part", one.name, "error", err)
	}
	return html, true
}

// store stores a read, which is not older than began.
func (t *topic) store(i int, html []byte, failed bool, began time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &t.parts[i]
	if mark := digest(html); s.mark != mark {
		s.data, s.mark, s.html, s.short = encodePart(s.name, html), mark, nil, ""
		if len(html) >= rowsFrom {
			s.html = html
			t.hub.rows.keep(mark, html)
		}
	}
	s.failed, s.read, s.ended = failed, began, time.Now()
	for who := range t.viewers {
		if who.marks[i] != s.mark {
			signal(who.news)
		}
	}
}

// dataSince returns the part for a viewer that has it as of a mark: its changed rows, if it is large.
func (s *state) dataSince(rows *rowMemory, mark string) string {
	if s.html == nil {
		return s.data
	}
	if s.short == "" || s.since != mark {
		s.since, s.short = mark, s.data
		if html := rows.changed(mark, s.html); html != nil {
			s.short = encodePart(s.name, html)
		}
	}
	return s.short
}

// eventFor returns the event of the part with an id and data.
func (s *state) eventFor(id, data string) []byte {
	if s.eventID != id || s.sent != data {
		s.event, s.eventID, s.sent = sse.Event{ID: id, Name: "part", Data: data}.Append(nil), id, data
	}
	return s.event
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
