package failover_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
)

const (
	adminToken = "admin-4d0c7be2915fa836"
	visitorKey = "visitor-b9135c0e77d24af8"
)

const workspaceYAML = `
kind: skill
name: look
description: May be repeated.
handler: "http:POST %s/look"
timeout: 3m
idempotent: true
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: skill
name: pay
description: Must not be repeated.
handler: "http:POST %s/pay"
timeout: 3m
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: flow
name: errand
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} begins"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}"}}}
  - {actionType: wait_for_event, timeout: 24h, onTimeout: fail, parameters: {key: "event {{input.n}}"}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} got [{{eventData.is}}]"}}
---
kind: objective
name: rounds
goal: See that all is well.
review_every: 1m
steps: [Look around]
`

// testEnv is a database with a workspace, the model, the skills and the serving processes.
type testEnv struct {
	t        testing.TB
	url      string
	db       *pgxpool.Pool
	model    *modeltest.Server
	dir      string
	lease    string
	agents   []*proctest.Process
	baseURLs []string // where they serve

	mu      sync.Mutex
	calls   []called
	gate    chan struct{} // closed: calls pass
	blocked map[string]int
}

type called struct{ skill, key, body string }

// newTestEnv migrates the database and applies the workspace.
func newTestEnv(t testing.TB, url, lease string) *testEnv {
	t.Helper()
	w := &testEnv{
		t: t, url: url, model: modeltest.New(t), dir: t.TempDir(), lease: lease, gate: make(chan struct{}),
		blocked: map[string]int{},
	}
	close(w.gate)
	t.Cleanup(w.releaseCalls) // releases blocked calls before the servers close
	w.db = pgtest.Pool(w.t, w.url, postgres.Options{MaxConns: 8, ApplicationName: "test"})
	_, err := migrations.Up(t.Context(), w.db)
	require.NoError(t, err)
	pgtest.Exec(w.t, w.db, recordTables)
	w.model.Handle(w.modelReply)
	served := testkit.Serve(t, http.HandlerFunc(w.serveSkill))
	t.Cleanup(w.releaseCalls)
	file := filepath.Join(w.dir, "all.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(workspaceYAML, "%s", served)), 0o600))
	a := launch(t, w.dir, w.environ(), "apply", ".")
	require.Truef(t, a.Exit() == 0, "agent apply: %s", a.Err.Tail(30))
	return w
}

// environ returns the environment of a process.
func (w *testEnv) environ() []string {
	return testkit.Environ(w.url, w.model, "AGENT_ADMIN_TOKEN="+adminToken, "AGENT_CHAT_KEY=visitors="+visitorKey,
		"AGENT_LOG_FORMAT=json", "AGENT_HEARTBEAT_CRON=@every 3s", "AGENT_WORKER_LEASE="+w.lease, "AGENT_WORKERS=6")
}

// serve starts processes and returns when they are ready.
func (w *testEnv) serve(processes int) {
	w.t.Helper()
	for range processes {
		a := launch(w.t, w.dir, w.environ(), "serve")
		w.agents, w.baseURLs = append(w.agents, a), append(w.baseURLs, a.Base())
	}
	w.waitReady("at the beginning")
}

// waitReady waits until every process is ready.
func (w *testEnv) waitReady(when string) {
	w.t.Helper()
	for _, base := range w.baseURLs {
		pgtest.Eventually(w.t, func() bool { return probe(w.t, base+"/readyz").status == http.StatusOK },
			"a process is ready "+when)
	}
}

// waitUnready waits until every process is unready, and checks that it is alive.
func (w *testEnv) waitUnready(failing string) {
	w.t.Helper()
	for i, base := range w.baseURLs {
		pgtest.Eventually(w.t, func() bool {
			got := probe(w.t, base+"/readyz")
			return got.status == http.StatusServiceUnavailable && !got.Checks[failing].OK
		}, "a process reports that it is not ready")
		got := probe(w.t, base+"/healthz")
		assert.Truef(w.t, got.status == http.StatusOK, "without a database /healthz of process %d answers %d", i, got.status)
	}
}

// probed is the response to a probe; status 0 means none.
type probed struct {
	status int
	Checks map[string]struct {
		OK     bool
		Detail string
	}
}

func probe(t testing.TB, url string) (got probed) {
	response, err := testkit.Do(t.Context(), http.DefaultClient, http.MethodGet, url, "")
	if err != nil || json.Unmarshal(response.Body, &got) != nil {
		return got
	}
	got.status = response.Status
	return got
}

// checkRunning checks that no process has ended.
func (w *testEnv) checkRunning() {
	w.t.Helper()
	for i, a := range w.agents {
		select {
		case <-a.Ended():
			w.t.Errorf("process %d has ended: %s", i, a.Err.Tail(30))
		default:
		}
	}
}

// maxBlocked is the number of blocked calls of each kind. Others pass, so that not all workers wait.
const maxBlocked = 2

// blockCalls blocks further calls of skills and of the model.
func (w *testEnv) blockCalls() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gate, w.blocked = make(chan struct{}), map[string]int{}
}

