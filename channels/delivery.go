package channels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// send is one attempt to send a message.
type send struct {
	MessageID    string
	ThreadID     string
	Conversation string
	Content      string
	ExecutionID  string
	TraceID      string
	Attempts     int
	Parts        []string // the provider's ids of the parts so far
	Attempting   bool     // an earlier attempt ended while the provider was receiving the next part
	ReplyTo      string
}

// maxSends is the number of attempts until a message fails, about a day later. Attempts that the provider delayed
// count.
const maxSends = 30

// schedule has the pauses after failed attempts; the last one repeats.
func schedule() []time.Duration {
	return []time.Duration{
		time.Second, 5 * time.Second, 30 * time.Second, 2 * time.Minute, 10 * time.Minute, 30 * time.Minute, time.Hour,
	}
}

// maxQuiet bounds the pause of all conversations after the provider requested one in a conversation.
const maxQuiet = 5 * time.Second

// keepQuiet stops all sends for the pause that the provider requested.
func (w *worker) keepQuiet(pause time.Duration) {
	w.quiet.Store(time.Now().Add(min(pause, maxQuiet)).UnixNano())
}

func (w *worker) isQuiet() bool { return time.Now().UnixNano() < w.quiet.Load() }

// claimSends claims the first due message of each thread.
func (w *worker) claimSends(ctx context.Context, limit int, full []string) ([]send, error) {
	if w.isQuiet() {
		return nil, nil
	}
	return postgres.Rows[send](ctx, w.Pool, "claim messages to send", `
		with picked as (
		  update agent_channel_sends s
		     set attempts = s.attempts + 1, status = 'sending', claim = @claim,
		         next_attempt_at = clock_timestamp() + make_interval(secs => @ttl)
		   where s.status in ('queued', 'sending') and s.message_id in (
		     select f.message_id from (
		       select distinct on (a.thread_id) a.message_id, a.thread_id, a.next_attempt_at from agent_channel_sends a
		        where a.channel = @channel and a.status in ('queued', 'sending') order by a.thread_id, a.seq) f
		      where f.next_attempt_at <= clock_timestamp() and f.thread_id <> all(@full::text[])
		      order by f.message_id limit @limit)
		  returning s.message_id, s.thread_id, s.attempts, s.parts, s.attempting)
		select p.message_id::text, p.thread_id, h.name as conversation, m.content, coalesce(m.execution_id::text, '')
		         as execution_id, coalesce(m.trace_id, '') as trace_id, p.attempts,
		       p.parts, p.attempting, coalesce(i.message_ref, '') as reply_to
		  from picked p join agent_messages m on m.id = p.message_id join agent_threads h on h.id = p.thread_id
		  left join agent_channel_messages i on i.execution_id = m.execution_id and i.channel = @channel`,
		postgres.Strict{
			"channel": w.name, "limit": limit, "full": full, "ttl": claimTTL.Seconds(), "claim": w.inbox.lease.Token(),
		})
}

// sendsDue returns the time until a message is due, for threads not in full.
func (w *worker) sendsDue(ctx context.Context, full []string) (time.Duration, error) {
	return due(w.Pool.QueryRow(ctx, `
		select extract(epoch from min(f.next_attempt_at) - clock_timestamp())::float8 from (
		  select distinct on (a.thread_id) a.thread_id, a.next_attempt_at from agent_channel_sends a
		   where a.channel = @channel and a.status in ('queued', 'sending') order by a.thread_id, a.seq) f
		 where f.thread_id <> all(@full::text[])`, postgres.Strict{"channel": w.name, "full": full}))
}

// deliver sends the parts of a message and records each.
func (w *worker) deliver(ctx context.Context, s send) {
	ctx, cancel := w.attemptContext(ctx)
	defer cancel()
	status, cause := w.sendParts(ctx, &s)
	if errors.Is(cause, errClaimLost) {
		return
	}
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := w.recordSend(ctx, s, status, cause); err != nil {
		w.Logger.WarnContext(ctx, "sent message not recorded", "channel", w.name, "message_id", s.MessageID,
			"trace_id", s.TraceID, "error", err)
	}
}

