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
)

func (c *cli) automationsRunCommand() *cobra.Command {
	return &cobra.Command{
		Use: "run NAME", Short: "Run an automation, now, in this process", Args: args(1, 1, "an automation's name or id"),
		Long: `Run an automation, now, whatever its trigger, also one that is out of service. The run is claimed like any other: it
holds the automation's lane; and if this process dies, another finishes it. While the automation runs elsewhere nothing is run: that is
recorded as skipped, with the holder, and the exit code is 75. Its schedule is not touched.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.runAutomation(cmd.Context(), s, args[0])
		}),
	}
}

func (c *cli) runAutomation(ctx context.Context, s *session, name string) error {
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
	_, err = act(ctx, s, "run_automation_by_hand", map[string]any{"automation": name}, func(tx pgx.Tx, traceID string) (bool, error) {
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
	err = c.print(runSummary{run, x.ID, x.TraceID, x.Result}, func(w io.Writer) error {
		said := x.ResultSummary
		if x.Status == executions.Waiting {
			said = "waits for " + awaited(x) + "; it goes on in a process that runs `agent serve`"
		}
		fmt.Fprintf(w, "%s\n", printable(said))
		_, err := fmt.Fprintf(w, "trace %s\n", x.TraceID)
		return err
	})
	if err != nil {
		return err
	}
	if x.Status == executions.Failed || x.Status == executions.Timeout {
		return &traced{hint(fmt.Errorf("run automation: %s", deref(x.ErrorMessage)), "see agent trace %s", x.TraceID), x.TraceID}
	}
	if x.Status == executions.Cancelled {
		return &exitError{exitInterrupted, nil}
	}
	return nil
}
