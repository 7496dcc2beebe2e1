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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// demoPatience is how long something may take that the story expects next.
const demoPatience = 90 * time.Second

// story is a play in one thread.
type story struct {
	Name        string `json:"name"`
	About       string `json:"about"`
	thread      string
	participant string
	begins      int // minutes of the day
	idle        int // minutes after which the thread is stale; 0: as always
	scenes      []scene
	ends        []string // the thread in the end: place, who, words
}

// scene is a moment of a story: what somebody outside does, and what happens then, in this order. A line is written as
// [moment.line] writes it.
type scene struct {
	after int // minutes since the beginning
	do    func(ctx context.Context, s *stage) error
	then  []string
}

// stage is where a story is played.
type stage struct {
	*cli
	story  story
	minute time.Duration
	heard  *journal
	client *client
	pool   *pgxpool.Pool

	watch  *watcher
	moment chan moment
	began  time.Time
	now    int               // minutes since the beginning
	runs   map[string]string // executions that were started here, by name
	lock   string            // of the worker outside
	words  string            // what was said last
}

// play plays the story, shows it as it goes, and compares it with what should happen.
func (s *stage) play(ctx context.Context) error {
	s.moment, s.runs, s.began = make(chan moment, 100), map[string]string{}, time.Now()
	s.watch = newWatcher(s.client, s.heard, s.story.thread, s.story.participant, s.moment)
	if !s.json {
		s.say("%s", s.story.intro(s.minute))
	}
	opened := map[string]any{"id": s.story.thread, "participant": s.story.participant, "owner": demoKey}
	if s.story.idle > 0 {
		opened["idle_seconds"] = max(1, int((time.Duration(s.story.idle) * s.minute).Seconds()))
	}
	if err := s.client.post(ctx, "/v1/threads", opened, nil); err != nil {
		return err
	}
	group, playing := errgroup.WithContext(ctx)
	looking, stop := context.WithCancel(playing)
	group.Go(func() error { return s.watch.run(looking) })
	group.Go(func() error {
		defer stop()
		return s.script(playing)
	})
	if err := group.Wait(); err != nil || ctx.Err() != nil {
		return err
	}
	return s.complete()
}

// script goes through the scenes.
func (s *stage) script(ctx context.Context) error {
	for _, scene := range s.story.scenes {
		if err := s.until(ctx, scene.after); err != nil {
			return err
		}
		if scene.do != nil {
			if err := scene.do(ctx, s); err != nil {
				return err
			}
		}
		if err := s.expect(ctx, scene.then); err != nil {
			return err
		}
	}
	return s.finale(ctx)
}

// until waits for a minute of the story.
func (s *stage) until(ctx context.Context, minute int) error {
	timer := time.NewTimer(time.Until(s.began.Add(time.Duration(minute) * s.minute)))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
	}
	s.now = minute
	return nil
}

// expect shows what happens and compares it with what should.
func (s *stage) expect(ctx context.Context, want []string) error {
	deadline := time.NewTimer(demoPatience)
	defer deadline.Stop()
	var got []string
	for len(got) < len(want) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-deadline.C:
			return otherwise(fmt.Sprintf("at %s nothing more happened within %s", s.clock(), demoPatience), want, got)
		case m := <-s.moment:
			if m.Event == said {
				s.words = m.Text
			}
			s.show(m)
			got = append(got, m.line())
			if got[len(got)-1] != want[len(got)-1] {
				return otherwise("at "+s.clock()+" the story went otherwise", want, got)
			}
		}
	}
	return nil
}

