package main

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// Without settings, dev runs its own server and keeps its data. Other commands in the folder find the data, even after
// dev stopped.
func TestDevStartsItsOwnServer(t *testing.T) {
	t.Chdir(t.TempDir())
	p := newProgramWithoutDatabase(t, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 29 2 *")
	first := p.start("dev")
	first.find(t, `\^C stops`)
	assert.Contains(t, first.err.String(), "making a PostgreSQL", "applied the caretaker example",
		"(kept; --ephemeral uses a new one)")
	client := connect(t, first.find(t, `SQL client +psql '(.*)'`))
	pgtest.Equal(t, client, true, `select try_acquire_agent_lock('shelf', 'importer', 30)`)
	_, err := client.Exec(t.Context(), `select from agent_locks`)
	assert.Error(t, err, "the SQL client reads a table")
	client.Close()
	got := p.must("trace", "last", "--surface", "heartbeat")
	assert.Truef(t, strings.HasPrefix(first.out.String(), got), "the last trace is not the played story:\n%s", got)
	first.stop()
	require.Equal(t, 0, <-first.ended, first.err.String())
	assert.Contains(t, p.must("skills", "ls"), "broken_on_purpose")
	assert.Contains(t, p.must("doctor"), "ok   server         PostgreSQL", "ok   database       reachable")

	second := p.start("dev")
	second.find(t, `\^C stops`)
	for _, word := range []string{"making", "migrating the schema", "applied"} {
		assert.Truef(t, !strings.Contains(second.err.String(), word),
			"the second start is %s something again:\n%s", word, second.err.String())
	}
	database := connect(t, second.find(t, `database +(postgres://\S+)`))
	pgtest.Exec(t, database, `insert into agent_migrations (version, name, hash) values (9999, '9999_later.sql', 'x')`)
	database.Close()
	second.stop()
	assert.Equal(t, 0, <-second.ended, second.err.String())
	p.mustFail(exitUsage, "or remove "+second.find(t, `data in +(\S+)`)+" to start over", "dev")
}

// An invalid .env stops dev before it creates anything. A .env that sends the user's key elsewhere, or opens a port,
// stops it, too. Other commands find no database in a folder without a finished data directory.
func TestDevReadsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	for text, says := range map[string]string{"AGENT_LANES=maybe\n": `AGENT_LANES: "maybe"`, "no assignment\n": ".env"} {
		testkit.WriteFile(t, ".env", text)
		got := newProgramWithoutDatabase(t).run("dev")
		assert.Truef(t, got.code == exitUsage && strings.Contains(got.err, says) && strings.Count(got.err, "\n") == 1,
			"with %q: exit %d, stderr %q", text, got.code, got.err)
	}
	for text, c := range map[string]struct{ environ, says string }{
		"OPENAI_BASE_URL=http://127.0.0.1:9/v1\n": {
			"OPENAI_API_KEY=sk-of-the-user",
			"OPENAI_BASE_URL is in .env, and OPENAI_API_KEY",
		},
		"AGENT_LISTEN=0.0.0.0:0\n": {"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", ".env cannot open a port"},
	} {
		testkit.WriteFile(t, ".env", text)
		got := newProgramWithoutDatabase(t, c.environ).run("dev")
		assert.Truef(t, got.code == exitUsage && strings.Contains(got.err, c.says) && strings.Count(got.err, "\n") == 1,
			"with %q: exit %d, stderr %q", text, got.code, got.err)
	}
	require.NoError(t, os.Remove(".env"))
	newProgramWithoutDatabase(t).mustFail(exitUsage, "no database; set DATABASE_URL", "lanes", "ls")
	_, err := os.Stat(stateDir)
	assert.Error(t, err, "a data directory was made")
	started := filepath.Join(stateDir, "pg", "15", "data.new") // of a dev that was killed early
	require.NoError(t, os.MkdirAll(started, 0o755))
	newProgramWithoutDatabase(t).mustFail(exitUsage, "no database; set DATABASE_URL", "lanes", "ls")
}

// Commands in the folder use dev's settings; a command with a database ignores the folder.
func TestCommandsReadDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	url := pgtest.URL(t)
	testkit.WriteFile(t, ".env", "DATABASE_URL="+url+"\nAGENT_NAME=robin\n")
	assert.Contains(t, newProgramWithoutDatabase(t).must("agents", "ls"), "robin")
	newProgramWithoutDatabase(t).mustFail(exitUsage, "DATABASE_URL is not set", "serve")
	got := newProgramWithoutDatabase(t, "DATABASE_URL="+url).must("agents", "ls")
	assert.Truef(t, !strings.Contains(got, "robin"), "a command with its own database: %s", got)
}

