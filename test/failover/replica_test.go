package failover_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/why"
)

const (
	oldTrace = "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	oldRun   = "01890000-0000-7000-8000-000000000001"
)

// replicaEnv is a database and its read replica.
type replicaEnv struct {
	t                *testing.T
	primary, standby *server
	db               *pgxpool.Pool
}

// newReplicaEnv creates a primary and a replica with some history.
func newReplicaEnv(t *testing.T) *replicaEnv {
	t.Helper()
	r := &replicaEnv{t: t, primary: newServer(t)}
	r.db = r.open(r.primary)
	_, err := migrations.Up(t.Context(), r.db)
	require.NoError(t, err)
	pgtest.Exec(r.t, r.db, `
		insert into agent_skills (name, tool_definition, handler) values ('look', '{}', 'builtin:x');
		insert into agent_threads (id, channel, next_seq) values ('talk', 'operate', 2);
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, trace_id) values ('talk', 1, 1, 'user', 'hello', 'operate', 'delivered', '`+oldTrace+`');
		insert into agent_executions (id, trace_id, surface, agent, flow, status, thread_id)
		values ('`+oldRun+`', '`+oldTrace+`', 'operate', 'agent', 'external:turn', 'pending', 'talk');
		insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, error_message)
		values ('`+oldTrace+`', '`+oldRun+`', 'call', 'agent', 'operate', 'look', 'error', 'it is dark')`)
	r.standby = replicaOf(t, r.primary)
	return r
}

func (r *replicaEnv) open(s *server) *pgxpool.Pool {
	r.t.Helper()
	pool := pgtest.Pool(r.t, urlOf(s), postgres.Options{MaxConns: 4, ApplicationName: "test"})
	return pool
}

// addActivity writes an activity of a skill. Pages about its trace show it.
func (r *replicaEnv) addActivity(skill string) {
	r.t.Helper()
	pgtest.Exec(r.t, r.db, `insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status)
	        values ('`+oldTrace+`', '`+oldRun+`', 'call', 'agent', 'operate', '`+skill+`', 'success')`)
}

// reader returns a Reader of both servers.
func (r *replicaEnv) reader(o replica.Options) *replica.Reader {
	o.Primary, o.Check = r.db, migrations.Check
	if o.Open == nil {
		o.Open = func(ctx context.Context) (*pgxpool.Pool, error) {
			return postgres.Open(ctx, urlOf(r.standby), postgres.Options{MaxConns: 4, ApplicationName: "test"})
		}
	}
	read := replica.New(o)
	r.t.Cleanup(read.Close)
	return read
}

// page is the response to a GET.
type page struct {
	status int
	body   string
	lag    string // from the response; empty for the primary
}

// getPage loads a page as the admin; fresh requests the primary.
func getPage(t *testing.T, client *http.Client, url string, fresh bool) page {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	require.NoError(t, err)
	if client.Jar == nil {
		req.Header.Set("Authorization", "Bearer "+adminToken)
	}
	if fresh {
		req.Header.Set("Cache-Control", "no-cache")
	}
	return doRequest(t, client, req)
}

func doRequest(t *testing.T, client *http.Client, req *http.Request) page {
	t.Helper()
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return page{resp.StatusCode, string(body), resp.Header.Get(replica.Header)}
}

// volatileParts matches the parts that differ between two reads of the same state.
var volatileParts = regexp.MustCompile(`\s*<p id="replica".*</p>\s*|data-(?:now|seen)="[^"]*"`)

// engineRoomPages are the pages that read from a replica.
var engineRoomPages = []string{
	"/", "/activity", "/audit", "/traces", "/traces/" + oldTrace,
	"/traces/" + oldTrace + "?view=table",
	"/executions", "/executions?view=waiting", "/executions?view=stuck", "/executions/" + oldRun, "/threads",
	"/threads/talk", "/approvals", "/agents", "/agents/agent",
	"/skills", "/skills/look", "/automations", "/objectives", "/memory", "/deliveries", "/outgoing", "/spend",
	"/spend?by=purpose", "/lanes",
}

