package resourcefaults_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// acknowledged are the ids that a process or a command confirmed.
type acknowledged struct{ events, deliveries, executions []string }

// send sends one request of each kind, large enough to need new pages, and notes the confirmed ones. It returns the
// first rejection.
func (y *acknowledged) send(a *agent) (refused *answer) {
	event, delivery, key := rand.Text(), rand.Text(), rand.Text()
	for _, r := range []struct {
		path, body, id string
		into           *[]string
		header         []string
	}{
		{"/v1/events", fmt.Sprintf(`{"event": "EVENT_COMPLETED", "key": %q, "id": %q, "data": {"x": %q}}`, event, event,
			largeText()), event, &y.events, nil},
		{
			"/webhooks/hook", fmt.Sprintf(`{"key": %q, "x": %q}`, delivery, largeText()), delivery, &y.deliveries,
			[]string{"Authorization", "Bearer hook-secret-of-the-test", "X-Id", delivery},
		},
		{
			"/v1/executions", fmt.Sprintf(`{"flow": "external:job", "input": {"key": %q, "x": %q}}`, key, largeText()), key,
			&y.executions, nil,
		},
	} {
		switch got := a.request(http.MethodPost, r.path, r.body, r.header...); {
		case got.status/100 == 2:
			*r.into = append(*r.into, r.id)
		case refused == nil:
			refused = &got
		}
	}
	return refused
}

// checkStored reports confirmed work that does not exist.
func (y *acknowledged) checkStored(t *testing.T, url string) {
	t.Helper()
	db := admin(t, url)
	for what, look := range map[string]struct {
		sql string
		ids []string
	}{
		"events": {`select count(*) from unnest($1::text[]) a
			where not exists (select from agent_events where key = a and event = 'EVENT_COMPLETED')`, y.events},
		"deliveries": {`select count(*) from unnest($1::text[]) a
			where not exists (select from agent_webhook_deliveries where delivery_id = a)`, y.deliveries},
		"executions": {`select count(*) from unnest($1::text[]) a
			where not exists (select from agent_executions where input ->> 'key' = a)`, y.executions},
	} {
		if n := pgtest.Value[int](t, db, look.sql, look.ids); n != 0 || len(look.ids) == 0 {
			t.Errorf("of %d %s that were acknowledged %d are not there", len(look.ids), what, n)
		}
	}
}

// TestProgramReportsFaultAndRemedy: the program rejects requests that it cannot store, names fault and remedy, stays
// up, and accepts everything after the fault.
func TestProgramReportsFaultAndRemedy(t *testing.T) {
	t.Parallel()
	for name, arrange := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := arrange(t)
			apply(t, bad.url)
			env := environ(bad.url)
			a := serve(t, "", env)
			var yes acknowledged
			if refused := yes.send(a); refused != nil {
				t.Fatalf("before: %+v", refused)
			}
			bad.begin()
			var refused *answer
			for i := 0; i < 50 && refused == nil; i++ {
				refused = yes.send(a)
			}
			switch {
			case refused == nil:
				t.Fatal("nothing was refused")
			case refused.status != http.StatusServiceUnavailable || !strings.Contains(refused.problem(), bad.message) ||
				refused.header.Get("Retry-After") == "":
				t.Errorf("refused with %d %v %s", refused.status, refused.header, refused.body)
			}
			assert.Contains(t, a.Err.String(), bad.hint)
			got := a.request(http.MethodGet, "/readyz", "")
			assert.Truef(t, got.status == http.StatusServiceUnavailable && strings.Contains(got.body, bad.message),
				"readyz: %+v", got)
			if code, out, errs := command(t, env, "executions", "ls"); code != 0 {
				t.Errorf("a command that reads: exit code %d, %s%s", code, out, errs)
			}
			input := filepath.Join(t.TempDir(), "input.json")
			require.NoError(t, os.WriteFile(input, fmt.Appendf(nil, `{"x": %q}`, largeText()), 0o600))
			code, out, errs := command(t, env, "executions", "start", "external:job", "--input", "@"+input)
			assert.Truef(t, code == 1 && strings.Contains(errs, bad.message) && strings.Contains(errs, bad.hint) && out == "",
				"a command that writes: exit code %d, %s%s", code, out, errs)
			got = a.request(http.MethodGet, "/healthz", "")
			assert.Truef(t, got.status == http.StatusOK, "healthz: %+v", got)
			bad.end()
			eventually(t, "everything is taken again", func() bool { return yes.send(a) == nil })
			eventually(t, "the process is ready",
				func() bool { return a.request(http.MethodGet, "/readyz", "").status == http.StatusOK })
			code, out, errs = command(t, env, "executions", "start", "external:job", "--input", `{"key": "last"}`)
			assert.Truef(t, code == 0, "the same command afterwards: exit code %d, %s%s", code, out, errs)
			yes.executions = append(yes.executions, "last")
			yes.checkStored(t, bad.url)
		})
	}
}

