package threads_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func open(t *testing.T, db postgres.DB, id string) threads.Thread {
	t.Helper()
	got, _, err := threads.Open(t.Context(), db, threads.Admin,
		threads.Thread{ID: id, Channel: "chat", Participant: "Ada"})
	require.NoError(t, err)
	return got
}

func post(t *testing.T, db postgres.DB, d threads.NewMessage) threads.Message {
	t.Helper()
	if d.Status == "" {
		d.Status = threads.Received
	}
	got, err := threads.Post(t.Context(), db, d)
	require.NoError(t, err)
	return got
}

// postTurn sends a question and its answer.
func postTurn(t *testing.T, db postgres.DB, thread, question, answer string) int64 {
	t.Helper()
	q := post(t, db, threads.NewMessage{ThreadID: thread, Role: threads.User, Content: question})
	post(t, db, threads.NewMessage{
		ThreadID: thread, Role: threads.Assistant, Content: answer, Turn: *q.Seq,
		Status: threads.Sent,
	})
	return *q.Seq
}

func contents(list []threads.Message) (texts []string) {
	for _, m := range list {
		texts = append(texts, m.Content)
	}
	return texts
}

func TestThreadIDs(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for id, valid := range map[string]bool{
		"th_1": true, "kund:ä b": true, strings.Repeat("ü", 200): true,
		"": false, "  ": false, strings.Repeat("x", 201): false, "a\nb": false, "a\x00": false, "a\xff": false,
	} {
		_, _, err := threads.Open(t.Context(), db, threads.Key("o"), threads.Thread{Name: id, Channel: "chat"})
		assert.Truef(t, valid == (err == nil) && (valid || errors.Is(err, threads.ErrInvalid)),
			"Open(%q) = %v, want valid %t", id, err, valid)
	}
}

func TestSeqsFollowCommitsWithoutGaps(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "busy")
	var mu sync.Mutex
	seen := map[int64]bool{}
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			for range 10 {
				err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) error {
					m, err := threads.Post(t.Context(), tx, threads.NewMessage{
						ThreadID: "busy", Role: threads.User, Content: "x",
						Status: threads.Received,
					})
					if err != nil {
						return err
					}
					// A reader of one seq sees every smaller one: they committed earlier.
					var before int64
					err = tx.QueryRow(t.Context(), `select count(*) from agent_messages where thread_id = 'busy' and seq < $1`,
						*m.Seq).Scan(&before)
					mu.Lock()
					defer mu.Unlock()
					assert.Truef(t, !seen[*m.Seq] && before == *m.Seq-1,
						"seq %d: %d smaller ones are visible; seen before: %t", *m.Seq, before, seen[*m.Seq])
					seen[*m.Seq] = true
					return err
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	assert.Equal(t, 80, len(seen))
}

func TestQueuedMessageHasNoSeq(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "q")
	m := post(t, db, threads.NewMessage{
		ThreadID: "q", Role: threads.Assistant, Content: "later",
		Status: threads.Queued,
	})
	assert.True(t, m.Seq == nil && m.Turn == nil, "a queued message has a seq or a turn")
	m = post(t, db, threads.NewMessage{ThreadID: "q", Role: threads.User, Content: "now"})
	assert.Equal(t, 1, *m.Seq, "seq of the first sent message")
	list, err := threads.Messages(t.Context(), db, threads.MessageFilter{ThreadID: "q"})
	require.NoError(t, err)
	assert.NoDiff(t, []string{"later", "now"}, contents(list))
}

func TestPostReplacesUnstorableCharacters(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "odd")
	assert.Equal(t, "ab\uFFFDc", post(t, db, threads.NewMessage{
		ThreadID: "odd", Role: threads.User,
		Content: "a\x00b\xffc",
	}).Content)
}

func TestPostNeedsThread(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	_, err := threads.Post(t.Context(), db, threads.NewMessage{
		ThreadID: "none", Role: threads.User,
		Status: threads.Received,
	})
	assert.ErrorIs(t, err, threads.ErrNotFound)
}

