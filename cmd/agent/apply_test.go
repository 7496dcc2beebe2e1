package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// writeFolder writes a workspace.
func writeFolder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		testkit.WriteFile(t, filepath.Join(dir, name), text)
	}
	return dir
}

const goodSkill = `kind: skill
name: one
description: One.
handler: "sql:"
config:
  query: select 1 as n
`

type diff struct {
	Items []struct{ Kind, Name, Action string }
}

func TestApplyDiff(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := writeFolder(t, map[string]string{"one.yaml": goodSkill})
	dry := p.must("apply", dir, "--dry-run")
	assert.Contains(t, dry, "+ skill one\n", "1 to create, 0 to update, 0 to remove, 0 unchanged\ndry run: nothing was "+
		"changed\n")
	assert.Contains(t, p.must("skills", "ls"), "no skills")

	assert.Contains(t, p.must("apply", dir), "+ skill one\n", "applied\n")
	assert.Equal(t, "no changes: the database matches all 1 of "+dir+"\n", p.must("apply", dir))
	var got diff
	p.mustJSON(&got, "apply", dir)
	assert.Truef(t, len(got.Items) == 1 && got.Items[0].Action == "unchanged", "as JSON: %+v", got)

	changed := writeFolder(t, map[string]string{"one.yaml": strings.Replace(goodSkill, "select 1", "select 2", 1)})
	assert.Contains(t, p.must("apply", changed), "~ skill one\n", "config.query: \"select 1 as n\" → \"select 2 as n\"")
	two := writeFolder(t, map[string]string{"two.yaml": strings.Replace(goodSkill, "name: one", "name: two", 1)})
	assert.Contains(t, p.must("apply", two, "--prune"), "- skill one\n", "+ skill two\n", "applied\n")
	p.mustFail(2, "has no .yaml file", "apply", writeFolder(t, nil))
	p.mustFail(2, "DIR is empty", "apply", "")
	assert.Contains(t, p.must("skills", "ls"), "two")
}

// A wrong folder removes nothing: undeclared rows stay and are listed, until --prune or a confirmation.
func TestApplyPrune(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	wrong := writeFolder(t, map[string]string{"two.yaml": strings.Replace(goodSkill, "name: one", "name: two", 1)})
	p.must("apply", writeFolder(t, map[string]string{"one.yaml": goodSkill}))
	says := "kept, not declared in any file: skill one; agent apply " + wrong + " --prune removes them\n"
	assert.Contains(t, p.must("apply", wrong),
		"+ skill two\n", "= skill one\n", "0 to remove, 0 unchanged, 1 kept\n", "applied\n", says)
	assert.Equal(t, "no changes: the database matches all 1 of "+wrong+"\n"+says, p.must("apply", wrong))
	var got diff
	p.mustJSON(&got, "apply", wrong)
	assert.Truef(t, len(got.Items) == 2 && got.Items[1].Action == "keep", "as JSON: %+v", got)
	assert.Contains(t, p.must("apply", wrong, "--prune", "--dry-run"), "- skill one\n", "dry run: nothing was changed")
	for answer, removed := range map[string]bool{"\n": false, "no\n": false, "\x04": false, "YES\n": true} {
		screen := p.onTerminal(t, answer, "apply", wrong)
		assert.Contains(t, screen, "Rows of an earlier apply that no file of "+wrong+" declares any more:",
			"- skill one", "Remove 1 row? [y/N]")
		listed := p.must("skills", "ls")
		assert.Truef(t, strings.Contains(listed, "\none ") != removed, "after %q:\n%s\n%s", answer, screen, listed)
		p.must("apply", writeFolder(t, map[string]string{"one.yaml": goodSkill}))
	}
	assert.Contains(t, p.must("apply", wrong, "--prune"), "- skill one\n", "1 to remove")
	listed := p.must("skills", "ls")
	assert.Truef(t, !strings.Contains(listed, "\none "), "the row is still there:\n%s", listed)
}

// onTerminal runs a command on a terminal with typed input and returns the screen.
func (p program) onTerminal(t *testing.T, typed string, args ...string) string {
	t.Helper()
	screen, tty, err := pty.Open()
	require.NoError(t, err)
	defer screen.Close()
	_, err = screen.WriteString(typed)
	require.NoError(t, err)
	var shown bytes.Buffer
	var group sync.WaitGroup
	group.Go(func() { _, _ = io.Copy(&shown, screen) }) // ends when the other side closes
	code := run(t.Context(), args, p.environ, tty, tty, tty)
	require.NoError(t, tty.Close())
	group.Wait()
	assert.Equal(t, 0, code, args, shown.String())
	return shown.String()
}

