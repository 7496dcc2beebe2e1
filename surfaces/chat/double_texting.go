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

// byInterrupt is the canceller of a turn that a newer message interrupted.
const byInterrupt = "visitor"

// retryDelay is the Retry-After of a temporary refusal.
const retryDelay = 2 * time.Second

// maxEarlierWait bounds one durable wait for an earlier turn.
const maxEarlierWait = 24 * time.Hour

// earlierTurnPoll is the pause between two reads of the earlier turns.
const earlierTurnPoll = 100 * time.Millisecond

// Waits for the lane: in the queue with a client, in the queue without one, and durably, without a worker.
const (
	laneQueueWait     = 5 * time.Second
	headlessQueueWait = time.Second
	laneWait          = time.Minute
)

// activeTurn is a turn that has not ended.
type activeTurn struct {
	ExecutionID    string
	Turn           int64
	AwaitsApproval bool
}

// activeTurns lists the active turns of a thread in order. before, unless 0, ends the list at that turn.
func activeTurns(ctx context.Context, db postgres.DB, thread string, before int64) (list []activeTurn, err error) {
	b := &pgx.Batch{}
	queueActiveTurns(b, thread, before, &list)
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return nil, fmt.Errorf("read active turns: %w", err)
	}
	return list, nil
}

func queueActiveTurns(b *pgx.Batch, thread string, before int64, list *[]activeTurn) {
	b.Queue(`
		select x.id::text as execution_id, m.turn, coalesce(x.waiting_for = 'approval', false) as awaits_approval
		  from agent_executions x join agent_messages m on m.execution_id = x.id and m.role = 'user' and m.seq = m.turn
		 where x.thread_id = @thread and x.completed_at is null and x.flow = @flow
		   and (@before::bigint = 0 or m.turn < @before)
		 order by m.turn`, postgres.Strict{"thread": thread, "flow": Flow, "before": before}).Query(func(rows pgx.Rows) (err error) {
		*list, err = pgx.CollectRows(rows, pgx.RowToStructByName[activeTurn])
		return err
	})
}

// applyDoubleTexting enqueues or refuses the message, or interrupts the active turns. The text of an interrupted turn
// is stored as a message, so the next turn reads it.
func (c *Chat) applyDoubleTexting(
	ctx context.Context, tx pgx.Tx, a *UserMessage, x executions.Execution,
) (cancelled []string, err error) {
	if c.DoubleTexting == Enqueue {
		return nil, nil
	}
	active, err := activeTurns(ctx, tx, a.thread, 0)
	if err != nil || len(active) == 0 {
		return nil, err
	}
	if c.DoubleTexting == Reject {
		r := conflict("thread_busy", "The last message of this thread is still being answered.")
		r.CompletionID, r.RetryAfter = CompletionID(active[0].ExecutionID), retryDelay
		return nil, r
	}
	for _, b := range active {
		isCancelled, err := c.interruptTurn(ctx, tx, a.thread, x.TraceID, byInterrupt, "a newer message came", b)
		if err != nil {
			return nil, err
		}
		if isCancelled {
			cancelled = append(cancelled, b.ExecutionID)
		}
	}
	return cancelled, nil
}

// interruptTurn cancels a turn and stores its text so far. It returns false when the turn has ended, or ends with its
// current step.
func (c *Chat) interruptTurn(
	ctx context.Context, tx pgx.Tx, thread, traceID, by, reason string, b activeTurn,
) (bool, error) {
	status, err := executions.CancelTx(ctx, tx, b.ExecutionID, by, reason)
	if err != nil || status.Ended() && status != executions.Cancelled {
		return false, err
	}
	return status == executions.Cancelled, c.storePartialAnswer(ctx, tx, thread, traceID, b)
}

// storePartialAnswer stores the text of a cancelled turn.
func (c *Chat) storePartialAnswer(ctx context.Context, tx pgx.Tx, thread, traceID string, b activeTurn) error {
	text, runsHere := c.feeds.liveText(b.ExecutionID)
	if !runsHere {
		draft, err := threads.DraftOf(ctx, tx, b.ExecutionID)
		if err != nil {
			return err
		}
		text = draft.Content
	}
	x, err := executions.Get(ctx, tx, b.ExecutionID)
	if err != nil {
		return err
	}
	in, err := readInput(&x)
	if err != nil {
		return err
	}
	flowText, err := c.flowText(ctx, tx, in)
	if err != nil {
		return err
	}
	if text = trimFlowText(text, flowText); text != "" {
		if _, err := threads.Post(ctx, tx, threads.NewMessage{
			ThreadID: thread, Role: threads.Assistant, Content: text, Channel: channel, ExecutionID: b.ExecutionID,
			TraceID: traceID, Status: threads.Sent, Turn: b.Turn, Interrupted: true,
		}); err != nil {
			return err
		}
	}
	return threads.DeleteDraft(ctx, tx, b.ExecutionID)
}

// acquire waits for the earlier turns of the thread, then acquires or renews the lane. A turn whose client waits here
// waits in the process for up to InProcessWait, any other durably. step names the waits.
func (t *turn) acquire(ctx context.Context, step string) (context.Context, error) {
	deadline := time.Now().Add(t.InProcessWait)
	for {
		inProcess := t.startedHere && time.Now().Before(deadline) && !errors.Is(t.Engine.Live(), executions.ErrDraining)
		ended := t.turnEnded.next()
		earlier, err := t.earlier(ctx)
		t.feed.setAwaitsApproval(len(earlier) > 0 && earlier[0].AwaitsApproval)
		switch {
		case err != nil:
		case len(earlier) == 0:
			var held bool
			if held, err = t.acquireLane(ctx, step, inProcess); held {
				// Losing it cancels nothing: the next send acquires it again.
				return trace.WithLane(ctx, threads.Lane(t.in.Thread)), nil
			}
		case inProcess:
			err = pause(ctx, ended)
		default:
			_, err = executions.Wait(ctx, step+" earlier turn", executions.Agent(earlier[0].ExecutionID, maxEarlierWait))
		}
		if err != nil {
			return ctx, err
		}
	}
}

// earlier lists the active turns before this one.
func (t *turn) earlier(ctx context.Context) ([]activeTurn, error) {
	if t.stored != nil && t.stored.noEarlierTurn {
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
	if postgres.IsCode(err, "LK001") {
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
