package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) skillsCommand() *cobra.Command {
	return group("skills", "List skills and their health, call, enable and disable them",
		c.skillsListCommand(), c.skillsShowCommand(), c.skillsSwitchCommand(true), c.skillsSwitchCommand(false),
		c.skillsCallCommand())
}

// health has the columns of agent_skill_health, read from counters: percentiles are accurate to 2.5 per cent.
type health struct {
	Skill          string     `json:"skill"`
	Calls          int64      `json:"calls"`
	SuccessRate    *float64   `json:"success_rate"`
	Streak         int64      `json:"streak"`
	P50MS          *float64   `json:"p50_ms"`
	P95MS          *float64   `json:"p95_ms"`
	State          string     `json:"state"`
	DisabledBy     string     `json:"disabled_by"`
	DisabledReason string     `json:"disabled_reason"`
	DisabledAt     *time.Time `json:"disabled_at"`
}

func (c *cli) skillsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List skills with their health over the last 7 days", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := skillHealth(cmd.Context(), s)
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no skills; `agent apply DIR` creates some",
				[]string{"SKILL", "STATE", "CALLS", "SUCCESS", "FAILED IN A ROW", "DISABLED BY", "REASON"},
				func(h health) []string {
					rate := "–"
					if h.SuccessRate != nil {
						rate = human.Percent(*h.SuccessRate)
					}
					return []string{
						h.Skill, h.State, fmt.Sprint(h.Calls), rate, fmt.Sprint(h.Streak), h.DisabledBy,
						truncate(h.DisabledReason, 70),
					}
				})
		}),
	}
}

func skillHealth(ctx context.Context, s *session) ([]health, error) {
	sums, err := activity.CountedHealth(ctx, s.Pool, activity.HealthFilter{})
	if err != nil {
		return nil, fmt.Errorf("read skill health: %w", err)
	}
	got := make([]health, len(sums.Lines))
	for i, h := range sums.Lines {
		got[i] = health{
			h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.P95MS, h.State, h.DisabledBy,
			h.DisabledReason, h.DisabledAt,
		}
	}
	return got, nil
}

func (c *cli) skillsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one skill: definition, state, evidence", Args: positionalArgs(1, 1, "a skill's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			skill, err := skills.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return skillHint(err)
			}
			shown := struct {
				skills.Skill
				LastFailure *lastFailure `json:"last_failure,omitempty"`
			}{Skill: skill}
			if shown.LastFailure, err = readLastFailure(cmd.Context(), s, skill.Name); err != nil {
				return err
			}
			return c.print(shown, func(w io.Writer) {
				writeSkill(w, skill, shown.LastFailure)
			})
		}),
	}
}

// lastFailure is the newest failed call of a skill in the last 7 days.
type lastFailure struct {
	At      time.Time `json:"at"`
	Class   string    `json:"error_class"`
	Message string    `json:"error_message"`
	TraceID string    `json:"trace_id"`
}

func (f lastFailure) String() string {
	return fmt.Sprintf("%s %s: %s (agent trace %s)", formatTime(f.At), f.Class, truncate(f.Message, 200), f.TraceID)
}

// readLastFailure returns nil for none.
func readLastFailure(ctx context.Context, s *session, skill string) (*lastFailure, error) {
	rows, _, err := activity.Recent(ctx, s.Pool, activity.Filter{
		Skill: skill, Status: activity.Error, NoEvals: true, Since: time.Now().AddDate(0, 0, -7), Limit: 1,
	})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	return &lastFailure{rows[0].CreatedAt, rows[0].ErrorClass, postgres.Deref(rows[0].ErrorMessage), rows[0].TraceID}, nil
}

func writeSkill(w io.Writer, s skills.Skill, last *lastFailure) {
	state := "in service"
	if !s.Enabled {
		state = "disabled by " + s.DisabledBy + ": " + printable(s.DisabledReason)
	}
	fmt.Fprintf(w, "%s\n%s\n\n", s.Name, printableText(s.Description))
	for _, l := range [][2]string{
		{"state", state},
		{"scope", s.Scope},
		{"trust", s.Trust},
		{"idempotent", map[bool]string{true: "yes", false: "no: never repeated after a crash"}[s.Idempotent]},
		{"timeout", s.Timeout().String()},
		{"handler", s.Handler},
		{"revision", fmt.Sprintf("%d (definition); %d with its state, for --if-revision", s.Revision, s.StateRevision)},
	} {
		fmt.Fprintf(w, "%-11s %s\n", l[0], l[1])
	}
	if last != nil {
		fmt.Fprintf(w, "%-11s %s\n", "last failed", last)
	}
	writeJSON(w, "parameters", s.Parameters())
	writeJSON(w, "config", s.Config)
	writeJSON(w, "evidence", s.Evidence)
}

