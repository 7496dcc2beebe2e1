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
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) automationsCommand() *cobra.Command {
	cmd := group("automations", "See, run and switch what the agent does on its own",
		c.automationsListCommand(), c.automationsShowCommand(), c.automationsRunCommand(), c.automationsRunsCommand(false),
		c.automationsRunsCommand(true), c.automationsRedriveCommand(),
		c.automationsSwitchCommand("enable NAME", "Put an automation into service", "enable_automation",
			func(ctx context.Context, tx pgx.Tx, name, _ string) (bool, error) {
				return automations.Enable(ctx, tx, name)
			}),
		c.automationsSwitchCommand("disable NAME", "Take an automation out of service, or refuse a proposal", "disable_automation",
			func(ctx context.Context, tx pgx.Tx, name, reason string) (bool, error) {
				return automations.Disable(ctx, tx, name, admin, reason)
			}),
		c.automationsSwitchCommand("accept NAME", "Accept an automation that the agent proposed", "accept_automation",
			func(ctx context.Context, tx pgx.Tx, name, _ string) (bool, error) {
				return automations.Accept(ctx, tx, name, admin)
			}))
	cmd.Long = `An automation calls a skill or pursues a prompt when a time of its schedule comes (heartbeats run those), when an event
comes, or when a condition over the agent's counters becomes true. Missed times of a schedule are run once. A failed run is
tried again after 1, 4, 16 and then 60 minutes, and is dead when its attempts are used up.`
	return cmd
}

func automationHint(err error) error {
	switch {
	case errors.Is(err, automations.ErrNotFound):
		return hint(err, "see agent automations ls")
	case errors.Is(err, automations.ErrProposal):
		return hint(err, "agent automations accept NAME puts it into service")
	case errors.Is(err, automations.ErrSkillDisabled):
		return hint(err, "agent skills enable NAME puts the skill back into service first")
	case errors.Is(err, automations.ErrRunNotFound):
		return hint(err, "see agent automations dead")
	}
	return staleHint(err, "agent automations show NAME")
}

// shownAutomation is an automation with its next times.
type shownAutomation struct {
	automations.Automation
	NextRuns []time.Time `json:"next_runs"`
}

func shownAutomations(all []automations.Automation) []shownAutomation {
	shown := make([]shownAutomation, len(all))
	for i, a := range all {
		shown[i] = shownAutomation{a, a.Upcoming(3)}
	}
	return shown
}

// trigger says when an automation runs.
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

// state says whether an automation is in service, and why not.
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
		Use: "ls", Short: "List automations with their next time, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := automations.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			page, next := firstPage(all, limit, func(a automations.Automation) string { return a.ID })
			got := shownAutomations(page)
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, a := range got {
					rows[i] = []string{a.Name, a.state(), clipped(a.trigger(), 50), firstTime(a.NextRuns), maybe(a.LastRunAt), doing(a.Automation)}
				}
				return table(w, "no automations; `agent apply DIR` brings some",
					[]string{"AUTOMATION", "STATE", "TRIGGER", "NEXT", "LAST", "DOES"}, rows)
			})
		}),
	}
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only those that call this skill")
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func doing(a automations.Automation) string {
	if a.SkillName != "" {
		return a.SkillName
	}
	if a.Flow != "" {
		return "flow " + a.Flow
	}
	return clipped(a.Prompt, 40)
}

func firstTime(times []time.Time) string {
	if len(times) == 0 {
		return "–"
	}
	return when(times[0])
}

func maybe(t *time.Time) string {
	if t == nil {
		return "–"
	}
	return when(*t)
}

func (c *cli) automationsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one automation: trigger, next three times, last runs", Args: args(1, 1, "an automation's name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := automations.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			runs, err := automations.Runs(cmd.Context(), s.pool, automations.RunFilter{AutomationID: a.ID, Limit: 5})
			if err != nil {
				return err
			}
			shown := struct {
				shownAutomation
				Runs []automations.Run `json:"runs"`
			}{shownAutomation{a, a.Upcoming(3)}, runs}
			return c.print(shown, func(w io.Writer) error { return writeAutomation(w, shown.shownAutomation, runs) })
		}),
	}
}

func writeAutomation(w io.Writer, a shownAutomation, runs []automations.Run) error {
	fmt.Fprintf(w, "%s\n%s\n\n", printable(a.Name), a.Description)
	var next []string
	for _, t := range a.NextRuns {
		next = append(next, t.Format("2006-01-02 15:04:05 MST"))
	}
	state := a.state()
	if a.DisabledReason != "" {
		state += ": " + a.DisabledReason
	}
	for _, l := range [][2]string{
		{"state", state},
		{"trigger", a.trigger()},
		{"next", strings.Join(next, ", ")},
		{"skill", a.SkillName},
		{"prompt", a.Prompt},
		{"flow", a.Flow},
		{"attempts", fmt.Sprint(a.MaxAttempts)},
		{"proposed by", a.ProposedBy},
		{"decided by", a.DecidedBy},
		{"last run", maybe(a.LastRunAt)},
		{"last trace", a.LastTraceID},
		{"revision", fmt.Sprint(a.Revision)},
	} {
		if l[1] != "" {
			fmt.Fprintf(w, "%-12s %s\n", l[0], printable(l[1]))
		}
	}
	writeJSON(w, "arguments", a.Arguments)
	fmt.Fprintln(w)
	if err := writeRuns(w, runs, "it has not run yet"); err != nil {
		return err
	}
	for _, r := range runs {
		if text := resultOf(r); text != "" {
			_, err := fmt.Fprintf(w, "\nresult of %s\n%s\n", when(r.ScheduledFor), text)
			return err
		}
	}
	return nil
}