// TestFileDescriptorExhaustion: silent clients use up the file descriptors of the process. New clients wait, and
// running work continues. After the clients have left, all works as before.
func TestFileDescriptorExhaustion(t *testing.T) {
	t.Parallel()
	bad := simulatedFullDisk(t) // only its database
	apply(t, bad.url)
	env := environ(bad.url, "AGENT_WORKERS=2")
	a := serve(t, "ulimit -n 56;", env)
	var yes acknowledged
	refused := yes.send(a)
	require.Truef(t, refused == nil, "before: %+v", refused)
	a.client.CloseIdleConnections()
	var silent []net.Conn
	t.Cleanup(func() {
		for _, c := range silent {
			c.Close()
		}
	})
	for range 100 {
		c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(t.Context(), "tcp",
			strings.TrimPrefix(a.base, "http://"))
		if err != nil {
			break // the listener's backlog is full, too
		}
		silent = append(silent, c)
	}
	eventually(t, "the process says what it lacks",
		func() bool { return strings.Contains(a.Err.String(), "too many open files") })
	require.True(t, a.Running(), "the process has ended")
	for _, c := range silent {
		c.Close()
	}
	eventually(t, "everything is taken again", func() bool { return yes.send(a) == nil })
	eventually(t, "the process is ready", func() bool {
		return a.request(http.MethodGet, "/readyz", "").status == http.StatusOK
	})
	yes.checkStored(t, bad.url)
}

// TestProgramOnSmallestPool: no holder of a connection needs a second one to finish.
func TestProgramOnSmallestPool(t *testing.T) {
	t.Parallel()
	bad := simulatedFullDisk(t) // only its database
	apply(t, bad.url)
	separator := "?"
	if strings.Contains(bad.url, "?") {
		separator = "&"
	}
	const chatKey = "a-long-random-text-of-the-chat"
	env := environ(bad.url+separator+"pool_max_conns=2", "AGENT_WORKERS=8", "AGENT_CHAT_KEY="+chatKey)
	a := serve(t, "", env)
	var yes acknowledged
	for range 4 {
		refused := yes.send(a)
		assert.Truef(t, refused == nil, "refused: %+v", refused)
	}
	for i := range 12 {
		got := a.request(http.MethodPost, "/v1/executions", fmt.Sprintf(`{"flow": "wide", "input": {"n": %d}}`, i))
		assert.Equal(t, http.StatusCreated, got.status, got)
	}
	code, _, errs := command(t, env, "heartbeat")
	assert.Equal(t, 0, code, "heartbeat: exit code", errs)
	const hello = `{"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}`
	got := a.request(http.MethodPost, "/v1/chat/completions", hello, "Authorization", "Bearer "+chatKey)
	assert.Truef(t, got.status == http.StatusOK, "chat: %+v", got)
	db := admin(t, bad.url)
	eventually(t, "all runs have ended", func() bool {
		return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null
			and flow not like 'external%'`) == 0
	})
	assert.Equal(t, 12, pgtest.Value[int](t, db,
		`select count(*) from agent_executions where flow = 'wide' and status = 'completed'`))
	yes.checkStored(t, bad.url)
}

const token = "a-long-random-text-for-tests"

// agent is a process of the program.
type agent struct {
	*proctest.Process

	t      testing.TB
	base   string
	client *http.Client
}

// launch starts a command, with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, command ...string) *agent {
	t.Helper()
	a := &agent{
		Process: proctest.Start(t, pgtest.Timeout, dir, environ, command...), t: t,
		client: &http.Client{Timeout: pgtest.Timeout},
	}
	t.Cleanup(a.client.CloseIdleConnections)
	return a
}

// environ returns the environment of a process, with DATABASE_URL.
func environ(database string, more ...string) []string {
	return append(proctest.Environ(
		"DATABASE_URL="+database, "AGENT_ADMIN_TOKEN="+token, "AGENT_LISTEN=127.0.0.1:0",
		"HOOK_SECRET=hook-secret-of-the-test",
		"AGENT_MODEL=offline", "AGENT_HEARTBEAT_CRON=0 0 29 2 *", "AGENT_LOG_LEVEL=debug", "AGENT_WORKER_LEASE=5s",
	), more...)
}

// serve starts `agent serve` and waits until it is ready. If before is set, a shell runs it first.
func serve(t testing.TB, before string, environ []string) *agent {
	t.Helper()
	return serveProgram(t, program, before, environ)
}

func serveProgram(t testing.TB, program, before string, environ []string) *agent {
	t.Helper()
	a := launch(t, t.TempDir(), environ, "/bin/sh", "-c", before+` exec "$0" serve`, program)
	a.base = a.Base()
	return a
}

// command runs one command of the program to its end.
func command(t testing.TB, environ []string, args ...string) (code int, out, errs string) {
	t.Helper()
	a := launch(t, t.TempDir(), environ, append([]string{program}, args...)...)
	return a.Exit(), a.Out.String(), a.Err.String()
}

// answer is the response to a request; a status of 0 means none.
type answer struct {
	status int
	body   string
	header http.Header
}

// problem is the detail of a problem.
func (a answer) problem() string {
	var p struct{ Type, Detail string }
	if json.Unmarshal([]byte(a.body), &p) != nil {
		return a.body
	}
	return p.Detail
}

// request makes a request as the admin.
func (a *agent) request(method, path, body string, header ...string) answer {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(a.t.Context(), pgtest.Timeout)
	defer cancel()
	return a.requestIn(ctx, method, path, body, header...)
}

// requestIn is ask with the caller's time limit.
func (a *agent) requestIn(ctx context.Context, method, path, body string, header ...string) answer {
	a.t.Helper()
	headers := []string{testkit.Bearer(token), "Content-Type: application/json"}
	for pair := range slices.Chunk(header, 2) {
		headers = append(headers, pair[0]+": "+pair[1])
	}
	got, err := testkit.Do(ctx, a.client, method, a.base+path, body, headers...)
	if err != nil {
		return answer{body: err.Error()}
	}
	return answer{got.Status, string(got.Body), got.Header}
}

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "faults", &program) }

// isLong reports whether the long run is requested.
func isLong() bool { return os.Getenv("AGENT_FAULTS_ALL") != "" }

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.Eventually(t, condition, what)
}
