package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// demoTimeout bounds the wait for the next expected event.
const demoTimeout = 90 * time.Second

// story is a scripted conversation in one thread.
type story struct {
	Name        string `json:"name"`
	About       string `json:"about"`
	thread      string
	participant string
	begins      int // minutes of the day
	idle        int // minutes after which the thread is stale; 0: the default
	scenes      []storyStep
	ends        []string // the final thread: place, author, text
}

// storyStep is an external action and the events that must follow, in order. storyEvent.text gives their format.
type storyStep struct {
	after int // minutes since the beginning
	do    func(ctx context.Context, s *storyPlayer) error
	want  []string
}

// storyPlayer plays a story against the running agent.
type storyPlayer struct {
	*cli
	story  story
	minute time.Duration
	logs   *logCapture
	client *client
	pool   *pgxpool.Pool

	watcher     *watcher
	events      chan storyEvent
	startedAt   time.Time
	minuteNow   int               // minutes since the beginning
	runs        map[string]string // executions that the player started, by name
	lock        string            // of the external worker
	lastMessage string            // the last message
}

// play plays the story, prints its events, and compares them with the expected ones.
func (s *storyPlayer) play(ctx context.Context) error {
	s.events, s.runs, s.startedAt = make(chan storyEvent, 100), map[string]string{}, time.Now()
	s.watcher = newWatcher(s.client, s.logs, s.story.thread, s.story.participant, s.events)
	if !s.json {
		s.infof("%s", s.story.intro(s.minute))
	}
	body := map[string]any{"id": s.story.thread, "participant": s.story.participant, "owner": demoKey}
	if s.story.idle > 0 {
		body["idle_seconds"] = max(1, int((time.Duration(s.story.idle) * s.minute).Seconds()))
	}
	if err := s.client.post(ctx, "/v1/threads", body, nil); err != nil {
		return err
	}
	group, scriptCtx := errgroup.WithContext(ctx)
	watchCtx, stop := context.WithCancel(scriptCtx)
	group.Go(func() error { return s.watcher.run(watchCtx) })
	group.Go(func() error {
		defer stop()
		return s.script(scriptCtx)
	})
	if err := group.Wait(); err != nil || ctx.Err() != nil {
		return err
	}
	return s.verifyLog()
}

func (s *storyPlayer) script(ctx context.Context) error {
	for _, scene := range s.story.scenes {
		if err := s.waitUntil(ctx, scene.after); err != nil {
			return err
		}
		if scene.do != nil {
			if err := scene.do(ctx, s); err != nil {
				return err
			}
		}
		if err := s.expect(ctx, scene.want); err != nil {
			return err
		}
	}
	return s.finish(ctx)
}

func (s *storyPlayer) waitUntil(ctx context.Context, minute int) error {
	if !sleep.For(ctx, time.Until(s.startedAt.Add(time.Duration(minute)*s.minute))) {
		return context.Cause(ctx)
	}
	s.minuteNow = minute
	return nil
}

// expect prints the next events and compares them with the expected ones.
func (s *storyPlayer) expect(ctx context.Context, want []string) error {
	deadline := time.NewTimer(demoTimeout)
	defer deadline.Stop()
	var got []string
	for len(got) < len(want) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-deadline.C:
			return mismatch(fmt.Sprintf("at %s nothing more happened within %s", s.clock(), demoTimeout), want, got)
		case m := <-s.events:
			if m.Event == said {
				s.lastMessage = m.Text
			}
			s.printEvent(m)
			got = append(got, m.text())
			if got[len(got)-1] != want[len(got)-1] {
				return mismatch("at "+s.clock()+" the story took another course", want, got)
			}
		}
	}
	return nil
}

// mismatch returns an error with a line diff: - expected, + happened.
func mismatch(what string, want, got []string) error {
	var b strings.Builder
	b.WriteString(what + ":")
	for i := range max(len(want), len(got)) {
		w, g := elementAt(want, i), elementAt(got, i)
		if w == g {
			fmt.Fprintf(&b, "\n    %s", w)
			continue
		}
		if w != "" {
			fmt.Fprintf(&b, "\n  - %s", w)
		}
		if g != "" {
			fmt.Fprintf(&b, "\n  + %s", g)
		}
	}
	return &storyMismatch{b.String()}
}

func elementAt(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return ""
}

// storyMismatch is the error of a story that did not go as expected.
type storyMismatch struct{ text string }

func (d *storyMismatch) Error() string { return d.text }

