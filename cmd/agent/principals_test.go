package main

import (
	"encoding/json"
	"html"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// A team can do without AGENT_ADMIN_TOKEN: a token from the command line opens what its role may open.
func TestTokenHasScopesOfItsRole(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	assert.Contains(t, p.must("principals", "add", "anna", "--role", "viewer", "--reason", "new here"),
		"anna: user, role viewer")
	p.mustFail(1, "agent principals role", "principals", "add", "anna")
	text := strings.TrimSpace(p.must("tokens", "create", "anna", "--expires", "90d", "--name", "laptop"))
	require.Truef(t, strings.HasPrefix(text, "lk_") && strings.Count(text, "_") == 2, "token is %q", text)
	base := "http://" + p.start("serve").find(t, `listen=http://(\S+)`)
	for path, want := range map[string]int{"/v1/traces": 200, "/v1/me": 200, "/v1/threads": 403, "/v1/principals": 403} {
		got := call(t, "GET", base+path, text, "192.0.2.1")
		assert.Truef(t, got == want || got == 400 && want == 200, "GET %s: %d, want %d", path, got, want)
	}
	p.must("principals", "role", "anna", "operator")
	if got := call(t, "GET", base+"/v1/threads", text, "192.0.2.1"); got == 403 || got == 401 {
		t.Errorf("with the new role: %d", got)
	}
	id := strings.Split(text, "_")[1]
	assert.Contains(t, p.must("tokens", "ls", "anna"), id, "laptop", "*")
	p.must("tokens", "revoke", id, "--reason", "lost")
	assert.Equal(t, 401, call(t, "GET", base+"/v1/me", text, "192.0.2.1"))
	var link struct{ Path string }
	require.NoError(t, json.Unmarshal([]byte(p.must("principals", "login-link", "anna", "--json")), &link))
	assert.Contains(t, p.must("principals", "login-link", "anna"), "/login?link=", "http://localhost:8080/login?link=")
	p.environ = append(p.environ, "AGENT_PUBLIC_URL=https://agent.example.com/")
	assert.Contains(t, p.must("principals", "login-link", "anna"), "https://agent.example.com/login?link=")
	if _, page := testkit.Get(t, base+link.Path); !strings.Contains(page, strings.TrimPrefix(link.Path, "/login?link=")) {
		t.Errorf("the login page does not take the link: %s", page)
	}
	assert.Contains(t, p.must("activity", "audit"), "create_token", "new here")
	got := p.run("principals", "role", "nobody", "viewer")
	assert.Truef(t, got.code != 0 && strings.Contains(got.err, "agent principals ls"), "exit %d: %s", got.code, got.err)
}

func TestPrincipalCommandsReportTheirOwnErrors(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("principals", "add", "anna")
	p.must("principals", "add", "bert")
	assert.Contains(t, p.must("principals", "disable", "anna"), "anna: user, role none, disabled")
	assert.Contains(t, p.must("principals", "enable", "anna"), "anna: user, role none, enabled")
	p.must("principals", "link", "anna", "slack:T1", "U1")
	taken := p.run("principals", "link", "bert", "slack:T1", "U1")
	assert.Contains(t, taken.err, "unlink it from that principal")
	assert.Truef(t, taken.code == 1 && !strings.Contains(taken.err, "principals role"), "exit %d: %s",
		taken.code, taken.err)
	p.mustFail(1, "this account is not linked to bert", "principals", "unlink", "bert", "slack:T1", "U1")
	p.mustFail(1, "agent principals ls", "principals", "unlink", "nobody", "slack:T1", "U1")
	p.mustFail(1, "agent principals ls", "principals", "disable", "nobody")
}

// Each link of the overview opens for its viewer, and the overview shows every kind of problem.
func TestOverviewLinksOnlyPermittedPages(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_HEARTBEAT_CRON=0 0 1 1 *")
	pgtest.Exec(t, connect(t, url), `
		insert into agent_channels (name, type, state, error, enabled, state_at)
		values ('mail', 'email', 'failing', 'no route', true, clock_timestamp() - interval '5 minutes');
		insert into agent_threads (id, channel) values ('t1', 'webhook');
		insert into agent_messages (thread_id, seq, turn, role, content, status, error_message)
		values ('t1', 1, 1, 'assistant', 'hello', 'failed', 'no route');
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, trace_id)
		values ('general', 'tone', '"kind"', 0, 0, 'hb_1');
		insert into agent_executions (trace_id, surface, flow, thread_id, status)
		select lanekeeper.agent_trace_id('ch'), 'chat', 'chat', 't1', 'pending';
		insert into agent_activity (trace_id, execution_id, thread_id, kind, skill_name, status)
		select trace_id, id, 't1', 'phase', 'turn', 'running' from agent_executions`)
	p.must("memory", "set", "tone", `"kind"`)
	base := "http://" + p.start("serve").find(t, `listen=http://(\S+)`)
	get := func(secret, path string) (int, string) {
		got := send(t.Context(), "GET", base+path, secret, "")
		require.NoError(t, got.err)
		return got.status, got.body
	}
	for role, opens := range map[string]bool{"viewer": false, "operator": true} {
		p.must("principals", "add", role, "--role", role)
		secret := strings.TrimSpace(p.must("tokens", "create", role))
		_, page := get(secret, "/")
		_, page, _ = strings.Cut(page, "<main")
		page, _, _ = strings.Cut(page, "</main>")
		assert.Contains(t, page, "Broken channel", "mail", "Undelivered message", "Open memory conflict",
			"channel mail failing")
		assert.Equal(t, opens, strings.Contains(page, "t1"), role+" sees the thread")
		seen := map[string]bool{}
		for _, link := range regexp.MustCompile(`<a [^>]*href="(/[^"#]*)`).FindAllStringSubmatch(page, -1) {
			path := html.UnescapeString(link[1])
			seen[path] = true
			status, _ := get(secret, path)
			assert.Truef(t, status == 200, "%s: the link %s is answered with %d", role, path, status)
		}
		if opens {
			_, page = get(secret, "/find")
			assert.Contains(t, page, `data-row="/channels"`)
			assert.True(t, !strings.Contains(page, `data-row="/principals"`), "find leads an operator to the principals")
		}
		for _, path := range []string{"/channels", "/threads/t1", "/memory", "/memory?category=general"} {
			assert.Equal(t, opens, seen[path], role, path)
		}
	}
}
