package threads

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The channels over which a message goes out.
const (
	ChannelChat    = "chat"    // there to be read
	ChannelWebhook = "webhook" // posted to an outgoing target
	ChannelLog     = "log"     // a line of the log
)

// ErrEmpty reports a message without content.
var ErrEmpty = errors.New("a message needs a content")

// Outgoing is something to be said in a thread.
type Outgoing struct {
	ThreadID string `json:"thread_id"`
	Content  string `json:"content"`           // what PostgreSQL cannot store, NUL and invalid UTF-8, is left out
	Channel  string `json:"channel,omitempty"` // default: the thread's where that is webhook or log, else chat
	Target   string `json:"target,omitempty"`  // of channel webhook; default the thread's
	// ExecutionID and Claim say who speaks: the claim is checked. Without them it is nobody who could hold the
	// thread. Send fills them in.
	ExecutionID string `json:"-"`
	Claim       int64  `json:"-"`
	// Key makes a message of SendTx count once: the second with a key is the first. It is shared with all threads.
	Key string `json:"-"`
}

// SendResult says what became of a message.
type SendResult struct {
	MessageID string `json:"message_id"`
	Seq       *int64 `json:"seq"` // its place in the thread; nil while it is queued
	Queued    bool   `json:"queued"`
	Holder    string `json:"holder,omitempty"` // of a queued one: who has the thread

	acquired    bool
	lender      *string
	staleHolder *string
	staleFor    time.Duration
}

// Send says something on behalf of the execution that ctx belongs to. It is a step named send, so one message is made
// however often the process dies. The execution that holds the thread, or may borrow it, speaks at once and has the
// thread for ten more minutes; the message of any other is queued, which is no error, and leaves in its turn. A
// thread that nobody holds is taken. The thread must exist (see [Ensure]): ErrNotFound.
func Send(ctx context.Context, o Outgoing) (SendResult, error) {
	id, claim, err := executions.Claim(ctx)
	if err != nil {
		return SendResult{}, fmt.Errorf("send message: %w", err)
	}
	var fresh *SendResult
	got, err := executions.StepTx(ctx, "send", func(ctx context.Context, tx pgx.Tx) (SendResult, error) {
		said := o
		said.ExecutionID, said.Claim = id, claim
		s, err := SendTx(ctx, tx, said)
		fresh = &s
		return s, err
	}, executions.Input(o))
	if err != nil {
		return SendResult{}, err
	}
	if fresh != nil {
		fresh.Log(ctx, executions.Logger(ctx), o.ThreadID, fmt.Sprintf("%s#%d", id, claim))
	}
	return got, nil
}

// SendTx is Send in a transaction of the caller's, for the claim that o names or for nobody. A claim that is over is an
// error with SQLSTATE LK001; an unknown channel or target one with 22023. It waits for postgres.LockTimeout at most for
// a thread that another transaction has locked, and is an error with 55P03 then: try again in another transaction.
func SendTx(ctx context.Context, tx pgx.Tx, o Outgoing) (SendResult, error) {
	content := postgres.Text(o.Content)
	if strings.TrimSpace(content) == "" {
		return SendResult{}, fmt.Errorf("send message: %w", ErrEmpty)
	}
	if o.Key != "" {
		if s, done, err := sentBefore(ctx, tx, o.Key); err != nil || done {
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
		          from (select current_setting('lock_timeout') as was, set_config('lock_timeout', @patience, true) as now offset 0) o
		         cross join lateral lanekeeper.send_agent_message(case when o.now <> '' then @thread end, @execution, @claim, @content, nullif(@channel, ''),
		                            @target, @tokens) s offset 0) sent`,
		postgres.Strict{
			"patience": postgres.LockTimeout,
			"thread":   postgres.Text(o.ThreadID), "execution": execution, "claim": claim, "content": content, "channel": o.Channel,
			"target": o.Target, "tokens": tokens(Assistant, content),
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
	if o.Key != "" {
		if _, err := tx.Exec(ctx, `update agent_messages set dedupe_key = @key where id = @id`,
			postgres.Strict{"key": o.Key, "id": s.MessageID}); err != nil {
			return SendResult{}, fmt.Errorf("send message in thread %q: %w", o.ThreadID, err)
		}
	}
	return s, nil
}

// sentBefore finds the message that was sent with a key. Until tx ends nobody else sends with it.
func sentBefore(ctx context.Context, tx pgx.Tx, key string) (s SendResult, done bool, err error) {
	_, err = tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('send ' || @key, 0))`, postgres.Strict{"key": key})
	if err == nil {
		err = tx.QueryRow(ctx, `select id::text, seq, status = 'queued' from agent_messages where dedupe_key = @key`,
			postgres.Strict{"key": key}).Scan(&s.MessageID, &s.Seq, &s.Queued)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return SendResult{}, false, nil
	}
	if err != nil {
		return SendResult{}, false, fmt.Errorf("look for the message: %w", err)
	}
	return s, true, nil
}

// Log writes down what a send did with the lane of its thread; owner is who speaks. Call it after the commit.
func (s SendResult) Log(ctx context.Context, log *slog.Logger, thread, owner string) {
	lane := Lane(thread)
	if s.staleHolder != nil {
		log.WarnContext(ctx, "lane stale, clearing", "lane", lane, "holder", *s.staleHolder, "age", s.staleFor)
	}
	switch {
	case s.lender != nil:
		log.InfoContext(ctx, "lane inherited", "lane", lane, "from", *s.lender, "to", owner)
	case s.acquired:
		log.InfoContext(ctx, "lane acquired", "lane", lane, "owner", owner)
	case s.Queued:
		log.WarnContext(ctx, "lane busy", "lane", lane, "owner", owner, "holder", s.Holder)
	}
}