func TestWindowHasWholeTurns(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "w")
	postTurn(t, db, "w", "q1", "a1")
	q2 := post(t, db, threads.NewMessage{ThreadID: "w", Role: threads.User, Content: "q2"})
	q3 := post(t, db, threads.NewMessage{ThreadID: "w", Role: threads.User, Content: "q3"}) // came before a2
	post(t, db, threads.NewMessage{
		ThreadID: "w", Role: threads.Assistant, Content: "a2", Turn: *q2.Seq,
		Status: threads.Sent,
	})
	for name, c := range map[string]struct {
		before int64
		tokens int
		want   []string
	}{
		"before q2":     {*q2.Seq, 1000, []string{"q1", "a1"}},
		"before q3":     {*q3.Seq, 1000, []string{"q1", "a1", "q2", "a2"}},
		"all":           {0, 1000, []string{"q1", "a1", "q2", "a2", "q3"}},
		"whole turns":   {*q3.Seq, 15, []string{"q2", "a2"}}, // five tokens each
		"nothing fits":  {0, 1, nil},
		"one and a bit": {*q3.Seq, 19, []string{"q2", "a2"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, got, cut, err := threads.Window(t.Context(), db, "w", c.before, c.tokens)
			require.NoError(t, err)
			assert.NoDiff(t, c.want, contents(got))
			assert.Equal(t, c.tokens < 1000, cut)
		})
	}
}

func TestSummaryOnlyMovesForward(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "s")
	postTurn(t, db, "s", "q1", "a1")
	turn := postTurn(t, db, "s", "q2", "a2")
	postTurn(t, db, "s", "q3", "a3")
	for _, want := range []bool{true, false} { // the second update has read the same state
		moved, err := threads.SaveSummary(t.Context(), db, "s", 0, turn, "two greetings")
		assert.Truef(t, err == nil && moved == want, "moved = %t, %v, want %t", moved, err, want)
	}
	summary, got, cut, err := threads.Window(t.Context(), db, "s", 0, 1000)
	require.NoError(t, err)
	diff := cmp.Diff([]string{"q3", "a3"}, contents(got))
	assert.Truef(t, diff == "" && summary == "two greetings" && !cut, "summary %q, cut %t and window (-want +got):\n%s",
		summary, cut, diff)
}

func TestBacklogHasWholeOldTurns(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "b")
	for _, n := range []string{"1", "2", "3", "4", "5"} { // ten tokens a turn
		postTurn(t, db, "b", "q"+n, "a"+n)
	}
	for name, c := range map[string]struct {
		limit, keep, most int
		want              []string
	}{
		"all fits":           {50, 20, 100, nil},
		"keeps the latest":   {49, 20, 100, []string{"q1", "a1", "q2", "a2", "q3", "a3"}},
		"bounded at a time":  {49, 20, 15, []string{"q1", "a1", "q2", "a2"}},
		"at least one turn":  {49, 20, 1, []string{"q1", "a1"}},
		"a turn is one cut":  {49, 25, 100, []string{"q1", "a1", "q2", "a2", "q3", "a3"}},
		"everything is kept": {49, 60, 100, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := threads.Backlog(t.Context(), db, "b", 0, c.limit, c.keep, c.most)
			require.NoError(t, err)
			assert.NoDiff(t, c.want, contents(got))
		})
	}
}

// Of a turn with more than 400 messages, the first 400 stand for the turn.
func TestBacklogHasLongTurn(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "b")
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, trace_id, status)
		select 'b', n, greatest(1, n - 449), 'user', 'm' || n, 'chat', '', 'received' from generate_series(1, 480) n`)
	old, err := threads.Backlog(t.Context(), db, "b", 0, 1<<20, 1<<20, 1<<20)
	require.NoError(t, err)
	assert.Equal(t, 400, len(old))
}

// Window reads at most 400 messages. So Backlog returns the older half of 400 short ones, although their tokens fit.
func TestBacklogHasManyShortTurns(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "b")
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, trace_id, status)
		select 'b', n, n, 'user', 'm' || n, 'chat', '', 'received' from generate_series(1, 400) n`)
	backlog := func(before int64) []threads.Message {
		old, err := threads.Backlog(t.Context(), db, "b", before, 1<<20, 1<<20, 1<<20)
		require.NoError(t, err)
		return old
	}
	assert.Equal(t, 0, len(backlog(400)))
	old := backlog(0)
	require.Equal(t, 200, len(old))
	assert.Equal(t, "m200", old[199].Content)
}

