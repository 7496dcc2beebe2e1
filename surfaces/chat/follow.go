package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/threads"
)

// pollEvery is how often a turn that goes on in another process is looked after.
const pollEvery = 200 * time.Millisecond

// accessCheckInterval is the pause between two checks of a stream's access, for revocations without a notification.
const accessCheckInterval = 15 * time.Second

// notice is how a connection ends that has waited too long for an admin. It is not part of the conversation.
const notice = "An admin has to approve a step before I can go on. The answer will come into this conversation when " +
	"that is done."

// follower looks on while a turn is taken, here or elsewhere.
type follower struct {
	*Chat
	id    string
	in    input // of the visitor who looks on; the zero value is somebody who may always
	feed  *feed
	show  func(piece string) // nil: only the end matters
	alive func()             // called now and then while there is nothing to show; may be nil
	shown string
}

// stream is where an answer is shown as it is made.
type stream interface {
	Text(piece string)
	Idle() // shows that the connection is alive
	Err() error
}

// into shows the answer in a stream, and calls stop when that breaks.
func (f *follower) into(s stream, stop func()) {
	f.show = func(piece string) {
		if s.Text(piece); s.Err() != nil {
			stop()
		}
	}
	f.alive = func() {
		if s.Idle(); s.Err() != nil {
			stop()
		}
	}
}

// follow returns what the turn ends with. When an admin's approval takes too long, it is the text so far and
// the notice. The error is ctx's, or a *Refusal for the visitor.
func (f *follower) follow(ctx context.Context) (answer, error) {
	idle := time.NewTicker(f.KeepAlive)
	defer idle.Stop()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	check := time.NewTicker(accessCheckInterval)
	defer check.Stop()
	revoked, unsubscribe := f.revocations()
	defer unsubscribe()
	var leave <-chan time.Time
	for {
		v := f.feed.look(f.show != nil)
		if v.end != nil {
			return f.conclude(ctx, *v.end)
		}
		if len(v.text) > len(f.shown) {
			idle.Reset(f.KeepAlive)
		}
		if err := f.reveal(v.text); err != nil {
			return answer{}, err
		}
		switch {
		case v.leave && leave == nil:
			leave = time.After(f.ApprovalWait)
		case !v.leave:
			leave = nil
		}
		select {
		case <-ctx.Done():
			return answer{}, f.left(ctx)
		case <-v.changed:
		case <-revoked:
			if err := f.checkAccess(ctx); err != nil {
				return answer{}, err
			}
		case <-check.C:
			if err := f.checkAccess(ctx); err != nil {
				return answer{}, err
			}
		case <-leave:
			return f.takeLeave(v.text)
		case <-idle.C:
			if f.alive != nil {
				f.alive()
			}
		case <-poll.C:
			if err := f.lookAfter(ctx, v); err != nil {
				return answer{}, err
			}
		}
	}
}

// revocations has a value when an access to the thread was revoked.
func (f *follower) revocations() (<-chan string, func()) {
	if f.Listener == nil || f.in.Thread == "" {
		return nil, func() {}
	}
	return f.Listener.SubscribeTo(threads.AccessChannel, func(thread string) bool { return thread == f.in.Thread })
}

// checkAccess refuses a visitor whose access to the thread was revoked. A database that does not answer cuts nobody
// off.
func (f *follower) checkAccess(ctx context.Context) error {
	if f.in.Thread == "" {
		return nil
	}
	in, err := f.hasAccess(ctx, f.in)
	if err == nil && !in {
		return refused(threads.ErrNotFound)
	}
	return nil
}

// hasAccess reports whether the asker may still read the thread.
func (c *Chat) hasAccess(ctx context.Context, in input) (bool, error) {
	id, known, err := threads.Resolve(ctx, c.Front, in.principal(), in.name())
	return known && id == in.Thread, err
}

// reveal shows what is new. Text that another process says differently than what was shown cannot be taken back.
func (f *follower) reveal(text string) error {
	if f.show == nil {
		return nil
	}
	rest, goesOn := strings.CutPrefix(text, f.shown)
	switch {
	case !goesOn && strings.HasPrefix(f.shown, text): // a draft that lags behind
	case !goesOn:
		return f.diverged()
	case rest != "":
		f.show(rest)
		f.shown = text
	}
	return nil
}

// diverged ends a stream that has shown what is not the answer.
func (f *follower) diverged() error {
	r := broken(http.StatusInternalServerError, "answer_restarted",
		"The answer was begun anew; attach again to see it: GET /v1/chat/completions/"+CompletionID(f.id))
	r.stored, r.CompletionID = true, CompletionID(f.id)
	return r
}

