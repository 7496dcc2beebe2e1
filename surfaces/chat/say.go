package chat

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Answer is the answer to a message.
type Answer struct {
	ID       string `json:"id"`        // of the completion
	ThreadID string `json:"thread_id"` // the visitor's name for it
	TraceID  string `json:"trace_id"`
	Text     string `json:"text"`
	Finish   string `json:"finish_reason"`
}

// cancelTimeout bounds how long Send waits for a cancelled turn to stop: the caller may close what the turn uses.
const cancelTimeout = 5 * time.Second

// Say sends a message without HTTP and returns the answer. show, where set, receives the text in pieces. onApproval is
// called once when the turn waits for an approval. The turn is cancelled when ctx ends first. Errors for the visitor
// are *Refusal. Engine.Run or Engine.KeepAlive must keep the engine's lease meanwhile.
func (c *Chat) Say(ctx context.Context, a UserMessage, show func(piece string), onApproval func()) (Answer, error) {
	if a.TraceID == "" {
		a.TraceID, a.ownsTrace = trace.New(trace.Chat), true
	}
	var err error
	if a.agent, err = c.Agents.Find(ctx, c.Front, a.Model); err != nil {
		return Answer{}, err
	}
	started, err := c.startTurn(ctx, &a)
	if err != nil {
		return Answer{}, err
	}
	defer started.release()
	said := Answer{ID: CompletionID(started.exec.ID), ThreadID: started.name, TraceID: started.exec.TraceID}
	f := &follower{Chat: c, id: started.exec.ID, traceID: started.exec.TraceID, feed: started.feed, show: show}
	notified := false
	f.activity = func(kind, _ string) {
		if kind == chatwire.ActivityApproval && !notified {
			notified = true
			onApproval()
		}
	}
	result, err := f.follow(ctx)
	if ctx.Err() != nil {
		if _, err := c.Engine.Cancel(context.WithoutCancel(ctx), started.exec.ID, activity.ActorFrom(ctx).Name,
			"the visitor interrupted"); err != nil {
			return said, fmt.Errorf("cancel turn: %w", err)
		}
		started.feed.awaitDetach(cancelTimeout)
		return said, context.Cause(ctx)
	}
	said.Text, said.Finish = result.Text, string(result.Finish)
	return said, err
}
