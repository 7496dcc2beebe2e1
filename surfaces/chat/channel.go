package chat

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// headless reports whether the message came by a channel of people. No connection waits for its answer, which leaves by
// the outbox of the channel.
func (a *UserMessage) headless() bool { return a.Target != "" }

// Accept stores a message of a channel in its thread, and starts its turn. It implements channels.Runner.Accept: a key
// counts once. An error that a retry may avoid is a *channels.LaterError. A text above MaxMessage characters is cut,
// and ends in an ellipsis.
func (c *Chat) Accept(ctx context.Context, v channels.Visit) (channels.Accepted, error) {
	owner := channels.Owner(v.Channel.Name)
	if pause := c.limits.reserve(owner+"\x00"+v.Sender, 1); pause > 0 {
		return channels.Accepted{}, &channels.LaterError{Err: errors.New("the sender writes too fast"), Pause: pause}
	}
	a := &UserMessage{
		Owner: owner, Name: v.Conversation, Participant: v.SenderName, Channel: v.Channel.Type, Target: v.Channel.Name,
		Texts: []string{truncate(v.Text, c.MaxMessage)}, Model: v.Channel.Agent, Key: v.Key, TraceID: trace.New(trace.Chat),
	}
	a.Model = cmp.Or(a.Model, agents.Alias)
	var files []File
	for _, f := range v.Files {
		files = append(files, File{Name: f.Name, ContentType: f.Type, Content: f.Content})
	}
	a.Files = [][]File{files}
	var err error
	if a.agent, err = c.Agents.Find(ctx, c.Front, a.Model); err != nil {
		return channels.Accepted{}, err
	}
	b, err := c.startTurn(ctx, a)
	if refusal, is := errors.AsType[*Refusal](err); is {
		if refusal.RetryAfter > 0 {
			err = &channels.LaterError{Err: err, Pause: max(refusal.RetryAfter, time.Second)}
		} else if refusal.Status < http.StatusInternalServerError {
			err = &channels.RefusedError{Message: refusal.Message}
		}
	}
	if err != nil {
		return channels.Accepted{}, err
	}
	got := channels.Accepted{ExecutionID: b.exec.ID, TraceID: b.exec.TraceID}
	if b.exec.ThreadID != nil {
		got.ThreadID = *b.exec.ThreadID
	}
	return got, nil
}

// post adds text of the turn to its thread. On a channel of people it also sends the text by that channel.
func (t *turn) post(ctx context.Context, tx pgx.Tx, text string, interrupted bool) (threads.Message, error) {
	d := threads.NewMessage{
		ThreadID: t.in.Thread, Role: threads.Assistant, Content: text, Channel: channel, ExecutionID: t.exec.ID,
		TraceID: t.exec.TraceID, Status: threads.Sent, Turn: t.turnNumber, Interrupted: interrupted,
	}
	leaves := t.in.Target != "" && text != ""
	if leaves {
		d.Channel, d.Target, d.Status = t.in.Channel, t.in.Target, threads.Sending
	}
	m, err := threads.Post(ctx, tx, d)
	if err == nil && leaves {
		err = channels.Enqueue(ctx, tx, m.ID)
	}
	return m, err
}
