package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestInitBeginsAWorkspaceThatWorksAtOnce(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	dir := filepath.Join(t.TempDir(), "42 Sol's shop!")
	got := p.run("init", dir, "--purpose", "Answer questions about \"orders\": quickly.\nAnd {{kindly}}.", "--timezone", "Europe/Madrid")
	if got.code != 0 || !strings.Contains(got.err, "wrote "+filepath.Join(dir, "workspace", "agent.yaml")) {
		t.Fatalf("%d %s", got.code, got.err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "workspace", "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	contains(t, string(text), `name: "sol-s-shop"`, "Answer questions about \"orders\": quickly. And {{kindly}}.", `timezone: "Europe/Madrid"`)
	contains(t, p.must("apply", filepath.Join(dir, "workspace")), "agent", "sol-s-shop", "list_tables", "tables every morning")
	contains(t, p.must("chat", "which tables are there?"), "list_tables")
	if _, err := os.Stat(filepath.Join(dir, ".env")); err == nil {
		t.Error("there is an .env without a database")
	}
	if got := p.run("init", dir, "--yes"); got.code != 2 || !strings.Contains(got.err, "is not empty; name another folder") {
		t.Errorf("again: %d %s", got.code, got.err)
	}
}

func TestInitRefusesWhatApplyWouldRefuseAndLeavesNothing(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	for name, c := range map[string]struct {
		flags []string
		want  string
	}{
		"bad name":     {[]string{"--name", "no good"}, `"no good": a name is a letter`},
		"bad zone":     {[]string{"--timezone", "Europe/Madird"}, "--timezone:"},
		"bad database": {[]string{"--database", "mysql://x"}, "--database is no URL of PostgreSQL"},
		"no example":   {[]string{"--example", "shop"}, `there is no "shop"; there is: orders`},
		"no database":  {[]string{"--example", "orders"}, "needs the URL of a database for the shop"},
		"two names":    {[]string{"--example", "orders", "--name", "x"}, "--example has a name"},
		"bad password": {[]string{"--database", "postgres://u:p%zz@h/d"}, "write @ as %40"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			got := p.run(append([]string{"init", dir, "--yes"}, c.flags...)...)
			if got.code != 2 || !strings.Contains(got.err, c.want) {
				t.Errorf("%d %s", got.code, got.err)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}

func TestInitAsksAgainWhenAnAnswerIsWrong(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "desk-2")
	shown := bare(t).onTerminal(t, "no good\n\nHelp.\nmysql://x\n\n", "init", dir)
	contains(t, shown, "[desk-2]", `"no good": a name is a letter`, "--database is no URL of PostgreSQL", "workspace/agent.yaml")
	text, err := os.ReadFile(filepath.Join(dir, "workspace", "agent.yaml"))
	if err != nil || !strings.Contains(string(text), "name: \"desk-2\"\n") {
		t.Errorf("the agent's file: %s, %v", text, err)
	}
}

func TestInitKeepsTheURLOutOfTheWorkspace(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	dir := t.TempDir()
	p.must("init", dir, "--yes", "--name", "nora", "--database", "postgres://u:se%40cret@db/shop")
	env, err := os.ReadFile(filepath.Join(dir, ".env"))
	if err != nil || string(env) != "APP_DATABASE_URL=postgres://u:se%40cret@db/shop\n" {
		t.Errorf(".env is %q, %v", env, err)
	}
	if info, err := os.Stat(filepath.Join(dir, ".env")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf(".env may be read by others: %v, %v", info, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "workspace", "*"))
	if err != nil || len(files) != 4 {
		t.Errorf("the workspace has %v, %v", files, err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), "se%40cret") {
			t.Errorf("%s has the URL, %v", file, err)
		}
	}
}
