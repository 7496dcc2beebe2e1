//go:build unix

package failover_test

import (
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// counter stands between a process and the database, counts the requests of all its connections, and says of one that
// it must not arrive, or that it arrives and its answer is not heard.
type counter struct {
	*pgproxy.Proxy

	mu     sync.Mutex
	n      int
	at     int  // the request to die of; 0 for none
	before bool // it arrives
	die    func()
}

// count begins to count, for a process that is killed at request n.
func (c *counter) count(n int, before bool, die func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n, c.at, c.before, c.die = 0, n, before, die
}

// newCounter makes one before a database.
func newCounter(t testing.TB, to string) *counter {
	t.Helper()
	c := &counter{}
	c.Proxy = pgproxy.Listen(t, to, func(client, server net.Conn) pgproxy.Link { return &counted{c, client, server} })
	return c
}

// counted is one connection through a counter.
type counted struct {
	*counter

	client, server net.Conn
}

// Upstream carries what a client says, up to the request to die of.
func (c *counted) Upstream() {
	pgproxy.Forward(c.client, c.server, func(r pgproxy.Request) bool {
		last, arrives := false, true
		if kind := r.Raw[r.Last]; kind == 'Q' || kind == 'S' {
			last, arrives = c.step()
		}
		var err error
		if arrives {
			_, err = c.server.Write(r.Raw)
		}
		if last {
			c.die()
		}
		return err == nil && !last
	})
}

// Downstream carries what the server answers.
func (c *counted) Downstream() { pgproxy.Answers(c.server, c.client, func() bool { return false }) }

// step counts a request, and says whether it is the one to die of and whether it arrives.
func (c *counter) step() (last, arrives bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	last = c.n == c.at
	return last, !last || c.before
}

// TestMigrateIsKilledAtEveryRequest kills `agent migrate` with -9 at one request after the other, before it arrives
// and after, and runs it again on what is there, until it comes through. The schema is then that of a database that
// was migrated in peace.
func TestMigrateIsKilledAtEveryRequest(t *testing.T) {
	t.Parallel()
	to := pgtest.EmptyURL(t)
	c := newCounter(t, to)
	db := connect(t, to)
	seen := map[int]int{} // how often a run ended with so many files applied
	kills, n := 0, 1
	for ; kills < 1000; kills++ {
		done := migrateUntil(t, c, n, kills%2 == 0)
		files := appliedFiles(t, db)
		seen[files]++
		if done {
			break
		}
		n = nextRequest(n, files)
	}
	t.Logf("%d processes were killed; runs that ended with so many files applied: %v", kills, seen)
	assert.Truef(t, kills >= 10, "%d processes were killed: the test does not show what it is for", kills)
	assert.NoError(t, migrations.Check(t.Context(), db), "in the end")
	if got, want := shape(t, db), shape(t, pgtest.DB(t)); got != want {
		t.Errorf("the schema differs from that of a database that was migrated in peace: %s, not %s", got, want)
	}
}

// nextRequest is where the next run dies. Every file costs four requests, one that builds indexes concurrently some
// for each of them, and those before it some that do not change: so a run gets on a little, and dies inside a file or
// between two.
func nextRequest(n, files int) int {
	switch {
	case long(), n < 12:
		return n + 1
	case files == 0:
		return n + 7 // River's own migrations
	}
	return 12 + (n+17)%47
}

// migrateUntil runs `agent migrate` up to its nth request, and reports whether it ended well before that.
func migrateUntil(t *testing.T, c *counter, n int, before bool) bool {
	t.Helper()
	started := make(chan *proctest.Process, 1)
	var once sync.Once
	c.count(n, before, func() {
		once.Do(func() {
			a := <-started
			_ = a.Cmd.Process.Kill() // it may have ended
			<-a.Ended()
		})
	})
	a := launch(t, t.TempDir(), []string{"DATABASE_URL=" + c.URL("")}, "migrate")
	started <- a
	code := a.Exit()
	require.Truef(t, code <= 0, "agent migrate, killed at request %d: exit code %d: %s", n, code, a.Err.Tail(30))
	return code == 0
}

func connect(t *testing.T, to string) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, to, postgres.Options{MaxConns: 4, ApplicationName: "test"})
}

// appliedFiles is how many files are applied. What a file makes is there exactly when it is recorded: the files are
// known to fail when they are applied twice, and not to apply without those before.
func appliedFiles(t *testing.T, db *pgxpool.Pool) int {
	t.Helper()
	if !pgtest.Value[bool](t, db, `select to_regclass('agent_migrations') is not null`) {
		return 0
	}
	return pgtest.Value[int](t, db, `select count(*) from agent_migrations`)
}

// shape is a digest of everything in the schema of a database, and of River's.
func shape(t *testing.T, db *pgxpool.Pool) string {
	t.Helper()
	var digest string
	err := db.QueryRow(t.Context(), `
		with spaces as (select oid from pg_namespace where nspname in ('public', 'lanekeeper', 'river')),
		parts as (
		  select c.oid::regclass::text || c.relkind::text || coalesce(a.attname || format_type(a.atttypid,
		    a.atttypmod) || a.attnotnull, '') as part
		    from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
		   where c.relnamespace in (select oid from spaces)
		  union all
		  select pg_get_functiondef(p.oid) from pg_proc p where p.pronamespace in (select oid from spaces) and p.prokind = 'f'
		  union all
		  select pg_get_indexdef(i.indexrelid) || i.indisvalid from pg_index i join pg_class c on c.oid = i.indrelid
		    where c.relnamespace in (select oid from spaces)
		  union all
		  select conrelid::regclass::text || pg_get_constraintdef(oid) from pg_constraint
		    where connamespace in (select oid from spaces)
		  union all
		  select pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = t.tgrelid
		   where c.relnamespace in (select oid from spaces) and not t.tgisinternal)
		select count(*) || ' ' || md5(string_agg(part, ' ' order by part)) from parts`).Scan(&digest)
	require.NoError(t, err)
	return digest
}

// TestTwoProcessesMigrateAtOnce on an empty database: one does it, both say that it is done.
func TestTwoProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	to := pgtest.EmptyURL(t)
	var all []*proctest.Process
	for range 2 {
		all = append(all, launch(t, t.TempDir(), []string{"DATABASE_URL=" + to}, "migrate"))
	}
	applied := 0
	for _, a := range all {
		assert.Equal(t, 0, a.Exit(), a.Err.Tail(30))
		applied += strings.Count(a.Out.String(), "applied ")
	}
	n := appliedFiles(t, connect(t, to))
	assert.Truef(t, applied == n && n != 0, "the two say that they applied %d files, and %d are", applied, n)
}
