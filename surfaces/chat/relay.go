package chat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// RelayFlow is the flow of a message to an execution that holds the thread or waits for the message. It calls no model.
// Its answer consists of the thread's later messages.
const RelayFlow = "chat_relay"

// forwardedText is the answer of a relay without messages. It is not stored in the thread.
const forwardedText = "Your message was passed on."

// failedText is the answer of a relay without messages whose execution has failed.
const failedText = "Your message was received, but the process that was to answer it has failed."

const (
	relayPollInterval = 200 * time.Millisecond // pause between two reads without a notification
	relayBatch        = 200                    // messages per read
)

// watchDuration is how long a thread stays marked as watched. The relay renews it.
const watchDuration = 30 * time.Second

// ownFlows are the flows of this surface. An execution of another flow receives the messages of a thread that it holds.
func ownFlows() []string { return []string{Flow, RelayFlow, SummaryFlow} }

// queueListener queues the search for the execution that receives a message of a thread; "": the model answers.
func queueListener(b *pgx.Batch, thread string, recipient *string) {
	// The wait's lock precedes executions. While it is held, the waiting execution cannot stop waiting.
	b.Queue(`select pg_advisory_xact_lock(hashtextextended('wait response ' || @thread, 0))`,
		postgres.Strict{"thread": thread})
	// The execution that waits for a message, else the one that holds the lane. "is true" avoids the index of states.
	b.Queue(`
		select coalesce(coalesce(
		         (select x.id
		            from agent_executions x
		           where (x.status = 'waiting') is true
		             and x.waiting_for = 'response'
		             and x.waiting_key = @thread
		             and not coalesce(x.waiting_data ? 'queued_message', false) -- its question is sent first
		             and x.flow <> all (@own)
		           order by x.id
		           limit 1),
		         (select x.id
		            from agent_locks l
		            join agent_executions x on x.id = l.execution_id
		           where l.lane = 'thread:' || @thread
		             and l.expires_at > clock_timestamp()
		             and x.completed_at is null
		             and x.flow <> all (@own)))::text, '')`,
		postgres.Strict{"thread": thread, "own": ownFlows()}).QueryRow(func(row pgx.Row) error { return row.Scan(recipient) })
}

// relayMessage stores a message for an execution, resumes it, and inserts the relay of its messages. created is false
// when the key was used before.
func (c *Chat) relayMessage(
	ctx context.Context, tx pgx.Tx, a *UserMessage, recipient string,
) (x executions.Execution, created bool, err error) {
	s := a.spec()
	s.Flow = RelayFlow
	s.Input = a.input(recipient)
	if x, created, err = c.insertTurn(ctx, tx, a, s); err != nil || !created {
		return x, created, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return x, false, err
	}
	data := map[string]any{"participant": a.Participant}
	if ids := documentIDs(docs); len(ids) > 0 {
		data["documents"] = ids
	}
	received, err := threads.Receive(ctx, c.Engine, tx, threads.Incoming{
		ThreadID: a.thread, Content: strings.Join(texts, "\n\n"), Channel: cmp.Or(a.Channel, channel), ExecutionID: x.ID,
		ID: "chat " + x.ID, Data: data,
	})
	if err == nil {
		err = activity.RecordRequester(ctx, tx, "event "+received.EventID)
	}
	return x, true, err
}

// relayState is one read of a relayed thread.
type relayState struct {
	Messages   []relayedMessage
	MessageSeq int64 // the place of the relayed message
	Busy       bool  // more messages may follow
	TimedOut   bool  // RelayWait has passed
}

// relayedMessage is a message and its place in the thread.
type relayedMessage struct {
	Seq     int64
	Content string
}

// relay is the durable function of a relay. It ends when the receiving execution waits again or has ended.
func (c *Chat) relay(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	x, ok := executions.Current(ctx)
	if !ok {
		return executions.Result{}, executions.ErrNotInExecution
	}
	var in input
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	if in.To == "" {
		return executions.Result{}, errors.New("read input: it names no execution; package chat did not start it")
	}
	f, release := c.feeds.join(x.ID)
	defer release()
	f.mu.Lock()
	startedHere := f.startedHere && x.Claim == 1
	f.mu.Unlock()
	if !startedHere {
		defer f.detach(x.Claim)
	}
	f.start(x.Claim, "", in.maxBytes())
	notifications, unsubscribe := c.subscribeMessages()
	defer unsubscribe()
	got, err := c.streamRelay(ctx, x, in, f, notifications)
	if err != nil {
		return executions.Result{}, err
	}
	return executions.Result{Summary: truncate(got.Text, 200), Value: got}, nil
}

