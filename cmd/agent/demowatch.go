package main

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

const demoLook = 25 * time.Millisecond // between two looks at the thread

// What happens in a story.
const (
	acquired = "acquired" // somebody takes the thread
	borrowed = "inherited"
	stale    = "stale"  // the lane of somebody who was silent for too long is cleared
	queued   = "queued" // a message waits, because another has the thread
	said     = "said"
	triggers = "triggers" // a child
	waits    = "waits"
	ended    = "ended"
	released = "released" // the thread is free
	returned = "returned" // the thread goes back to the parent
	acts     = "acts"     // somebody outside
)

// moment is something that happened.
type moment struct {
	At        string `json:"at"`         // by the clock of the story
	ElapsedMS int64  `json:"elapsed_ms"` // by the machine's, when it was told
	Who       string `json:"who"`
	Event     string `json:"event"`
	Other     string `json:"other,omitempty"` // who holds, lends, held the thread, or is triggered; what is waited for
	Text      string `json:"text,omitempty"`  // what is said, the status at the end
	Execution string `json:"execution_id,omitempty"`
}

// watcher looks at a thread and at the executions of its story through HTTP, and tells what happens in its order.
//
// The database's times give the order. What a cause has done is seen a look later at the latest, so that something is told when a
// second look has found nothing from before it. Who got the thread is told by the log, whose line comes a moment after the message.
type watcher struct {
	client      *client
	heard       *journal
	thread      string
	participant string
	tell        chan<- moment

	mu    sync.Mutex
	roots []string          // traces to look at
	names map[string]string // of executions

	looks    int
	pending  []sighting
	messages map[string]int // by id: 1 seen, 2 told that it was said
	lines    map[string]int // by execution: lane lines that were taken
	waited   map[string]int // by execution: the last wait
	over     map[string]bool
	told     int // lane lines
}

// sighting is something that was seen and not told yet; ready answers nil until it can be told.
type sighting struct {
	at    time.Time
	look  int
	ready func() []moment
}

// seenMessage and seenRun are what the API shows, as far as the story needs it.
type seenMessage struct {
	ID          string     `json:"id"`
	Seq         *int64     `json:"seq"`
	Role        string     `json:"role"`
	Content     string     `json:"content"`
	Status      string     `json:"status"`
	ExecutionID *string    `json:"execution_id"`
	CreatedAt   time.Time  `json:"created_at"`
	SentAt      *time.Time `json:"sent_at"`
}

type seenRun struct {
	ID           string     `json:"id"`
	Flow         string     `json:"flow"`
	ParentID     *string    `json:"parent_id"`
	Status       string     `json:"status"`
	WaitingFor   *string    `json:"waiting_for"`
	WaitNumber   int        `json:"wait_number"`
	ErrorMessage *string    `json:"error_message"`
	CreatedAt    time.Time  `json:"created_at"`
	UpdatedAt    time.Time  `json:"updated_at"`
	CompletedAt  *time.Time `json:"completed_at"`
}

func newWatcher(c *client, heard *journal, thread, participant string, tell chan<- moment) *watcher {
	return &watcher{
		client: c, heard: heard, thread: thread, participant: participant, tell: tell, names: map[string]string{},
		messages: map[string]int{}, lines: map[string]int{}, waited: map[string]int{}, over: map[string]bool{},
	}
}

// follow adds an execution, and those that it will start.
func (w *watcher) follow(id, flow, traceID string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[id] = shortName(flow)
	w.roots = append(w.roots, traceID)
}

// name is what an execution is called; "" as long as it was not seen.
func (w *watcher) name(id string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names[id]
}

// shortName is a flow as the story calls it.
func shortName(flow string) string {
	return strings.TrimSuffix(strings.TrimPrefix(flow, "external:"), "_encadenado")
}

// run looks until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	look := time.NewTicker(demoLook)
	defer look.Stop()
	for {
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
		}
	}
}

// look finds what is new, and tells what can be told.
func (w *watcher) look(ctx context.Context) error {
	w.looks++
	var thread struct {
		Messages []seenMessage `json:"messages"`
	}
	if err := w.client.get(ctx, "/v1/threads/"+url.PathEscape(w.thread)+"?limit=200", &thread); err != nil {
		return fmt.Errorf("look at the story: %w", err)
	}
	slices.SortFunc(thread.Messages, func(a, b seenMessage) int { return strings.Compare(a.ID, b.ID) })
	for _, m := range thread.Messages {
		w.message(m)
	}
	w.mu.Lock()
	roots := slices.Clone(w.roots)
	w.mu.Unlock()
	for _, root := range roots {
		var page struct {
			Items []seenRun `json:"items"`
		}
		if err := w.client.get(ctx, "/v1/executions?limit=200&trace_id="+url.QueryEscape(root), &page); err != nil {
			return fmt.Errorf("look at the story: %w", err)
		}
		slices.SortFunc(page.Items, func(a, b seenRun) int { return strings.Compare(a.ID, b.ID) })
		for _, x := range page.Items {
			w.execution(x)
		}
	}
	w.flush(ctx)
	return nil
}

