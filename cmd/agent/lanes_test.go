package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestLanesRunExitCode(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	tests := map[string]struct {
		command []string
		code    int
		out     string
	}{
		"success":             {[]string{"echo", "done"}, 0, "done\n"},
		"failure":             {[]string{"sh", "-c", "exit 7"}, 7, ""},
		"a code of our own":   {[]string{"sh", "-c", "exit 75"}, 75, ""},
		"a signal":            {[]string{"sh", "-c", "kill -TERM $$"}, 128 + 15, ""},
		"another":             {[]string{"sh", "-c", "kill -KILL $$"}, 128 + 9, ""},
		"flags of the others": {[]string{"echo", "--json", "-h", "--ttl", "x", "--", "-z"}, 0, "--json -h --ttl x -- -z\n"},
		"an empty argument":   {[]string{"sh", "-c", `echo "$#:$2"`, "sh", "", "a b"}, 0, "2:a b\n"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for _, before := range [][]string{{"pipeline:x"}, {"pipeline:x", "--ttl", "1h"}, {"--ttl=90s", "pipeline:x"}} {
				args := append(append([]string{"lanes", "run"}, before...), append([]string{"--"}, test.command...)...)
				got := p.run(args...)
				assert.Truef(t, got.code == test.code && got.out == test.out && got.err == "",
					"agent %q: exit %d, stdout %q, stderr %q, want %d and %q", args, got.code, got.out, got.err, test.code, test.out)
				assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
			}
		})
	}
}

func TestLanesRunStreams(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	got := p.runWith(t.Context(), strings.NewReader("input"), "lanes", "run", "x", "--", "sh", "-c", "cat; echo told >&2")
	assert.Equal(t, (commandResult{0, "input", "told\n"}), got)
}

func TestLanesRunUnknownCommand(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	got := p.run("lanes", "run", "x", "--", "/no/such/command")
	assert.Truef(t, got.code == 1 && strings.HasPrefix(got.err, "agent: run /no/such/command: "),
		"exit %d, stderr %q", got.code, got.err)
	assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
}

// checkSkipped checks that n actions of a name are recorded as skipped, with the holder of the lane.
func checkSkipped(t *testing.T, db *pgxpool.Pool, name, holder string, n int) {
	t.Helper()
	pgtest.Equal(t, db, n, `select count(*) from agent_activity a where a.skill_name = $1 and a.status = 'skipped'
		and (strpos(a.output::text, $2) > 0 or strpos(a.error_message, $2) > 0)`, name, holder)
}

// Every command skips a busy lane and names its holder.
func TestCommandsSkipBusyLane(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	db := connect(t, url)
	p.must("skills", "call", "objective_propose", "--args", `{"name":"tidy","goal":"all is tidy","steps":["one"]}`)
	p.must("objectives", "accept", "tidy")
	p.must("skills", "call", "automation_propose", "--args",
		`{"name":"watch","cron":"0 9 * * *","skill":"recent_activity"}`)
	p.must("automations", "accept", "watch")
	pgtest.Exec(t, db, `
		select try_acquire_agent_lock('objective:' || id, 'somebody', 600) from agent_objectives
		union all select try_acquire_agent_lock('automation:' || id, 'somebody', 600) from agent_automations`)
	got := p.run("skills", "call", "objective_advance", "--args", `{"objective":"tidy","step":"one","result":"done"}`)
	assert.Truef(t, got.code != 0, "a busy objective was advanced: %+v", got)
	assert.Contains(t, got.err, "somebody")
	checkSkipped(t, db, "objective_advance", "somebody", 1)
	got = p.run("automations", "run", "watch")
	assert.Equal(t, exitBusy, got.code, got)
	assert.Contains(t, got.err, "skipped", "somebody")
	checkSkipped(t, db, "run_automation", "somebody", 1)
	pgtest.Equal(t, db, 0, `select count(*) from agent_automation_runs`)
}