// otherwise is the error of a story that went another way: what was expected and what happened, line by line.
func otherwise(what string, want, got []string) error {
	var b strings.Builder
	b.WriteString(what + ":")
	for i := range max(len(want), len(got)) {
		w, g := at(want, i), at(got, i)
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
	return &differs{b.String()}
}

func at(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return ""
}

// differs is a story that went otherwise; - was expected, + happened.
type differs struct{ text string }

func (d *differs) Error() string { return d.text }

var anyID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// line is a moment as stories write it: who, what, whom, what is said. Ids are left out.
func (m moment) line() string {
	line := m.Who + " " + m.Event
	if m.Other != "" {
		line += " " + m.Other
	}
	if m.Text != "" {
		line += ": " + m.Text
	}
	return anyID.ReplaceAllString(line, "…")
}

// finale lets the watcher look again, to find what should not have happened, and shows the thread.
func (s *stage) finale(ctx context.Context) error {
	quiet := time.NewTimer(10 * demoLook)
	defer quiet.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case m := <-s.moment:
		s.show(m)
		return otherwise("more happened than was expected", nil, []string{m.line()})
	case <-quiet.C:
	}
	return s.showThread(ctx)
}

// complete compares the log with what was told: each line about the thread's lane has been.
func (s *stage) complete() error {
	if n := s.heard.count(laneLines...); n != s.watch.told {
		return otherwise(fmt.Sprintf("the log has %d lines about the thread's lane, and %d were told", n, s.watch.told), nil, nil)
	}
	if s.json {
		return s.printLine(map[string]any{"event": "checked", "story": s.story.Name, "ok": true})
	}
	_, err := fmt.Fprintf(s.out, "\nChecked: it went as it should.\n")
	return err
}

// start starts a flow in the thread.
func (s *stage) start(ctx context.Context, flow string, input any) error {
	s.act("an admin", "starts "+shortName(flow))
	var got struct {
		ID      string `json:"id"`
		TraceID string `json:"trace_id"`
	}
	body := map[string]any{"flow": flow, "thread_id": s.story.thread}
	if input != nil {
		body["input"] = input
	}
	if err := s.client.post(ctx, "/v1/executions", body, &got); err != nil {
		return err
	}
	s.runs[shortName(flow)] = got.ID
	s.watch.follow(got.ID, flow, got.TraceID)
	return nil
}

// event raises one, as another system does.
func (s *stage) event(ctx context.Context, who, what, event, key string, data any) error {
	s.act(who, what)
	return s.client.post(ctx, "/v1/events", map[string]any{"event": event, "key": key, "data": data}, nil)
}

// asked is the id of the request that the last message names.
func (s *stage) asked() (string, error) {
	if id := anyID.FindString(s.words); id != "" {
		return id, nil
	}
	return "", fmt.Errorf("the last message names no request: %s", s.words)
}

// act shows what somebody outside does.
func (s *stage) act(who, what string) { s.show(moment{Who: who, Event: acts, Text: what}) }

// take has a worker outside lock a run.
func (s *stage) take(ctx context.Context, worker string) error {
	s.act(worker, "is a worker outside: it locks its run")
	var got struct {
		LockID string `json:"lock_id"`
	}
	err := s.client.post(ctx, "/v1/executions/"+s.runs[worker]+"/lock", map[string]any{"owner": "worker " + worker, "ttl_seconds": 300}, &got)
	s.lock = got.LockID
	return err
}

// tell is what a worker outside says in the thread.
func (s *stage) tell(ctx context.Context, worker, words string) error {
	var got struct {
		Success bool `json:"success"`
		Queued  bool `json:"queued"`
	}
	body := map[string]any{"content": words, "execution_id": s.runs[worker], "lock_id": s.lock}
	err := s.client.post(ctx, "/v1/threads/"+url.PathEscape(s.story.thread)+"/messages", body, &got)
	if err == nil && (!got.Success || got.Queued) {
		err = fmt.Errorf("%s's message was not sent at once: %+v", worker, got)
	}
	return err
}

// beat shows that a worker lives.
func (s *stage) beat(ctx context.Context, worker, what string) error {
	var got struct {
		Status          string `json:"status"`
		CancelRequested bool   `json:"cancel_requested"`
	}
	err := s.client.call(ctx, "PUT", "/v1/executions/"+s.runs[worker]+"/lock/"+url.PathEscape(s.lock), nil, &got)
	if err == nil && (got.Status != "running" || got.CancelRequested) {
		err = fmt.Errorf("%s's run is %s", worker, got.Status)
	}
	if err == nil {
		s.act(worker, what)
	}
	return err
}

