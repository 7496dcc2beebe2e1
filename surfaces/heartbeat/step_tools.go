package heartbeat

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// completeStepTool lets the model report a step as done. The evidence is a successful call of this turn, not the
// model's claim. One transaction writes the step, its evidence and its activity.
func (b *heartbeatRun) completeStepTool(o *dueObjective, stepKey string, count *int) reason.Tool {
	return reason.Tool{
		Name: "complete_step", Description: "Report a step of the objective as done.",
		Parameters: json.RawMessage(
			`{"type":"object","additionalProperties":false,"required":["step_id","result"],"properties":{
			"step_id":{"type":"string","description":"the id after the word step"},
			"result":{"type":"string","minLength":1,"description":"what was found or done, with figures"}}}`),
		Do: func(ctx context.Context, args json.RawMessage) (any, error) {
			var in struct {
				StepID string `json:"step_id"`
				Result string `json:"result"`
			}
			if err := json.Unmarshal(args, &in); err != nil {
				return nil, errArguments(err)
			}
			err := b.changeStep(ctx, "complete step", o, in.StepID, args, func(ctx context.Context, tx pgx.Tx) error {
				return b.completeWithEvidence(ctx, tx, in.StepID, in.Result, stepKey)
			})
			if err == nil {
				*count++
			}
			return map[string]string{"status": "done"}, err
		},
	}
}

// completeWithEvidence completes a step with the calls that this execution made below stepKey.
func (b *heartbeatRun) completeWithEvidence(ctx context.Context, tx pgx.Tx, stepID, result, stepKey string) error {
	current, _ := executions.Current(ctx)
	where := objectives.EvidenceFilter{TraceID: string(trace.IDFrom(ctx)), ExecutionID: current.ID, StepKey: stepKey}
	calls, err := objectives.FindEvidence(ctx, tx, stepID, where)
	if err != nil {
		return err
	}
	found, err := objectives.CompleteStep(ctx, tx, stepID, result, where.TraceID, calls)
	switch {
	case errors.Is(err, objectives.ErrNoEvidence):
		return errNoEvidence()
	case err == nil && !found:
		return errUnknownStep(stepID)
	}
	return err
}

func (b *heartbeatRun) failStepTool(o *dueObjective) reason.Tool {
	return reason.Tool{
		Name: "fail_step", Description: "Report that a step of the objective did not work; it is tried again later.",
		Parameters: json.RawMessage(
			`{"type":"object","additionalProperties":false,"required":["step_id","reason"],"properties":{
			"step_id":{"type":"string"},"reason":{"type":"string","minLength":1}}}`),
		Do: func(ctx context.Context, args json.RawMessage) (any, error) {
			var in struct {
				StepID string `json:"step_id"`
				Reason string `json:"reason"`
			}
			if err := json.Unmarshal(args, &in); err != nil {
				return nil, errArguments(err)
			}
			return map[string]string{"status": "noted"}, b.changeStep(ctx, "fail step", o, in.StepID, args,
				func(ctx context.Context, tx pgx.Tx) error {
					_, found, err := objectives.FailStep(ctx, tx, in.StepID, in.Reason, string(trace.IDFrom(ctx)))
					if err == nil && !found {
						err = errUnknownStep(in.StepID)
					}
					return err
				})
		},
	}
}

// addStepsTool lets the model plan further steps.
func (b *heartbeatRun) addStepsTool(o *dueObjective) reason.Tool {
	return reason.Tool{
		Name: "add_steps", Description: "Plan further steps for the objective.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["titles"],"properties":{
			"titles":{"type":"array","minItems":1,"maxItems":10,"items":{"type":"string","minLength":1,"maxLength":300}}}}`),
		Do: func(ctx context.Context, args json.RawMessage) (any, error) {
			var in struct {
				Titles []string `json:"titles"`
			}
			if err := json.Unmarshal(args, &in); err != nil {
				return nil, errArguments(err)
			}
			added, err := executions.StepTx(ctx, "add steps", func(ctx context.Context, tx pgx.Tx) ([]objectives.Step, error) {
				return objectives.AddSteps(ctx, tx, o.ID, in.Titles)
			}, executions.Input(in.Titles))
			o.Steps = append(o.Steps, added...)
			o.changed = o.changed || len(added) > 0
			return added, err
		},
	}
}

// changeStep changes a step and writes the activity in one transaction.
func (b *heartbeatRun) changeStep(ctx context.Context, step string, o *dueObjective, id string, args json.RawMessage,
	change func(ctx context.Context, tx pgx.Tx) error,
) error {
	_, err := executions.StepTx(ctx, step, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		title, known := o.stepTitle(id)
		if !known {
			return false, errUnknownStep(id)
		}
		if err := change(ctx, tx); err != nil {
			return false, err
		}
		current, _ := executions.Current(ctx)
		_, err := activity.Note(ctx, tx, activity.Entry{
			Skill: "advance_step", Claim: current.Claim, Purpose: "advance_plan",
			Input: map[string]any{"objective": o.Name, "step": title, "report": args},
		}, activity.Outcome{Output: map[string]string{"change": step}})
		return true, err
	}, executions.Input(args))
	o.changed = o.changed || err == nil
	return err
}

// stepTitle returns the title of a step of this objective, so a model cannot change steps of other objectives.
func (o *dueObjective) stepTitle(id string) (string, bool) {
	for _, s := range o.Steps {
		if s.ID == id {
			return s.Title, true
		}
	}
	return "", false
}

// errUnknownStep is the error for a step that the model cannot change.
func errUnknownStep(id string) error {
	return &executions.StepError{Class: "invalid_params", Message: "there is no pending step " + id + " of this objective"}
}

// errNoEvidence is the error for a completed step without a successful call in this turn.
func errNoEvidence() error {
	return errArguments(errors.New(
		"nothing shows that this step is done: no successful call of yours since it began that " +
			"has not shown another step already. Calls that failed or await approval do not count. Act first, then report"))
}
