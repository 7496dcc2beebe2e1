package channels

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const maxEntries = 20 // attempts to bring a message to its thread

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
		   set attempts = m.attempts + 1, claim = @claim,
		       next_attempt_at = clock_timestamp() + make_interval(secs => @ttl)
		 where m.status = 'received' and m.id in (
		   select f.id from (
		     select distinct on (a.conversation) a.id, a.conversation, a.next_attempt_at from agent_channel_messages a
		      where a.channel = @channel and a.status = 'received' order by a.conversation, a.id) f
		    where f.next_attempt_at <= clock_timestamp() and f.conversation <> all(@full::text[])
		    order by f.id limit @limit)
		returning m.id::text, m.conversation, m.sender, m.sender_name, m.content, m.files, m.click, m.ref, m.message_ref,
		          m.attempts`,
		postgres.Strict{
			"channel": w.name, "limit": limit, "full": full, "ttl": claimTTL.Seconds(), "claim": w.inbox.lease.Token(),
		})
}

// entriesDue returns the time until a message is due, for conversations not in full.
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

// Accepted is the thread and the turn of an accepted message.
type Accepted struct{ ThreadID, ExecutionID, TraceID string }

// LaterError postpones a message. The worker tries it again after Pause, any number of times.
type LaterError struct {
	Err   error
	Pause time.Duration
}

func (e *LaterError) Error() string { return e.Err.Error() }

func (e *LaterError) Unwrap() error { return e.Err }

// RefusedError refuses a message for good. The worker sends its text to the sender.
type RefusedError struct{ Message string }

func (e *RefusedError) Error() string { return e.Message }

// enter adds a message to its thread and records that.
func (w *worker) enter(ctx context.Context, e entry) {
	ctx, cancel := w.attemptContext(ctx)
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
	text, files, err := w.fetchFiles(ctx, e)
	if err != nil {
		w.postpone(ctx, e, err)
		return
	}
	if text == "" && len(files) == 0 {
		w.finish(ctx, e, "ignored", "the message has no text and no file that can be read")
		return
	}
	senderCtx := ctx // acts for the sender's principal, if there is one
	if w.Principals != nil {
		issuer, err := w.transport.Issuer(ctx)
		if err == nil {
			senderCtx, err = w.Principals.Asking(ctx, issuer, e.Sender, w.channel.Type, e.MessageRef)
		}
		if err != nil {
			w.postpone(ctx, e, err)
			return
		}
	}
	accepted, err := w.Accept(senderCtx, Visit{
		Key: "channel " + e.ID, Channel: w.channel, Conversation: e.Conversation, Sender: e.Sender, SenderName: e.SenderName,
		Text: text, Files: files,
	})
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		_ = w.reply(ctx, e, Code(refused.Message)) // logged
		w.finish(ctx, e, "failed", refused.Message)
		return
	}
	if err != nil {
		w.postpone(ctx, e, err)
		return
	}
	err = exec(ctx, w.Pool, "record entry", `
		update agent_channel_messages
		   set status = 'running', thread_id = @thread, execution_id = @execution, trace_id = @trace, error_message = ''
		 where id = @id and status = 'received'`,
		postgres.Strict{
			"id": e.ID, "thread": accepted.ThreadID, "execution": accepted.ExecutionID, "trace": accepted.TraceID,
		})
	if err != nil { // the next attempt has the same key, so Accept returns the same turn
		w.Logger.WarnContext(ctx, "message entered, not recorded", "channel", w.name, "message", e.ID, "error", err)
	}
	w.wakeWatch()
}

// postpone records a failed attempt. The worker repeats it, up to maxEntries times, and then tells the sender of a
// message, but not of a click. A [LaterError] counts no attempt.
func (w *worker) postpone(ctx context.Context, e entry, cause error) {
	pause := min(time.Second<<min(e.Attempts-1, 6), time.Minute)
	uncounted := 0
	later, ok := errors.AsType[*LaterError](cause)
	if ok {
		pause, uncounted = max(later.Pause, 100*time.Millisecond), 1
	}
	ctx = context.WithoutCancel(ctx)
	if !ok && e.Attempts >= maxEntries {
		if e.Click == "" {
			_ = w.reply(ctx, e, FailedNotice) // logged
		}
		w.finish(ctx, e, "failed", cause.Error())
		return
	}
	w.Logger.WarnContext(ctx, "channel message postponed", "channel", w.name, "message", e.ID, "error", cause)
	err := exec(ctx, w.Pool, "postpone message", `
		update agent_channel_messages
		   set next_attempt_at = clock_timestamp() + make_interval(secs => @pause), error_message = @error, claim = null,
		       attempts = attempts - @uncounted
		 where id = @id and status = 'received'`,
		postgres.Strict{"id": e.ID, "pause": pause.Seconds(), "error": message(cause), "uncounted": uncounted})
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

const (
	maxFetches   = 3                // attempts to read the files of a message
	fetchTimeout = 40 * time.Second // for all files in the last attempt; its remaining time is for the turn
)

// fetchFiles reads the files of a message. A file that is empty, or unreadable in maxFetches attempts, becomes a line
// of the text.
func (w *worker) fetchFiles(ctx context.Context, e entry) (text string, files []VisitFile, err error) {
	if e.Attempts >= maxFetches {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, fetchTimeout)
		defer cancel()
	}
	text = e.Content
	fetch := w.fetch(e)
	for _, f := range e.Files {
		why := "files are not read here"
		if fetch != nil {
			content, err := fetch(ctx, f)
			switch {
			case err == nil && len(content) == 0:
				why = "it is empty"
			case err == nil:
				files = append(files, VisitFile{Name: f.Name, Type: f.Type, Content: content})
				continue
			case e.Attempts < maxFetches && f.Size <= w.MaxFile:
				return "", nil, fmt.Errorf("read file: %w", err)
			default:
				w.Logger.WarnContext(ctx, "file of a channel not read", "channel", w.name, "message", e.ID,
					"error", message(err))
				why = "it could not be read, or is too large"
			}
		}
		text += fmt.Sprintf("\n[The file %q is missing: %s.]", cut(f.Name, 100), why)
	}
	return text, files, nil
}

// fetch returns the function that reads the files of a message; nil if the transport reads no files.
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
