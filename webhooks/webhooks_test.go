package webhooks_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	patience = 90 * time.Second
	whsec    = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// listener is somebody who is told of events.
type listener struct {
	*httptest.Server
	mu       sync.Mutex
	requests []*http.Request
	bodies   []string
}

// listens answers with what answer says, given how many requests came before.
func listens(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request)) *listener {
	t.Helper()
	l := &listener{}
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		l.mu.Lock()
		n := len(l.requests)
		l.requests, l.bodies = append(l.requests, r), append(l.bodies, string(body))
		l.mu.Unlock()
		answer(n, w, r)
	}))
	t.Cleanup(l.Close)
	return l
}

func status(code int) func(int, http.ResponseWriter, *http.Request) {
	return func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

func (l *listener) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.requests)
}

func (l *listener) host(t *testing.T) string {
	t.Helper()
	host, _, err := net.SplitHostPort(strings.TrimPrefix(l.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// target declares one that is told of everything.
func target(t *testing.T, db postgres.DB, d webhooks.TargetDefinition) {
	t.Helper()
	if d.Name == "" {
		d.Name = "them"
	}
	if d.Events == nil {
		d.Events = []string{"*"}
	}
	d.Secrets = []string{"${SECRET}"}
	if _, err := webhooks.PutTarget(t.Context(), db, d, webhooks.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
}

// dispatches runs a dispatcher until the test ends; allow are the private addresses that it may reach.
func dispatches(t *testing.T, pool *pgxpool.Pool, allow []string, schedule ...time.Duration) {
	t.Helper()
	client, err := skills.NewGuardedClient(allow, nil)
	if err != nil {
		t.Fatal(err)
	}
	notes := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	d := &webhooks.Dispatcher{
		Pool: pool, Client: client, Logger: slog.New(slog.DiscardHandler), Schedule: schedule, Listener: notes,
		Getenv: func(name string) string { return map[string]string{"SECRET": whsec}[name] },
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var group errgroup.Group
	group.Go(func() error { return d.Run(ctx) })
	group.Go(func() error { return notes.Run(ctx) })
	t.Cleanup(func() {
		stop()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// verify checks a request with the official library.
func (l *listener) verify(t *testing.T, i int) {
	t.Helper()
	wh, err := standardwebhooks.NewWebhook(whsec)
	if err != nil {
		t.Fatal(err)
	}
	if err := wh.Verify([]byte(l.bodies[i]), l.requests[i].Header); err != nil {
		t.Errorf("request %d: %v", i, err)
	}
}

// emit raises an event as a trigger would.
func emit(t *testing.T, db postgres.DB, event string) {
	t.Helper()
	exec(t, db, `select lanekeeper.emit_agent_webhook($1, 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', '{"id": "x"}')`, event)
}

// outbox waits for the one message to reach a state.
func outbox(t *testing.T, pool *pgxpool.Pool, want string) {
	t.Helper()
	pgtest.Eventually(t, patience, func() bool {
		return value[string](t, pool, `select status from agent_webhook_outbox`) == want
	}, "the message becomes "+want)
}

func value[T any](t *testing.T, db postgres.DB, sql string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func exec(t *testing.T, db postgres.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
