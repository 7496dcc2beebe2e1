package lanerun_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/lanes/lanerun"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

func newKeeper(t *testing.T, db *pgxpool.Pool) *lanes.Keeper {
	t.Helper()
	k := lanes.NewKeeper(db, lanes.Options{Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = k.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return k
}

// result is the outcome of a run.
type result struct {
	code     int
	err      error
	out, log string
}

func runCommand(ctx context.Context, k *lanes.Keeper, lane string, ttl time.Duration, argv ...string) result {
	var out, log bytes.Buffer
	code, err := lanerun.RunCommand(ctx, k, lane, ttl, argv,
		lanerun.Stdio{In: strings.NewReader("input"), Out: &out, Err: &log})
	return result{code, err, out.String(), log.String()}
}

func free(t *testing.T, db *pgxpool.Pool, lane string) {
	t.Helper()
	held, err := lanes.Held(context.Background(), db, lane)
	assert.Truef(t, err == nil && !held, "after the run %s is held: %v, %v", lane, held, err)
}

func TestExitCodeIsThatOfCommand(t *testing.T) {
	db := pgtest.DB(t)
	k := newKeeper(t, db)
	for name, test := range map[string]struct {
		argv []string
		code int
		fail bool
	}{
		"success":         {argv: []string{"sh", "-c", "cat; echo; echo done"}},
		"failure":         {argv: []string{"sh", "-c", "exit 7"}, code: 7},
		"signal":          {argv: []string{"sh", "-c", "kill -KILL $$"}, code: 128 + 9},
		"no such command": {argv: []string{"/no/such/command"}, code: lanerun.ExitFailed, fail: true},
		"nothing":         {code: lanerun.ExitFailed, fail: true},
	} {
		t.Run(name, func(t *testing.T) {
			got := runCommand(t.Context(), k, "job", time.Minute, test.argv...)
			assert.Truef(t, got.code == test.code && (got.err != nil) == test.fail,
				"code %d, error %v; want %d, %v", got.code, got.err, test.code, test.fail)
			assert.Truef(t, name != "success" || got.out == "input\ndone\n", "output %q", got.out)
			free(t, db, "job")
		})
	}
}

func TestBusyLaneSkipsCommand(t *testing.T) {
	db := pgtest.DB(t)
	k := newKeeper(t, db)
	l, err := k.Acquire(t.Context(), "job")
	require.NoError(t, err)
	got := runCommand(t.Context(), k, "job", 0, "echo", "ran")
	assert.Truef(t, got.code == 75 && got.err == nil && got.out == "", "busy: %+v, want exit code 75 and no run", got)
	assert.Contains(t, got.log, "level=WARN", `msg="already running, skipped"`, "lane=job", l.Owner().String())
	assert.NoError(t, context.Cause(l.Context()), "the skipped run ended the holder")
	assert.NoError(t, l.Release(t.Context()), "the skipped run freed the lane")
}

// A command that has run must not fail because the database is unavailable afterwards. A caller that sees a failure
// repeats it.
func TestFailedReleaseKeepsExitCode(t *testing.T) {
	db := pgtest.DB(t)
	k := newKeeper(t, db)
	leave := filepath.Join(t.TempDir(), "leave")
	_, done := start(t.Context(), t, k, "while [ ! -e "+leave+" ]; do sleep 0.05; done; exit 7")
	pgtest.Exec(t, db, `alter function lanekeeper.release_agent_lock rename to away`)
	require.NoError(t, os.WriteFile(leave, nil, 0o600))
	got := testkit.Receive(t, done)
	assert.Truef(t, got.code == 7 && got.err == nil &&
		strings.Contains(got.log, `level=WARN msg="lane not released, it ends with its lease" lane=job`), "%+v", got)
}

func TestInvalidInputRunsNothing(t *testing.T) {
	k := newKeeper(t, pgtest.DB(t))
	for name, got := range map[string]result{
		"lane": runCommand(t.Context(), k, "", 0, "echo", "ran"),
		"ttl":  runCommand(t.Context(), k, "job", -time.Second, "echo", "ran"),
	} {
		assert.Truef(t, got.code == lanerun.ExitFailed && errors.Is(got.err, lanes.ErrInvalid) && got.out == "",
			"bad %s: %+v", name, got)
	}
}

// start runs a command that writes its process id to a file, and returns that id.
func start(ctx context.Context, t *testing.T, k *lanes.Keeper, script string) (pid int, done <-chan result) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pid")
	finished := make(chan result, 1)
	go func() {
		script = "echo $$ > " + file + ".new; mv " + file + ".new " + file + "; " + script
		finished <- runCommand(ctx, k, "job", 9*time.Second, "sh", "-c", script)
	}()
	pgtest.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, "the command runs")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, c := range strings.TrimSpace(string(text)) {
		pid = pid*10 + int(c-'0')
	}
	return pid, finished
}

// gone checks that no process of the command's group is left.
func gone(t *testing.T, pid int) {
	t.Helper()
	pgtest.Eventually(t, func() bool { return errors.Is(syscall.Kill(-pid, 0), syscall.ESRCH) }, "the group is gone")
}

func TestLostLaneKillsProcessGroup(t *testing.T) {
	db := pgtest.DB(t)
	pid, done := start(t.Context(), t, newKeeper(t, db), "sleep 60 & wait")
	broken, err := lanes.Break(t.Context(), db, "job", "test")
	require.Truef(t, err == nil && broken, "Break: %v, %v", broken, err)
	if got := testkit.Receive(t, done); got.code != lanerun.ExitFailed || !errors.Is(got.err, lanes.ErrLost) ||
		!strings.HasSuffix(got.err.Error(), "an admin broke it: test") {
		t.Errorf("lost: %+v, want exit code 1 and ErrLost", got)
	}
	gone(t, pid)
}

// lanes run kills a command that ignores SIGTERM after the grace period.
func TestCommandIgnoringSIGTERMIsKilled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	db := pgtest.DB(t)
	pid, done := start(ctx, t, newKeeper(t, db), "trap '' TERM; while :; do sleep 1; done")
	cancel()
	got := testkit.Receive(t, done)
	assert.Truef(t, got.code == lanerun.ExitFailed && errors.Is(got.err, context.Canceled), "cancelled: %+v", got)
	gone(t, pid)
	free(t, db, "job")
}

func TestSignalsAreForwarded(t *testing.T) {
	db := pgtest.DB(t)
	ready := filepath.Join(t.TempDir(), "ready")
	_, done := start(t.Context(), t, newKeeper(t, db), "trap 'exit 9' USR1; touch "+ready+"; while :; do sleep 0.05; done")
	pgtest.Eventually(t, func() bool { _, err := os.Stat(ready); return err == nil }, "the trap is set")
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR1))
	got := testkit.Receive(t, done)
	assert.Truef(t, got.code == 9 && got.err == nil, "signalled: %+v, want exit code 9", got)
	free(t, db, "job")
}
