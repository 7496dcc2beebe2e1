package engineroom

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/principals"
)

// fakePage is a page with parts whose text a test sets. It counts the reads of each part.
type fakePage struct {
	mu    sync.Mutex
	texts map[string]string
	err   error
	reads map[string]*atomic.Int64
}

func (s *fakePage) set(part, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.texts[part] = text
}

func (s *fakePage) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *fakePage) load(part string) func(context.Context, *pageRequest) (any, error) {
	return func(context.Context, *pageRequest) (any, error) {
		s.reads[part].Add(1)
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.texts[part], s.err
	}
}

// serveFakePage serves a room with a page /watched. Its parts are "one", read every 20 ms, "calm", and "still".
func serveFakePage(t *testing.T) (*fakePage, *Room, *httptest.Server) {
	t.Helper()
	return serveFakePageWith(t, func(*page) {})
}

func serveFakePageWith(t *testing.T, change func(p *page)) (*fakePage, *Room, *httptest.Server) {
	t.Helper()
	room := newRoom(t, Options{Pool: pgtest.DB(t), Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	s := &fakePage{texts: map[string]string{}, reads: map[string]*atomic.Int64{"one": {}, "calm": {}, "still": {}}}
	p := page{path: "/watched", name: "watched", title: "Watched", parts: []part{
		{name: "one", interval: 20 * time.Millisecond, load: s.load("one")},
		{name: "calm", interval: 20 * time.Millisecond, refreshOnActivity: true, load: s.load("calm")},
		{name: "still", load: s.load("still")},
		{name: "pause", load: func(context.Context, *pageRequest) (any, error) { return nil, nil }}, // every page has it
	}}
	change(&p)
	room.pages = []page{p}
	room.hub.pollInterval, room.hub.retryInterval = 20*time.Millisecond, 20*time.Millisecond
	text := `{{define "watched"}}{{.Part "one"}}{{.Part "calm"}}{{.Part "still"}}{{end}}{{define "watched/pause"}}{{end}}`
	for name := range s.reads {
		text += fmt.Sprintf(`{{define "watched/%s"}}<section id="%s">%s is {{.}}</section>{{end}}`, name, name, name)
	}
	room.templates = template.Must(room.templates.Parse(text))
	server := serveRoom(t, room)
	return s, room, server
}

// event is an event of a stream.
type event struct{ name, id, data string }

// streamReader is an open stream.
type streamReader struct {
	t      *testing.T
	events chan event
	stop   func()
	last   string // id of the newest event
	status int
}

// openStream opens the stream of an address.
func openStream(t *testing.T, url, lastID string) *streamReader {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	require.NoError(t, err)
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	l := &streamReader{t: t, events: make(chan event, 1000), status: resp.StatusCode}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(l.events)
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(nil, 1<<22)
		var e event
		for lines.Scan() {
			name, value, _ := strings.Cut(lines.Text(), ": ")
			switch name {
			case "event":
				e.name = value
			case "id":
				e.id = value
			case "data":
				e.data = value
			case "":
				if e.name != "" {
					l.events <- e
				}
				e = event{}
			}
		}
	}()
	l.stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(l.stop)
	return l
}

// nextPart waits for the next part, and returns its id and text.
func (l *streamReader) nextPart() (id, html string) {
	l.t.Helper()
	deadline := time.After(pgtest.Timeout)
	for {
		select {
		case e, open := <-l.events:
			require.True(l.t, open, "the stream ended")
			if e.name != "part" {
				continue
			}
			var p struct{ ID, HTML string }
			require.NoError(l.t, json.Unmarshal([]byte(e.data), &p))
			l.last = e.id
			return p.ID, p.HTML
		case <-deadline:
			l.t.Fatal("no part arrived")
		}
	}
}

// waitFor waits for a part with the words, and skips others.
func (l *streamReader) waitFor(words string) {
	l.t.Helper()
	for {
		if _, html := l.nextPart(); strings.Contains(html, words) {
			return
		}
	}
}

// wantPart checks the next part.
func (l *streamReader) wantPart(id, words string) {
	l.t.Helper()
	if got, html := l.nextPart(); got != id || !strings.Contains(html, words) {
		l.t.Fatalf("the next part is %s: %s, want %s with %s", got, html, id, words)
	}
}

// stateOf returns the state that a loaded page names.
func stateOf(t *testing.T, body string) string {
	t.Helper()
	_, rest, found := strings.Cut(body, `data-seen="`)
	state, _, _ := strings.Cut(rest, `"`)
	if !found || state == "" { // an error page names none
		t.Fatalf("the page contains no state:\n%s", body)
	}
	return state
}

func TestChangedPartIsSent(t *testing.T) {
	t.Parallel()
	s, _, server := serveFakePage(t)
	_, body := testkit.Get(t, server.URL+"/watched?b=2&a=1")
	assert.Truef(t, strings.Contains(body, `data-live="/live/watched?a=1&amp;b=2"`),
		"the page does not contain the address of its stream:\n%s", body)
	l := openStream(t, server.URL+"/live/watched?a=1&b=2&seen="+stateOf(t, body), "")
	s.set("one", "a <b>")
	l.wantPart("one", "one is a &lt;b&gt;")
	s.set("one", "b")
	l.wantPart("one", "one is b")
	assert.Equal(t, 1, s.reads["still"].Load())
}

func TestStreamResumesByState(t *testing.T) {
	t.Parallel()
	s, _, server := serveFakePage(t)
	s.set("one", "first")
	_, body := testkit.Get(t, server.URL+"/watched")
	s.set("one", "changed between page and stream")
	l := openStream(t, server.URL+"/live/watched?seen="+stateOf(t, body), "")
	l.wantPart("one", "changed between")
	l.stop()
	s.set("calm", "changed while away")
	reconnected := openStream(t, server.URL+"/live/watched?seen="+stateOf(t, body), l.last)
	reconnected.wantPart("calm", "changed while away") // and not "one" again, nor the changes since ?seen=
	reconnected.stop()
	third := openStream(t, server.URL+"/live/watched", reconnected.last)
	s.set("one", "last")
	third.wantPart("one", "last")
	third.stop()
	for _, state := range []string{"", "x", "x.y", third.last + ".z", "%0Aid:%20evil.y"} {
		l := openStream(t, server.URL+"/live/watched?seen="+state, "")
		got := map[string]string{} // in the order of their reads
		for got["one"] == "" || got["calm"] == "" {
			id, html := l.nextPart()
			got[id] = html
		}
		assert.Truef(t, strings.Contains(got["one"], "last") && strings.Contains(got["calm"], "changed while away"),
			"seen %q: %v", state, got)
	}
}

// A page that was just loaded may be newer than the last update of the other viewers.
func TestNewerStateIsNotOverwritten(t *testing.T) {
	t.Parallel()
	var s *fakePage
	slow := make(chan struct{}, 10)
	s, room, server := serveFakePageWith(t, func(p *page) {
		p.parts[0].interval, p.parts[1].interval = time.Hour, time.Hour
		load := p.parts[1].load
		p.parts[1].load = func(ctx context.Context, req *pageRequest) (any, error) {
			select {
			case <-slow:
			case <-ctx.Done():
			}
			return load(ctx, req)
		}
	})
	s.set("one", "old")
	s.set("calm", "old")
	slow <- struct{}{}
	first := openStream(t, server.URL+"/live/watched", "")
	first.wantPart("one", "old")
	first.wantPart("calm", "old")
	s.set("one", "new")
	s.set("calm", "new")
	slow <- struct{}{}
	_, body := testkit.Get(t, server.URL+"/watched")
	s.set("one", "newer")
	sub, leave, err := room.hub.join(room.pages[0], &pageRequest{URL: "/watched", mayReadThreads: true}, stateOf(t, body))
	require.NoError(t, err)
	defer leave()
	first.wantPart("one", "newer") // during the read of the other part
	if list := sub.pendingUpdates(); len(list) != 1 || !strings.Contains(string(list[0]), "newer") {
		t.Errorf("the viewer with the newer state gets %d parts", len(list))
	}
	slow <- struct{}{}
	first.wantPart("calm", "new")
	if list := sub.pendingUpdates(); len(list) != 0 {
		t.Errorf("the viewer with that state gets %s", list[0])
	}
}

func TestManyViewersShareOneRead(t *testing.T) {
	t.Parallel()
	const viewers = 100
	s, room, server := serveFakePageWith(t, func(p *page) {
		p.parts[0].interval, p.parts[1].interval = time.Hour,
			time.Hour
	})
	_, body := testkit.Get(t, server.URL+"/watched")
	state := stateOf(t, body)
	first := openStream(t, server.URL+"/live/watched?seen="+state, "")
	pgtest.Eventually(t, func() bool { return s.reads["one"].Load() == 2 && s.reads["calm"].Load() == 2 },
		"the first viewer's parts are read")
	all := []*streamReader{first}
	for range viewers - 1 {
		all = append(all, openStream(t, server.URL+"/live/watched?seen="+state, ""))
	}
	s.set("one", "news")
	before := s.reads["one"].Load()
	assert.Truef(t, before == 2 && s.reads["calm"].Load() == 2,
		"%d viewers with the current state cause %d reads", viewers, before)
	room.hub.mu.Lock()
	for _, topic := range room.hub.topics {
		topic.mu.Lock()
		topic.parts[0].requested = true
		topic.mu.Unlock()
		signal(topic.wake)
	}
	room.hub.mu.Unlock()
	for _, l := range all {
		l.wantPart("one", "news")
	}
	now := s.reads["one"].Load()
	assert.Truef(t, now == before+1, "a change for %d viewers causes %d reads", viewers, now-before)
}

func TestCalmPartIsReadAfterActivity(t *testing.T) {
	t.Parallel()
	s, room, server := serveFakePage(t)
	room.hub.idleRefresh = time.Hour
	l := openStream(t, server.URL+"/live/watched", "")
	l.waitFor("calm is")
	// pollChanges reports a change once at its start. After that the log does not change.
	var before int64
	pgtest.Eventually(t, func() bool {
		ones, calm := s.reads["one"].Load(), s.reads["calm"].Load()
		pgtest.Eventually(t, func() bool { return s.reads["one"].Load() > ones+10 }, "the other part is read")
		before = s.reads["calm"].Load()
		return before == calm
	}, "the reads of the calm part stop")
	s.set("calm", "moved")
	pgtest.Exec(t, room.Pool, `insert into agent_activity (trace_id, skill_name, status) values ('op_1', 'x', 'success')`)
	l.waitFor("calm is moved")
}

func TestPartIsReadAtOnceAfterItsTrigger(t *testing.T) {
	t.Parallel()
	s, room, server := serveFakePageWith(t, func(p *page) {
		p.parts[0].interval, p.parts[0].triggers = time.Hour, failureChanged
		p.parts[1].interval, p.parts[1].triggers = time.Hour, asksChanged
	})
	parts := newTopic(room.hub, room.pages[0], nil, room.pages[0].liveParts())
	parts.markChanged(logChanged | failureChanged)
	if one, calm := parts.parts[0], parts.parts[1]; !one.urgent || !one.changed || calm.urgent || !calm.changed {
		t.Errorf("the parts after a failure are %+v and %+v", one, calm)
	}
	l := openStream(t, server.URL+"/live/watched", "")
	l.waitFor("calm is")
	for n := range 2 { // the start of pollChanges may cause the first read
		s.set("calm", fmt.Sprint("asked ", n))
		rows.Quiet(t, room.Pool, `
			insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash,
			expires_at) values ('op_1', 'x', 1, '{}', $1, clock_timestamp() + interval '1 hour')`, fmt.Sprint(n))
		l.waitFor(fmt.Sprint("calm is asked ", n))
	}
}

func TestUrgentReadsAreSpaced(t *testing.T) {
	t.Parallel()
	start := time.Now()
	s := partState{
		part: part{interval: 3 * time.Second}, readStart: start, readEnd: start.Add(20 * time.Millisecond),
		changed: true,
	}
	for _, c := range []struct {
		urgent bool
		hurry  time.Time
		want   time.Duration
	}{
		{false, time.Time{}, 3020 * time.Millisecond},
		{true, time.Time{}, 120 * time.Millisecond},
		{true, start.Add(-time.Second), 120 * time.Millisecond},
		{true, start, 600 * time.Millisecond},
	} {
		s.urgent, s.urgentRead = c.urgent, c.hurry
		if due := s.dueAt(time.Minute, time.Minute).Sub(start); due != c.want {
			t.Errorf("urgent %v: due after %s, want %s", c.urgent, due, c.want)
		}
	}
}

func TestSnapshotReportsChanges(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	last := readSnapshot(t.Context(), pool, nil)
	for _, c := range []struct {
		statement string
		want      changes
	}{
		{`insert into agent_activity (trace_id, skill_name, status) values ('op_1', 'x', 'success')`, logChanged},
		{
			`with a as (insert into agent_activity (trace_id, skill_name, status) values ('op_1', 'x', 'running') returning id)
			 insert into agent_activity_open (activity_id, kind) select a.id, 'call' from a`, logChanged | openChanged,
		},
		{
			`with d as (delete from agent_activity_open)
			 update agent_activity set status = 'error', error_message = 'broken', finished_at = clock_timestamp()
			  where status = 'running'`, openChanged | failureChanged,
		},
		{`select 1`, 0},
		{`insert into agent_executions (trace_id, surface, flow) values ('op_1', 'operate', 'f')`, runsChanged},
		{
			`update agent_executions set status = 'failed', error_message = 'broken', updated_at = clock_timestamp()`,
			failureChanged,
		},
		{
			`insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
			 values ('op_1', 'x', 1, '{}', 'x', clock_timestamp() + interval '1 hour')`, asksChanged,
		},
		{`update agent_approvals set expires_at = clock_timestamp() - interval '1 hour'`, asksChanged},
		{`alter table agent_activity rename to away`, anyChange},
		{`alter table away rename to agent_activity`, anyChange},
	} {
		rows.Quiet(t, pool, c.statement)
		now := readSnapshot(t.Context(), pool, nil)
		if got := now.changedSince(last); got != c.want {
			t.Errorf("%s: changes are %b, want %b", c.statement, got, c.want)
		}
		last = now
	}
}

func TestCachedValueIsInvalidatedDuringRead(t *testing.T) {
	t.Parallel()
	var r cached[int]
	n := 0
	read := func() (int, error) { n++; return n, nil }
	value := func(fn func() (int, error)) int {
		got, err := r.read(time.Hour, fn)
		require.NoError(t, err)
		return got
	}
	assert.Equal(t, 1, value(read))
	assert.Equal(t, 1, value(read))
	r.invalidate()
	assert.Equal(t, 2, value(func() (int, error) { r.invalidate(); return read() }))
	assert.Equal(t, 3, value(read))
	assert.Equal(t, 3, value(read))
	r.invalidate()
	_, err := r.read(time.Hour, func() (int, error) { return 0, errors.New("away") })
	require.Error(t, err)
	assert.Equal(t, 4, value(read))
}

func TestStreamsShareFailuresUntilAnotherFailure(t *testing.T) {
	t.Parallel()
	room := newRoom(t, Options{Pool: pgtest.DB(t)})
	run := func(status string) {
		rows.Quiet(t, room.Pool, `
			insert into agent_executions (trace_id, surface, flow, status, error_message, created_at, started_at,
			completed_at) select 'fl_1', 'flow', 'nightly', $1::text, case when $1::text = 'failed' then 'no such table' end, m.at, m.at, m.at
			from (select clock_timestamp() as at) m`, status)
	}
	groups := func(req *pageRequest) int {
		f, err := room.failures(t.Context(), req)
		require.NoError(t, err)
		return len(f.Groups(func(string) bool { return true }, nil))
	}
	stream := &pageRequest{streaming: true}
	assert.Equal(t, 0, groups(stream))
	quietly := readSnapshot(t.Context(), room.Pool, room.hub.lastFailing.Load())
	for range 3 {
		run("failed")
	}
	assert.Equal(t, 0, groups(stream))
	assert.Equal(t, 1, groups(&pageRequest{}))
	failed := readSnapshot(t.Context(), room.Pool, room.hub.lastFailing.Load())
	assert.Equal(t, failureChanged|runsChanged, failed.changedSince(quietly))
	room.hub.failures.invalidate()
	assert.Equal(t, 1, groups(stream))
	failing := room.hub.lastFailing.Load()
	assert.Equal(t, "nightly", strings.Join(failing.Flows, ", "))
	failed = readSnapshot(t.Context(), room.Pool, failing)
	run("completed")
	assert.Equal(t, failureChanged|runsChanged, readSnapshot(t.Context(), room.Pool, failing).changedSince(failed))
}

func TestFailedReadIsShownAndRecovers(t *testing.T) {
	t.Parallel()
	s, room, server := serveFakePage(t)
	room.hub.idleRefresh = time.Hour
	s.set("one", "fine")
	l := openStream(t, server.URL+"/live/watched", "")
	l.waitFor("one is fine")
	s.set("calm", "fine too")
	s.fail(errors.New("relation agent_x at 10.0.0.7"))
	trouble := func(part string) string { return `<section id="` + part + `" class="part trouble"` }
	for got := map[string]bool{}; !got["one"] || !got["calm"]; {
		id, html := l.nextPart()
		got[id] = strings.Contains(html, trouble(id)) &&
			strings.Contains(html, "This could not be read: something went wrong here") && !strings.Contains(html, "10.0.0.7")
		room.hub.notifyTopics(anyChange)
	}
	s.fail(nil)
	for got := map[string]bool{}; !got["one"] || !got["calm"]; {
		id, html := l.nextPart()
		got[id] = strings.Contains(html, id+" is fine")
	}
}

func TestSlowViewerGetsOnlyLatest(t *testing.T) {
	t.Parallel()
	s, room, _ := serveFakePage(t)
	p := room.pages[0]
	req := &pageRequest{URL: "/watched"}
	sub, leave, err := room.hub.join(p, req, "")
	require.NoError(t, err)
	defer leave()
	for i := range 50 {
		s.set("one", fmt.Sprint("number ", i))
		pgtest.Eventually(t, func() bool {
			sub.topic.mu.Lock()
			defer sub.topic.mu.Unlock()
			return strings.Contains(sub.topic.parts[0].data, fmt.Sprint("number ", i))
		}, "the part is read")
	}
	assert.Equal(t, 1, len(sub.notify))
	list := sub.pendingUpdates()
	assert.Truef(t, len(list) > 0 && len(list) <= 2 && strings.Contains(string(list[0]), "number 49"),
		"the viewer gets %d parts, first %s", len(list), list[0])
	if list := sub.pendingUpdates(); len(list) != 0 {
		t.Errorf("the viewer gets %s twice", list[0])
	}
}

func TestViewersAndTopicsAreBounded(t *testing.T) {
	t.Parallel()
	_, room, server := serveFakePage(t)
	room.hub.limits.topics, room.hub.limits.viewers = 2, 3
	a, b := openStream(t, server.URL+"/live/watched?x=1", ""), openStream(t, server.URL+"/live/watched?x=2", "")
	assert.Equal(t, http.StatusServiceUnavailable, openStream(t, server.URL+"/live/watched?x=3", "").status,
		"status of a third topic")
	third := openStream(t, server.URL+"/live/watched?x=2", "")
	assert.Truef(t, a.status == 200 && b.status == 200 && third.status == 200,
		"statuses of viewers within the bounds: %d, %d, %d", a.status, b.status, third.status)
	assert.Equal(t, http.StatusServiceUnavailable, openStream(t, server.URL+"/live/watched?x=1", "").status,
		"status of a fourth viewer")
	a.stop()
	pgtest.Eventually(t, func() bool {
		l := openStream(t, server.URL+"/live/watched?x=3", "")
		defer l.stop()
		return l.status == 200
	}, "another viewer is accepted")
}

func TestLastViewerStopsTopic(t *testing.T) {
	t.Parallel()
	_, room, _ := serveFakePage(t)
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			sub, leave, err := room.hub.join(room.pages[0], &pageRequest{URL: fmt.Sprint("/watched?", i%7)}, "")
			if err != nil {
				t.Error(err)
				return
			}
			select {
			case <-sub.notify:
			case <-time.After(pgtest.Timeout):
				t.Error("no update arrived")
			}
			leave()
		})
	}
	group.Wait()
	room.hub.mu.Lock()
	defer room.hub.mu.Unlock()
	assert.Truef(t, len(room.hub.topics) == 0 && room.hub.viewers == 0 && room.hub.stop == nil &&
		len(room.hub.readSlots) == 0, "the hub still has %d topics, %d viewers, a goroutine %t, %d used read slots",
		len(room.hub.topics),
		room.hub.viewers, room.hub.stop != nil, len(room.hub.readSlots))
}

