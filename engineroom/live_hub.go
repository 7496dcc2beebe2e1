package engineroom

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// Bounds of what one process streams. A viewer costs a connection and a goroutine, a topic the queries of its page.
const (
	mostTopics  = 300
	mostViewers = 3000
	// atOnce is how many topics read at the same time; the others wait, so that viewers never take all connections.
	atOnce = 3
)

// hub has a topic for each address that somebody looks at. A topic lives while it has viewers.
type hub struct {
	room      *Room
	reading   chan struct{} // holds atOnce
	heartbeat time.Duration
	second    time.Duration // how often the activity log is looked at
	trouble   time.Duration // after how long a part is read again that could not be read
	calm      time.Duration // after how long a calm part is read again although the log stood still
	readLimit time.Duration // what a part may take
	most      struct{ topics, viewers int }

	mu      sync.Mutex
	topics  map[string]*topic
	viewers int
	stop    func() // ends the goroutine of the pulse and waits for it; nil without one
}

func newHub(room *Room) *hub {
	h := &hub{
		room: room, reading: make(chan struct{}, atOnce), topics: map[string]*topic{},
		heartbeat: heartbeat, second: time.Second, trouble: 5 * time.Second, calm: 30 * time.Second, readLimit: 15 * time.Second,
	}
	h.most.topics, h.most.viewers = mostTopics, mostViewers
	return h
}

// join looks at a page's address from now on; seen names the state that the viewer has. leave has to be called.
func (h *hub) join(p page, v *visit, seen string) (who *viewer, leave func(), err error) {
	parts := p.live()
	if len(parts) == 0 {
		return nil, nil, problem.New(http.StatusNotFound, "nothing on this page changes by itself")
	}
	who = &viewer{news: make(chan struct{}, 1), since: time.Now(), marks: marks(seen, len(parts)), fresh: v.fresh}
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.topics[v.URL]
	if h.viewers >= h.most.viewers || t == nil && len(h.topics) >= h.most.topics {
		return nil, nil, problem.New(http.StatusServiceUnavailable, "too many pages are being watched; this one is not updated by itself for now").
			Kind("too-many-viewers", "Too many viewers")
	}
	first := t == nil
	if first {
		t = newTopic(h, p, v, parts)
		h.topics[v.URL] = t
	}
	h.viewers++
	who.topic = t
	t.add(who)
	if first { // begins with its viewer, so that what it reads first is read once
		t.stop = owned(t.run)
	}
	if h.stop == nil {
		h.stop = owned(h.pulse)
	}
	return who, func() { h.leave(v.URL, t, who) }, nil
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

// owned runs fn in a goroutine; stop ends it and waits for it.
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

// pulse looks whether the activity log moved, once for all topics, and tells them.
func (h *hub) pulse(ctx context.Context) {
	tick := time.NewTicker(h.second)
	defer tick.Stop()
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, err := h.beat(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			now = "away" // this too is told: parts say that they cannot be read, and later that they can again
		}
		if now != last {
			h.tell()
			last = now
		}
	}
}

// beat is a value that changes when an activity begins or ends, and on the replica again when that has it.
func (h *hub) beat(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, h.readLimit)
	defer cancel()
	read := h.room.Read
	reading, from := read.Choose(ctx, false)
	now, err := pulseOf(reading, read)
	if !from.Replica() {
		return now, err
	}
	there, away := pulseOf(ctx, read) // some topics are read from the primary all the same
	if away != nil {
		there = "away"
	}
	return now + " " + there, err
}

// pulseOf names the newest activity, and those that are under way.
func pulseOf(ctx context.Context, db postgres.DB) (now string, err error) {
	err = db.QueryRow(ctx, `
		select concat_ws(' ', (select id from agent_activity order by id desc limit 1),
		       (select concat_ws(' ', count(*), max(started_at)) from agent_activity_open))`).Scan(&now)
	return now, err
}

// tell makes the calm parts of every topic due.
func (h *hub) tell() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.topics {
		t.moved()
	}
}
