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

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// documentRequest is a flow's request for documents that a message with files answers: the oldest of the thread.
type documentRequest struct {
	id      string
	missing []string // in the order in which they were asked for
	waiter  string   // the execution that waits for it; "" when none does
}

// requested finds the request that the files of a message answer, and locks it as an event locks it. Without files, or
// without a request, it has no id.
func (c *Chat) requested(ctx context.Context, tx pgx.Tx, a Ask) (r documentRequest, err error) {
	if len(slices.Concat(a.Files...)) == 0 {
		return r, nil
	}
	// An event that answers it locks in the same order: the wait, executions, the request.
	err = tx.QueryRow(ctx, `
		select r.id::text, lanekeeper.agent_wait_lock('document', r.id::text)::text from (
		  select id from agent_requests where thread_id = @thread and kind = 'document' and status = 'pending' order by id limit 1) r`,
		postgres.Strict{"thread": a.thread}).Scan(&r.id, nil)
	if err == nil {
		err = tx.QueryRow(ctx, `
			select coalesce((select id::text from agent_executions
			                  where waiting_for = 'document' and waiting_key = @id and (status = 'waiting') is true order by id limit 1 for no key update), '')`,
			postgres.Strict{"id": r.id}).Scan(&r.waiter)
	}
	if err == nil {
		err = tx.QueryRow(ctx, `
			select m.items from (
			  select array_agg(i order by n) as items from agent_requests r cross join unnest(r.items) with ordinality u (i, n)
			   where r.id = @id::uuid and r.status = 'pending' and not r.received ? i) m where m.items is not null`,
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

// answer raises the event that answers the request: each file is the next document that is missing. Further files
// are attachments alone.
func (r documentRequest) answer(ctx context.Context, c *Chat, tx pgx.Tx, x executions.Execution, ids []string) error {
	if r.id == "" || len(ids) == 0 {
		return nil
	}
	type given struct {
		Document string `json:"document"`
		ID       string `json:"document_id"`
	}
	var all []given
	for i, id := range ids[:min(len(ids), len(r.missing))] {
		all = append(all, given{r.missing[i], id})
	}
	data, err := json.Marshal(map[string]any{"documents": all})
	if err != nil {
		return fmt.Errorf("answer request: %w", err)
	}
	_, err = c.Engine.Deliver(ctx, tx, "DOCUMENT_UPLOADED", r.id, data, "chat "+x.ID)
	return err
}

// hand stores a message whose files an execution waits for, and lets that go on. Its words are the answer, as those of
// one that waits for a message are.
func (c *Chat) hand(ctx context.Context, tx pgx.Tx, a Ask, r documentRequest) (x executions.Execution, created bool, err error) {
	s := a.spec()
	s.Flow, s.Input = RelayFlow, a.input(r.waiter)
	if x, created, err = c.Engine.InsertClaimed(ctx, tx, s); err != nil || !created {
		return x, created, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return x, false, err
	}
	if err := r.answer(ctx, c, tx, x, idsOf(docs)); err != nil { // before the thread's row, which lanes precede
		return x, false, err
	}
	drafts := make([]threads.Draft, len(texts))
	for i, words := range texts {
		drafts[i] = threads.Draft{
			Role: threads.User, Content: words, Channel: cmp.Or(a.Channel, channel), ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0,
		}
	}
	_, err = threads.PostAll(ctx, tx, a.thread, drafts)
	return x, true, err
}

// notice is the answer when nothing was said: which documents a flow of the thread waits for, or that the message was
// passed on. It repeats the flow's last words as long as no document came. It is empty when something was said.
func (c *Chat) notice(ctx context.Context, in input, said int) (string, error) {
	if said > 0 {
		return "", nil
	}
	var question string
	missing, err := executions.RetryTransient(ctx, func(ctx context.Context) (items []string, err error) {
		err = c.Pool.QueryRow(ctx, `
			select array(select i from unnest(r.items) with ordinality u (i, n) where not r.received ? i order by n),
			       case when r.received = '{}' then coalesce((
			         select m.content from agent_messages m
			          where m.execution_id = x.id and m.thread_id = r.thread_id and m.role = 'assistant' and m.channel = 'chat'
			            and m.seq is not null order by m.seq desc limit 1), r.title) else '' end
			  from agent_requests r
			  join agent_executions x on x.id = r.execution_id and x.status = 'waiting' and x.waiting_for = 'document'
			   and x.waiting_key = r.id::text
			 where r.thread_id = @thread and r.kind = 'document' and r.status = 'pending' order by r.id limit 1`,
			postgres.Strict{"thread": in.Thread}).Scan(&items, &question)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, nil
		}
		return items, err
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("find missing documents: %w", err)
	case len(missing) == 0:
		return passedOn, nil
	}
	return clean(question + "\n\nStill missing: " + strings.Join(missing, ", ") + ". Send each as a file with your next message."), nil
}
