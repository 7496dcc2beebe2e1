package engineroom

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// soonest is how long a part that a newcomer asks for is left alone after it was read: many who come at once, as after
// a restart, cost one read.
const soonest = 250 * time.Millisecond

// topic is an address that somebody looks at. Its goroutine alone reads the parts.
type topic struct {
	hub  *hub
	page page
	seen *visit
	wake chan struct{} // the times when parts are due have changed
	stop func()        // ends the goroutine and waits for it

	mu      sync.Mutex
	parts   []state
	viewers map[*viewer]struct{}
	fresh   time.Time // until when it is read from the primary: a viewer wrote before it came
	replica bool      // the parts were last read from the replica
}

// state is a part as it was read last.
type state struct {
	part
	html   []byte
	mark   string    // digest of html
	read   time.Time // when that began; zero for never
	ended  time.Time // when it had been read
	moved  bool      // the activity log moved since
	wanted bool      // a newcomer has something else
	failed bool      // it could not be read
}

// viewer is one stream. It remembers what it has, and is only told that there is news: who is slow gets the latest
// state, not a backlog.
type viewer struct {
	topic *topic
	news  chan struct{}
	since time.Time // what was read before may be older than what the viewer has
	marks []string
	fresh bool // the viewer wrote a moment ago
}

// update is a part for a viewer, and the name of the state that the viewer has then.
type update struct {
	name, state string
	html        []byte
}

func newTopic(h *hub, p page, v *visit, parts []part) *topic {
	t := &topic{hub: h, page: p, seen: v, wake: make(chan struct{}, 1), viewers: map[*viewer]struct{}{}}
	for _, one := range parts {
		t.parts = append(t.parts, state{part: one})
	}
	return t
}

// add lets somebody look. What differs from what the topic has is read again, because either may be the older.
func (t *topic) add(who *viewer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.viewers[who] = struct{}{}
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

// remove tells how many are left.
func (t *topic) remove(who *viewer) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.viewers, who)
	return len(t.viewers)
}

// moved makes the calm parts due.
func (t *topic) moved() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.parts {
		t.parts[i].moved = true
	}
	signal(t.wake)
}

// signal tells once, however often it is called before somebody listens.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run reads the parts when they are due.
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

// due are the parts to read now, by number, or else how long it is until the next.
func (t *topic) due(now time.Time) (list []int, wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	wait = t.hub.calm
	for i, s := range t.parts {
		in := s.next(t.hub.calm, t.hub.trouble).Sub(now)
		if in <= 0 {
			list = append(list, i)
			continue
		}
		wait = min(wait, in)
	}
	return list, wait
}

// next is when a part is to be read again. It is left alone for as long as reading it took.
func (s state) next(calm, trouble time.Duration) time.Time {
	pause := s.every
	switch {
	case s.moved:
	case s.failed:
		pause = max(trouble, s.every)
	case s.calm:
		pause = max(calm, s.every)
	}
	if s.wanted {
		pause = min(pause, soonest)
	}
	if s.read.IsZero() {
		return s.read
	}
	return s.ended.Add(max(pause, s.ended.Sub(s.read)))
}

// refresh reads parts, and tells the viewers of each that came out otherwise.
func (t *topic) refresh(ctx context.Context, due []int) {
	select {
	case t.hub.reading <- struct{}{}:
		defer func() { <-t.hub.reading }()
	case <-ctx.Done():
		return
	}
	began, v := t.begin(due), *t.seen
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
		t.put(i, html, failed, began)
	}
	t.readFrom(from.Replica())
}

// fromPrimary reports whether the primary is to be read.
func (t *topic) fromPrimary() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.page.follows || time.Now().Before(t.fresh)
}

// readFrom makes every part due when they were read from elsewhere before: a page is of one place.
func (t *topic) readFrom(replica bool) {
	t.mu.Lock()
	changed := t.replica != replica
	t.replica = replica
	t.mu.Unlock()
	if changed {
		t.moved()
	}
}

// begin tells from when on the parts are read: who joins later asks again.
func (t *topic) begin(due []int) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, i := range due {
		t.parts[i].moved, t.parts[i].wanted = false, false
	}
	return time.Now()
}

// render is one part as it is now; what keeps it from being read is said in its place.
func (t *topic) render(ctx context.Context, one part, v *visit, opened error) (html []byte, failed bool) {
	ctx, cancel := context.WithTimeout(ctx, t.hub.readLimit)
	defer cancel()
	room := t.hub.room
	err := opened
	var data any
	if err == nil {
		data, err = one.load(ctx, v)
	}
	if err == nil {
		html, err = room.fill(t.page, one, data)
	}
	if err == nil {
		return html, false
	}
	if html, err = room.renderTrouble(ctx, t.page, one, err); err != nil {
		room.Logger.ErrorContext(ctx, "part of a page not shown", "page", t.page.name, "part", one.name, "error", err)
	}
	return html, true
}

// put keeps what was read. It is not older than began.
func (t *topic) put(i int, html []byte, failed bool, began time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &t.parts[i]
	s.html, s.mark, s.failed, s.read, s.ended = html, digest(html), failed, began, time.Now()
	for who := range t.viewers {
		if who.marks[i] != s.mark {
			signal(who.news)
		}
	}
}

// take is what the viewer does not have yet.
func (who *viewer) take() []update {
	t := who.topic
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []update
	for i, s := range t.parts {
		if s.read.Before(who.since) || s.mark == who.marks[i] {
			continue
		}
		who.marks[i] = s.mark
		list = append(list, update{s.name, strings.Join(slices.Clone(who.marks), "."), s.html})
	}
	return list
}