var anyID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// text formats an event as stories write it, without ids.
func (m storyEvent) text() string {
	line := m.Who + " " + m.Event
	if m.Subject != "" {
		line += " " + m.Subject
	}
	if m.Text != "" {
		line += ": " + m.Text
	}
	return anyID.ReplaceAllString(line, "…")
}

// finish polls for a moment more for unexpected events and prints the thread.
func (s *storyPlayer) finish(ctx context.Context) error {
	quiet := time.NewTimer(60 * demoPollInterval)
	defer quiet.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case m := <-s.events:
		s.printEvent(m)
		return mismatch("more happened than was expected", nil, []string{m.text()})
	case <-quiet.C:
	}
	return s.printThread(ctx)
}

// verifyLog checks that every log line about the thread's lane became an event.
func (s *storyPlayer) verifyLog() error {
	if n := s.logs.count(laneLines...); n != s.watcher.laneEvents {
		return mismatch(fmt.Sprintf("the log has %d lines about the thread's lane, and the story shows %d", n,
			s.watcher.laneEvents), nil, nil)
	}
	if s.json {
		return s.printLine(map[string]any{"event": "checked", "story": s.story.Name, "ok": true})
	}
	_, err := fmt.Fprintf(s.out, "\nChecked: all events came in the right order.\n")
	return err
}

func (s *storyPlayer) startFlow(ctx context.Context, flow string, input any) error {
	s.showAction("an admin", "starts "+shortName(flow))
	var started struct {
		ID      string `json:"id"`
		TraceID string `json:"trace_id"`
	}
	body := map[string]any{"flow": flow, "thread_id": s.story.thread}
	if input != nil {
		body["input"] = input
	}
	if err := s.client.post(ctx, "/v1/executions", body, &started); err != nil {
		return err
	}
	s.runs[shortName(flow)] = started.ID
	s.watcher.follow(started.ID, flow, started.TraceID)
	return nil
}

// raiseEvent raises an event, as another system would.
func (s *storyPlayer) raiseEvent(ctx context.Context, who, what, event, key string, data any) error {
	s.showAction(who, what)
	return s.client.post(ctx, "/v1/events", map[string]any{"event": event, "key": key, "data": data}, nil)
}

// requestID returns the id of the request that the last message names.
func (s *storyPlayer) requestID() (string, error) {
	if id := anyID.FindString(s.lastMessage); id != "" {
		return id, nil
	}
	return "", fmt.Errorf("the last message names no request: %s", s.lastMessage)
}

// showAction prints the action of an external participant.
func (s *storyPlayer) showAction(who, what string) {
	s.printEvent(storyEvent{Who: who, Event: acts, Text: what})
}

// lockExecution locks an execution as an external worker.
func (s *storyPlayer) lockExecution(ctx context.Context, worker string) error {
	s.showAction(worker, "is a worker outside: it locks its run")
	var locked struct {
		LockID string `json:"lock_id"`
	}
	err := s.client.post(ctx, "/v1/executions/"+s.runs[worker]+"/lock",
		map[string]any{"owner": "worker " + worker, "ttl_seconds": 300}, &locked)
	s.lock = locked.LockID
	return err
}

// sendMessage sends a message as an external worker.
func (s *storyPlayer) sendMessage(ctx context.Context, worker, words string) error {
	var response struct {
		Success bool `json:"success"`
		Queued  bool `json:"queued"`
	}
	body := map[string]any{"content": words, "execution_id": s.runs[worker], "lock_id": s.lock}
	err := s.client.post(ctx, "/v1/threads/"+url.PathEscape(s.story.thread)+"/messages", body, &response)
	if err == nil && (!response.Success || response.Queued) {
		err = fmt.Errorf("%s's message was not sent at once: %+v", worker, response)
	}
	return err
}

// heartbeat renews an external worker's lock.
func (s *storyPlayer) heartbeat(ctx context.Context, worker, what string) error {
	var renewed struct {
		Status          string `json:"status"`
		CancelRequested bool   `json:"cancel_requested"`
	}
	err := s.client.call(ctx, "PUT", "/v1/executions/"+s.runs[worker]+"/lock/"+url.PathEscape(s.lock), nil, &renewed)
	if err == nil && (renewed.Status != "running" || renewed.CancelRequested) {
		err = fmt.Errorf("%s's run is %s", worker, renewed.Status)
	}
	if err == nil {
		s.showAction(worker, what)
	}
	return err
}

