package failover_test

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// One of two processes is killed. Then the database restarts gracefully, crashes, and stays down for a while, in the
// long form for longer than a worker's lease.
func TestDatabaseOutages(t *testing.T) {
	t.Parallel()
	away, lease := 4*time.Second, "30s"
	if isLong() {
		away, lease = time.Minute, "15s"
	}
	s := newServer(t)
	w := newTestEnv(t, urlOf(s), lease)
	w.serve(2)
	l := w.startLoad()
	l.waitCallsBlocked()
	l.kill(0)
	w.releaseCalls()
	l.checkRecovery()
	for _, outage := range []struct {
		how  syscall.Signal
		away time.Duration
	}{{syscall.SIGINT, 0}, {syscall.SIGQUIT, 0}, {syscall.SIGINT, away}} {
		l.waitCallsBlocked()
		s.stop(outage.how)
		if outage.away > 0 {
			w.waitUnready("database")
		}
		w.releaseCalls() // calls get their answers, which cannot be recorded
		testkit.Wait(t.Context(), outage.away)
		w.checkRunning()
		s.start()
		l.checkRecovery()
	}
	for _, a := range w.agents {
		assert.Contains(t, a.Err.String(), "database unavailable, trying again", "not ready: the database does not answer",
			"notification connection lost")
	}
	l.stopAndCheck()
}

// kill ends a process with SIGKILL, ends its lease, and starts another in its place.
func (l *load) kill(i int) {
	l.t.Helper()
	l.agents[i].Kill()
	pgtest.Exec(l.t, l.db, `update agent_workers set expires_at = clock_timestamp() where name like '%pid ' || $1`,
		strconv.Itoa(l.agents[i].Cmd.Process.Pid))
	l.agents[i] = launch(l.t, l.dir, l.environ(), "serve")
	base := l.agents[i].Base()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.baseURLs[i] = base
}

// waitCallsBlocked returns when calls of each skill and of the model are blocked.
func (l *load) waitCallsBlocked() {
	l.t.Helper()
	l.blockCalls()
	pgtest.Eventually(l.t, func() bool { return l.hasBlocked("look", "pay", "model") }, "calls are blocked")
}

// checkRecovery waits until the processes are ready and new work completes.
func (l *load) checkRecovery() {
	l.t.Helper()
	began := time.Now()
	l.waitReady("after the outage")
	before := l.countStarted()
	pgtest.Eventually(l.t, func() bool { return l.countStarted() > before+4 },
		"executions are started after the outage")
	for _, flow := range []string{"errand", "heartbeat"} {
		pgtest.Eventually(l.t, func() bool {
			n := 0
			err := l.db.QueryRow(l.t.Context(), `select count(*) from agent_executions where flow = $1
				and status = 'completed' and created_at > $2`, flow, began).Scan(&n)
			return err == nil && n > 0
		}, flow+": one starts and ends after the outage")
	}
	l.t.Logf("recovered within %s", time.Since(began).Round(time.Millisecond))
}

// TestStandbyPromotion loses the primary while two processes work.
func TestStandbyPromotion(t *testing.T) {
	t.Parallel()
	primary := newServer(t)
	standby := standbyOf(t, primary)
	w := newTestEnv(t, urlOf(primary, standby), "30s")
	w.serve(2)
	l := w.startLoad()
	l.waitCallsBlocked()
	primary.stop(syscall.SIGKILL)
	w.waitUnready("database")
	w.releaseCalls()
	standby.sql(`select pg_promote()`)
	l.checkRecovery()
	l.stopAndCheck()
}

// TestKillMigrateAtEveryRequest kills `agent migrate` with SIGKILL at one request after the other, before it arrives
// and after. It runs the program again on the result, until a run completes. The schema must then equal that of an
// undisturbed migration.
func TestKillMigrateAtEveryRequest(t *testing.T) {
	t.Parallel()
	to := pgtest.EmptyURL(t)
	db := pgtest.Pool(t, to, postgres.Options{MaxConns: 4})
	seen := map[int]int{} // number of runs that ended with that many files applied
	kills, n := 0, 1
	for ; kills < 1000; kills++ {
		done := migrateUntil(t, to, n, kills%2 == 0)
		files := appliedFiles(t, db)
		seen[files]++
		if done {
			break
		}
		n = nextRequest(n, files)
	}
	t.Logf("%d processes were killed; runs that ended with so many files applied: %v", kills, seen)
	assert.Truef(t, kills >= 10, "only %d processes were killed: the test covers too little", kills)
	assert.NoError(t, migrations.Check(t.Context(), db), "in the end")
	want, schemas := pgtest.DB(t), []string{"public", "lanekeeper", "river"}
	assert.NoDiff(t, pgtest.Objects(t, want, schemas...), pgtest.Objects(t, db, schemas...))
	const months = `select count(*) from agent_activity_partitions`
	pgtest.Equal(t, db, pgtest.Value[int](t, want, months), months)
}