// The report has a line with file, line and column for every problem of every file. The exit code is 2, and apply
// changes nothing.
func TestApplyInvalidWorkspace(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		files map[string]string
		says  []string
	}{
		"not YAML": {map[string]string{"x.yaml": "kind: [skill\n"}, []string{"/x.yaml:"}},
		"unknown key": {
			map[string]string{"x.yaml": goodSkill + "colour: red\n"},
			[]string{`/x.yaml:7:1: unknown key "colour"`},
		},
		"unknown kind": {map[string]string{"x.yaml": "kind: skil\nname: a\n"}, []string{"/x.yaml:1:7:", "skil"}},
		"bad cron": {
			map[string]string{"x.yaml": "kind: automation\nname: z\ncron: \"99 * * * *\"\nskill: one\n"},
			[]string{"/x.yaml:3:7: cron:"},
		},
		"bad schema": {
			map[string]string{"x.yaml": goodSkill + "parameters:\n  type: 7\n"},
			[]string{"/x.yaml:", "parameters"},
		},
		"unknown skill": {
			map[string]string{"x.yaml": "kind: automation\nname: z\ncron: \"0 * * * *\"\nskill: nope\n"},
			[]string{"/x.yaml:4:8: skill: there is no skill \"nope\""},
		},
		"undeclared argument": {
			map[string]string{"x.yaml": "kind: automation\nname: z\ncron: \"0 * * * *\"\nskill: one\narguments: {limit: 3}\n"},
			[]string{"/x.yaml:5:", "limit", "(skill one)"},
		},
		"several problems": {
			map[string]string{"x.yaml": "kind: skill\nname: a b\n", "y.yaml": "kind: moon\n"},
			[]string{"/x.yaml:2:7:", "/y.yaml:1:7:"},
		},
	}
	p := newProgram(t, pgtest.URL(t), "AGENT_LISTEN=127.0.0.1:0")
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.files["good.yaml"] = goodSkill
			if name == "unknown key" || name == "bad schema" {
				test.files["good.yaml"] = strings.Replace(goodSkill, "name: one", "name: two", 1)
			}
			dir := writeFolder(t, test.files)
			for _, command := range []string{"apply", "dev"} {
				got := p.run(command, dir)
				assert.Equal(t, 2, got.code, command, got.err)
				assert.Equal(t, "", got.out, command, got.err)
				assert.Contains(t, got.err, test.says...)
				for line := range strings.Lines(got.err) {
					assert.Truef(t, strings.HasPrefix(line, "agent: "), "agent %s: a line that is not one problem: %q", command, line)
				}
			}
			if listed := p.must("skills", "ls"); strings.Contains(listed, "\none ") || strings.Contains(listed, "\ntwo ") {
				t.Errorf("a skill of the workspace was applied:\n%s", listed)
			}
		})
	}
}

func TestApplyRejectsWeakBearerToken(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	dir := writeFolder(t, map[string]string{"hook.yaml": `kind: webhook
name: hook
scheme: bearer
secrets: ["${HOOK_TOKEN}"]
actions:
  - {event: EVENT_COMPLETED, key: "{delivery}"}
`})
	weak := newProgram(t, url, "HOOK_TOKEN=hook", "AGENT_LISTEN=127.0.0.1:0")
	for _, command := range []string{"apply", "dev"} {
		got := weak.run(command, dir)
		assert.Equal(t, 2, got.code, command, got.err)
		assert.Equal(t, "", got.out, command, got.err)
		assert.Contains(t, got.err, "/hook.yaml:", "webhook hook: ${HOOK_TOKEN} is too weak for a bearer token",
			"openssl rand -hex 32")
	}
	newProgram(t, url).must("apply", dir) // another machine without the variable
	assert.Contains(t, weak.must("webhooks", "endpoints"), "too weak")
	assert.Contains(t, newProgram(t, url, "HOOK_TOKEN=a-long-random-text-4711").must("apply", dir), "no changes: ")
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	p := newProgram(t, url, token, "AGENT_LISTEN=127.0.0.1:0")
	for _, args := range [][]string{
		{"serve"},
		{"skills", "ls"},
		{"heartbeat"},
		{"apply", caretaker},
		{"lanes", "run", "x", "--", "echo"},
	} {
		got := p.run(args...)
		if got.code != 2 || got.out != "" || got.err != "agent: the database is not migrated to this version of agent; run "+
			"`agent migrate`\n" {
			t.Errorf("agent %v on an empty database: exit %d, stdout %q, stderr %q", args, got.code, got.out, got.err)
		}
	}
	first := p.run("migrate")
	assert.Truef(t, first.code == 0 && strings.Contains(first.out, "applied baseline") &&
		strings.Contains(first.err, "migrating the schema to version"), "first: exit %d, stdout %q, stderr %q", first.code,
		first.out, first.err)
	var again struct {
		Version int
		Applied []string
	}
	p.mustJSON(&again, "migrate")
	assert.Truef(t, again.Version != 0 && again.Applied != nil && len(again.Applied) == 0, "again: %+v", again)
	assert.Contains(t, p.must("skills", "ls"), "recall")

	_, err := connect(t, url).Exec(t.Context(), `
		insert into agent_migrations select (jsonb_populate_record(m, jsonb_build_object('version', 9999))).*
		  from agent_migrations m order by version desc limit 1`)
	require.NoError(t, err)
	for _, args := range [][]string{{"skills", "ls"}, {"migrate"}, {"dev"}} {
		got := p.run(args...)
		assert.Truef(t, got.code == 2 && strings.Contains(got.err, "newer version of agent; use that version or newer"),
			"agent %v on a newer schema: exit %d, stderr %q", args, got.code, got.err)
	}
}