func TestLeavingCancelsRead(t *testing.T) {
	t.Parallel()
	var started, ended atomic.Int64
	_, room, _ := serveFakePageWith(t, func(p *page) {
		p.parts[0].load = func(ctx context.Context, _ *pageRequest) (any, error) {
			started.Add(1)
			<-ctx.Done()
			ended.Add(1)
			return nil, ctx.Err()
		}
	})
	_, leave, err := room.hub.join(room.pages[0], &pageRequest{URL: "/watched"}, "")
	require.NoError(t, err)
	pgtest.Eventually(t, func() bool { return started.Load() == 1 }, "the part is being read")
	leave()
	assert.Truef(t, started.Load() == 1 && ended.Load() == 1, "%d reads began, %d ended", started.Load(), ended.Load())
}

func TestStreamEndsWithRequestOrLogin(t *testing.T) {
	t.Parallel()
	_, room, _ := serveFakePage(t)
	room.hub.pingInterval = 10 * time.Millisecond
	handler := room.live(room.pages[0])
	serve := func(ctx context.Context) string {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/live/watched", http.NoBody))
		assert.Truef(t, w.Header().Get("Content-Type") == "text/event-stream" &&
			w.Header().Get("Cache-Control") == "no-store", "the header is %v", w.Header())
		return w.Body.String()
	}
	text := ""
	for limit := 300 * time.Millisecond; !strings.Contains(text, "event: ping") && limit < time.Minute; limit *= 4 {
		over, cancel := context.WithTimeout(t.Context(), limit)
		text = serve(over)
		cancel()
	}
	assert.Truef(t, strings.HasPrefix(text, "retry: 1000\nevent: hello\ndata: "+build()+"\n\n") &&
		strings.Contains(text, "\n\nevent: ping\ndata: ") && strings.HasSuffix(text, "event: expired\ndata: login\n\n"),
		"the stream says\n%s", text)
	stopped, stop := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, stop)
	text = serve(stopped)
	assert.Truef(t, !strings.Contains(text, "expired"), "the stream reports a shutdown as\n%s", text)
}