func TestReadFromReplica(t *testing.T) {
	t.Parallel()
	r := newReplicaEnv(t)
	t.Run("same answers", r.comparePages)
	t.Run("other database", r.checkOtherDatabase)
	t.Run("too far", r.checkLagLimit)
	t.Run("silent", r.checkSilentReplica)
	t.Run("program", r.checkServing)
}

// comparePages compares every page, and why, on both servers while no process writes.
func (r *replicaEnv) comparePages(t *testing.T) {
	read := r.reader(replica.Options{})
	pgtest.Eventually(t, func() bool { _, err := read.Measure(t.Context()); return err == nil },
		"the replica is read")
	room, err := engineroom.New(engineroom.Options{Pool: r.db, Read: read, Agent: "agent"})
	require.NoError(t, err)
	mux := http.NewServeMux()
	for _, route := range room.Routes() {
		mux.Handle(route.Method+" "+route.Path, route.Handler)
	}
	server := testkit.Serve(t, mux)
	for _, path := range engineRoomPages {
		// a measurement is valid for seconds, and a slow machine takes longer for all pages
		_, err := read.Measure(t.Context())
		require.NoError(t, err)
		there, here := getPage(t, http.DefaultClient, server+path, false), getPage(t, http.DefaultClient, server+path, true)
		assert.Truef(t, there.status == http.StatusOK && there.lag != "" &&
			strings.Contains(there.body, "From the replica, ") && !strings.Contains(there.body, "could not be read"),
			"%s: status %d, lag %q, not from the replica as a whole:\n%s", path, there.status, there.lag, there.body)
		assert.Truef(t, here.lag == "" && !strings.Contains(here.body, "From the replica"),
			"%s says that it is from the replica, and is not", path)
		stable := func(p page) string { return volatileParts.ReplaceAllString(p.body, "") }
		assert.Equal(t, "", cmp.Diff(stable(here), stable(there)), path)
	}
	operate := getPage(t, http.DefaultClient, server+"/operate", false)
	assert.Truef(t, operate.status == http.StatusOK && operate.lag == "",
		"a page that follows a turn: status %d, lag %q, want the primary's", operate.status, operate.lag)
	var answers [2]why.Answer
	for i, fresh := range []bool{true, false} {
		_, err := read.Do(t.Context(), fresh, func(ctx context.Context) (err error) {
			answers[i], err = why.Of(ctx, read, oldTrace)
			return err
		})
		require.NoError(t, err)
	}
	if diff := cmp.Diff(answers[0], answers[1]); diff != "" || len(answers[0].Reasons) == 0 {
		t.Errorf("why answers otherwise on the replica (-primary +replica):\n%s", diff)
	}
}

// checkOtherDatabase tries a replica of another database of the same cluster.
func (r *replicaEnv) checkOtherDatabase(t *testing.T) {
	for url, says := range map[string]string{
		strings.Replace(urlOf(r.standby), "/agent?", "/postgres?", 1): "it is another database than DATABASE_URL",
		urlOf(r.standby, r.primary):                                   "it names 2 servers",
	} {
		a := launch(t, t.TempDir(), r.environ("DATABASE_READ_URL="+url), "serve")
		if code := a.Exit(); code != 2 || !strings.Contains(a.Err.String(), "DATABASE_READ_URL: "+says) {
			t.Errorf("exit %d, want 2 and an error that says %q: %s", code, says, a.Err.Tail(30))
		}
	}
}

