package chat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// documentRequest is a flow's pending request for documents, the oldest of the thread.
type documentRequest struct {
	id      string
	missing []string // in the order of the request
	waiter  string   // the execution that waits for it; "": none
}

// findDocumentRequest finds and locks the request that the files of a message answer. Its id is "" without files or
// without a request.
func (c *Chat) findDocumentRequest(ctx context.Context, tx pgx.Tx, a *UserMessage) (r documentRequest, err error) {
	if len(slices.Concat(a.Files...)) == 0 {
		return r, nil
	}
	// Lock order, as for an event: the wait, executions, the request.
	err = tx.QueryRow(ctx, `
		select r.id::text, pg_advisory_xact_lock(hashtextextended('wait document ' || r.id, 0))::text
		  from (select id
		          from agent_requests
		         where thread_id = @thread and kind = 'document' and status = 'pending'
		         order by id
		         limit 1) r`,
		postgres.Strict{"thread": a.thread}).Scan(&r.id, nil)
	if err == nil {
		err = tx.QueryRow(ctx, `
			select coalesce((
			         select id::text
			           from agent_executions
			          where waiting_for = 'document' and waiting_key = @id and (status = 'waiting') is true
			          order by id
			          limit 1
			            for no key update), '')`,
			postgres.Strict{"id": r.id}).Scan(&r.waiter)
	}
	if err == nil {
		err = tx.QueryRow(ctx, `
			select m.items
			  from (select array_agg(i order by n) as items
			          from agent_requests r
			         cross join unnest(r.items) with ordinality u (i, n)
			         where r.id = @id::uuid and r.status = 'pending' and not r.received ? i) m
			 where m.items is not null`,
			postgres.Strict{"id": r.id}).Scan(&r.missing)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return documentRequest{}, nil
	}
	if err != nil {
		return r, fmt.Errorf("find request for documents: %w", err)
	}
	return r, nil
}

// deliver delivers the event that answers the request. The first file is the first missing document, and so on. Files
// beyond the missing documents are only attached to the thread.
func (r documentRequest) deliver(ctx context.Context, c *Chat, tx pgx.Tx, x executions.Execution, ids []string) error {
	if r.id == "" || len(ids) == 0 {
		return nil
	}
	type received struct {
		Document string `json:"document"`
		ID       string `json:"document_id"`
	}
	var all []received
	for i, id := range ids[:min(len(ids), len(r.missing))] {
		all = append(all, received{r.missing[i], id})
	}
	data, err := json.Marshal(map[string]any{"documents": all})
	if err != nil {
		return fmt.Errorf("answer request: %w", err)
	}
	// The span makes the turn the cause of the event.
	within := trace.With(ctx, trace.Span{TraceID: trace.ID(x.TraceID), ExecutionID: x.ID})
	got, err := c.Engine.Deliver(within, tx, "DOCUMENT_UPLOADED", r.id, data, "chat "+x.ID)
	if err == nil {
		err = activity.RecordRequester(ctx, tx, "event "+got.EventID)
	}
	return err
}

// relayDocuments stores a message whose files an execution waits for, resumes that, and relays its messages.
func (c *Chat) relayDocuments(
	ctx context.Context, tx pgx.Tx, a *UserMessage, r documentRequest,
) (x executions.Execution, created bool, err error) {
	s := a.spec()
	s.Flow, s.Input = RelayFlow, a.input(r.waiter)
	if x, created, err = c.insertTurn(ctx, tx, a, s); err != nil || !created {
		return x, created, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return x, false, err
	}
	if err := r.deliver(ctx, c, tx, x, documentIDs(docs)); err != nil { // before the thread's row: the lock order
		return x, false, err
	}
	drafts := make([]threads.NewMessage, len(texts))
	for i, words := range texts {
		drafts[i] = threads.NewMessage{
			Role: threads.User, Content: words, Channel: cmp.Or(a.Channel, channel), ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0,
		}
	}
	_, err = threads.PostAll(ctx, tx, a.thread, drafts)
	return x, true, err
}

// emptyRelayAnswer is the answer of a relay without messages: the documents that a flow of the thread waits for, that
// the flow has failed, or that the message was passed on. Until the first document it repeats the last message of the
// flow.
func (c *Chat) emptyRelayAnswer(ctx context.Context, in input, messages int) (string, error) {
	if messages > 0 {
		return "", nil
	}
	var question string
	var failed bool
	missing, err := executions.RetryTransient(ctx, func(ctx context.Context) (items []string, err error) {
		err = c.Pool.QueryRow(ctx, `
			select array(select i from unnest(r.items) with ordinality u (i, n) where not r.received ? i order by n),
			       case
			         when r.received = '{}' then coalesce((
			           select m.content
			             from agent_messages m
			            where m.execution_id = x.id
			              and m.thread_id = r.thread_id
			              and m.role = 'assistant' and m.channel = @channel
			              and m.seq is not null
			            order by m.seq desc
			            limit 1), r.title)
			         else ''
			       end
			  from agent_requests r
			  join agent_executions x on x.id = r.execution_id
			                         and x.status = 'waiting' and x.waiting_for = 'document' and x.waiting_key = r.id::text
			 where r.thread_id = @thread and r.kind = 'document' and r.status = 'pending'
			 order by r.id
			 limit 1`,
			postgres.Strict{"thread": in.Thread, "channel": cmp.Or(in.Channel, channel)}).Scan(&items, &question)
		if errors.Is(err, pgx.ErrNoRows) {
			err = c.Pool.QueryRow(ctx, `select exists (select from agent_executions x
				where x.id = @to::uuid and x.status in ('failed', 'timeout'))`, postgres.Strict{"to": in.To}).Scan(&failed)
		}
		return items, err
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("find missing documents: %w", err)
	case failed:
		return failedText, nil
	case len(missing) == 0:
		return forwardedText, nil
	}
	return cleanText(question + "\n\nStill missing: " + strings.Join(missing, ", ") +
		". Send each as a file with your next message."), nil
}