// The thread gone was locked for 10 minutes, and the lock expired 3 minutes ago.
func TestLocksListsHeldThreads(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "held")
	pgtest.Exec(t, db, `select acquire_agent_lock('thread:held', '018f0000-0000-7000-8000-000000000001#1', 600)`)
	pgtest.Exec(t, db, `select acquire_agent_lock('thread:gone', 'somebody', 600)`)
	pgtest.Exec(t, db, `select acquire_agent_lock('operate', 'an admin', 600)`)
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '3 minutes'
		where lane = 'thread:gone'`)
	all, err := threads.Locks(t.Context(), db, false)
	require.NoError(t, err)
	assert.Truef(t, len(all) == 2 && all[0].ThreadID == "gone" && all[0].LockMinutes == 13 && all[0].Stale &&
		all[1].ParticipantName == "Ada" && all[1].ActiveExecutionID != nil && !all[1].Stale, "held threads: %+v", all)
	stale, err := threads.Locks(t.Context(), db, true)
	assert.Truef(t, err == nil && len(stale) == 1, "stale ones: %+v, %v", stale, err)
}

func TestListingsContinueAfterCursor(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, id := range []string{"a", "b", "c"} {
		open(t, db, id)
	}
	post(t, db, threads.NewMessage{ThreadID: "a", Role: threads.User, Content: "hello"})
	var got []string
	f := threads.Filter{Channel: "chat", Limit: 1}
	for range 5 { // with an empty page
		page, err := threads.List(t.Context(), db, f)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		got = append(got, page[0].ID)
		f.BeforeTime, f.BeforeID = page[0].UpdatedAt, page[0].ID
	}
	assert.NoDiff(t, []string{"a", "c", "b"}, got)
}

// A list reads the few threads of one agent or channel without reading the others.
func TestListOfRareThreadsUsesIndex(t *testing.T) {
	t.Parallel()
	tx, err := pgtest.DB(t).Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, sql := range []string{
		`set local session_replication_role = replica`,
		`insert into agent_threads (id, channel, agent) select 'thr_' || n, case n when 8 then 'rare' else 'chat' end,
			case n when 7 then 'rare' else 'common' end from generate_series(1, 3000) n`,
		`analyze agent_threads`,
	} {
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	for index, filter := range map[string]threads.Filter{
		"agent_threads_of_agent": {Agent: "rare"}, "agent_threads_of_channel": {Channel: "rare"},
	} {
		for range 7 { // the sixth execution would use a generic plan
			found, err := threads.List(t.Context(), tx, filter)
			require.Truef(t, err == nil && len(found) == 1, "%s: found %d, %v", index, len(found), err)
		}
		var scans int
		err = tx.QueryRow(t.Context(), `select pg_stat_get_xact_numscans($1::regclass)`, index).Scan(&scans)
		assert.NoError(t, err)
		assert.Equal(t, 7, scans, index)
	}
}

// createLongThread creates a long thread among many others.
func createLongThread(t *testing.T, db postgres.DB, turns int) {
	t.Helper()
	open(t, db, "long")
	pgtest.Exec(t, db, `insert into agent_threads (id, channel, owner) select 'other ' || n, 'chat', 'site'
		from generate_series(1, 200) n`)
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, tokens)
		select 'other ' || (n % 200 + 1), n, n, 'user', 'hello there', 'received', 8 from generate_series(1, 100000) n`)
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, tokens)
		select 'long', n, n - (n + 1) % 2, case n % 2 when 1 then 'user' else 'assistant' end, 'what was said ' || n, 'sent',
		       8
		  from generate_series(1, $1::int) n`, 2*turns)
	pgtest.Exec(t, db, `update agent_threads set next_seq = $1::int + 1 where id = 'long'`, 2*turns)
	pgtest.Exec(t, db, `analyze agent_messages`)
}

// countReads returns the number of message rows that fn reads, by index or not, and of scans.
func countReads(t *testing.T, db postgres.DB, fn func()) (rows, scans int) {
	t.Helper()
	read := func() (rows, scans int) {
		err := db.QueryRow(t.Context(), `
			select coalesce(idx_tup_fetch, 0) + seq_tup_read, seq_scan from pg_stat_xact_user_tables
			  where relname = 'agent_messages'`).
			Scan(&rows, &scans)
		require.NoError(t, err)
		return rows, scans
	}
	rows0, scans0 := read()
	fn()
	rows1, scans1 := read()
	return rows1 - rows0, scans1 - scans0
}

func TestReadsAreBoundedInLongThread(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createLongThread(t, pool, 20_000)
	tx, err := pool.Begin(t.Context()) // one connection, for its statistics
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for name, c := range map[string]struct {
		most int
		read func() error
	}{
		"window": {400, func() error {
			_, _, _, err := threads.Window(t.Context(), tx, "long", 0, 2000)
			return err
		}},
		"window in the middle": {400, func() error {
			_, _, _, err := threads.Window(t.Context(), tx, "long", 9001, 2000)
			return err
		}},
		"backlog": {800, func() error {
			_, err := threads.Backlog(t.Context(), tx, "long", 0, 2000, 1000, 2000)
			return err
		}},
		"messages": {100, func() error {
			_, err := threads.Messages(t.Context(), tx, threads.MessageFilter{ThreadID: "long", Before: 5000})
			return err
		}},
	} {
		rows, scans := countReads(t, tx, func() { require.NoError(t, c.read()) })
		assert.Truef(t, rows <= c.most && scans == 0, "%s read %d rows, %d times the whole table", name, rows, scans)
	}
}
