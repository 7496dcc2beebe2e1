package rollout_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const (
	adminToken = "admin-4d0c7be2915fa836"
	visitorKey = "visitor-b9135c0e77d24af8"
	shopSecret = "shop-7d5a9c1b4e6f2038"
)

const workspaceYAML = `
kind: skill
name: pay
description: Must not be repeated.
handler: "http:POST %s/pay"
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: flow
name: errand
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} begins"}}
  - {actionType: wait_for_event, timeout: 24h, onTimeout: fail, parameters: {key: "event {{input.n}}"}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} ends"}}
---
kind: webhook
name: shop
scheme: bearer
secrets: ["${SHOP_SECRET}"]
actions:
  - {event: EVENT_COMPLETED, key: "event {body.n}"}
`

// testEnv is a database with a workspace, a model and a skill, and the replicas behind a proxy.
type testEnv struct {
	t       testing.TB
	program string // the program of the next replica
	db      *pgxpool.Pool
	environ []string
	proxy   *proxy

	mu   sync.Mutex
	paid map[string]int  // calls of the skill, by body
	keys map[string]bool // their keys; nil for a skill that must not be repeated
}

// newTestEnv creates a test environment in a database. If the database has no schema, the program creates it. With
// repeatable, the skill may be repeated under the same key.
func newTestEnv(t testing.TB, program, at string, repeatable bool, further ...string) *testEnv {
	t.Helper()
	db := pgtest.Pool(t, at, postgres.Options{MaxConns: 6, ApplicationName: "test"})
	w := &testEnv{t: t, program: program, db: db, paid: map[string]int{}}
	model := modeltest.New(t)
	model.Handle(modelReply)
	skill := testkit.Serve(t, http.HandlerFunc(w.pay))
	w.environ = append(testkit.Environ(at, model, "AGENT_ADMIN_TOKEN="+adminToken, "AGENT_CHAT_KEY=visitors="+visitorKey,
		"AGENT_LOG_FORMAT=json", "AGENT_HEARTBEAT_CRON=@every 2s", "AGENT_WORKERS=6", "SHOP_SECRET="+shopSecret,
		"AGENT_DRAIN_DELAY=3s"), further...)
	w.migrate(program)
	pgtest.Exec(t, db, `create table tally (n int not null); insert into tally values (0)`)
	dir := t.TempDir()
	file := strings.ReplaceAll(workspaceYAML, "%s", skill)
	if repeatable {
		w.keys = map[string]bool{}
		file = strings.Replace(file, "description: Must not be repeated.", "description: Takes a key.\nidempotent: true", 1)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(file), 0o600))
	a := launch(t, program, w.environ, "apply", dir)
	require.Truef(t, a.Exit() == 0, "agent apply: %s", a.Err.String())
	w.proxy = newProxy(t)
	return w
}

// migrate has a program migrate the database.
func (w *testEnv) migrate(program string) {
	w.t.Helper()
	m := launch(w.t, program, w.environ, "migrate")
	require.Truef(w.t, m.Exit() == 0, "agent migrate: %s", m.Err.String())
}

// modelReply answers visitors slowly, so that answers are in progress at each stop of a replica.
func modelReply(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	last := modeltest.Said(req.Messages[len(req.Messages)-1])
	if strings.HasPrefix(last, "question ") {
		return modeltest.Text("This is the answer to " + last).Slowly(400 * time.Millisecond)
	}
	return modeltest.Text("All is well.")
}

// pay is the skill that must not be repeated.
func (w *testEnv) pay(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has disconnected
	}
	w.mu.Lock()
	if key := r.Header.Get("Idempotency-Key"); w.keys == nil || !w.keys[key] {
		w.paid[string(body)]++
		if w.keys != nil {
			w.keys[key] = true
		}
	}
	w.mu.Unlock()
	rw.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(rw, `{"paid": true}`) // the client may have disconnected
}

