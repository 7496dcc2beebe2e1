package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
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
	for text, c := range map[string]struct{ environ, says string }{
		"OPENAI_BASE_URL=http://127.0.0.1:9/v1\n": {"OPENAI_API_KEY=sk-of-the-user", "OPENAI_BASE_URL is in .env, and OPENAI_API_KEY"},
		"AGENT_LISTEN=0.0.0.0:0\n":                {"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", ".env cannot open a port"},
	} {
		if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := bare(t, c.environ).run("dev"); got.code != 2 || !strings.Contains(got.err, c.says) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("with %q: exit %d, stderr %q", text, got.code, got.err)
		}
	}
	if err := os.Remove(".env"); err != nil {
		t.Fatal(err)
	}
	if got := bare(t).run("lanes", "ls"); got.code != 2 || !strings.Contains(got.err, "there is no database") {
		t.Errorf("another command: exit %d, stderr %q", got.code, got.err)
	}
	if _, err := os.Stat(stateDir); err == nil {
		t.Error("a data directory was made")
	}
}

// A command beside dev runs with the same settings as dev; one that is told its database does not look at the folder.
func TestCommandsBesideDevReadDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	url := pgtest.URL(t)
	if err := os.WriteFile(".env", []byte("DATABASE_URL="+url+"\nAGENT_NAME=robin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	contains(t, bare(t).must("agents", "ls"), "robin")
	if got := bare(t).run("serve"); got.code != 2 || !strings.Contains(got.err, "DATABASE_URL is not set") {
		t.Errorf("serve: exit %d, stderr %q", got.code, got.err)
	}
	if got := bare(t, "DATABASE_URL="+url).must("agents", "ls"); strings.Contains(got, "robin") {
		t.Errorf("a command that is told its database: %s", got)
	}
}

// What .env set is told by name, and a program that it names is not run.
func TestDevTellsWhatDotEnvSet(t *testing.T) {
	t.Chdir(t.TempDir())
	ran := filepath.Join(t.TempDir(), "ran")
	for _, name := range []string{"postgres", "initdb", "pg_ctl"} {
		if err := os.WriteFile(name, []byte("#!/bin/sh\ntouch "+ran+"\nexit 1\n"), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	text := "AGENT_PG_BIN=" + here + "\nPATH=" + here + "\nLD_PRELOAD=" + here + "/x.so\nOPENAI_API_KEY_FILE=/etc/passwd\nAGENT_NAME=robin\nMY_SECRET=hunter2\n"
	if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := bare(t, "AGENT_LISTEN=127.0.0.1:0", "HOME="+here).start("dev", "--ephemeral")
	p.find(t, `(\.env sets AGENT_NAME, LD_PRELOAD, MY_SECRET)`)
	p.find(t, `(\.env cannot set AGENT_PG_BIN, OPENAI_API_KEY_FILE, PATH; set)`)
	p.find(t, `(\^C stops)`)
	p.stop()
	<-p.ended
	if strings.Contains(p.err.String(), "hunter2") {
		t.Error("a value is shown")
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("a program of the folder ran")
	}
}
