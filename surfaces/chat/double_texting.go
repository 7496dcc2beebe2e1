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

// byInterrupt is who cancelled a turn that a newer message cut short.
const byInterrupt = "visitor"

// retrySoon is when a client that was told to wait may look again.
const retrySoon = 2 * time.Second

// longestWait is how long one durable wait for an earlier turn lasts before it is begun anew.
const longestWait = 24 * time.Hour

// lookAgain is how often a turn looks whether those before it have ended, when nothing in this process tells it.
const lookAgain = 100 * time.Millisecond

// How long a turn stands in the lane's queue before it looks whether the process shuts down, or, headless, before it
// waits without a worker; and how long such a wait lasts before the turn looks again.
const (
	lanePatience     = 5 * time.Second
	headlessPatience = time.Second
	laneWait         = time.Minute
)

// activeTurn is a turn that has not ended.
type activeTurn struct {
	ExecutionID string
	Turn        int64
	Asks        bool // waits for an admin's approval
}

// activeTurns lists the turns of a thread that are under way, in their order; those from before on are left
// out, 0 is none.
func activeTurns(ctx context.Context, db postgres.DB, thread string, before int64) (list []activeTurn, err error) {
	b := &pgx.Batch{}
	queueActiveTurns(b, thread, before, &list)
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return nil, fmt.Errorf("read turns under way: %w", err)
	}
	return list, nil
}

func queueActiveTurns(b *pgx.Batch, thread string, before int64, list *[]activeTurn) {
	b.Queue(`
		select x.id::text as execution_id, m.turn, coalesce(x.waiting_for = 'approval', false) as asks
		  from agent_executions x join agent_messages m on m.execution_id = x.id and m.role = 'user' and m.seq = m.turn
		 where x.thread_id = @thread and x.completed_at is null and x.flow = @flow
		   and (@before::bigint = 0 or m.turn < @before)
		 order by m.turn`, postgres.Strict{"thread": thread, "flow": Flow, "before": before}).Query(func(rows pgx.Rows) (err error) {
		*list, err = pgx.CollectRows(rows, pgx.RowToStructByName[activeTurn])
		return err
	})
}

// applyDoubleTexting does what double texting asks for: nothing, a refusal, or an end to what is under way. A turn
// that is cut short leaves what it has said as a message, so that the next one knows.
func (c *Chat) applyDoubleTexting(ctx context.Context, tx pgx.Tx, a UserMessage, x executions.Execution) (cut []string, err error) {
	if c.DoubleTexting == Enqueue {
		return nil, nil
	}
	busy, err := activeTurns(ctx, tx, a.thread, 0)
	if err != nil || len(busy) == 0 {
		return nil, err
	}
	if c.DoubleTexting == Reject {
		r := conflict("thread_busy", "The last message of this thread is still being answered.")
		r.CompletionID, r.RetryAfter = CompletionID(busy[0].ExecutionID), retrySoon
		return nil, r
	}
	for _, b := range busy {
		cancelled, err := c.interruptTurn(ctx, tx, a.thread, x.TraceID, byInterrupt, "a newer message came", b)
		if err != nil {
			return nil, err
		}
		if cancelled {
			cut = append(cut, b.ExecutionID)
		}
	}
	return cut, nil
}

// interruptTurn cancels a turn and keeps what it has said. It is false when the turn has ended just now, or ends as
// soon as its step has.
func (c *Chat) interruptTurn(ctx context.Context, tx pgx.Tx, thread, traceID, by, why string, b activeTurn) (bool, error) {
	status, err := executions.CancelTx(ctx, tx, b.ExecutionID, by, why)
	if err != nil || status.Ended() && status != executions.Cancelled {
		return false, err
	}
	return status == executions.Cancelled, c.storePartialAnswer(ctx, tx, thread, traceID, b)
}

