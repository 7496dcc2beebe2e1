//go:build unix

package resourcefaults_test

import (
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// acknowledged are the ids that a process, or a command, said yes to.
type acknowledged struct{ events, deliveries, executions []string }

// send sends one of each, large enough to need room, and notes what was taken. It returns the first refusal.
func (y *acknowledged) send(a *agent) (refused *answer) {
	event, delivery, key := rand.Text(), rand.Text(), rand.Text()
	for _, r := range []struct {
		path, body, id string
		into           *[]string
		header         []string
	}{
		{"/v1/events", fmt.Sprintf(`{"event": "EVENT_COMPLETED", "key": %q, "id": %q, "data": {"x": %q}}`, event, event,
			large()), event, &y.events, nil},
		{
			"/webhooks/hook", fmt.Sprintf(`{"key": %q, "x": %q}`, delivery, large()), delivery, &y.deliveries,
			[]string{"Authorization", "Bearer hook-secret-of-the-test", "X-Id", delivery},
		},
		{
			"/v1/executions", fmt.Sprintf(`{"flow": "external:job", "input": {"key": %q, "x": %q}}`, key, large()), key,
			&y.executions, nil,
		},
	} {
		switch got := a.ask(http.MethodPost, r.path, r.body, r.header...); {
		case got.status/100 == 2:
			*r.into = append(*r.into, r.id)
		case refused == nil:
			refused = &got
		}
	}
	return refused
}

// kept fails the test for what was acknowledged and is not there.
func (y *acknowledged) kept(t *testing.T, url string) {
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

// TestAnOperatorReadsWhatIsWrong: the program refuses what it cannot keep, says why and what to do, stays up, and takes
// everything again when the trouble is over.
func TestAnOperatorReadsWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, arrange := range troubles {
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
			case refused.status != http.StatusServiceUnavailable || !strings.Contains(refused.problem(), bad.words) ||
				refused.header.Get("Retry-After") == "":
				t.Errorf("refused with %d %v %s", refused.status, refused.header, refused.body)
			}
			assert.Contains(t, a.Err.String(), bad.hint)
			got := a.ask(http.MethodGet, "/readyz", "")
			assert.Truef(t, got.status == http.StatusServiceUnavailable && strings.Contains(got.body, bad.words),
				"readyz: %+v", got)
			if code, out, errs := command(t, env, "executions", "ls"); code != 0 {
				t.Errorf("a command that reads: exit code %d, %s%s", code, out, errs)
			}
			input := filepath.Join(t.TempDir(), "input.json")
			require.NoError(t, os.WriteFile(input, fmt.Appendf(nil, `{"x": %q}`, large()), 0o600))
			code, out, errs := command(t, env, "executions", "start", "external:job", "--input", "@"+input)
			assert.Truef(t, code == 1 && strings.Contains(errs, bad.words) && strings.Contains(errs, bad.hint) && out == "",
				"a command that writes: exit code %d, %s%s", code, out, errs)
			got = a.ask(http.MethodGet, "/healthz", "")
			assert.Truef(t, got.status == http.StatusOK, "healthz: %+v", got)
			bad.end()
			eventually(t, "everything is taken again", func() bool { return yes.send(a) == nil })
			eventually(t, "the process is ready",
				func() bool { return a.ask(http.MethodGet, "/readyz", "").status == http.StatusOK })
			code, out, errs = command(t, env, "executions", "start", "external:job", "--input",
				`{"key": "last"}`)
			assert.Truef(t, code == 0, "the same command afterwards: exit code %d, %s%s", code, out, errs)
			yes.executions = append(yes.executions, "last")
			yes.kept(t, bad.url)
		})
	}
}

// TestNoFileDescriptorIsLeft: clients that open connections and say nothing take the last one of the process. Who comes
// then waits, what runs goes on, and when they have left everything is as before.
func TestNoFileDescriptorIsLeft(t *testing.T) {
	t.Parallel()
	bad := pretendedFullDisk(t) // only its database
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
			break // the queue of the listener is full, too
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
		return a.ask(http.MethodGet, "/readyz",
			"").status == http.StatusOK
	})
	yes.kept(t, bad.url)
}

// TestTheLeastPoolIsEnough: nobody who holds a connection needs another one to go on.
func TestTheLeastPoolIsEnough(t *testing.T) {
	t.Parallel()
	bad := pretendedFullDisk(t) // only its database
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
		got := a.ask(http.MethodPost, "/v1/executions", fmt.Sprintf(`{"flow": "wide", "input": {"n": %d}}`, i))
		assert.Equal(t, http.StatusCreated, got.status, got)
	}
	code, _, errs := command(t, env, "heartbeat")
	assert.Equal(t, 0, code, "heartbeat: exit code", errs)
	const hello = `{"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}`
	got := a.ask(http.MethodPost, "/v1/chat/completions", hello, "Authorization",
		"Bearer "+chatKey)
	assert.Truef(t, got.status == http.StatusOK, "chat: %+v", got)
	db := admin(t, bad.url)
	eventually(t, "all runs have ended", func() bool {
		return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null
			and flow not like 'external%'`) == 0
	})
	assert.Equal(t, 12, pgtest.Value[int](t, db,
		`select count(*) from agent_executions where flow = 'wide' and status = 'completed'`))
	yes.kept(t, bad.url)
}