// releaseCalls releases the blocked calls.
func (w *testEnv) releaseCalls() {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.gate:
	default:
		close(w.gate)
	}
}

// waitGate blocks a call while the gate is shut.
func (w *testEnv) waitGate(ctx context.Context, what string) {
	w.mu.Lock()
	gate := w.gate
	w.blocked[what]++
	mine := w.blocked[what] <= maxBlocked
	w.mu.Unlock()
	if !mine {
		return
	}
	select {
	case <-gate:
	case <-ctx.Done():
	}
}

// hasBlocked reports whether a call of each kind is blocked.
func (w *testEnv) hasBlocked(kinds ...string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, kind := range kinds {
		if w.blocked[kind] == 0 {
			return false
		}
	}
	return true
}

// serveSkill answers the skills' requests and records them.
func (w *testEnv) serveSkill(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has disconnected
	}
	skill := strings.Trim(r.URL.Path, "/")
	w.mu.Lock()
	w.calls = append(w.calls, called{skill, r.Header.Get("Idempotency-Key"), string(body)})
	w.mu.Unlock()
	w.waitGate(r.Context(), skill)
	rw.Header().Set("Content-Type", "application/json")
	if _, err := fmt.Fprintf(rw, `{"%s": "done"}`, skill); err != nil {
		return // the client has disconnected
	}
}

// modelReply is the model. It answers a visitor's question, and all others with "All is well.".
func (w *testEnv) modelReply(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	last := modeltest.Said(req.Messages[len(req.Messages)-1])
	if strings.HasPrefix(last, "question ") {
		w.waitGate(w.t.Context(), "model")
		return modeltest.Text("answer to " + last)
	}
	return modeltest.Text("All is well.")
}

// server is the test's own PostgreSQL on a TCP port, with the settings of a new installation.
type server struct {
	t     testing.TB
	bin   string
	dir   string // of the data
	port  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when the postmaster has ended
}

// newServer creates an empty server and starts it.
func newServer(t testing.TB) *server {
	t.Helper()
	s := prepareServer(t)
	s.run("initdb", "-D", s.dir, "-U", "postgres", "--auth=trust", "--no-locale", "-E", "UTF8", "--no-sync")
	s.start()
	s.sql(`create database agent`)
	return s
}

// standbyOf copies a running server and starts the copy as a synchronous standby.
func standbyOf(t testing.TB, primary *server) *server {
	t.Helper()
	s := replicaOf(t, primary)
	primary.sql(`alter system set synchronous_standby_names = 'standby'`)
	primary.sql(`select pg_reload_conf()`)
	primary.await("the standby is synchronous",
		`select exists (select from pg_stat_replication where sync_state = 'sync')`)
	return s
}

// replicaOf copies a running server and starts the copy as an asynchronous replica.
func replicaOf(t testing.TB, primary *server) *server {
	t.Helper()
	s := prepareServer(t)
	s.run("pg_basebackup", "-D", s.dir, "-X", "stream", "-c", "fast", "-R", "--no-sync",
		"-d", fmt.Sprintf("host=127.0.0.1 port=%s user=postgres application_name=standby", primary.port))
	s.start()
	return s
}

