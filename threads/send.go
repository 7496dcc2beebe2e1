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

// The channels of outgoing messages.
const (
	ChannelChat    = "chat"    // stored only
	ChannelWebhook = "webhook" // posted to an outgoing target
	ChannelLog     = "log"     // a line of the log
)

// ErrEmpty reports a message without content.
var ErrEmpty = errors.New("a message needs a content")

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

	acquired    bool
	lender      *string
	staleHolder *string
	staleFor    time.Duration
}

// Send sends a message for the execution of ctx. It is a step named send, so crashes do not repeat the message. If the
// execution holds, borrows or acquires the lane, the message is sent and the lane renewed for ten minutes. Otherwise it
// is queued, which is no error. The thread must exist (see [Ensure]): ErrNotFound.
func Send(ctx context.Context, o Outgoing) (SendResult, error) {
	id, claim, err := executions.Claim(ctx)
	if err != nil {
		return SendResult{}, fmt.Errorf("send message: %w", err)
	}
	var fresh *SendResult
	got, err := executions.StepTx(ctx, "send", func(ctx context.Context, tx pgx.Tx) (SendResult, error) {
		out := o
		out.ExecutionID, out.Claim = id, claim
		s, err := SendTx(ctx, tx, out)
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

// SendTx is Send in the caller's transaction, for the claim in o or without one. SQLSTATE LK001: the claim has ended;
// 22023: the channel or target is unknown; 55P03: another transaction has had the thread locked for
// postgres.LockTimeout. Retry the latter in a new transaction.
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
		          from (select current_setting('lock_timeout') as was, set_config('lock_timeout', @patience, true)
		            as now offset 0) o
		         cross join lateral lanekeeper.send_agent_message(case when o.now <> '' then @thread end, @execution, @claim,
		           @content, nullif(@channel, ''),
		                            @target, @tokens) s offset 0) sent`,
		postgres.Strict{
			"patience": postgres.LockTimeout,
			"thread":   postgres.Text(o.ThreadID), "execution": execution, "claim": claim, "content": content,
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
	if o.Key != "" {
		if _, err := tx.Exec(ctx, `update agent_messages set dedupe_key = @key where id = @id`,
			postgres.Strict{"key": o.Key, "id": s.MessageID}); err != nil {
			return SendResult{}, fmt.Errorf("send message in thread %q: %w", o.ThreadID, err)
		}
	}
	return s, nil
}

// sentBefore finds the message of a key, and locks the key until tx ends.
func sentBefore(ctx context.Context, tx pgx.Tx, key string) (s SendResult, done bool, err error) {
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

// Log logs the effect of a send on the lane; owner is the sender. Call it after the commit.
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
