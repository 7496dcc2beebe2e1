package webhook

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// begin starts a flow with the delivery's data as input, in the transaction of the checkpoint, and does not wait for its end. It
// belongs to the delivery's trace. A delivery that is handled again by an admin's wish starts another.
func (s *Surface) begin(ctx context.Context, c webhooks.Content, t task) (result, error) {
	switch known, err := s.knows(ctx, t.Action.Flow); {
	case err != nil:
		return result{}, err
	case !known:
		return result{}, fmt.Errorf("there is no flow %q; see agent flows ls", t.Action.Flow)
	}
	input, err := data(c, t.Action)
	if err != nil {
		return result{}, err
	}
	thread, err := s.conversation(ctx, c, t.Action.Thread)
	if err != nil {
		return result{}, err
	}
	x, _ := executions.Current(ctx)
	started, err := executions.Trigger(ctx, "begin", executions.Child{
		Flow: t.Action.Flow, Input: input, ThreadID: thread, DedupeKey: fmt.Sprintf("webhook flow %s %d", x.ID, t.Number),
	})
	return result{Flow: t.Action.Flow, Started: started.ExecutionID}, err
}

// conversation is the thread that a template names for a delivery, begun when there is none. The name is the endpoint's own: who sends the
// delivery chooses it, and must not get into a thread of somebody else's by it.
func (s *Surface) conversation(ctx context.Context, c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	name, err := c.Text(template)
	if err != nil {
		return "", fmt.Errorf("thread: %w", err)
	}
	return executions.Step(ctx, "thread", func(ctx context.Context) (string, error) {
		got, _, err := threads.Open(ctx, s.Pool, endpoint(c.Endpoint), threads.Thread{Name: name, Agent: s.Agent})
		return got.ID, err
	})
}

// endpoint is a webhook endpoint as the owner of threads.
func endpoint(name string) threads.Principal {
	return threads.Principal{Kind: threads.ByWebhook, Owner: name}
}

// threadOf is the key of a message's event: of the endpoint's own thread that it names, or of one that was opened to the endpoint. A name that no
// thread has is the key itself, because a wait need not be about a conversation that is kept here.
func (s *Surface) threadOf(ctx context.Context, c webhooks.Content, key string) (string, error) {
	return executions.Persist(ctx, func(ctx context.Context) (string, error) {
		id, known, err := threads.Resolve(ctx, s.Pool, endpoint(c.Endpoint), key)
		if errors.Is(err, threads.ErrInvalid) {
			return key, nil
		}
		if err != nil || known {
			return id, err
		}
		switch _, err := threads.Get(ctx, s.Pool, key); {
		case errors.Is(err, threads.ErrNotFound):
			return key, nil
		case err != nil:
			return "", err
		}
		return "", fmt.Errorf("the endpoint has no thread %q; agent threads open lets it into somebody else's", key)
	})
}

// knows reports whether a flow can be started: one of this program, or of workers outside.
func (s *Surface) knows(ctx context.Context, flow string) (bool, error) {
	if executions.IsExternal(flow) {
		return true, nil
	}
	return executions.Persist(ctx, func(ctx context.Context) (bool, error) { return s.Engine.Knows(ctx, flow) })
}
