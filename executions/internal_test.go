package executions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// StartSeveral starts executions in one statement. Parameter here selects those that this process claims for callers.
func (e *Engine) StartSeveral(ctx context.Context, specs []Spec, here []bool) ([]Execution, error) {
	all := make([]insertParams, len(specs))
	for i, s := range specs {
		o, err := s.insertParams(here[i])
		if err != nil {
			return nil, err
		}
		all[i] = o
	}
	answers, err := e.startBatch(ctx, all)
	if err != nil {
		return nil, err
	}
	started := make([]Execution, len(answers))
	for i, a := range answers {
		started[i] = a.Value
	}
	return started, nil
}

// Works reports whether the workers of this process poll for executions.
func (e *Engine) Works() bool { return e.dispatching() }

// SweepPause returns the sweeper's pause.
func (e *Engine) SweepPause() time.Duration { return e.nextDue.sleepTime(time.Hour) }

// AsStored returns JSON in the form that jsonb returns.
func AsStored(text json.RawMessage) (json.RawMessage, error) { return jsonbText(text) }

// RenewWorker renews the lease of a worker, and reports whether it is live.
func RenewWorker(ctx context.Context, pool *pgxpool.Pool, id string) (alive bool, err error) {
	var mine, requested []string
	err = renewWorker(ctx, pool, id, &alive, &mine, &requested)
	return alive, err
}

// TryComplete completes a requested cancel unless a transaction still has the execution locked.
func (e *Engine) TryComplete(ctx context.Context, id string) (bool, error) {
	return e.tryCompleteCancel(ctx, id)
}

// unreachableEngine returns an engine whose database is unreachable. It counts the connection attempts.
func unreachableEngine(t *testing.T, log *slog.Logger, tries *int) *Engine {
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	require.NoError(t, err)
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		*tries++
		return nil, errors.New("away")
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	return &Engine{
		pool: pool, keeper: lanes.NewKeeper(pool, lanes.Options{}), opts: Options{SweepEvery: 5 * time.Second}, log: log,
		sweepRequests: make(chan struct{}, 1), timerChanged: make(chan struct{}, 1),
	}
}

// During an outage of the database, a due timer does not cause a sweep again and again.
func TestFailedSweepIsDelayed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		e := unreachableEngine(t, slog.New(slog.DiscardHandler), &tries)
		defer e.pool.Close()
		e.nextDue.set(time.Time{}, time.Now(), 1)
		ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second+time.Second/2)
		defer cancel()
		e.sweepLoop(ctx)
		synctest.Wait()
		assert.Truef(t, tries != 0 && tries <= 40, "%d tries to connect in ten seconds", tries)
	})
}

func TestFailedHousekeepingIsDelayed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		tries := 0
		e := unreachableEngine(t, slog.New(slog.NewTextHandler(&log, nil)), &tries)
		defer e.pool.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		e.sweepLoop(ctx)
		synctest.Wait()
		n := strings.Count(log.String(), "housekeeping failed")
		assert.Truef(t, n >= 5 && n <= 10, "%d failures in ten minutes, want about one per minute", n)
	})
}

// A lane that is handed over was never free. Handovers may happen a thousand times a second, so they request no sweep.
func TestHandoverRequestsNoSweep(t *testing.T) {
	t.Parallel()
	for message, wakes := range map[string]int{
		"pipeline:prices": 1, "": 1,
		"pipeline:prices\trun/1\t1795234346428444\t1795234356428444": 0,
	} {
		e := &Engine{sweepRequests: make(chan struct{}, 1)}
		e.onLaneFreed(message)
		assert.Equal(t, wakes, len(e.sweepRequests), message)
	}
}