// writeJSON prints the fields of a value under a heading, with multi-line texts unescaped. It skips empty values.
func writeJSON(w io.Writer, heading string, value json.RawMessage) {
	switch string(value) {
	case "", "{}", "null":
		return
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(value, &fields) != nil {
		fields = map[string]json.RawMessage{"value": value}
	}
	fmt.Fprintf(w, "\n%s\n", heading)
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		var text string
		if json.Unmarshal(fields[name], &text) != nil {
			text = string(fields[name])
			var indented bytes.Buffer
			if len(text) > 100 && json.Indent(&indented, fields[name], "", "  ") == nil {
				text = indented.String()
			}
		}
		if strings.Contains(strings.TrimSpace(text), "\n") {
			text = "\n    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ")
		}
		fmt.Fprintf(w, "  %s: %s\n", name, text)
	}
}

func skillHint(err error) error {
	if errors.Is(err, skills.ErrNotFound) {
		return hint(err, "see agent skills ls")
	}
	return staleHint(err, "agent skills show NAME")
}

func (c *cli) skillsSwitchCommand(enable bool) *cobra.Command {
	var reason string
	var based *revisionCheck
	use, short := "disable NAME", "Disable a skill and pause its automations"
	if enable {
		use, short = "enable NAME", "Enable a skill and its paused automations"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "a skill's name"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.switchSkill(cmd.Context(), s, args[0], enable, reason,
				func(tx pgx.Tx) error { return based.verify(cmd, tx, args[0]) })
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	based = revisionFlag(cmd, skills.AtRevision)
	return cmd
}

// switchSkill enables or disables a skill and records it in one transaction. hold may reject the change.
func (c *cli) switchSkill(
	ctx context.Context, s *session, name string, enable bool, reason string, hold func(tx pgx.Tx) error,
) error {
	paused, restored := []string{}, []string{}
	verb, output := map[bool]string{true: "enable_skill", false: "disable_skill"}[enable], map[string]any{}
	changed, err := recordChangeWith(ctx, s, verb, map[string]any{"skill": name, "reason": reason}, output,
		func(tx pgx.Tx, _ string) (changed bool, err error) {
			if err := hold(tx); err != nil {
				return false, err
			}
			if enable {
				got, err := selfheal.Reenable(ctx, tx, name, actor(ctx), reason)
				restored = append(restored, got.Automations...)
				output["automations"] = restored
				return got.Settled, err
			}
			evidence := map[string]string{"by": "command line"}
			if changed, err = skills.Disable(ctx, tx, name, actor(ctx), reason, evidence); err == nil {
				paused, err = automations.PausedFor(ctx, tx, name)
			}
			output["automations"] = paused
			return changed, err
		})
	if err != nil {
		return skillHint(err)
	}
	state := map[bool]string{true: "enabled", false: "disabled"}[enable]
	return c.print(map[string]any{
		"skill": name, "state": state, "changed": changed, "automations_paused": paused,
		"automations_restored": restored,
	}, func(w io.Writer) {
		service := map[bool]string{true: "in service", false: "out of service"}[enable]
		if !changed {
			fmt.Fprintf(w, "%s was %s already\n", name, service)
			return
		}
		fmt.Fprintf(w, "%s is %s\n", name, service)
		for _, a := range paused {
			fmt.Fprintf(w, "automation %s is paused until the skill is enabled\n", a)
		}
		for _, a := range restored {
			fmt.Fprintf(w, "automation %s runs again\n", a)
		}
	})
}

func (c *cli) skillsCallCommand() *cobra.Command {
	var text string
	cmd := &cobra.Command{
		Use: "call NAME", Short: "Call a skill now and print its result", Args: positionalArgs(1, 1, "a skill's name"),
		Long: `Call a skill as the agent does: with validated arguments, its timeout and a new trace. The call counts for the skill's
health. Root and the local command line need no approval. With --server, a call of a skill with trust: approve needs
the scope approvals:decide, and a skill with four_eyes is refused: ask the agent for the call with agent operate. For a
skill on trial it is the trial: success enables the skill, failure restarts its cool-down.`,
		Example: "  agent skills call table_sizes --args '{\"limit\": 5}'",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if !json.Valid([]byte(text)) {
				return usageError(`--args is not JSON; write an object, for example '{"limit": 5}'`)
			}
			return c.callSkill(cmd.Context(), s, app.SkillCall{Skill: args[0], Args: json.RawMessage(text)})
		}),
	}
	cmd.Flags().StringVar(&text, "args", "{}", "the arguments, as a JSON object")
	return cmd
}

// mayCall refuses a named principal the call of a skill that another principal has to approve. Root and the local
// command line may call each skill.
func mayCall(ctx context.Context, s skills.Skill) error {
	who := principals.From(ctx)
	switch {
	case who == nil || who.Name == principals.Root || s.Trust != skills.TrustApprove:
		return nil
	case s.FourEyes:
		return hint(fmt.Errorf("skill %s has four_eyes: %s cannot call it alone", s.Name, who.Name),
			"ask for the call with agent operate; then another approver decides it with agent approvals approve ID")
	case !who.May(principals.ApprovalsDecide):
		return hint(fmt.Errorf("skill %s has trust: approve, so its call needs the scope %s, which %s (role %s) does not have here",
			s.Name, principals.ApprovalsDecide, who.Name, who.Role),
			"ask for the call with agent operate; then an approver decides it with agent approvals approve ID")
	}
	return nil
}

