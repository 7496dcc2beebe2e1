package threads_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const whsec = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// posted is one request to a target.
type posted struct {
	ID      string
	Content string
	Status  int
}

// target is a server. Its answer function returns the status by the number of earlier posts of the content.
type target struct {
	*httptest.Server
	mu    sync.Mutex
	posts []posted
}

// startTarget starts a server and declares it as a target.
func startTarget(
	t *testing.T, pool *pgxpool.Pool, name string, answer func(n int, content string, r *http.Request) int,
) *target {
	t.Helper()
	l := &target{}
	verifier, err := standardwebhooks.NewWebhook(whsec)
	require.NoError(t, err)
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = verifier.Verify(body, r.Header)
		}
		var event struct {
			Type string
			Data struct{ Content string }
		}
		if err == nil {
			err = json.Unmarshal(body, &event)
		}
		assert.Truef(t, err == nil && event.Type == "thread.message", "a post: %v in %s", err, body)
		l.mu.Lock()
		n := 0
		for _, p := range l.posts {
			if p.Content == event.Data.Content {
				n++
			}
		}
		i := len(l.posts)
		l.posts = append(l.posts, posted{ID: r.Header.Get("webhook-id"), Content: event.Data.Content})
		l.mu.Unlock()
		status := answer(n, event.Data.Content, r)
		l.mu.Lock()
		l.posts[i].Status = status
		l.mu.Unlock()
		w.WriteHeader(status)
	}))
	t.Cleanup(l.Close)
	_, err = webhooks.PutTarget(t.Context(), pool, webhooks.TargetDefinition{
		Name: name, URL: l.URL, Secrets: []string{"${SECRET}"}, Events: []string{"webhook.dead"},
	})
	require.NoError(t, err)
	return l
}

func (l *target) contents() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.posts {
		all = append(all, p.Content)
	}
	return all
}

// startDispatcher runs a dispatcher until the end of the test.
func startDispatcher(t *testing.T, pool *pgxpool.Pool) *logRecorder {
	t.Helper()
	host, _, err := net.SplitHostPort("127.0.0.1:80")
	require.NoError(t, err)
	client, err := skills.NewGuardedClient([]string{host}, nil)
	require.NoError(t, err)
	log := &logRecorder{}
	notes := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	c := &threads.Dispatcher{
		Pool: pool, Client: client, Logger: slog.New(slog.NewTextHandler(log, nil)), Listener: notes,
		Getenv:   func(name string) string { return map[string]string{"SECRET": whsec}[name] },
		Schedule: []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond},
	}
	testkit.Run(t, c.Run, notes.Run)
	return log
}

// createThread creates a thread whose messages go to a target.
func createThread(t *testing.T, db postgres.DB, id, channel, target string) {
	t.Helper()
	_, made, err := threads.Ensure(t.Context(), db, threads.Thread{ID: id, Channel: channel, Target: target})
	require.Truef(t, err == nil && made, "made %t, %v", made, err)
}

// sendByAdmin sends messages without an execution, and returns the result of the last one.
func sendByAdmin(t *testing.T, db postgres.Beginner, thread string, contents ...string) (last threads.SendResult) {
	t.Helper()
	for _, content := range contents {
		require.NoError(t, postgres.InTx(t.Context(), db, func(tx pgx.Tx) (err error) {
			last, err = threads.SendTx(t.Context(), tx, threads.Outgoing{ThreadID: thread, Content: content})
			return err
		}))
	}
	return last
}

// awaitDelivered waits until no message is queued or being delivered.
func awaitDelivered(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Until(t, db, 0, `select count(*)::int from agent_messages where status in ('queued', 'sending')`)
}

// deliveryStates lists the messages with status and number of attempts.
func deliveryStates(t *testing.T, db postgres.DB) []string {
	t.Helper()
	return pgtest.Value[[]string](t, db, `select array_agg(content || ' ' || status || ' ' || attempts
		order by thread_id, seq) from agent_messages`)
}

func TestMessagesArePostedInOrderUnderOneID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	crm := startTarget(t, pool, "crm", func(n int, content string, _ *http.Request) int {
		if content == "two" && n < 2 || content == "never" {
			return http.StatusInternalServerError
		}
		return http.StatusOK
	})
	createThread(t, pool, "t", threads.ChannelWebhook, "crm")
	sendByAdmin(t, pool, "t", "one", "two", "never", "three")
	startDispatcher(t, pool)
	awaitDelivered(t, pool)
	want := []string{"one", "two", "two", "two", "never", "never", "never", "never", "three"}
	assert.NoDiff(t, want, crm.contents())
	diff := cmp.Diff([]string{"one delivered 1", "two delivered 3", "never failed 4", "three delivered 1"},
		deliveryStates(t, pool))
	assert.Truef(t, diff == "", "messages (-want +got):\n%s", diff)
	ids := map[string]string{}
	for _, p := range crm.posts {
		if ids[p.Content] == "" {
			ids[p.Content] = p.ID
		}
		id := pgtest.Value[string](t, pool, `select id::text from agent_messages where content = $1`, p.Content)
		assert.Truef(t, p.ID == ids[p.Content] && p.ID == id, "%s was posted under %s, its id is %s", p.Content, p.ID, id)
	}
	assert.Contains(t, pgtest.Value[string](t, pool,
		`select error_message from agent_messages where content = 'never'`), "500")
}