func TestMissingPageHasNoStream(t *testing.T) {
	t.Parallel()
	s, _, server := serveFakePageWith(t, func(p *page) {
		p.open = func(_ context.Context, req *pageRequest) (string, error) {
			switch req.Query.Get("x") {
			case "bad":
				return "", problem.New(http.StatusBadRequest, "x cannot be bad")
			case "away":
				return "", errors.New("connection refused")
			}
			return "Title", nil
		}
	})
	if l := openStream(t, server.URL+"/live/watched?x=bad", ""); l.status != http.StatusBadRequest {
		t.Errorf("status of an unknown filter: %d", l.status)
	}
	l := openStream(t, server.URL+"/live/watched?x=away", "")
	l.wantPart("one", "This could not be read")
	assert.Equal(t, 0, s.reads["one"].Load(), "a part of a missing object was read")
}

// A database may hang without an error. The check for changes detects that. Then the page waits for one part only, not
// for each.
func TestHangingDatabaseDelaysOnePart(t *testing.T) {
	t.Parallel()
	s, room, server := serveFakePageWith(t, func(p *page) {
		p.parts[0].load = func(ctx context.Context, _ *pageRequest) (any, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	room.hub.pollTimeout, room.hub.readTimeout = 100*time.Millisecond, time.Hour
	room.hub.databaseDown.Store(true)
	watched := room.pages[0]
	both := newTopic(room.hub, watched, &pageRequest{URL: "/watched"}, watched.liveParts())
	both.refresh(t.Context(), []int{0, 1})
	for _, one := range both.parts[:2] {
		assert.Contains(t, one.data, "the database does not answer")
	}
	assert.Equal(t, 0, s.reads["calm"].Load(), "a part was read after another had timed out")
	room.hub.readTimeout = 100 * time.Millisecond
	openStream(t, server.URL+"/live/watched", "")
	pgtest.Eventually(t, func() bool { return !room.hub.databaseDown.Load() }, "the check for changes succeeds")
	lock := pgtest.Begin(t, room.Pool)
	pgtest.Exec(t, lock, `lock table agent_activity in access exclusive mode`)
	pgtest.Eventually(t, room.hub.databaseDown.Load, "the check for changes fails")
}

// FuzzStream sends parts of a page with any text, and reads them like a browser.
func FuzzStream(f *testing.F) {
	for _, text := range []string{
		"one", "<p>a</p>\n<p>b</p>\r\n", "\n\nevent: expired\ndata: login\n\n", "\rid: 9\r\r", "\x00", "\xff\xfe",
		"\u2028\ufeff", "</script>", strings.Repeat("<li>\r\n", 1000),
	} {
		f.Add(text, text, text)
	}
	f.Fuzz(func(t *testing.T, name, id, html string) {
		w := httptest.NewRecorder()
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.write((&partState{}).eventFor(id, encodePart(name, []byte(html))))
		out.write((&partState{}).eventFor("s", encodePart("last", []byte("the end"))))
		got := ssetest.Read(w.Body.String())
		require.Truef(t, len(got.Events) == 2 && len(got.Unknown)+len(got.Comments)+len(got.Retry) == 0 && got.Left == "" &&
			out.err == nil, "%q are not two events (%v)", w.Body, out.err)
		var part struct{ ID, HTML string }
		err := json.Unmarshal([]byte(got.Events[0].Data), &part)
		require.Truef(t, err == nil && got.Events[0].Name == "part", "event %+v: %v", got.Events[0], err)
		assert.Truef(t, !utf8.ValidString(name+html) || part.ID == name && part.HTML == html,
			"%q and %q are read as %q and %q", name, html, part.ID, part.HTML)
		if utf8.ValidString(id) && !strings.ContainsAny(id, "\r\n\x00") && got.Events[0].ID != id {
			t.Errorf("the id %q is read as %q", id, got.Events[0].ID)
		}
	})
}

// A HEAD request of a stream gets its response at once. Otherwise the next request on its connection would wait for
// ever.
func TestStreamAnswersHEAD(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}, Timeout: 60 * time.Second}
	t.Cleanup(client.CloseIdleConnections)
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"HEAD", "/live/operate", 200},
		{"GET", "/operate", 200},
		{"HEAD", "/live/operate?session=%00", 400},
		{"GET", "/operate", 200},
	} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, http.NoBody)
		require.NoError(t, err)
		got, err := client.Do(r)
		require.NoError(t, err, c.method, c.path)
		if _, err := io.Copy(io.Discard, got.Body); err != nil || got.Body.Close() != nil || got.StatusCode != c.status {
			t.Errorf("%s %s: status %d, %v", c.method, c.path, got.StatusCode, err)
		}
	}
}

