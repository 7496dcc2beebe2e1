package webhook

import (
	"context"
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

// conversation is the thread that a template names for a delivery, begun when there is none.
func (s *Surface) conversation(ctx context.Context, c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	id, err := c.Text(template)
	if err != nil {
		return "", fmt.Errorf("thread: %w", err)
	}
	return executions.Step(ctx, "thread", func(ctx context.Context) (string, error) {
		_, _, err := threads.Ensure(ctx, s.Pool, threads.Thread{ID: id, Agent: s.Agent})
		return id, err
	})
}

// knows reports whether a flow can be started: one of this program, or of workers outside.
func (s *Surface) knows(ctx context.Context, flow string) (bool, error) {
	if executions.IsExternal(flow) {
		return true, nil
	}
	return executions.Persist(ctx, func(ctx context.Context) (bool, error) { return s.Engine.Knows(ctx, flow) })
}
