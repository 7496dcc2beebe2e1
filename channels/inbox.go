package channels

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// inbox is the [Inbox] of a channel. lease is nil for requests of a provider, which any process may handle.
type inbox struct {
	db    postgres.Beginner
	pool  postgres.DB
	name  string
	lease *lanes.Lease
	state *stateWriter
}

const (
	maxConversation = 150      // bytes; it is part of a thread's name
	maxText         = 64 << 10 // bytes of a message; the rest is dropped, and a line of the text says so
	maxFiles        = 8        // of a message, likewise
)

// Receive implements [Inbox].
func (b *inbox) Receive(ctx context.Context, cursor string, messages ...Incoming) error {
	return postgres.RetryOnDisconnect(ctx, func() error {
		return postgres.InTx(ctx, b.db, func(tx pgx.Tx) error {
			if b.lease != nil { // another process may poll by now
				if err := b.lease.Fence(ctx, tx); err != nil {
					return err
				}
			}
			batch := &pgx.Batch{}
			for _, m := range messages {
				if err := b.queue(batch, m); err != nil {
					return err
				}
			}
			if cursor != "" {
				batch.Queue(`update agent_channels set cursor = @cursor, cursor_at = clock_timestamp() where name = @channel`,
					postgres.Strict{"cursor": cursor, "channel": b.name})
			}
			if len(messages) > 0 {
				batch.Queue(`select pg_notify(@notifications, @channel)`,
					postgres.Strict{"notifications": notifications, "channel": b.name})
			}
			if batch.Len() == 0 {
				return nil
			}
			if err := tx.SendBatch(ctx, batch).Close(); err != nil {
				return fmt.Errorf("store messages of channel %s: %w", b.name, err)
			}
			return nil
		})
	})
}

// queue queues the statement that stores a message. A repeated one is dropped by its external id.
func (b *inbox) queue(batch *pgx.Batch, m Incoming) error {
	kept := make([]File, min(len(m.Files), maxFiles))
	for i := range kept {
		kept[i] = m.Files[i]
		kept[i].ID, kept[i].Name, kept[i].Type = postgres.Text(kept[i].ID), cut(kept[i].Name, 300), cut(kept[i].Type, 200)
	}
	files, err := json.Marshal(kept)
	if err != nil {
		return fmt.Errorf("encode files: %w", err)
	}
	batch.Queue(`
		insert into agent_channel_messages (channel, external_id, conversation, sender, sender_name, content, files, click,
		  ref, message_ref, raw, status, error_message, finished_at)
		values (@channel, @external_id, @conversation, @sender, @sender_name, @content, @files, @click, @ref, @message_ref,
		  @raw, case when @ignored = '' then 'received' else 'ignored' end, @ignored,
		  case when @ignored <> '' then clock_timestamp() end)
		on conflict (channel, external_id) do nothing`,
		postgres.Strict{
			"channel": b.name, "external_id": cut(m.ExternalID, 512), "conversation": cut(m.Conversation, maxConversation),
			"sender": cut(m.Sender, 200), "sender_name": cut(m.SenderName, 200), "content": m.boundedText(),
			"files": json.RawMessage(files), "click": cut(m.Click, 64), "ref": cut(m.Ref, 2000),
			"message_ref": cut(m.MessageRef, 512), "raw": m.Raw, "ignored": cut(m.Ignored, 300),
		})
	return nil
}

// boundedText returns the text that is stored, with a line for each omission.
func (m Incoming) boundedText() string {
	text := cut(m.Text, maxText)
	if len(m.Text) > maxText {
		text += "\n[The message is longer.]"
	}
	if omitted := len(m.Files) - maxFiles; omitted > 0 {
		text += fmt.Sprintf("\n[%d further files are missing: only %d of a message are read.]", omitted, maxFiles)
	}
	return text
}

// cut returns foreign text as PostgreSQL can store it, at most n bytes of it.
func cut(s string, n int) string {
	s = postgres.Text(s)
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "") // without a half character
	}
	return s
}

// Cursor implements [Inbox].
func (b *inbox) Cursor(ctx context.Context) (cursor string, age time.Duration, err error) {
	var seconds float64
	err = b.pool.QueryRow(ctx, `
		select cursor, coalesce(extract(epoch from clock_timestamp() - cursor_at), 0)::float8 from agent_channels
		 where name = @channel`, postgres.Strict{"channel": b.name}).Scan(&cursor, &seconds)
	if err != nil {
		return "", 0, fmt.Errorf("read cursor of channel %s: %w", b.name, err)
	}
	return cursor, time.Duration(seconds * float64(time.Second)), nil
}

// Known implements [Inbox].
func (b *inbox) Known(ctx context.Context, conversation string) (known bool, err error) {
	err = b.pool.QueryRow(ctx, `
		select exists (select from agent_threads where name = @conversation and owner = 'channel:' || @channel)
		    or exists (select from agent_channel_messages where channel = @channel and conversation = @conversation
		                 and status in ('received', 'running'))`,
		postgres.Strict{"channel": b.name, "conversation": conversation}).Scan(&known)
	if err != nil {
		return false, fmt.Errorf("find conversation of channel %s: %w", b.name, err)
	}
	return known, nil
}

// Connected implements [Inbox].
func (b *inbox) Connected(ctx context.Context) { b.state.set(ctx, nil) }

// Failing implements [Inbox].
func (b *inbox) Failing(ctx context.Context, cause error) { b.state.set(ctx, cause) }

// Bounced implements [Inbox].
func (b *inbox) Bounced(ctx context.Context, id, why string) error {
	return exec(ctx, b.db, "record bounce", `
		with failed as (
		  update agent_channel_sends
		     set status = 'failed', error_message = @why, finished_at = coalesce(finished_at, clock_timestamp())
		   where message_id = @id::uuid and channel = @channel and status in ('sending', 'sent', 'maybe_sent')
		  returning message_id)
		update agent_messages m set status = 'failed', error_message = @why, delivered_at = null from failed f
		 where m.id = f.message_id`,
		postgres.Strict{"id": id, "channel": b.name, "why": message(errors.New(why))})
}

// message returns the text of an error for storage and display.
func message(err error) string {
	if err == nil {
		return ""
	}
	return cut(redact.Text(err.Error(), 1000), 1000)
}

func exec(ctx context.Context, db postgres.DB, verb, sql string, args postgres.Strict) error {
	if _, err := db.Exec(ctx, sql, args); err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}
