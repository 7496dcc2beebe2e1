package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestApplyWarnsOfAModelAndAChatKeyThatTheSettingsDoNotKnow(t *testing.T) {
	t.Parallel()
	database := pgtest.URL(t)
	dir := folder(t, map[string]string{"a.yaml": "kind: agent\nname: a\nmodel: got-4o\nkeys: [sho]\n"})
	keys := "AGENT_CHAT_KEY=shop=" + strings.Repeat("0123456789abcdef", 2)
	model, key := `no price and no fact is known of model "got-4o"; did you mean "gpt-4o"?`, `AGENT_CHAT_KEY has no chat key "sho" here; did you mean "shop"?`
	got := on(t, database, keys).run("apply", dir, "--dry-run")
	contains(t, got.err, "warning: ", "a.yaml:1", model, key)
	if got.code != 0 {
		t.Errorf("exit %d", got.code)
	}
	own := on(t, database, "OPENAI_BASE_URL=http://127.0.0.1:1/v1", "OPENAI_API_KEY=k", "AGENT_MODEL=m")
	if got := own.run("apply", dir, "--dry-run"); got.code != 0 || strings.Contains(got.err, "warning") {
		t.Errorf("an own server, and no chat key here: exit %d, stderr %q", got.code, got.err)
	}
}