// The median delay of a change is at most 300 ms. The short form permits 3 s, because the machine may be busy.
func TestALiveChangeArrivesQuickly(t *testing.T) {
	limit := 300 * time.Millisecond
	if testing.Short() {
		limit = 3 * time.Second
	}
	pool, server := openRoom(t)
	l := openStream(t, server.URL+"/live/activity", "")
	var median time.Duration
	for round := range 12 {
		median = medianDelay(t, pool, l)
		t.Logf("round %d: the median of the delays is %s", round, median)
		if median <= limit {
			return
		}
	}
	t.Errorf("the median of the delays is %s", median)
}

// medianDelay returns the median time from a change to its update on the page.
func medianDelay(t *testing.T, pool *pgxpool.Pool, l *streamReader) time.Duration {
	t.Helper()
	var delays []time.Duration
	for i := range 5 {
		time.Sleep(time.Duration(700+67*i) * time.Millisecond) // spreads the changes over the interval
		start := time.Now()
		id := insert(t, pool, `insert into agent_activity (trace_id, surface, skill_name, status)
			values ('hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'heartbeat', 'quick', 'success') returning id::text`)
		l.waitFor("row-" + id)
		delays = append(delays, time.Since(start))
	}
	slices.Sort(delays)
	return delays[len(delays)/2]
}

