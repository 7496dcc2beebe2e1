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

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// heldOpen begins a transaction, as a client that leaves it open does.
func (h *hall) heldOpen(statements ...string) (end func()) {
	h.t.Helper()
	conn, err := pgx.ConnectConfig(h.t.Context(), h.db.Config().ConnConfig.Copy())
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(h.t.Context())) })
	for _, sql := range append([]string{"begin"}, statements...) {
		if _, err := conn.Exec(h.t.Context(), sql); err != nil {
			h.t.Fatalf("%s: %v", sql, err)
		}
	}
	return func() {
		if _, err := conn.Exec(h.t.Context(), "rollback"); err != nil {
			h.t.Fatal(err)
		}
	}
}

// flood repeats a request from many connections until stop is called. stop returns the answers by status, and one answer
// with 503. It prefers an answer that names the holder, then one that names the held row, to one that names the database:
// on a busy machine the look for the holder may come too late.
func (h *hall) flood(request func() visit) (stop func() (map[int]int, visit)) {
	var mu sync.Mutex
	var flooding sync.WaitGroup
	got, refused := map[int]int{}, visit{}
	quit := make(chan struct{})
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
					!strings.Contains(refused.body, "clumsy") && !strings.Contains(v.body, "database-away")) {
					refused = v
				}
				mu.Unlock()
			}
		})
	}
	pgtest.Eventually(h.t, pgWait, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return got[http.StatusServiceUnavailable] > 0
	}, "what is held is refused")
	return func() (map[int]int, visit) {
		close(quit)
		flooding.Wait()
		return got, refused
	}
}

// slowest is how long requests took, of all but one in a hundred. Each has to get the status.
func (h *hall) slowest(n, want int, request func(i int) visit) time.Duration {
	h.t.Helper()
	took := make([]time.Duration, n)
	for i := range n {
		began := time.Now()
		if v := request(i); v.status != want {
			h.t.Errorf("%d %s, want %d", v.status, v.body, want)
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return took[n*99/100]
}

// What a client holds in an open transaction delays requests for the same, which are told so, and no others.
func TestRequestsForWhatAClientHoldsDelayNoOthers(t *testing.T) {
	t.Parallel()
	h := newHall(t)
	admin := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	post := func(path, key, body string, headers ...string) func() visit {
		return func() visit { return h.send("POST", path, key, body, headers...) }
	}
	event := func(id string) string {
		return fmt.Sprintf(`{"event": "EVENT_COMPLETED", "key": %q, "id": %q}`, id, id)
	}
	h.admin("POST", "/v1/threads", map[string]any{"id": "held"}, http.StatusCreated, nil)
	h.admin("POST", "/v1/threads/held/messages", map[string]any{"content": "first"}, http.StatusCreated, nil)
	h.count(`with free as (select acquire_agent_lock('thread:held', 'somebody', 60), release_agent_lock('thread:held', 'somebody')) select count(*) from free`)
	hook := `{"do": "nothing", "content": "x", "n": 1}`
	if v := h.send("POST", "/webhooks/hire", hookKey, hook); v.status != http.StatusAccepted {
		t.Fatalf("%d %s", v.status, v.body)
	}
	for name, one := range map[string]struct {
		hold    string
		request func() visit
		tells   string // to an admin
	}{
		"event id": {
			`insert into agent_events (event, key, external_id) values ('EVENT_COMPLETED', 'k', 'held')`,
			post("/v1/events", admin, event("held")), `event id`,
		},
		"idempotency key": {
			`insert into agent_idempotency (scope, key, fingerprint, attempt, lease_until, expires_at)
			 values ('POST /v1/events admin', 'held', '\x00', gen_random_uuid(), now() + interval '1 hour', now() + interval '1 hour')`,
			post("/v1/events", admin, event("other"), "Idempotency-Key", "held"), `Idempotency-Key`,
		},
		"delivery": {
			`delete from agent_webhook_deliveries`, // which the same delivery has to wait for
			post("/webhooks/hire", hookKey, hook), "",
		},
		"lane of a thread": {
			`select from agent_locks where lane = 'thread:held' for update`,
			post("/v1/threads/held/messages", admin, `{"content": "hello"}`), `thread`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			calm := h.slowest(100, http.StatusAccepted, func(i int) visit { return post("/v1/events", admin, event(fmt.Sprint(name, " calm ", i)))() })
			end := h.heldOpen(`set local application_name = 'clumsy'`, one.hold)
			defer end()
			stop := h.flood(one.request)
			held := h.slowest(100, http.StatusAccepted, func(i int) visit { return post("/v1/events", admin, event(fmt.Sprint(name, " held ", i)))() })
			lanes := h.slowest(20, http.StatusOK, func(int) visit { return h.send("GET", "/v1/lanes", admin, "") })
			ready := h.slowest(20, http.StatusOK, func(int) visit { return h.send("GET", "/readyz", "", "") })
			got, refused := stop()
			t.Logf("p99 of unrelated events %s, and %s before; lanes %s, ready %s; requests for what is held %v", held, calm, lanes, ready, got)
			if most := max(time.Second, 10*calm); held > most || lanes > most || ready > most {
				t.Errorf("events take %s, lanes %s, readiness %s, and calm %s", held, lanes, ready, calm)
			}
			if got[http.StatusServiceUnavailable] == 0 || len(got) > 1 || refused.header.Get("Retry-After") == "" {
				t.Errorf("%v, %v", got, refused.header)
			}
			if !strings.Contains(refused.body, one.tells) || strings.Contains(refused.body, "clumsy") != (one.tells != "") {
				t.Errorf("a request for what is held: %s", refused.body)
			}
		})
	}
}
