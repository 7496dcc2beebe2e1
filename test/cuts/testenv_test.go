package cuts_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// testEnv is the database, the model, the skills and the process of a story.
type testEnv struct {
	t      testing.TB
	db     *pgxpool.Pool // the test's own connections, without the proxy
	model  *modeltest.Server
	skills *bills.Skills
	url    string // of the process's HTTP
	agent  *agent

	ledger  *ledger
	hasCuts bool // the story has cuts

	mu        sync.Mutex
	incidents []string // failed attempts of clients
	log       testkit.Log
}

// newTestEnv creates a database with a workspace.
func newTestEnv(t testing.TB, database, declared string, cuts []cut) *testEnv {
	t.Helper()
	w := &testEnv{t: t, model: modeltest.New(t), ledger: newLedger(cuts), hasCuts: len(cuts) > 0}
	w.db = pgtest.Pool(t, database, postgres.Options{MaxConns: 3, ApplicationName: "cuts"})
	_, err := builtins.Put(t.Context(), w.db)
	require.NoError(t, err)
	w.skills = bills.Apply(t, w.db, declared)
	return w
}

// run calls fn while the parts of a process work. Their connections use the proxy.
func (w *testEnv) run(database string, s settings, fn func(ctx context.Context)) {
	w.t.Helper()
	p := newProxy(w.t, database, w.ledger)
	defer p.Close()
	for {
		err := w.process(p.URL(""), s, fn)
		if err == nil {
			return
		}
		if w.noteIncident("the process ended when it started, and was started again"); w.t.Context().Err() != nil {
			w.t.Fatal(err)
		}
	}
}

// process runs one process. An error means that it did not start; a supervisor would start it again.
func (w *testEnv) process(url string, s settings, fn func(ctx context.Context)) error {
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: 20})
	if err != nil {
		return err
	}
	defer pool.Close()
	a, err := newAgent(pool, w.model.URL(), s,
		slog.New(slog.NewTextHandler(&w.log, &slog.HandlerOptions{Level: slog.LevelInfo})))
	require.NoError(w.t, err)
	served := httptest.NewServer(a.handler)
	defer served.Close()
	defer served.CloseClientConnections()
	ended := make(chan error, 1)
	go func() { ended <- a.run(ctx) }()
	if err := w.waitWorking(ctx, a, ended); err != nil {
		return err
	}
	w.url, w.agent = served.URL, a
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn(ctx)
	}()
	select {
	case <-done:
	case err := <-ended:
		w.t.Errorf("the process ended while it worked: %v\n%s", err, w.log.String())
		cancel()
		<-done
		return nil
	}
	w.ledger.close()
	served.CloseClientConnections()
	cancel()
	assert.NoError(w.t, <-ended, "the process did not end well")
	return nil
}

// waitWorking waits until the engine claims work.
func (w *testEnv) waitWorking(ctx context.Context, a *agent, ended <-chan error) error {
	late := time.After(pgtest.Timeout)
	for a.engine.Live() != nil {
		select {
		case err := <-ended:
			return errors.Join(errors.New("the process ended"), err)
		case <-late:
			w.t.Fatalf("the process does not work: %v\n%s", a.engine.Live(), w.log.String())
		default:
			pause(ctx)
		}
	}
	return nil
}

// noteIncident records a failed attempt of a client.
func (w *testEnv) noteIncident(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.incidents = append(w.incidents, fmt.Sprintf(format, args...))
}

// reportedIncidents returns the incidents so far.
func (w *testEnv) reportedIncidents() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.incidents...)
}

// eventually waits for a condition. On a timeout, the failure has the log.
func (w *testEnv) eventually(what, sql string, args ...any) {
	w.t.Helper()
	late := time.After(pgtest.Timeout)
	for !pgtest.Value[bool](w.t, w.db, sql, args...) {
		select {
		case <-late:
			w.t.Fatalf("not within %s: %s\n%s", pgtest.Timeout, what, w.log.String())
		default:
			pause(w.t.Context())
		}
	}
}
