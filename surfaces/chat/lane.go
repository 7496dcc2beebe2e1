package chat

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Waits for the lane: in the queue with a client, in the queue without one, and durably, without a worker.
const (
	laneQueueWait     = 5 * time.Second
	headlessQueueWait = time.Second
	laneWait          = time.Minute
)

// acquire waits for the earlier turns of the thread, then acquires or renews the lane. A turn whose client waits here
// waits in the process for up to InProcessWait, any other durably. step names the waits.
func (t *turn) acquire(ctx context.Context, step string) (context.Context, error) {
	deadline := time.Now().Add(t.InProcessWait)
	for {
		inProcess := t.startedHere && time.Now().Before(deadline) && !errors.Is(t.Engine.Live(), executions.ErrDraining)
		ended := t.turnEnded.next()
		earlier, err := t.earlier(ctx, step)
		t.feed.setAwaitsApproval(len(earlier) > 0 && earlier[0].AwaitsApproval)
		switch {
		case err != nil:
		case len(earlier) == 0:
			var held bool
			if held, err = t.acquireLane(ctx, step, inProcess); held {
				// The loss of the lane cancels nothing: storeAnswer acquires it again.
				return trace.WithLane(ctx, threads.Lane(t.in.Thread)), nil
			}
		case inProcess:
			err = pause(ctx, ended)
		default:
			_, err = executions.Wait(ctx, step+earlierTurn, executions.Agent(earlier[0].ExecutionID, maxEarlierWait))
		}
		if err != nil {
			return ctx, err
		}
	}
}

// maxEarlierWait bounds one durable wait for an earlier turn.
const maxEarlierWait = 24 * time.Hour

// earlierTurn ends the name of a wait for an earlier turn.
const earlierTurn = " earlier turn"

// earlier lists the active turns before this one. In a replay the record of a wait stands for one.
func (t *turn) earlier(ctx context.Context, step string) ([]activeTurn, error) {
	switch {
	case postgres.IsSealed(ctx) && executions.IsRecorded(ctx, step+earlierTurn):
		return []activeTurn{{ExecutionID: t.exec.ID}}, nil
	case postgres.IsSealed(ctx), t.stored != nil && t.stored.noEarlierTurn:
		return nil, nil
	}
	return executions.RetryTransient(ctx, func(ctx context.Context) ([]activeTurn, error) {
		return activeTurns(ctx, t.Pool, t.in.Thread, t.turnNumber)
	})
}

// acquireLane waits in the lane's queue for a moment. Then, unless inProcess, it waits durably until the lane is free.
// It returns false when the caller has to check the earlier turns again.
func (t *turn) acquireLane(ctx context.Context, step string, inProcess bool) (held bool, err error) {
	lane, queueWait := threads.Lane(t.in.Thread), laneQueueWait
	if !inProcess {
		queueWait = headlessQueueWait
	}
	hold, err := executions.LaneWait(ctx, lane, queueWait)
	busy, isBusy := errors.AsType[*lanes.BusyError](err)
	switch {
	case err == nil:
		t.lane = hold
		return true, nil
	case !isBusy:
		return false, err
	case strings.HasPrefix(busy.Holder, t.exec.ID+"#"):
		return false, t.recoverLane(ctx, busy.Holder)
	case inProcess:
		return false, nil
	}
	_, err = executions.Wait(ctx, step+" lane", executions.LaneFree(lane, laneWait))
	return false, err
}

// recoverLane moves the lane from an earlier claim of this turn to this one. A lost process may have waited in the
// queue and acquired the lane.
func (t *turn) recoverLane(ctx context.Context, previous string) error {
	_, err := executions.RetryTransient(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, postgres.InTx(ctx, t.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `
				select fence_agent_execution(@id, @claim), leave_agent_lock_queue(@lane, @previous),
				       lanekeeper.claim_agent_locks(@id)`,
				postgres.Strict{
					"id": t.exec.ID, "claim": t.exec.Claim, "lane": threads.Lane(t.in.Thread), "previous": previous,
				})
			return err
		})
	})
	if postgres.IsCode(err, "LK001") { // of fence_agent_execution: another process has claimed the turn
		return executions.ErrStale
	}
	if err != nil {
		return fmt.Errorf("recover lane of thread: %w", err)
	}
	return nil
}

// pause waits until a turn ends in this process, at most earlierTurnPoll.
func pause(ctx context.Context, ended <-chan struct{}) error {
	timer := time.NewTimer(earlierTurnPoll)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-ended:
	case <-timer.C:
	}
	return nil
}

// earlierTurnPoll is the pause between two reads of the earlier turns.
const earlierTurnPoll = 100 * time.Millisecond