// callSkill validates the call before it records anything, then runs it.
func (c *cli) callSkill(ctx context.Context, s *session, call app.SkillCall) error {
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	_, err = builtins.Put(ctx, prompt.Pool)
	prompt.Pool.Close()
	if err != nil {
		return err
	}
	skill, err := skills.Get(ctx, s.Pool, call.Skill)
	if err != nil {
		return skillHint(err)
	}
	if err := mayCall(ctx, skill); err != nil {
		return err
	}
	switch {
	case skill.TrialAt != nil && !skill.Enabled:
		c.infof("skill %s %s", skill.Name, printable(skill.OutOfService()))
		defer c.reportTrial(context.WithoutCancel(ctx), s, skill.Name)
	case !skill.Enabled:
		return hint(fmt.Errorf("skill %s %s", skill.Name, skill.OutOfService()), "enable it with agent skills enable %s",
			skill.Name)
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	if err := a.Registry.Check(skill, call.Args); err != nil {
		if invalid, ok := errors.AsType[*skills.InvalidParams](err); ok {
			return &exitError{exitUsage, hint(invalid, "see agent skills show %s", skill.Name)}
		}
		return err
	}
	acting, err := a.Loop.Agents.Default(ctx, s.Pool)
	if err != nil {
		return err
	}
	var ended executions.Execution
	err = a.RunWithLeases(ctx, func(ctx context.Context) error {
		ended, err = a.Engine.RunSync(ctx, executions.Spec{
			Flow: app.CallFlow, Surface: trace.Operate,
			Agent: acting.Name, Input: call,
		})
		return err
	})
	if err != nil {
		return err
	}
	ended = ended.Redacted(ctx)
	if ended.Status != executions.Completed {
		return &tracedError{hint(fmt.Errorf("call %s: %s: %s", skill.Name, ended.Status, postgres.Deref(ended.ErrorMessage)),
			"see agent trace %s", ended.TraceID), ended.TraceID}
	}
	return c.tryPrint(map[string]any{
		"skill": skill.Name, "execution_id": ended.ID, "trace_id": ended.TraceID, "result": ended.Result,
	}, func(w io.Writer) error { return writeResult(w, ended) })
}

// reportTrial prints the effect of a call on a skill's trial.
func (c *cli) reportTrial(ctx context.Context, s *session, name string) {
	skill, err := skills.Get(ctx, s.Pool, name)
	switch {
	case err != nil:
		c.infof("agent: %s", printable(err.Error()))
	case skill.Enabled:
		c.infof("skill %s is back in service", name)
	case skill.TrialAt == nil:
		c.infof("skill %s failed its trial and stays disabled; its cool-down restarts", name)
	default:
		c.infof("skill %s is still on trial: the call was no evidence", name)
	}
}

func writeResult(w io.Writer, x executions.Execution) error {
	answer, err := exactjson.Decode(x.Result)
	if err != nil {
		return errors.Join(errors.New("decode the skill's result"), err)
	}
	return encodeJSON(w, answer)
}

func (c *cli) selfhealCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "selfheal",
		Short: "Disable failing skills now",
		Long: `Disable skills that keep failing, and pause their automations. Every heartbeat does this too. AGENT_SELFHEAL_FAILURES,
_WINDOW, _RATE, _RATE_CALLS and _COOLDOWN set the rule.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			report, err := heal(cmd.Context(), s)
			if err != nil {
				return err
			}
			return c.print(report, func(w io.Writer) {
				fmt.Fprintf(w, "%d %s checked, %d taken out of service\n", report.Checked, plural("skill", report.Checked),
					len(report.Healed))
				for _, h := range report.Healed {
					fmt.Fprintf(w, "  %s: %s\n", h.Skill, h.Reason)
					for _, a := range h.AutomationsPaused {
						fmt.Fprintf(w, "    automation %s paused\n", a)
					}
					fmt.Fprintf(w, "    keep it as a case: agent eval add --outage %s\n", h.Skill)
				}
			})
		}),
	}
	cmd.AddCommand(c.selfhealReportCommand())
	return cmd
}

// heal runs self-heal and records each disabled skill in one transaction.
func heal(ctx context.Context, s *session) (selfheal.Report, error) {
	var report selfheal.Report
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate, Agent: admin})
	err := pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		var err error
		if report, err = selfheal.Run(ctx, tx, app.HealPolicy(s.config)); err != nil {
			return err
		}
		for _, h := range report.Healed {
			_, err := activity.Note(ctx, tx, activity.Entry{Skill: "heal_skill", Input: map[string]string{"skill": h.Skill}},
				activity.Outcome{Output: h})
			if err != nil {
				return err
			}
		}
		return nil
	})
	return report, err
}
