package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) skillsCommand() *cobra.Command {
	return group("skills", "List skills and their health, call, enable and disable them",
		c.skillsListCommand(), c.skillsShowCommand(), c.skillsSwitchCommand(true), c.skillsSwitchCommand(false),
		c.skillsCallCommand())
}

func (c *cli) skillsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List skills with their health over the last 7 days", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			rows, err := skillHealth(cmd.Context(), s)
			if err != nil {
				return err
			}
			return printRows(c, rows, "", "no skills; `agent apply DIR` creates some",
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

func skillHealth(ctx context.Context, s *session) ([]health, error) {
	sums, err := activity.CountedHealth(ctx, s.Pool, activity.HealthFilter{})
	if err != nil {
		return nil, fmt.Errorf("read skill health: %w", err)
	}
	rows := make([]health, len(sums.Lines))
	for i, h := range sums.Lines {
		rows[i] = health{
			h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.P95MS, h.State, h.DisabledBy,
			h.DisabledReason, h.DisabledAt,
		}
	}
	return rows, nil
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
	based = revisionFlag(cmd, skills.LockRevision)
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
				reenabled, err := selfheal.Reenable(ctx, tx, name, actor(ctx), reason)
				restored = append(restored, reenabled.Automations...)
				output["automations"] = restored
				return reenabled.Settled, err
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