// nextRequest returns the request at which the next run dies. Every file costs four requests, and more if it builds
// indexes concurrently. The requests before the files stay the same. So each run advances a little, and dies inside a
// file or between two.
func nextRequest(n, files int) int {
	switch {
	case isLong(), n < 12:
		return n + 1
	case files == 0:
		return n + 7 // River's own migrations
	}
	return 12 + (n+17)%47
}

// migrateUntil runs `agent migrate` and kills it at its nth request: the request or its answer is lost. It reports
// whether the program completed before that.
func migrateUntil(t *testing.T, to string, n int, arrives bool) bool {
	t.Helper()
	started := make(chan *proctest.Process, 1)
	kill := sync.OnceFunc(func() {
		a := <-started
		_ = a.Cmd.Process.Kill() // the process may have ended
		<-a.Ended()
	})
	var requests atomic.Int32
	proxy := pgproxy.Intercept(t, to, func(r pgproxy.Request) pgproxy.Verdict {
		kind := r.Raw[r.Last]
		switch {
		case kind != 'Q' && kind != 'S' || int(requests.Add(1)) != n:
			return pgproxy.Pass
		case arrives:
			go kill() // the server goes on with the request
			return pgproxy.LoseAnswer
		}
		kill()
		return pgproxy.Refuse
	}, kill)
	defer proxy.Close()
	a := launch(t, t.TempDir(), []string{"DATABASE_URL=" + proxy.URL("")}, "migrate")
	started <- a
	code := a.Exit()
	require.Truef(t, code <= 0, "agent migrate, killed at request %d: exit code %d: %s", n, code, a.Err.Tail(30))
	return code == 0
}

// appliedFiles returns the number of applied files. The objects of a file exist exactly if it is recorded: a file fails
// when it is applied twice, or without its predecessors.
func appliedFiles(t *testing.T, db *pgxpool.Pool) int {
	t.Helper()
	if !pgtest.Value[bool](t, db, `select to_regclass('agent_migrations') is not null`) {
		return 0
	}
	return pgtest.Value[int](t, db, `select count(*) from agent_migrations`)
}

// runDocumented runs the command of docs/retention.md that starts with a word, with the tests' PostgreSQL programs.
func runDocumented(t *testing.T, word, dir string, environ ...string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/retention.md")
	require.NoError(t, err)
	found := regexp.MustCompile(`(?m)^    +(`+word+`\b.*)$`).FindAllStringSubmatch(string(text), -1)
	require.Equal(t, 1, len(found), word)
	run(t, found[0][1], dir, environ...)
}

func run(t *testing.T, command, dir string, environ ...string) {
	t.Helper()
	binaries, err := pgserver.FindBinaries(os.Getenv)
	if err != nil {
		t.Skip(err) // the server runs on another machine
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), append(environ, "PATH="+binaries.Dir+string(os.PathListSeparator)+os.Getenv("PATH"))...)
	out, err := cmd.CombinedOutput()
	require.Truef(t, err == nil, "%s: %v\n%s", command, err, out)
}