// subscribeMessages subscribes to the messages of watched threads.
func (c *Chat) subscribeMessages() (<-chan string, func()) {
	if c.Listener == nil {
		return nil, func() {}
	}
	return c.Listener.Subscribe("agent_messages")
}

// streamRelay shows messages until no more can follow.
func (c *Chat) streamRelay(
	ctx context.Context, x executions.Execution, in input, f *feed, notifications <-chan string,
) (answer, error) {
	ticker := time.NewTicker(relayPollInterval)
	defer ticker.Stop()
	shown, last := 0, int64(0) // the place of the last shown message
	for {
		state, err := executions.RetryTransient(ctx,
			func(ctx context.Context) (relayState, error) { return c.readRelay(ctx, x, in, last) })
		if err != nil {
			return answer{}, err
		}
		for _, m := range state.Messages {
			f.append(cleanText(m.Content))
			f.finishCall()
			shown, last = shown+1, m.Seq
		}
		switch {
		case len(state.Messages) == relayBatch:
			continue
		case !state.Busy || state.TimedOut:
			notice, err := c.emptyRelayAnswer(ctx, in, shown)
			if err == nil && notice != "" && notice != forwardedText {
				err = storeNotice(ctx, x, in, notice)
			}
			if err != nil {
				return answer{}, err
			}
			return relayAnswer(f, notice, max(last, state.MessageSeq)), nil
		}
		select {
		case <-ctx.Done():
			return answer{}, context.Cause(ctx)
		case <-notifications:
		case <-ticker.C:
		}
	}
}

// storeNotice adds the relay's own notice to the thread, in the turn of its message. Relays do not show the notice
// again. A channel of people sends it.
func storeNotice(ctx context.Context, x executions.Execution, in input, notice string) error {
	_, err := executions.StepTx(ctx, "notice", func(ctx context.Context, tx pgx.Tx) (string, error) {
		var number int64
		err := tx.QueryRow(ctx, `select coalesce(min(m.turn), 0) from agent_messages m
			where m.execution_id = @id and m.role = 'user'`, postgres.Strict{"id": x.ID}).Scan(&number)
		if err != nil {
			return "", fmt.Errorf("read turn of relay: %w", err)
		}
		m, err := (&turn{exec: x, in: in, turnNumber: number}).post(ctx, tx, notice, false)
		return m.ID, err
	})
	return err
}

// relayAnswer is the answer of a relay. The notice replaces an empty one.
func relayAnswer(f *feed, notice string, through int64) answer {
	ended := "relayed"
	if notice != "" {
		f.append(notice)
		ended = "passed on"
	}
	v := f.snapshot(false)
	a := answer{Text: v.text, Finish: openai.FinishReasonStop, Ended: ended, Seq: through}
	if v.truncated {
		a.Finish = openai.FinishReasonLength
	}
	return a
}

// readRelay reads the messages after the relayed one, and those since the end of the previous relay, which no client
// has seen. It reads first whether more may follow, so no message is missed.
func (c *Chat) readRelay(
	ctx context.Context, x executions.Execution, in input, last int64,
) (state relayState, err error) {
	b := &pgx.Batch{}
	b.Queue(`
		update agent_threads set watched_until = clock_timestamp() + make_interval(secs => @watch)
		 where id = @thread and watched_until < clock_timestamp() + make_interval(secs => @watch) / 2`,
		postgres.Strict{"thread": in.Thread, "watch": watchDuration.Seconds()})
	c.queueRelayState(b, x, in, &state)
	queueRelayMessages(b, x, in, last, &state)
	if err := c.Pool.SendBatch(ctx, b).Close(); err != nil {
		return relayState{}, fmt.Errorf("read relayed thread: %w", err)
	}
	return state, nil
}

