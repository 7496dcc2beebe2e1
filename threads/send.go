package threads

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The channels of outgoing messages.
const (
	ChannelChat    = "chat"    // stored only
	ChannelWebhook = "webhook" // posted to an outgoing target
	ChannelLog     = "log"     // a line of the log
)

// ErrEmpty reports a message without content.
var ErrEmpty = errors.New("a message needs content")

// Outgoing is a message to send in a thread.
type Outgoing struct {
	ThreadID string `json:"thread_id"`
	Content  string `json:"content"`           // without NUL and invalid UTF-8, which PostgreSQL cannot store
	Channel  string `json:"channel,omitempty"` // default: the thread's if that is webhook or log, else chat
	Target   string `json:"target,omitempty"`  // of channel webhook; default the thread's
	// ExecutionID and Claim name the sender; the claim is checked. Without them the sender cannot hold the lane. Send sets
	// them.
	ExecutionID string `json:"-"`
	Claim       int64  `json:"-"`
	// Key deduplicates a message of SendTx among all threads.
	Key string `json:"-"`
}

// SendResult is the result of a send.
type SendResult struct {
	MessageID string `json:"message_id"`
	Seq       *int64 `json:"seq"` // its place in the thread; nil while it is queued
	Queued    bool   `json:"queued"`
	Holder    string `json:"holder,omitempty"` // of a queued message: the holder of the lane

	acquired     bool
	fencingToken int64 // of the acquired or borrowed lane
	lender       *string
	staleHolder  *string
	staleFor     time.Duration
}

// Send sends a message for the execution of ctx. It is a step named send, so crashes do not repeat the message. An
// execution that holds, borrows or acquires the lane sends the message, and renews the lane for the thread's idle time
// (ten minutes by default). Otherwise it is queued, which is no error. The thread must exist (see [Ensure]):
// ErrNotFound.
func Send(ctx context.Context, o Outgoing) (SendResult, error) {
	id, claim, err := executions.Claim(ctx)
	if err != nil {
		return SendResult{}, fmt.Errorf("send message: %w", err)
	}
	var sent *SendResult
	result, err := executions.StepTx(ctx, "send", func(ctx context.Context, tx pgx.Tx) (SendResult, error) {
		out := o
		out.ExecutionID, out.Claim = id, claim
		s, err := SendTx(ctx, tx, out)
		sent = &s
		return s, err
	}, executions.Input(o))
	if err != nil {
		return SendResult{}, err
	}
	if sent != nil {
		sent.Log(ctx, executions.Logger(ctx), o.ThreadID, fmt.Sprintf("%s#%d", id, claim))
	}
	return result, nil
}

