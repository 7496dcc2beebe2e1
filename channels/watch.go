package channels

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// lostDraft is the id of a draft whose id was lost. Its turn shows no further draft.
const lostDraft = "?"

// noticeDraft is the id while a queued turn has sent its notice, and no draft.
const noticeDraft = "!"

const (
	watchIdle     = 5 * time.Second        // poll interval without an active turn
	watchNotified = 30 * time.Second       // the same with a listener for notifications
	watchActive   = 500 * time.Millisecond // while a draft or the typing is shown
	typingPeriod  = 4 * time.Second
	maxWatched    = 100             // turns with a draft at the same time; the others show only their answer
	draftDelay    = 2 * time.Second // a turn that ends before needs no draft
)

// approvalNotice is shown while a turn waits for an approval.
const approvalNotice = "_An admin has to approve a step before I can go on. The answer will come here._"

// queuedNotice is sent while an earlier turn of the conversation waits for an approval.
const queuedNotice = "_An admin has to approve a step of an earlier message. I will answer after that._"

// activeTurn is a turn that answers a message of the channel.
type activeTurn struct {
	ID           string // of the message
	ExecutionID  string
	Conversation string
	MessageRef   string
	DraftID      string
	Draft        string
	Age          float64 // seconds
	Ended        bool
	Awaits       bool // an approval
	Queued       bool // behind a turn of its conversation that awaits an approval
}

// display is what the channel shows of a turn.
type display struct {
	text   string    // of the draft
	edited time.Time // time of the draft's last edit
	typed  time.Time // time of the last sign that the agent writes
}

// wakeWatch makes the watch look for active turns now.
func (w *worker) wakeWatch() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// watch shows running turns and drafts of their answers, and requests approvals, until ctx ends.
func (w *worker) watch(ctx context.Context) {
	displays := map[string]*display{} // by the id of the message
	next := time.NewTimer(0)
	defer next.Stop()
	var notes <-chan string
	idle := watchIdle
	if w.Listener != nil {
		payloads, unsubscribe := w.Listener.SubscribeTo(notifications,
			func(name string) bool { return name == w.name || name == approvalRequested })
		defer unsubscribe()
		notes, idle = payloads, watchNotified
	}
	_, canEdit := w.transport.(Editor)
	_, canType := w.transport.(Typist)
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-notes:
		case <-next.C:
		}
		turns, err := w.activeTurns(ctx)
		if err == nil {
			err = w.finishTurns(ctx)
		}
		if err != nil && ctx.Err() == nil {
			w.Logger.WarnContext(ctx, "turns of channel not read, trying again", "channel", w.name, "error", err)
		} else if !w.isQuiet() {
			if err := errors.Join(w.requestApprovals(ctx), w.showDecisions(ctx)); err != nil && ctx.Err() == nil {
				w.Logger.WarnContext(ctx, "request for approval not shown", "channel", w.name, "error", message(err))
			}
		}
		active := map[string]*display{}
		for _, t := range turns {
			d := displays[t.ID]
			if d == nil {
				d = &display{}
			}
			active[t.ID] = d
			if !t.Ended {
				w.showTurn(ctx, t, d)
			}
		}
		displays = active
		pause := idle
		if len(turns) > 0 && (canEdit || canType) {
			pause = watchActive
		}
		next.Reset(pause)
	}
}

func (w *worker) activeTurns(ctx context.Context) ([]activeTurn, error) {
	return postgres.Rows[activeTurn](ctx, w.Pool, "read turns of channel", `
		select m.id::text, m.execution_id::text, m.conversation, m.message_ref, m.draft_id, coalesce(d.content, '') as draft,
		       extract(epoch from clock_timestamp() - m.received_at)::float8 as age,
		       coalesce(x.completed_at is not null, true) as ended,
		       coalesce(x.waiting_for = 'approval', false) as awaits,
		       exists (select from agent_channel_messages b join agent_executions y on y.id = b.execution_id
		                where b.channel = m.channel and b.status = 'running' and b.conversation = m.conversation
		                  and b.id < m.id and y.waiting_for = 'approval') as queued
		  from agent_channel_messages m left join agent_executions x on x.id = m.execution_id
		  left join agent_message_drafts d on d.execution_id = m.execution_id
		 where m.channel = @channel and m.status = 'running' order by m.id limit @limit`,
		postgres.Strict{"channel": w.name, "limit": maxWatched})
}

// FailedNotice answers a message whose turn failed.
const FailedNotice = "Something went wrong, and I could not finish this answer. Please write again."

// silentTurn is a turn that failed or timed out without an answer.
type silentTurn struct{ ExecutionID, ThreadID, TraceID string }

