package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// pollInterval is the pause between two reads of a turn that another process runs.
const pollInterval = 200 * time.Millisecond

// accessCheckInterval is the pause between two checks of a stream's access, for revocations without a notification.
const accessCheckInterval = 15 * time.Second

// Codes of a turn that was cancelled.
const (
	codeCancelled   = "cancelled"
	codeInterrupted = "interrupted"
)

const codeShuttingDown = "shutting_down"

// approvalNotice ends a connection that waited too long for an approval. It is not stored in the thread.
const approvalNotice = "An admin has to approve a step before I can go on. The answer will come into this " +
	"conversation when that is done."

// follower shows a turn to one client while it runs, here or in another process.
type follower struct {
	*Chat
	id            string
	traceID       string
	in            input // of the turn; access to its thread is checked unless it is the zero value
	feed          *feed
	show          func(piece string)      // nil: only the end is needed
	keepAlive     func()                  // called while there is nothing to show; may be nil
	activity      func(kind, name string) // called when what the turn waits for changes; may be nil
	shown         string
	shownActivity string
}

// stream writes an answer to a client in pieces.
type stream interface {
	Text(piece string)
	Idle() // keeps the connection alive
	Err() error
}

// streamTo writes the answer to a stream, and calls stop when that fails.
func (f *follower) streamTo(s stream, stop func()) {
	f.show = func(piece string) {
		if s.Text(piece); s.Err() != nil {
			stop()
		}
	}
	f.keepAlive = func() {
		if s.Idle(); s.Err() != nil {
			stop()
		}
	}
}

// follow waits for the end of the turn and returns its answer. After ApprovalWait it returns the text so far and a
// notice. The error is ctx's, or a *Refusal for the visitor.
func (f *follower) follow(ctx context.Context) (answer, error) {
	idle := time.NewTicker(f.KeepAlive)
	defer idle.Stop()
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	check := time.NewTicker(accessCheckInterval)
	defer check.Stop()
	revoked, unsubscribe := f.revocations()
	defer unsubscribe()
	var approvalTimeout <-chan time.Time
	for {
		v := f.feed.snapshot(f.show != nil)
		if v.end != nil {
			return f.toAnswer(ctx, v.end)
		}
		if len(v.text) > len(f.shown) {
			idle.Reset(f.KeepAlive)
		}
		if err := f.showNew(v.text); err != nil {
			return answer{}, err
		}
		f.showActivity(v)
		switch {
		case v.awaitsApproval && approvalTimeout == nil:
			approvalTimeout = time.After(f.ApprovalWait)
		case !v.awaitsApproval:
			approvalTimeout = nil
		}
		select {
		case <-ctx.Done():
			return answer{}, f.stopCause(ctx)
		case <-v.changed:
		case <-revoked:
			if err := f.checkAccess(ctx); err != nil {
				return answer{}, err
			}
		case <-check.C:
			if err := f.checkAccess(ctx); err != nil {
				return answer{}, err
			}
		case <-approvalTimeout:
			return f.endApprovalWait(ctx, v.text)
		case <-idle.C:
			if f.keepAlive != nil {
				f.keepAlive()
			}
		case <-poll.C:
			if err := f.poll(ctx, v); err != nil {
				return answer{}, err
			}
		}
	}
}

// showActivity reports a changed activity of the turn: a tool, an approval that it waits for, or none.
func (f *follower) showActivity(v view) {
	kind, name := "", ""
	switch {
	case v.awaitsApproval:
		kind = chatwire.ActivityApproval
	case v.tool != "":
		kind, name = chatwire.ActivityTool, v.tool
	}
	current := kind + " " + name
	if f.activity != nil && current != f.shownActivity && (kind != "" || f.shownActivity != "") {
		f.shownActivity = current
		f.activity(kind, name)
	}
}

// revocations returns a channel that receives a value when an access to the thread is revoked.
func (f *follower) revocations() (<-chan string, func()) {
	if f.Listener == nil || f.in.Thread == "" {
		return nil, func() {}
	}
	return f.Listener.SubscribeTo(threads.AccessChannel, func(thread string) bool { return thread == f.in.Thread })
}

// checkAccess refuses a visitor whose access to the thread was revoked. A failed read does not end the stream: the next
// check reads again.
func (f *follower) checkAccess(ctx context.Context) error {
	if f.in.Thread == "" {
		return nil
	}
	allowed, err := f.hasAccess(ctx, f.in)
	if err == nil && !allowed {
		return threadError(threads.ErrNotFound)
	}
	return nil
}

// hasAccess reports whether the sender of a message may still read its thread.
func (c *Chat) hasAccess(ctx context.Context, in input) (bool, error) {
	id, known, err := threads.Resolve(ctx, c.Front, in.principal(), in.name())
	return known && id == in.Thread, err
}

// showNew shows the rest of a text that starts with the shown text. A text that is shorter is a late draft, and shows
// nothing. Any other text is an error.
func (f *follower) showNew(text string) error {
	if f.show == nil {
		return nil
	}
	rest, continues := strings.CutPrefix(text, f.shown)
	switch {
	case !continues && strings.HasPrefix(f.shown, text):
	case !continues:
		return f.divergedError()
	case rest != "":
		f.show(rest)
		f.shown = text
	}
	return nil
}

// divergedError ends a stream that has shown text which is not in the answer.
func (f *follower) divergedError() error {
	r := serverError(http.StatusInternalServerError, "answer_restarted",
		"The answer was started again. Attach again to read it: GET /v1/chat/completions/"+CompletionID(f.id))
	r.stored, r.CompletionID = true, CompletionID(f.id)
	return r
}

