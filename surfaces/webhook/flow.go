package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// maxLaneWait bounds the wait for a delivery's lane. It is longer than the lane's lease.
const maxLaneWait = 10 * time.Minute

// plan has the actions of an endpoint for a delivery. It is read once, at the start of the execution.
type plan struct {
	Delivery    webhooks.Delivery `json:"delivery"`
	Format      string            `json:"format"`
	MaxAttempts int               `json:"max_attempts"`
	Tasks       []task            `json:"tasks"`
}

// task is one action of the plan.
type task struct {
	Number int             `json:"number"` // position of the action at its endpoint, from 1
	Action webhooks.Action `json:"action"`
	Key    string          `json:"key"`
}

// run is the durable function.
func (s *Surface) run(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in input
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	p, err := executions.Step(ctx, "plan", func(ctx context.Context) (plan, error) { return s.readPlan(ctx, in.Delivery) })
	if err != nil { // record the error in the trace; the delivery becomes dead with the execution
		_, phaseErr := executions.Phase(ctx, "webhook_action",
			func(context.Context, *executions.Effect) (any, error) { return nil, err },
			executions.Input(map[string]any{"delivery": in.Delivery}))
		if executions.IsControl(phaseErr) {
			return executions.Result{}, phaseErr
		}
		return executions.Result{}, err
	}
	hold, err := acquireLane(ctx, p.Delivery.Lane())
	if err != nil {
		return executions.Result{}, err
	}
	defer func() { _ = hold.Release(ctx) }() // if the release fails, the end of the execution releases the lane
	ctx = hold.Context()
	if len(p.Tasks) == 0 {
		return s.markIgnored(ctx, p)
	}
	return s.runAttempts(ctx, p)
}

// readPlan selects the actions and resolves their keys, data, threads and prompts. If one cannot be resolved, no action
// runs.
func (s *Surface) readPlan(ctx context.Context, id string) (plan, error) {
	d, err := webhooks.Get(ctx, s.Pool, id)
	if err != nil {
		return plan{}, err
	}
	e, err := webhooks.GetEndpoint(ctx, s.Pool, d.Endpoint)
	if err != nil {
		return plan{}, err
	}
	c, err := webhooks.Load(ctx, s.Pool, d, e.Settings.Format)
	if err != nil {
		return plan{}, err
	}
	p := plan{Delivery: d, Format: e.Settings.Format, MaxAttempts: e.Settings.MaxAttempts}
	for i, a := range e.Actions {
		if !c.Matches(a.When) {
			continue
		}
		t := task{Number: i + 1, Action: a}
		if t.Key, err = fillKey(c, a.Key); err == nil {
			_, err = eventData(c, a)
		}
		if err == nil {
			_, err = fillThread(c, a.Thread)
		}
		if err == nil && a.Prompt != "" {
			_, err = c.Quoted(a.Prompt, maxQuoted)
		}
		if err != nil {
			return plan{}, fmt.Errorf("action %d: %w", i+1, err)
		}
		p.Tasks = append(p.Tasks, t)
	}
	return p, nil
}

const maxKey = 2400 // bytes, as in the key of a wait

func fillKey(c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	key, err := c.Text(template)
	switch {
	case err != nil:
		return "", fmt.Errorf("key: %w", err)
	case key == "" || len(key) > maxKey:
		return "", fmt.Errorf("key: has %d bytes; it must have 1 to %d", len(key), maxKey)
	}
	return key, nil
}

// fillThread returns the name of an action's thread; "" for none.
func fillThread(c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	name, err := c.Text(template)
	if err == nil {
		err = threads.CheckID(name)
	}
	if err != nil {
		return "", fmt.Errorf("thread: %w", err)
	}
	return name, nil
}

// acquireLane acquires the delivery's lane. It waits durably while another execution holds the lane.
func acquireLane(ctx context.Context, name string) (*executions.Hold, error) {
	for {
		hold, err := executions.Lane(ctx, name)
		if !errors.Is(err, lanes.ErrBusy) {
			return hold, err
		}
		outcome, waitErr := executions.Wait(ctx, "lane", executions.LaneFree(name, maxLaneWait))
		switch {
		case waitErr != nil:
			return nil, waitErr
		case outcome.TimedOut:
			return nil, err
		}
	}
}