func (w *watcher) saw(at time.Time, ready func() []moment) {
	w.pending = append(w.pending, sighting{at, w.looks, ready})
}

// message notes what is new about a message.
func (w *watcher) message(m seenMessage) {
	who := func() string { return w.participant }
	var of string
	if m.Role == "assistant" && m.ExecutionID != nil {
		of = *m.ExecutionID
		who = func() string { return w.name(of) }
	}
	if w.messages[m.ID] == 0 {
		w.messages[m.ID] = 1
		if of != "" && (w.lines[of] == 0 || m.Seq == nil) { // its line says how it got the thread, or did not
			w.lines[of]++
			n := w.lines[of]
			w.saw(m.CreatedAt, func() []moment { return w.turn(of, n, m.Content) })
		}
	}
	if w.messages[m.ID] == 1 && m.Seq != nil && m.SentAt != nil {
		w.messages[m.ID] = 2
		w.saw(*m.SentAt, func() []moment {
			return known(moment{Who: who(), Event: said, Text: m.Content, Execution: of})
		})
	}
}

// known is a moment as a list, nil while it is not known who it is about.
func known(m moment) []moment {
	if m.Who == "" {
		return nil
	}
	return []moment{m}
}

// turn is how an execution got the thread at its nth try, by the lines of the log.
func (w *watcher) turn(execution string, n int, content string) []moment {
	lines := w.heard.of(execution, "lane acquired", "lane inherited", "lane busy")
	who := w.name(execution)
	if len(lines) < n || who == "" {
		return nil
	}
	line := lines[n-1]
	other := w.name(line.other)
	switch line.message {
	case "lane busy":
		if other == "" && line.other != "" {
			return nil
		}
		w.told++
		return []moment{{Who: who, Event: queued, Other: other, Text: content, Execution: execution}}
	case "lane inherited":
		if other == "" {
			return nil
		}
		w.told++
		return []moment{{Who: who, Event: borrowed, Other: other, Execution: execution}}
	}
	var got []moment
	for _, l := range w.heard.of(execution, "lane stale, clearing") {
		got = append(got, moment{Who: w.name(l.other), Event: stale, Execution: l.other})
	}
	w.told += 1 + len(got)
	return append(got, moment{Who: who, Event: acquired, Execution: execution})
}

// execution notes what is new about an execution.
func (w *watcher) execution(x seenRun) {
	w.mu.Lock()
	_, before := w.names[x.ID]
	w.names[x.ID] = shortName(x.Flow)
	w.mu.Unlock()
	me := moment{Who: shortName(x.Flow), Execution: x.ID}
	if !before && x.ParentID != nil {
		parent := *x.ParentID
		w.saw(x.CreatedAt, func() []moment {
			return known(moment{Who: w.name(parent), Event: triggers, Other: me.Who, Execution: parent})
		})
	}
	if x.Status == "waiting" && x.WaitingFor != nil && x.WaitNumber > w.waited[x.ID] {
		w.waited[x.ID] = x.WaitNumber
		// A parent that waits for its child has said so by triggering it; a delay is over before somebody looks, or is not.
		if kind := *x.WaitingFor; kind != "agent" && kind != "delay" {
			me.Event, me.Other = waits, kind
			w.saw(x.UpdatedAt, func() []moment { return []moment{me} })
		}
	}
	if x.CompletedAt != nil && !w.over[x.ID] {
		w.over[x.ID] = true
		w.saw(*x.CompletedAt, func() []moment { return w.end(x) })
	}
}

// end is how an execution ended, and what became of the thread that it had.
func (w *watcher) end(x seenRun) []moment {
	lines := w.heard.of(x.ID, releasedLine)
	if len(lines) == 0 {
		return nil
	}
	who := w.name(x.ID)
	got := []moment{{Who: who, Event: ended, Text: x.Status, Execution: x.ID}}
	if x.ErrorMessage != nil {
		got[0].Text += ": " + *x.ErrorMessage
	}
	if lines[0].count == 0 {
		return got
	}
	if loans := w.heard.of(x.ID, "lane inherited"); len(loans) > 0 {
		return append(got, moment{Who: who, Event: returned, Other: w.name(loans[0].other), Execution: x.ID})
	}
	return append(got, moment{Who: who, Event: released, Execution: x.ID})
}

// flush tells what is certain: what was seen in an earlier look, and what came before that.
func (w *watcher) flush(ctx context.Context) {
	slices.SortStableFunc(w.pending, func(a, b sighting) int { return a.at.Compare(b.at) })
	last := -1
	for i, s := range w.pending {
		if s.look < w.looks {
			last = i
		}
	}
	for ; last >= 0; last-- {
		got := w.pending[0].ready()
		if got == nil {
			return // nothing later is told before it
		}
		w.pending = w.pending[1:]
		for _, m := range got {
			select {
			case w.tell <- m:
			case <-ctx.Done():
				return
			}
		}
	}
}