// endApprovalWait ends a connection that has waited too long for an approval.
func (f *follower) endApprovalWait(ctx context.Context, text string) (answer, error) {
	if f.in.Form != nil {
		return answer{}, approvalPendingError(f.id)
	}
	reply := approvalNotice
	if text != "" {
		reply = text + "\n\n" + approvalNotice
	}
	return answer{Text: reply, Finish: "stop", Ended: "approval", Usage: f.usageSoFar(ctx)}, f.showNew(reply)
}

// usageSoFar reads the usage of an active turn. A failure is only logged.
func (f *follower) usageSoFar(ctx context.Context) openai.Usage {
	var used activity.Usage
	x, err := executions.Get(ctx, f.Front, f.id)
	if err == nil {
		used, _, err = activity.Spent(ctx, f.Front, x.TraceID)
	}
	if err != nil {
		f.Logger.WarnContext(ctx, "usage of turn not read", "execution", f.id, "trace_id", f.traceID,
			"error", err)
	}
	return openai.Usage{
		PromptTokens: used.PromptTokens, CompletionTokens: used.CompletionTokens, TotalTokens: used.TotalTokens,
	}
}

// poll reads the state of a turn that another process runs into the feed, for all followers. It also checks whether
// this process shuts down.
func (f *follower) poll(ctx context.Context, v view) error {
	if errors.Is(f.Engine.Live(), executions.ErrDraining) {
		return f.shutdownError()
	}
	if v.runsHere || !f.feed.polling.TryLock() {
		return nil
	}
	defer f.feed.polling.Unlock()
	if time.Since(f.feed.polledAt) < pollInterval/2 {
		return nil
	}
	f.feed.polledAt = time.Now()
	x, err := executions.Get(ctx, f.Front, f.id)
	if err != nil {
		return f.logReadError(ctx, err)
	}
	if x.Status.Ended() {
		f.feed.finish(x)
		return nil
	}
	draft, err := threads.DraftOf(ctx, f.Front, f.id)
	if err != nil {
		return f.logReadError(ctx, err)
	}
	waiting, err := f.isAwaitingApproval(ctx, x)
	if err != nil {
		return f.logReadError(ctx, err)
	}
	text := draft.Content
	if x.ClaimedBy == nil || x.Claim != draft.Claim { // the next claim may word the rest differently
		text = draft.Final()
	}
	f.feed.setRemote(text, waiting)
	f.feed.readFailed = false
	return nil
}

// isAwaitingApproval reports whether a turn, or the turn before it, waits for an approval.
func (f *follower) isAwaitingApproval(ctx context.Context, x executions.Execution) (bool, error) {
	if x.WaitingFor != nil && x.WaitingKey != nil && *x.WaitingFor == "agent" {
		var err error
		if x, err = executions.Get(ctx, f.Front, *x.WaitingKey); err != nil {
			return false, err
		}
	}
	return x.WaitingFor != nil && *x.WaitingFor == "approval", nil
}

// logReadError logs the first of failed reads in a row. The next poll reads again. The caller holds feed.polling.
func (f *follower) logReadError(ctx context.Context, err error) error {
	if ctx.Err() == nil && !f.feed.readFailed {
		f.feed.readFailed = true
		f.Logger.WarnContext(ctx, "turn not read, trying again", "execution", f.id, "trace_id", f.traceID, "error", err)
	}
	return nil
}

// stopCause returns why the client no longer follows.
func (f *follower) stopCause(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), executions.ErrDraining) {
		return f.shutdownError()
	}
	return context.Cause(ctx)
}

func (f *follower) shutdownError() error {
	r := serverError(http.StatusServiceUnavailable, codeShuttingDown,
		"This server restarts. Your answer is still in progress. Attach to it: GET /v1/chat/completions/"+
			CompletionID(f.id))
	r.stored, r.CompletionID = true, CompletionID(f.id)
	return r
}

// toAnswer converts the end of an execution to an answer or a *Refusal.
func (f *follower) toAnswer(ctx context.Context, x *executions.Execution) (answer, error) {
	if x.Status == executions.Completed {
		var a answer
		if err := json.Unmarshal(x.Result, &a); err != nil {
			return answer{}, fmt.Errorf("read result of execution %s: %w", x.ID, err)
		}
		if err := a.failure(); err != nil {
			return answer{}, err
		}
		if err := f.showNew(a.Text); err != nil {
			return answer{}, err
		}
		if f.show != nil && f.shown != a.Text {
			return answer{}, f.divergedError()
		}
		return a, nil
	}
	if text := f.feed.snapshot(false).text; f.show != nil {
		if err := f.showNew(text); err != nil {
			return answer{}, err
		}
	}
	f.Logger.WarnContext(ctx, "chat turn ended without an answer", "execution", x.ID, "trace_id", x.TraceID,
		"status", string(x.Status),
		"error", postgres.Deref(x.ErrorMessage))
	var r *Refusal
	switch {
	case x.Status == executions.Cancelled && x.CancelledBy != nil && *x.CancelledBy == byInterrupt:
		r = conflict(codeInterrupted, "A newer message interrupted this answer.")
	case x.Status == executions.Cancelled:
		r = conflict(codeCancelled, "This answer was cancelled.")
	default:
		r = serverError(http.StatusBadGateway, "answer_failed",
			"The answer failed. The trace "+x.TraceID+" has the error.")
	}
	r.stored = true
	return answer{}, r
}
