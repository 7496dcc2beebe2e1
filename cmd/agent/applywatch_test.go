package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// The folder is applied after each change. A mistake is shown and leaves the last good state. SIGTERM is no failure.
func TestApplyWatchesAFolder(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	dir := folder(t, map[string]string{"one.yaml": goodSkill})
	file := filepath.Join(dir, "one.yaml")
	var shown stream
	cmd := exec.CommandContext(t.Context(), os.Args[0], "apply", dir, "--watch")
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), p.environ...)
	cmd.Stdout, cmd.Stderr = &shown, &shown
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	says := func(text string) {
		t.Helper()
		pgtest.Eventually(t, pgWait, func() bool { return strings.Contains(shown.String(), text) }, "it says "+text)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	query := func(n string) string { return strings.Replace(goodSkill, "select 1", "select "+n, 1) }
	says("applied: + skill one\n")
	says("watching " + dir)
	write(file, query("2"))
	says("applied: ~ skill one (config.query)\n")
	contains(t, p.must("skills", "show", "one"), "select 2")

	write(file, query("3")+"colour: red\n")
	says(`agent: ` + file + `:7:1: unknown key "colour"`)
	says("nothing was changed")
	contains(t, p.must("skills", "show", "one"), "select 2")
	write(filepath.Join(dir, ".one.swp"), "not of interest")
	write(filepath.Join(dir, "one.yaml~"), query("4"))
	if err := os.Rename(filepath.Join(dir, "one.yaml~"), file); err != nil { // as editors save
		t.Fatal(err)
	}
	pgtest.Eventually(t, pgWait, func() bool {
		return strings.Contains(p.must("skills", "show", "one"), "select 4")
	}, "a file that is renamed over another is applied")

	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(below, "two.yaml"), strings.Replace(goodSkill, "name: one", "name: two", 1))
	says("applied: + skill two\n")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	says("kept, though no file declares it: skill one; agent apply " + dir + " --prune removes it")
	contains(t, p.must("skills", "ls"), "\none ", "\ntwo ")

	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v\n%s", err, shown.String())
	}
}

// A lost connection is said; the next change of a file goes over a new one.
func TestApplyWatchesOverALostConnection(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	dir := folder(t, map[string]string{"one.yaml": goodSkill})
	watching := p.start("apply", dir, "--watch")
	watching.find(t, "watching ")
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	database := config.Database
	config.Database = "postgres"
	admin, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(t.Context())
	must := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	write := func(n string) {
		t.Helper()
		text := strings.Replace(goodSkill, "select 1", "select "+n, 1)
		if err := os.WriteFile(filepath.Join(dir, "one.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	must("alter database " + pgx.Identifier{database}.Sanitize() + " allow_connections false")
	must("select pg_terminate_backend(pid) from pg_stat_activity where datname = '" + database + "'")
	write("2")
	watching.find(t, "agent: .+")
	watching.find(t, "the next change of a file tries again")
	must("alter database " + pgx.Identifier{database}.Sanitize() + " allow_connections true")
	write("3")
	pgtest.Eventually(t, pgWait, func() bool {
		return strings.Contains(watching.out.String(), "applied: ~ skill one")
	}, "the change is applied")
	watching.stop()
	if code := <-watching.ended; code != 0 {
		t.Errorf("ended with %d: %s", code, watching.err.String())
	}
}