// TestRestoredDumpContinues dumps a database while executions run and wait, with the commands of docs/retention.md. The
// old processes work on for a while and stop. Others serve the restored database. Waiting executions wait and wake, and
// running ones are taken over. New tokens and claims are larger than all old ones, and no holder of an old one can
// write.
func TestRestoredDumpContinues(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("pg_dump needs a session")
	}
	w := newTestEnv(t, pgtest.URL(t), "30s")
	w.serve(2)
	l := w.newLoad()
	const waiting, running = 8, 2
	for n := 1; n <= waiting; n++ {
		l.startExecution(n)
	}
	pgtest.Eventually(t, func() bool { return pgtest.Value[int](w.t, w.db, asleep) == waiting },
		"all wait for their event")
	w.blockCalls()
	for n := waiting + 1; n <= waiting+running; n++ {
		l.startExecution(n)
	}
	pgtest.Eventually(t, func() bool {
		return w.hasBlocked("look") && pgtest.Value[int](w.t, w.db, atWork) == running
	},
		"the others are in the middle of a call")
	pgtest.Exec(w.t, w.db, `select acquire_agent_lock('probe', 'old', 60)`)

	dir := t.TempDir()
	runDocumented(t, "pg_dump", dir, "DATABASE_URL="+w.url)

	// After the dump, the old processes work on, and take more claims and tokens.
	pgtest.Exec(w.t, w.db, `select release_agent_lock('probe', 'old')`)
	token := pgtest.Value[int64](w.t, w.db, `select fencing_token from acquire_agent_lock('probe', 'older', 60)`)
	claims := pgtest.Value[int64](w.t, w.db, `select max(claim) from agent_executions`)
	w.releaseCalls()
	for _, a := range w.agents {
		a.Stop()
	}

	to := urlOf(newServer(t)) // which has no roles of the old one
	runDocumented(t, "psql .*create role", dir, "NEW_DATABASE_URL="+to)
	runDocumented(t, "pg_restore", dir, "NEW_DATABASE_URL="+to)
	// the schema of the test itself
	run(t, `psql --dbname="$NEW_DATABASE_URL" --command='drop schema truth cascade'`, dir, "NEW_DATABASE_URL="+to)
	runDocumented(t, "psql .*void_agent_leases", dir, "NEW_DATABASE_URL="+to)
	restored := newTestEnv(t, to, "30s")
	assert.Equal(t, waiting, pgtest.Value[int](restored.t, restored.db, asleep))
	checkRestored(restored, waiting+running, token, claims)
}

const (
	asleep = `select count(*)::int from agent_executions where flow = 'errand' and status = 'waiting'
		and waiting_for = 'event'`
	atWork = `select count(*)::int from agent_executions where flow = 'errand' and status = 'running'
		and claimed_by is not null`
)

// checkRestored serves a restored database, sends every event, and waits until everything has ended.
func checkRestored(w *testEnv, errands int, token, claims int64) {
	w.t.Helper()
	lost := pgtest.Column[string](w.t, w.db, fmt.Sprintf(`
		select format('%%s %%s has claim %%s', status, id, claim) from agent_executions where completed_at is null
		  and claim <= %d`, claims))
	assert.Truef(w.t, len(lost) == 0, "claims of the old world are not void: %v", lost)
	for _, id := range pgtest.Column[string](w.t, w.db,
		`select id::text from agent_executions where completed_at is null`) {
		_, err := w.db.Exec(w.t.Context(), `select fence_agent_execution($1, $2)`, id, claims)
		assert.Truef(w.t, postgres.IsCode(err, "LK001"), "a claim of the old world on %s: %v", id, err)
	}
	got := pgtest.Value[int64](w.t, w.db, `select fencing_token from acquire_agent_lock('probe', 'new', 60)`)
	assert.Truef(w.t, got > token, "the lane was given with token %d, after %d", got, token)
	beats := pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where surface = 'heartbeat'
		and completed_at is not null`)
	w.serve(2)
	l := w.newLoad()
	l.startExecution(errands + 1) // the processes accept new work
	for n := 1; n <= errands+1; n++ {
		l.sendEvent(n)
	}
	const left = `select count(*)::int from agent_executions where flow = 'errand' and status <> 'completed'`
	pgtest.Eventually(w.t, func() bool { return pgtest.Value[int](w.t, w.db, left) == 0 },
		"every errand ends well")
	messages := pgtest.Value[int](w.t, w.db,
		`select count(distinct content)::int from agent_messages where content like '% got [event %' and status = 'sent'`)
	assert.Equal(w.t, errands+1, messages, "messages of the executions")
	// Timers and schedules work too: a deadline that passed while no process ran, and the next heartbeat.
	l.startExecution(errands + 2)
	pgtest.Eventually(w.t, func() bool { return pgtest.Value[int](w.t, w.db, asleep) == 1 }, "one waits")
	pgtest.Exec(w.t, w.db, `update agent_executions set waiting_until = clock_timestamp() where flow = 'errand'
		and status = 'waiting'`)
	pgtest.Eventually(w.t, func() bool {
		return pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where flow = 'errand'
			and status = 'timeout'`) == 1 &&
			pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where surface = 'heartbeat'
				and completed_at is not null`) > beats
	}, "its time runs out, and the heart beats")
	w.checkRunning()
}
