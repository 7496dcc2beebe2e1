//go:build unix

package linearizability_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// flows are durable functions that act in lanes: a parent that holds one and waits for children, which borrow it. What
// the engine does to their lanes is not recorded, so their lanes are judged by the fenced writes alone.
type flows struct {
	pool *pgxpool.Pool
	mu   sync.Mutex
	last grant // some token that was live once
}

// engine runs the flows of package executions in the lane, one parent after the other, until ctx ends.
func (p part) engine(ctx context.Context) error {
	pool, err := postgres.Open(ctx, p.URL, postgres.Options{
		MaxConns: 12, ConnectWait: patience,
		ApplicationName: "lanetest",
	})
	if err != nil {
		return err
	}
	defer pool.Close()
	quiet := slog.New(slog.DiscardHandler)
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	e, err := executions.New(pool, executions.Options{
		Keeper: keeper, Logger: quiet, LeaseTTL: 3 * time.Second, SweepEvery: 500 * time.Millisecond,
		StopTimeout: time.Second,
	})
	if err != nil {
		return err
	}
	f := &flows{pool: pool}
	if err := errors.Join(e.Register("lanetest parent", f.parent), e.Register("lanetest child", f.child)); err != nil {
		return err
	}
	var background sync.WaitGroup
	var failed [2]error
	background.Go(func() { failed[0] = keeper.Run(ctx) })
	background.Go(func() { failed[1] = e.Run(ctx) })
	for testkit.Wait(ctx, 150*time.Millisecond) {
		// One that is not started, because the database is away, is not missed.
		_, _, _ = e.Start(ctx, pool, executions.Spec{Flow: "lanetest parent", Surface: trace.Flow, Input: p.Own})
	}
	background.Wait()
	return errors.Join(failed[:]...)
}

// parent takes the lane, writes, and lets a child act in it, twice.
func (f *flows) parent(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var lane string
	if err := json.Unmarshal(input, &lane); err != nil {
		return executions.Result{}, err
	}
	for n := range 2 {
		hold, err := executions.LaneWait(ctx, lane, 3*time.Second, lanes.WithTTL(5*time.Second))
		if err != nil {
			return executions.Result{}, err // another parent's turn
		}
		f.write(ctx, lane, hold)
		child := executions.Child{Flow: "lanetest child", Input: lane, Wait: true, Timeout: 30 * time.Second}
		if _, err := executions.Trigger(ctx, fmt.Sprint("child ", n), child); err != nil {
			f.write(ctx, lane, hold) // parked, or lost: too late
			return executions.Result{}, err
		}
	}
	return executions.Result{}, nil
}

func (f *flows) child(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var lane string
	if err := json.Unmarshal(input, &lane); err != nil {
		return executions.Result{}, err
	}
	hold, err := executions.Lane(ctx, lane, lanes.WithTTL(time.Second))
	if err != nil {
		return executions.Result{}, err
	}
	for range 2 {
		f.write(ctx, lane, hold)
		testkit.Wait(ctx, time.Duration(rand.IntN(20))*time.Millisecond)
	}
	return executions.Result{}, nil
}

// write makes a fenced write under the hold's token, and tries one under an older.
func (f *flows) write(ctx context.Context, lane string, hold *executions.Hold) {
	x, _ := executions.Current(ctx)
	g := grant{lane: lane, owner: fmt.Sprint(x.ID, "#", x.Claim), token: hold.Token()}
	f.mu.Lock()
	old := f.last
	f.last = g
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for _, g := range []grant{old, g} {
		if g.token == 0 {
			continue
		}
		// Whether it is refused is up to the fence; what was written is looked at in the end.
		_ = postgres.InTx(ctx, f.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `select fence_agent_lock($1, $2)`, g.lane, g.token); err != nil {
				return err
			}
			return writeDown(ctx, tx, g)
		})
	}
}
