package resourcefaults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/trace"
)

// TestDatabaseClockJumps moves the clock an hour forward, and back. Forward, every lease seems to have ended, so other
// workers take over claims of live runs. The fence stops the old runs, and each effect happens once. Back, leases last
// longer, and no claim is taken over too early.
func TestDatabaseClockJumps(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	db := admin(t, url)
	// The schema's functions and defaults use clock_timestamp and now without a schema. The search path makes them find
	// these.
	pgtest.Exec(t, db, `
		create schema clock;
		create table clock.jump (by interval not null);
		insert into clock.jump values ('0');
		create function clock.clock_timestamp() returns timestamptz language sql volatile as
		  'select pg_catalog.clock_timestamp() + (select by from clock.jump)';
		create function clock.now() returns timestamptz language sql stable
		  as 'select pg_catalog.now() + (select by from clock.jump)';
		do $$ begin execute format('alter database %I set search_path = public, clock, pg_catalog',
		                           current_database()); end $$`)
	pool := pgtest.Pool(t, url, postgres.Options{ApplicationName: "engine"})
	_, err := migrations.Up(t.Context(), pool)
	require.NoError(t, err)
	pgtest.Exec(t, db, `create table effects (by text not null, what text not null)`)
	ahead := pgtest.Value[bool](t, pool, `select clock_timestamp() < pg_catalog.clock_timestamp() + interval '1 minute'`)
	require.True(t, ahead, "the clock is wrong before it jumps")
	at := newGate()
	steps := func(wait bool) executions.Func {
		return func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			x, _ := executions.Current(ctx)
			for i := range 4 {
				_, err := executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
					if i == 2 {
						at.enter()
					}
					_, err := tx.Exec(ctx, `insert into effects (by, what) values ($1, $2)`, x.ID, fmt.Sprint(i))
					return i, err
				})
				if err != nil {
					return executions.Result{}, err
				}
				if !wait {
					continue
				}
				if _, err := executions.Wait(ctx, "pause", executions.Delay(20*time.Millisecond)); err != nil {
					return executions.Result{}, err
				}
			}
			return executions.Result{}, nil
		}
	}
	flows := map[string]executions.Func{"steps": steps(true), "straight": steps(false)}
	e := engine(t, pool, flows, &testkit.Log{}, func(o *executions.Options) { o.LeaseTTL = 20 * time.Second })
	begin := func(n int, flow string) {
		for range n {
			_, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: flow, Surface: trace.Flow})
			require.NoError(t, err)
		}
	}
	ended := func() {
		eventually(t, "all executions have ended", func() bool {
			return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null`) == 0
		})
	}
	begin(6, "steps")
	testkit.Receive(t, at.entered) // one step is in the middle of its transaction
	pgtest.Exec(t, db, `update clock.jump set by = '1 hour'`)
	close(at.opened)
	begin(6, "steps")
	ended()
	begin(3, "straight") // by this clock, an earlier wait would last an hour longer
	pgtest.Exec(t, db, `update clock.jump set by = '0'`)
	begin(3, "steps")
	ended()
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_executions where status <> 'completed'`))
	if n, most := pgtest.Value[int](t, db, `select count(*) from effects`),
		pgtest.Value[int](t, db, `select count(*) from (select distinct by, what from effects) d`); n != 18*4 || most != n {
		t.Errorf("%d effects, %d of them different, want %d", n, most, 18*4)
	}
}