func TestApplyWarnsOfUnknownModelAndKey(t *testing.T) {
	t.Parallel()
	database := pgtest.URL(t)
	dir := writeFolder(t, map[string]string{"a.yaml": "kind: agent\nname: a\nmodel: got-4o\nkeys: [sho]\n"})
	keys := "AGENT_CHAT_KEY=shop=" + strings.Repeat("0123456789abcdef", 2)
	model, key := `unknown model "got-4o": no price, no facts; did you mean "gpt-4o"?`,
		`no chat key "sho" in AGENT_CHAT_KEY; did you mean "shop"?`
	got := newProgram(t, database, keys).run("apply", dir, "--dry-run")
	assert.Contains(t, got.err, "warning: ", "a.yaml:1", model, key)
	assert.Equal(t, 0, got.code)
	own := newProgram(t, database, "OPENAI_BASE_URL=http://127.0.0.1:1/v1", "OPENAI_API_KEY=k", "AGENT_MODEL=m")
	if got := own.run("apply", dir, "--dry-run"); got.code != 0 || strings.Contains(got.err, "warning") {
		t.Errorf("an own server, and no chat key here: exit %d, stderr %q", got.code, got.err)
	}
}

// The serving process may have another environment.
func TestApplyWarnsOfUnsetReferences(t *testing.T) {
	t.Parallel()
	dir := writeFolder(t, map[string]string{"a.yaml": `kind: skill
name: fetch
description: Fetches ${NOTHING}.
handler: "http:GET https://api.example.com/"
config: {headers: {Authorization: "Bearer ${env:UNSET_KEY}", X-Set: "${env:SET_KEY}"}}
---
kind: webhook
name: shop
scheme: bearer
secrets: ["${UNSET_SECRET}"]
actions: [{event: EVENT_COMPLETED, key: paid}]
---
kind: webhook_target
name: ops
url: https://example.com/
secrets: ["${UNSET_TARGET}"]
events: [verdict.changed]
`})
	got := newProgram(t, pgtest.URL(t), "SET_KEY=0123456789abcdef").run("apply", dir, "--dry-run")
	assert.Equal(t, 0, got.code, got.err)
	assert.Contains(t, got.err, "a.yaml:1:1: not set in this environment: UNSET_KEY;",
		"a.yaml:7:1: not set in this environment: UNSET_SECRET;", "a.yaml:13:1: not set in this environment: UNSET_TARGET;")
	assert.Equal(t, 3, strings.Count(got.err, "warning: "), got.err)
}

// Only an admin's session has the tool delegate.
func TestApplyWarnsOfDelegatesOfVisitorsAgent(t *testing.T) {
	t.Parallel()
	dir := writeFolder(t, map[string]string{
		"desk.yaml":  "kind: agent\nname: desk\ndefault: true\nkeys: [web]\ndelegates: [clerk]\n",
		"clerk.yaml": "kind: agent\nname: clerk\ndelegates: [desk]\n",
	})
	got := newProgram(t, pgtest.URL(t)).run("apply", dir, "--dry-run")
	assert.Equal(t, 0, got.code)
	assert.Contains(t, got.err, "desk.yaml:1", "visitors of web get no tool delegate")
	assert.Equal(t, 1, strings.Count(got.err, "warning: "), got.err)
}

