package webhook

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// automate starts the run in the transaction of the checkpoint. How the run then fares is its own story: it has attempts and a
// dead letter of its own.
func (s *Surface) automate(ctx context.Context, c webhooks.Content, t task) (result, error) {
	payload, err := data(c, webhooks.Action{})
	if err != nil {
		return result{}, err
	}
	begin := s.Automate
	if begin == nil {
		begin = s.startRun
	}
	x, _ := executions.Current(ctx)
	return executions.StepTx(ctx, "automate", func(ctx context.Context, tx pgx.Tx) (result, error) {
		run, err := begin(ctx, tx, AutomationRequest{
			Automation: t.Action.Automation, Key: fmt.Sprintf("webhook %s %d", x.ID, t.Number),
			TraceID: x.TraceID, Payload: payload,
		})
		return result{Run: run}, err
	})
}

// startRun makes a run, claims it and starts its execution: all of it, or nothing.
func (s *Surface) startRun(ctx context.Context, tx pgx.Tx, r AutomationRequest) (string, error) {
	a, err := automations.Get(ctx, tx, r.Automation)
	if err != nil {
		return "", err
	}
	if !a.Enabled {
		return "", fmt.Errorf("automation %s is out of service: %s", a.Name, a.DisabledReason)
	}
	run, err := automations.RunByHand(ctx, tx, a.ID, r.TraceID)
	if err != nil {
		return "", err
	}
	x, _, err := s.Engine.StartTx(ctx, tx, runner.Spec(s.Agent, run))
	if err != nil {
		return "", err
	}
	_, ok, err := automations.Take(ctx, tx, run.ID, run.Attempt, x.ID, x.TraceID)
	if err == nil && !ok {
		err = errors.New("its run was taken by somebody else")
	}
	return run.ID, err
}
