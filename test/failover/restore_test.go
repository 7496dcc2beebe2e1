//go:build unix

package failover_test

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// documented runs the one command of docs/retention.md that begins with a word, with programs of the PostgreSQL that
// the tests use.
func documented(t *testing.T, word, dir string, environ ...string) {
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
		t.Skip(err) // the server is another machine's
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), append(environ, "PATH="+binaries.Dir+string(os.PathListSeparator)+os.Getenv("PATH"))...)
	out, err := cmd.CombinedOutput()
	require.Truef(t, err == nil, "%s: %v\n%s", command, err, out)
}

// TestADumpOfALiveDatabaseGoesOnElsewhere: a database is dumped while executions run and wait, with the commands of
// docs/retention.md, the old processes go on for a while and are stopped, and others work on what was restored. What
// waited waits and wakes, what ran is taken over, tokens and claims are larger than any of the old world, and nobody
// who has an old one can write.
func TestADumpOfALiveDatabaseGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("pg_dump needs a session")
	}
	w := newWorld(t, pgtest.URL(t), "30s")
	w.serve(2)
	l := w.newLoad()
	const waiting, running = 8, 2
	for n := 1; n <= waiting; n++ {
		l.start(n)
	}
	pgtest.Eventually(t, patience, func() bool { return pgtest.Value[int](w.t, w.db, asleep) == waiting },
		"all wait for their event")
	w.shut()
	for n := waiting + 1; n <= waiting+running; n++ {
		l.start(n)
	}
	pgtest.Eventually(t, patience, func() bool {
		return w.holds("look") &&
			pgtest.Value[int](w.t, w.db, atWork) == running
	},
		"the others are in the middle of a call")
	pgtest.Exec(w.t, w.db, `select acquire_agent_lock('probe', 'old', 60)`)

	dir := t.TempDir()
	documented(t, "pg_dump", dir, "DATABASE_URL="+w.url)

	// Behind the dump the old world goes on, and takes more claims and tokens.
	pgtest.Exec(w.t, w.db, `select release_agent_lock('probe', 'old')`)
	token := pgtest.Value[int64](w.t, w.db, `select fencing_token from acquire_agent_lock('probe', 'older', 60)`)
	claims := pgtest.Value[int64](w.t, w.db, `select max(claim) from agent_executions`)
	w.open()
	for _, a := range w.agents {
		a.Stop()
	}

	to := pgtest.EmptyURL(t)
	documented(t, "pg_restore", dir, "NEW_DATABASE_URL="+to)
	// the test's own
	run(t, `psql --dbname="$NEW_DATABASE_URL" --command='drop schema told cascade'`, dir, "NEW_DATABASE_URL="+to)
	documented(t, "psql --dbname", dir, "NEW_DATABASE_URL="+to)
	restored := newWorld(t, to, "30s")
	assert.Equal(t, waiting, pgtest.Value[int](restored.t, restored.db, asleep))
	goesOn(restored, waiting+running, token, claims)
}

const (
	asleep = `select count(*)::int from agent_executions where flow = 'errand' and status = 'waiting'
		and waiting_for = 'event'`
	atWork = `select count(*)::int from agent_executions where flow = 'errand' and status = 'running'
		and claimed_by is not null`
)

// goesOn serves a restored database, gives every event, and sees everything end.
func goesOn(w *world, errands int, token, claims int64) {
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
	got := pgtest.Value[int64](w.t, w.db,
		`select fencing_token from acquire_agent_lock('probe', 'new', 60)`)
	assert.Truef(w.t, got > token, "the lane was given with token %d, after %d", got, token)
	beats := pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where surface = 'heartbeat'
		and completed_at is not null`)
	w.serve(2)
	l := w.newLoad()
	l.start(errands + 1) // new work is taken
	for n := 1; n <= errands+1; n++ {
		l.give(n)
	}
	const left = `select count(*)::int from agent_executions where flow = 'errand' and status <> 'completed'`
	pgtest.Eventually(w.t, patience, func() bool { return pgtest.Value[int](w.t, w.db, left) == 0 },
		"every errand ends well")
	said := pgtest.Value[int](w.t, w.db,
		`select count(distinct content)::int from agent_messages where content like '% got [event %' and status = 'sent'`)
	assert.Equal(w.t, errands+1, said, "said what they did")
	// Timers and schedules: a deadline that passed while nobody was there, and the next heartbeat.
	l.start(errands + 2)
	pgtest.Eventually(w.t, patience, func() bool { return pgtest.Value[int](w.t, w.db, asleep) == 1 }, "one waits")
	pgtest.Exec(w.t, w.db, `update agent_executions set waiting_until = clock_timestamp() where flow = 'errand'
		and status = 'waiting'`)
	pgtest.Eventually(w.t, patience, func() bool {
		return pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where flow = 'errand'
			and status = 'timeout'`) == 1 &&
			pgtest.Value[int](w.t, w.db, `select count(*)::int from agent_executions where surface = 'heartbeat'
				and completed_at is not null`) > beats
	}, "its time runs out, and the heart beats")
	w.survived()
}