// errClaimLost ends an attempt whose claim has expired and was claimed by a newer attempt.
var errClaimLost = errors.New("another attempt has begun")

// sendParts sends the missing parts. The status is sent, maybe_sent or failed; sending means that the worker tries
// again.
func (w *worker) sendParts(ctx context.Context, s *send) (status string, cause error) {
	parts := Split(s.Content, w.transport.Limits())
	if s.Attempting {
		if err := w.settleLost(ctx, s, w.part(*s, parts)); err != nil {
			return "sending", err
		}
	}
	for len(s.Parts) < len(parts) {
		m := w.part(*s, parts)
		id, err := w.replaceDraft(ctx, *s, m)
		if err == nil && id == "" {
			if err := w.markPart(ctx, *s, true, nil); err != nil {
				return "sending", err
			}
			id, err = w.transport.Send(ctx, m)
		}
		failure, known := errors.AsType[*SendError](err)
		switch {
		case err == nil:
		case known && failure.Permanent:
			return "failed", err
		case known && !failure.MaybeSent:
			return "sending", err
		case w.canFind(): // the next attempt asks: the provider may still be storing the part
			s.Attempting = true
			return "sending", err
		default:
			cause = err
		}
		s.Parts = append(s.Parts, id)
		if err := w.markPart(context.WithoutCancel(ctx), *s, false, cause); err != nil {
			return "sending", err
		}
	}
	if slices.Contains(s.Parts, "") {
		return "maybe_sent", cmp.Or(cause, errLost)
	}
	return "sent", nil
}

// answerBelow replaces the draft of a turn that waited for an approval.
const answerBelow = "_The answer is below._"

// replaceDraft replaces the draft of an answer by its first part. An edit may be repeated, so its outcome need not be
// known. The id is "" if there is no draft, or the provider no longer has it. After an approval it is "", too, because
// providers notify nobody of an edit, and the person may have waited for days.
func (w *worker) replaceDraft(ctx context.Context, s send, m Message) (id string, err error) {
	editor, ok := w.transport.(Editor)
	if !ok || m.Part > 0 || s.ExecutionID == "" {
		return "", nil
	}
	unlock, err := w.drafts.Lock(ctx, s.ExecutionID)
	if err != nil {
		return "", NotSent(err)
	}
	defer unlock()
	var waited bool
	err = w.Pool.QueryRow(ctx, `
		select coalesce((select m.draft_id
		                   from agent_channel_messages m
		                  where m.execution_id = @id and m.channel = @channel and m.draft_id not in (@lost, @notice)
		                  limit 1), ''),
		       exists (select from agent_approvals a where a.execution_id = @id and a.parked)`,
		postgres.Strict{"id": s.ExecutionID, "channel": w.name, "lost": lostDraft, "notice": noticeDraft}).Scan(&id, &waited)
	if err != nil {
		return "", NotSent(fmt.Errorf("read draft: %w", err))
	}
	if id == "" {
		return "", nil
	}
	if waited {
		m.Markdown = answerBelow
		if err := editor.Edit(ctx, id, m); err != nil {
			w.Logger.DebugContext(ctx, "draft not edited", "channel", w.name, "error", message(err))
		}
		return "", nil
	}
	err = editor.Edit(ctx, id, m)
	failure, known := errors.AsType[*SendError](err)
	switch {
	case err == nil:
		return id, nil
	case known && failure.Permanent: // a person has deleted it
		return "", nil
	case known && !failure.MaybeSent:
		return "", err
	}
	return "", NotSent(err)
}

// errLost is the reason of a part that an earlier attempt may have sent.
var errLost = errors.New("the answer of the provider was lost")

// part returns the next part.
func (w *worker) part(s send, parts []string) Message {
	n := len(s.Parts)
	m := Message{ID: s.MessageID, Part: n, Conversation: s.Conversation, ReplyTo: s.ReplyTo}
	if n < len(parts) {
		m.Markdown = parts[n]
	}
	return m
}

