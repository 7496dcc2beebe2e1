package main

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) automationsRunCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "run NAME", Short: "Run an automation, now, in this process", Args: args(1, 1, "an automation's name or id"),
		Long: `Run an automation, now, whatever its trigger, also one that is out of service. The run is claimed like any other: it
holds the automation's lane; and if this process dies, another finishes it. While the automation runs elsewhere nothing is run: that is
recorded as skipped, with the holder, and the exit code is 75. Its schedule is not touched.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.runAutomation(cmd.Context(), s, args[0], reason)
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

func (c *cli) runAutomation(ctx context.Context, s *session, name, reason string) error {
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	model, _, stop, err := newModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	found, err := automations.Get(ctx, s.pool, name)
	if err != nil {
		return automationHint(err)
	}
	busy, err := a.keeper.Busy(ctx, "automation:"+found.ID)
	if err != nil {
		return err
	}
	if busy != nil {
		s.noteSkipped(ctx, "run_automation", map[string]any{"automation": found.Name}, busy)
		return &exitError{exitBusy, hint(fmt.Errorf("skipped: %w", busy), "see agent lanes ls")}
	}
	var run automations.Run
	_, err = act(ctx, s, "run_automation_by_hand", map[string]any{"automation": found.Name, "reason": reason}, func(tx pgx.Tx, traceID string) (bool, error) {
		var err error
		run, err = automations.RunByHand(ctx, tx, name, traceID)
		return err == nil, err
	})
	if err != nil {
		return automationHint(err)
	}
	var ended executions.Execution
	err = a.beat(ctx, func(ctx context.Context) error {
		ended, err = a.engine.RunNow(ctx, runner.Spec(s.config.Name, run))
		return err
	})
	if err != nil {
		return err
	}
	return c.reportRun(context.WithoutCancel(ctx), s, run.ID, ended.Redacted())
}

// reportRun says how a run by hand ended; one that did not work is a failure.
func (c *cli) reportRun(ctx context.Context, s *session, runID string, x executions.Execution) error {
	run, err := automations.GetRun(ctx, s.pool, runID)
	if err != nil {
		return err
	}
	approval := run.AwaitedApproval()
	err = c.print(runSummary{run, x.ID, x.TraceID, x.Result, approval}, func(w io.Writer) error {
		said := x.ResultSummary
		if approval != "" {
			said = fmt.Sprintf("waits for approval %s; see agent approvals show %s, then agent approvals approve (or reject) %s. The next heartbeat makes an "+
				"approved call", approval, approval, approval)
		}
		if x.Status == executions.Waiting {
			said = "waits for " + awaited(x) + "; it goes on in a process that runs `agent serve`"
		}
		if said != "" {
			fmt.Fprintf(w, "%s\n", printable(said))
		}
		if text := resultOf(run); text != "" && approval == "" {
			fmt.Fprintf(w, "%s\n", text)
		}
		_, err := fmt.Fprintf(w, "trace %s\n", x.TraceID)
		return err
	})
	if err != nil {
		return err
	}
	if x.Status == executions.Failed || x.Status == executions.Timeout {
		failure := fmt.Errorf("run automation: %s", deref(x.ErrorMessage))
		if skill := disabledSkill(ctx, s, run); skill != "" {
			return &traced{hint(failure, "agent skills enable %s puts it back into service; see agent trace %s", skill, x.TraceID), x.TraceID}
		}
		return &traced{hint(failure, "see agent trace %s", x.TraceID), x.TraceID}
	}
	if x.Status == executions.Cancelled {
		return &exitError{exitInterrupted, nil}
	}
	return nil
}

// disabledSkill is the skill of a run's automation, if it is out of service.
func disabledSkill(ctx context.Context, s *session, run automations.Run) string {
	a, err := automations.Get(ctx, s.pool, run.AutomationID)
	if err != nil || a.SkillName == "" {
		return ""
	}
	skill, err := skills.Get(ctx, s.pool, a.SkillName)
	if err != nil || skill.Callable() {
		return ""
	}
	return skill.Name
}
