package api_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

func countingEndpoint(calls *atomic.Int64, act func(w http.ResponseWriter, r *http.Request, n int64)) api.Endpoint {
	return api.Endpoint{
		Method: "POST", Path: "/v1/things", About: "Make a thing.", Access: api.Visitor, Idempotent: true, Stream: true,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { act(w, r, calls.Add(1)) }),
	}
}

func writeCount(w http.ResponseWriter, _ *http.Request, n int64) {
	w.Header().Set("X-Trace-Id", "ch_1")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, `{"n":%d}`, n)
}

func (a *agent) postWithKey(path, body, bearerKey, key string) *httptest.ResponseRecorder {
	a.t.Helper()
	header := bearer(bearerKey)
	header.Set("Idempotency-Key", key)
	return a.raw("POST", path, body, header)
}

func TestIdempotencyReplaysResponse(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	a := withEndpoints(t, countingEndpoint(&calls, writeCount))
	first := a.postWithKey("/v1/things", `{"a":1}`, chatKey, "k1")
	again := a.postWithKey("/v1/things", `{"a":1}`, chatKey, "k1")
	assert.Truef(t, first.Code == 201 && again.Code == 201 && again.Body.String() == first.Body.String() &&
		first.Body.String() == `{"n":1}`, "%d %s, then %d %s", first.Code, first.Body, again.Code, again.Body)
	assert.Truef(t, again.Header().Get("X-Trace-Id") == "ch_1" &&
		again.Header().Get("Content-Type") == "application/json" && again.Header().Get("Idempotent-Replayed") == "true" &&
		first.Header().Get("Idempotent-Replayed") == "", "%v, then %v", first.Header(), again.Header())
	a.checkProblem(a.postWithKey("/v1/things", `{"a":2}`, chatKey, "k1"), 422, "a different request")
	a.checkProblem(a.postWithKey("/v1/things?x=1", `{"a":1}`, chatKey, "k1"), 422, "a different request")
	for name, other := range map[string]*httptest.ResponseRecorder{
		"another key":     a.postWithKey("/v1/things", `{"a":1}`, chatKey, "k2"),
		"another visitor": a.postWithKey("/v1/things", `{"a":1}`, otherKey, "k1"),
		"no key":          a.raw("POST", "/v1/things", `{"a":1}`, bearer(chatKey)),
	} {
		assert.Truef(t, other.Header().Get("Idempotent-Replayed") == "" && other.Code == 201,
			"%s: %d %v", name, other.Code, other.Header())
	}
	assert.Equal(t, 4, calls.Load())
	pgtest.Exec(t, a.pool, `update agent_idempotency set expires_at = clock_timestamp() where key = 'k1'`)
	later := a.postWithKey("/v1/things", `{"a":2}`, chatKey, "k1")
	assert.Truef(t, later.Code == 201 && later.Header().Get("Idempotent-Replayed") == "",
		"after its day: %d %s", later.Code, later.Body)
	pgtest.Exec(t, a.pool, `update agent_idempotency set expires_at = clock_timestamp() where key = 'k2'`)
	require.NoError(t, api.DeleteExpiredKeys(t.Context(), a.pool))
	pgtest.Equal(t, a.pool, 0, `select count(*) from agent_idempotency where key = 'k2'`)
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_idempotency where key = 'k1'`) // the later one
}

func TestConcurrentRequestsWithKey(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	release := make(chan struct{})
	a := withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		<-release
		writeCount(w, r, n)
	}))
	var statuses [600]atomic.Int64
	var group sync.WaitGroup
	var refused sync.WaitGroup
	refused.Add(49)
	for range 50 {
		group.Go(func() {
			w := a.postWithKey("/v1/things", "{}", chatKey, "race")
			statuses[w.Code].Add(1)
			if w.Code == http.StatusConflict {
				refused.Done()
			}
		})
	}
	refused.Wait() // all others get 409 while the first runs
	close(release)
	group.Wait()
	assert.Truef(t, calls.Load() == 1 && statuses[201].Load() == 1 && statuses[409].Load() == 49,
		"handled %d times, %d made, %d refused", calls.Load(), statuses[201].Load(), statuses[409].Load())
	again := a.postWithKey("/v1/things", "{}", chatKey, "race")
	assert.Truef(t, again.Code == 201 && again.Header().Get("Idempotent-Replayed") == "true",
		"later: %d %v", again.Code, again.Header())
}

func TestExpiredAttemptIsReplaced(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	var a *agent
	a = withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		if n == 1 {
			pgtest.Exec(t, a.pool, `update agent_idempotency set lease_until = clock_timestamp() where key = 'k'`)
			a.checkProblem(a.postWithKey("/v1/things", "other", chatKey, "k"), 422, "different")
			second := a.postWithKey("/v1/things", "{}", chatKey, "k")
			assert.Truef(t, second.Body.String() == `{"n":2}`, "the second attempt: %d %s", second.Code, second.Body)
		}
		writeCount(w, r, n)
	}))
	first := a.postWithKey("/v1/things", "{}", chatKey, "k")
	assert.Truef(t, first.Body.String() == `{"n":1}`, "the first attempt: %d %s", first.Code, first.Body)
	if kept := a.postWithKey("/v1/things", "{}", chatKey, "k"); kept.Body.String() != `{"n":2}` || calls.Load() != 2 {
		t.Errorf("kept is %s after %d calls: the attempt that lost its lease has overwritten it", kept.Body, calls.Load())
	}
}

// A client that disconnects at any moment can retry.
func TestRetryAfterDisconnect(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	a := withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		if r.Context().Err() != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		writeCount(w, r, n)
	}))
	for i := range 300 {
		ctx, leave := context.WithCancel(t.Context())
		header := bearer(chatKey)
		header.Set("Idempotency-Key", fmt.Sprint(i))
		timer := time.AfterFunc(time.Duration(4*i)*time.Microsecond, leave)
		a.send(ctx, "POST", "/v1/things", "{}", header)
		timer.Stop()
		leave()
		if got := a.send(t.Context(), "POST", "/v1/things", "{}", header); got.Code != http.StatusCreated {
			t.Fatalf("after a client that left within %d µs: %d %s", 4*i, got.Code, got.Body)
		}
	}
}

func TestFailuresAreNotStored(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]func(w http.ResponseWriter){
		"500":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusInternalServerError) },
		"503":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) },
		"422":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusUnprocessableEntity) },
		"409":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusConflict) },
		"429":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) },
		"panic": func(http.ResponseWriter) { panic("so be it") },
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int64
			a := withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
				if n == 1 {
					act(w)
					return
				}
				writeCount(w, r, n)
			}))
			first := a.postWithKey("/v1/things", "{}", chatKey, "k")
			again := a.postWithKey("/v1/things", `{"corrected":true}`, chatKey, "k")
			assert.Truef(t, first.Code >= 400 && again.Code == 201 && again.Header().Get("Idempotent-Replayed") == "",
				"%d, then %d %v", first.Code, again.Code, again.Header())
		})
	}
}

func TestStreamIsNotRepeated(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	a := withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, _ *http.Request, _ int64) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		w.Header().Set("X-Trace-Id", "ch_7") // the stream waited before its turn began
		w.Header().Set("X-Thread-Id", "th_1")
		fmt.Fprint(w, "data: 2\n\n")
	}), api.Endpoint{
		Method: "POST", Path: "/v1/large", About: "A large answer.", Access: api.Admin, Scope: principals.Operate,
		Idempotent: true,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for range 3 {
				fmt.Fprint(w, strings.Repeat("x", 600<<10))
			}
		}),
	})
	if w := a.postWithKey("/v1/things", "{}", chatKey, "k"); w.Body.String() != "data: 1\n\ndata: 2\n\n" || !w.Flushed {
		t.Errorf("%d %q, flushed %v", w.Code, w.Body, w.Flushed)
	}
	p := a.checkProblem(a.postWithKey("/v1/things", "{}", chatKey, "k"), 409, "not stored; see thread th_1")
	assert.Truef(t, p.TraceID == "ch_7" && calls.Load() == 1, "%+v after %d calls", p, calls.Load())
	assert.Equal(t, 1800<<10, a.postWithKey("/v1/large", "{}", token, "k").Body.Len(), "bytes arrived")
	a.checkProblem(a.postWithKey("/v1/large", "{}", token, "k"), 409, "not stored")
}

func TestInvalidIdempotencyKey(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	a := withEndpoints(t, countingEndpoint(&calls, writeCount))
	for _, key := range []string{"", " ", strings.Repeat("x", 256), "a\tb", "schlüssel"} {
		a.checkProblem(a.postWithKey("/v1/things", "{}", chatKey, key), 400, "Idempotency-Key")
	}
	header := bearer(chatKey)
	header["Idempotency-Key"] = []string{"a", "b"}
	a.checkProblem(a.raw("POST", "/v1/things", "{}", header), 400, "Idempotency-Key")
	for _, key := range []string{"x", strings.Repeat("x", 255), `"8e03978e-40d5-43dd-bc93-6894a57f9324"`} {
		assert.Equal(t, 201, a.postWithKey("/v1/things", "{}", chatKey, key).Code, key)
	}
	assert.Equal(t, 3, calls.Load())
}

func TestBuiltinRoutesHonourKeys(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	first := a.postWithKey("/v1/skills/fetch/disable", `{"reason":"x"}`, token, "k")
	again := a.postWithKey("/v1/skills/fetch/disable", `{"reason":"x"}`, token, "k")
	assert.Truef(t, first.Code == 200 && again.Body.String() == first.Body.String(),
		"%d %s, then %d %s", first.Code, first.Body, again.Code, again.Body)
	a.checkProblem(a.postWithKey("/v1/skills/other/disable", `{"reason":"x"}`, token, "k"), 422, "a different request")
	header := withHeader("If-Match", `"7"`)
	header.Set("Idempotency-Key", "k")
	a.checkProblem(a.raw("POST", "/v1/skills/fetch/disable", `{"reason":"x"}`, header), 422, "a different request")
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_activity where skill_name = @s`,
		postgres.Strict{"s": "disable_skill"})
}

