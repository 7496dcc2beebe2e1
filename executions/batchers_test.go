package executions_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Many callers run executions at once, and flows that fail or panic disturb no other: each execution ends once, with
// its checkpoints.
func TestManyCallersShareTheirWrites(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var ran atomic.Int32
	p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		switch ran.Add(1) % 8 {
		case 1:
			panic("of the flow")
		case 2:
			return executions.Result{}, errors.New("of the flow")
		}
		return ends(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}), func(o *executions.Options) { o.LeaseTTL = time.Minute })
	var group errgroup.Group
	for range 48 {
		group.Go(func() error {
			for range 20 {
				x, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
				if err != nil {
					return err
				}
				if x.Status != executions.Completed && x.Status != executions.Failed {
					return fmt.Errorf("execution %s is %s", x.ID, x.Status)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if n := value[int](t, pool, `
		select count(*) from agent_executions x where x.completed_at is null
		    or (select count(*) from agent_events v where v.execution_id = x.id) <> 1
		    or (select count(*) from agent_checkpoints c where c.execution_id = x.id) <> (x.status = 'completed')::int`); n != 0 {
		t.Errorf("%d of the executions are not as they should have ended", n)
	}
}

// A crash of the database may take a start along that nothing durable has followed. Then there has been no execution:
// its run ends with an error that says so, and nothing of it is written.
func TestAStartThatACrashTookHasNeverBeen(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "executions-") //nolint:usetesting // the test's own folder is closed to the server's user
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	open := func() (*pgserver.Server, *pgxpool.Pool) {
		server, err := pgserver.Start(t.Context(), pgserver.Config{Dir: dir, Durable: true})
		if err != nil {
			t.Fatal(err)
		}
		pool, err := postgres.Open(t.Context(), server.URL(), postgres.Options{MaxConns: 8, ApplicationName: "test"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { pool.Close(); _ = server.Stop(context.WithoutCancel(t.Context())) })
		return server, pool
	}
	server, pool := open()
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	lease := func(o *executions.Options) { o.LeaseTTL = time.Minute }
	p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}), lease)
	spec := executions.Spec{Flow: "flow", Surface: trace.Flow}
	durable, err := p.RunNow(t.Context(), spec) // which begins the lease
	if err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `alter system set wal_writer_delay = '10s'`)
	exec(t, pool, `select pg_reload_conf()`)
	pgtest.Eventually(t, patience, func() bool { return value[string](t, pool, `show wal_writer_delay`) == "10s" }, "the server writes seldom by itself")
	time.Sleep(time.Second) // the pause that its writer was in is over
	lost, err := p.StartSeveral(t.Context(), []executions.Spec{spec, spec}, []bool{true, true})
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(server.Dir(), "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.SplitN(string(content), "\n", 2)[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	_ = server.Stop(t.Context())
	<-server.Done()
	pool.Close()
	_, pool = open()
	p = prepare(t, pool, p.flows, lease)
	if x, err := p.RunClaimed(t.Context(), lost[0]); !errors.Is(err, executions.ErrNotFound) || !strings.Contains(err.Error(), "crash of the database") {
		t.Errorf("a run whose start is lost: %v, %v", x.Status, err)
	}
	if n := value[int](t, pool, `
		select (select count(*) from agent_executions where id <> @id::uuid) + (select count(*) from agent_events where execution_id <> @id::uuid)
		     + (select count(*) from agent_checkpoints where execution_id <> @id::uuid)`, postgres.Strict{"id": durable.ID}); n != 0 {
		t.Errorf("%d rows of executions that were lost", n)
	}
	if x := get(t, pool, durable.ID); x.Status != executions.Completed {
		t.Errorf("what had ended is %s", x.Status)
	}
}

// awaitsStandby returns when a commit of this server waits for a standby. Its sessions know of the setting sooner:
// commits wait from when the server's checkpointer has read it.
func awaitsStandby(t *testing.T, url string) {
	t.Helper()
	watch, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Close(context.WithoutCancel(t.Context())) }()
	for range 1000 {
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		pid := conn.PgConn().PID()
		ctx, leave := context.WithTimeout(t.Context(), patience)
		ended := make(chan error, 1)
		go func() {
			_, err := conn.Exec(ctx, `create table if not exists committed (n int)`)
			if err == nil {
				_, err = conn.Exec(ctx, `insert into committed values (1)`)
			}
			ended <- err
		}()
		var waits bool
		pgtest.Eventually(t, patience, func() bool {
			if len(ended) > 0 {
				return true
			}
			waits = value[bool](t, watch, `select exists (select from pg_stat_activity where pid = $1 and wait_event = 'SyncRep')`, pid)
			return waits
		}, "a commit ends, or waits for a standby")
		leave()
		<-ended
		_ = conn.Close(context.WithoutCancel(t.Context()))
		if waits {
			return
		}
	}
	t.Fatal("no commit waits for a standby")
}

// A start for others waits until it is on disk, and where a standby has to have it, until that has. One for a caller
// who runs it here does not: its end does. A standby that never comes tells which is which.
func TestWhatIsRunHereIsOnDiskWithItsEnd(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Config{Ephemeral: true, Durable: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	pool, err := postgres.Open(t.Context(), server.URL(), postgres.Options{MaxConns: 8, ApplicationName: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	p := prepare(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }),
		func(o *executions.Options) { o.LeaseTTL = time.Minute })
	spec := executions.Spec{Flow: "flow", Surface: trace.Flow}
	if _, err := p.RunNow(t.Context(), spec); err != nil { // which begins the lease
		t.Fatal(err)
	}
	exec(t, pool, `alter system set synchronous_standby_names = 'nobody'`)
	exec(t, pool, `select pg_reload_conf()`)
	awaitsStandby(t, server.URL())
	specs := []executions.Spec{spec, spec}
	begin := func(here ...bool) ([]executions.Execution, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		return p.StartSeveral(ctx, specs, here)
	}
	got, err := begin(true, true)
	if err != nil {
		t.Fatalf("starts that are run here wait for the standby: %v", err)
	}
	if got, err := begin(true, false); err == nil {
		t.Errorf("%d starts, of which one is for others, did not wait for the standby", len(got))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := pool.Exec(ctx, `
		select from lanekeeper.complete_agent_executions(array[$1, $2]::uuid[], '{1,1}', '[{"status": "completed"}, {"status": "completed"}]')`, min(got[0].ID, got[1].ID), max(got[0].ID, got[1].ID)); err == nil {
		t.Error("ends did not wait for the standby")
	}
	// Its lease has ended, of which the process does not know: it is told that they are in the queue.
	exec(t, pool, `with c as (select set_config('synchronous_commit', 'local', true)) update agent_workers set expires_at = clock_timestamp() from c`)
	if got, err := begin(true, true); err == nil {
		t.Errorf("starts that nobody has claimed did not wait for the standby: %s, %s", got[0].Status, got[1].Status)
	}
	exec(t, pool, `alter system reset synchronous_standby_names`)
	exec(t, pool, `select pg_reload_conf()`)
}
