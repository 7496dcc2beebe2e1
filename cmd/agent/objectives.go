package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
)

func (c *cli) objectivesCommand() *cobra.Command {
	return group("objectives", "List objectives, decide proposals, confirm steps",
		c.objectivesListCommand(), c.objectivesShowCommand(), c.objectivesAddCommand(),
		c.objectivesDecideCommand("accept NAME", "Accept an objective proposed by the agent; it is due at once",
			"accept_objective", objectives.Accept),
		c.objectivesDecideCommand("reject NAME", "Reject an objective proposed by the agent",
			"reject_objective", objectives.Reject),
		c.objectivesDoneCommand(),
		c.objectivesStatusCommand("pause NAME", "Pause an objective until it is resumed", "pause_objective",
			objectives.Active, objectives.Paused),
		c.objectivesStatusCommand("resume NAME", "Resume a paused objective", "resume_objective",
			objectives.Paused, objectives.Active))
}

func objectiveHint(err error) error {
	if errors.Is(err, objectives.ErrNotFound) {
		return hint(err, "see agent objectives ls")
	}
	return staleHint(err, "agent objectives show NAME")
}

func (c *cli) objectivesListCommand() *cobra.Command {
	var f objectives.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List objectives with their progress, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := readPage(cmd.Context(), s, objectives.List, &f, &f.Limit,
				func(o objectives.Objective) string { return o.ID })
			if err != nil {
				return err
			}
			return printRows(c, page, next, "no matching objectives; `agent objectives add NAME --goal …` or a workspace adds "+
				"some",
				[]string{"OBJECTIVE", "STATUS", "STEPS", "PROGRESS", "PRIORITY", "DUE", "GOAL"},
				func(o objectives.Objective) []string {
					return []string{
						o.Name, o.Status, fmt.Sprintf("%d/%d", o.Done, o.Total), human.Percent(o.Progress), fmt.Sprint(o.Priority),
						formatTime(o.DueAt) + idleText(o.IdleRuns), truncate(o.Goal, 50),
					}
				})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", objectives.Statuses()...)
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

type shownObjective struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func readObjective(ctx context.Context, s *session, name string) (shown shownObjective, err error) {
	if shown.Objective, err = objectives.Get(ctx, s.Pool, name); err != nil {
		return shown, objectiveHint(err)
	}
	if shown.Steps, err = objectives.Steps(ctx, s.Pool, shown.ID); err != nil {
		return shown, err
	}
	shown.Evidence, err = objectives.EvidenceOf(ctx, s.Pool, shown.ID)
	return shown, err
}

func (c *cli) objectivesShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one objective: goal, steps, evidence",
		Args: positionalArgs(1, 1, "an objective's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			shown, err := readObjective(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.print(shown, func(w io.Writer) { writeObjective(w, shown) })
		}),
	}
}

// idleText reports that an objective was postponed for lack of progress.
func idleText(runs int) string {
	if runs == 0 {
		return ""
	}
	return fmt.Sprintf(" (postponed: %d %s without progress)", runs, plural("run", runs))
}

func writeObjective(w io.Writer, o shownObjective) {
	fmt.Fprintf(w, "%s\n%s\n\n", printable(o.Name), printableText(o.Goal))
	every := ""
	if o.ReviewEverySeconds > 0 {
		every = human.Seconds(float64(o.ReviewEverySeconds))
	}
	proposed := o.ProposedBy
	if proposed != "" {
		proposed += " in " + o.ProposedTrace
	}
	decided := o.DecidedBy
	if o.DecidedReason != "" {
		decided += ": " + o.DecidedReason
	}
	writeFields(w, "%-12s %s\n", [][2]string{
		{"status", o.Status},
		{"reached when", o.SuccessCriteria},
		{"progress", fmt.Sprintf("%d of %d steps (%s), %d failed", o.Done, o.Total, human.Percent(o.Progress), o.Failed)},
		{"agent", o.Agent},
		{"priority", fmt.Sprint(o.Priority)},
		{"round", fmt.Sprint(o.Round)},
		{"every", every},
		{"due", formatTime(o.DueAt) + idleText(o.IdleRuns)},
		{"proposed by", proposed},
		{"decided by", decided},
		{"note", o.Note},
		{"last trace", o.LastTraceID},
		{"revision", fmt.Sprint(o.Revision)},
	})
	for _, s := range o.Steps {
		fmt.Fprintf(w, "\n%2d. %s  [%s]\n", s.Position, printable(s.Title), s.Status)
		if s.Result != "" {
			fmt.Fprintf(w, "    %s\n", printable(truncate(s.Result, 300)))
		}
		for _, e := range o.Evidence {
			if e.StepID == s.ID {
				fmt.Fprintf(w, "    shown by %s\n", printable(evidenceText(e)))
			}
		}
	}
}

func evidenceText(e objectives.Evidence) string {
	if e.GivenBy != "" {
		return e.GivenBy + "'s word: " + e.Reason
	}
	return e.SkillName + " in " + e.TraceID
}

