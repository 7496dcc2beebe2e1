package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/app"
)

func (c *cli) evalShadowCommand() *cobra.Command {
	var of runner.Counterfactual
	var share float64
	var until time.Duration
	cmd := &cobra.Command{
		Use: "shadow", Short: "Play a share of the turns with a candidate as they complete",
		Long: `Play a share of the agent's turns with a candidate, as counterfactuals, when they have completed. The hash of
a trace decides whether its turn is played, so that every server agrees. Servers (agent serve) play one turn at a time,
after the conversation has its answer. agent eval show RUN compares, as for a counterfactual. It ends after --until,
when its budget is used up, or by agent eval shadow stop RUN.`,
		Example: "  agent eval shadow --share 0.02 --model gpt-5-mini --until 24h --budget 5",
		Args:    positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !(share > 0 && share <= 1) { // NaN too
				return usageError("--share must be more than 0 and at most 1")
			}
			if err := checkCandidate(cmd, of, false); err != nil {
				return err
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, _ *session, a *app.App) error {
				run, err := a.Evals.StartShadow(ctx, of, share, until)
				if err != nil {
					return evalError(err)
				}
				return c.printf(run, "run %s; see agent eval show %s\n", run.ID, run.ID)
			})
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&share, "share", 0.02, "share of the turns")
	candidateFlags(flags, &of, 1)
	spanFlag(flags, &until, "until", "24h", "how long it lasts")
	cmd.AddCommand(c.evalShadowListCommand(), c.evalShadowStopCommand())
	return cmd
}

func (c *cli) evalShadowListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the newest 50 shadows", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			shadows, err := evals.Shadows(cmd.Context(), s.Pool, maxRuns)
			if err != nil {
				return err
			}
			return printRows(c, shadows, "", "no shadow", []string{"RUN", "AGENT", "MODEL", "SHARE", "TURNS", "UNTIL", "RESULT"},
				func(x evals.Shadow) []string {
					return []string{
						x.RunID, fmt.Sprintf("%s %d", x.Agent, x.Version), x.Model, fmt.Sprint(x.Share), fmt.Sprint(x.Turns),
						formatTime(x.Until), x.Status,
					}
				})
		}),
	}
}

func (c *cli) evalShadowStopCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stop RUN", Short: "Stop a shadow; its results stay", Args: rowID("a run", "agent eval shadow ls"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			err := evals.StopShadow(cmd.Context(), s.Pool, args[0])
			if errors.Is(err, evals.ErrNotFound) {
				return hint(fmt.Errorf("there is no shadow %s that runs", args[0]), "see agent eval shadow ls")
			}
			if err != nil {
				return err
			}
			return c.printf(map[string]string{"run_id": args[0]}, "stopped; servers end it\n")
		}),
	}
}
