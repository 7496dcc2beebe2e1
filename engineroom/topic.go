package engineroom

import (
	"context"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// minRefreshAge is the least age of a part that a new viewer refreshes. So many viewers after a restart cost one read.
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
	fresh   time.Time // end of the reads from the primary, after a viewer's write
	replica bool      // the last read was from the replica
}

// state is the last read of a part.
type state struct {
	part
	data   string    // of its event
	mark   string    // digest of its HTML
	read   time.Time // start of the read; zero for never
	ended  time.Time // end of the read
	moved  bool      // any change has occurred since
	urgent bool      // a change concerned the part since
	hurry  time.Time // start of the last read that was urgent
	wanted bool      // a new viewer has another state
	failed bool      // the read failed
	// For a large part: its HTML, and its event for a viewer with the part as of the mark since.
	html         []byte
	since, short string
	// The last event of the part, its id and its data. Viewers with the same state get the same bytes.
	event         []byte
	eventID, sent string
}

func newTopic(h *hub, p page, v *visit, parts []part) *topic {
	t := &topic{hub: h, page: p, seen: v, wake: make(chan struct{}, 1), viewers: map[*viewer]struct{}{}}
	for _, one := range parts {
		t.parts = append(t.parts, state{part: one})
	}
	return t
}

// add adds a viewer. The topic reads parts with a differing state again, because either side may be older.
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

// remove removes a viewer and returns the number of remaining viewers.
func (t *topic) remove(who *viewer) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.viewers, who)
	return len(t.viewers)
}

// moved makes parts due if they depend on the changes.
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

// signal sends without blocking. Pending signals merge.
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

// A change of a part's topics triggers its read at once. Any change triggers the read of a part without topics if the
// part's interval is at most quickPart. After such a read the part rests restFactor times as long as the read took. So
// these reads take at most 3 % of the time. Other changes wait for the part's interval.
const (
	quickPart  = 2 * time.Second
	minRest    = 100 * time.Millisecond
	restFactor = 30
)

// next returns when a part is due. The part rests at least as long as the read took.
func (s state) next(idle, retry time.Duration) time.Time {
	pause := s.every
	switch {
	case s.urgent:
		rest := min(s.every, max(minRest, restFactor*s.ended.Sub(s.read)))
		pause = max(min(s.every, minRest), s.hurry.Add(rest).Sub(s.ended))
	case s.moved:
	case s.failed:
		pause = max(retry, s.every)
	case s.refreshOnActivity:
		pause = max(idle, s.every)
	}
	if s.wanted {
		pause = min(pause, minRefreshAge)
	}
	if s.read.IsZero() {
		return s.read
	}
	return s.ended.Add(max(pause, s.ended.Sub(s.read)))
}

// refresh reads parts and notifies the viewers of changed parts.
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
		if from.Replica() && (failed || from.Failed()) { // the topic reads the rest from the primary
			reading, from = room.Read.Choose(ctx, true)
			opened = (&show{visit: &v}).find(reading, t.page)
			html, failed = t.render(reading, t.parts[i].part, &v, opened)
		}
		if ctx.Err() != nil {
			return
		}
		t.store(i, html, failed, began)
		if failed && opened == nil && t.hub.away.Load() {
			opened = context.DeadlineExceeded // all remaining parts would wait as long and fail alike
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

// markReadStart marks the start of a read. A viewer that joins later needs another read.
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

// dataSince returns the part for a viewer with the part as of a mark. Of a large part, it returns the changed rows.
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