// A repeated request makes no second secret, and the server stores none.
func TestKeyOfResponseWithSecret(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.tokenOf("anna")
	a.create("/v1/threads", `{"id":"t1"}`, nil)
	for path, body := range map[string]string{
		"/v1/tokens":                      `{"principal":"anna","name":"w","scopes":["*"],"reason":"x"}`,
		"/v1/principals/anna/login_links": `{"reason":"x"}`,
		"/v1/threads/t1/join_tokens":      `{}`,
	} {
		first := a.postWithKey(path, body, token, "k")
		assert.Truef(t, first.Code == 201 && first.Body.Len() > 0, "%s: %d %s", path, first.Code, first.Body)
		a.checkProblem(a.postWithKey(path, body, token, "k"), 409, "has a secret and was not stored; ")
	}
	pgtest.Equal(t, a.pool, 3, `select count(*) from agent_idempotency where state = 'unkept' and body = ''`)
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_activity where skill_name = 'invite_into_thread'`)
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_login_links`)
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_tokens where name = 'w'`)
}

func TestLateRetryOfPauseChangesNothing(t *testing.T) {
	t.Parallel()
	a := start(t)
	first := a.postWithKey("/v1/pause", `{"reason":"x"}`, token, "p")
	a.postWithKey("/v1/resume", `{"reason":"x"}`, token, "r")
	again := a.postWithKey("/v1/pause", `{"reason":"x"}`, token, "p")
	assert.Truef(t, first.Code == 200 && again.Body.String() == first.Body.String(),
		"%d %s, then %d %s", first.Code, first.Body, again.Code, again.Body)
	var state struct{ Paused bool }
	a.get("/v1/pause", &state)
	assert.True(t, !state.Paused, "the retry paused the agent again")
}

// A key lasts for a day and belongs to its caller. Its effects last longer.
func TestKeyExpires(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	_, otherToken := a.key(principals.User, principals.Admin, 0, "*")
	for name, test := range map[string]struct {
		path, body, table string
		status            int
	}{
		"a start":   {"/v1/executions", `{"flow":"external:x"}`, "agent_executions", 201},
		"an event":  {"/v1/events", `{"event":"EVENT_COMPLETED","key":"k"}`, "agent_events", 202},
		"a message": {"/v1/threads/t/messages", `{"content":"Hello."}`, "agent_messages", 201},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			requireRows := func(want int, caller string) {
				t.Helper()
				pgtest.Exec(t, a.pool, `delete from agent_idempotency`) // like a dead process, or a key older than a day
				w := a.postWithKey(test.path, test.body, caller, "nightly")
				require.Truef(t, w.Code == test.status, "got %d %s", w.Code, w.Body)
				pgtest.Equal(t, a.pool, want, `select count(*) from `+test.table)
			}
			requireRows(1, token)
			requireRows(1, token)
			requireRows(2, otherToken)
			requireRows(2, otherToken)
			pgtest.Exec(t, a.pool, `update `+test.table+
				` set id = lanekeeper.agent_uuid7(clock_timestamp() - interval '25 hours')`)
			requireRows(3, token)
			requireRows(3, token)
			pgtest.Exec(t, a.pool, `update `+test.table+
				` set id = lanekeeper.agent_uuid7(clock_timestamp() - interval '23 hours')
					where id > lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '1 hour')`)
			requireRows(3, token)
		})
	}
}

// An outage during a request releases its key.
func TestKeyIsReleasedAfterOutage(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	var a *agent
	away := func() { pgtest.Exec(t, a.pool, `alter table agent_idempotency rename to away`) }
	back := func() { pgtest.Exec(t, a.pool, `alter table away rename to agent_idempotency`) }
	a = withEndpoints(t, countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		switch n {
		case 1:
			away()
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2:
			writeCount(w, r, n)
		case 3:
			away()
			writeCount(w, r, n)
		}
	}))
	a.postWithKey("/v1/things", "{}", chatKey, "refused")
	a.checkProblem(a.postWithKey("/v1/things", "{}", chatKey, "meanwhile"), 500, "")
	back()
	got := a.postWithKey("/v1/things", "{}", chatKey, "refused")
	assert.Truef(t, got.Code == http.StatusCreated, "after a refusal that was not recorded: %d %s", got.Code, got.Body)
	a.postWithKey("/v1/things", "{}", chatKey, "answered")
	back()
	again := a.postWithKey("/v1/things", "{}", chatKey, "answered")
	if again.Code != http.StatusCreated || again.Header().Get("Idempotent-Replayed") != "true" || calls.Load() != 3 {
		t.Errorf("after an answer that was not recorded: %d %s, after %d calls", again.Code, again.Body, calls.Load())
	}
}

// losingPool returns a pool that loses replies, and cannot reconnect, while deaf is set.
func losingPool(t *testing.T, pool *pgxpool.Pool, most int32) (losing *pgxpool.Pool, deaf *lostReplies) {
	t.Helper()
	deaf = &lostReplies{}
	config := pool.Config()
	dial := config.ConnConfig.DialFunc
	config.MaxConns = most
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if deaf.lost.Load() {
			return nil, errors.New("away")
		}
		conn, err := dial(ctx, network, address)
		return lostReplyConn{conn, deaf}, err
	}
	losing, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(losing.Close)
	return losing, deaf
}

// The key is released even if the reply to its claim was lost.
func TestKeyIsReleasedAfterLostClaimReply(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	breaking, deaf := losingPool(t, pool, 1)
	a := newAgent(t, breaking, engine(t, pool))
	start := `{"flow": "external:job"}`
	got := a.postWithKey("/v1/executions", start, token, "before")
	require.Truef(t, got.Code == http.StatusCreated, "%d %s", got.Code, got.Body)
	deaf.lost.Store(true)
	a.checkProblem(a.postWithKey("/v1/executions", start, token, "unheard"), 503, "")
	require.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_idempotency where key = 'unheard'`))
	deaf.lost.Store(false)
	got = a.postWithKey("/v1/executions", start, token, "unheard")
	assert.Truef(t, got.Code == http.StatusCreated, "when the database is back: %d %s", got.Code, got.Body)
}

