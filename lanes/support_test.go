package lanes_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(6)
	pgtest.Main(leaks.Tests{M: m})
}

// grant is a row of acquire_agent_lock.
type grant struct {
	acquired bool
	token    int64
	holder   string
}

func tryAcquire(t testing.TB, db postgres.DB, lane, owner string, ttl int) grant {
	t.Helper()
	g, err := tryAcquireErr(t.Context(), db, lane, owner, ttl)
	require.Truef(t, err == nil, "acquire_agent_lock(%q, %q): %v", lane, owner, err)
	return g
}

func tryAcquireErr(ctx context.Context, db postgres.DB, lane, owner string, ttl int) (g grant, err error) {
	err = db.QueryRow(ctx, `select acquired, coalesce(fencing_token, 0), coalesce(locked_by, '')
		from acquire_agent_lock($1, $2, $3)`,
		lane, owner, ttl).Scan(&g.acquired, &g.token, &g.holder)
	return g, err
}

// mustAcquire acquires a lane that must be free.
func mustAcquire(t testing.TB, db postgres.DB, lane, owner string, ttl int) int64 {
	t.Helper()
	g := tryAcquire(t, db, lane, owner, ttl)
	require.Truef(t, g.acquired, "lane %s was not granted to %s; %s holds it", lane, owner, g.holder)
	return g.token
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	require.NoError(t, tx.Commit(t.Context()))
}

// expire ends the current lease of a lane now.
func expire(t testing.TB, db postgres.DB, lane string) {
	t.Helper()
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = $1`, lane)
}

// laneRow returns all data of a lane, with its row version: it differs after any write.
func laneRow(t testing.TB, db postgres.DB, lane string) string {
	t.Helper()
	return pgtest.Value[string](t, db,
		`select coalesce((select l.xmin || l.ctid::text || l::text from agent_locks l where l.lane = $1), 'none')`, lane)
}

// wantCode fails unless err has the SQLSTATE.
func wantCode(t testing.TB, err error, code string) {
	t.Helper()
	assert.Truef(t, postgres.IsCode(err, code), "error %v, want SQLSTATE %s", err, code)
}

// queryUnblocked is get with retries while another transaction uses the lane, like clients.
func queryUnblocked[T any](t testing.TB, db postgres.DB, query string, args ...any) T {
	t.Helper()
	var v T
	for {
		err := db.QueryRow(t.Context(), query, args...).Scan(&v)
		if postgres.IsCode(err, "55P03") {
			continue
		}
		assert.NoError(t, err, query)
		return v
	}
}

// logs collects log lines.
type logs struct{ testkit.Log }

// want waits for n lines: the lost context ends before the log line.
func (l *logs) want(t testing.TB, n int, words ...string) {
	t.Helper()
	pgtest.Eventually(t, func() bool { return len(l.Lines(words...)) >= n },
		fmt.Sprintf("%d log lines with %q", n, words))
	if got := l.Lines(words...); len(got) != n {
		t.Errorf("%d log lines with %q, want %d; all:\n%s", len(got), words, n, strings.Join(l.Lines(), ""))
	}
}

// faultyDB is a database behind a connection that a test can cut, slow down, or make lose responses.
type faultyDB struct {
	postgres.DB
	disconnected    atomic.Bool
	dropResponses   atomic.Bool
	responseErr     error // replaces a lost response; nil blocks until the caller's time runs out
	delay           time.Duration
	statementCounts sync.Map // *atomic.Int64 by the function that the statement calls
}

func (w *faultyDB) beforeStatement(ctx context.Context, sql string) error {
	for _, name := range []string{
		"renew_agent_locks", "acquire_agent_lock(", "release_agent_lock(@", "acquire_or_enqueue_agent_lock",
		"acquire_agent_locks", "release_agent_lock(w.", "acquire_agent_execution_lock",
	} {
		if strings.Contains(sql, name) {
			n, _ := w.statementCounts.LoadOrStore(name, new(atomic.Int64))
			n.(*atomic.Int64).Add(1)
		}
	}
	if w.disconnected.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if w.delay > 0 {
		select {
		case <-time.After(w.delay):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (w *faultyDB) count(name string) int64 {
	n, ok := w.statementCounts.Load(name)
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}

func (w *faultyDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := w.beforeStatement(ctx, sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	return w.DB.Exec(ctx, sql, args...)
}

func (w *faultyDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := w.beforeStatement(ctx, sql); err != nil {
		return nil, err
	}
	rows, err := w.DB.Query(ctx, sql, args...)
	if err == nil && w.dropResponses.Load() {
		rows.Close()
		return nil, cmp.Or(w.responseErr, context.DeadlineExceeded)
	}
	return rows, err
}

func (w *faultyDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := w.beforeStatement(ctx, sql); err != nil {
		return failedRow{err}
	}
	if w.dropResponses.Load() {
		_, err := w.DB.Exec(ctx, sql, args...)
		return failedRow{cmp.Or(err, w.responseErr, context.DeadlineExceeded)}
	}
	return w.DB.QueryRow(ctx, sql, args...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// newKeeper returns a keeper on db, with its log.
func newKeeper(t testing.TB, db postgres.DB) (*lanes.Keeper, *logs) {
	t.Helper()
	l := new(logs)
	return lanes.NewKeeper(db, lanes.Options{Logger: slog.New(slog.NewTextHandler(l, nil))}), l
}

// runKeeper starts the renewals of k until the test ends.
func runKeeper(t testing.TB, k *lanes.Keeper) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		assert.NoError(t, k.Run(ctx), "Run")
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

// liveClaim returns the first claim of a running execution.
func liveClaim(t testing.TB, db postgres.DB) lanes.Owner {
	t.Helper()
	return lanes.ClaimOwner(pgtest.Value[string](t, db, `
		with w as (insert into agent_workers (name, expires_at) values ('w', clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		select 'fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'f', 'running', id, 1 from w returning id::text`), 1)
}

// acquireLane acquires a lane that must be free, until the end of the test.
func acquireLane(t testing.TB, k *lanes.Keeper, lane string, opts ...lanes.Option) *lanes.Lease {
	t.Helper()
	l, err := k.Acquire(t.Context(), lane, opts...)
	return mustAcquired(t, l, err)
}

// acquireLater waits for a lane in the background, and sends its lease.
func acquireLater(t testing.TB, k *lanes.Keeper, lane string, opts ...lanes.Option) <-chan *lanes.Lease {
	t.Helper()
	got := make(chan *lanes.Lease, 1)
	go func() {
		lease, err := k.AcquireWait(t.Context(), lane, opts...)
		assert.NoError(t, err)
		got <- lease
	}()
	return got
}

// mustAcquired fails the test if the lane was not granted.
func mustAcquired(t testing.TB, l *lanes.Lease, err error) *lanes.Lease {
	t.Helper()
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Release(context.Background()) })
	return l
}
