package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// holdLocks opens a transaction and leaves it open.
func (h *strangerTest) holdLocks(statements ...string) (end func()) {
	h.t.Helper()
	conn, err := pgx.ConnectConfig(h.t.Context(), h.db.Config().ConnConfig.Copy())
	require.NoError(h.t, err)
	h.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(h.t.Context())) })
	for _, sql := range append([]string{"begin"}, statements...) {
		pgtest.Exec(h.t, conn, sql)
	}
	return func() {
		pgtest.Exec(h.t, conn, "rollback")
	}
}

// flood repeats a request on many connections until the caller calls stop. stop returns the responses by status, and
// one response with 503. It prefers a response that names the holder, then the locked row, then the database. A busy
// machine may find the holder too late.
func (h *strangerTest) flood(request func() httpResult) (stop func() (map[int]int, httpResult)) {
	var mu sync.Mutex
	var flooding sync.WaitGroup
	got, refused := map[int]int{}, httpResult{}
	quit := make(chan struct{})
	end := sync.OnceFunc(func() {
		close(quit)
		flooding.Wait()
	})
	h.t.Cleanup(end) // without a refusal, the test ends here
	for range 24 {
		flooding.Go(func() {
			for {
				select {
				case <-quit:
					return
				default:
				}
				v := request()
				mu.Lock()
				got[v.status]++
				if v.status == http.StatusServiceUnavailable && (refused.body == "" ||
					!strings.Contains(refused.body, "clumsy") && !strings.Contains(v.body, "has locked the rows")) {
					refused = v
				}
				mu.Unlock()
			}
		})
	}
	pgtest.Eventually(h.t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return got[http.StatusServiceUnavailable] > 0
	}, "a held request is rejected")
	return func() (map[int]int, httpResult) {
		end()
		return got, refused
	}
}

// medianTime returns the median of the response times. Every response must have the status.
func (h *strangerTest) medianTime(n, want int, request func(i int) httpResult) time.Duration {
	h.t.Helper()
	took := make([]time.Duration, n)
	for i := range n {
		began := time.Now()
		v := request(i)
		assert.Equal(h.t, want, v.status, v.body)
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return took[n/2]
}

// An open transaction of a client delays only requests for the same rows, with an explanation.
func TestLockedRowsDoNotDelayOthers(t *testing.T) {
	t.Parallel()
	h := newStrangerTest(t)
	admin := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	post := func(path, key, body string, headers ...string) func(h *strangerTest) httpResult {
		return func(h *strangerTest) httpResult { return h.send("POST", path, key, body, headers...) }
	}
	event := func(id string) string {
		return fmt.Sprintf(`{"event": "EVENT_COMPLETED", "key": %q, "id": %q}`, id, id)
	}
	h.admin("POST", "/v1/threads", map[string]any{"id": "held"}, http.StatusCreated, nil)
	h.admin("POST", "/v1/threads/held/messages", map[string]any{"content": "first"}, http.StatusCreated, nil)
	pgtest.Value[int](h.t, h.db, `with free as (select acquire_agent_lock('thread:held', 'somebody', 60),
		release_agent_lock('thread:held', 'somebody')) select count(*) from free`)
	hook := `{"do": "nothing", "content": "x", "n": 1}`
	v := h.send("POST", "/webhooks/hire", hookKey, hook)
	require.Equal(t, http.StatusAccepted, v.status, v.body)
	for name, one := range map[string]struct {
		hold    string
		request func(h *strangerTest) httpResult
		tells   string // in an admin's response
	}{
		"event id": {
			`insert into agent_events (event, key, external_id) values ('EVENT_COMPLETED', 'k', 'held')`,
			post("/v1/events", admin, event("held")), `event id`,
		},
		"idempotency key": {
			`insert into agent_idempotency (scope, key, fingerprint, attempt, lease_until, expires_at)
			 values ('POST /v1/events admin', 'held', '\x00', gen_random_uuid(), now() + interval '1 hour',
			   now() + interval '1 hour')`,
			post("/v1/events", admin, event("other"), "Idempotency-Key", "held"), `Idempotency-Key`,
		},
		"delivery": {
			`delete from agent_webhook_deliveries`, // blocks a delivery with the same id
			post("/webhooks/hire", hookKey, hook), "",
		},
		"lane of a thread": {
			`select from agent_locks where lane = 'thread:held' for update`,
			post("/v1/threads/held/messages", admin, `{"content": "hello"}`), `thread`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := &strangerTest{t, h.base, h.db}
			calm := h.medianTime(100, http.StatusAccepted,
				func(i int) httpResult { return post("/v1/events", admin, event(fmt.Sprint(name, " calm ", i)))(h) })
			end := h.holdLocks(`set local application_name = 'clumsy'`, one.hold)
			defer end()
			stop := h.flood(func() httpResult { return one.request(h) })
			held := h.medianTime(100, http.StatusAccepted,
				func(i int) httpResult { return post("/v1/events", admin, event(fmt.Sprint(name, " held ", i)))(h) })
			lanes := h.medianTime(20, http.StatusOK, func(int) httpResult { return h.send("GET", "/v1/lanes", admin, "") })
			ready := h.medianTime(20, http.StatusOK, func(int) httpResult { return h.send("GET", "/readyz", "", "") })
			got, refused := stop()
			t.Logf("median of unrelated events %s, and %s before; lanes %s, ready %s; requests for the held row %v", held,
				calm, lanes, ready, got)
			if most := max(time.Second, 10*calm); held > most || lanes > most || ready > most {
				t.Errorf("events take %s, lanes %s, readiness %s, and calm %s", held, lanes, ready, calm)
			}
			assert.Truef(t, got[http.StatusServiceUnavailable] != 0 && len(got) <= 1 && refused.header.Get("Retry-After") != "",
				"%v, %v", got, refused.header)
			assert.Truef(t, strings.Contains(refused.body, one.tells) &&
				strings.Contains(refused.body, "clumsy") == (one.tells != ""), "a request for what is held: %s", refused.body)
		})
	}
}