// Another process need not wait for the lease: the first process releases the key after the outage.
func TestKeyIsReleasedForOtherProcesses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	breaking, deaf := losingPool(t, pool, pool.Config().MaxConns)
	var calls atomic.Int64
	things := countingEndpoint(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		if n > 1 {
			writeCount(w, r, n)
			return
		}
		pgtest.Exec(t, pool, `update agent_idempotency set lease_until = clock_timestamp() + interval '1 hour'`)
		deaf.lost.Store(true)
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	o := api.Options{
		Pool: breaking, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey},
		Endpoints: []api.Endpoint{things},
	}
	a := newAgentWith(t, o)
	o.Pool = pool
	other := newAgentWith(t, o)
	a.postWithKey("/v1/things", "{}", chatKey, "k")
	other.checkProblem(other.postWithKey("/v1/things", "{}", chatKey, "k"), 409, "still")
	deaf.lost.Store(false)
	pgtest.Eventually(t, func() bool {
		return other.postWithKey("/v1/things", "{}", chatKey, "k").Code == http.StatusCreated
	}, "the key is free elsewhere")
}

// lostReplies is a network that can lose replies. While lost is set, it delivers requests, loses replies and refuses
// new connections.
type lostReplies struct{ lost atomic.Bool }

type lostReplyConn struct {
	net.Conn
	*lostReplies
}

func (c lostReplyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.lost.Load() {
		return 0, io.EOF
	}
	return n, err
}