// finishTurns records the messages whose turn has ended. A silent turn gets a notice: the channel shows its error
// nowhere else. A relay gets none: it stores no answer, and the flow has the message. A deleted thread gets none
// either.
func (w *worker) finishTurns(ctx context.Context) error {
	return postgres.InTx(ctx, w.Pool, func(tx pgx.Tx) error {
		silent, err := postgres.Rows[silentTurn](ctx, tx, "finish messages of channel", `
			with ended as (
			  update agent_channel_messages m set status = 'done', finished_at = clock_timestamp()
			   where m.channel = @channel and m.status = 'running' and m.id in (
			     select a.id from agent_channel_messages a
			      where a.channel = @channel and a.status = 'running' and not exists (
			        select from agent_executions x where x.id = a.execution_id and x.completed_at is null)
			      order by a.id limit 1000)
			  returning m.execution_id)
			select x.id::text as execution_id, x.thread_id, x.trace_id from agent_executions x
			 where x.id in (select e.execution_id from ended e) and x.status in ('failed', 'timeout')
			   and x.flow <> 'chat_relay' and x.thread_id is not null and not exists (
			     select from agent_messages a where a.execution_id = x.id and a.role = 'assistant')
			 order by x.id`, postgres.Strict{"channel": w.name})
		if err != nil {
			return err
		}
		for _, t := range silent {
			m, err := threads.Post(ctx, tx, threads.NewMessage{
				ThreadID: t.ThreadID, Role: threads.Assistant, Content: FailedNotice, Interrupted: true,
				Channel: w.channel.Type, Target: w.name, Status: threads.Sending,
				ExecutionID: t.ExecutionID, TraceID: t.TraceID,
			})
			if errors.Is(err, threads.ErrNotFound) { // the statement inserted no row, so the transaction continues
				continue
			}
			if err == nil {
				err = Enqueue(ctx, tx, m.ID)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// showTurn shows that the agent writes an answer, and the present part of it.
func (w *worker) showTurn(ctx context.Context, t activeTurn, shown *display) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if typist, ok := w.transport.(Typist); ok && !t.Awaits && !t.Queued && time.Since(shown.typed) > typingPeriod {
		shown.typed = time.Now()
		if err := typist.Typing(ctx, t.Conversation); err != nil {
			w.Logger.DebugContext(ctx, "typing not shown", "channel", w.name, "error", message(err))
		}
	}
	if t.Queued {
		t.Draft = queuedNotice
	}
	if t.Awaits {
		t.Draft = strings.TrimSpace(t.Draft + "\n\n" + approvalNotice)
	}
	limits := w.transport.Limits()
	editor, ok := w.transport.(Editor)
	if !ok || limits.Edits == 0 || t.Draft == "" || t.DraftID == lostDraft ||
		t.Queued && t.DraftID == noticeDraft || t.Draft == shown.text ||
		time.Since(shown.edited) < limits.Edits || t.Age < draftDelay.Seconds() || w.isQuiet() {
		return
	}
	m := Message{
		ID: t.ExecutionID, Conversation: t.Conversation, Markdown: Split(t.Draft, limits)[0], ReplyTo: t.MessageRef,
	}
	unlock, err := w.drafts.Lock(ctx, t.ExecutionID)
	if err != nil {
		return
	}
	defer unlock()
	if ended, err := w.turnEnded(ctx, t.ExecutionID); err != nil || ended {
		return
	}
	shown.text, shown.edited = t.Draft, time.Now()
	if t.DraftID != "" && t.DraftID != noticeDraft {
		if err := editor.Edit(ctx, t.DraftID, m); err != nil {
			w.Logger.DebugContext(ctx, "draft not edited", "channel", w.name, "error", message(err))
		}
		return
	}
	w.sendDraft(ctx, t, m)
}

// turnEnded reports whether a turn has ended. Then its answer replaces the draft.
func (w *worker) turnEnded(ctx context.Context, execution string) (ended bool, err error) {
	err = w.Pool.QueryRow(ctx, `select exists (select from agent_executions where id = @id and completed_at is not null)`,
		postgres.Strict{"id": execution}).Scan(&ended)
	return ended, err
}

// sendDraft sends the first draft of a turn. Its id is lost if the process dies meanwhile. A queued turn gives up the
// id of its notice. So its answer is a new message, because providers notify nobody of an edit.
func (w *worker) sendDraft(ctx context.Context, t activeTurn, m Message) {
	if err := w.saveDraft(ctx, t, lostDraft, t.DraftID); err != nil {
		w.Logger.WarnContext(ctx, "draft not shown", "channel", w.name, "error", err)
		return
	}
	id, err := w.transport.Send(ctx, m)
	if err != nil {
		w.Logger.WarnContext(ctx, "draft not shown", "channel", w.name, "error", message(err))
		if failure, known := errors.AsType[*SendError](err); !known || failure.MaybeSent {
			return
		}
		id = t.DraftID
	} else if t.Queued {
		id = noticeDraft
	}
	if err := w.saveDraft(context.WithoutCancel(ctx), t, id, lostDraft); err != nil {
		w.Logger.WarnContext(ctx, "draft not recorded", "channel", w.name, "error", err)
	}
}

func (w *worker) saveDraft(ctx context.Context, t activeTurn, id, before string) error {
	return exec(ctx, w.Pool, "record draft", `
		update agent_channel_messages set draft_id = @draft where id = @id and draft_id = @before`,
		postgres.Strict{"id": t.ID, "draft": id, "before": before})
}
