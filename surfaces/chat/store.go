package chat

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
)

// insertResult is the result of storing a message.
type insertResult struct {
	exec    executions.Execution
	created bool               // false: the key was used before
	ended   []executions.Ended // the interrupted turns and their children
	stored  *storedMessages    // nil for a relay
}

// storedMessages has what the turn need not read again if it starts in this process.
type storedMessages struct {
	messages      []threads.Message // the messages that the turn answers; nil if they have images
	noEarlierTurn bool              // the thread has no earlier active turn
	available     *reason.Available // nil: not read
}

// insert stores the message together with its turn, or with a relay, in one transaction.
func (c *Chat) insert(ctx context.Context, tx pgx.Tx, a *UserMessage) (inserted insertResult, err error) {
	// Lock order: the thread's advisory lock, executions, the thread's row. An answer locks in the same order.
	var unseen span
	var known bool
	var retriedID, recipient string
	a.unseen = nil // of an earlier try
	b := &pgx.Batch{}
	if a.retry != nil {
		a.retry.queueFind(b, &retriedID)
	}
	queueThreadLock(b, a.thread)
	c.queueUnseen(b, a, &unseen, &known)
	queueListener(b, a.thread, &recipient)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return inserted, fmt.Errorf("lock thread: %w", err)
	}
	if a.retry != nil {
		if a.retry.attached = retriedID != ""; a.retry.attached {
			inserted.exec, err = executions.Get(ctx, tx, retriedID)
			return inserted, err
		}
	}
	if a.requiredLast != "" {
		if err := a.checkLast(ctx, tx); err != nil {
			return inserted, err
		}
	}
	docRequest, err := c.findDocumentRequest(ctx, tx, a)
	if err != nil {
		return inserted, err
	}
	if docRequest.waiter != "" || recipient != "" {
		if known {
			a.unseen = &unseen
		}
		inserted.exec, inserted.created, err = c.insertRelay(ctx, tx, a, docRequest, recipient)
		return inserted, err
	}
	a.unseen = &unseen
	if inserted.exec, inserted.created, err = c.insertTurn(ctx, tx, a, a.spec()); err != nil || !inserted.created {
		return inserted, err
	}
	inserted.ended, inserted.stored, err = c.storeMessage(ctx, tx, a, inserted.exec, docRequest)
	return inserted, err
}

// insertRelay stores the message with a relay to the execution that listens, or that has requested documents.
func (c *Chat) insertRelay(
	ctx context.Context, tx pgx.Tx, a *UserMessage, docRequest documentRequest, recipient string,
) (x executions.Execution, created bool, err error) {
	if err := a.checkRelay(); err != nil {
		return x, false, err
	}
	if err := c.ensureThread(ctx, tx, a); err != nil {
		return x, false, err
	}
	if docRequest.waiter != "" {
		x, created, err = c.relayDocuments(ctx, tx, a, docRequest)
	} else {
		x, created, err = c.relayMessage(ctx, tx, a, recipient)
	}
	if err != nil || !created || a.retry == nil {
		return x, created, err
	}
	b := &pgx.Batch{}
	a.retry.queueRecord(b, x.ID)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return x, created, fmt.Errorf("record request: %w", err)
	}
	return x, created, nil
}

// insertTurn inserts an execution, claimed by this process if a connection waits for it.
func (c *Chat) insertTurn(
	ctx context.Context, tx pgx.Tx, a *UserMessage, s executions.Spec,
) (executions.Execution, bool, error) {
	if !a.headless() {
		return c.Engine.InsertClaimed(ctx, tx, s)
	}
	return c.Engine.StartTx(ctx, tx, s)
}

// ensureThread creates the thread if it is missing, and checks the access of the visitor.
func (c *Chat) ensureThread(ctx context.Context, tx pgx.Tx, a *UserMessage) error {
	thread, _, err := threads.Open(ctx, tx, a.principal(), a.newThread())
	if err == nil && thread.ID != a.thread {
		err = threads.ErrForeign // the access changed since it was read
	}
	if err != nil {
		return err
	}
	return c.checkAgent(ctx, tx, thread.Agent, a)
}

