package crash_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgbouncer"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// pooledYAML has a flow that calls, waits briefly, waits for an event and calls again.
const pooledYAML = talkYAML + `
---
kind: flow
name: patient
actions:
  - {actionType: skill, parameters: {name: look}}
  - {actionType: delay, parameters: {duration: 1s}}
  - {actionType: wait_for_event, parameters: {key: go-on}}
  - {actionType: skill, parameters: {name: tell}}
---
kind: objective
name: bills
goal: Pay what is due.
steps: [Look at what is due]
`

// TestThroughPgBouncer runs the agent through PgBouncer in transaction mode, with three server connections. The agent
// polls, or has a direct URL for session features. A heartbeat, a visitor's answer and a waiting execution complete,
// with each effect once.
func TestThroughPgBouncer(t *testing.T) {
	t.Parallel()
	for name, direct := range map[string]bool{"polling": false, "direct URL": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, through := newPooledTestEnv(t)
			var more []string
			if direct {
				more = append(more, "DATABASE_DIRECT_URL="+s.url)
			}
			migrate(s, through, more...)
			a := s.startServer(through, more...)
			// The process and its queue listen over the direct URL, or not at all.
			listening := func() int {
				return pgtest.Value[int](s.t, s.db, `select count(*) from pg_stat_activity where datname = current_database()
					and query ilike 'listen %'`)
			}
			if direct {
				eventually(t, "two connections listen", func() bool { return listening() == 2 })
			} else {
				a.AwaitOutput("notifications are not delivered through a connection pooler")
			}

			beat := s.requestHeartbeat()
			flow := s.post(a, "/v1/executions", `{"flow": "patient"}`, http.StatusCreated)["id"]
			got := s.sendMessage(a, message{"visitor", "Hello there", true})
			assert.Truef(t, got.Complete && strings.Contains(got.Text, finalReply("Hello there")), "the answer is %+v", got)
			s.waitStatus(beat, "completed")
			eventually(t, "the flow waits for its event", func() bool {
				return pgtest.Value[bool](s.t, s.db,
					`select coalesce(waiting_for = 'event', false) from agent_executions where id = $1`, flow)
			})
			s.post(a, "/v1/events", `{"event": "EVENT_COMPLETED", "key": "go-on"}`, http.StatusAccepted)
			s.waitStatus(flow, "completed")
			for key, n := range s.skillCalls() {
				assert.Equal(t, 1, n, key)
			}
			n := listening()
			assert.Truef(t, direct || n == 0, "%d connections listen through the pooler", n)
		})
	}
}

// TestInvalidDirectURLIsRejected expects the start to fail with advice.
func TestInvalidDirectURLIsRejected(t *testing.T) {
	t.Parallel()
	s, through := newPooledTestEnv(t)
	for wantLog, direct := range map[string]string{
		"it also names a connection pooler": through,
		"not the database of DATABASE_URL":  pgtest.DirectURL(t, pgtest.EmptyURL(t)),
		"cannot reach the server":           "postgres://u@127.0.0.1:1/db",
	} {
		a := launch(t, s.dir, s.environ(through, "DATABASE_DIRECT_URL="+direct), "serve")
		assert.Truef(t, a.Exit() != 0, "%s: exit code 0", wantLog)
		a.AwaitOutput("DATABASE_DIRECT_URL: ")
		a.AwaitOutput(wantLog)
	}
}

// newPooledTestEnv returns a test environment on a database behind a PgBouncer, and PgBouncer's connection string.
func newPooledTestEnv(t *testing.T) (_ *testEnv, through string) {
	t.Helper()
	url := pgtest.DirectURL(t, pgtest.URL(t))
	s := newIdleTestEnv(t, url, pooledYAML)
	s.model.Handle(s.chatModelReply)
	s.extraEnviron = []string{"AGENT_CHAT_KEY=" + chatKey, "SHOP_SECRET=" + hookSecret}
	pooler, err := pgbouncer.Start(t.Context(), pgbouncer.Config{Server: url, PoolSize: 3})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, pooler.Stop(context.WithoutCancel(t.Context())))
	})
	through, err = pooler.URL(url)
	require.NoError(t, err)
	return s, through
}

// migrate runs agent migrate. It has no migration to run, but acquires the migration lock.
func migrate(s *testEnv, through string, more ...string) {
	s.t.Helper()
	a := launch(s.t, s.dir, s.environ(through, more...), "migrate")
	require.Equal(s.t, 0, a.Exit(), "exit code of agent migrate")
}

// post sends an admin's request to the API, and returns the string fields of the response.
func (s *testEnv) post(a *agent, path, body string, want int) map[string]string {
	s.t.Helper()
	response, err := http.DefaultClient.Do(s.newRequest(a, http.MethodPost, path, adminToken, body))
	require.NoError(s.t, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(s.t, err)
	require.Truef(s.t, response.StatusCode == want, "POST %s: %d %s", path, response.StatusCode, raw)
	var all map[string]any
	require.NoError(s.t, json.Unmarshal(raw, &all))
	fields := map[string]string{}
	for name, value := range all {
		if text, ok := value.(string); ok {
			fields[name] = text
		}
	}
	return fields
}
