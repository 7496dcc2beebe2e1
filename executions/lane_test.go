package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// A LaneWait does not acquire a free lane before an earlier waiter.
func TestLaneWaitAcquiresLaneInTurn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	holder, err := keeper.Acquire(t.Context(), "thread:x")
	require.NoError(t, err)
	pgtest.Exec(t, pool, `select await_agent_lock('thread:x', 'earlier', 60, 60)`)
	queueing := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.LaneWait(ctx, "thread:x", 50*time.Millisecond); !errors.Is(err, lanes.ErrBusy) {
			return executions.Result{}, fmt.Errorf("LaneWait for a busy lane: %w, want ErrBusy", err)
		}
		close(queueing)
		hold, err := executions.LaneWait(ctx, "thread:x", timeout)
		if err != nil {
			return executions.Result{}, err
		}
		if err := hold.Context().Err(); err != nil {
			return executions.Result{}, fmt.Errorf("a new hold has a cancelled context: %w", err)
		}
		return executions.Result{Value: hold.Token()}, nil
	}))
	id := p.startFlow(t, "flow")
	testkit.Receive(t, queueing)
	pgtest.Until(t, pool, 2, `select count(*) from agent_lock_waiters where lane = 'thread:x'`)
	require.NoError(t, holder.Release(t.Context()))
	// Each attempt extends the place in the queue.
	placeEnd := func() time.Time {
		return pgtest.Value[time.Time](t, pool, `select expires_at from agent_lock_waiters where owner <> 'earlier'`)
	}
	end := placeEnd()
	pgtest.Eventually(t, func() bool { return placeEnd().After(end) }, "the flow attempts to acquire the free lane")
	var acquired bool
	var earlier int64
	require.NoError(t, pool.QueryRow(t.Context(), `
		select acquired, fencing_token from await_agent_lock('thread:x', 'earlier', 60, 60)`).Scan(&acquired, &earlier))
	require.True(t, acquired, "the earlier waiter did not acquire the lane")
	pgtest.Exec(t, pool, `select release_agent_lock('thread:x', 'earlier')`)
	x := enginetest.Await(t, pool, id, executions.Completed)
	var token int64
	require.NoError(t, json.Unmarshal(x.Result, &token))
	assert.Truef(t, token > earlier, "token %d after %d", token, earlier)
}

// A process may wake after another took over its claim, and still request a lane. It must not keep the lane, since its
// successor does not know of it.
func TestStaleClaimKeepsNoLane(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	laneErr := make(chan error, 1)
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		if !g.enter(ctx) {
			return executions.Result{}, nil // the successor takes no lane
		}
		_, err := executions.Lane(ctx, "pipeline:late")
		laneErr <- err
		return executions.Result{}, err
	})
	paused := newEngine(t, pool, flows)
	join := paused.runInBackground(t)
	id := g.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	enginetest.Await(t, pool, id, executions.Completed)
	g.open()
	assert.ErrorIs(t, testkit.Receive(t, laneErr), executions.ErrStale)
	join()
	assert.True(t, !pgtest.Value[bool](t, pool, `select is_agent_lock_held('pipeline:late')`), "a lost claim keeps a lane")
}

// A wait for a lane does not end while its queue has earlier waiters. It does end if the execution itself holds the
// lane.
func TestLaneFreeWaitsForEarlierWaiters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Lane(ctx, "thread:own"); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "own", executions.LaneFree("thread:own", time.Minute)); err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Wait(ctx, "queued", executions.LaneFree("thread:queued", time.Minute)))
	}))
	pgtest.Exec(t, pool, `select await_agent_lock('thread:queued', 'first', 60)`)
	pgtest.Exec(t, pool, `select await_agent_lock('thread:queued', 'second', 60, 60)`)
	pgtest.Exec(t, pool, `select release_agent_lock('thread:queued', 'first')`)
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	pgtest.Equal(t, pool, 1, `select wait_number from agent_executions where id = @id`, postgres.Strict{"id": id})
	pgtest.Exec(t, pool, `select leave_agent_lock_queue('thread:queued', 'second')`)
	enginetest.Await(t, pool, id, executions.Completed)
}

// An admin breaks the lane of a run whose claim is live. The run's next fenced write stops it.
func TestLostLaneIsNotLoggedAsLostClaim(t *testing.T) {
	t.Parallel()
	var log logLines
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		hold, err := executions.Lane(ctx, "pipeline:a")
		if err != nil {
			return executions.Result{}, err
		}
		x, _ := executions.Current(ctx)
		if x.Claim == 1 {
			pgtest.Exec(t, pool, `select break_agent_lock('pipeline:a', 'why')`)
		}
		return resultOf(executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (string, error) {
			return "", hold.Fence(ctx, tx)
		}))
	}), log.capture)
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	p.stop()
	assert.True(t, strings.Contains(log.String(), `"execution released"`), log.String())
	assert.True(t, !strings.Contains(log.String(), `"claim lost"`), log.String())
}

// The first attempt to write the completion was committed, but its response was lost.
func TestCompletionWithoutResponseIsLogged(t *testing.T) {
	t.Parallel()
	var log logLines
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution($1, $2, 'completed', '', null, null, null)`,
			x.ID, x.Claim)
		return executions.Result{}, nil
	}), log.capture)
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	p.stop()
	assert.True(t, strings.Contains(log.String(), `"execution completed"`), log.String())
}