func (c *cli) objectivesAddCommand() *cobra.Command {
	var d objectives.Definition
	var named int
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Add an objective", Args: positionalArgs(1, 1, "a name"),
		Long: `Add an objective. It is due at once. A heartbeat works on up to five due objectives, by priority. Without --step
the agent plans the steps. The same name again replaces goal, criteria, priority and interval, and adds steps. Its
agent stays. --if-revision requires the revision of agent objectives show (0: new).`,
		Example: `  agent objectives add "tidy logs" --goal "Keep the log tables under 10 GB" \
    --success "no log table above 2 GB" --step "measure the log tables" --step "report" --every 7d`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			d.Name = args[0]
			if err := objectives.Validate(d); err != nil {
				return &exitError{exitUsage, err}
			}
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			did := "added"
			changed, err := recordChange(cmd.Context(), s, "add_objective", map[string]any{"objective": d.Name, "definition": d},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := requireRevision(cmd.Context(), tx, d.Name, revision); err != nil {
						return false, err
					}
					switch current, err := objectives.Get(cmd.Context(), tx, d.Name); {
					case err == nil:
						did, d.Agent = "changed", current.Agent
					case !errors.Is(err, objectives.ErrNotFound):
						return false, err
					}
					return objectives.Put(cmd.Context(), tx, d, objectives.SourceAdmin)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, d.Name, changed, did, "unchanged")
		}),
	}
	cmd.Flags().StringVar(&d.Goal, "goal", "", "the goal and its reason (required)")
	cmd.Flags().StringVar(&d.SuccessCriteria, "success", "", "the success criteria")
	cmd.Flags().StringArrayVar(&d.Steps, "step", nil, "a step; repeatable")
	cmd.Flags().IntVar(&d.Priority, "priority", 2, "1 comes first, 9 last")
	cmd.Flags().StringVar(&d.ReviewEvery, "every", "", "repeat it: 12h, 7d")
	ifRevisionFlag(cmd, &named, "only if the objective is at this revision; 0: only if it is new")
	return cmd
}

// requireRevision fails if the objective's revision differs, or if it exists although none was expected.
func requireRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision != memory.Absent {
		return objectives.LockRevision(ctx, tx, name, revision)
	}
	current, err := objectives.Get(ctx, tx, name)
	switch {
	case errors.Is(err, objectives.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return &postgres.StaleError{What: "objective", Name: name, Current: current.Revision}
}

func (c *cli) reportObjective(ctx context.Context, s *session, name string, changed bool, did, already string) error {
	shown, err := readObjective(ctx, s, name)
	if err != nil {
		return err
	}
	return c.print(struct {
		Changed   bool           `json:"changed"`
		Objective shownObjective `json:"objective"`
	}{changed, shown}, func(w io.Writer) {
		if !changed {
			did = already
		}
		fmt.Fprintf(w, "%s: %s; it is %s\n", printable(shown.Name), did, shown.Status)
	})
}

func (c *cli) objectivesDecideCommand(
	use, short, verb string, decide func(context.Context, postgres.DB, string, string, string) (bool, error),
) *cobra.Command {
	var reason string
	var based *revisionCheck
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "an objective's name or id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := recordChange(cmd.Context(), s, verb, map[string]any{"objective": args[0], "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.verify(cmd, tx, args[0]); err != nil {
						return false, err
					}
					return decide(cmd.Context(), tx, args[0], actor(cmd.Context()), reason)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, args[0], changed, "decided", "not an open proposal")
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	based = revisionFlag(cmd, objectives.LockRevision)
	return cmd
}

func (c *cli) objectivesStatusCommand(use, short, verb, from, to string) *cobra.Command {
	var based *revisionCheck
	var reason string
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "an objective's name or id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			o, err := objectives.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return objectiveHint(err)
			}
			changed, err := recordChange(cmd.Context(), s, verb, map[string]any{"objective": o.Name, "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.verify(cmd, tx, o.ID); err != nil {
						return false, err
					}
					return objectives.SetStatus(cmd.Context(), tx, o.ID, from, to)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, o.ID, changed, "changed", "is not "+from)
		}),
	}
	based = revisionFlag(cmd, objectives.LockRevision)
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

func (c *cli) objectivesDoneCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "done STEP", Short: "Confirm that a step is done", Args: rowID("a step", "agent objectives show NAME --json"),
		Long: `Confirm that a step is done. The agent itself needs a successful call as evidence; your confirmation with its
reason is stored as evidence instead.`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if strings.TrimSpace(reason) == "" {
				return usageError("name the evidence with --reason")
			}
			changed, err := recordChange(cmd.Context(), s, "confirm_step", map[string]any{"step": args[0], "reason": reason},
				func(tx pgx.Tx, traceID string) (bool, error) {
					return objectives.Confirm(cmd.Context(), tx, args[0], actor(cmd.Context()), reason, traceID)
				})
			if errors.Is(err, objectives.ErrStepNotFound) {
				return hint(err, "see agent objectives show NAME --json")
			}
			if err != nil {
				return err
			}
			return c.print(map[string]any{"step": args[0], "changed": changed}, func(w io.Writer) {
				verb := "done"
				if !changed {
					verb = "no longer pending"
				}
				fmt.Fprintf(w, "step %s: %s\n", args[0], verb)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "the evidence (required)")
	return cmd
}