// Each change applies the folder. An error is shown and keeps the last good state. SIGTERM is no failure.
func TestApplyWatch(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	dir := writeFolder(t, map[string]string{"one.yaml": goodSkill})
	file := filepath.Join(dir, "one.yaml")
	var shown testkit.Log
	cmd := exec.CommandContext(t.Context(), os.Args[0], "apply", dir, "--watch")
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), p.environ...)
	cmd.Stdout, cmd.Stderr = &shown, &shown
	require.NoError(t, cmd.Start())
	says := func(text string) {
		t.Helper()
		pgtest.Eventually(t, func() bool { return strings.Contains(shown.String(), text) }, "it says "+text)
	}
	write := func(name, text string) {
		t.Helper()
		testkit.WriteFile(t, name, text)
	}
	query := func(n string) string { return strings.Replace(goodSkill, "select 1", "select "+n, 1) }
	says("applied: + skill one\n")
	says("watching " + dir)
	write(file, query("2"))
	says("applied: ~ skill one (config.query)\n")
	assert.Contains(t, p.must("skills", "show", "one"), "select 2")

	write(file, query("3")+"colour: red\n")
	says(`agent: ` + file + `:7:1: unknown key "colour"`)
	says("nothing was changed")
	assert.Contains(t, p.must("skills", "show", "one"), "select 2")
	write(filepath.Join(dir, ".one.swp"), "not of interest")
	write(filepath.Join(dir, "one.yaml~"), query("4"))
	if err := os.Rename(filepath.Join(dir, "one.yaml~"), file); err != nil { // editors save like this
		t.Fatal(err)
	}
	pgtest.Eventually(t, func() bool {
		return strings.Contains(p.must("skills", "show", "one"), "select 4")
	}, "a file that is renamed over another is applied")

	below := filepath.Join(dir, "below")
	require.NoError(t, os.Mkdir(below, 0o700))
	write(filepath.Join(below, "two.yaml"), strings.Replace(goodSkill, "name: one", "name: two", 1))
	says("applied: + skill two\n")
	write(filepath.Join(below, "agent.yaml"), "kind: agent\nname: nora\ninstructions_file: nora.md\n")
	says("instructions_file: cannot be read")
	write(filepath.Join(below, "nora.md"), "Be brief.")
	says("applied: + agent nora\n")
	write(filepath.Join(below, "nora.md"), "Be kind.")
	says("applied: ~ agent nora (instructions, version)\n")
	require.NoError(t, os.Remove(file))
	says("kept, not declared in any file: skill one; agent apply " + dir + " --prune removes them")
	assert.Contains(t, p.must("skills", "ls"), "\none ", "\ntwo ")

	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	err := cmd.Wait()
	assert.Truef(t, err == nil, "after SIGTERM: %v\n%s", err, shown.String())
}

func TestWatchFollowsLinkToFolder(t *testing.T) {
	t.Parallel()
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	watched, err := watchDir(link)
	require.NoError(t, err)
	defer watched.Close()
	testkit.WriteFile(t, filepath.Join(link, "one.yaml"), goodSkill)
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	changed, err := watched.waitForChange(ctx)
	assert.Truef(t, changed && err == nil, "the change was not seen: %v", err)
}

// apply reports a lost connection. The next file change uses a new one.
func TestApplyWatchReconnects(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	dir := writeFolder(t, map[string]string{"one.yaml": goodSkill})
	watching := p.start("apply", dir, "--watch")
	watching.find(t, "watching ")
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	database := config.Database
	config.Database = "postgres"
	admin, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer admin.Close(t.Context())
	must := func(sql string) {
		t.Helper()
		pgtest.Exec(t, admin, sql)
	}
	write := func(n string) {
		t.Helper()
		text := strings.Replace(goodSkill, "select 1", "select "+n, 1)
		testkit.WriteFile(t, filepath.Join(dir, "one.yaml"), text)
	}
	must("alter database " + pgx.Identifier{database}.Sanitize() + " allow_connections false")
	must("select pg_terminate_backend(pid) from pg_stat_activity where datname = '" + database + "'")
	write("2")
	watching.find(t, "agent: .+")
	watching.find(t, "the next file change retries")
	must("alter database " + pgx.Identifier{database}.Sanitize() + " allow_connections true")
	write("3")
	pgtest.Eventually(t, func() bool {
		return strings.Contains(watching.out.String(), "applied: ~ skill one")
	}, "the change is applied")
	watching.stop()
	assert.Equal(t, 0, <-watching.ended, watching.err.String())
}