// settleLost decides whether the part of an interrupted attempt was sent. Without a [Finder], or if the Finder fails
// for good, the part counts as maybe sent. After a returned error, the next attempt asks again.
func (w *worker) settleLost(ctx context.Context, s *send, m Message) (err error) {
	id, found := "", true
	if finder, ok := w.transport.(Finder); ok {
		id, found, err = finder.Find(ctx, m)
	}
	failure, known := errors.AsType[*SendError](err)
	switch {
	case known && !failure.Permanent && !errors.Is(err, ErrMisconfigured):
		return err
	case err != nil:
		w.Logger.WarnContext(ctx, "channel cannot report whether a message arrived", "channel", w.name, "message_id", m.ID,
			"error", message(err))
		id, found = "", true
	}
	if found {
		s.Parts = append(s.Parts, id)
	}
	s.Attempting = false
	return w.markPart(ctx, *s, false, nil)
}

func (w *worker) canFind() bool {
	_, ok := w.transport.(Finder)
	return ok
}

// markPart records the parts so far, and whether the next one is being handed to the provider.
func (w *worker) markPart(ctx context.Context, s send, attempting bool, cause error) error {
	tag, err := w.Pool.Exec(ctx, `
		update agent_channel_sends set parts = @parts, attempting = @attempting, error_message = @error
		 where message_id = @id and attempts = @attempts and status = 'sending'`,
		postgres.Strict{
			"id": s.MessageID, "attempts": s.Attempts, "parts": append([]string{}, s.Parts...), "attempting": attempting,
			"error": message(cause),
		})
	if err != nil {
		return fmt.Errorf("record part: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return errClaimLost
	}
	return nil
}

// recordSend records the outcome of an attempt.
func (w *worker) recordSend(ctx context.Context, s send, status string, cause error) error {
	pause := time.Duration(0)
	if status == "sending" {
		pauses := schedule()
		failure, ok := errors.AsType[*SendError](cause)
		switch {
		case ok && failure.RetryAfter > 0: // the provider controls the pause, also after the last attempt
			pause = failure.RetryAfter
			w.keepQuiet(pause)
		case s.Attempts >= maxSends:
			status = "failed"
			if s.Attempting {
				status = "maybe_sent"
			}
		default:
			pause = outbox.Jitter(pauses[min(s.Attempts, len(pauses))-1])
		}
	}
	if cause != nil {
		w.Logger.WarnContext(ctx, "channel message attempted", "channel", w.name, "message_id", s.MessageID,
			"trace_id", s.TraceID, "attempt", s.Attempts, "status", status, "error", message(cause))
	}
	return postgres.InTx(ctx, w.Pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			update agent_channel_sends
			   set status = @status, error_message = @error, parts = @parts, attempting = @attempting, claim = null,
			       next_attempt_at = clock_timestamp() + make_interval(secs => @pause),
			       finished_at = case when @status <> 'sending' then clock_timestamp() end
			 where message_id = @id and attempts = @attempts and status = 'sending'`,
			postgres.Strict{
				"id": s.MessageID, "attempts": s.Attempts, "status": status, "error": message(cause), "pause": pause.Seconds(),
				"parts": append([]string{}, s.Parts...), "attempting": s.Attempting && status == "sending",
			})
		if err != nil || tag.RowsAffected() == 0 || status == "sending" {
			return err
		}
		_, err = tx.Exec(ctx, `
			update agent_messages
			   set status = case @status
			                  when 'sent' then 'delivered'
			                  when 'maybe_sent' then 'sent'
			                  else 'failed'
			                end,
			       attempts = @attempts,
			       error_message = nullif(@error, ''),
			       delivered_at = case when @status = 'sent' then clock_timestamp() end
			 where id = @id and status = 'sending'`,
			postgres.Strict{"id": s.MessageID, "attempts": s.Attempts, "status": status, "error": message(cause)})
		return err
	})
}