// storeMessage stores the message and applies double texting to the active turns. ended are the executions that
// double texting has ended.
func (c *Chat) storeMessage(
	ctx context.Context, tx pgx.Tx, a *UserMessage, x executions.Execution, docRequest documentRequest,
) (ended []executions.Ended, stored *storedMessages, err error) {
	from := cmp.Or(a.Channel, channel)
	if ended, err = c.applyDoubleTexting(ctx, tx, a, x); err != nil {
		return nil, nil, err
	}
	var earlier []activeTurn
	thread, err := threads.OpenLocked(ctx, tx, a.principal(), a.newThread(), func(b *pgx.Batch) {
		queueActiveTurns(b, a.thread, 0, &earlier)
		if a.retry != nil {
			a.retry.queueRecord(b, x.ID)
		}
	})
	if err == nil {
		err = c.checkAgent(ctx, tx, thread.Agent, a)
	}
	if err == nil && a.headless() && thread.Agent != agentName(a.agent) {
		err = threads.SetAgent(ctx, tx, thread.ID, agentName(a.agent))
	}
	if err != nil {
		return nil, nil, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return nil, nil, err
	}
	images, err := c.collectImages(ctx, tx, a, docs)
	if err != nil {
		return nil, nil, err
	}
	if err := docRequest.deliver(ctx, c, tx, x, documentIDs(docs)); err != nil {
		return nil, nil, err
	}
	var drafts []threads.NewMessage
	if thread.NextSeq == 1 {
		drafts = importHistory(a, from)
	}
	for i, content := range texts {
		drafts = append(drafts, threads.NewMessage{
			Role: threads.User, Content: content, Channel: from, ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0, Images: images[i],
		})
	}
	posted, err := threads.PostAll(ctx, tx, a.thread, drafts)
	if err != nil {
		return nil, nil, err
	}
	stored = &storedMessages{noEarlierTurn: len(earlier) == 0}
	if len(slices.Concat(images...)) == 0 {
		stored.messages = posted[len(drafts)-len(texts):]
	}
	if stored.noEarlierTurn {
		stored.available = a.available
	}
	return ended, stored, nil
}

// importHistory returns the greeting, or the history that the client sent, as the first messages of a new thread.
func importHistory(a *UserMessage, from string) []threads.NewMessage {
	drafts := make([]threads.NewMessage, 0, len(a.Earlier)+len(a.Texts)+1)
	if a.agent.Greeting != "" && len(a.Earlier) == 0 && !a.headless() {
		drafts = append(drafts, threads.NewMessage{
			Role: threads.Assistant, Content: a.agent.Greeting, Channel: from, Status: threads.Sent, Follows: true,
		})
	}
	for _, line := range a.Earlier {
		d := threads.NewMessage{
			Role: line.Role, Content: line.Text, Channel: from, Status: threads.Received, Images: line.Images,
		}
		if line.Role == threads.Assistant {
			d.Status, d.Follows = threads.Sent, true
		}
		drafts = append(drafts, d)
	}
	return drafts
}

// checkLast refuses a message to a response that is not the last of its thread. The thread is locked. A repeated
// message, whose key has a turn already, passes.
func (a *UserMessage) checkLast(ctx context.Context, tx pgx.Tx) error {
	var id *string
	var repeated bool
	err := tx.QueryRow(ctx, `
		select (select m.execution_id::text from agent_messages m
		         where m.thread_id = @thread and m.role = 'user' and m.seq is not null order by m.seq desc limit 1),
		       exists (select from agent_executions x where x.dedupe_key = @key)`,
		postgres.Strict{"thread": a.thread, "key": a.spec().DedupeKey}).Scan(&id, &repeated)
	if err != nil {
		return fmt.Errorf("read the thread's last message: %w", err)
	}
	if repeated || postgres.Deref(id) == a.requiredLast {
		return nil
	}
	r := conflict("previous_response_not_last",
		"The conversation has later messages than this response. To continue it, send conversation %q instead of "+
			"previous_response_id. For a conversation of their own, send the messages without either.", a.Name)
	r.Param = "previous_response_id"
	return r
}

// lockThread serialises the transactions that store messages of a thread.
func lockThread(ctx context.Context, tx pgx.Tx, thread string) error {
	b := &pgx.Batch{}
	queueThreadLock(b, thread)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("lock thread: %w", err)
	}
	return nil
}

func queueThreadLock(b *pgx.Batch, thread string) {
	b.Queue(`select pg_advisory_xact_lock(hashtextextended('chat ' || @thread, 0))`, postgres.Strict{"thread": thread})
}