// Breaking a lane used by an open transaction names the transaction.
func TestLanesReleaseNamesHolder(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	db := connect(t, url)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, db, `select try_acquire_agent_lock('pipeline:x', 'somebody', 600)`)
	pgtest.Exec(t, tx, `select fence_agent_lock(lane, fencing_token) from agent_locks`)
	got := p.run("lanes", "release", "pipeline:x")
	assert.Equal(t, exitFailed, got.code, got)
	assert.Contains(t, got.err, "in use by pid", "(test)", "pg_terminate_backend")
}

func TestLanesRunSkipsWhenBusy(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	db := connect(t, url)
	pgtest.Exec(t, db, `select try_acquire_agent_lock('pipeline:x', 'somebody', 600)`)
	mark := filepath.Join(t.TempDir(), "mark")
	got := p.run("lanes", "run", "pipeline:x", "--", "touch", mark)
	assert.Equal(t, 75, got.code)
	assert.Equal(t, "", got.out)
	assert.Contains(t, got.err, "level=WARN", "already running, skipped", "pipeline:x", "somebody")
	assert.Contains(t, newProgram(t, url, "AGENT_LOG_FORMAT=json").run("lanes", "run", "pipeline:x", "--", "touch",
		mark).err, `"level":"WARN","msg":"already running, skipped","lane":"pipeline:x"`)
	asJSON := p.run("lanes", "run", "--json", "pipeline:x", "--", "touch", mark)
	assert.Equal(t, 75, asJSON.code)
	assert.Contains(t, asJSON.err, `{"error":{"code":"lane_busy"`)
	_, err := os.Stat(mark)
	assert.Error(t, err, "the command ran without the lane")
	checkSkipped(t, db, "run_in_lane", "somebody", 3)
	assert.Contains(t, p.must("lanes", "ls"), "pipeline:x", "somebody")
	var page struct{ Items []map[string]any }
	p.mustJSON(&page, "lanes", "ls")
	assert.Truef(t, len(page.Items) == 1 && page.Items[0]["locked_by"] == "somebody", "got %v", page.Items)

	assert.Equal(t, "released pipeline:x\n", p.must("lanes", "release", "pipeline:x", "--reason", "the import hangs"))
	assert.Contains(t, p.must("lanes", "run", "pipeline:x", "--", "echo", "ran"), "ran")
	got = p.run("lanes", "release", "pipeline:x")
	assert.Truef(t, got.code == 1 && got.err == "agent: lane \"pipeline:x\" is not "+
		"held; see agent lanes ls\n", "released twice: exit %d, stderr %q", got.code, got.err)
	assert.Contains(t, p.must("activity", "ls"), "break_lane")
	got = p.run("lanes", "release", "execution:x")
	assert.Equal(t, "agent: execution:x is an execution, not a lane; agent executions cancel x ends it\n", got.err)
}

// An invalid lane or TTL exits with 2; the command does not run and nothing is written.
func TestLanesRunInvalidLane(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	mark := filepath.Join(t.TempDir(), "mark")
	for _, lane := range []string{"", strings.Repeat("x", 256), "a\nb", "a\x1b[31m", "tab\there"} {
		for _, args := range [][]string{{"lanes", "run", lane, "--", "touch", mark}, {"lanes", "release", lane}} {
			got := p.run(args...)
			assert.Truef(t, got.code == 2 && got.out == "" && strings.Count(got.err, "\n") == 1 &&
				strings.Contains(got.err, "1 to 255 printable characters"), "agent %.40q: exit %d, stdout %q, stderr %q", args,
				got.code, got.out, got.err)
		}
	}
	for _, ttl := range []string{"0", "-1s", "31d", "abc", "", "999ms"} {
		got := p.run("lanes", "run", "x", "--ttl="+ttl, "--", "touch", mark)
		assert.Truef(t, got.code == 2, "--ttl %q: exit %d, stderr %q", ttl, got.code, got.err)
	}
	_, err := os.Stat(mark)
	assert.Error(t, err, "a command ran")
	pgtest.Equal(t, connect(t, url), 0, `
		select (select count(*) from agent_locks) + (select count(*) from agent_activity)`)
	got := p.run("lanes", "run", strings.Repeat("x", 255), "--ttl", "30d", "--", "true")
	assert.Truef(t, got.code == 0, "the longest lane for the longest time: exit %d, stderr %q", got.code, got.err)
}

