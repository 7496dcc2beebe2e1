package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) skillsCallCommand() *cobra.Command {
	var text string
	cmd := &cobra.Command{
		Use: "call NAME", Short: "Call a skill now and print its result", Args: positionalArgs(1, 1, "a skill's name"),
		Long: `Call a skill as the agent does: with validated arguments, its timeout and a new trace. The call counts for the
skill's health. Root and the local command line need no approval. With --server, a call of a skill with trust: approve
needs the scope approvals:decide, and a skill with four_eyes is refused: ask the agent for the call with agent operate.
For a skill on trial it is the trial: success enables the skill, failure restarts its cool-down.`,
		Example: "  agent skills call table_sizes --args '{\"limit\": 5}'",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if !json.Valid([]byte(text)) {
				return usageError(`--args is not JSON; write an object, for example '{"limit": 5}'`)
			}
			return c.callSkill(cmd.Context(), s, app.SkillCall{Skill: args[0], Args: json.RawMessage(text)})
		}),
	}
	cmd.Flags().StringVar(&text, "args", "{}", "the arguments, as a JSON object")
	return cmd
}

// mayCall refuses a named principal the call of a skill that another principal has to approve. Root and the local
// command line may call each skill.
func mayCall(ctx context.Context, s skills.Skill) error {
	who := principals.From(ctx)
	switch {
	case who == nil || who.Name == principals.Root || s.Trust != skills.TrustApprove:
		return nil
	case s.FourEyes:
		return hint(fmt.Errorf("skill %s has four_eyes: %s cannot call it alone", s.Name, who.Name),
			"ask for the call with agent operate; then another approver decides it with agent approvals approve ID")
	case !who.May(principals.ApprovalsDecide):
		return hint(fmt.Errorf("skill %s has trust: approve, so its call needs the scope %s, which %s (role %s) does not "+
			"have here", s.Name, principals.ApprovalsDecide, who.Name, who.Role),
			"ask for the call with agent operate; then an approver decides it with agent approvals approve ID")
	}
	return nil
}

// callSkill validates the call before it starts an execution, then runs it.
func (c *cli) callSkill(ctx context.Context, s *session, call app.SkillCall) error {
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	_, err = builtins.Put(ctx, prompt.Pool)
	prompt.Pool.Close()
	if err != nil {
		return err
	}
	skill, err := skills.Get(ctx, s.Pool, call.Skill)
	if err != nil {
		return skillHint(err)
	}
	if err := mayCall(ctx, skill); err != nil {
		return err
	}
	switch {
	case skill.TrialAt != nil && !skill.Enabled:
		c.infof("skill %s %s", skill.Name, printable(skill.OutOfService()))
		defer c.reportTrial(context.WithoutCancel(ctx), s, skill.Name)
	case skill.DisabledBy == mcp.Actor:
		return fmt.Errorf("skill %s %s", skill.Name, skill.OutOfService())
	case !skill.Enabled:
		return hint(fmt.Errorf("skill %s %s", skill.Name, skill.OutOfService()), "enable it with agent skills enable %s",
			skill.Name)
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	if err := a.Registry.Check(skill, call.Args); err != nil {
		if invalid, ok := errors.AsType[*skills.InvalidParams](err); ok {
			return &exitError{exitUsage, hint(invalid, "see agent skills show %s", skill.Name)}
		}
		return err
	}
	acting, err := a.Loop.Agents.Default(ctx, s.Pool)
	if err != nil {
		return err
	}
	var ended executions.Execution
	err = a.RunWithLeases(ctx, func(ctx context.Context) error {
		ended, err = a.Engine.RunSync(ctx, executions.Spec{
			Flow: app.CallFlow, Surface: trace.Operate,
			Agent: acting.Name, Input: call,
		})
		return err
	})
	if err != nil {
		return err
	}
	ended = ended.Redacted(ctx)
	if ended.Status != executions.Completed {
		return &tracedError{hint(fmt.Errorf("call %s: %s: %s", skill.Name, ended.Status, postgres.Deref(ended.ErrorMessage)),
			"see agent trace %s", ended.TraceID), ended.TraceID}
	}
	return c.tryPrint(map[string]any{
		"skill": skill.Name, "execution_id": ended.ID, "trace_id": ended.TraceID, "result": ended.Result,
	}, func(w io.Writer) error { return writeResult(w, ended) })
}

// reportTrial prints the effect of a call on a skill's trial.
func (c *cli) reportTrial(ctx context.Context, s *session, name string) {
	skill, err := skills.Get(ctx, s.Pool, name)
	switch {
	case err != nil:
		c.infof("agent: %s", printable(err.Error()))
	case skill.Enabled:
		c.infof("skill %s is back in service", name)
	case skill.TrialAt == nil:
		c.infof("skill %s failed its trial and stays disabled; its cool-down restarts", name)
	default:
		c.infof("skill %s is still on trial: the call was no evidence", name)
	}
}

func writeResult(w io.Writer, x executions.Execution) error {
	answer, err := exactjson.Decode(x.Result)
	if err != nil {
		return errors.Join(errors.New("decode the skill's result"), err)
	}
	return encodeJSON(w, answer)
}
