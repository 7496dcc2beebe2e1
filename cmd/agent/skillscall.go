package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// callFlow is the flow of a skill call that an admin makes: one durable step.
const callFlow = "skill_call"

// skillCall is its input.
type skillCall struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// registerCalls lets every process resume such a call.
func registerCalls(a *app, loop *reason.Loop) error {
	return a.engine.Register(callFlow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var call skillCall
		if err := json.Unmarshal(input, &call); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		skill, err := executions.Step(ctx, "skill", func(ctx context.Context) (skills.Skill, error) {
			return skills.Get(ctx, a.pool, call.Skill)
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

func (c *cli) skillsCallCommand() *cobra.Command {
	var text string
	cmd := &cobra.Command{
		Use: "call NAME", Short: "Call a skill, now, and show what it answers", Args: args(1, 1, "a skill's name"),
		Long: `Call a skill as the agent would: with its arguments checked, its timeout, and a trace of its own. It counts for
the skill's health. A call by an admin needs no approval. Of a skill on trial it is the trial: a success puts the skill back into
service, a failure begins its cool-down anew.`,
		Example: "  agent skills call table_sizes --args '{\"limit\": 5}'",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if !json.Valid([]byte(text)) {
				return usageError(`--args is not JSON; write an object, for example '{"limit": 5}'`)
			}
			return c.callSkill(cmd.Context(), s, skillCall{args[0], json.RawMessage(text)})
		}),
	}
	cmd.Flags().StringVar(&text, "args", "{}", "the arguments, as a JSON object")
	return cmd
}

// callSkill checks what can be checked before anything is recorded, and makes the call.
func (c *cli) callSkill(ctx context.Context, s *session, call skillCall) error {
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	skill, err := skills.Get(ctx, s.pool, call.Skill)
	if err != nil {
		return skillHint(err)
	}
	switch {
	case skill.TrialAt != nil && !skill.Enabled:
		c.say("skill %s %s", skill.Name, printable(skill.OutOfService()))
		defer c.sayTrial(context.WithoutCancel(ctx), s, skill.Name)
	case !skill.Enabled:
		return hint(fmt.Errorf("skill %s %s", skill.Name, skill.OutOfService()), "agent skills enable %s puts it back into service", skill.Name)
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	if err := a.registry.Check(skill, call.Args); err != nil {
		if invalid, ok := errors.AsType[*skills.InvalidParams](err); ok {
			return &exitError{exitUsage, hint(invalid, "see agent skills show %s", skill.Name)}
		}
		return err
	}
	var ended executions.Execution
	err = a.beat(ctx, func(ctx context.Context) error {
		ended, err = a.engine.RunNow(ctx, executions.Spec{Flow: callFlow, Surface: trace.Operate, Agent: s.config.Name, Input: call})
		return err
	})
	if err != nil {
		return err
	}
	ended = ended.Redacted()
	if ended.Status != executions.Completed {
		return &traced{hint(fmt.Errorf("call %s: %s: %s", skill.Name, ended.Status, deref(ended.ErrorMessage)),
			"see agent trace %s", ended.TraceID), ended.TraceID}
	}
	return c.print(map[string]any{
		"skill": skill.Name, "execution_id": ended.ID, "trace_id": ended.TraceID, "result": ended.Result,
	}, func(w io.Writer) error { return writeAnswer(w, ended) })
}

// sayTrial says what a call has made of a skill that was on trial.
func (c *cli) sayTrial(ctx context.Context, s *session, name string) {
	skill, err := skills.Get(ctx, s.pool, name)
	switch {
	case err != nil:
		c.say("agent: %s", printable(err.Error()))
	case skill.Enabled:
		c.say("skill %s is back in service", name)
	case skill.TrialAt == nil:
		c.say("skill %s failed its trial and stays disabled; its cool-down begins anew", name)
	default:
		c.say("skill %s is still on trial: the call has decided nothing", name)
	}
}

// writeAnswer shows what a skill answered.
func writeAnswer(w io.Writer, x executions.Execution) error {
	var answer any
	if err := json.Unmarshal(x.Result, &answer); err != nil {
		return errors.Join(errors.New("the skill's answer cannot be read"), err)
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(answer)
}
