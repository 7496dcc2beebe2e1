package operate_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/looptest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// testDatabase is a database and a scripted model for processes.
type testDatabase struct {
	pool     *pgxpool.Pool
	model    *modeltest.Server
	loop     *reason.Loop
	builtins map[string]skills.Builtin
	lease    time.Duration // of a worker
}

func newTestDatabase(t *testing.T, replies ...modeltest.Reply) *testDatabase {
	t.Helper()
	return newTestDatabaseOn(t, pgtest.DB(t), replies...)
}

func newTestDatabaseOn(t *testing.T, pool *pgxpool.Pool, replies ...modeltest.Reply) *testDatabase {
	t.Helper()
	w := &testDatabase{
		pool: pool, model: modeltest.New(t, replies...), builtins: map[string]skills.Builtin{}, lease: 20 * time.Second,
	}
	w.loop = looptest.New(t, w.pool, w.model,
		skills.Options{Builtins: w.builtins, AllowPrivate: []string{"127.0.0.1"}})
	return w
}

// builtin declares a skill that runs in the test.
func (w *testDatabase) builtin(t *testing.T, name, trust string, fn skills.Builtin) {
	t.Helper()
	w.builtins[name] = fn
	w.addSkill(t, skills.Definition{
		Name: name, Handler: "builtin:" + name, Trust: trust,
		Parameters: map[string]any{"type": "object", "additionalProperties": true},
	})
}

func (w *testDatabase) addSkill(t *testing.T, d skills.Definition) {
	t.Helper()
	d.Description = "does " + d.Name
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
}

// process is one process: a surface, its engine and its HTTP server.
type process struct {
	*operate.Operate
	engine *executions.Engine
	keeper *lanes.Keeper
	http   *httptest.Server
	stop   context.CancelFunc // ends everything, like a shutdown
	ended  func() error
}

// process starts a process. With working, it claims executions like `agent serve`.
func (w *testDatabase) process(t *testing.T, working bool, change ...func(*operate.Options)) *process {
	t.Helper()
	listener := postgres.NewListener(postgres.Dialer(w.pool), slog.New(slog.DiscardHandler))
	p := &process{keeper: lanes.NewKeeper(w.pool, lanes.Options{Listener: listener})}
	p.engine = enginetest.New(t, w.pool, func(o *executions.Options) {
		o.Keeper, o.Listener, o.LeaseTTL, o.StopTimeout = p.keeper, listener, w.lease, 200*time.Millisecond
	})
	beat := &heartbeat.Heartbeat{
		Pool: w.pool, Loop: w.loop, Heal: selfheal.Default(),
		Logger: slog.New(slog.DiscardHandler),
	}
	require.NoError(t, beat.Register(p.engine))
	opts := operate.Options{
		Pool: w.pool, Engine: p.engine, Keeper: p.keeper, Loop: w.loop, Poll: 20 * time.Millisecond,
		KeepAlive: 50 * time.Millisecond,
	}
	for _, c := range change {
		c(&opts)
	}
	var err error
	p.Operate, err = operate.New(opts)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /v1/operate", p.Handler())
	mux.Handle("GET /v1/operate/watch", p.WatchHandler())
	p.http = httptest.NewServer(mux)
	p.start(t, listener, working)
	return p
}

func (p *process) start(t *testing.T, listener *postgres.Listener, working bool) {
	t.Helper()
	living, kill := context.WithCancel(context.WithoutCancel(t.Context()))
	ctx, stop := context.WithCancel(living)
	var above, below errgroup.Group
	below.Go(func() error { return p.keeper.Run(living) })
	below.Go(func() error { return listener.Run(living) })
	above.Go(func() error {
		if working {
			return p.engine.Run(ctx)
		}
		return p.engine.KeepAlive(ctx)
	})
	p.stop = stop
	p.ended = sync.OnceValue(func() error { return above.Wait() })
	t.Cleanup(func() {
		stop()
		p.http.CloseClientConnections()
		p.http.Close()
		err := p.ended()
		kill()
		if below := below.Wait(); err == nil {
			err = below
		}
		assert.NoError(t, err)
	})
}

// eventLog collects the events of a turn.
type eventLog struct {
	mu     sync.Mutex
	events []operate.Event
}

