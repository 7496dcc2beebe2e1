package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func (c *cli) automationsCommand() *cobra.Command {
	cmd := group("automations", "List, run, enable and disable automations",
		c.automationsListCommand(), c.automationsShowCommand(), c.automationsRunCommand(), c.automationsRunsCommand(false),
		c.automationsRunsCommand(true), c.automationsRedriveCommand(),
		c.automationsSwitchCommand("enable NAME", "Enable an automation", "enable_automation",
			func(ctx context.Context, tx pgx.Tx, name, _ string) (bool, error) {
				return automations.Enable(ctx, tx, name)
			}),
		c.automationsSwitchCommand("disable NAME", "Disable an automation, or reject a proposal", "disable_automation",
			func(ctx context.Context, tx pgx.Tx, name, reason string) (bool, error) {
				return automations.Disable(ctx, tx, name, actor(ctx), reason)
			}),
		c.automationsSwitchCommand("accept NAME", "Accept an automation proposed by the agent", "accept_automation",
			func(ctx context.Context, tx pgx.Tx, name, _ string) (bool, error) {
				return automations.Accept(ctx, tx, name, actor(ctx))
			}))
	cmd.Long = `An automation calls a skill, starts a flow or runs a prompt on a schedule (in heartbeats), on an event, or
when a condition over the agent's counters becomes true. Several missed times run once. A failed run retries after 1, 4,
16 and then 60 minutes. It is dead after its last attempt, or at once if a call of the attempt may have had an effect.`
	return cmd
}

func automationHint(err error) error {
	switch {
	case errors.Is(err, automations.ErrNotFound):
		return hint(err, "see agent automations ls")
	case errors.Is(err, automations.ErrProposal):
		return hint(err, "agent automations accept NAME enables it")
	case errors.Is(err, automations.ErrRunNotFound):
		return hint(err, "see agent automations dead")
	}
	return staleHint(err, "agent automations show NAME")
}

type shownAutomation struct {
	automations.Automation
	NextRuns []time.Time `json:"next_runs"`
}

type listedAutomation struct {
	shownAutomation
	RunsDue     int64      `json:"runs_due"`
	OldestDueAt *time.Time `json:"oldest_due_at"`
}

func listedAutomations(all []automations.Listed) []listedAutomation {
	listed := make([]listedAutomation, len(all))
	for i, a := range all {
		listed[i] = listedAutomation{shownAutomation{a.Automation, a.Upcoming(3)}, a.RunsDue, a.OldestDueAt}
	}
	return listed
}

// dueCount formats the count of due runs.
func dueCount(n int64) string {
	if n >= automations.MaxDue {
		return human.Count(n) + "+"
	}
	return human.Count(n)
}

func (a shownAutomation) trigger() string {
	switch {
	case a.Trigger == automations.Signal:
		return "when " + a.Signal
	case a.Trigger == automations.Event && a.Condition != "":
		return "on " + a.Event + " when " + a.Condition
	case a.Trigger == automations.Event:
		return "on " + a.Event
	}
	return a.Cron + " " + a.Timezone
}

func (a shownAutomation) state() string {
	switch {
	case a.Enabled:
		return "in service"
	case a.DisabledBy == automations.Proposal:
		return "proposed"
	}
	return "disabled by " + a.DisabledBy
}

func (c *cli) automationsListCommand() *cobra.Command {
	var f automations.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List automations with their next run and due runs, newest first",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := readPage(cmd.Context(), s, automations.List, &f, &f.Limit,
				func(a automations.Listed) string { return a.ID })
			if err != nil {
				return err
			}
			listed := listedAutomations(page)
			return printRows(c, listed, next, "no automations; `agent apply DIR` creates some",
				[]string{"AUTOMATION", "STATE", "TRIGGER", "NEXT", "LAST", "DUE", "OLDEST DUE", "DOES"},
				func(a listedAutomation) []string {
					return []string{
						a.Name, a.state(), truncate(a.trigger(), 50), a.next(), timeOrDash(a.LastRunAt),
						dueCount(a.RunsDue), timeOrDash(a.OldestDueAt), actionText(a.Automation),
					}
				})
		}),
	}
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only automations that call this skill")
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func actionText(a automations.Automation) string {
	if a.SkillName != "" {
		return a.SkillName
	}
	if a.Flow != "" {
		return "flow " + a.Flow
	}
	return truncate(a.Prompt, 40)
}

// next is the next run; due: the next heartbeat runs it.
func (a shownAutomation) next() string {
	switch {
	case len(a.NextRuns) == 0:
		return "–"
	case a.NextRuns[0].After(time.Now()):
		return formatTime(a.NextRuns[0])
	}
	return "due"
}

func (c *cli) automationsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one automation: trigger, next three runs, last runs",
		Args: positionalArgs(1, 1, "an automation's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := automations.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			runs, err := automations.Runs(cmd.Context(), s.Pool, automations.RunFilter{AutomationID: a.ID, Limit: 5})
			if err != nil {
				return err
			}
			shown := struct {
				shownAutomation
				Runs []automations.Run `json:"runs"`
			}{shownAutomation{a, a.Upcoming(3)}, runs}
			return c.print(shown, func(w io.Writer) { writeAutomation(w, shown.shownAutomation, runs) })
		}),
	}
}

