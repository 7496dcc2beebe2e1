package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) automationsRunCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "run NAME", Short: "Run an automation now, in this process",
		Args: positionalArgs(1, 1, "an automation's name or id"),
		Long: `Run an automation now, regardless of its trigger, even a disabled one. The run holds the automation's lane,
and another process finishes it if this one dies. If the automation already runs elsewhere, the run is recorded as
skipped with the holder, and the exit code is 75. The schedule stays as it is.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				return c.runAutomation(ctx, s, a, args[0], reason)
			})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// runAutomation runs an automation in this process and prints the result. If the automation's lane is busy, it records
// the skip and returns exit code 75.
func (c *cli) runAutomation(ctx context.Context, s *session, a *app.App, name, reason string) error {
	automation, err := automations.Get(ctx, s.Pool, name)
	if err != nil {
		return automationHint(err)
	}
	busy, err := a.Keeper.Holder(ctx, "automation:"+automation.ID)
	if err != nil {
		return err
	}
	if busy != nil {
		s.recordSkipped(ctx, "run_automation", map[string]any{"automation": automation.Name}, busy)
		return &exitError{exitBusy, hint(fmt.Errorf("skipped: %w", busy), "see agent lanes ls")}
	}
	acting, err := a.Loop.Agents.Default(ctx, s.Pool)
	if err != nil {
		return err
	}
	var run automations.Run
	_, err = recordChange(ctx, s, "run_automation_by_hand", map[string]any{
		"automation": automation.Name,
		"reason":     reason,
	}, func(tx pgx.Tx, traceID string) (bool, error) {
		var err error
		run, err = automations.RunManually(ctx, tx, name, traceID)
		return err == nil, err
	})
	if err != nil {
		return automationHint(err)
	}
	ended, err := a.Engine.RunSync(ctx, runner.Spec(cmp.Or(automation.Agent, acting.Name), run))
	if err != nil {
		return err
	}
	return c.reportRun(context.WithoutCancel(ctx), s, run.ID, ended.Redacted(ctx))
}

// runSummary is the JSON result of agent automations run.
type runSummary struct {
	Run         automations.Run `json:"run"`
	ExecutionID string          `json:"execution_id"`
	TraceID     string          `json:"trace_id"`
	Result      json.RawMessage `json:"result"`
	ApprovalID  string          `json:"approval_id"` // of the pending call, or empty
}

// reportRun prints the result of a manual run. A failed run is an error.
func (c *cli) reportRun(ctx context.Context, s *session, runID string, x executions.Execution) error {
	run, err := automations.GetRun(ctx, s.Pool, runID)
	if err != nil {
		return err
	}
	approval := run.AwaitedApproval()
	err = c.print(runSummary{run, x.ID, x.TraceID, x.Result, approval}, func(w io.Writer) {
		text := x.ResultSummary
		if approval != "" {
			text = fmt.Sprintf("waits for approval %s; see agent approvals show %s, then agent approvals approve (or reject) "+
				"%s. The next heartbeat runs an "+
				"approved call", approval, approval, approval)
		}
		if x.Status == executions.Waiting {
			text = "waits for " + waitText(x) + "; a process that runs `agent serve` resumes it"
		}
		if text != "" {
			fmt.Fprintf(w, "%s\n", printable(text))
		}
		if text := resultText(run); text != "" && approval == "" {
			fmt.Fprintf(w, "%s\n", text)
		}
		fmt.Fprintf(w, "trace %s\n", x.TraceID)
	})
	if err != nil {
		return err
	}
	if x.Status == executions.Failed || x.Status == executions.Timeout {
		failure := fmt.Errorf("run automation: %s", postgres.Deref(x.ErrorMessage))
		if skill := disabledSkill(ctx, s, run); skill != "" {
			return &tracedError{
				hint(failure, "agent skills enable %s enables it again; see agent trace %s", skill, x.TraceID),
				x.TraceID,
			}
		}
		return &tracedError{hint(failure, "see agent trace %s", x.TraceID), x.TraceID}
	}
	if x.Status == executions.Cancelled {
		return &exitError{exitInterrupted, nil}
	}
	return nil
}

// disabledSkill returns the disabled skill of an automation, or "".
func disabledSkill(ctx context.Context, s *session, run automations.Run) string {
	a, err := automations.Get(ctx, s.Pool, run.AutomationID)
	if err != nil || a.SkillName == "" {
		return ""
	}
	skill, err := skills.Get(ctx, s.Pool, a.SkillName)
	if err != nil || skill.Callable() {
		return ""
	}
	return skill.Name
}