// checkLagLimit stops the replay. The reader does not use a replica beyond the maximum lag. It uses one within the
// maximum and reports the lag.
func (r *replicaEnv) checkLagLimit(t *testing.T) {
	near, far := r.reader(replica.Options{MaxLag: 1}), r.reader(replica.Options{})
	for _, read := range []*replica.Reader{near, far} {
		pgtest.Eventually(t, func() bool { d, err := read.Measure(t.Context()); return err == nil || d > 0 },
			"the lag is known")
	}
	r.standby.sql(`select pg_wal_replay_pause()`)
	defer r.standby.sql(`select pg_wal_replay_resume()`)
	r.addActivity("late")
	if _, err := near.Measure(t.Context()); err == nil || !strings.Contains(err.Error(), "behind, more than") {
		t.Errorf("a replica that is too far behind: %v", err)
	}
	_, from := near.Choose(t.Context(), false)
	assert.True(t, !from.Replica(), "a replica that is too far behind is read")
	promoted := r.reader(replica.Options{Open: func(ctx context.Context) (*pgxpool.Pool, error) {
		return postgres.Open(ctx, urlOf(r.primary), postgres.Options{MaxConns: 1})
	}})
	_, err := promoted.Measure(t.Context())
	assert.Truef(t, err != nil && err.Error() == "it is not a standby", "a replica that is none any more: %v", err)
	behind, err := far.Measure(t.Context())
	assert.Truef(t, err == nil && behind >= replica.ReplayWait,
		"the replica is %s behind, error %v; want more than %s", behind, err, replica.ReplayWait)
	if _, from := far.Choose(t.Context(), false); !from.Replica() || from.Behind != behind {
		t.Error("a replica that is not too far behind is not read, or with another lag")
	}
}

// silentLink forwards the server's data until the link is silent.
type silentLink struct {
	client, server net.Conn
	silent         *atomic.Bool
}

func (l silentLink) Upstream() { _, _ = io.Copy(l.server, l.client) }

