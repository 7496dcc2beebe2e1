package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestInitCreatesWorkingWorkspace(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := filepath.Join(t.TempDir(), "42 Sol's shop!")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "workspace"), 0o755)) // an empty folder may exist
	got := p.run("init", dir, "--purpose", "Answer questions about \"orders\": quickly.\nAnd {{kindly}}.",
		"--timezone", "Europe/Madrid")
	require.Truef(t, got.code == 0 && strings.Contains(got.err, "wrote "+filepath.Join(dir, "workspace", "agent.yaml")),
		"%d %s", got.code, got.err)
	assert.Contains(t, got.err, `42 Sol'\''s shop!'`)
	text, err := os.ReadFile(filepath.Join(dir, "workspace", "agent.yaml"))
	require.NoError(t, err)
	assert.Contains(t, string(text), `name: "sol-s-shop"`, "Answer questions about \"orders\": quickly. And {{kindly}}.",
		`timezone: "Europe/Madrid"`)
	assert.Contains(t, p.must("apply", filepath.Join(dir, "workspace")), "agent", "sol-s-shop", "list_tables",
		"tables every morning")
	assert.Contains(t, p.must("chat", "which tables are there?"), "list_tables")
	_, err = os.Stat(filepath.Join(dir, ".env"))
	assert.Error(t, err, "there is an .env without a database")
	p.mustFail(2, "is not empty; name another folder", "init", dir, "--yes")
}

func TestInitRejectsInvalidAnswers(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	for name, c := range map[string]struct {
		flags []string
		want  string
	}{
		"bad name":     {[]string{"--name", "no good"}, `"no good": a name is a letter`},
		"bad zone":     {[]string{"--timezone", "Europe/Madird"}, "--timezone:"},
		"bad database": {[]string{"--database", "mysql://x"}, "--database is not a PostgreSQL URL"},
		"no example":   {[]string{"--example", "shop"}, `unknown example "shop"; use orders`},
		"no database":  {[]string{"--example", "orders"}, "needs the URL of a database for the shop"},
		"two names":    {[]string{"--example", "orders", "--name", "x"}, "--example has its own name"},
		"bad password": {[]string{"--database", "postgres://u:p%zz@h/d"}, "encode @ as %40"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			got := p.run(append([]string{"init", dir, "--yes"}, c.flags...)...)
			assert.Truef(t, got.code == 2 && strings.Contains(got.err, c.want), "%d %s", got.code, got.err)
			left, err := os.ReadDir(dir)
			assert.Truef(t, err == nil && len(left) == 0, "left %v, %v", left, err)
		})
	}
}

func TestInitRepeatsQuestion(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "desk-2")
	shown := newProgramWithoutDatabase(t).onTerminal(t, "no good\n\nHelp.\nmysql://x\n\n", "init", dir)
	assert.Contains(t, shown, "[desk-2]", `"no good": a name is a letter`, "not a PostgreSQL URL", "workspace/agent.yaml")
	assert.True(t, !strings.Contains(shown, "--"), "the questions name flags:", shown)
	text, err := os.ReadFile(filepath.Join(dir, "workspace", "agent.yaml"))
	assert.Truef(t, err == nil && strings.Contains(string(text), "name: \"desk-2\"\n"),
		"the agent's file: %s, %v", text, err)
}

func TestInitWritesNoURLIntoWorkspace(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := t.TempDir()
	p.must("init", dir, "--yes", "--name", "nora", "--database", "postgres://u:$se%40cret@db/shop")
	env, err := os.ReadFile(filepath.Join(dir, ".env"))
	assert.NoError(t, err, env)
	assert.Equal(t, "APP_DATABASE_URL=postgres://u:%24se%40cret@db/shop\n", string(env), env)
	info, err := os.Stat(filepath.Join(dir, ".env"))
	assert.Truef(t, err == nil && info.Mode().Perm() == 0o600, ".env may be read by others: %v, %v", info, err)
	files, err := filepath.Glob(filepath.Join(dir, "workspace", "*"))
	assert.NoError(t, err, files)
	assert.Equal(t, 5, len(files), files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		assert.Truef(t, err == nil && !strings.Contains(string(text), "se%40cret"), "%s has the URL, %v", file, err)
	}
}

// A question needs a terminal for its text, which goes to stderr, and for the answer.
func TestInitAsksOnStderr(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"stdout redirected": "nora", "stderr redirected": "desk"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "desk")
			screen, tty, err := pty.Open()
			require.NoError(t, err)
			defer tty.Close()
			defer screen.Close() // first: ends a pending read of the terminal
			go func() { _, _ = io.Copy(io.Discard, screen) }()
			_, err = screen.WriteString("nora\n\n\n")
			require.NoError(t, err)
			var file testkit.Log
			out, errw := io.Writer(&file), io.Writer(tty)
			if name == "stderr redirected" {
				out, errw = tty, &file
			}
			assert.Equal(t, 0, run(t.Context(), []string{"init", dir}, nil, tty, out, errw), file.String())
			text, err := os.ReadFile(filepath.Join(dir, "workspace", "agent.yaml"))
			assert.NoError(t, err)
			assert.Contains(t, string(text), "name: \""+want+"\"\n")
		})
	}
}

func TestInterruptEndsInitQuestion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := newProgramWithoutDatabase(t).startConsole("init", dir)
	s.waitFor("Name of the agent")
	s.stop()
	select {
	case code := <-s.ended:
		assert.Equal(t, exitInterrupted, code)
	case <-time.After(pgtest.Timeout):
		t.Error("the interrupted command still waits for an answer")
		s.typeKeys("\n\n\n") // ends the command
		<-s.ended
	}
	left, err := os.ReadDir(dir)
	assert.NoError(t, err)
	assert.Equal(t, 0, len(left), left)
}

func TestInitKeepsExistingExampleFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	schema := filepath.Join(dir, "shop.sql")
	require.NoError(t, os.WriteFile(schema, []byte("mine"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".gitignore"), []byte("/.agent\nbin"), 0o600))
	got := newProgramWithoutDatabase(t).run("init", dir, "--example", "orders", "--database", "postgres://db/shop")
	assert.Equal(t, 0, got.code, got.err)
	assert.Contains(t, got.err, schema+" exists and stays unchanged", ".gitignore exists: add the line .env\n")
	text, err := os.ReadFile(schema)
	assert.NoError(t, err)
	assert.Equal(t, "mine", string(text))
	_, err = os.Stat(filepath.Join(dir, ".env"))
	assert.NoError(t, err)
}