// storePartialAnswer stores what a cancelled turn has said so far.
func (c *Chat) storePartialAnswer(ctx context.Context, tx pgx.Tx, thread, traceID string, b activeTurn) error {
	words, here := c.feeds.heard(b.ExecutionID)
	if !here {
		draft, err := threads.DraftOf(ctx, tx, b.ExecutionID)
		if err != nil {
			return err
		}
		words = draft.Content
	}
	x, err := executions.Get(ctx, tx, b.ExecutionID)
	if err != nil {
		return err
	}
	in, err := inputOf(x)
	if err != nil {
		return err
	}
	opening, err := c.openingOf(ctx, tx, in)
	if err != nil {
		return err
	}
	if words = withoutOpening(words, opening); words != "" {
		if _, err := threads.Post(ctx, tx, threads.NewMessage{
			ThreadID: thread, Role: threads.Assistant, Content: words, Channel: channel, ExecutionID: b.ExecutionID,
			TraceID: traceID, Status: threads.Sent, Turn: b.Turn, Interrupted: true,
		}); err != nil {
			return err
		}
	}
	return threads.DeleteDraft(ctx, tx, b.ExecutionID)
}

// hold waits for the thread: first for the turns before this one, then for the lane. A turn that somebody looks
// at waits in its process, for as long as Patience; otherwise it waits durably. With the lane in hand it is
// a renewal. step names the waits.
func (t *turn) hold(ctx context.Context, step string) (context.Context, error) {
	deadline := time.Now().Add(t.Patience)
	for {
		live := t.live && time.Now().Before(deadline) && !errors.Is(t.Engine.Live(), executions.ErrDraining)
		rings := t.ended.rings()
		earlier, err := t.earlier(ctx)
		t.feed.waits(len(earlier) > 0 && earlier[0].Asks)
		switch {
		case err != nil:
		case len(earlier) == 0:
			var held bool
			if held, err = t.acquireLane(ctx, step, live); held {
				// Losing it cancels nothing: the next send acquires it again.
				return trace.WithLane(ctx, threads.Lane(t.in.Thread)), nil
			}
		case live:
			err = pause(ctx, rings)
		default:
			_, err = executions.Wait(ctx, step+" earlier turn", executions.Agent(earlier[0].ExecutionID, longestWait))
		}
		if err != nil {
			return ctx, err
		}
	}
}

// earlier lists the turns before this one that are under way.
func (t *turn) earlier(ctx context.Context) ([]activeTurn, error) {
	if t.posted != nil && t.posted.alone {
		return nil, nil
	}
	return executions.RetryTransient(ctx, func(ctx context.Context) ([]activeTurn, error) {
		return activeTurns(ctx, t.Pool, t.in.Thread, t.number)
	})
}

// acquireLane stands in the lane's queue for a moment and then, unless the turn is live, waits durably until the lane
// is free. False means: look again.
func (t *turn) acquireLane(ctx context.Context, step string, live bool) (held bool, err error) {
	lane, patience := threads.Lane(t.in.Thread), lanePatience
	if !live {
		patience = headlessPatience
	}
	hold, err := executions.LaneWait(ctx, lane, patience)
	busy, isBusy := errors.AsType[*lanes.BusyError](err)
	switch {
	case err == nil:
		t.lane = hold
		return true, nil
	case !isBusy:
		return false, err
	case strings.HasPrefix(busy.Holder, t.exec.ID+"#"):
		return false, t.takeOverLane(ctx, busy.Holder)
	case live:
		return false, nil
	}
	_, err = executions.Wait(ctx, step+" lane", executions.LaneFree(lane, laneWait))
	return false, err
}

// takeOverLane takes the lane from an earlier claim of this turn: a process that was lost, and does not know it yet,
// may have come to the head of the queue.
func (t *turn) takeOverLane(ctx context.Context, ghost string) error {
	_, err := executions.RetryTransient(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, postgres.InTx(ctx, t.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `
				select fence_agent_execution(@id, @claim), leave_agent_lock_queue(@lane, @ghost),
				       lanekeeper.claim_agent_locks(@id)`,
				postgres.Strict{
					"id": t.exec.ID, "claim": t.exec.Claim, "lane": threads.Lane(t.in.Thread), "ghost": ghost,
				})
			return err
		})
	})
	if postgres.IsCode(err, "LK001") {
		return executions.ErrStale
	}
	if err != nil {
		return fmt.Errorf("take the thread's lane over: %w", err)
	}
	return nil
}

// pause waits until a turn has ended in this process, or for a moment.
func pause(ctx context.Context, rings <-chan struct{}) error {
	timer := time.NewTimer(lookAgain)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-rings:
	case <-timer.C:
	}
	return nil
}