func writeAutomation(w io.Writer, a shownAutomation, runs []automations.Run) {
	fmt.Fprintf(w, "%s\n\n", strings.TrimSpace(printable(a.Name)+"\n"+printableText(a.Description)))
	var next []string
	for _, t := range a.NextRuns {
		next = append(next, t.Format("2006-01-02 15:04:05 MST"))
	}
	if a.next() == "due" {
		next[0] = "due since " + next[0]
	}
	state := a.state()
	if a.DisabledReason != "" {
		state += ": " + a.DisabledReason
	}
	writeFields(w, "%-12s %s\n", [][2]string{
		{"state", state},
		{"trigger", a.trigger()},
		{"next", strings.Join(next, ", ")},
		{"skill", a.SkillName},
		{"prompt", a.Prompt},
		{"flow", a.Flow},
		{"attempts", fmt.Sprint(a.MaxAttempts)},
		{"proposed by", a.ProposedBy},
		{"decided by", a.DecidedBy},
		{"last run", timeOrDash(a.LastRunAt)},
		{"last trace", a.LastTraceID},
		{"revision", fmt.Sprint(a.Revision)},
	})
	writeJSON(w, "arguments", a.Arguments)
	fmt.Fprintln(w)
	writeRuns(w, runs, "no runs yet")
	for _, r := range runs {
		if text := resultText(r); text != "" {
			fmt.Fprintf(w, "\nresult of %s\n%s\n", formatTime(r.ScheduledFor), text)
			return
		}
	}
}

// maxResult bounds the printed length of a structured result.
const maxResult = 2000

// resultText returns the model's answer or the skill's return value.
func resultText(r automations.Run) string {
	var answer struct{ Text string }
	if json.Unmarshal(r.Output, &answer) == nil && answer.Text != "" {
		return printableText(strings.TrimRight(answer.Text, "\n"))
	}
	if text := string(r.Output); r.Status == automations.Success && text != "" && text != "null" {
		return truncate(text, maxResult)
	}
	return ""
}

func writeRuns(w io.Writer, runs []automations.Run, none string) {
	writeRows(w, none,
		[]string{"RUN", "CAUSE", "STATUS", "ATTEMPT", "FOR", "RETRY", "TRACE", "ERROR"}, runs,
		func(r automations.Run) []string {
			return []string{
				r.ID, r.Cause, r.Status, fmt.Sprint(r.Attempt), formatTime(r.ScheduledFor), timeOrDash(r.RetryAt),
				r.TraceID, truncate(postgres.Deref(r.ErrorMessage), 60),
			}
		})
}

// automationsRunsCommand lists runs, or only dead ones.
func (c *cli) automationsRunsCommand(dead bool) *cobra.Command {
	f := automations.RunFilter{}
	use, short, empty := "runs [NAME]", "List runs, newest first", "no run matches"
	if dead {
		use, short, empty = "dead [NAME]", "List dead runs: out of attempts, or not safe to repeat", "no dead runs"
		f.Status = automations.Dead
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(0, 1, "an automation's name or nothing"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if len(args) > 0 {
				a, err := automations.Get(cmd.Context(), s.Pool, args[0])
				if err != nil {
					return automationHint(err)
				}
				f.AutomationID = a.ID
			}
			list, next, err := readPage(cmd.Context(), s, automations.Runs, &f, &f.Limit,
				func(r automations.Run) string { return r.ID })
			if err != nil {
				return err
			}
			return c.print(pageOf(list, next), func(w io.Writer) { writeRuns(w, list, empty) })
		}),
	}
	if !dead {
		statusFlag(cmd.Flags(), &f.Status, "only this state", automations.DueNow, automations.Claimed, automations.Success,
			automations.Error, automations.Dead, automations.Skipped)
	}
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) automationsRedriveCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "redrive RUN", Short: "Give a dead run one more attempt", Args: rowID("a run", "agent automations dead"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			input := map[string]any{"run": args[0], "reason": reason}
			changed, err := recordChange(cmd.Context(), s, "redrive_automation", input,
				func(tx pgx.Tx, _ string) (bool, error) {
					ok, err := automations.Redrive(cmd.Context(), tx, args[0])
					if err != nil || !ok {
						return ok, err
					}
					if input["automation"], err = automationName(cmd.Context(), tx, args[0]); err != nil {
						return false, err
					}
					return true, automations.Notify(cmd.Context(), tx)
				})
			if err != nil {
				return err
			}
			run, err := automations.GetRun(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			return c.print(map[string]any{"run": run, "changed": changed}, func(w io.Writer) {
				outcome := "will run again"
				if !changed {
					outcome = "is not dead: status " + run.Status
				}
				fmt.Fprintf(w, "run %s %s\n", run.ID, outcome)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

func automationName(ctx context.Context, tx pgx.Tx, id string) (string, error) {
	run, err := automations.GetRun(ctx, tx, id)
	if err != nil {
		return "", err
	}
	a, err := automations.Get(ctx, tx, run.AutomationID)
	return a.Name, err
}

func (c *cli) automationsSwitchCommand(
	use, short, verb string, change func(ctx context.Context, tx pgx.Tx, name, reason string) (bool, error),
) *cobra.Command {
	var reason string
	var based *revisionCheck
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "an automation's name or id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := recordChange(cmd.Context(), s, verb, map[string]any{"automation": args[0], "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.verify(cmd, tx, args[0]); err != nil {
						return false, err
					}
					return change(cmd.Context(), tx, args[0], reason)
				})
			if err != nil {
				return automationHint(err)
			}
			a, err := automations.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			shown := shownAutomation{a, a.Upcoming(3)}
			return c.print(map[string]any{"automation": shown, "changed": changed}, func(w io.Writer) {
				as := "is"
				if !changed {
					as = "was already, or is"
				}
				fmt.Fprintf(w, "%s %s %s\n", printable(a.Name), as, shown.state())
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	based = revisionFlag(cmd, automations.LockRevision)
	return cmd
}
