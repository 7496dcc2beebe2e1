package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
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
// The database's times give the order. What a cause has done is seen a look later at the latest, so that something is
// told when a second look has found nothing from before it. Who got the thread is told by the log, whose line comes a
// moment after the message.
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

// lineOf is a log line about who has a thread, with what the story needs of it.
type lineOf struct {
	message   string
	execution string // whose line it is
	other     string // the execution that holds, lends or held the lane
	count     int64  // of released locks
}

// journal keeps the log lines that tell who has which thread: "lane acquired", "lane busy", "lane inherited",
// "lane stale, clearing" and "locks released". A lane's line comes after the message that it is about is committed.
type journal struct {
	mu    sync.Mutex
	lines []lineOf
}

// beside is a logger that also writes into the journal.
func (j *journal) beside(log *slog.Logger) *slog.Logger {
	return slog.New(slog.NewMultiHandler(log.Handler(), logging.Handler(&journalist{to: j})))
}

// of lists what was written about an execution, oldest first.
func (j *journal) of(execution string, messages ...string) []lineOf {
	j.mu.Lock()
	defer j.mu.Unlock()
	var found []lineOf
	for _, l := range j.lines {
		if l.execution == execution && slices.Contains(messages, l.message) {
			found = append(found, l)
		}
	}
	return found
}

// count is how many lines there are with one of the messages.
func (j *journal) count(messages ...string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.lines {
		if slices.Contains(messages, l.message) {
			n++
		}
	}
	return n
}

// laneLines are the messages about the lane of a thread.
var laneLines = []string{"lane acquired", "lane busy", "lane inherited", "lane stale, clearing"}

const releasedLine = "locks released"

// journalist is a handler that keeps lines.
type journalist struct {
	to    *journal
	attrs []slog.Attr
}

func (h *journalist) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h *journalist) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &journalist{h.to, slices.Concat(h.attrs, attrs)}
}

func (h *journalist) WithGroup(string) slog.Handler { return h }

func (h *journalist) Handle(_ context.Context, r slog.Record) error {
	if r.Message != releasedLine && !slices.Contains(laneLines, r.Message) {
		return nil
	}
	values := map[string]slog.Value{}
	keep := func(a slog.Attr) bool {
		values[a.Key] = a.Value.Resolve()
		return true
	}
	for _, a := range h.attrs {
		keep(a)
	}
	r.Attrs(keep)
	if lane, ok := values["lane"]; r.Message != releasedLine && (!ok || !strings.HasPrefix(lane.String(), "thread:")) {
		return nil
	}
	l := lineOf{message: r.Message, execution: text(values, "execution_id", "owner", "to")}
	l.other = text(values, "holder", "from")
	if n, ok := values["count"]; ok && n.Kind() == slog.KindInt64 {
		l.count = n.Int64()
	}
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.lines = append(h.to.lines, l)
	return nil
}

// text is the first of some attributes that is there. An owner is an execution and the number of its claim; only the
// former is kept.
func text(values map[string]slog.Value, names ...string) string {
	for _, name := range names {
		if v, ok := values[name]; ok {
			execution, _, _ := strings.Cut(v.String(), "#")
			return execution
		}
	}
	return ""
}

// client is everybody outside, speaking HTTP: an admin, a worker, another system, and the candidate, who has a chat
// key.
type client struct {
	base, admin, chat string
	http              *http.Client
}

func newClient(base string, cfg config.Config) *client {
	return &client{
		base: base, admin: cfg.AdminToken.Reveal(), chat: visitorKey(cfg),
		http: &http.Client{Transport: &http.Transport{}, Timeout: 2 * time.Minute},
	}
}

// get reads a route of the API.
func (c *client) get(ctx context.Context, path string, into any) error {
	return c.call(ctx, http.MethodGet, path, nil, into)
}

// post sends body to a route of the API and reads its answer.
func (c *client) post(ctx context.Context, path string, body, into any) error {
	return c.call(ctx, http.MethodPost, path, body, into)
}

func (c *client) call(ctx context.Context, method, path string, body, into any) error {
	return c.send(ctx, method, path, http.Header{"Authorization": {"Bearer " + c.admin}}, body, into)
}

// say is what the candidate writes in the chat. The answer is what the agents then say.
func (c *client) say(ctx context.Context, thread, words string) error {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body := struct {
		Model    string    `json:"model"`
		Messages []message `json:"messages"`
	}{"agent", []message{{"user", words}}}
	header := http.Header{"Authorization": {"Bearer " + c.chat}, "X-Thread-Id": {thread}}
	return c.send(ctx, http.MethodPost, "/v1/chat/completions", header, body, nil)
}

func (c *client) send(ctx context.Context, method, path string, header http.Header, body, into any) error {
	var content io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
		content = bytes.NewReader(encoded)
		header.Set("Content-Type", "application/json")
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, content)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	req.Header = header
	answer, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(io.LimitReader(answer.Body, 16<<20))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: status %d: %.300s", method, path, answer.StatusCode, got)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(got, into); err != nil {
		return fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	return nil
}
