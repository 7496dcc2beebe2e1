package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// withoutDatabase are the commands that open no database.
var withoutDatabase = map[string]bool{"version": true, "help": true, "healthcheck": true, "flows schema": true, "demo": true, "init": true}

// Every command that opens the database refuses one that a newer version migrated, with what to do about it, and leaves it as it is. A
// command that is added later is held to it too: it is called in ways that fit most.
func TestEveryCommandRefusesANewerSchema(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	if _, err := pool.Exec(t.Context(), `insert into agent_migrations (version, name, hash) values (9999, '9999_later.sql', 'x')`); err != nil {
		t.Fatal(err)
	}
	p := on(t, url, "AGENT_ADMIN_TOKEN=a-long-random-text-for-tests", "AGENT_LISTEN=127.0.0.1:0")
	before := written(t, p, url)
	for name, cmd := range everyCommand(t) {
		if !cmd.Runnable() || withoutDatabase[name] || strings.HasPrefix(name, "completion") || name == "" {
			continue
		}
		refuses(t, p, name, cmd)
	}
	if after := written(t, p, url); after != before {
		t.Errorf("rows were written: %s before, %s after", before, after)
	}
}

// refuses calls a command with arguments that may fit, until it comes to the database.
func refuses(t *testing.T, p program, name string, cmd *cobra.Command) {
	t.Helper()
	const id = "01890000-0000-7000-8000-000000000000"
	words := strings.Fields(name)
	for flag, value := range map[string]string{"reason": "why", "as": "me"} {
		if cmd.Flags().Lookup(flag) != nil {
			words = append(words, "--"+flag, value)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte("kind: objective\nname: a\ngoal: b\nsteps: [c]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var last answer
	for _, args := range [][]string{nil, {dir}, {id}, {id, "x"}, {"fl_01JQZ8W3T5N7R9V1X3Z5B7D9F1"}, {"x", "--", "true"}, {"EVENT_COMPLETED", "x"}, {"activity=90d"}} {
		last = p.run(append(slices.Clip(words), args...)...)
		if args == nil && cmd.HasSubCommands() && strings.Contains(last.out, "Usage:") {
			return // only a name for the commands below it
		}
		if strings.Contains(last.err+last.out, "migrated by a newer version of agent; use that version or newer") {
			if last.code != exitUsage && name != "doctor" {
				t.Errorf("agent %s: exit %d, want %d", name, last.code, exitUsage)
			}
			return
		}
	}
	t.Errorf("agent %s does not refuse a newer schema: exit %d, %s%s", name, last.code, last.out, last.err)
}

// written counts what the commands might have written.
func written(t *testing.T, p program, url string) (rows string) {
	t.Helper()
	err := connect(p.t, url).QueryRow(t.Context(), `
		select concat_ws(' ', (select count(*) from agent_activity), (select count(*) from agent_skills), (select count(*) from agent_executions),
		       (select count(*) from agent_workers), (select count(*) from agent_locks), (select count(*) from agent_memory))`).Scan(&rows)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}
