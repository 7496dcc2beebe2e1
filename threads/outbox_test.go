package threads_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

const patience = 60 * time.Second

// journal keeps what was logged.
type journal struct {
	mu   sync.Mutex
	text strings.Builder
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// want reports a line that is missing: one that has all parts.
func (j *journal) want(t *testing.T, parts ...string) {
	t.Helper()
	if !j.has(parts...) {
		t.Errorf("no line of the log has %q:\n%s", parts, j.text.String())
	}
}

func (j *journal) has(parts ...string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.text.String()) {
		all := true
		for _, p := range parts {
			all = all && strings.Contains(line, p)
		}
		if all {
			return true
		}
	}
	return false
}

func value[T any](t *testing.T, db postgres.DB, sql string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

type process struct {
	*executions.Engine
	pool *pgxpool.Pool
	log  *journal
}

type flow = func(ctx context.Context) (executions.Result, error)

// runs is a process that knows flows.
func runs(t *testing.T, pool *pgxpool.Pool, flows map[string]flow) *process {
	t.Helper()
	log := &journal{}
	keeper := lanes.NewKeeper(pool, lanes.Options{Enabled: true})
	e, err := executions.New(pool, executions.Options{
		Keeper: keeper, SweepEvery: 100 * time.Millisecond, LeaseTTL: 20 * time.Second, Workers: 60,
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, fn := range flows {
		if err := e.Register(name, func(ctx context.Context, _ json.RawMessage) (executions.Result, error) { return fn(ctx) }); err != nil {
			t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var group errgroup.Group
	group.Go(func() error { return e.Run(ctx) })
	group.Go(func() error { return keeper.Run(ctx) })
	t.Cleanup(func() {
		stop()
		if err := group.Wait(); err != nil {
			t.Errorf("process: %v", err)
		}
	})
	return &process{e, pool, log}
}

func (p *process) begin(t *testing.T, flow string) string {
	t.Helper()
	x, _, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: flow, Surface: trace.Flow, ThreadID: "t"})
	if err != nil {
		t.Fatal(err)
	}
	return x.ID
}

func (p *process) reaches(t *testing.T, id string, status executions.Status) executions.Execution {
	t.Helper()
	var got executions.Execution
	pgtest.Eventually(t, patience, func() bool {
		var err error
		got, err = executions.Get(t.Context(), p.pool, id)
		return err == nil && got.Status == status
	}, "execution is "+string(status))
	return got
}

// replies says something as the other side.
func (p *process) replies(t *testing.T, thread, words string) threads.Arrived {
	t.Helper()
	var got threads.Arrived
	err := postgres.InTx(t.Context(), p.pool, func(tx pgx.Tx) (err error) {
		got, err = threads.Receive(t.Context(), p.Engine, tx, threads.Incoming{ThreadID: thread, Content: words})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func says(ctx context.Context, words ...string) error {
	for _, w := range words {
		if _, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: w}); err != nil {
			return err
		}
	}
	return nil
}

func done(err error) (executions.Result, error) { return executions.Result{}, err }

// spoken is what is said in a thread, in order; what is queued or withdrawn is not.
func spoken(t *testing.T, db postgres.DB, thread string) []string {
	t.Helper()
	return value[[]string](t, db, `
		select coalesce(array_agg(content order by seq), '{}') from agent_messages where thread_id = $1 and seq is not null`, thread)
}

// claimed makes an execution that a live worker of the test runs.
func claimed(t *testing.T, db postgres.DB, parent string) string {
	t.Helper()
	worker := value[string](t, db, `
		insert into agent_workers (name, ttl_seconds, expires_at) values ('test', 600, clock_timestamp() + interval '10 minutes') returning id::text`)
	id := value[string](t, db, `
		insert into agent_executions (trace_id, surface, agent, flow, thread_id, status, parent_id, inherits)
		values (agent_trace_id('fl'), 'flow', 'a', 'sql', 't', 'pending', nullif($1, '')::uuid, $1 <> '') returning id::text`, parent)
	exec(t, db, `update agent_executions set hinted_at = 'infinity' where id = $1`, id)
	if got := value[int](t, db, `select count(*)::int from claim_agent_execution($1, $2)`, id, worker); got != 1 {
		t.Fatal("not claimed")
	}
	return id
}

// says sends as an execution would from SQL, and returns whether the message was queued.
func saysAs(t *testing.T, db postgres.DB, id, words string) threads.SendResult {
	t.Helper()
	var got threads.SendResult
	if err := postgres.InTx(t.Context(), db.(postgres.Beginner), func(tx pgx.Tx) (err error) {
		claim := value[int64](t, tx, `select claim from agent_executions where id = $1`, id)
		got, err = threads.SendTx(t.Context(), tx, threads.Outgoing{ThreadID: "t", Content: words, ExecutionID: id, Claim: claim})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return got
}

func ends(t *testing.T, db postgres.DB, id, status string) {
	t.Helper()
	if status == "cancelled" {
		exec(t, db, `select cancel_agent_execution($1, 'admin', 'a test')`, id)
		return
	}
	exec(t, db, `select finish_agent_execution(x.id, x.claim, $2, '', null, null, null) from agent_executions x where x.id = $1`, id, status)
}

func flushes(t *testing.T, db postgres.DB) {
	t.Helper()
	if _, err := threads.Flush(t.Context(), db, "t"); err != nil {
		t.Fatal(err)
	}
}

func TestMessagesOfOthersQueueAndLeaveInTheirOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, "")
	if s := saysAs(t, db, a, "a1"); s.Queued || *s.Seq != 1 {
		t.Errorf("the first: %+v", s)
	}
	for _, m := range []struct{ id, words string }{{b, "b1"}, {c, "c1"}, {b, "b2"}} {
		if s := saysAs(t, db, m.id, m.words); !s.Queued || s.Seq != nil || !strings.HasPrefix(s.Holder, a) {
			t.Errorf("%s: %+v", m.words, s)
		}
	}
	if s := saysAs(t, db, a, "a2"); s.Queued {
		t.Errorf("the holder's second: %+v", s)
	}
	ends(t, db, a, "completed")
	flushes(t, db)
	if diff := cmp.Diff([]string{"a1", "a2", "b1", "b2"}, spoken(t, db, "t")); diff != "" { // b has the thread now
		t.Errorf("said (-want +got):\n%s", diff)
	}
	ends(t, db, b, "failed")
	flushes(t, db)
	if diff := cmp.Diff([]string{"a1", "a2", "b1", "b2", "c1"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
}

// The thread is free, and those who stand in its queue have not been told yet.
func TestNobodyOvertakesTheQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := claimed(t, db, ""), claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	saysAs(t, db, b, "b")
	ends(t, db, a, "completed")
	if s := saysAs(t, db, c, "c"); !s.Queued || !strings.HasPrefix(s.Holder, b) {
		t.Errorf("the last: %+v", s)
	}
	if diff := cmp.Diff([]string{"a", "b"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
}

// A parent that has its thread back says first what it could not say meanwhile.
func TestAHolderDoesNotOvertakeItself(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	parent := claimed(t, db, "")
	child := claimed(t, db, parent)
	saysAs(t, db, parent, "parent")
	if s := saysAs(t, db, child, "child"); s.Queued {
		t.Errorf("the child's: %+v", s)
	}
	if s := saysAs(t, db, parent, "not yet"); !s.Queued {
		t.Errorf("the parent's: %+v", s)
	}
	ends(t, db, child, "completed")
	if s := saysAs(t, db, parent, "at last"); s.Queued {
		t.Errorf("the parent's last: %+v", s)
	}
	if diff := cmp.Diff([]string{"parent", "child", "not yet", "at last"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
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
	if diff := cmp.Diff([]string{"a", "failed", "last"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	if got := value[string](t, db, `select status from agent_messages where content = 'cancelled'`); got != "withdrawn" {
		t.Errorf("the message of the cancelled one is %s", got)
	}
	// One that has ended never keeps the thread.
	if got := value[string](t, db, `select execution_id::text from agent_locks where lane = 'thread:t'`); got != last {
		t.Errorf("the thread is held by %s, want %s", got, last)
	}
}

func TestAThreadWithoutASendForTenMinutesIsAnybodys(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b := claimed(t, db, ""), claimed(t, db, "")
	saysAs(t, db, a, "a")
	exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute' where lane = 'thread:t'`)
	log := &journal{}
	s := saysAs(t, db, b, "b")
	if s.Queued {
		t.Errorf("queued: %+v", s)
	}
	s.Log(t.Context(), slog.New(slog.NewTextHandler(log, nil)), "t", "b#1")
	log.want(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a+"#1", "age=11m")
	log.want(t, "level=INFO", `msg="lane acquired"`, "lane=thread:t", "owner=b#1")
	if s := saysAs(t, db, a, "late"); !s.Queued {
		t.Errorf("the one that was idle: %+v", s)
	}
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
	exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	freed, err := threads.Clean(t.Context(), db, logger)
	if err != nil || len(freed) != 1 || freed[0].ThreadID != "t" || freed[0].IdleSeconds < 600 || *freed[0].ExecutionID != a {
		t.Errorf("freed %+v, %v", freed, err)
	}
	log.want(t, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:t", "holder="+a)
	log.want(t, `msg="locks released"`, "count=1")
	flushes(t, db)
	if diff := cmp.Diff([]string{"a", "b"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	// What an ended execution still holds, whoever made that, is freed, too.
	exec(t, db, `update agent_locks set execution_id = $1::uuid, locked_by = $1::text || '#1' where lane = 'thread:t'`, claimedAndEnded(t, db))
	if freed, err := threads.Clean(t.Context(), db, logger); err != nil || len(freed) != 1 {
		t.Errorf("freed %+v, %v", freed, err)
	}
}

func claimedAndEnded(t *testing.T, db postgres.DB) string {
	t.Helper()
	id := claimed(t, db, "")
	ends(t, db, id, "completed")
	return id
}

func TestAParkedThreadDoesNotExpireAndAnswersGoToItsHolder(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := runs(t, pool, map[string]flow{"ask": func(ctx context.Context) (executions.Result, error) {
		if err := says(ctx, "who are you?"); err != nil {
			return done(err)
		}
		out, err := executions.Wait(ctx, "answer", executions.Response("t", 0))
		if err != nil {
			return done(err)
		}
		var data struct{ Content string }
		if err := json.Unmarshal(out.Data, &data); err != nil {
			return done(err)
		}
		return done(says(ctx, "hello, "+data.Content))
	}})
	id := p.begin(t, "ask")
	p.reaches(t, id, executions.Waiting)
	held := value[bool](t, pool, `select parked and expires_at > clock_timestamp() + interval '100 years' from agent_locks where lane = 'thread:t'`)
	if freed, err := threads.Clean(t.Context(), pool, slog.New(slog.DiscardHandler)); !held || err != nil || len(freed) > 0 {
		t.Errorf("parked %t, freed %+v, %v", held, freed, err)
	}
	other := claimed(t, pool, "")
	if s := saysAs(t, pool, other, "other"); !s.Queued {
		t.Errorf("a message of another: %+v", s)
	}
	if got := p.replies(t, "t", "Ada"); len(got.Resumed) != 1 || got.Resumed[0] != id || got.Seq != 2 {
		t.Errorf("received: %+v", got)
	}
	p.reaches(t, id, executions.Completed)
	pgtest.Eventually(t, patience, func() bool { return len(spoken(t, pool, "t")) == 4 }, "the queued message leaves")
	if diff := cmp.Diff([]string{"who are you?", "Ada", "hello, Ada", "other"}, spoken(t, pool, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	p.log.want(t, `msg="lane acquired"`, "lane=thread:t", "owner="+id)
	p.log.want(t, `msg="locks released"`, "count=1")
}

func TestTheSameIncomingMessageCountsOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	open(t, pool, "u")
	p := runs(t, pool, nil)
	receive := func(thread string) (got threads.Arrived, err error) {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) (err error) {
			got, err = threads.Receive(t.Context(), p.Engine, tx, threads.Incoming{ThreadID: thread, Content: "hola", ID: "wa 1"})
			return err
		})
		return got, err
	}
	var group errgroup.Group
	ids := make([]string, 8)
	for i := range ids {
		group.Go(func() error {
			got, err := receive("t")
			ids[i] = got.MessageID
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if id != ids[0] || id == "" {
			t.Errorf("message ids differ: %v", ids)
		}
	}
	if n := value[int](t, pool, `select count(*)::int from agent_messages`); n != 1 {
		t.Errorf("%d messages", n)
	}
	if _, err := receive("u"); !postgres.IsCode(err, "22023") {
		t.Errorf("the id in another thread: %v", err)
	}
	if _, err := receive("none"); err == nil {
		t.Error("received in a thread that is none")
	}
}

func TestAQuestionThatIsQueuedIsWaitedForWhenItLeaves(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := runs(t, pool, map[string]flow{"ask": func(ctx context.Context) (executions.Result, error) {
		if err := says(ctx, "first", "second"); err != nil {
			return done(err)
		}
		_, err := executions.Wait(ctx, "answer", executions.Response("t", time.Hour))
		return done(err)
	}})
	a, b := claimed(t, pool, ""), ""
	saysAs(t, pool, a, "a")
	id := p.begin(t, "ask")
	p.reaches(t, id, executions.Waiting)
	b = claimed(t, pool, "")
	saysAs(t, pool, b, "b")
	if got := p.replies(t, "t", "for a"); len(got.Resumed) != 0 {
		t.Errorf("an answer to a question that was not asked: %+v", got)
	}
	queued := value[bool](t, pool, `select waiting_data ? 'queued_message' and waiting_until > clock_timestamp() + interval '29 days' from agent_executions where id = $1`, id)
	ends(t, pool, a, "completed")
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, pool, `select not waiting_data ? 'queued_message' and waiting_until < clock_timestamp() + interval '61 minutes' from agent_executions where id = $1`, id)
	}, "the wait begins")
	if !queued {
		t.Error("the wait had begun before its question was out")
	}
	// Both of its messages are out, and it keeps the thread while it waits: b comes after it.
	if diff := cmp.Diff([]string{"a", "for a", "first", "second"}, spoken(t, pool, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	if !value[bool](t, pool, `select parked and execution_id = $1 from agent_locks where lane = 'thread:t'`, id) {
		t.Error("the thread is not parked with who asked")
	}
	if got := p.replies(t, "t", "answer"); len(got.Resumed) != 1 {
		t.Errorf("the answer: %+v", got)
	}
	pgtest.Eventually(t, patience, func() bool { return len(spoken(t, pool, "t")) == 6 }, "b's message leaves")
}

func TestAChildSpeaksInItsParentsThreadAndASiblingQueues(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := runs(t, pool, map[string]flow{
		"parent": func(ctx context.Context) (executions.Result, error) {
			if err := says(ctx, "parent begins"); err != nil {
				return done(err)
			}
			if _, err := executions.Trigger(ctx, "alone", executions.Child{Flow: "sibling"}); err != nil {
				return done(err)
			}
			if _, err := executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true}); err != nil {
				return done(err)
			}
			return done(says(ctx, "parent ends"))
		},
		"sibling": func(ctx context.Context) (executions.Result, error) { return done(says(ctx, "sibling")) },
		"child": func(ctx context.Context) (executions.Result, error) {
			if err := says(ctx, "child asks"); err != nil {
				return done(err)
			}
			if _, err := executions.Wait(ctx, "answer", executions.Response("t", 0)); err != nil {
				return done(err)
			}
			return done(says(ctx, "child thanks"))
		},
	})
	id := p.begin(t, "parent")
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*)::int from agent_executions where flow = 'child' and status = 'waiting'
			or flow = 'sibling' and status = 'completed'`) == 2
	}, "the child waits, the sibling has ended")
	p.replies(t, "t", "my answer")
	p.reaches(t, id, executions.Completed)
	pgtest.Eventually(t, patience, func() bool { return len(spoken(t, pool, "t")) == 6 }, "all is said")
	want := []string{"parent begins", "child asks", "my answer", "child thanks", "parent ends", "sibling"}
	if diff := cmp.Diff(want, spoken(t, pool, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	child := value[string](t, pool, `select id::text from agent_executions where flow = 'child'`)
	p.log.want(t, `msg="lane inherited"`, "lane=thread:t", "from="+id, "to="+child)
	p.log.want(t, "level=WARN", `msg="lane busy"`, "lane=thread:t", "holder=")
}

// A child whose message was queued while somebody else had the thread speaks when its parent gets it.
func TestAQueuedMessageOfAChildLeavesByALoan(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	other := claimed(t, db, "")
	parent := claimed(t, db, "")
	child := claimed(t, db, parent)
	stranger := claimed(t, db, "")
	saysAs(t, db, other, "other")
	saysAs(t, db, parent, "parent")
	saysAs(t, db, stranger, "stranger")
	saysAs(t, db, child, "child")
	ends(t, db, other, "completed")
	flushes(t, db)
	if diff := cmp.Diff([]string{"other", "parent", "child"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
}

func TestAdminsMessagesWaitForTheirTurn(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	admin := func(words string) (s threads.SendResult) {
		t.Helper()
		if err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) (err error) {
			s, err = threads.SendTx(t.Context(), tx, threads.Outgoing{ThreadID: "t", Content: words})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := admin("one"); s.Queued {
		t.Errorf("in a free thread: %+v", s)
	}
	a := claimed(t, db, "")
	saysAs(t, db, a, "a")
	if s := admin("two"); !s.Queued {
		t.Errorf("in a held thread: %+v", s)
	}
	ends(t, db, a, "completed")
	flushes(t, db)
	// A turn of the chat that stands in the lane's queue goes first.
	exec(t, db, `select await_agent_lock('thread:t', 'first', 60, 60)`)
	exec(t, db, `select await_agent_lock('thread:t', 'a turn', 60, 60)`)
	exec(t, db, `select release_agent_lock('thread:t', 'first')`)
	if s := admin("three"); !s.Queued || s.Holder != "a turn" {
		t.Errorf("behind a turn: %+v", s)
	}
	b := claimed(t, db, "")
	if s := saysAs(t, db, b, "b"); !s.Queued {
		t.Errorf("behind a turn: %+v", s)
	}
	exec(t, db, `select await_agent_lock('thread:t', 'a turn', 60, 60)`)
	exec(t, db, `select release_agent_lock('thread:t', 'a turn')`)
	flushes(t, db)
	if diff := cmp.Diff([]string{"one", "a", "two", "three", "b"}, spoken(t, db, "t")); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
}

func TestSendRefusesWhatCannotBeSent(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a := claimed(t, db, "")
	for name, c := range map[string]struct {
		o    threads.Outgoing
		code string
	}{
		"empty":          {threads.Outgoing{ThreadID: "t", Content: " \n"}, ""},
		"no thread":      {threads.Outgoing{ThreadID: "none", Content: "x"}, ""},
		"channel":        {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "pigeon"}, "22023"},
		"no target":      {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "webhook"}, "22023"},
		"unknown target": {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "webhook", Target: "crm"}, "22023"},
		"an old claim":   {threads.Outgoing{ThreadID: "t", Content: "x", ExecutionID: a, Claim: 7}, "LK001"},
	} {
		err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) error {
			_, err := threads.SendTx(t.Context(), tx, c.o)
			return err
		})
		if err == nil || c.code != "" && !postgres.IsCode(err, c.code) {
			t.Errorf("%s: %v, want SQLSTATE %s", name, err, c.code)
		}
	}
	if n := value[int](t, db, `select count(*)::int from agent_messages`); n != 0 {
		t.Errorf("%d messages are there", n)
	}
}

func TestReleaseGivesAThreadUpEarly(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := runs(t, pool, map[string]flow{"flow": func(ctx context.Context) (executions.Result, error) {
		if err := says(ctx, "one"); err != nil {
			return done(err)
		}
		if freed, err := threads.Release(ctx, "t"); err != nil || !freed {
			return done(fmt.Errorf("released %t, %w", freed, err))
		}
		_, err := executions.Wait(ctx, "event", executions.Event("go", 0))
		return done(err)
	}})
	id := p.begin(t, "flow")
	p.reaches(t, id, executions.Waiting)
	if s := saysAs(t, pool, claimed(t, pool, ""), "two"); s.Queued {
		t.Errorf("in a thread that was given up: %+v", s)
	}
	p.log.want(t, `msg="lane released"`, "lane=thread:t", "owner="+id+"#1")
}