func TestHangingTargetDelaysNoOther(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	release := make(chan struct{})
	startTarget(t, pool, "slow", func(_ int, _ string, r *http.Request) int {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return http.StatusOK
	})
	fast := startTarget(t, pool, "fast", func(int, string, *http.Request) int { return http.StatusOK })
	for i := range 20 {
		id := fmt.Sprintf("slow %02d", i)
		createThread(t, pool, id, threads.ChannelWebhook, "slow")
		sendByAdmin(t, pool, id, "a", "b")
	}
	createThread(t, pool, "fast", threads.ChannelWebhook, "fast")
	createThread(t, pool, "log", threads.ChannelLog, "")
	sendByAdmin(t, pool, "fast", "x", "y")
	sendByAdmin(t, pool, "log", "for the log")
	log := startDispatcher(t, pool)
	pgtest.Eventually(t, func() bool { return len(fast.contents()) == 2 }, "the fast target receives both messages")
	pgtest.Until(t, pool, "delivered", `select status from agent_messages where thread_id = 'log'`)
	log.assertLine(t, "msg=message", `content="for the log"`, "thread_id=log")
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*)::int from agent_messages where thread_id like 'slow %'
		and status = 'delivered'`), "messages delivered to the hanging target")
	close(release)
	awaitDelivered(t, pool)
}

// A dispatcher dies between the post and its record. Another posts again, under the same id.
func TestLostAttemptIsRepeatedUnderSameID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	crm := startTarget(t, pool, "crm", func(int, string, *http.Request) int { return http.StatusOK })
	createThread(t, pool, "t", threads.ChannelWebhook, "crm")
	sendByAdmin(t, pool, "t", "one", "two")
	// The dead dispatcher left an attempt without a recorded result.
	pgtest.Exec(t, pool, `update agent_messages set attempts = 1, next_attempt_at = clock_timestamp() + interval '1 hour'
		where content = 'one'`)
	id := pgtest.Value[string](t, pool, `select id::text from agent_messages where content = 'one'`)
	startDispatcher(t, pool)
	startDispatcher(t, pool)
	sendByAdmin(t, pool, "t", "three")
	got := crm.contents()
	assert.Truef(t, len(got) == 0, "posted while another dispatcher holds the attempt: %v", got)
	pgtest.Exec(t, pool, `update agent_messages set next_attempt_at = clock_timestamp() where content = 'one'`)
	pgtest.Exec(t, pool, `select pg_notify('agent_outbox', '')`)
	awaitDelivered(t, pool)
	assert.NoDiff(t, []string{"one", "two", "three"}, crm.contents())
	// The lost dispatcher records its attempt too late.
	thread := pgtest.Value[string](t, pool, `select thread_id from agent_messages where id = $1`, id)
	recorded, err := threads.SettleFailed(t.Context(), pool, thread, id, 1)
	assert.Truef(t, !recorded && err == nil, "recorded the lost attempt: %t, %v", recorded, err)
	assert.NoDiff(t, []string{"one delivered 2", "two delivered 1", "three delivered 1"}, deliveryStates(t, pool))
}

func TestConcurrentDispatchersDeliverOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	crm := startTarget(t, pool, "crm", func(int, string, *http.Request) int { return http.StatusOK })
	for i := range 10 {
		id := fmt.Sprintf("t%d", i)
		createThread(t, pool, id, threads.ChannelWebhook, "crm")
		for n := range 5 {
			sendByAdmin(t, pool, id, fmt.Sprintf("t%d %d", i, n))
		}
	}
	for range 4 {
		startDispatcher(t, pool)
	}
	awaitDelivered(t, pool)
	last := map[string]int{}
	for _, c := range crm.contents() {
		var thread string
		var n int
		_, err := fmt.Sscanf(c, "%s %d", &thread, &n)
		assert.Truef(t, err == nil && last[thread] == n, "%s came after %d of its thread, %v", c, last[thread], err)
		last[thread] = n + 1
	}
	assert.Equal(t, 50, len(crm.contents()))
}

// A thread's queue is sent as soon as the thread is free. An idle thread is freed.
func TestDispatcherFlushesAndReleasesThreads(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a, b, c := startClaimed(t, db, ""), startClaimed(t, db, ""), startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	sendAs(t, db, b, "b")
	sendAs(t, db, c, "c")
	log := startDispatcher(t, db)
	endExecution(t, db, a, "completed")
	pgtest.Eventually(t, func() bool { return len(sentContents(t, db, "t")) == 2 }, "b's message is sent")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:t'`)
	pgtest.Eventually(t, func() bool { return len(sentContents(t, db, "t")) == 3 }, "c's message is sent")
	// No execution uses this thread. It is freed after its idle time, and that is logged.
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '10 minutes'
		where lane = 'thread:t'`)
	pgtest.Until(t, db, "", `select locked_by from agent_locks where lane = 'thread:t'`)
	pgtest.Eventually(t, func() bool {
		return log.hasLine("level=WARN", `msg="lane stale, clearing"`, "holder="+c)
	}, "the release is logged")
}
