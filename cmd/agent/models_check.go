package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
)

func (c *cli) modelsCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check [MODEL]",
		Short: "Test a model with real calls and suggest settings",
		Long: `Test a model with real calls: a turn, a tool, a correction, a stream, a bounded answer, an image. Without
MODEL it tests each model of the agents, fallbacks included. The provider bills the calls; the command prints their
number first. The exit code is 1 when a check fails.`,
		Args: modelArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, targets, stop, err := c.modelsToCheck(cmd.Context(), args)
			if err != nil {
				return err
			}
			defer stop()
			var checked []checkedModel
			work := func(w io.Writer) error {
				checked, err = c.checkModels(cmd.Context(), client, targets, w)
				return err
			}
			if c.json {
				if err := work(io.Discard); err != nil {
					return err
				}
			}
			if err := c.tryPrint(pageOf(checked, ""), work); err != nil {
				return err
			}
			if slices.ContainsFunc(checked, checkedModel.failed) {
				return &exitError{exitFailed, nil}
			}
			return nil
		},
	}
}

// modelArg accepts at most one model name.
func modelArg(cmd *cobra.Command, args []string) error {
	if len(args) == 1 && strings.TrimSpace(args[0]) == "" {
		return &exitError{exitUsage, helpHint(errors.New("the model's name is empty"), cmd)}
	}
	return positionalArgs(0, 1, "at most one model's name")(cmd, args)
}

// modelsToCheck returns the client and the named models, or those that agents use.
func (c *cli) modelsToCheck(ctx context.Context, named []string) (*models.Client, []modelcheck.Target, func(), error) {
	c.quietLogs()
	if err := c.loadDevDotEnv(); err != nil {
		return nil, nil, nil, err
	}
	cfg, log, err := c.settings()
	if err != nil {
		return nil, nil, nil, err
	}
	client, _, stop, err := app.NewModel(ctx, cfg, log, models.Retry{Attempts: 2})
	if err != nil || len(named) > 0 {
		return client, targetsOf(named), stop, err
	}
	all, err := c.agentsInService(ctx)
	if err != nil {
		stop()
		return nil, nil, nil, err
	}
	var targets []modelcheck.Target
	for _, u := range usedModels(client, all) {
		targets = append(targets, u.Target)
	}
	return client, targets, stop, nil
}

func targetsOf(named []string) (targets []modelcheck.Target) {
	for _, name := range named {
		targets = append(targets, modelcheck.Target{Model: name})
	}
	return targets
}

func (c *cli) agentsInService(ctx context.Context) ([]agents.Agent, error) {
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close(ctx)
	return app.NewDirectory(s.config).List(ctx, s.Pool)
}

type checkedModel struct {
	modelcheck.Target
	Checks  []modelcheck.Result `json:"checks"`
	Calls   int                 `json:"calls"`
	CostUSD float64             `json:"cost_usd"`
}

func (m checkedModel) failed() bool {
	return slices.ContainsFunc(m.Checks, func(r modelcheck.Result) bool { return r.Status == modelcheck.Fail })
}

// checkModels runs the checks and prints each result as it arrives.
func (c *cli) checkModels(
	ctx context.Context, client *models.Client, targets []modelcheck.Target, w io.Writer,
) (all []checkedModel, err error) {
	calls := 0
	for _, t := range targets {
		calls += modelcheck.Calls(client, t)
	}
	c.infof("%s to %s, billed by the provider; each rejected protocol feature adds one",
		human.Counted(int64(calls), "call"), human.Counted(int64(len(targets)), "model"))
	for i, t := range targets {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, printable(t.String()))
		found := checkedModel{Target: t}
		err := modelcheck.Run(ctx, client, t, c.showProgress, func(r modelcheck.Result) {
			c.showProgress("")
			found.Checks = append(found.Checks, r)
			found.Calls += r.Calls
			found.CostUSD += r.CostUSD
			writeCheck(w, r)
		})
		if err != nil {
			return nil, err
		}
		cost := human.Money(found.CostUSD)
		if _, known := client.Price(cmp.Or(t.Model, client.Model())); !known {
			cost = "no price"
		}
		fmt.Fprintf(w, "%s, %s\n", human.Counted(int64(found.Calls), "call"), cost)
		all = append(all, found)
	}
	return all, nil
}

// showProgress shows the current check on a terminal, until the next output.
func (c *cli) showProgress(what string) {
	if !terminal(c.err) {
		return
	}
	if what == "" {
		fmt.Fprint(c.err, "\r\x1b[K")
		return
	}
	fmt.Fprintf(c.err, "\r\x1b[K…        %s", what)
}

// writeCheck prints a result and the setting that helps.
func writeCheck(w io.Writer, r modelcheck.Result) {
	took, word := "", string(r.Status)
	if r.Status == modelcheck.Fail {
		word = "FAIL"
	}
	if r.Calls > 0 {
		took = (time.Duration(r.Millis) * time.Millisecond).Round(10 * time.Millisecond).String()
	}
	line := fmt.Sprintf("%-7s  %-10s  %7s  %s", word, r.Check, took, printable(r.Detail))
	fmt.Fprintln(w, strings.TrimRight(line, " "))
	if r.Help != "" {
		fmt.Fprintf(w, "%30s%s\n", "", r.Help)
	}
}
