package threads_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
)

func TestMessagesOfOthersQueueInOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := startClaimed(t, db, ""), startClaimed(t, db, ""), startClaimed(t, db, "")
	s := sendAs(t, db, a, "a1")
	assert.Truef(t, !s.Queued && *s.Seq == 1, "the first: %+v", s)
	for _, m := range []struct{ id, content string }{{b, "b1"}, {c, "c1"}, {b, "b2"}} {
		s := sendAs(t, db, m.id, m.content)
		assert.Truef(t, s.Queued && s.Seq == nil && strings.HasPrefix(s.Holder, a), "%s: %+v", m.content, s)
	}
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '1 minute'
		where lane = 'thread:t'`)
	s = sendAs(t, db, a, "a2")
	assert.Truef(t, !s.Queued, "the holder's second: %+v", s)
	assert.True(t, pgtest.Value[bool](t, db, `select expires_at > clock_timestamp() + interval '5 minutes' from agent_locks
		where lane = 'thread:t'`), "a send does not renew the lease")
	endExecution(t, db, a, "completed")
	flush(t, db).assertLine(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner="+b+"#1", "fencing_token="+
		pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`))
	assert.Equal(t, "", flush(t, db).String(), "the lane stays with its holder")
	assert.NoDiff(t, []string{"a1", "a2", "b1", "b2"}, sentContents(t, db, "t")) // b holds the thread now
	endExecution(t, db, b, "failed")
	swept := &logRecorder{}
	sweep := func() {
		_, err := executions.FlushThreads(t.Context(), db, slog.New(slog.NewTextHandler(swept, nil)), 10)
		require.NoError(t, err)
	}
	sweep()
	token := pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`)
	swept.assertLine(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner="+c+"#1", "fencing_token="+token)
	sendAs(t, db, c, "c2")
	sweep()
	assert.Equal(t, 1, strings.Count(swept.String(), "lane acquired"), swept)
	assert.NoDiff(t, []string{"a1", "a2", "b1", "b2", "c1", "c2"}, sentContents(t, db, "t"))
}

// The thread is free, but the executions in its queue have no notification yet.
func TestNewMessageDoesNotOvertakeQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := startClaimed(t, db, ""), startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	sendAs(t, db, b, "b")
	endExecution(t, db, a, "completed")
	s := sendAs(t, db, c, "c")
	assert.Truef(t, s.Queued && strings.HasPrefix(s.Holder, b), "the last: %+v", s)
	assert.NoDiff(t, []string{"a", "b"}, sentContents(t, db, "t"))
}

// A parent that has its thread back sends its queued messages before new ones.
func TestHolderSendsItsQueuedMessagesFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	parent := startClaimed(t, db, "")
	child := startClaimed(t, db, parent)
	sendAs(t, db, parent, "parent")
	s := sendAs(t, db, child, "child")
	assert.Truef(t, !s.Queued, "the child's: %+v", s)
	s = sendAs(t, db, parent, "not yet")
	assert.Truef(t, s.Queued, "the parent's: %+v", s)
	endExecution(t, db, child, "completed")
	s = sendAs(t, db, parent, "at last")
	assert.Truef(t, !s.Queued, "the parent's last: %+v", s)
	assert.NoDiff(t, []string{"parent", "child", "not yet", "at last"}, sentContents(t, db, "t"))
}

// The family waits in the queue, and its children have ended. Their messages are sent before later messages of their
// parents.
func TestMessagesOfEndedChildrenPrecedeParent(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	other, stranger := startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, other, "other")
	parent := startClaimed(t, db, "")
	sendAs(t, db, parent, "parent 1")
	child := startClaimed(t, db, parent)
	sendAs(t, db, child, "child 1")
	grandchild := startClaimed(t, db, child)
	sendAs(t, db, grandchild, "grandchild")
	sendAs(t, db, stranger, "stranger")
	endExecution(t, db, grandchild, "completed")
	sendAs(t, db, child, "child 2")
	endExecution(t, db, child, "completed")
	sendAs(t, db, parent, "parent 2")
	endExecution(t, db, other, "completed")
	flush(t, db)
	want := []string{"other", "parent 1", "child 1", "grandchild", "child 2", "parent 2"}
	assert.NoDiff(t, want, sentContents(t, db, "t"))
	endExecution(t, db, parent, "completed")
	flush(t, db)
	assert.NoDiff(t, append(want, "stranger"), sentContents(t, db, "t"))
}

func TestQueuedMessagesOfEndedExecutions(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, failed := startClaimed(t, db, ""), startClaimed(t, db, "")
	cancelled, last := startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	sendAs(t, db, cancelled, "cancelled")
	sendAs(t, db, failed, "failed")
	sendAs(t, db, last, "last")
	endExecution(t, db, cancelled, "cancelled")
	endExecution(t, db, failed, "failed")
	endExecution(t, db, a, "completed")
	flush(t, db)
	assert.NoDiff(t, []string{"a", "failed", "last"}, sentContents(t, db, "t"))
	assert.Equal(t, "withdrawn", pgtest.Value[string](t, db,
		`select status from agent_messages where content = 'cancelled'`))
	// An execution that has ended never keeps the thread.
	assert.Equal(t, last, pgtest.Value[string](t, db,
		`select execution_id::text from agent_locks where lane = 'thread:t'`))
}

func TestIdleThreadIsReleased(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b := startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute'
		where lane = 'thread:t'`)
	log := &logRecorder{}
	s := sendAs(t, db, b, "b")
	assert.Truef(t, !s.Queued, "queued: %+v", s)
	s.Log(t.Context(), slog.New(slog.NewTextHandler(log, nil)), "t", "b#1")
	log.assertLine(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a+"#1", "age=11m")
	log.assertLine(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner=b#1", "fencing_token="+
		pgtest.Value[string](t, db, `select fencing_token::text from agent_locks where lane = 'thread:t'`))
	s = sendAs(t, db, a, "late")
	assert.Truef(t, s.Queued, "the idle thread: %+v", s)
}