// SendTx is Send in the caller's transaction, for the claim in o or without one. SQLSTATE LK001: the claim has ended;
// 22023: the channel or target is unknown; 55P03: another transaction has had the thread locked for
// postgres.LockTimeout. Retry the latter in a new transaction.
func SendTx(ctx context.Context, tx pgx.Tx, o Outgoing) (SendResult, error) {
	content := postgres.Text(o.Content)
	if strings.TrimSpace(content) == "" {
		return SendResult{}, fmt.Errorf("send message: %w", ErrEmpty)
	}
	if o.Key != "" {
		if s, found, err := findSent(ctx, tx, o.Key); err != nil || found {
			return s, err
		}
	}
	var s SendResult
	var holder *string
	var stale *int64
	var execution, claim any
	if o.ExecutionID != "" {
		execution, claim = o.ExecutionID, o.Claim
	}
	err := tx.QueryRow(ctx, `
		select message_id::text, seq, queued, acquired, holder, lender::text, stale_holder, stale_ms
		  from (select s.*, set_config('lock_timeout', o.was, true)
		          from (select current_setting('lock_timeout') as was, set_config('lock_timeout', @lock_timeout, true)
		            as now offset 0) o
		         cross join lateral lanekeeper.send_agent_message(case when o.now <> '' then @thread end, @execution, @claim,
		                                                          @content, nullif(@channel, ''), @target,
		                                                          @tokens) s offset 0) sent`,
		postgres.Strict{
			"lock_timeout": postgres.LockTimeout,
			"thread":       postgres.Text(o.ThreadID), "execution": execution, "claim": claim, "content": content,
			"channel": o.Channel,
			"target":  o.Target, "tokens": tokens(Assistant, content),
		}).Scan(&s.MessageID, &s.Seq, &s.Queued, &s.acquired, &holder, &s.lender, &s.staleHolder, &stale)
	if postgres.IsCode(err, "P0002") {
		err = ErrNotFound
	}
	if err != nil {
		return SendResult{}, fmt.Errorf("send message in thread %q: %w", o.ThreadID, err)
	}
	if holder != nil {
		s.Holder = *holder
	}
	if stale != nil {
		s.staleFor = time.Duration(*stale) * time.Millisecond
	}
	if s.acquired || s.lender != nil || s.passedOn() {
		if err := tx.QueryRow(ctx, `select fencing_token from agent_locks where lane = @lane`,
			postgres.Strict{"lane": postgres.Text(Lane(o.ThreadID))}).Scan(&s.fencingToken); err != nil {
			return SendResult{}, fmt.Errorf("read token of thread %q: %w", o.ThreadID, err)
		}
	}
	if o.Key != "" {
		if _, err := tx.Exec(ctx, `update agent_messages set dedupe_key = @key where id = @id`,
			postgres.Strict{"key": o.Key, "id": s.MessageID}); err != nil {
			return SendResult{}, fmt.Errorf("send message in thread %q: %w", o.ThreadID, err)
		}
	}
	return s, nil
}