// holder returns the execution that holds the thread's lane, or "".
func (s *storyPlayer) holder(ctx context.Context) (string, error) {
	var page struct {
		Items []struct {
			Lane        string          `json:"lane"`
			ExecutionID json.RawMessage `json:"execution_id"`
		} `json:"items"`
	}
	if err := s.client.get(ctx, "/v1/lanes?limit=200", &page); err != nil {
		return "", err
	}
	for _, l := range page.Items {
		if l.Lane == "thread:"+s.story.thread {
			return strings.Trim(string(l.ExecutionID), `"`), nil
		}
	}
	return "", nil
}

// waitUntilStale waits until the lease on the thread's lane has expired.
func (s *storyPlayer) waitUntilStale(ctx context.Context) error {
	ctx, stop := context.WithTimeoutCause(ctx, demoTimeout, errors.New("the thread's lane did not become stale"))
	defer stop()
	ticker := time.NewTicker(demoPollInterval)
	defer ticker.Stop()
	for {
		holder, err := s.holder(ctx)
		if err != nil || holder == "" {
			return err
		}
		if holder != s.runs["agente_a"] {
			return fmt.Errorf("the thread is held by %s", holder)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// clock formats the story's time of day.
func (s *storyPlayer) clock() string {
	minutes := s.story.begins + s.minuteNow
	return fmt.Sprintf("%02d:%02d", minutes/60%24, minutes%60)
}

// printEvent prints one event as text or as a JSON line.
func (s *storyPlayer) printEvent(m storyEvent) {
	m.At, m.ElapsedMS = s.clock(), time.Since(s.startedAt).Milliseconds()
	out := &errWriter{w: s.out} // the end of the story says whether it could be written
	if s.json {
		text, _ := json.Marshal(m) // texts and numbers can always be encoded
		fmt.Fprintf(out, "%s\n", text)
		return
	}
	fmt.Fprintf(out, "%s  %-12s %s\n", m.At, printable(m.Who), printable(m.describe()))
}

// describe returns the event in words.
func (m storyEvent) describe() string {
	switch m.Event {
	case acquired:
		return "takes the thread"
	case inherited:
		return "inherits the thread from " + m.Subject
	case stale:
		return "has been silent for too long: lane stale, clearing"
	case queued:
		if m.Subject == "" {
			return "is queued: " + quoted(m.Text)
		}
		return "is queued behind " + m.Subject + ": " + quoted(m.Text)
	case said:
		return quoted(m.Text)
	case triggers:
		return "triggers " + m.Subject + ", and waits for it"
	case waits:
		return "waits: " + m.Subject
	case returned:
		return "gives the thread back to " + m.Subject
	case released:
		return "frees the thread"
	}
	return m.Text
}

func quoted(words string) string { return "«" + words + "»" }

func (s *storyPlayer) printLine(value any) error {
	text, err := json.Marshal(value)
	if err == nil {
		_, err = fmt.Fprintf(s.out, "%s\n", text)
	}
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

type threadRow struct {
	Seq     *int64 `json:"seq"`
	Who     string `json:"who"`
	Content string `json:"content"`
	Status  string `json:"status"`
}

// threadSQL reads a thread as any SQL client would.
const threadSQL = `
select m.seq,
       case m.role when 'user' then t.participant else x.flow end as who,
       m.content,
       m.status
  from agent_messages m
  join agent_threads t on t.id = m.thread_id
  left join agent_executions x on x.id = m.execution_id
 where m.thread_id = @thread
 order by m.seq`

// printThread prints the thread from SQL and compares it with the expected messages.
func (s *storyPlayer) printThread(ctx context.Context) error {
	all, err := postgres.Rows[threadRow](ctx, s.pool, "read the thread", threadSQL,
		postgres.Strict{"thread": s.story.thread})
	if err != nil {
		return err
	}
	var got []string
	cells := make([][]string, len(all))
	for i, m := range all {
		seq := ""
		if m.Seq != nil {
			seq = strconv.FormatInt(*m.Seq, 10)
		}
		cells[i] = []string{seq, m.Who, m.Content, m.Status}
		got = append(got, anyID.ReplaceAllString(seq+" "+shortName(m.Who)+": "+m.Content, "…"))
	}
	if s.json {
		err = s.printLine(map[string]any{"event": "thread", "thread_id": s.story.thread, "messages": all})
	} else {
		err = s.print(nil, func(w io.Writer) {
			fmt.Fprintf(w, "\nThe thread in SQL, agent_messages where thread_id = '%s' order by seq:\n\n", s.story.thread)
			writeTable(w, "nothing was said", []string{"SEQ", "WHO", "CONTENT", "STATUS"}, cells)
		})
	}
	if err == nil && !slices.Equal(got, s.story.ends) {
		err = mismatch("the thread is another one", s.story.ends, got)
	}
	return err
}