// add starts a replica and waits until it gets requests.
func (w *testEnv) add() *proctest.Process {
	w.t.Helper()
	r := launch(w.t, w.program, w.environ, "serve")
	base := r.Base()
	w.proxy.replace("", base)
	pgtest.Eventually(w.t, func() bool { return w.proxy.isTarget(base) },
		"the proxy sends requests to a new replica")
	return r
}

func TestRollReplicasUnderLoad(t *testing.T) {
	w := newTestEnv(t, program, pgtest.URL(t), false)
	replicas := []*proctest.Process{w.add(), w.add()}
	l := w.startLoad()
	l.waitForWork()
	for range rounds() {
		l.roll(replicas)
	}
	l.stopAndWait()
	l.check()
}

// roll replaces one replica after the other by the environment's program.
func (l *load) roll(replicas []*proctest.Process) {
	l.t.Helper()
	for i, r := range replicas {
		base := r.Base()
		code := r.Terminate()
		assert.Truef(l.t, code == 0 || l.crossing.Load(), "a replica ended with %d", code)
		l.proxy.replace(base, "")
		replicas[i] = l.add()
		l.waitForWork()
	}
}

// stopAndWait starts no more work, and waits until all work has ended.
func (l *load) stopAndWait() {
	l.t.Helper()
	l.end()
	pgtest.Eventually(l.t, func() bool {
		return len(pgtest.Column[string](l.t, l.db, `select flow from agent_executions where completed_at is null
			union all select content from agent_messages where status in ('queued', 'sending')
			union all select lane from agent_locks where expires_at > clock_timestamp() and locked_by <> ''`)) == 0
	}, "everything that was begun ends")
}