// In a long outage of the database, workers claim no more often than in its first seconds, and log it once.
func TestFailedClaimsAreRateLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var tries, lines atomic.Int32
		config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
		require.NoError(t, err)
		config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			tries.Add(1)
			return nil, errors.New("away")
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		log := slog.New(slog.NewTextHandler(lineCounter{&lines, "ready executions not claimed"}, nil))
		c := newWorkerPool(&Engine{
			pool: pool, opts: Options{SweepEvery: time.Second, LeaseTTL: 30 * time.Second, Workers: 1},
			log: log,
		}, Background)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c.run(ctx, ctx)
		if n := tries.Load(); n < 60 || n > 125 { // a tick and one further try each second
			t.Errorf("%d tries in a minute", n)
		}
		assert.Equal(t, 1, lines.Load())
	})
}

// lineCounter counts the log lines that contain a text.
type lineCounter struct {
	lines *atomic.Int32
	words string
}

func (c lineCounter) Write(line []byte) (int, error) {
	if strings.Contains(string(line), c.words) {
		c.lines.Add(1)
	}
	return len(line), nil
}

// TestPollerWakesOneSubscriberPerExecution: two ready executions wake two of three claims.
func TestPollerWakesOneSubscriberPerExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPoller(slog.New(slog.DiscardHandler), func(context.Context, []string) (map[string]int, error) {
			return map[string]int{"external:sum": 2}, nil
		})
		p.limit = func(ready int) int { return ready }
		var woken atomic.Int32
		for range 3 {
			ready, unsubscribe := p.subscribe(t.Context(), "external:sum", "external:other")
			defer unsubscribe()
			go func() {
				select {
				case <-ready:
					woken.Add(1)
				case <-t.Context().Done():
				}
			}()
		}
		p.publish(map[string]int{"external:sum": 2})
		synctest.Wait()
		assert.Equal(t, 2, woken.Load())
	})
}

// TestPollerLogsFailureOnce: polls that fail alike, as without a database, give one warning.
func TestPollerLogsFailureOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines atomic.Int32
		log := slog.New(slog.NewTextHandler(lineCounter{&lines, "poll failed"}, nil))
		p := newPoller(log, func(context.Context, []string) (map[string]int, error) { return nil, io.EOF })
		_, unsubscribe := p.subscribe(t.Context(), "external:sum")
		defer unsubscribe()
		time.Sleep(10 * watchInterval)
		assert.Equal(t, 1, lines.Load())
	})
}

// TestPollerWakePollsAtOnce: a start in this process does not wait for the next poll.
func TestPollerWakePollsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPoller(slog.New(slog.DiscardHandler), func(context.Context, []string) (map[string]int, error) {
			return map[string]int{"external:sum": 1}, nil
		})
		ready, unsubscribe := p.subscribe(t.Context(), "external:sum")
		defer unsubscribe()
		began := time.Now()
		p.wake("external:sum")
		<-ready
		assert.Equal(t, 0, time.Since(began))
	})
}

func TestWaitEventsMatchSchema(t *testing.T) {
	t.Parallel()
	inSchema := pgtest.Value[map[string]string](t, pgtest.DB(t), `
		select jsonb_object_agg(k.kind, k.event) from lanekeeper.agent_wait_events k`)
	assert.Truef(t, maps.Equal(waitEvents, inSchema), "here %v, in the schema %v", waitEvents, inSchema)
}

// Work after a renewal may wait for locks for long. The renewed lease counts meanwhile.
func TestRenewalStoresDeadlineBeforeFurtherWork(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e, err := New(pool, Options{Keeper: lanes.NewKeeper(pool, lanes.Options{}), LeaseTTL: 30 * time.Second})
	require.NoError(t, err)
	worker, err := e.WorkerID(t.Context())
	require.NoError(t, err)
	id := pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow)
		values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'flow') returning id::text`)
	pgtest.Exec(t, pool, `select * from lanekeeper.claim_agent_execution($1, $2)`, id, worker) // a claim without a run
	require.NoError(t, e.renew(t.Context()))
	_, before := e.currentLease()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, `select from agent_executions for update`)
	renewed := make(chan error, 1)
	go func() { renewed <- e.renew(t.Context()) }()
	pgtest.AwaitBlocked(t, pool, 1, "")
	_, during := e.currentLease()
	assert.True(t, during.After(before), "the lease ends at", before, during)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-renewed)
}
