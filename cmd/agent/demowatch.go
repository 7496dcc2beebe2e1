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

// watcher polls a thread and its executions over HTTP and emits their events in order.
//
// Database timestamps give the order. An effect is visible at most one poll after its cause, so an event is emitted
// after a second poll found nothing earlier. A log line names the execution that acquired the lane, and follows the
// message.
type watcher struct {
	client      *client
	logs        *logCapture
	thread      string
	participant string
	out         chan<- storyEvent

	mu    sync.Mutex
	roots []string          // traces to poll
	names map[string]string // of executions

	polls      int
	pending    []pendingEvent
	messages   map[string]int // by id: 1 seen, 2 emitted as said
	attempts   map[string]int // by execution: used lane lines
	waits      map[string]int // by execution: the last wait
	ended      map[string]bool
	laneEvents int // lane lines
}

// pendingEvent is an event not yet emitted. ready returns nil while a required log line is missing.
type pendingEvent struct {
	at    time.Time
	poll  int
	ready func() []storyEvent
}

func newWatcher(c *client, logs *logCapture, thread, participant string, out chan<- storyEvent) *watcher {
	return &watcher{
		client: c, logs: logs, thread: thread, participant: participant, out: out, names: map[string]string{},
		messages: map[string]int{}, attempts: map[string]int{}, waits: map[string]int{}, ended: map[string]bool{},
	}
}

// follow adds a root execution and its future descendants.
func (w *watcher) follow(id, flow, traceID string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[id] = shortName(flow)
	w.roots = append(w.roots, traceID)
}

// name returns the story's name of an execution, or "" before it was seen.
func (w *watcher) name(id string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.names[id]
}

// shortName returns a flow's name in the story.
func shortName(flow string) string {
	return strings.TrimSuffix(strings.TrimPrefix(flow, "external:"), "_encadenado")
}

