package app

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// CallFlow is the flow of an admin's skill call: one durable step.
const CallFlow = "skill_call"

// SkillCall is the input of the flow CallFlow.
type SkillCall struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// registerCallFlow lets every process resume a skill call.
func registerCallFlow(a *App, loop *reason.Loop) error {
	a.Engine.Unforkable(CallFlow, "a fork would skip the check of its caller; call it again with agent skills call")
	return a.Engine.Register(CallFlow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var call SkillCall
		if err := json.Unmarshal(input, &call); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		skill, err := executions.Step(ctx, "skill", func(ctx context.Context) (skills.Skill, error) {
			return skills.Get(ctx, a.Pool, call.Skill)
		})
		if err != nil {
			return executions.Result{}, err
		}
		value, err := loop.Invoke(ctx, "skill "+skill.Name, skill, call.Args, executions.Call{
			Entry: activity.Entry{Purpose: "called by an admin"},
		})
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "called " + skill.Name, Value: value}, nil
	})
}