// prepareServer finds the programs, a folder and a port.
func prepareServer(t testing.TB) *server {
	t.Helper()
	found, err := pgserver.FindBinaries(os.Getenv)
	if errors.Is(err, pgserver.ErrNoBinaries) { // pgtest installs them
		pgtest.URL(t)
		found, err = pgserver.FindBinaries(os.Getenv)
	}
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "failover-") //nolint:usetesting // the server's user cannot read the test's own folder
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, os.RemoveAll(dir))
	})
	_, port, err := net.SplitHostPort(testkit.FreeAddress(t))
	require.NoError(t, err)
	s := &server{t: t, bin: found.Dir, dir: filepath.Join(dir, "data"), port: port}
	if who := s.attributes().Credential; who != nil {
		require.NoError(t, os.Chown(dir, int(who.Uid), int(who.Gid)))
	}
	return s
}

// attributes make a child process end with this one. As root, they also switch the user, because PostgreSQL rejects
// root.
func (s *server) attributes() *syscall.SysProcAttr {
	attributes := proctest.DieWithUs()
	if os.Geteuid() != 0 {
		return attributes
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		require.NoError(s.t, errors.Join(err, err2))
		attributes.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		return attributes
	}
	s.t.Fatal("PostgreSQL does not run as root, and there is no user postgres or nobody")
	return nil
}

func (s *server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir, cmd.SysProcAttr = filepath.Dir(s.dir), s.attributes()
	cmd.Env = []string{
		"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin",
		"LD_LIBRARY_PATH=" + os.Getenv("LD_LIBRARY_PATH"),
	}
	return cmd
}

// run runs one of PostgreSQL's programs.
func (s *server) run(name string, args ...string) {
	s.t.Helper()
	out, err := s.command(name, args...).CombinedOutput()
	require.Truef(s.t, err == nil, "%s: %v\n%s", name, err, out)
}

// start starts the server, and returns when it answers.
func (s *server) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(s.t, err)
	defer log.Close()
	cmd := s.command("postgres", "-D", s.dir, "-p", s.port, "-c", "listen_addresses=127.0.0.1", "-c",
		"unix_socket_directories=",
		"-c", "shared_buffers=32MB", "-c", "max_connections=120", "-c", "dynamic_shared_memory_type=mmap", "-c",
		"wal_keep_size=64MB")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(s.t, cmd.Start())
	ended := make(chan struct{})
	s.cmd, s.ended = cmd, ended
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the exit status is in ProcessState
	}()
	s.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Signal(syscall.SIGQUIT) // it may have ended
		<-ended
	})
	pgtest.Eventually(s.t, func() bool {
		select {
		case <-ended:
			text, err := os.ReadFile(s.dir + ".log")
			s.t.Fatalf("PostgreSQL ended: %v\n%s", err, tail(string(text)))
		default:
		}
		return s.try("postgres", `select 1`) == nil
	}, "PostgreSQL answers")
}

// stop ends the server like pg_ctl: SIGINT is its fast mode, SIGQUIT its immediate mode. SIGKILL kills the postmaster,
// and its children then end.
func (s *server) stop(how syscall.Signal) {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(how))
	<-s.ended
}

// try runs a statement on its own connection.
func (s *server) try(database, sql string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 20*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, fmt.Sprintf("postgres://postgres@127.0.0.1:%s/%s?sslmode=disable&application_name=test",
		s.port, database))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

func (s *server) sql(sql string) {
	s.t.Helper()
	require.NoError(s.t, s.try("postgres", sql), sql)
}

// await waits until a boolean query returns true.
func (s *server) await(what, sql string) {
	s.t.Helper()
	pgtest.Eventually(s.t, func() bool { return s.try("postgres", "select 1 / ("+sql+")::int") == nil }, what)
}

// urlOf names the servers in one connection string, which connects to the writable one.
func urlOf(servers ...*server) string {
	hosts := make([]string, len(servers))
	for i, s := range servers {
		hosts[i] = fmt.Sprintf("127.0.0.1:%s", s.port)
	}
	url := "postgres://postgres@" + strings.Join(hosts, ",") + "/agent?sslmode=disable"
	if len(servers) > 1 {
		url += "&target_session_attrs=read-write"
	}
	return url
}

// tail is the end of a log.
func tail(s string) string {
	lines := strings.SplitAfter(s, "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "")
}

// program is the program under test, built once.
var program string

// isLong reports whether the long form is requested.
func isLong() bool { return os.Getenv("AGENT_OUTAGES") == "long" }

func TestMain(m *testing.M) { proctest.Main(m, "failover", &program) }

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, pgtest.Timeout, dir, proctest.Environ(environ...), append([]string{program}, args...)...)
}
