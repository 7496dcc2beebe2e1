package threads_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
)

func TestMessagesOfOthersQueueAndLeaveInTheirOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, "")
	s := saysAs(t, db, a, "a1")
	assert.Truef(t, !s.Queued && *s.Seq == 1, "the first: %+v", s)
	for _, m := range []struct{ id, words string }{{b, "b1"}, {c, "c1"}, {b, "b2"}} {
		s := saysAs(t, db, m.id, m.words)
		assert.Truef(t, s.Queued && s.Seq == nil && strings.HasPrefix(s.Holder, a), "%s: %+v", m.words, s)
	}
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '1 minute'
		where lane = 'thread:t'`)
	s = saysAs(t, db, a, "a2")
	assert.Truef(t, !s.Queued, "the holder's second: %+v", s)
	assert.True(t, pgtest.Value[bool](t, db, `select expires_at > clock_timestamp() + interval '5 minutes' from agent_locks
		where lane = 'thread:t'`), "a send does not renew the lease")
	ends(t, db, a, "completed")
	flushes(t, db).want(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner="+b+"#1", "fencing_token="+
		pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`))
	assert.Equal(t, "", flushes(t, db).String(), "the lane stays with its holder")
	if diff := cmp.Diff([]string{"a1", "a2", "b1", "b2"}, spoken(t, db, "t")); diff != "" { // b has the thread by now
		t.Errorf("said (-want +got):\n%s", diff)
	}
	ends(t, db, b, "failed")
	swept := &journal{}
	sweep := func() {
		_, err := executions.FlushThreads(t.Context(), db, slog.New(slog.NewTextHandler(swept, nil)), 10)
		require.NoError(t, err)
	}
	sweep()
	token := pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`)
	swept.want(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner="+c+"#1", "fencing_token="+token)
	saysAs(t, db, c, "c2")
	sweep()
	assert.Equal(t, 1, strings.Count(swept.String(), "lane acquired"), swept)
	assert.NoDiff(t, []string{"a1", "a2", "b1", "b2", "c1", "c2"}, spoken(t, db, "t"))
}

// The thread is free, but the executions in its queue have no notification yet.
func TestNobodyOvertakesTheQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	saysAs(t, db, b, "b")
	ends(t, db, a, "completed")
	s := saysAs(t, db, c, "c")
	assert.Truef(t, s.Queued && strings.HasPrefix(s.Holder, b), "the last: %+v", s)
	assert.NoDiff(t, []string{"a", "b"}, spoken(t, db, "t"))
}

// A parent that has its thread back sends its queued messages before new ones.
func TestAHolderDoesNotOvertakeItself(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	parent := claimed(t, db, "")
	child := claimed(t, db, parent)
	saysAs(t, db, parent, "parent")
	s := saysAs(t, db, child, "child")
	assert.Truef(t, !s.Queued, "the child's: %+v", s)
	s = saysAs(t, db, parent, "not yet")
	assert.Truef(t, s.Queued, "the parent's: %+v", s)
	ends(t, db, child, "completed")
	s = saysAs(t, db, parent, "at last")
	assert.Truef(t, !s.Queued, "the parent's last: %+v", s)
	assert.NoDiff(t, []string{"parent", "child", "not yet", "at last"}, spoken(t, db, "t"))
}

// The family waits in the queue, and its children have ended. Their messages are sent before later messages of their
// parents.
func TestAParentDoesNotOvertakeItsChildren(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	other, stranger := claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, other, "other")
	parent := claimed(t, db, "")
	saysAs(t, db, parent, "parent 1")
	child := claimed(t, db, parent)
	saysAs(t, db, child, "child 1")
	grandchild := claimed(t, db, child)
	saysAs(t, db, grandchild, "grandchild")
	saysAs(t, db, stranger, "stranger")
	ends(t, db, grandchild, "completed")
	saysAs(t, db, child, "child 2")
	ends(t, db, child, "completed")
	saysAs(t, db, parent, "parent 2")
	ends(t, db, other, "completed")
	flushes(t, db)
	want := []string{"other", "parent 1", "child 1", "grandchild", "child 2", "parent 2"}
	assert.NoDiff(t, want, spoken(t, db, "t"))
	ends(t, db, parent, "completed")
	flushes(t, db)
	assert.NoDiff(t, append(want, "stranger"), spoken(t, db, "t"))
}

func TestWhatAFailedExecutionQueuedLeavesAndWhatACancelledOneQueuedDoesNot(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, failed, cancelled, last := claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	saysAs(t, db, cancelled, "cancelled")
	saysAs(t, db, failed, "failed")
	saysAs(t, db, last, "last")
	ends(t, db, cancelled, "cancelled")
	ends(t, db, failed, "failed")
	ends(t, db, a, "completed")
	flushes(t, db)
	assert.NoDiff(t, []string{"a", "failed", "last"}, spoken(t, db, "t"))
	assert.Equal(t, "withdrawn", pgtest.Value[string](t, db,
		`select status from agent_messages where content = 'cancelled'`))
	// An execution that has ended never keeps the thread.
	assert.Equal(t, last, pgtest.Value[string](t, db,
		`select execution_id::text from agent_locks where lane = 'thread:t'`))
}

func TestAThreadWithoutASendForTenMinutesIsAnybodys(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b := claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute'
		where lane = 'thread:t'`)
	log := &journal{}
	s := saysAs(t, db, b, "b")
	assert.Truef(t, !s.Queued, "queued: %+v", s)
	s.Log(t.Context(), slog.New(slog.NewTextHandler(log, nil)), "t", "b#1")
	log.want(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a+"#1", "age=11m")
	log.want(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner=b#1", "fencing_token="+
		pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`))
	s = saysAs(t, db, a, "late")
	assert.Truef(t, s.Queued, "the idle thread: %+v", s)
}

// The idle time belongs to the thread. It holds for acquiring, renewing, and for messages sent from the queue.
func TestTheIdleTimeIsTheThreads(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	got, made, err := threads.Ensure(t.Context(), db, threads.Thread{ID: "t", IdleSeconds: 20})
	require.Truef(t, err == nil && made && got.IdleSeconds == 20, "made %+v, %v, %v", got, made, err)
	got, _, err = threads.Open(t.Context(), db, threads.Admin, threads.Thread{ID: "other", Channel: "chat"})
	assert.Truef(t, err == nil && got.IdleSeconds == 600, "opened %+v, %v", got, err)
	lasts := func(of, when string) {
		t.Helper()
		holds := pgtest.Value[bool](t, db, `
			select execution_id = $1::uuid and ttl_seconds = 20 and expires_at between clock_timestamp() - interval '1 minute'
			   and clock_timestamp() + interval '20 seconds' from agent_locks where lane = 'thread:t'`, of)
		assert.Truef(t, holds, "%s: the thread is not held for 20 seconds", when)
	}
	a, b := claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	lasts(a, "taken")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '600 s', ttl_seconds = 600
		where lane = 'thread:t'`)
	saysAs(t, db, a, "more")
	lasts(a, "renewed")
	// a slow machine needs time
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '600 s' where lane = 'thread:t'`)
	s := saysAs(t, db, b, "b")
	assert.Truef(t, s.Queued, "not queued: %+v", s)
	ends(t, db, a, "completed")
	flushes(t, db)
	lasts(b, "acquired by a queued message")
}

func TestCleanFreesWhatNobodyUses(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b := claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	saysAs(t, db, b, "b")
	log := &journal{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	if freed, err := threads.Clean(t.Context(), db, logger); err != nil || len(freed) != 0 {
		t.Errorf("freed a thread in use: %+v, %v", freed, err)
	}
	const lazily = `with stale as (` + executions.ReleaseStaleThreads + `) select count(*)::int from stale`
	free := func() int { return pgtest.Value[int](t, db, lazily, postgres.Strict{"overdue": 0.0, "grace": 300.0}) }
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	pgtest.Exec(t, db, `update agent_messages set status = 'withdrawn' where status = 'queued'`)
	assert.Equal(t, 0, free())
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '6 minutes'
		where lane = 'thread:t'`)
	assert.Equal(t, 1, free())
	saysAs(t, db, a, "again")
	saysAs(t, db, b, "b")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	freed, err := threads.Clean(t.Context(), db, logger)
	assert.Truef(t, err == nil && len(freed) == 1 && freed[0].ThreadID == "t" && freed[0].IdleSeconds >= 600 &&
		*freed[0].ExecutionID == a, "freed %+v, %v", freed, err)
	log.want(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a)
	log.want(t, `msg="locks released"`, "count=1")
	flushes(t, db)
	assert.NoDiff(t, []string{"a", "again", "b"}, spoken(t, db, "t"))
	// The sweep also frees lanes of ended executions, whoever acquired them.
	pgtest.Exec(t, db, `update agent_locks set execution_id = $1::uuid, locked_by = $1::text || '#1'
		where lane = 'thread:t'`, claimedAndEnded(t, db))
	freed, err = threads.Clean(t.Context(), db, logger)
	assert.Truef(t, err == nil && len(freed) == 1, "freed %+v, %v", freed, err)
}

func claimedAndEnded(t *testing.T, db postgres.DB) string {
	t.Helper()
	id := claimed(t, db, "")
	ends(t, db, id, "completed")
	return id
}