func (l silentLink) Downstream() {
	buffer := make([]byte, 1<<16)
	for {
		n, err := l.server.Read(buffer)
		if err != nil {
			return
		}
		if l.silent.Load() {
			continue
		}
		if _, err := l.client.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// checkSilentReplica lets a replica stop answering during a read. The read is repeated on the primary as soon as a
// measurement fails.
func (r *replicaEnv) checkSilentReplica(t *testing.T) {
	var silent atomic.Bool
	proxy := pgproxy.Listen(t, urlOf(r.standby), func(client, server net.Conn) pgproxy.Link {
		return silentLink{client, server, &silent}
	})
	read := r.reader(replica.Options{Open: func(ctx context.Context) (*pgxpool.Pool, error) {
		return postgres.Open(ctx, proxy.URL("test"), postgres.Options{MaxConns: 4})
	}})
	pgtest.Eventually(t, func() bool { _, err := read.Measure(t.Context()); return err == nil }, "the replica is read")
	started, ended := make(chan struct{}, 2), make(chan bool)
	go func() {
		var standby bool
		var first error
		from, err := read.Do(t.Context(), false, func(ctx context.Context) error {
			silent.Store(replica.From(ctx).Replica())
			started <- struct{}{}
			err := read.QueryRow(ctx, `select pg_is_in_recovery()`).Scan(&standby)
			if first == nil {
				first = err
			}
			return err
		})
		ended <- err == nil && !from.Replica() && !standby && errors.Is(first, context.Canceled)
	}()
	<-started
	_, err := read.Measure(t.Context())
	assert.ErrorContains(t, err, "it does not answer")
	select {
	case repeated := <-ended:
		assert.True(t, repeated, "the read was not cancelled, or not repeated on the primary")
	case <-time.After(pgtest.Timeout):
		t.Error("the read still waits for the replica")
	}
}

// environ returns the environment of a process.
func (r *replicaEnv) environ(more ...string) []string {
	return append([]string{
		"DATABASE_URL=" + urlOf(r.primary), "AGENT_ADMIN_TOKEN=" + adminToken, "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_LOG_FORMAT=json",
		"AGENT_HEARTBEAT_CRON=0 0 1 1 *", "AGENT_WORKER_LEASE=5m",
	}, more...)
}

// checkServing runs the program while the replay pauses, the replica stops and restarts, and the primary stops.
func (r *replicaEnv) checkServing(t *testing.T) {
	a := launch(t, t.TempDir(), r.environ("DATABASE_READ_URL="+urlOf(r.standby)), "serve")
	base := a.Base()
	from := func(what, path string, is func(page) bool) {
		t.Helper()
		var got page
		pgtest.Eventually(t, func() bool {
			got = getPage(t, http.DefaultClient, base+path, false)
			require.Truef(t, got.status == http.StatusOK && !strings.Contains(got.body, "could not be read"),
				"%s: status %d:\n%s", what, got.status, got.body)
			return is(got)
		}, what)
	}
	ofReplica := func(p page) bool { return p.lag != "" }
	from("pages come from the replica", "/traces/"+oldTrace, ofReplica)
	r.compareQueries(base)

	r.standby.sql(`select pg_wal_replay_pause()`)
	admin := r.logIn(base)
	if own := r.pause(admin, base); own.lag != "" || !strings.Contains(own.body, "Autonomous work is paused") {
		t.Errorf("the page after an action does not show its effect; lag %q:\n%s", own.lag, own.body)
	}
	from("the old state is shown with its lag", "/", func(p page) bool {
		return p.lag >= "1" && !strings.Contains(p.body, "Autonomous work is paused") &&
			regexp.MustCompile(`From the replica, (\d+ ms|[\d.]+ s) behind`).MatchString(p.body)
	})
	r.checkReadYourWrites(admin, base)
	r.checkUnreplayedTrace(base)
	r.standby.sql(`select pg_wal_replay_resume()`)
	from("the replica catches up", "/", func(p page) bool {
		return p.lag != "" && strings.Contains(p.body, "Autonomous work is paused")
	})

	r.standby.stop(syscall.SIGKILL)
	from("pages go on without the replica", "/", func(p page) bool { return p.lag == "" })
	a.AwaitOutput("the read replica is not read")
	r.standby.start()
	from("the replica is read again", "/", ofReplica)
	assert.Equal(t, 1, strings.Count(a.Err.String(), "the read replica is not read"), a.Err.Tail(30))

	r.primary.stop(syscall.SIGQUIT)
	from("pages are shown without the primary", "/traces/"+oldTrace,
		func(p page) bool { return strings.Contains(p.body, "the primary does not answer") })
	assert.Equal(t, http.StatusServiceUnavailable, getPage(t, admin, base+"/traces", false).status)
	if asked := r.runCommand("why", oldTrace); !strings.Contains(asked.Out.String(), oldTrace) ||
		!strings.Contains(asked.Err.String(), "the primary does not answer") {
		t.Errorf("agent why without the primary:\n%s\n%s", asked.Out.Tail(30), asked.Err.Tail(30))
	}
}

// compareQueries compares answers from the replica with the primary's, over HTTP and on the command line, and checks
// their lag.
func (r *replicaEnv) compareQueries(base string) {
	r.t.Helper()
	trace := "/v1/traces/" + oldTrace
	for _, path := range []string{
		"/v1/traces", trace, trace + "/why", trace + "/prompts", "/v1/activity", "/v1/activity/spend", "/v1/activity/slowest",
		"/v1/activity/failing",
		"/v1/activity/audit",
	} {
		there, here := getPage(r.t, http.DefaultClient, base+path, false), getPage(r.t, http.DefaultClient, base+path, true)
		assert.Truef(r.t, there.status == http.StatusOK && there.lag != "" && here.lag == "" && there.body == here.body,
			"%s: status %d, lag %q and %q, want the same answer from both:\n%s\n%s", path, there.status, there.lag, here.lag,
			there.body, here.body)
	}
	for _, path := range []string{"/v1/executions", "/v1/executions/" + oldRun, "/v1/lanes", "/v1/skills"} {
		if got := getPage(r.t, http.DefaultClient, base+path, false); got.status != http.StatusOK || got.lag != "" {
			r.t.Errorf("%s: status %d, lag %q, want the primary's", path, got.status, got.lag)
		}
	}
	for _, args := range [][]string{{"why", oldTrace}, {"activity", "ls"}} {
		if asked := r.runCommand(args...); !strings.Contains(asked.Out.String(), oldTrace) ||
			!strings.HasPrefix(asked.Err.String(), "read from the replica, ") {
			r.t.Errorf("agent %v:\n%s\n%s", args, asked.Out.Tail(30), asked.Err.Tail(30))
		}
	}
	doctor := r.runCommand("doctor")
	assert.Truef(r.t, strings.Contains(doctor.Out.String(), "ok   replica"), "agent doctor: %s", doctor.Out.String())
}

// runCommand runs a command to its end.
func (r *replicaEnv) runCommand(args ...string) *proctest.Process {
	r.t.Helper()
	asked := launch(r.t, r.t.TempDir(), r.environ("DATABASE_READ_URL="+urlOf(r.standby), "AGENT_LOG_LEVEL=error"), args...)
	asked.Exit()
	return asked
}

// checkReadYourWrites watches pages while the replay pauses. A client that has just written sees the primary's state,
// others the replica's.
func (r *replicaEnv) checkReadYourWrites(admin *http.Client, base string) {
	r.t.Helper()
	r.addActivity("seen_by_itself")
	if got := r.firstUpdate(http.DefaultClient, base+"/live/"); !strings.Contains(got, "From the replica") {
		r.t.Errorf("a reader gets the primary's state: %.300s", got)
	}
	got := r.firstUpdate(admin, base+"/live/")
	assert.Truef(r.t, !strings.Contains(got, "From the replica"), "the writer gets the replica's state: %.300s", got)
}

// firstUpdate returns the first update of a page's stream about its source, or about the newest activity.
func (r *replicaEnv) firstUpdate(client *http.Client, url string) string {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, url, http.NoBody)
	require.NoError(r.t, err)
	req.Header.Set("Cache-Control", "no-cache") // like browsers for every event stream
	if client.Jar == nil {
		req.Header.Set("Authorization", "Bearer "+adminToken)
	}
	resp, err := client.Do(req)
	require.NoError(r.t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "From the replica") || strings.Contains(lines.Text(), "seen_by_itself") {
			return lines.Text()
		}
	}
	r.t.Errorf("%s says nothing: %v", url, lines.Err())
	return ""
}

