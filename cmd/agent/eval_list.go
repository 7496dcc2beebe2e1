package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/evals"
)

func (c *cli) evalListCommand() *cobra.Command {
	var runs bool
	cmd := &cobra.Command{
		Use: "ls [SUITE]", Short: "List the suites; with SUITE or --runs the newest 50 runs",
		Args: positionalArgs(0, 1, "at most one suite"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			suite := cmp.Or(append(args, "")...)
			if runs || suite != "" {
				return c.listRuns(cmd.Context(), s, suite)
			}
			suites, err := evals.List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			listed := make([]listedEval, len(suites))
			for i, one := range suites {
				d := one.Definition
				listed[i] = listedEval{one.Name, one.Version, d.Agent, len(d.Cases), d.TrialCount(), nil}
				last, err := evals.Runs(cmd.Context(), s.Pool, one.Name, 1)
				if err != nil {
					return err
				}
				if len(last) > 0 {
					listed[i].Last = &last[0]
				}
			}
			return printRows(c, listed, "", "no eval; declare one as kind: eval in the workspace",
				[]string{"EVAL", "VERSION", "AGENT", "CASES", "TRIALS", "LAST RUN", "RESULT"}, func(e listedEval) []string {
					row := []string{e.Name, fmt.Sprint(e.Version), e.Agent, fmt.Sprint(e.Cases), fmt.Sprint(e.Trials), "", ""}
					if e.Last != nil {
						row[5], row[6] = e.Last.ID, e.Last.Status
					}
					return row
				})
		}),
	}
	cmd.Flags().BoolVar(&runs, "runs", false, "list the newest runs of all suites")
	return cmd
}

// listedEval is a suite with its newest run.
type listedEval struct {
	Name    string     `json:"name"`
	Version int        `json:"version"`
	Agent   string     `json:"agent"`
	Cases   int        `json:"cases"`
	Trials  int        `json:"trials"`
	Last    *evals.Run `json:"last_run"`
}

// maxRuns bounds the listed runs.
const maxRuns = 50

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