// TestProcessClockJumps moves the clock of a serving process by hours in both directions. The process keeps its lease,
// its lanes and its schedules, because they follow the database's clock. The program has a time.Now that reads its
// offset from a file.
func TestProcessClockJumps(t *testing.T) {
	t.Parallel()
	if !isLong() {
		return // the build takes minutes; see the package comment
	}
	jump := filepath.Join(t.TempDir(), "jump")
	wrong := func(by time.Duration) {
		text := strconv.Itoa(int(by.Seconds()))
		require.NoError(t, errors.Join(os.WriteFile(jump+".new", []byte(text), 0o600), os.Rename(jump+".new", jump)))
	}
	wrong(-3 * time.Hour)
	url := pgtest.URL(t)
	apply(t, url)
	db := admin(t, url)
	a := serveProgram(t, buildWithClock(t), "", environ(url, "CLOCK_JUMP="+jump))
	assert.True(t, strings.Contains(a.Err.String(), "time="+time.Now().Add(-3*time.Hour).Format("2006-01-02T15")) ||
		strings.Contains(a.Err.String(), "time="+time.Now().UTC().Add(-3*time.Hour).Format("2006-01-02T15")),
		"the process does not have another time")
	var worker string
	eventually(t, "the process has a lease", func() bool {
		worker = pgtest.Value[string](t, db, `select coalesce(max(id::text), '') from agent_workers
			where expires_at > clock_timestamp()`)
		return worker != ""
	})
	var yes acknowledged
	for i, by := range []time.Duration{-3 * time.Hour, 3 * time.Hour, 0, -48 * time.Hour, 48 * time.Hour} {
		wrong(by)
		refused := yes.send(a)
		assert.Truef(t, refused == nil, "%s: %+v", by, refused)
		got := a.request(http.MethodPost, "/v1/executions", fmt.Sprintf(`{"flow": "wide", "input": {"n": %d}}`, i))
		assert.Truef(t, got.status == http.StatusCreated, "%s: %+v", by, got)
		eventually(t, "the flow ends with a clock that is wrong by "+by.String(), func() bool {
			return pgtest.Value[int](t, db,
				`select count(*) from agent_executions where flow = 'wide' and status = 'completed'`) == i+1
		})
		renewed := pgtest.Value[time.Time](t, db, `select expires_at from agent_workers where id = $1`, worker)
		eventually(t, "the lease is renewed", func() bool {
			return pgtest.Value[bool](t, db, `select expires_at > $2 and expires_at < clock_timestamp() + interval '1 minute'
				from agent_workers where id = $1`, worker, renewed)
		})
	}
	yes.checkStored(t, url)
}

// buildWithClock returns the program with a clock that a test can move. CLOCK_JUMP names a file with the offset in
// seconds.
func buildWithClock(t *testing.T) string {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	require.NoError(t, err)
	original := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	source, err := os.ReadFile(original)
	require.NoError(t, err)
	const reads = "\nfunc Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	require.Equal(t, 1, strings.Count(string(source), reads))
	dir := t.TempDir()
	replace := map[string]string{}
	for name, text := range map[string]string{"time.go": strings.Replace(string(source), reads, reads+"\tsec += jump()\n",
		1), "jump.go": jumpSource} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		replace[filepath.Join(filepath.Dir(original), name)] = path
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	built, err := proctest.Build("faults-jumping", "-overlay", filepath.Join(dir, "overlay.json"))
	require.NoError(t, err)
	return built
}

// jumpSource reads the offset of the clock. A goroutine reads the file every few milliseconds, since the runtime also
// calls time.Now where it can make no system call.
const jumpSource = `package time

import (
	"sync/atomic"
	"syscall"
)

var jumped atomic.Int64

func init() {
	jumped.Store(readJump())
	go func() {
		for {
			Sleep(5 * Millisecond)
			jumped.Store(readJump())
		}
	}()
}

func jump() int64 { return jumped.Load() }

func readJump() int64 {
	path, _ := syscall.Getenv("CLOCK_JUMP")
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	var text [24]byte
	n, _ := syscall.Read(fd, text[:])
	syscall.Close(fd)
	var v, sign int64 = 0, 1
	for _, c := range text[:max(n, 0)] {
		switch {
		case c == '-':
			sign = -1
		case '0' <= c && c <= '9':
			v = v*10 + int64(c-'0')
		}
	}
	return sign * v
}
`