// checkUnreplayedTrace requests a trace that the replica has not replayed.
func (r *replicaEnv) checkUnreplayedTrace(base string) {
	r.t.Helper()
	const newTrace = "op_01JD3V7K8ZQ6W2M5T9X4C1B0AF"
	pgtest.Exec(r.t, r.db, `insert into agent_executions (trace_id, surface, agent, flow, status) values ('`+newTrace+
		`', 'operate', 'agent', 'external:turn', 'pending')`)
	for _, path := range []string{"/v1/traces/" + newTrace, "/traces/" + newTrace} {
		got := getPage(r.t, http.DefaultClient, base+path, false)
		assert.Truef(r.t, got.status == http.StatusOK && got.lag == "",
			"%s, which the replica does not have yet: status %d, lag %q, want the primary's answer", path, got.status, got.lag)
	}
}

// logIn returns a logged-in client.
func (r *replicaEnv) logIn(base string) *http.Client {
	r.t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(r.t, err)
	client := &http.Client{Jar: jar}
	require.Equal(r.t, http.StatusOK, post(r.t, client, base+"/login",
		url.Values{"token": {adminToken}, "next": {"/"}}).status, "log in: status")
	return client
}

// pause pauses the agent on the overview.
func (r *replicaEnv) pause(client *http.Client, base string) page {
	r.t.Helper()
	return post(r.t, client, base+"/act/v1/pause", url.Values{"reason": {"a test"}, "back": {"/"}})
}

func post(t *testing.T, client *http.Client, to string, form url.Values) page {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to, strings.NewReader(form.Encode()))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return doRequest(t, client, req)
}