// queueRelayState reads whether the execution that the message was relayed to, or one that acts for it, is busy.
func (c *Chat) queueRelayState(b *pgx.Batch, x executions.Execution, in input, state *relayState) {
	b.Queue(`
		with recursive line as (                             -- the execution, and those that act for it
		  select @to::uuid as id
		  union
		  select case
		           when x.id is null or x.completed_at is not null then ( -- the next holder of the thread
		             select l.execution_id
		               from agent_locks l
		               join agent_executions e on e.id = l.execution_id
		              where l.lane = 'thread:' || @thread
		                and l.expires_at > clock_timestamp()
		                and e.completed_at is null
		                and e.flow <> all (@own))
		           when x.status = 'waiting' and x.waiting_for = 'agent' then lanekeeper.agent_uuid(x.waiting_key)
		         end
		    from line n
		    left join agent_executions x on x.id = n.id
		   where n.id is not null)
		select coalesce((
		         select bool_or(case
		                  when x.status = 'waiting'
		                    then x.waiting_for = 'agent' and exists ( -- its child has ended, and it is resumed next
		                           select from agent_executions c
		                            where c.id = lanekeeper.agent_uuid(x.waiting_key) and c.completed_at is not null)
		                  when x.is_external -- its worker may claim it again within a second
		                    then x.updated_at > clock_timestamp() - interval '1 second'
		                         or exists (select from agent_workers w
		                                     where w.id = x.claimed_by and w.expires_at > clock_timestamp())
		                  else true
		                end)
		           from line n
		           join agent_executions x on x.id = n.id
		          where x.completed_at is null), false),
		       clock_timestamp() > make_interval(secs => @patience)
		         + (select e.created_at from agent_executions e where e.id = @id),
		       coalesce((select max(q.seq) from agent_messages q where q.execution_id = @id and q.role = 'user'), 0)`,
		postgres.Strict{"thread": in.Thread, "to": in.To, "own": ownFlows(), "id": x.ID, "patience": c.RelayWait.Seconds()}).
		QueryRow(func(row pgx.Row) error { return row.Scan(&state.Busy, &state.TimedOut, &state.MessageSeq) })
}

// queueRelayMessages reads the messages that no client has seen.
func queueRelayMessages(b *pgx.Batch, x executions.Execution, in input, last int64, state *relayState) {
	var after *int64
	if in.Unseen != nil {
		after = &in.Unseen.After
	}
	b.Queue(`
		with asked as (                                      -- the relayed message
		  select max(q.seq) as seq from agent_messages q where q.execution_id = @id and q.role = 'user'),
		before as (                                          -- the turn or relay of the message before
		  select p.execution_id
		    from agent_messages p
		   where p.thread_id = @thread and p.role = 'user' and p.seq < (select a.seq from asked a)
		   order by p.seq desc
		   limit 1),
		since as (                                           -- the last place that a client has seen
		  select greatest(@last, coalesce((
		           select nullif((e.result ->> 'seq')::bigint, 0)
		             from before b
		             join agent_executions e on e.id = b.execution_id
		            where e.flow = @relay and e.status = 'completed'), @after::bigint, a.seq)) as seq
		    from asked a)
		select m.seq, m.content
		  from agent_messages m
		 where m.thread_id = @thread
		   and m.seq > (select s.seq from since s)
		   and m.role = 'assistant' and m.channel = @channel
		   and (m.execution_id is not null or m.seq > (select a.seq from asked a) or @after > 0)
		   and not exists (select from agent_executions e where e.id = m.execution_id and e.flow = any(@own))
		 order by m.seq
		 limit @most`,
		postgres.Strict{
			"thread": in.Thread, "id": x.ID, "own": ownFlows(), "relay": RelayFlow, "last": last,
			"most": relayBatch, "after": after, "channel": cmp.Or(in.Channel, channel),
		}).
		Query(func(rows pgx.Rows) (err error) {
			state.Messages, err = pgx.CollectRows(rows, pgx.RowToStructByPos[relayedMessage])
			return err
		})
}

// checkRelay refuses a format and images in a thread whose messages go to an execution, which uses text alone.
func (a *UserMessage) checkRelay() error {
	if len(slices.Concat(a.Images...)) > 0 {
		return badRequest("messages", "image_not_supported",
			"This thread's messages go to an execution, which takes no images.")
	}
	if a.form == nil {
		return nil
	}
	return badRequest(a.formParam, "unsupported_value",
		"%s: this thread's messages go to an execution, which answers in text.",
		a.formParam)
}