// check compares the database with the clients' answers.
func (l *load) check() {
	l.t.Helper()
	for n, id := range l.runs {
		bad := pgtest.Column[string](l.t, l.db,
			`select format('number %s is %s: %s', $1::int, status, error_message) from agent_executions
			where id = $2::uuid and (status <> 'completed' or (input ->> 'n')::int <> $1)`, n, id)
		assert.True(l.t, len(bad) == 0, bad)
		times := l.paid[fmt.Sprintf(`{"n":%d}`, n)]
		assert.Truef(l.t, times == 1, "number %d was paid %d times", n, times)
	}
	for _, query := range []string{
		`select format('number %s was started %s times', input ->> 'n', count(*)) from agent_executions where flow = 'errand'
			group by input ->> 'n' having count(*) > 1`,
		`select format('%s %s is %s: %s', flow, id, status, error_message) from agent_executions
			where status <> 'completed' and not (flow = 'heartbeat' and completed_at is null)`, // the next one may have begun
		`select format('%L is there %s times in %s', content, count(*), thread_id) from agent_messages
			group by thread_id, content having count(*) > 1`,
		`select format('%s of %s is %s', skill_name, execution_id, status) from agent_activity
			where status in ('unknown', 'running')
			  and not exists (select from agent_executions e where e.id = execution_id and e.flow = 'heartbeat'
			    and e.completed_at is null) and not (status = 'unknown' and ` + strconv.FormatBool(l.crossed) + `)`,
		`select format('lane %s is held by %s', lane, locked_by) from agent_locks
			where lane <> 'heartbeat' and (locked_by <> '' and expires_at > clock_timestamp() or parked)`,
	} {
		for _, violation := range pgtest.Column[string](l.t, l.db, query) {
			l.t.Error(violation)
		}
	}
	for thread, want := range l.sent {
		got := pgtest.Column[string](l.t, l.db,
			`select content from agent_messages where thread_id = (select id from agent_threads where id = $1 or name = $1)
				and content not like '% begins' and content not like '% ends' order by turn, seq`, thread)
		got = slices.DeleteFunc(got, func(words string) bool { return l.unconfirmedTexts[words] })
		assert.Truef(l.t, strings.Join(got, "\n") == strings.Join(want, "\n"),
			"in %s was said\n%s\nthere is\n%s", thread, strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
	n := pgtest.Column[string](l.t, l.db,
		`select format('%s executions', count(*)) from agent_executions where flow = 'errand'`)
	assert.Truef(l.t, n[0] == fmt.Sprintf("%d executions", len(l.runs)), "%s, %d were confirmed", n[0], len(l.runs))
	n = pgtest.Column[string](l.t, l.db, `select format('%s tallies', n) from tally`)
	assert.Truef(l.t, n[0] == fmt.Sprintf("%d tallies", l.counts["tally"]), "%s, %d were committed", n[0],
		l.counts["tally"])
	l.t.Logf("%d executions, %d answers, %d messages, %d tallies, %d ends of streams, %d reads; sent again: %d, "+
		"refused: %d, locked: %d", len(l.runs), l.counts["answer"], l.counts["message"], l.counts["tally"],
		l.counts["end"], l.counts["read"], l.counts["again"], l.counts["refused"], l.counts["locked"])
	for _, what := range []string{"answer", "message", "tally", "end", "read", "hook"} {
		assert.Truef(l.t, l.counts[what] != 0, "there was no %s: the test does not cover it", what)
	}
}

// program is the program under test, built once.
var program string

// rounds returns the number of replacements of each replica.
func rounds() int {
	if os.Getenv("AGENT_ROLL") == "long" {
		return 10
	}
	return 1
}

func TestMain(m *testing.M) { proctest.Main(m, "rollout", &program) }

// launch starts a program, with exactly the given environment.
func launch(t testing.TB, program string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	command := append([]string{program}, args...)
	return proctest.Start(t, pgtest.Timeout, t.TempDir(), proctest.Environ(environ...), command...)
}

// nextRelease builds the program as a possible next release: a change of the tables, and other code in each function
// with a body.
func nextRelease(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	replaced := map[string]string{}
	replace := func(path, text string) {
		at, err := filepath.Abs(path)
		require.NoError(t, err)
		with := filepath.Join(dir, filepath.Base(path))
		require.NoError(t, os.WriteFile(with, []byte(text), 0o600))
		replaced[at] = with
	}
	paths, err := filepath.Glob("../../migrations/schema/*.sql")
	require.Truef(t, err == nil && len(paths) >= 10, "%d files of the schema, %v", len(paths), err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		tables, code, _ := strings.Cut(string(text), "\n-- Code\n")
		replace(path, tables+"\n-- Code\n"+strings.ReplaceAll(code, "\nbegin\n", "\nbegin -- of the next release\n")+
			"\n-- The end.\n")
	}
	replace("../../migrations/changes/9001_next.sql", `
		alter table agent_executions add column more int not null default 1, add column maybe text;
		alter table agent_checkpoints add column more int not null default 1;
		alter table agent_messages add column more int not null default 1;
		alter table agent_activity add column more int not null default 1;
		alter table agent_locks add column more int not null default 1;
`)
	overlay := filepath.Join(dir, "overlay.json")
	text, err := json.Marshal(map[string]any{"Replace": replaced})
	if err == nil {
		err = os.WriteFile(overlay, text, 0o600)
	}
	require.NoError(t, err)
	next, err := proctest.Build("rollout-next", "-overlay", overlay)
	require.NoError(t, err)
	return next
}

// The next release migrates under load, and replaces each process of this one in turn. No client notices, but for
// requests that wait for the migration's locks for more than a second: they are refused, and have changed nothing.
func TestRollToNextReleaseUnderLoad(t *testing.T) {
	next := nextRelease(t)
	w := newTestEnv(t, program, pgtest.URL(t), false)
	replicas := []*proctest.Process{w.add(), w.add()}
	l := w.startLoad()
	l.waitForWork()
	l.migrating.Store(true)
	w.migrate(next)
	l.migrating.Store(false)
	n := len(pgtest.Column[string](w.t, w.db, `select name from agent_migrations where version = 9001
		union all select c.name from agent_schema_code c, agent_migrations m where m.version = 270
		and c.applied_at > m.applied_at + interval '1 second'`))
	assert.Truef(t, n >= 10, "the next release applied %d files", n)
	l.waitForWork() // this release works on the schema of the next
	w.program = next
	l.roll(replicas)
	l.stopAndWait()
	l.check()
}

// beforeBridges are the last commits of the schema versions with a bridge.
var beforeBridges = map[string]string{
	"118": "f100ec951fa2ac40858a55555aa8f38ce64c2233", "269": "6c09d25cf7c5cfc55f280150bb23a7d9cdc44334",
}

// The step from a former version to the baseline is no expansion: processes of that version cannot write after it. They
// reject requests until they are replaced. Their running work continues in their successors.
func TestCrossBridgesUnderLoad(t *testing.T) {
	if rounds() == 1 {
		t.Skip("make prove ONLY=rolling crosses the bridge: it builds the program of another commit")
	}
	for version, commit := range beforeBridges {
		t.Run(version, func(t *testing.T) {
			old, err := proctest.BuildCommit("rollout-"+version, commit)
			if errors.Is(err, proctest.ErrNoCommit) {
				t.Skip(err)
			}
			require.NoError(t, err)
			w := newTestEnv(t, old, pgtest.EmptyURL(t), true, "AGENT_WORKER_LEASE=10s")
			replicas := []*proctest.Process{w.add(), w.add()}
			l := w.startLoad()
			l.waitForWork()
			l.crossing.Store(true)
			l.crossed = true
			w.program = program
			w.migrate(program)
			l.roll(replicas)
			l.crossing.Store(false)
			l.waitForWork()
			l.stopAndWait()
			l.check()
		})
	}
}

// probeInterval is the pause between readiness checks of each replica.
const probeInterval = 50 * time.Millisecond

// proxy distributes requests among the ready replicas in turn.
type proxy struct {
	*httptest.Server
	client *http.Client

	mu       sync.Mutex
	replicas []string // base URLs
	ready    map[string]bool
	turn     int
}

func newProxy(t testing.TB) *proxy {
	t.Helper()
	p := &proxy{ready: map[string]bool{}, client: &http.Client{Timeout: time.Second, Transport: &http.Transport{}}}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			to, err := url.Parse(p.next())
			if err == nil {
				r.SetURL(to)
			}
		},
		Transport: &http.Transport{MaxIdleConnsPerHost: 50}, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}
	p.Server = httptest.NewServer(forward)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var asking sync.WaitGroup
	asking.Go(func() {
		for testkit.Wait(ctx, probeInterval) {
			p.probe(ctx)
		}
	})
	t.Cleanup(func() {
		stop()
		asking.Wait()
		p.Close()
	})
	return p
}

// probe checks every replica, all at once.
func (p *proxy) probe(ctx context.Context) {
	p.mu.Lock()
	list := slices.Clone(p.replicas)
	p.mu.Unlock()
	var group sync.WaitGroup
	for _, base := range list {
		group.Go(func() {
			ready := false
			if req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/readyz", http.NoBody); err == nil {
				if resp, err := p.client.Do(req); err == nil {
					ready = resp.StatusCode == http.StatusOK
					_, _ = io.Copy(io.Discard, resp.Body) // so that the connection is reused
					_ = resp.Body.Close()
				}
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.ready[base] = ready
		})
	}
	group.Wait()
}

// next returns the replica of the next request.
func (p *proxy) next() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.replicas {
		p.turn++
		if base := p.replicas[p.turn%len(p.replicas)]; p.ready[base] {
			return base
		}
	}
	return "http://no-replica.invalid"
}

// replace replaces one replica by another; "" for none.
func (p *proxy) replace(old, replica string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.replicas = slices.DeleteFunc(p.replicas, func(base string) bool { return base == old })
	if replica != "" {
		p.replicas = append(p.replicas, replica)
	}
}

// isTarget reports whether a replica gets requests.
func (p *proxy) isTarget(base string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ready[base]
}
