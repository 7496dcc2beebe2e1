package channels

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/lanes"
)

const (
	maxConversation = 150 // bytes; it is part of a thread's name
	maxText         = 64 << 10
	maxFiles        = 8
	hold            = time.Minute // lifetime of a claim; after it, any worker may repeat the attempt
	maxEntries      = 20          // attempts to bring a message to its thread
)

// inbox is the [Inbox] of a channel. lease is nil for requests of a provider, which any process may handle.
type inbox struct {
	db    postgres.Beginner
	pool  postgres.DB
	name  string
	lease *lanes.Lease
	state *stateWriter
}

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
			"sender": cut(m.Sender, 200), "sender_name": cut(m.SenderName, 200), "content": cut(m.Text, maxText),
			"files": json.RawMessage(files), "click": cut(m.Click, 64), "ref": cut(m.Ref, 2000),
			"message_ref": cut(m.MessageRef, 512), "raw": m.Raw, "ignored": cut(m.Ignored, 300),
		})
	return nil
}

// cut returns foreign text as PostgreSQL can store it, at most n bytes of it.
func cut(s string, n int) string {
	s = postgres.Text(s)
	if len(s) > n {
		s = postgres.Text(s[:n])
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
		  update agent_channel_sends set status = 'failed', error_message = @why
		   where message_id = @id::uuid and channel = @channel and status in ('sent', 'maybe_sent') returning message_id)
		update agent_messages m set status = 'failed', error_message = @why, delivered_at = null from failed f
		 where m.id = f.message_id`,
		postgres.Strict{"id": id, "channel": b.name, "why": message(errors.New(why))})
}

// entry is one attempt to add a message to its thread.
type entry struct {
	ID           string
	Conversation string
	Sender       string
	SenderName   string
	Content      string
	Files        []File
	Click        string
	Ref          string
	MessageRef   string
	Attempts     int
}

// claimEntries claims the first due message of each conversation.
func (w *worker) claimEntries(ctx context.Context, limit int, full []string) ([]entry, error) {
	return postgres.Rows[entry](ctx, w.Pool, "claim messages of channel", `
		update agent_channel_messages m
		   set attempts = m.attempts + 1, next_attempt_at = clock_timestamp() + make_interval(secs => @hold), claim = @claim
		 where m.status = 'received' and m.id in (
		   select f.id from (
		     select distinct on (a.conversation) a.id, a.conversation, a.next_attempt_at from agent_channel_messages a
		      where a.channel = @channel and a.status = 'received' order by a.conversation, a.id) f
		    where f.next_attempt_at <= clock_timestamp() and f.conversation <> all(@full::text[])
		    order by f.id limit @limit)
		returning m.id::text, m.conversation, m.sender, m.sender_name, m.content, m.files, m.click, m.ref, m.message_ref,
		          m.attempts`,
		postgres.Strict{
			"channel": w.name, "limit": limit, "full": full, "hold": hold.Seconds(), "claim": w.inbox.lease.Token(),
		})
}

// entriesDue returns the time until a message is due.
func (w *worker) entriesDue(ctx context.Context, full []string) (time.Duration, error) {
	return due(w.Pool.QueryRow(ctx, `
		select extract(epoch from min(f.next_attempt_at) - clock_timestamp())::float8 from (
		  select distinct on (a.conversation) a.conversation, a.next_attempt_at from agent_channel_messages a
		   where a.channel = @channel and a.status = 'received' order by a.conversation, a.id) f
		 where f.conversation <> all(@full::text[])`, postgres.Strict{"channel": w.name, "full": full}))
}

func due(row pgx.Row) (time.Duration, error) {
	var seconds *float64
	if err := row.Scan(&seconds); err != nil || seconds == nil {
		return outbox.MaxPause, err
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// Visit is a message on its way into its thread.
type Visit struct {
	Key          string // deduplicates it
	Channel      Channel
	Conversation string
	Sender       string
	SenderName   string
	Text         string
	Files        []VisitFile
}

// VisitFile is a file with its content.
type VisitFile struct {
	Name, Type string
	Content    []byte
}

// Accepted has the thread and the turn of a message.
type Accepted struct{ ThreadID, ExecutionID, TraceID string }

// LaterError refuses a message for now.
type LaterError struct {
	Err   error
	Pause time.Duration
}

func (e *LaterError) Error() string { return e.Err.Error() }

func (e *LaterError) Unwrap() error { return e.Err }

// RefusedError refuses a message for good. Its text is for the sender.
type RefusedError struct{ Message string }

func (e *RefusedError) Error() string { return e.Message }

// enter adds a message to its thread and records that.
func (w *worker) enter(ctx context.Context, e entry) {
	ctx, cancel := w.attempt(ctx)
	defer cancel()
	if e.Click != "" {
		w.click(ctx, e)
		return
	}
	if w.channel.Pairing == PairingRequired {
		paired, err := w.checkSender(ctx, e)
		if err != nil {
			w.postpone(ctx, e, err)
			return
		}
		if !paired {
			w.finish(ctx, e, "ignored", "the sender is not paired")
			return
		}
	}
	text, files := w.fetchFiles(ctx, e)
	if text == "" && len(files) == 0 {
		w.finish(ctx, e, "ignored", "the message has no text and no file that can be read")
		return
	}
	asking := ctx
	if w.Principals != nil {
		issuer, err := w.transport.Issuer(ctx)
		if err == nil {
			asking, err = w.Principals.Asking(ctx, issuer, e.Sender, w.channel.Type, e.MessageRef)
		}
		if err != nil {
			w.postpone(ctx, e, err)
			return
		}
	}
	got, err := w.Accept(asking, Visit{
		Key: "channel " + e.ID, Channel: w.channel, Conversation: e.Conversation, Sender: e.Sender, SenderName: e.SenderName,
		Text: text, Files: files,
	})
	if refused, is := errors.AsType[*RefusedError](err); is {
		w.reply(ctx, e, Code(refused.Message))
		w.finish(ctx, e, "failed", refused.Message)
		return
	}
	if err != nil {
		w.postpone(ctx, e, err)
		return
	}
	err = exec(ctx, w.Pool, "record entry", `
		update agent_channel_messages set status = 'running', thread_id = @thread, execution_id = @execution,
		       trace_id = @trace, error_message = ''
		 where id = @id and status = 'received'`,
		postgres.Strict{"id": e.ID, "thread": got.ThreadID, "execution": got.ExecutionID, "trace": got.TraceID})
	if err != nil { // the key makes the repeated entry the same
		w.Logger.WarnContext(ctx, "message entered, not recorded", "channel", w.name, "message", e.ID, "error", err)
	}
	w.wakeWatch()
}

// postpone records a failed entry. The worker tries it again, and gives it up in the end.
func (w *worker) postpone(ctx context.Context, e entry, cause error) {
	pause := min(time.Second<<min(e.Attempts-1, 6), time.Minute)
	later, is := errors.AsType[*LaterError](cause)
	if is {
		pause = max(later.Pause, 100*time.Millisecond)
	}
	ctx = context.WithoutCancel(ctx)
	if !is && e.Attempts >= maxEntries {
		w.finish(ctx, e, "failed", cause.Error())
		return
	}
	w.Logger.WarnContext(ctx, "channel message postponed", "channel", w.name, "message", e.ID, "error", cause)
	err := exec(ctx, w.Pool, "postpone message", `
		update agent_channel_messages
		   set next_attempt_at = clock_timestamp() + make_interval(secs => @pause), error_message = @error, claim = null,
		       attempts = attempts - @again
		 where id = @id and status = 'received'`,
		postgres.Strict{"id": e.ID, "pause": pause.Seconds(), "error": message(cause), "again": map[bool]int{true: 1}[is]})
	if err != nil {
		w.Logger.WarnContext(ctx, "postponed message not recorded", "channel", w.name, "message", e.ID, "error", err)
	}
}

// finish records the end of a message without a turn.
func (w *worker) finish(ctx context.Context, e entry, status, why string) {
	err := exec(context.WithoutCancel(ctx), w.Pool, "finish message", `
		update agent_channel_messages set status = @status, error_message = @error, finished_at = clock_timestamp()
		 where id = @id and status = 'received'`,
		postgres.Strict{"id": e.ID, "status": status, "error": message(errors.New(why))})
	if err != nil {
		w.Logger.WarnContext(ctx, "message not finished, trying again", "channel", w.name, "message", e.ID, "error", err)
	}
}

// fetchFiles reads the files of a message. An unreadable file becomes a line of the text.
func (w *worker) fetchFiles(ctx context.Context, e entry) (text string, files []VisitFile) {
	text = e.Content
	fetch := w.fetch(e)
	for _, f := range e.Files {
		why := "files are not read here"
		if fetch != nil {
			content, err := fetch(ctx, f)
			if err == nil {
				files = append(files, VisitFile{Name: f.Name, Type: f.Type, Content: content})
				continue
			}
			why = message(err)
			w.Logger.WarnContext(ctx, "file of a channel not read", "channel", w.name, "message", e.ID, "error", why)
			why = "it could not be read, or is too large"
		}
		text += fmt.Sprintf("\n[The file %q is missing: %s.]", cut(f.Name, 100), why)
	}
	return text, files
}

// fetch returns the reader of a message's files; nil for a transport without one.
func (w *worker) fetch(e entry) func(ctx context.Context, f File) ([]byte, error) {
	switch t := w.transport.(type) {
	case Fetcher:
		return func(ctx context.Context, f File) ([]byte, error) { return t.Fetch(ctx, f, w.MaxFile) }
	case Extractor:
		var raw []byte
		return func(ctx context.Context, f File) ([]byte, error) {
			if raw == nil {
				err := w.Pool.QueryRow(ctx, `select raw from agent_channel_messages where id = @id`,
					postgres.Strict{"id": e.ID}).Scan(&raw)
				if err != nil {
					return nil, fmt.Errorf("read message: %w", err)
				}
			}
			return t.Extract(raw, f, w.MaxFile)
		}
	}
	return nil
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
