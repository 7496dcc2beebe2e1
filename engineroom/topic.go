package engineroom

import (
	"context"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// minRefreshAge is the least age of a part that a new viewer refreshes. Viewers that join within this time, as after a
// restart, share a read.
const minRefreshAge = 250 * time.Millisecond

// topic is a viewed URL, for viewers with the same scopes. Only its goroutine reads the parts.
type topic struct {
	hub     *hub
	page    page
	request *pageRequest
	wake    chan struct{} // signals that a time of the next read changed
	stop    func()        // stops the goroutine and waits for it

	mu           sync.Mutex
	parts        []partState
	viewers      map[*subscriber]struct{}
	primaryUntil time.Time // end of the reads from the primary, after a viewer's write
	onReplica    bool      // the last read was from the replica
}

// partState is the last read of a part.
type partState struct {
	part
	data       string    // of its event
	digest     string    // digest of its HTML
	readStart  time.Time // start of the read; zero for never
	readEnd    time.Time // end of the read
	changed    bool      // any change has occurred since
	urgent     bool      // a change concerned the part since
	urgentRead time.Time // start of the last read that was urgent
	requested  bool      // a new viewer has another state
	failed     bool      // the read failed
	// For a large part: its HTML, and its event for a viewer with the part as of the mark since.
	html               []byte
	diffFrom, diffData string
	// The last event of the part, its id and its data. Viewers with the same state get the same bytes.
	event              []byte
	eventID, eventData string
}

func newTopic(h *hub, p page, req *pageRequest, parts []part) *topic {
	t := &topic{hub: h, page: p, request: req, wake: make(chan struct{}, 1), viewers: map[*subscriber]struct{}{}}
	for _, one := range parts {
		t.parts = append(t.parts, partState{part: one})
	}
	return t
}

// add adds a viewer. The topic reads parts with a differing state again, because either side may be older.
func (t *topic) add(sub *subscriber) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.viewers[sub] = struct{}{}
	t.hub.failures.invalidate()
	if t.request.cache != nil {
		t.request.cache.hours.invalidate()
	}
	if sub.fromPrimary {
		t.primaryUntil = time.Now().Add(replica.FreshFor)
	}
	for i := range t.parts {
		if s := &t.parts[i]; s.digest != sub.digests[i] {
			s.requested = true
			signal(t.wake)
		}
	}
}

// remove removes a viewer and returns the number of remaining viewers.
func (t *topic) remove(sub *subscriber) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.viewers, sub)
	return len(t.viewers)
}

// markChanged makes parts due if they depend on the changes.
func (t *topic) markChanged(changed changes) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.parts {
		s := &t.parts[i]
		s.changed = true
		s.urgent = s.urgent || s.triggers&changed != 0 || s.triggers == 0 && s.interval <= maxEagerInterval
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

// run reads each part when it is due, until ctx ends.
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

// due returns the parts to read now. If there are none, it returns the time until the next read.
func (t *topic) due(now time.Time) (list []int, wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wait = t.hub.idleRefresh
	for i, s := range t.parts {
		untilDue := s.dueAt(t.hub.idleRefresh, t.hub.retryInterval).Sub(now)
		if untilDue <= 0 {
			list = append(list, i)
			continue
		}
		wait = min(wait, untilDue)
	}
	return list, wait
}

// A change in a part's triggers causes its read at once. Any change causes the read of a part without triggers if the
// part's interval is at most maxEagerInterval. After such a read the part rests restFactor times as long as the read
// took, but no longer than its interval. Unless the interval is that short, these reads take about 3 % of the time.
// Other changes wait for the part's interval.
const (
	maxEagerInterval = 2 * time.Second
	minRest          = 100 * time.Millisecond
	restFactor       = 30
)

// dueAt returns the time of a part's next read. The pause is at least as long as the last read took.
func (s partState) dueAt(idle, retry time.Duration) time.Time {
	pause := s.interval
	switch {
	case s.urgent:
		rest := min(s.interval, max(minRest, restFactor*s.readEnd.Sub(s.readStart)))
		pause = max(min(s.interval, minRest), s.urgentRead.Add(rest).Sub(s.readEnd))
	case s.changed:
	case s.failed:
		pause = max(retry, s.interval)
	case s.refreshOnActivity:
		pause = max(idle, s.interval)
	}
	if s.requested {
		pause = min(pause, minRefreshAge)
	}
	if s.readStart.IsZero() {
		return s.readStart
	}
	return s.readEnd.Add(max(pause, s.readEnd.Sub(s.readStart)))
}

// refresh reads parts and notifies the viewers of changed parts.
func (t *topic) refresh(ctx context.Context, due []int) {
	select {
	case t.hub.readSlots <- struct{}{}:
		defer func() { <-t.hub.readSlots }()
	case <-ctx.Done():
		return
	}
	start, v := t.markReadStart(due), *t.request
	room := t.hub.room
	readCtx, db := room.Read.Choose(ctx, t.fromPrimary())
	openErr := (&pageData{pageRequest: &v}).loadSubject(readCtx, t.page)
	for _, i := range due {
		html, failed := t.render(readCtx, t.parts[i].part, &v, openErr)
		if db.Replica() && (failed || db.Failed()) { // the topic reads the rest from the primary
			readCtx, db = room.Read.Choose(ctx, true)
			openErr = (&pageData{pageRequest: &v}).loadSubject(readCtx, t.page)
			html, failed = t.render(readCtx, t.parts[i].part, &v, openErr)
		}
		if ctx.Err() != nil {
			return
		}
		t.store(i, html, failed, start)
		if failed && openErr == nil && t.hub.databaseDown.Load() {
			openErr = context.DeadlineExceeded // all remaining parts would wait as long and fail alike
		}
	}
	t.setSource(db.Replica())
}

// fromPrimary reports whether to read from the primary.
func (t *topic) fromPrimary() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.page.fromPrimary || time.Now().Before(t.primaryUntil)
}