// findSent finds the message of a key, and locks the key until tx ends.
func findSent(ctx context.Context, tx pgx.Tx, key string) (s SendResult, found bool, err error) {
	_, err = tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('send ' || @key, 0))`,
		postgres.Strict{"key": key})
	if err == nil {
		err = tx.QueryRow(ctx, `select id::text, seq, status = 'queued' from agent_messages where dedupe_key = @key`,
			postgres.Strict{"key": key}).Scan(&s.MessageID, &s.Seq, &s.Queued)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return SendResult{}, false, nil
	}
	if err != nil {
		return SendResult{}, false, fmt.Errorf("find message of key: %w", err)
	}
	return s, true, nil
}

// passedOn reports that the send passed an ended lease to an earlier sender in the queue.
func (s SendResult) passedOn() bool { return s.staleHolder != nil && s.Queued && s.Holder != "" }

// Log logs the effect of a send on the lane; owner is the sender. Call it after the commit.
func (s SendResult) Log(ctx context.Context, log *slog.Logger, thread, owner string) {
	lane := Lane(thread)
	if s.staleHolder != nil {
		log.WarnContext(ctx, "lane stale, clearing", "lane", lane, "holder", *s.staleHolder, "age", s.staleFor)
	}
	if s.passedOn() {
		log.InfoContext(ctx, "lane acquired", "lane", lane, "owner", s.Holder, "fencing_token", s.fencingToken)
	}
	switch {
	case s.lender != nil:
		log.InfoContext(ctx, "lane inherited", "lane", lane, "from", *s.lender, "to", owner, "fencing_token", s.fencingToken)
	case s.acquired:
		log.InfoContext(ctx, "lane acquired", "lane", lane, "owner", owner, "fencing_token", s.fencingToken)
	case s.Queued:
		log.WarnContext(ctx, "lane busy", "lane", lane, "owner", owner, "holder", s.Holder)
	}
}

// Incoming is a message of the participant.
type Incoming struct {
	ThreadID string
	Content  string
	Channel  string // default chat
	// Data is added to that of the event MESSAGE_RECEIVED, which has message_id, thread_id, content and channel.
	Data map[string]any
	// ID deduplicates the message; "" for none. Ids are shared with all events: give them a prefix.
	ID          string
	ExecutionID string // the execution of the message; "" for none
}

// ReceiveResult is the result of Receive.
type ReceiveResult struct {
	MessageID string   `json:"message_id"`
	Seq       int64    `json:"seq"`
	EventID   string   `json:"event_id"`
	Resumed   []string `json:"resumed"` // the executions that waited for it
}

// Receive stores a message of the participant and ends the waits for it, in the caller's transaction. Without a wait,
// the event is kept for the next wait of the last sender. ErrNotFound: there is no such thread. Call it before tx
// locks anything else: it locks the wait, executions, lanes and the thread, in this order.
func Receive(ctx context.Context, e *executions.Engine, tx pgx.Tx, in Incoming) (ReceiveResult, error) {
	in.Channel = cmp.Or(in.Channel, ChannelChat)
	data, err := json.Marshal(in.Data)
	if err != nil {
		return ReceiveResult{}, fmt.Errorf("receive message: encode data: %w", err)
	}
	if in.Data == nil {
		data = []byte("{}")
	}
	content := postgres.Text(in.Content)
	rows, err := tx.Query(ctx, `
		select message_id::text, seq, event_id::text, execution_id::text
		  from lanekeeper.receive_agent_message(@thread, @content, @channel, @data, nullif(@id, ''),
		                                        nullif(@execution, '')::uuid, @tokens)`,
		postgres.Strict{
			"thread": postgres.Text(in.ThreadID), "content": content, "channel": in.Channel, "data": json.RawMessage(data),
			"id":        postgres.Text(in.ID),
			"execution": in.ExecutionID, "tokens": tokens(User, content),
		})
	if err != nil {
		return ReceiveResult{}, fmt.Errorf("receive message: %w", err)
	}
	var result ReceiveResult
	var resumed *string
	_, err = pgx.ForEachRow(rows, []any{&result.MessageID, &result.Seq, &result.EventID, &resumed}, func() error {
		if resumed != nil {
			result.Resumed = append(result.Resumed, *resumed)
		}
		return nil
	})
	if postgres.IsCode(err, "P0002") || err == nil && result.MessageID == "" {
		err = errors.Join(err, ErrNotFound)
	}
	if err != nil {
		return ReceiveResult{}, fmt.Errorf("receive message in thread %q: %w", in.ThreadID, err)
	}
	return result, e.WakeTx(ctx, tx, result.Resumed...)
}

// Window returns the summary of a thread and the latest messages within a number of tokens, oldest first. Only whole
// turns before the turn before are returned (0: all), without summarised, failed and withdrawn messages. It reads at
// most 400 rows. cut reports that older messages without a summary may be left out.
func Window(
	ctx context.Context, db postgres.DB, thread string, before int64, tokens int,
) (summary string, messages []Message, cut bool, err error) {
	id, b := postgres.Text(thread), &pgx.Batch{}
	if before == 0 {
		before = math.MaxInt64
	}
	// A turn between two bounds, one of them unknown, counts as rare in a plan: it might read and sort the whole thread.
	// Two bounds of different form count apart.
	b.Queue(`
		with latest as (
		  select m.* from agent_messages m
		   where m.thread_id = @thread and m.turn > (select summary_through from agent_threads where id = @thread)
		     and (m.turn, m.seq) < (@before::bigint, 0) and m.status not in ('failed', 'withdrawn')
		   order by m.turn desc, m.seq desc limit 400),
		measured as (select l.*, sum(l.tokens) over (order by l.turn desc, l.seq desc) as running from latest l)
		select `+allColumns+` from measured m
		 where running - tokens <= @tokens order by turn, seq`, // also the first that does not fit
		postgres.Strict{"thread": id, "before": before, "tokens": tokens}).Query(func(rows pgx.Rows) (err error) {
		messages, err = pgx.CollectRows(rows, pgx.RowToStructByName[Message])
		return err
	})
	// The second statement reads the summary. A summary stored in between repeats messages, and loses none.
	b.Queue(`select summary from agent_threads where id = @thread`, postgres.Strict{"thread": id}).
		QueryRow(func(row pgx.Row) error { return row.Scan(&summary) })
	if err := db.SendBatch(ctx, b).Close(); errors.Is(err, pgx.ErrNoRows) {
		return "", nil, false, fmt.Errorf("read thread %s: %w", thread, ErrNotFound)
	} else if err != nil {
		return "", nil, false, fmt.Errorf("read thread %s: %w", thread, err)
	}
	cut = len(messages) == 400
	for _, m := range messages {
		tokens -= m.Tokens
	}
	if tokens < 0 {
		cut, messages = true, messages[1:]
	}
	// A turn that does not fit whole is left out.
	firstComplete := slices.IndexFunc(messages, func(m Message) bool { return *m.Turn == *m.Seq })
	if firstComplete < 0 {
		firstComplete = len(messages)
	}
	return summary, messages[firstComplete:], cut, nil
}

// Backlog returns the turns to summarise, oldest first: those before the latest keep tokens or 200 messages, up to
// about maxTokens. It is empty when all turns without a summary fit in limit tokens and are fewer than 400 messages,
// the most that Window reads. Of a first turn with more messages, it returns the first 400. before excludes later
// turns; 0: none.
func Backlog(
	ctx context.Context, db postgres.DB, thread string, before int64, limit, keep, maxTokens int,
) ([]Message, error) {
	t, err := Get(ctx, db, thread)
	if err != nil {
		return nil, err
	}
	rows, err := db.Query(ctx, `
		with latest as (
		  select m.turn, m.tokens, m.seq from agent_messages m
		   where m.thread_id = @thread and m.turn > @through and (@before::bigint = 0 or m.turn < @before)
		     and m.status not in ('failed', 'withdrawn')
		   order by m.turn desc, m.seq desc limit 400),
		measured as (
		  select l.turn,
		         sum(l.tokens) over (order by l.turn desc, l.seq desc) as running,
		         row_number() over (order by l.turn desc, l.seq desc) as place
		    from latest l),
		old as (
		  select max(m.turn) as through
		    from measured m, (select max(running) > @limit as large, count(*) = 400 as many from measured) size
		   where (size.large or size.many) and m.running > @keep
		      or size.many and m.place > 200),
		oldest as (
		  select m.* from agent_messages m
		   where m.thread_id = @thread and m.turn > @through and m.status not in ('failed', 'withdrawn')
		   order by m.turn, m.seq limit 400),
		folded as (
		  select o.*, sum(o.tokens) over (order by o.turn) - sum(o.tokens) over (partition by o.turn) as earlier,
		         count(*) over () < 400 or o.turn < max(o.turn) over () or o.turn = min(o.turn) over ()
		           as whole -- not cut by the limit, or too long to be read whole
		    from oldest o where o.turn <= (select through from old))
		select `+ownColumns+` from folded where earlier < @most and whole order by turn, seq`,
		postgres.Strict{
			"thread": t.ID, "through": t.SummaryThrough, "before": before, "limit": limit, "keep": keep, "most": maxTokens,
		})
	return postgres.Collect(rows, err, fmt.Sprintf("read backlog of thread %s", thread), pgx.RowToStructByNameLax[Message])
}

// SaveSummary replaces a summary by a longer one if it still ends at fromThrough; false if another process replaced it.
func SaveSummary(
	ctx context.Context, db postgres.DB, thread string, fromThrough, through int64, text string,
) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_threads set summary = @text, summary_through = @through
		 where id = @thread and summary_through = @from and @through > @from`,
		postgres.Strict{"thread": thread, "from": fromThrough, "through": through, "text": postgres.Text(text)})
	if err != nil {
		return false, fmt.Errorf("save summary of thread %s: %w", thread, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Turns reads the messages of the turns from through before-1, up to the place through. It returns the same messages
// each time, at most 400.
func Turns(ctx context.Context, db postgres.DB, thread string, from, before, through int64) ([]Message, error) {
	rows, err := db.Query(ctx, `
		select `+allColumns+` from agent_messages m
		 where thread_id = @thread and turn >= @from and turn < @before and seq <= @through
		   and status not in ('failed', 'withdrawn')
		 order by turn, seq limit 400`,
		postgres.Strict{"thread": postgres.Text(thread), "from": from, "before": before, "through": through})
	return postgres.Collect(rows, err, fmt.Sprintf("read thread %s", thread), pgx.RowToStructByName[Message])
}
