package chat

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/trace"
)

// Answer is what a message came to.
type Answer struct {
	ID       string `json:"id"`        // of the completion
	ThreadID string `json:"thread_id"` // as the visitor calls it
	TraceID  string `json:"trace_id"`
	Text     string `json:"text"`
	Finish   string `json:"finish_reason"`
}

// cancelRest is how long the caller of a turn that was cancelled waits for its run to notice: what it uses may be
// closed next.
const cancelRest = 5 * time.Second

// Say sends a message and returns the answer, without HTTP; show, where set, gets its text piece by piece. When
// ctx ends first, the turn is cancelled. Errors that a visitor may know are *Refusal. The engine's lease
// must be kept meanwhile: by Engine.Run, or Engine.KeepAlive.
func (c *Chat) Say(ctx context.Context, a Ask, show func(piece string)) (Answer, error) {
	if a.TraceID == "" {
		a.TraceID, a.own = trace.New(trace.Chat), true
	}
	var err error
	if a.agent, err = c.Agents.Find(ctx, c.Front, a.Model); err != nil {
		return Answer{}, err
	}
	b, err := c.begin(ctx, a)
	if err != nil {
		return Answer{}, err
	}
	defer b.leave()
	told := Answer{ID: CompletionID(b.exec.ID), ThreadID: b.name, TraceID: b.exec.TraceID}
	f := &follower{Chat: c, id: b.exec.ID, feed: b.feed, show: show}
	got, err := f.follow(ctx)
	if ctx.Err() != nil {
		if _, err := c.Engine.Cancel(context.WithoutCancel(ctx), b.exec.ID, "interrupt",
			"the visitor interrupted"); err != nil {
			return told, fmt.Errorf("cancel turn: %w", err)
		}
		b.feed.rest(cancelRest)
		return told, context.Cause(ctx)
	}
	told.Text, told.Finish = got.Text, string(got.Finish)
	return told, err
}