// The requester of a call with four eyes keeps the note that another approver must decide, also with another viewer.
func TestStreamOfApprovalIsOfItsViewer(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	server := serveAs(t, pool, func(r *http.Request) (string, principals.Role) {
		return r.Header.Get("Last-Event-ID"), principals.Admin
	})
	id := pgtest.Value[string](t, pool, `insert into agent_approvals (trace_id, skill_name, skill_revision, arguments,
		arguments_hash, expires_at, four_eyes, requested_by)
		values ('op_1', 'x', 1, '{}', 'x', clock_timestamp() + interval '1 hour', true, '{ana}') returning id::text`)
	ben := openStream(t, server+"/live/approvals/"+id, "ben")
	ben.waitFor("Four eyes")
	ana := openStream(t, server+"/live/approvals/"+id, "ana")
	ana.waitFor("You requested this call")
}

// An open page finds the rows that appear later and match its filter.
func TestLiveFiltersFindNewRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	server := serveRoom(t, room)
	rows.Execution(t, pool, "completed", "flow", "greet_1")
	const insertThread = `insert into agent_threads (id, channel, owner_kind, owner) values ($1, 'chat', 'key', $2)`
	const insertMemory = `insert into agent_memory (category, key, value, trace_id) values ($1, $2, '1', 'op_1')`
	const insertDelivery = `insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, headers,
		body, body_sha256) values ($1, $2, 'wh_1', 'wh_1', '{}', '', 'x')`
	rows.Quiet(t, pool, insertThread, "t1", "shop_1")
	rows.Quiet(t, pool, insertMemory, "fact_1", "key_1")
	rows.Quiet(t, pool, insertDelivery, "hook_1", "d-11")
	pages := map[string]*streamReader{}
	tests := map[string]struct{ path, want string }{
		"flow name":       {"executions?flow=greet", "fl_01M8NKXT"},
		"execution trace": {"executions?trace_id=01M8NKXT", "fl_01M8NKXT"},
		"trace id":        {"traces?trace=01M8NKXT", "greet_2"}, "activity trace": {"activity?trace=01M8NKXT", "look_2"},
		"thread owner": {"threads?owner=shop", "shop_2"}, "memory category": {"memory?category=fact", "key_2"},
		"delivery endpoint": {"deliveries?endpoint=hook", "hook_2"}, "delivery id": {"deliveries?id=d-22", "hook_2"},
	}
	for name, test := range tests {
		pages[name] = openStream(t, server.URL+"/live/"+test.path, "")
		pages[name].nextPart()
	}
	room.suggestionCache.mu.Lock()
	clear(room.suggestionCache.results)
	room.suggestionCache.mu.Unlock()
	rows.Quiet(t, pool, `insert into agent_executions (trace_id, surface, flow)
		values ('fl_01M8NKXTQ1T5J22XBV7F83NY73', 'flow', 'greet_2')`)
	rows.Quiet(t, pool, `insert into agent_activity (trace_id, skill_name, surface)
		values ('fl_01M8NKXTQ1T5J22XBV7F83NY73', 'look_2', 'flow')`)
	rows.Quiet(t, pool, insertThread, "t2", "shop_2")
	rows.Quiet(t, pool, insertMemory, "fact_2", "key_2")
	rows.Quiet(t, pool, insertDelivery, "hook_2", "d-22")
	for name, page := range pages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			page.t = t
			page.waitFor(tests[name].want)
		})
	}
}
