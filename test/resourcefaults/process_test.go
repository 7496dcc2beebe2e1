//go:build unix

package resourcefaults_test

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const token = "a-long-random-text-for-tests"

// agent is a process of the program.
type agent struct {
	*proctest.Process

	t      testing.TB
	base   string
	client *http.Client
}

// launch starts a command with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, command ...string) *agent {
	t.Helper()
	a := &agent{
		Process: proctest.Start(t, patience, dir, environ, command...), t: t,
		client: &http.Client{Timeout: patience},
	}
	t.Cleanup(a.client.CloseIdleConnections)
	return a
}

// environ is what a process gets, with DATABASE_URL.
func environ(database string, more ...string) []string {
	return append(proctest.Environ(
		"DATABASE_URL="+database, "AGENT_ADMIN_TOKEN="+token, "AGENT_LISTEN=127.0.0.1:0",
		"HOOK_SECRET=hook-secret-of-the-test",
		"AGENT_MODEL=offline", "AGENT_HEARTBEAT_CRON=0 0 29 2 *", "AGENT_LOG_LEVEL=debug", "AGENT_WORKER_LEASE=5s",
	), more...)
}

// serve is `agent serve`, ready to work; a shell command of before, if any, sets it up.
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

// answer is what a request got; a status of 0 is none at all.
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

// ask makes a request as the admin.
func (a *agent) ask(method, path, body string, header ...string) answer {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	return a.askIn(ctx, method, path, body, header...)
}

// askIn is ask with a limit of the caller's.
func (a *agent) askIn(ctx context.Context, method, path, body string, header ...string) answer {
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
