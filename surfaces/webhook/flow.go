package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// lanePatience is how long a delivery waits for its own lane: longer than the lane's lease.
const lanePatience = 10 * time.Minute

// plan is what is to be done with a delivery, as the endpoint said when its handling began.
type plan struct {
	Delivery    webhooks.Delivery `json:"delivery"`
	Format      string            `json:"format"`
	MaxAttempts int               `json:"max_attempts"`
	Tasks       []task            `json:"tasks"`
}

// task is one action of the plan.
type task struct {
	Number int             `json:"number"` // of the action at its endpoint
	Action webhooks.Action `json:"action"`
	Key    string          `json:"key"`
}

// run is the durable function.
func (s *Surface) run(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in input
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	p, err := executions.Step(ctx, "plan", func(ctx context.Context) (plan, error) { return s.plan(ctx, in.Delivery) })
	if err != nil {
		return executions.Result{}, err // the delivery is dead with the execution
	}
	hold, err := takeLane(ctx, p.Delivery.Lane())
	if err != nil {
		return executions.Result{}, err
	}
	defer func() { _ = hold.Release(ctx) }() // a release that is lost is covered by the lane's end with the execution
	ctx = hold.Context()
	if len(p.Tasks) == 0 {
		return s.ignore(ctx, p)
	}
	return s.attempts(ctx, p)
}

// plan chooses the actions and fills their keys. A key that leads nowhere is an error, and nothing is done.
func (s *Surface) plan(ctx context.Context, id string) (plan, error) {
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
			_, err = data(c, a)
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

const maxKey = 1000

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

// takeLane takes the delivery's lane; where a run before still has it, it waits durably.
func takeLane(ctx context.Context, name string) (*executions.Hold, error) {
	for {
		hold, err := executions.Lane(ctx, name)
		if !errors.Is(err, lanes.ErrBusy) {
			return hold, err
		}
		outcome, waited := executions.Wait(ctx, "lane", executions.LaneFree(name, lanePatience))
		switch {
		case waited != nil:
			return nil, waited
		case outcome.TimedOut:
			return nil, err
		}
	}
}

// ignore ends the handling of a delivery that no action is for.
func (s *Surface) ignore(ctx context.Context, p plan) (executions.Result, error) {
	const why = "no action of the endpoint is for it"
	_, err := executions.Phase(ctx, "webhook_action", func(ctx context.Context, effect *executions.Effect) (string, error) {
		effect.Status = activity.Skipped
		return why, s.mark(ctx, p, "ignored", webhooks.Mark{Status: webhooks.Ignored, Attempt: 1})
	}, executions.Input(about(p)))
	return executions.Result{Summary: why}, err
}

func about(p plan) map[string]any {
	return map[string]any{"endpoint": p.Delivery.Endpoint, "delivery_id": p.Delivery.DeliveryID}
}

// attempts does the tasks until each is done or the attempts are used up.
func (s *Surface) attempts(ctx context.Context, p plan) (executions.Result, error) {
	done := map[int]any{}
	for attempt := 1; ; attempt++ {
		within := executions.Scope(ctx, fmt.Sprintf("attempt %d", attempt))
		if err := s.mark(within, p, "begin", webhooks.Mark{Status: webhooks.Running, Attempt: attempt}); err != nil {
			return executions.Result{}, err
		}
		failed, err := s.attempt(within, p, attempt, done)
		if err != nil {
			return executions.Result{}, err
		}
		last := attempt >= p.MaxAttempts || slices.ContainsFunc(failed, final)
		m := webhooks.Mark{Status: webhooks.Failed, Attempt: attempt, Outcome: done}
		switch {
		case len(failed) == 0:
			m.Status = webhooks.Done
		case last:
			m.Status, m.Error = webhooks.Dead, errors.Join(failed...).Error()
		default:
			m.Error, m.Retry = errors.Join(failed...).Error(), s.Backoff(attempt).Seconds()
		}
		if err := s.mark(within, p, "end", m); err != nil {
			return executions.Result{}, err
		}
		switch m.Status {
		case webhooks.Done:
			return executions.Result{Summary: fmt.Sprintf("%d of %d actions done", len(done), len(p.Tasks)), Value: done}, nil
		case webhooks.Dead:
			return executions.Result{Value: done}, errors.Join(failed...)
		}
		if _, err := executions.Wait(within, "pause", executions.Delay(max(s.Backoff(attempt), time.Millisecond))); err != nil {
			return executions.Result{}, err
		}
	}
}

// attempt does what is not done yet. failed are results of actions; err ends the run.
func (s *Surface) attempt(ctx context.Context, p plan, attempt int, done map[int]any) (failed []error, err error) {
	for _, t := range p.Tasks {
		if _, ok := done[t.Number]; ok {
			continue
		}
		result, err := s.act(executions.Scope(ctx, fmt.Sprintf("action %d", t.Number)), p, t, attempt)
		switch {
		case err == nil:
			done[t.Number] = result
		case executions.IsControl(err) || ctx.Err() != nil:
			return nil, err
		default:
			failed = append(failed, fmt.Errorf("action %d: %w", t.Number, err))
		}
	}
	return failed, nil
}

// mark writes how the handling stands, as a step: with its checkpoint, or not at all.
func (s *Surface) mark(ctx context.Context, p plan, step string, m webhooks.Mark) error {
	x, _ := executions.Current(ctx)
	_, err := executions.StepTx(ctx, "mark "+step, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return true, webhooks.Set(ctx, tx, p.Delivery.ID, x.ID, m)
	})
	return err
}
