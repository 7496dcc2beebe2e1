package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
)

// admin is who acts from the command line.
const admin = activity.Admin

func (c *cli) objectivesCommand() *cobra.Command {
	return group("objectives", "See what the agent works towards; decide about its proposals; confirm steps",
		c.objectivesListCommand(), c.objectivesShowCommand(), c.objectivesAddCommand(),
		c.objectivesDecideCommand("accept NAME", "Accept an objective that the agent proposed: it is worked on from the next heartbeat on", "accept_objective", objectives.Accept),
		c.objectivesDecideCommand("reject NAME", "Reject an objective that the agent proposed", "reject_objective", objectives.Reject),
		c.objectivesDoneCommand(),
		c.objectivesStatusCommand("pause NAME", "Leave an objective alone until it is resumed", "pause_objective", objectives.Active, objectives.Paused),
		c.objectivesStatusCommand("resume NAME", "Work on a paused objective again", "resume_objective", objectives.Paused, objectives.Active))
}

// act changes something as an admin does: the change and its row, under a trace of its own, are one transaction. input
// names the object, and has the reason where there is one. A change that changed nothing leaves no row.
func act(ctx context.Context, s *session, verb string, input map[string]any, change func(tx pgx.Tx, traceID string) (bool, error)) (changed bool, err error) {
	return actSaying(ctx, s, verb, input, map[string]any{}, change)
}

// actSaying is act, and the row says of the change what change has put into output.
func actSaying(ctx context.Context, s *session, verb string, input, output map[string]any, change func(tx pgx.Tx, traceID string) (bool, error)) (changed bool, err error) {
	reason, _ := input["reason"].(string)
	_, err = activity.Record(ctx, s.pool, activity.Act{Name: verb, Reason: reason, Input: input}, func(tx pgx.Tx, traceID string) (any, error) {
		if changed, err = change(tx, traceID); err != nil || !changed {
			return activity.Unchanged, err
		}
		return output, nil
	})
	return changed, err
}

// firstPage is a page, and where the next begins: a row more than the limit tells whether there is one.
func firstPage[T any](all []T, limit int, id func(T) string) (page []T, next string) {
	if len(all) <= limit {
		return all, ""
	}
	return all[:limit], id(all[limit-1])
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
		Use: "ls", Short: "List objectives with their progress, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := objectives.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(o objectives.Objective) string { return o.ID })
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, o := range got {
					rows[i] = []string{
						o.Name, o.Status, fmt.Sprintf("%d/%d", o.Done, o.Total), percent(o.Progress), fmt.Sprint(o.Priority), when(o.DueAt) + idle(o.IdleRuns), clipped(o.Goal, 50),
					}
				}
				return table(w, "no objective matches; `agent objectives add NAME --goal …` or a workspace brings some",
					[]string{"OBJECTIVE", "STATUS", "STEPS", "PROGRESS", "PRIORITY", "DUE", "GOAL"}, rows)
			})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", objectives.Proposed, objectives.Active, objectives.Paused,
		objectives.Completed, objectives.Failed, objectives.Rejected)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

// shownObjective is an objective with its steps, and what shows them to be done.
type shownObjective struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func readObjective(ctx context.Context, s *session, name string) (shown shownObjective, err error) {
	if shown.Objective, err = objectives.Get(ctx, s.pool, name); err != nil {
		return shown, objectiveHint(err)
	}
	if shown.Steps, err = objectives.Steps(ctx, s.pool, shown.ID); err != nil {
		return shown, err
	}
	shown.Evidence, err = objectives.EvidenceOf(ctx, s.pool, shown.ID)
	return shown, err
}

func (c *cli) objectivesShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one objective: goal, steps, what shows each step to be done", Args: args(1, 1, "an objective's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			shown, err := readObjective(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.print(shown, func(w io.Writer) error { return writeObjective(w, shown) })
		}),
	}
}

// idle says that an objective was put off.
func idle(runs int) string {
	switch runs {
	case 0:
		return ""
	case 1:
		return " (put off: 1 run without progress)"
	}
	return fmt.Sprintf(" (put off: %d runs without progress)", runs)
}

// writeObjective shows an objective to a person.
func writeObjective(w io.Writer, o shownObjective) error {
	fmt.Fprintf(w, "%s\n%s\n\n", printable(o.Name), o.Goal)
	every := ""
	if o.ReviewEverySeconds > 0 {
		every = seconds(float64(o.ReviewEverySeconds))
	}
	proposed := o.ProposedBy
	if proposed != "" {
		proposed += " in " + o.ProposedTrace
	}
	decided := o.DecidedBy
	if o.DecidedReason != "" {
		decided += ": " + o.DecidedReason
	}
	for _, l := range [][2]string{
		{"status", o.Status},
		{"reached when", o.SuccessCriteria},
		{"progress", fmt.Sprintf("%d of %d steps (%s), %d failed", o.Done, o.Total, percent(o.Progress), o.Failed)},
		{"priority", fmt.Sprint(o.Priority)},
		{"round", fmt.Sprint(o.Round)},
		{"every", every},
		{"due", when(o.DueAt) + idle(o.IdleRuns)},
		{"proposed by", proposed},
		{"decided by", decided},
		{"note", o.Note},
		{"last trace", o.LastTraceID},
		{"revision", fmt.Sprint(o.Revision)},
	} {
		if l[1] != "" {
			fmt.Fprintf(w, "%-12s %s\n", l[0], printable(l[1]))
		}
	}
	for _, s := range o.Steps {
		fmt.Fprintf(w, "\n%2d. %s  [%s]\n", s.Position, printable(s.Title), s.Status)
		if s.Result != "" {
			fmt.Fprintf(w, "    %s\n", printable(clipped(s.Result, 300)))
		}
		for _, e := range o.Evidence {
			if e.StepID == s.ID {
				fmt.Fprintf(w, "    shown by %s\n", printable(shownBy(e)))
			}
		}
	}
	return nil
}