// A send passes an ended lease on by the queue. The log says who lost the lane and who has it now.
func TestIdleThreadIsReleasedToQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := startClaimed(t, db, ""), startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	expire := func() {
		pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute' where lane = 'thread:t'`)
	}
	send := func(id, content string) *logRecorder {
		log := &logRecorder{}
		sendAs(t, db, id, content).Log(t.Context(), slog.New(slog.NewTextHandler(log, nil)), "t", id+"#1")
		return log
	}
	sendAs(t, db, b, "b1")
	expire()
	log := send(b, "b2")
	log.assertLine(t, `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a+"#1", "age=11m")
	log.assertLine(t, `msg="lane acquired"`, "owner="+b+"#1", "fencing_token=")
	sendAs(t, db, a, "a2")
	expire()
	log = send(c, "c")
	log.assertLine(t, `msg="lane stale, clearing"`, "lane=thread:t", "holder="+b+"#1")
	log.assertLine(t, `msg="lane acquired"`, "owner="+a+"#1", "fencing_token=")
	log.assertLine(t, `msg="lane busy"`, "owner="+c+"#1", "holder="+a+"#1")
	assert.NoDiff(t, []string{"a", "b1", "b2", "a2"}, sentContents(t, db, "t"))
}

// The idle time belongs to the thread. It holds for acquiring, renewing, and for messages sent from the queue.
func TestIdleTimeBelongsToThread(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	got, made, err := threads.Ensure(t.Context(), db, threads.Thread{ID: "t", IdleSeconds: 20})
	require.Truef(t, err == nil && made && got.IdleSeconds == 20, "made %+v, %v, %v", got, made, err)
	got, _, err = threads.Open(t.Context(), db, threads.Admin, threads.Thread{ID: "other", Channel: "chat"})
	assert.Truef(t, err == nil && got.IdleSeconds == 600, "opened %+v, %v", got, err)
	assertHeld := func(of, when string) {
		t.Helper()
		holds := pgtest.Value[bool](t, db, `
			select execution_id = $1::uuid and ttl_seconds = 20 and expires_at between clock_timestamp() - interval '1 minute'
			   and clock_timestamp() + interval '20 seconds' from agent_locks where lane = 'thread:t'`, of)
		assert.Truef(t, holds, "%s: the thread is not held for 20 seconds", when)
	}
	a, b := startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	assertHeld(a, "acquired")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '600 s', ttl_seconds = 600
		where lane = 'thread:t'`)
	sendAs(t, db, a, "more")
	assertHeld(a, "renewed")
	// a slow machine needs time
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() + interval '600 s' where lane = 'thread:t'`)
	s := sendAs(t, db, b, "b")
	assert.Truef(t, s.Queued, "not queued: %+v", s)
	endExecution(t, db, a, "completed")
	flush(t, db)
	assertHeld(b, "acquired by a queued message")
}

func TestCleanReleasesUnusedThreads(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b := startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	sendAs(t, db, b, "b")
	log := &logRecorder{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	if freed, err := threads.Clean(t.Context(), db, logger); err != nil || len(freed) != 0 {
		t.Errorf("freed a thread in use: %+v, %v", freed, err)
	}
	const released = `with stale as (` + executions.ReleaseStaleThreads + `) select count(*)::int from stale`
	countReleased := func() int {
		return pgtest.Value[int](t, db, released, postgres.Strict{"grace": 300.0})
	}
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	pgtest.Exec(t, db, `update agent_messages set status = 'withdrawn' where status = 'queued'`)
	assert.Equal(t, 0, countReleased())
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '6 minutes'
		where lane = 'thread:t'`)
	assert.Equal(t, 1, countReleased())
	sendAs(t, db, a, "again")
	sendAs(t, db, b, "b")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	freed, err := threads.Clean(t.Context(), db, logger)
	assert.Truef(t, err == nil && len(freed) == 1 && freed[0].ThreadID == "t" && freed[0].IdleSeconds >= 600 &&
		*freed[0].ExecutionID == a, "freed %+v, %v", freed, err)
	log.assertLine(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a)
	log.assertLine(t, `msg="locks released"`, "count=1")
	flush(t, db)
	assert.NoDiff(t, []string{"a", "again", "b"}, sentContents(t, db, "t"))
	// The sweep also frees lanes of ended executions, whoever acquired them.
	pgtest.Exec(t, db, `update agent_locks set execution_id = $1::uuid, locked_by = $1::text || '#1'
		where lane = 'thread:t'`, startEnded(t, db))
	freed, err = threads.Clean(t.Context(), db, logger)
	assert.Truef(t, err == nil && len(freed) == 1, "freed %+v, %v", freed, err)
}

func startEnded(t *testing.T, db postgres.DB) string {
	t.Helper()
	id := startClaimed(t, db, "")
	endExecution(t, db, id, "completed")
	return id
}