// dev reports the names that .env set, and does not run a program named there.
func TestDevReportsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	ran := filepath.Join(t.TempDir(), "ran")
	for _, name := range []string{"postgres", "initdb", "pg_ctl"} {
		script := "#!/bin/sh\ntouch " + ran + "\nexit 1\n"
		if err := os.WriteFile(name, []byte(script), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	here, err := os.Getwd()
	require.NoError(t, err)
	text := "AGENT_PG_BIN=" + here + "\nPATH=" + here + "\nLD_PRELOAD=" + here +
		"/x.so\nOPENAI_API_KEY_FILE=/etc/passwd\nAGENT_NAME=robin\nMY_SECRET=hunter2\nNOTIFY_SOCKET=/no/such/socket\n"
	testkit.WriteFile(t, ".env", text)
	p := newProgramWithoutDatabase(t, "AGENT_LISTEN=127.0.0.1:0", "HOME="+here).start("dev", "--ephemeral")
	p.find(t, `(\.env sets AGENT_NAME, LD_PRELOAD, MY_SECRET, NOTIFY_SOCKET)`)
	p.find(t, `(\.env cannot set AGENT_PG_BIN, OPENAI_API_KEY_FILE, PATH; set)`)
	p.find(t, `(\^C stops)`)
	p.stop()
	<-p.ended
	assert.True(t, !strings.Contains(p.err.String(), "hunter2"), "a value is shown")
	assert.True(t, !strings.Contains(p.err.String(), "service manager"), "dev reports to a socket of the file")
	_, err = os.Stat(ran)
	assert.Error(t, err, "a program of the folder ran")
}

// Without an argument, dev applies the YAML files of the folder workspace, whatever their names.
func TestDevAppliesWorkspaceOfFolder(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.MkdirAll(filepath.Join(workspaceDir, "people"), 0o755))
	testkit.WriteFile(t, filepath.Join(workspaceDir, "people", "nora.yml"), "kind: agent\nname: nora\n")
	p := program{t, []string{"DATABASE_URL=" + pgtest.URL(t), "AGENT_LISTEN=127.0.0.1:0"}}.start("dev")
	p.find(t, "applied workspace: 1 agent\n")
}

// Without a folder, dev leaves a database alone that has another workspace.
func TestDevKeepsExampleOutOfOtherWorkspace(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Mkdir("shop", 0o755))
	testkit.WriteFile(t, filepath.Join("shop", "nora.yaml"), "kind: agent\nname: nora\n")
	p := newProgram(t, pgtest.URL(t), "AGENT_LISTEN=127.0.0.1:0")
	p.must("apply", "shop")
	for _, args := range [][]string{{"dev"}, {"dev", "--prune"}} {
		p.mustFail(exitUsage, "has another workspace (agent nora); name its folder: agent dev DIR", args...)
	}
	p.must("agents", "show", "nora")
	assert.True(t, !strings.Contains(p.must("skills", "ls"), "broken_on_purpose"), "the example is in the database")
}

func TestBrowserKeyReachesDefaultAgent(t *testing.T) {
	all := []agents.Agent{
		{Definition: agents.Definition{Name: "sales", Default: true}},
		{Definition: agents.Definition{Name: "audit", Keys: []string{"aud"}}},
	}
	cfg := config.Config{ChatKeys: map[string]config.Secret{"aud": "one", "web": "two"}}
	assert.Equal(t, "two", browserKey(cfg, all))
	cfg.Chat.BrowserKeys = []string{"aud"}
	assert.Equal(t, "one", browserKey(cfg, all))
}

// The first run prints the trace, the addresses and what it created.
func TestDevOutput(t *testing.T) {
	t.Parallel()
	p := program{t, []string{
		"DATABASE_URL=" + withSecret(t, pgtest.EmptyURL(t)), "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_ADMIN_TOKEN=the-admins-own-token", "AGENT_CHAT_KEY=the-visitors-own-key",
	}}
	s := p.start("dev")
	base := s.find(t, `API +(http://\S+)/v1`)
	s.find(t, `\^C stops`)
	assert.Contains(t, s.out.String(), "self_heal", "follow_through", "advance_plan", "run_automations", "reflect",
		"save_memories", "total:")
	output := s.err.String()
	assert.Contains(t, output, "migrating the schema to version", "applied the caretaker example: 9 skills, 1 objective, "+
		"2 automations",
		"running a heartbeat …", "admin token  the-admins-own-token\n", "/chat#key=the-visitors-own-key\n",
		"data in      DATABASE_URL\n", "model        offline", "heartbeat    */30", "*/30 * * * * (UTC)", "^C stops")
	assert.True(t, !strings.Contains(output, "hunter2"), "the database's password is shown")
	logged := strings.Count(output, "level=WARN") // at the half hour, the scheduled heartbeat runs into the first one
	lines := strings.Count(output, "\n") - logged
	assert.Truef(t, lines <= 16, "%d lines on stderr:\n%s", lines, output)
	code, body := testkit.Get(t, base+"/readyz")
	assert.Truef(t, code == http.StatusOK, "readyz: %d %s", code, body)
	s.stop()
	if code := <-s.ended; code != 0 || !strings.HasSuffix(s.err.String(), "stopped\n") {
		t.Errorf("exit %d, stderr %s", code, s.err.String())
	}
}

// dev --watch reports a blocking lock.
func TestDevWatchReportsLock(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	dir := writeFolder(t, map[string]string{
		"one.yaml":  goodSkill,
		"nora.yaml": "kind: agent\nname: nora\ntimezone: Europe/Madrid\nheartbeat: {cron: 0 9 1 1 *}\n",
	})
	watching := program{t, []string{"DATABASE_URL=" + url, "AGENT_LISTEN=127.0.0.1:0"}}.start("dev", dir, "--watch")
	watching.find(t, `heartbeat +0 9 1 1 \* \(Europe/Madrid\)`)
	watching.find(t, "watching ")
	tx, err := connect(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select from agent_skills where name = 'one' for update`)
	testkit.WriteFile(t, filepath.Join(dir, "one.yaml"), strings.Replace(goodSkill, "select 1", "select 2", 1))
	watching.find(t, "55P03")
	watching.find(t, "the next file change retries")
}