// markIgnored ends a delivery that matches no action.
func (s *Surface) markIgnored(ctx context.Context, p plan) (executions.Result, error) {
	const why = "no action of the endpoint matches it"
	_, err := executions.Phase(ctx, "webhook_action",
		func(ctx context.Context, effect *executions.Effect) (string, error) {
			effect.Status = activity.Skipped
			return why, s.setStatus(ctx, p, "ignored", webhooks.StatusUpdate{Status: webhooks.Ignored, Attempt: 1})
		}, executions.Input(actionInput(p)))
	return executions.Result{Summary: why}, err
}

func actionInput(p plan) map[string]any {
	return map[string]any{"endpoint": p.Delivery.Endpoint, "delivery_id": p.Delivery.DeliveryID}
}

// runAttempts runs the tasks until no attempt is left or each task is done or has failed finally.
func (s *Surface) runAttempts(ctx context.Context, p plan) (executions.Result, error) {
	done, final := map[int]any{}, map[int]error{}
	for attempt := 1; ; attempt++ {
		attemptCtx := executions.Scope(ctx, fmt.Sprintf("attempt %d", attempt))
		if err := s.setStatus(attemptCtx, p, "begin", webhooks.StatusUpdate{
			Status:  webhooks.Running,
			Attempt: attempt,
		}); err != nil {
			return executions.Result{}, err
		}
		failed, err := s.runAttempt(attemptCtx, p, attempt, done, final)
		if err != nil {
			return executions.Result{}, err
		}
		last := attempt >= p.MaxAttempts || len(failed) == len(final)
		update := webhooks.StatusUpdate{Status: webhooks.Failed, Attempt: attempt, Outcome: done}
		switch {
		case len(failed) == 0:
			update.Status = webhooks.Done
		case last:
			update.Status, update.Error = webhooks.Dead, errors.Join(failed...).Error()
		default:
			update.Error, update.Retry = errors.Join(failed...).Error(), s.Backoff(attempt).Seconds()
		}
		if err := s.setStatus(attemptCtx, p, "end", update); err != nil {
			return executions.Result{}, err
		}
		switch update.Status {
		case webhooks.Done:
			return executions.Result{Summary: fmt.Sprintf("%d of %d actions done", len(done), len(p.Tasks)), Value: done}, nil
		case webhooks.Dead:
			return executions.Result{Value: done}, errors.Join(failed...)
		}
		if _, err := executions.Wait(attemptCtx, "pause",
			executions.Delay(max(s.Backoff(attempt), time.Millisecond))); err != nil {
			return executions.Result{}, err
		}
	}
}

// runAttempt runs the remaining tasks. failed has the errors of actions, also final errors of earlier attempts. err
// ends the execution.
func (s *Surface) runAttempt(
	ctx context.Context, p plan, attempt int, done map[int]any, final map[int]error,
) (failed []error, err error) {
	for _, t := range p.Tasks {
		if _, ok := done[t.Number]; ok {
			continue
		}
		if err := final[t.Number]; err != nil {
			failed = append(failed, err)
			continue
		}
		result, err := s.runAction(executions.Scope(ctx, fmt.Sprintf("action %d", t.Number)), p, t, attempt)
		switch {
		case err == nil:
			done[t.Number] = result
		case executions.IsControl(err) || ctx.Err() != nil:
			return nil, err
		default:
			err = fmt.Errorf("action %d: %w", t.Number, err)
			if failed = append(failed, err); isFinal(err) {
				final[t.Number] = err
			}
		}
	}
	return failed, nil
}

// setStatus writes the delivery's status in the transaction of a checkpoint.
func (s *Surface) setStatus(ctx context.Context, p plan, step string, update webhooks.StatusUpdate) error {
	x, _ := executions.Current(ctx)
	_, err := executions.StepTx(ctx, "mark "+step, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return true, webhooks.UpdateStatus(ctx, tx, p.Delivery.ID, x.ID, update)
	})
	return err
}
