//go:build unix

package randomflows_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// made is a call that came.
type made struct{ kind, execution, step, key string }

// sink is where calls go; it takes its time, so that processes die in some.
type sink struct {
	mu    sync.Mutex
	calls []made
}

// ServeHTTP counts a call.
func (s *sink) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	s.mu.Lock()
	s.calls = append(s.calls, made{q.Get("kind"), q.Get("execution"), q.Get("step"), q.Get("key")})
	s.mu.Unlock()
	time.Sleep(rand.N(30 * time.Millisecond))
}

// world is a database with the tables of the test, and an engine that runs nothing.
type world struct {
	t      testing.TB
	pool   *pgxpool.Pool
	engine *executions.Engine
	sink   *sink
	url    string // of the sink
}

func newWorld(t testing.TB, url string) *world {
	t.Helper()
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 12})
	w := &world{t: t, pool: pool, sink: &sink{}}
	var err error
	w.engine, err = executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(t, err)
	server := testkit.Serve(t, w.sink)
	w.url = server
	require.NoError(t, w.engine.Register(flowName, player{w.url}.flow))
	pgtest.Exec(w.t, w.pool, tables)
	return w
}

// many is how many flows there are, and how long there is trouble.
func many(t *testing.T) (flows int, lasts time.Duration) {
	t.Helper()
	text := os.Getenv("AGENT_FLOWS")
	if text == "" {
		return 80, 10 * time.Second
	}
	flows, err := strconv.Atoi(text)
	require.Truef(t, err == nil && flows >= 1, "AGENT_FLOWS=%s: a number of flows is asked for, such as 1000", text)
	return flows, max(10*time.Second, time.Duration(flows)*time.Minute/500)
}

// seedOf is what a run draws from.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("AGENT_FLOW_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	require.Truef(t, err == nil, "AGENT_FLOW_SEED=%s: %v", text, err)
	return seed
}

// TestRandomFlowsEndAsTheirModelSays runs random flows while processes are killed, stopped, ended and cut off.
func TestRandomFlowsEndAsTheirModelSays(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newWorld(t, url)
	flows, lasts := many(t)
	seed := seedOf(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("drawn from AGENT_FLOW_SEED=%d", seed)
		}
	})
	x := newTrouble(w, url)
	r := rand.New(rand.NewPCG(seed, 0))
	seeds := make([]uint64, flows)
	for i := range seeds {
		seeds[i] = r.Uint64()
	}
	var group errgroup.Group
	group.Go(func() error { return w.begin(t.Context(), seeds, lasts*7/10) })
	x.make(lasts)
	require.NoError(t, group.Wait())
	w.settle(patience + 4*lasts)
	w.keep()
	w.report(seeds)
	w.refork(r)
	for _, p := range x.slots {
		p.Stop()
	}
	t.Logf("%d kills, %d stops, %d ends, %d connections broken, %d pauses", x.kills, x.stops, x.ends, x.cuts, x.pauses)
	assert.True(t, x.kills+x.stops+x.ends != 0 && x.cuts != 0,
		"there was no trouble: the run does not show what it is for")
}

// begin starts a flow of each seed, all within so long, and delivers their events at some time, some of them twice.
func (w *world) begin(ctx context.Context, seeds []uint64, within time.Duration) error {
	var group errgroup.Group
	group.SetLimit(32)
	start := time.Now()
	for i, seed := range seeds {
		rest(max(0, time.Until(start.Add(within*time.Duration(i)/time.Duration(len(seeds))))))
		_, _, err := w.engine.Start(ctx, w.pool, executions.Spec{
			Flow: flowName, Surface: trace.Flow, Input: asked{Seed: strconv.FormatUint(seed, 10)},
			DedupeKey: strconv.FormatUint(seed, 10), MaxAttempts: 50,
		})
		if err != nil {
			return err
		}
		for _, key := range model(seed, 0).keys() {
			for range 1 + rand.IntN(2) {
				group.Go(func() error {
					rest(2 * time.Second)
					_, err := w.engine.Deliver(ctx, w.pool, "EVENT_COMPLETED", key, json.RawMessage(dataOf(key)), key)
					return err
				})
			}
		}
	}
	return group.Wait()
}

// settle waits until everything has ended.
func (w *world) settle(limit time.Duration) {
	w.t.Helper()
	began := time.Now()
	pgtest.Eventually(w.t, limit, func() bool {
		left := 0
		err := w.pool.QueryRow(w.t.Context(), `select count(*) from agent_executions where completed_at is null`).Scan(&left)
		return err == nil && left == 0
	}, "every flow ends")
	w.t.Logf("what was under way ended within %s", time.Since(began).Round(time.Millisecond))
}

// keep writes down what only the sink knows.
func (w *world) keep() {
	w.t.Helper()
	w.sink.mu.Lock()
	defer w.sink.mu.Unlock()
	for _, c := range w.sink.calls {
		pgtest.Exec(w.t, w.pool, `insert into proof.calls (kind, execution_id, step, key) values ($1, $2, $3, $4)`, c.kind,
			c.execution, c.step,
			c.key)
	}
}

// report makes an error of whatever does not hold.
func (w *world) report(seeds []uint64) {
	w.t.Helper()
	w.expect(seeds)
	for name, sql := range checks {
		for i, found := range pgtest.Column[string](w.t, w.pool, sql) {
			if i == 10 {
				w.t.Errorf("%s: and more", name)
				break
			}
			w.t.Errorf("%s: %s", name, found)
		}
	}
	for _, found := range w.replays() {
		w.t.Error(found)
	}
}
