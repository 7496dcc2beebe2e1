package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// A team gets along without AGENT_ADMIN_TOKEN: a token made on the command line opens what its role may.
func TestATokenOpensWhatItsRoleMay(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	assert.Contains(t, p.must("principals", "add", "anna", "--role", "viewer", "--reason", "new here"),
		"anna: user, role viewer")
	p.fails(1, "agent principals role", "principals", "add", "anna")
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
	if _, page := testkit.Get(t, base+link.Path); !strings.Contains(page, strings.TrimPrefix(link.Path, "/login?link=")) {
		t.Errorf("the login page does not take the link: %s", page)
	}
	assert.Contains(t, p.must("activity", "audit"), "create_token", "new here")
	got := p.run("principals", "role", "nobody", "viewer")
	assert.Truef(t, got.code != 0 && strings.Contains(got.err, "agent principals ls"), "exit %d: %s", got.code, got.err)
}