func (w *watcher) run(ctx context.Context) error {
	ticker := time.NewTicker(demoPollInterval)
	defer ticker.Stop()
	for {
		if err := w.poll(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

const demoPollInterval = 25 * time.Millisecond // between two polls of the thread

// poll reads the current state and emits the events that are complete.
func (w *watcher) poll(ctx context.Context) error {
	w.polls++
	var thread struct {
		Messages []messageJSON `json:"messages"`
	}
	if err := w.client.get(ctx, "/v1/threads/"+url.PathEscape(w.thread)+"?limit=200", &thread); err != nil {
		return fmt.Errorf("poll the story: %w", err)
	}
	slices.SortFunc(thread.Messages, func(a, b messageJSON) int { return strings.Compare(a.ID, b.ID) })
	for _, m := range thread.Messages {
		w.message(m)
	}
	w.mu.Lock()
	roots := slices.Clone(w.roots)
	w.mu.Unlock()
	for _, root := range roots {
		var page struct {
			Items []executionJSON `json:"items"`
		}
		if err := w.client.get(ctx, "/v1/executions?limit=200&trace_id="+url.QueryEscape(root), &page); err != nil {
			return fmt.Errorf("poll the story: %w", err)
		}
		slices.SortFunc(page.Items, func(a, b executionJSON) int { return strings.Compare(a.ID, b.ID) })
		for _, x := range page.Items {
			w.execution(x)
		}
	}
	w.flush(ctx)
	return nil
}

// messageJSON and executionJSON are the parts of API responses that the story needs.
type messageJSON struct {
	ID          string     `json:"id"`
	Seq         *int64     `json:"seq"`
	Role        string     `json:"role"`
	Content     string     `json:"content"`
	Status      string     `json:"status"`
	ExecutionID *string    `json:"execution_id"`
	CreatedAt   time.Time  `json:"created_at"`
	SentAt      *time.Time `json:"sent_at"`
}

type executionJSON struct {
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

type storyEvent struct {
	At        string `json:"at"`         // by the story's clock
	ElapsedMS int64  `json:"elapsed_ms"` // by the machine's clock, when emitted
	Who       string `json:"who"`
	Event     string `json:"event"`
	Subject   string `json:"other,omitempty"` // the holder, lender, former holder or child; the object of a wait
	Text      string `json:"text,omitempty"`  // the message, or the status at the end
	Execution string `json:"execution_id,omitempty"`
}

// Kinds of story events.
const (
	acquired  = "acquired" // an execution acquires the thread's lane
	inherited = "inherited"
	stale     = "stale"  // an expired lane is cleared
	queued    = "queued" // a message waits, because another execution holds the lane
	said      = "said"
	triggers  = "triggers" // a child
	waits     = "waits"
	ended     = "ended"
	released  = "released" // the lane is free
	returned  = "returned" // the lane returns to the parent
	acts      = "acts"     // an external participant
)

func (w *watcher) enqueue(at time.Time, ready func() []storyEvent) {
	w.pending = append(w.pending, pendingEvent{at, w.polls, ready})
}

// message queues the events of a message.
func (w *watcher) message(m messageJSON) {
	who := func() string { return w.participant }
	var execution string
	if m.Role == "assistant" && m.ExecutionID != nil {
		execution = *m.ExecutionID
		who = func() string { return w.name(execution) }
	}
	if w.messages[m.ID] == 0 {
		w.messages[m.ID] = 1
		if execution != "" && (w.attempts[execution] == 0 || m.Seq == nil) {
			// The log line of the attempt reports the acquisition or the refusal.
			w.attempts[execution]++
			n := w.attempts[execution]
			w.enqueue(m.CreatedAt, func() []storyEvent { return w.acquisition(execution, n, m.Content) })
		}
	}
	if w.messages[m.ID] == 1 && m.Seq != nil && m.SentAt != nil {
		w.messages[m.ID] = 2
		w.enqueue(*m.SentAt, func() []storyEvent {
			return ifKnown(storyEvent{Who: who(), Event: said, Text: m.Content, Execution: execution})
		})
	}
}

// ifKnown returns nil while the event's subject is unknown.
func ifKnown(m storyEvent) []storyEvent {
	if m.Who == "" {
		return nil
	}
	return []storyEvent{m}
}

// acquisition reports from the log how an execution acquired the thread at its nth attempt.
func (w *watcher) acquisition(execution string, n int, content string) []storyEvent {
	lines := w.logs.matching(execution, "lane acquired", "lane inherited", "lane busy")
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
		w.laneEvents++
		return []storyEvent{{Who: who, Event: queued, Subject: other, Text: content, Execution: execution}}
	case "lane inherited":
		if other == "" {
			return nil
		}
		w.laneEvents++
		return []storyEvent{{Who: who, Event: inherited, Subject: other, Execution: execution}}
	}
	var events []storyEvent
	for _, l := range w.logs.matching(execution, "lane stale, clearing") {
		events = append(events, storyEvent{Who: w.name(l.other), Event: stale, Execution: l.other})
	}
	w.laneEvents += 1 + len(events)
	return append(events, storyEvent{Who: who, Event: acquired, Execution: execution})
}

// execution queues the events of an execution.
func (w *watcher) execution(x executionJSON) {
	w.mu.Lock()
	_, before := w.names[x.ID]
	w.names[x.ID] = shortName(x.Flow)
	w.mu.Unlock()
	me := storyEvent{Who: shortName(x.Flow), Execution: x.ID}
	if !before && x.ParentID != nil {
		parent := *x.ParentID
		w.enqueue(x.CreatedAt, func() []storyEvent {
			return ifKnown(storyEvent{Who: w.name(parent), Event: triggers, Subject: me.Who, Execution: parent})
		})
	}
	if x.Status == "waiting" && x.WaitingFor != nil && x.WaitNumber > w.waits[x.ID] {
		w.waits[x.ID] = x.WaitNumber
		// Waits for a child follow from the trigger event. A delay may end between two polls.
		if kind := *x.WaitingFor; kind != "agent" && kind != "delay" {
			me.Event, me.Subject = waits, kind
			w.enqueue(x.UpdatedAt, func() []storyEvent { return []storyEvent{me} })
		}
	}
	if x.CompletedAt != nil && !w.ended[x.ID] {
		w.ended[x.ID] = true
		w.enqueue(*x.CompletedAt, func() []storyEvent { return w.completion(x) })
	}
}

// completion reports how an execution ended and what happened to its lane.
func (w *watcher) completion(x executionJSON) []storyEvent {
	lines := w.logs.matching(x.ID, releasedLine)
	if len(lines) == 0 {
		return nil
	}
	who := w.name(x.ID)
	events := []storyEvent{{Who: who, Event: ended, Text: x.Status, Execution: x.ID}}
	if x.ErrorMessage != nil {
		events[0].Text += ": " + *x.ErrorMessage
	}
	if lines[0].count == 0 {
		return events
	}
	if loans := w.logs.matching(x.ID, "lane inherited"); len(loans) > 0 {
		return append(events, storyEvent{Who: who, Event: returned, Subject: w.name(loans[0].other), Execution: x.ID})
	}
	return append(events, storyEvent{Who: who, Event: released, Execution: x.ID})
}

// flush emits the events of earlier polls, and everything that happened before them.
func (w *watcher) flush(ctx context.Context) {
	slices.SortStableFunc(w.pending, func(a, b pendingEvent) int { return a.at.Compare(b.at) })
	last := -1
	for i, s := range w.pending {
		if s.poll < w.polls {
			last = i
		}
	}
	for ; last >= 0; last-- {
		events := w.pending[0].ready()
		if events == nil {
			return // no later event precedes it
		}
		w.pending = w.pending[1:]
		for _, m := range events {
			select {
			case w.out <- m:
			case <-ctx.Done():
				return
			}
		}
	}
}