// maxResult bounds a result that is no text, in characters.
const maxResult = 2000

// resultOf is what a run came to: the answer of the model, or what the skill returned.
func resultOf(r automations.Run) string {
	var answer struct{ Text string }
	if json.Unmarshal(r.Output, &answer) == nil && answer.Text != "" {
		return printableLines(answer.Text)
	}
	if text := string(r.Output); r.Status == automations.Success && text != "" && text != "null" {
		return clipped(text, maxResult)
	}
	return ""
}

func writeRuns(w io.Writer, runs []automations.Run, none string) error {
	rows := make([][]string, len(runs))
	for i, r := range runs {
		rows[i] = []string{r.ID, r.Cause, r.Status, fmt.Sprint(r.Attempt), when(r.ScheduledFor), maybe(r.RetryAt), r.TraceID, clipped(deref(r.ErrorMessage), 60)}
	}
	return table(w, none, []string{"RUN", "CAUSE", "STATUS", "ATTEMPT", "FOR", "RETRY", "TRACE", "ERROR"}, rows)
}

// automationsRunsCommand lists runs, or the dead letter box.
func (c *cli) automationsRunsCommand(dead bool) *cobra.Command {
	f := automations.RunFilter{}
	use, short, none := "runs [NAME]", "List runs, newest first", "no run matches"
	if dead {
		use, short, none = "dead [NAME]", "List the runs whose attempts are used up", "the dead letter box is empty"
		f.Status = automations.Dead
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(0, 1, "an automation's name or nothing"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if len(args) > 0 {
				a, err := automations.Get(cmd.Context(), s.pool, args[0])
				if err != nil {
					return automationHint(err)
				}
				f.AutomationID = a.ID
			}
			limit := f.Limit
			f.Limit = limit + 1
			all, err := automations.Runs(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(r automations.Run) string { return r.ID })
			return c.print(listing(got, next), func(w io.Writer) error { return writeRuns(w, got, none) })
		}),
	}
	if !dead {
		statusFlag(cmd.Flags(), &f.Status, "only this state", automations.DueNow, automations.Claimed, automations.Success,
			automations.Error, automations.Dead, automations.Skipped)
	}
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) automationsRedriveCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "redrive RUN", Short: "Give a dead run one more attempt, as soon as a process is there", Args: rowID("a run", "agent automations dead"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			input := map[string]any{"run": args[0], "reason": reason}
			changed, err := act(cmd.Context(), s, "redrive_automation", input,
				func(tx pgx.Tx, _ string) (bool, error) {
					ok, err := automations.Redrive(cmd.Context(), tx, args[0])
					if err != nil || !ok {
						return ok, err
					}
					if input["automation"], err = nameOfRun(cmd.Context(), tx, args[0]); err != nil {
						return false, err
					}
					return true, automations.Notify(cmd.Context(), tx)
				})
			if err != nil {
				return err
			}
			run, err := automations.GetRun(cmd.Context(), s.pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			return c.print(map[string]any{"run": run, "changed": changed}, func(w io.Writer) error {
				said := "is tried again"
				if !changed {
					said = "is not dead but " + run.Status
				}
				_, err := fmt.Fprintf(w, "run %s %s\n", run.ID, said)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

// nameOfRun is the name of the automation of a run.
func nameOfRun(ctx context.Context, tx pgx.Tx, id string) (string, error) {
	run, err := automations.GetRun(ctx, tx, id)
	if err != nil {
		return "", err
	}
	a, err := automations.Get(ctx, tx, run.AutomationID)
	return a.Name, err
}

func (c *cli) automationsSwitchCommand(use, short, verb string, change func(ctx context.Context, tx pgx.Tx, name, reason string) (bool, error)) *cobra.Command {
	var reason string
	var based *basis
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "an automation's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := act(cmd.Context(), s, verb, map[string]any{"automation": args[0], "reason": reason},
				func(tx pgx.Tx, _ string) (bool, error) {
					if err := based.hold(cmd, tx, args[0]); err != nil {
						return false, err
					}
					return change(cmd.Context(), tx, args[0], reason)
				})
			if err != nil {
				return automationHint(err)
			}
			a, err := automations.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return automationHint(err)
			}
			shown := shownAutomation{a, a.Upcoming(3)}
			return c.print(map[string]any{"automation": shown, "changed": changed}, func(w io.Writer) error {
				as := "is"
				if !changed {
					as = "was already, or is"
				}
				_, err := fmt.Fprintf(w, "%s %s %s\n", printable(a.Name), as, shown.state())
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "why, for the record")
	based = basisFlag(cmd, automations.AtRevision)
	return cmd
}

// runSummary is what a run by hand came to.
type runSummary struct {
	Run         automations.Run `json:"run"`
	ExecutionID string          `json:"execution_id"`
	TraceID     string          `json:"trace_id"`
	Result      json.RawMessage `json:"result"`
	ApprovalID  string          `json:"approval_id"` // of the call that waits for a decision; empty otherwise
}

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
	busy, err := a.keeper.Holder(ctx, "automation:"+found.ID)
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
		run, err = automations.RunManually(ctx, tx, name, traceID)
		return err == nil, err
	})
	if err != nil {
		return automationHint(err)
	}
	var ended executions.Execution
	err = a.beat(ctx, func(ctx context.Context) error {
		ended, err = a.engine.RunSync(ctx, runner.Spec(s.config.Name, run))
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