// lanes run renews the lane while its command outlasts the TTL.
func TestLanesRunRenewsLane(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), "AGENT_LOG_LEVEL=info")
	got := p.run("lanes", "run", "x", "--ttl", "10s", "--", "sh", "-c", "sleep 12; echo whole")
	assert.Equal(t, 0, got.code, got)
	assert.Equal(t, "whole\n", got.out, got)
	assert.Truef(t, !strings.Contains(got.err, "lane lost") && !strings.Contains(got.err, "[redacted]"),
		"stderr: %s", got.err)
}

func TestLanesRunStopsCommand(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	s := p.start("lanes", "run", "x", "--", "sh", "-c", "echo started >&2; sleep 60 & wait")
	s.find(t, "started")
	s.stop()
	if code := <-s.ended; code != 1 || !strings.Contains(s.err.String(), "agent: run sh: ended: ") {
		t.Errorf("exit %d, stderr %q", code, s.err.String())
	}
	assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
}

func TestLanesDisabled(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `select try_acquire_agent_lock('x', 'somebody', 600)`)
	require.NoError(t, err)
	got := newProgram(t, url, "AGENT_LANES=off").run("lanes", "run", "x", "--", "echo", "ran")
	assert.Truef(t, got.code == 0 && got.out == "ran\n" && strings.Count(got.err, "level=WARN") == 1, "got %+v", got)
}

// Signals, including a second one, go to the command. lanes run releases the lane when the command ends.
func TestLanesRunUnderSignals(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		script  string
		answers []string // the command's output before each signal
		code    int
	}{
		"that end the command": {`echo ready; sleep 60 & wait`, []string{"ready"}, 128 + 15},
		"that the command answers to": {
			`trap 'trap "echo cleaned; exit 3" TERM; echo cleaning; sleep 60 & wait' TERM; echo ready; sleep 60 & wait`,
			[]string{"ready", "cleaning"},
			3,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := newProgram(t, pgtest.URL(t))
			var out, errs testkit.Log
			cmd := exec.Command(os.Args[0], "lanes", "run", "pipeline:x", "--", "sh", "-c", test.script)
			cmd.Env = append(append(os.Environ(), asAgent+"=1"), p.environ...)
			cmd.Stdout, cmd.Stderr = &out, &errs
			cmd.WaitDelay = 10 * time.Second
			require.NoError(t, cmd.Start())
			for _, answer := range test.answers {
				pgtest.Eventually(t, func() bool { return strings.Contains(out.String(), answer) },
					"the command says "+answer)
				assert.Contains(t, p.must("lanes", "ls"), "pipeline:x")
				require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			}
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != test.code {
				t.Errorf("exit %d (%v), stdout %q, stderr %q, want %d", code, err, out.String(), errs.String(), test.code)
			}
			assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
		})
	}
}

func TestTimeFormat(t *testing.T) {
	t.Parallel()
	zone := time.FixedZone("elsewhere", 3600)
	assert.Equal(t, "2025-12-31 23:30:00", formatTime(time.Date(2026, 1, 1, 0, 30, 0, 0, zone)))
	for ms, want := range map[int64]string{0: "0 ms", 12: "12 ms", 1500: "1.5 s"} {
		assert.Equal(t, want, formatMillis(&ms), ms)
	}
	assert.Equal(t, "…1 min 1 s$0.5025 %", fmt.Sprint(formatMillis(nil), human.Seconds(61), human.Money(0.5),
		human.Percent(0.25)))
}

// A lost lane ends the command at once, long before the next renewal.
func TestLanesRunStopsOnLostLane(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	mark := filepath.Join(t.TempDir(), "mark")
	done := make(chan commandResult, 1)
	go func() { done <- p.run("lanes", "run", "pipeline:x", "--", "sh", "-c", "touch "+mark+"; exec sleep 99") }()
	pgtest.EventuallyWithin(t, 30*time.Second, func() bool { _, err := os.Stat(mark); return err == nil },
		"the command runs")
	p.must("lanes", "release", "pipeline:x")
	began := time.Now()
	got := <-done
	assert.Truef(t, got.code != 0 && time.Since(began) <= time.Minute, "after %s: %+v", time.Since(began), got)
}
