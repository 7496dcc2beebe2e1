package main

import (
	"os"
	"strings"
	"testing"
)

// Without any setting but a quiet clock dev runs its own server, keeps its data, and the other commands in the folder find it, also
// when dev does not run.
func TestDevOnItsOwnServer(t *testing.T) {
	t.Chdir(t.TempDir())
	p := bare(t, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 29 2 *")
	first := p.start("dev")
	first.find(t, `\^C stops`)
	contains(t, first.err.String(), "making a PostgreSQL", "applied the caretaker example", "(kept; --ephemeral throws it away)")
	if got := p.must("trace", "last", "--surface", "heartbeat"); !strings.HasPrefix(first.out.String(), got) {
		t.Errorf("the last trace is not the story that was told:\n%s", got)
	}
	first.stop()
	if code := <-first.ended; code != 0 {
		t.Fatalf("exit %d, stderr %s", code, first.err.String())
	}
	contains(t, p.must("skills", "ls"), "broken_on_purpose")
	contains(t, p.must("doctor"), "ok   server         PostgreSQL", "ok   database       reachable")

	second := p.start("dev")
	second.find(t, `\^C stops`)
	for _, word := range []string{"making", "bringing the schema", "applied"} {
		if strings.Contains(second.err.String(), word) {
			t.Errorf("the second start is %s something again:\n%s", word, second.err.String())
		}
	}
	second.stop()
	if code := <-second.ended; code != 0 {
		t.Errorf("exit %d, stderr %s", code, second.err.String())
	}
}

// .env is read by dev, and what is wrong in it stops dev before anything is made.
func TestDevReadsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	for text, says := range map[string]string{"AGENT_LANES=maybe\n": `AGENT_LANES: "maybe"`, "no assignment\n": ".env"} {
		if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got := bare(t).run("dev")
		if got.code != 2 || !strings.Contains(got.err, says) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("with %q: exit %d, stderr %q", text, got.code, got.err)
		}
	}
	if got := bare(t).run("lanes", "ls"); got.code != 2 || !strings.Contains(got.err, "there is no database") {
		t.Errorf("another command: exit %d, stderr %q", got.code, got.err)
	}
	if _, err := os.Stat(stateDir); err == nil {
		t.Error("a data directory was made")
	}
}