// holder is the execution whose live lane the thread is; "" when it is nobody's, or stale.
func (s *stage) holder(ctx context.Context) (string, error) {
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

// untilStale waits until the thread's lane has ended by itself.
func (s *stage) untilStale(ctx context.Context) error {
	ctx, stop := context.WithTimeoutCause(ctx, demoPatience, errors.New("the thread's lane did not become stale"))
	defer stop()
	look := time.NewTicker(demoLook)
	defer look.Stop()
	for {
		got, err := s.holder(ctx)
		if err != nil || got == "" {
			return err
		}
		if got != s.runs["agente_a"] {
			return fmt.Errorf("the thread is held by %s", got)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-look.C:
		}
	}
}

// clock is the story's time.
func (s *stage) clock() string {
	minutes := s.story.begins + s.now
	return fmt.Sprintf("%02d:%02d", minutes/60%24, minutes%60)
}

// show tells a moment to who watches: a line, of JSON with --json.
func (s *stage) show(m moment) {
	m.At, m.ElapsedMS = s.clock(), time.Since(s.began).Milliseconds()
	out := &printer{to: s.out} // the end of the story says whether it could be written
	if s.json {
		text, _ := json.Marshal(m) // texts and numbers can always be encoded
		fmt.Fprintf(out, "%s\n", text)
		return
	}
	fmt.Fprintf(out, "%s  %-12s %s\n", m.At, printable(m.Who), printable(m.tale()))
}

// tale is a moment in words.
func (m moment) tale() string {
	switch m.Event {
	case acquired:
		return "takes the thread"
	case borrowed:
		return "inherits the thread from " + m.Other
	case stale:
		return "has been silent for too long: lane stale, clearing"
	case queued:
		if m.Other == "" {
			return "is queued: " + quoted(m.Text)
		}
		return "is queued behind " + m.Other + ": " + quoted(m.Text)
	case said:
		return quoted(m.Text)
	case triggers:
		return "triggers " + m.Other + ", and waits for it"
	case waits:
		return "waits: " + m.Other
	case returned:
		return "gives the thread back to " + m.Other
	case released:
		return "frees the thread"
	}
	return m.Text
}

func quoted(words string) string { return "«" + words + "»" }

// printLine prints a value as one line of JSON.
func (s *stage) printLine(value any) error {
	text, err := json.Marshal(value)
	if err == nil {
		_, err = fmt.Fprintf(s.out, "%s\n", text)
	}
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// spoken is a row of the thread.
type spoken struct {
	Seq     *int64 `json:"seq"`
	Who     string `json:"who"`
	Content string `json:"content"`
	Status  string `json:"status"`
}

// threadSQL is how anybody reads a thread.
const threadSQL = `
select m.seq, case m.role when 'user' then t.participant else x.flow end as who, m.content, m.status
  from agent_messages m join agent_threads t on t.id = m.thread_id left join agent_executions x on x.id = m.execution_id
 where m.thread_id = @thread order by m.seq`

// showThread shows the thread as SQL has it, and compares it with how it should end.
func (s *stage) showThread(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, threadSQL, postgres.Strict{"thread": s.story.thread})
	if err != nil {
		return fmt.Errorf("read the thread: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[spoken])
	if err != nil {
		return fmt.Errorf("read the thread: %w", err)
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
		err = s.print(nil, func(w io.Writer) error {
			fmt.Fprintf(w, "\nThe thread in SQL, agent_messages where thread_id = '%s' order by seq:\n\n", s.story.thread)
			return table(w, "nothing was said", []string{"SEQ", "WHO", "CONTENT", "STATUS"}, cells)
		})
	}
	if err == nil && !slices.Equal(got, s.story.ends) {
		err = otherwise("the thread is another one", s.story.ends, got)
	}
	return err
}