func (l *eventLog) add(e operate.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// names joins the events' names. Consecutive deltas are one.
func (l *eventLog) names() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var names []string
	for _, e := range l.events {
		if n := len(names); n > 0 && e.Name == "delta" && names[n-1] == "delta" {
			continue
		}
		names = append(names, e.Name)
	}
	return strings.Join(names, " ")
}

// lastEvent returns the newest event of a name.
func lastEvent[T any](l *eventLog, name string) (data T, found bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Name == name {
			data, found = e.Data.(T)
		}
	}
	return data, found
}

// text returns the streamed text.
func (l *eventLog) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, e := range l.events {
		if d, ok := e.Data.(operate.Delta); ok {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

func (p *process) open(t *testing.T, id string) *operate.Session {
	t.Helper()
	s, err := p.Session(id, true)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, s.Close(context.WithoutCancel(t.Context())))
	})
	return s
}

// runningTurn is a turn in its own goroutine.
type runningTurn struct {
	eventLog
	leave context.CancelCauseFunc
	done  operate.Done
	err   error
	over  chan struct{}
}

func (p *process) send(t *testing.T, s *operate.Session, message string, wait bool) *runningTurn {
	t.Helper()
	ctx, leave := context.WithCancelCause(context.WithoutCancel(t.Context()))
	b := &runningTurn{leave: leave, over: make(chan struct{})}
	go func() {
		defer close(b.over)
		b.done, b.err = s.Turn(ctx, message, wait, b.add)
	}()
	t.Cleanup(func() {
		leave(operate.ErrInterrupt)
		<-b.over
	})
	return b
}

// wait waits for the turn's end.
func (b *runningTurn) wait(t *testing.T) (operate.Done, error) {
	t.Helper()
	select {
	case <-b.over:
	case <-time.After(pgtest.Timeout):
		t.Fatalf("the turn does not end; events: %s", b.names())
	}
	return b.done, b.err
}

func waitEvent[T any](t *testing.T, b *runningTurn, name string) (data T) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		var found bool
		data, found = lastEvent[T](&b.eventLog, name)
		return found
	}, "event "+name)
	return data
}

// delegates gives a process the tool delegate.
func (w *testDatabase) delegates(t *testing.T) func(*operate.Options) {
	t.Helper()
	return func(o *operate.Options) {
		require.NoError(t, w.loop.RegisterDelegate(o.Engine))
		o.Tools = []reason.Tool{w.loop.DelegateTool(o.Engine, []string{skills.ScopeInternal})}
	}
}

// execution reads a turn's row.
func (w *testDatabase) execution(t *testing.T, id string) executions.Execution {
	t.Helper()
	x, err := executions.Get(t.Context(), w.pool, id)
	require.NoError(t, err)
	return x
}

// sse is an event in the client's form.
type sse struct {
	name string
	data json.RawMessage
}

// readEvents reads a stream until it ends or stop returns true, and counts comments.
func readEvents(body io.Reader, stop func(sse) bool) (events []sse, comments int) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	var now sse
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, ":"):
			comments++
		case strings.HasPrefix(line, "event: "):
			now.name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			now.data = json.RawMessage(line[len("data: "):])
		case line == "" && now.name != "":
			events = append(events, now)
			if stop != nil && stop(now) {
				return events, comments
			}
			now = sse{}
		}
	}
	return events, comments
}

// post sends a body to POST /v1/operate. headers alternates names and values.
func (p *process) post(t *testing.T, ctx context.Context, body string, headers ...string) *http.Response { //nolint:revive // t first, as in all helpers
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.http.URL+"/v1/operate", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func decode[T any](t *testing.T, r io.Reader) (v T) {
	t.Helper()
	require.NoError(t, json.NewDecoder(r).Decode(&v))
	return v
}

// laneHolder returns the holder of the lane operate, or nothing.
func (w *testDatabase) laneHolder(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `select coalesce((select locked_by from agent_locks_live
		where lane = 'operate'), '')`)
}

// traceRows returns skill and status of a turn's rows, in order.
func (w *testDatabase) traceRows(t *testing.T, traceID string) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `
		select coalesce(string_agg(skill_name || ' ' || status, ', ' order by created_at, id), '')
		  from agent_activity where trace_id = $1`, traceID)
}

// callLookOnce calls look, then answers.
func callLookOnce(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
	if r.Messages[len(r.Messages)-1].Role == openai.ChatMessageRoleTool {
		return modeltest.Text("Done.")
	}
	return modeltest.ToolCall("look", `{}`)
}