func shownBy(e objectives.Evidence) string {
	if e.GivenBy != "" {
		return e.GivenBy + "'s word: " + e.Reason
	}
	return e.SkillName + " in " + e.TraceID
}

func (c *cli) objectivesAddCommand() *cobra.Command {
	var d objectives.Definition
	var named int
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Give the agent an objective", Args: args(1, 1, "a name"),
		Long: `Give the agent an objective. It is due at once, and worked on from the next heartbeat on. Without --step the agent
plans its steps itself. The same name again changes goal and criteria, and adds steps; with --if-revision only if the
objective is at the revision that agent objectives show has said (0: if it is new).`,
		Example: `  agent objectives add "tidy logs" --goal "Keep the log tables under 10 GB" \
    --success "no log table above 2 GB" --step "measure the log tables" --step "report" --every 7d`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d.Name = args[0]
			if err := objectives.Validate(d); err != nil {
				return &exitError{exitUsage, err}
			}
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			changed, err := act(cmd.Context(), s, "add_objective", map[string]any{"objective": d.Name, "definition": d},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := objectiveAt(cmd.Context(), tx, d.Name, revision); err != nil {
						return false, err
					}
					return objectives.Put(cmd.Context(), tx, d, objectives.SourceAdmin)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, d.Name, changed, "added", "says that already")
		}),
	}
	cmd.Flags().StringVar(&d.Goal, "goal", "", "what to reach, and why (required)")
	cmd.Flags().StringVar(&d.SuccessCriteria, "success", "", "how to tell that it is reached")
	cmd.Flags().StringArrayVar(&d.Steps, "step", nil, "a step; may be given again")
	cmd.Flags().IntVar(&d.Priority, "priority", 2, "1 comes first, 9 last")
	cmd.Flags().StringVar(&d.ReviewEvery, "every", "", "do it again and again: 12h, 7d")
	ifRevisionFlag(cmd, &named, "only if the objective is at this revision; 0: only if it is new")
	return cmd
}

// objectiveAt refuses what is based on another revision of an objective, or on none where there is one.
func objectiveAt(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision != memory.Absent {
		return objectives.AtRevision(ctx, tx, name, revision)
	}
	there, err := objectives.Get(ctx, tx, name)
	switch {
	case errors.Is(err, objectives.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return &postgres.StaleError{What: "objective", Name: name, Current: there.Revision}
}

// reportObjective says what became of an objective.
func (c *cli) reportObjective(ctx context.Context, s *session, name string, changed bool, did, already string) error {
	shown, err := readObjective(ctx, s, name)
	if err != nil {
		return err
	}
	return c.print(struct {
		Changed   bool           `json:"changed"`
		Objective shownObjective `json:"objective"`
	}{changed, shown}, func(w io.Writer) error {
		if !changed {
			did = already
		}
		_, err := fmt.Fprintf(w, "%s: %s; it is %s\n", printable(shown.Name), did, shown.Status)
		return err
	})
}

func (c *cli) objectivesDecideCommand(use, short, verb string, decide func(context.Context, postgres.DB, string, string, string) (bool, error)) *cobra.Command {
	var reason string
	var based *basis
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "an objective's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := act(cmd.Context(), s, verb, map[string]any{"objective": args[0], "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.hold(cmd, tx, args[0]); err != nil {
						return false, err
					}
					return decide(cmd.Context(), tx, args[0], admin, reason)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, args[0], changed, "decided", "is no open proposal")
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "why, for the record")
	based = basisFlag(cmd, objectives.AtRevision)
	return cmd
}

func (c *cli) objectivesStatusCommand(use, short, verb, from, to string) *cobra.Command {
	var based *basis
	var reason string
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "an objective's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			o, err := objectives.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return objectiveHint(err)
			}
			changed, err := act(cmd.Context(), s, verb, map[string]any{"objective": o.Name, "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.hold(cmd, tx, o.ID); err != nil {
						return false, err
					}
					return objectives.SetStatus(cmd.Context(), tx, o.ID, from, to)
				})
			if err != nil {
				return objectiveHint(err)
			}
			return c.reportObjective(cmd.Context(), s, o.ID, changed, "done", "is not "+from)
		}),
	}
	based = basisFlag(cmd, objectives.AtRevision)
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

func (c *cli) objectivesDoneCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "done STEP", Short: "Confirm on your word that a step is done", Args: rowID("a step", "agent objectives show NAME --json"),
		Long: `Confirm that a step is done. The agent itself needs a successful call to show it; your word, with the reason, is
kept as the evidence instead.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if strings.TrimSpace(reason) == "" {
				return usageError("say why with --reason: it is the evidence")
			}
			changed, err := act(cmd.Context(), s, "confirm_step", map[string]any{"step": args[0], "reason": reason},
				func(tx pgx.Tx, traceID string) (bool, error) {
					return objectives.Confirm(cmd.Context(), tx, args[0], admin, reason, traceID)
				})
			if errors.Is(err, objectives.ErrStepNotFound) {
				return hint(err, "see agent objectives show NAME --json")
			}
			if err != nil {
				return err
			}
			return c.print(map[string]any{"step": args[0], "changed": changed}, func(w io.Writer) error {
				said := "done"
				if !changed {
					said = "not pending any more"
				}
				_, err := fmt.Fprintf(w, "step %s: %s\n", args[0], said)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "how you know (required)")
	return cmd
}