// takeLeave ends a connection that has waited for an admin.
func (f *follower) takeLeave(text string) (answer, error) {
	if f.in.Form != nil {
		return answer{}, formPending(f.id)
	}
	words := notice
	if text != "" {
		words = text + "\n\n" + notice
	}
	return answer{Text: words, Finish: "stop", Ended: "approval"}, f.reveal(words)
}

// lookAfter asks the database about a turn that is not taken here, and whether this process still serves.
func (f *follower) lookAfter(ctx context.Context, v view) error {
	if errors.Is(f.Engine.Live(), executions.ErrDraining) {
		return f.goingDown()
	}
	if v.local {
		return nil
	}
	x, err := executions.Get(ctx, f.Front, f.id)
	if err != nil {
		return f.unread(ctx, err)
	}
	if x.Status.Ended() {
		f.feed.finish(x)
		return nil
	}
	draft, err := threads.DraftOf(ctx, f.Front, f.id)
	if err != nil {
		return f.unread(ctx, err)
	}
	asks, err := f.asks(ctx, x)
	if err != nil {
		return f.unread(ctx, err)
	}
	text := draft.Content
	if x.ClaimedBy == nil || x.Claim != draft.Claim { // whoever takes the turn up may say the rest in other words
		text = draft.Final()
	}
	f.feed.overheard(text, asks)
	return nil
}

// asks reports whether a turn waits for an admin's approval, or stands behind one that does.
func (f *follower) asks(ctx context.Context, x executions.Execution) (bool, error) {
	if x.WaitingFor != nil && x.WaitingKey != nil && *x.WaitingFor == "agent" {
		var err error
		if x, err = executions.Get(ctx, f.Front, *x.WaitingKey); err != nil {
			return false, err
		}
	}
	return x.WaitingFor != nil && *x.WaitingFor == "approval", nil
}

// unread passes over a database that is away for a moment: the turn goes on as soon as it is back.
func (f *follower) unread(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		f.Logger.WarnContext(ctx, "turn not looked after", "execution", f.id, "error", err)
	}
	return nil
}

// left says why nobody follows any more.
func (f *follower) left(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), executions.ErrDraining) {
		return f.goingDown()
	}
	return context.Cause(ctx)
}

func (f *follower) goingDown() error {
	r := broken(http.StatusServiceUnavailable, "shutting_down",
		"This server restarts; your answer is still being made. Attach to it: GET /v1/chat/completions/"+
			CompletionID(f.id))
	r.stored, r.CompletionID = true, CompletionID(f.id)
	return r
}

// conclude turns the end of an execution into the end of an answer.
func (f *follower) conclude(ctx context.Context, x executions.Execution) (answer, error) {
	if x.Status == executions.Completed {
		var a answer
		if err := json.Unmarshal(x.Result, &a); err != nil {
			return answer{}, fmt.Errorf("read result of execution %s: %w", x.ID, err)
		}
		if err := a.failure(); err != nil {
			return answer{}, err
		}
		if err := f.reveal(a.Text); err != nil {
			return answer{}, err
		}
		if f.show != nil && f.shown != a.Text {
			return answer{}, f.diverged()
		}
		return a, nil
	}
	if text := f.feed.look(false).text; f.show != nil {
		if err := f.reveal(text); err != nil {
			return answer{}, err
		}
	}
	f.Logger.WarnContext(ctx, "chat turn ended without an answer", "execution", x.ID, "trace_id", x.TraceID,
		"status", string(x.Status),
		"error", deref(x.ErrorMessage))
	var r *Refusal
	switch {
	case x.Status == executions.Cancelled && x.CancelledBy != nil && *x.CancelledBy == byInterrupt:
		r = conflict("interrupted", "A newer message interrupted this answer.")
	case x.Status == executions.Cancelled:
		r = conflict("cancelled", "This answer was cancelled.")
	default:
		r = broken(http.StatusBadGateway, "answer_failed",
			"The answer could not be made. The trace "+x.TraceID+" says why.")
	}
	r.stored = true
	return answer{}, r
}

// overLimit is a turn that a limit has kept from answering. Its message and its answer are in the thread.
func overLimit(a answer) error {
	r := &Refusal{
		Status: http.StatusTooManyRequests, Type: "insufficient_quota", Code: "insufficient_quota", Message: a.Text,
		stored: true,
	}
	if !a.Until.IsZero() {
		r.RetryAfter = max(time.Until(a.Until), time.Second)
	}
	return r
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