// setSource makes every part due after a change of the source, because a page has one source.
func (t *topic) setSource(replica bool) {
	t.mu.Lock()
	changed := t.onReplica != replica
	t.onReplica = replica
	t.mu.Unlock()
	if changed {
		t.markChanged(anyChange)
	}
}

// markReadStart marks the start of a read. A viewer that joins later needs another read.
func (t *topic) markReadStart(due []int) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, i := range due {
		s := &t.parts[i]
		if s.urgent {
			s.urgentRead = time.Now()
		}
		s.changed, s.urgent, s.requested = false, false, false
	}
	return time.Now()
}

// render renders one part, or its error.
func (t *topic) render(ctx context.Context, one part, req *pageRequest, openErr error) (html []byte, failed bool) {
	limit := t.hub.readTimeout
	if t.hub.databaseDown.Load() {
		limit = min(limit, t.hub.pollTimeout)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	room := t.hub.room
	err := openErr
	var data any
	if err == nil {
		data, err = one.read(ctx, req)
	}
	if err == nil {
		html, err = room.renderTemplate(t.page, one, data, req)
	}
	if err == nil {
		return html, false
	}
	if html, err = room.renderPartError(ctx, t.page, one, err); err != nil {
		room.Logger.ErrorContext(ctx, "page part not rendered", "page", t.page.name, "part", one.name, "error", err)
	}
	return html, true
}

// store stores the HTML of a part that a read since start has rendered.
func (t *topic) store(i int, html []byte, failed bool, start time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &t.parts[i]
	if newDigest := digest(html); s.digest != newDigest {
		s.data, s.digest, s.html, s.diffData = encodePart(s.name, html), newDigest, nil, ""
		if len(html) >= minDiffSize {
			s.html = html
			t.hub.rows.remember(newDigest, html)
		}
	}
	s.failed, s.readStart, s.readEnd = failed, start, time.Now()
	for sub := range t.viewers {
		if sub.digests[i] != s.digest {
			signal(sub.notify)
		}
	}
}

// dataFor returns the part for a viewer with the part as of a mark. Of a large part, it returns the changed rows.
func (s *partState) dataFor(rows *rowHashes, mark string) string {
	if s.html == nil {
		return s.data
	}
	if s.diffData == "" || s.diffFrom != mark {
		s.diffFrom, s.diffData = mark, s.data
		if html := rows.diff(mark, s.html); html != nil {
			s.diffData = encodePart(s.name, html)
		}
	}
	return s.diffData
}

// eventFor returns the event of the part with an id and data. It reuses the last event if both are equal.
func (s *partState) eventFor(id, data string) []byte {
	if s.eventID != id || s.eventData != data {
		s.event, s.eventID, s.eventData = sse.Event{ID: id, Name: "part", Data: data}.Append(nil), id, data
	}
	return s.event
}
