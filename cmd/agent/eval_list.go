package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// evalListCommand lists suites, or runs.
func (c *cli) evalListCommand() *cobra.Command {
	var runs bool
	cmd := &cobra.Command{
		Use: "ls [SUITE]", Short: fmt.Sprintf("List the suites; with SUITE or --runs the newest %d runs", maxRuns),
		Args: positionalArgs(0, 1, "at most one suite"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			suite := cmp.Or(append(args, "")...)
			if runs || suite != "" {
				return c.listRuns(cmd.Context(), s, suite)
			}
			listed, err := evals.ListWithRuns(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, listed, "", "no eval; declare one as kind: eval in the workspace",
				[]string{"EVAL", "VERSION", "AGENT", "CASES", "TRIALS", "LAST RUN", "RESULT"}, func(e evals.Listed) []string {
					last := postgres.Deref(e.Last)
					return []string{
						e.Name, fmt.Sprint(e.Version), e.Agent, fmt.Sprint(e.Cases), fmt.Sprint(e.Trials), last.ID, last.Status,
					}
				})
		}),
	}
	cmd.Flags().BoolVar(&runs, "runs", false, "list the newest runs of all suites")
	return cmd
}

// maxRuns bounds the listed runs.
const maxRuns = 50

// listRuns lists the newest runs of a suite, or of all.
func (c *cli) listRuns(ctx context.Context, s *session, suite string) error {
	runs, err := evals.Runs(ctx, s.Pool, suite, maxRuns)
	if err == nil && len(runs) == 0 {
		err = knownSuite(ctx, s, suite)
	}
	if err != nil {
		return err
	}
	reports, err := evals.Outcomes(ctx, s.Pool, runs)
	if err != nil {
		return err
	}
	states := map[string]string{}
	for _, r := range reports {
		states[r.ID] = r.State()
	}
	heading := []string{"RUN", "EVAL", "VERSION", "AGENT", "MODEL", "TRIALS", "BEGAN", "RESULT"}
	return printRows(c, runs, "", "no run", heading,
		func(r evals.Run) []string {
			return []string{
				r.ID, r.Suite, fmt.Sprint(r.Version), fmt.Sprintf("%s %d", r.Agent, r.AgentVersion), r.Model, fmt.Sprint(r.Trials),
				formatTime(r.CreatedAt), states[r.ID],
			}
		})
}

// knownSuite returns an error for the name of a suite that never existed.
func knownSuite(ctx context.Context, s *session, name string) error {
	if name == "" {
		return nil
	}
	_, err := evals.Version(ctx, s.Pool, name, 1)
	if errors.Is(err, evals.ErrNotFound) {
		return errNoSuite(name)
	}
	return err
}

func errNoSuite(name string) error {
	return hint(fmt.Errorf("there is no eval %.100q", name), "see agent eval ls")
}

func errNoSuites() error {
	return hint(errors.New("there is no eval"), "declare one as kind: eval in the workspace, see docs/evals.md")
}
