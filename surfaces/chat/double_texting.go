package chat

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// byInterrupt is the canceller of a turn that a newer message interrupted.
const byInterrupt = "visitor"

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
		  from agent_executions x
		  join agent_messages m on m.execution_id = x.id and m.role = 'user' and m.seq = m.turn
		 where x.thread_id = @thread
		   and x.completed_at is null
		   and x.flow = @flow
		   and (@before::bigint = 0 or m.turn < @before)
		 order by m.turn`, postgres.Strict{
		"thread": thread, "flow": Flow, "before": before,
	}).Query(func(rows pgx.Rows) (err error) {
		*list, err = pgx.CollectRows(rows, pgx.RowToStructByName[activeTurn])
		return err
	})
}

// applyDoubleTexting enqueues or refuses the message, or interrupts the active turns. The text of an interrupted turn
// is stored as a message, so the next turn reads it. ended are the executions that it has ended.
func (c *Chat) applyDoubleTexting(
	ctx context.Context, tx pgx.Tx, a *UserMessage, x executions.Execution,
) (ended []executions.Ended, err error) {
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
		ended, err = c.interruptTurn(ctx, tx, a.thread, x.TraceID, byInterrupt, "a newer message came", b)
		if err != nil {
			return nil, err
		}
	}
	return ended, nil
}

// interruptTurn cancels a turn and stores its text so far. A locked turn ends with its current step. ended are the
// executions that tx has ended so far.
func (c *Chat) interruptTurn(
	ctx context.Context, tx pgx.Tx, thread, traceID, by, reason string, b activeTurn,
) (ended []executions.Ended, err error) {
	status, ended, err := executions.CancelTx(ctx, tx, b.ExecutionID, by, reason)
	if err != nil || status.Ended() && status != executions.Cancelled {
		return ended, err
	}
	return ended, c.storePartialAnswer(ctx, tx, thread, traceID, b)
}

// storePartialAnswer stores the text of a cancelled turn once. A turn whose cancel is only requested may have stored
// its answer meanwhile.
func (c *Chat) storePartialAnswer(ctx context.Context, tx pgx.Tx, thread, traceID string, b activeTurn) error {
	text, runsHere := c.feeds.liveText(b.ExecutionID)
	if !runsHere {
		draft, err := threads.DraftOf(ctx, tx, b.ExecutionID)
		if err != nil {
			return err
		}
		text = draft.Content
	}
	interrupted, err := threads.EndDraft(ctx, tx, thread, b.ExecutionID)
	if err != nil || interrupted != nil {
		return err
	}
	x, err := executions.Get(ctx, tx, b.ExecutionID)
	if err != nil || x.Status == executions.Completed {
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
	if text = trimFlowText(text, flowText); text == "" {
		return nil
	}
	_, err = threads.Post(ctx, tx, threads.NewMessage{
		ThreadID: thread, Role: threads.Assistant, Content: text, Channel: channel, ExecutionID: b.ExecutionID,
		TraceID: traceID, Status: threads.Sent, Turn: b.Turn, Interrupted: true,
	})
	return err
}
