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
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) skillsCommand() *cobra.Command {
	return group("skills", "See skills and their health, call one, take them out of service and back",
		c.skillsListCommand(), c.skillsShowCommand(), c.skillsSwitchCommand(true), c.skillsSwitchCommand(false),
		c.skillsCallCommand())
}

// health is what agent_skill_health says of a skill, at a cost that does not grow with the log: percentiles are right to 2.5 per cent.
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
		Use: "ls", Short: "List skills with their health over the last 7 days", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := skillHealth(cmd.Context(), s)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, h := range got {
					rate := "–"
					if h.SuccessRate != nil {
						rate = percent(*h.SuccessRate)
					}
					rows[i] = []string{h.Skill, h.State, fmt.Sprint(h.Calls), rate, fmt.Sprint(h.Streak), h.DisabledBy, clipped(h.DisabledReason, 70)}
				}
				return table(w, "no skills; `agent apply DIR` brings some",
					[]string{"SKILL", "STATE", "CALLS", "SUCCESS", "FAILED IN A ROW", "DISABLED BY", "REASON"}, rows)
			})
		}),
	}
}

func skillHealth(ctx context.Context, s *session) ([]health, error) {
	sums, err := activity.CountedHealth(ctx, s.pool, activity.HealthFilter{})
	if err != nil {
		return nil, fmt.Errorf("read skill health: %w", err)
	}
	got := make([]health, len(sums.Lines))
	for i, h := range sums.Lines {
		got[i] = health{h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.P95MS, h.State, h.DisabledBy, h.DisabledReason, h.DisabledAt}
	}
	return got, nil
}

func (c *cli) skillsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one skill: definition, state, evidence", Args: args(1, 1, "a skill's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			skill, err := skills.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return skillHint(err)
			}
			return c.print(skill, func(w io.Writer) error {
				return writeSkill(w, skill)
			})
		}),
	}
}

// writeSkill shows a skill to a person.
func writeSkill(w io.Writer, s skills.Skill) error {
	state := "in service"
	if !s.Enabled {
		state = "disabled by " + s.DisabledBy + ": " + printable(s.DisabledReason)
	}
	fmt.Fprintf(w, "%s\n%s\n\n", s.Name, s.Description)
	for _, l := range [][2]string{
		{"state", state},
		{"scope", s.Scope},
		{"trust", s.Trust},
		{"idempotent", map[bool]string{true: "yes", false: "no: a call is never repeated after a crash"}[s.Idempotent]},
		{"timeout", s.Timeout().String()},
		{"handler", s.Handler},
		{"revision", fmt.Sprintf("%d of what a call does; %d of that and its state, for --if-revision", s.Revision, s.StateRevision)},
	} {
		fmt.Fprintf(w, "%-11s %s\n", l[0], l[1])
	}
	writeJSON(w, "parameters", s.Parameters())
	writeJSON(w, "config", s.Config)
	writeJSON(w, "evidence", s.Evidence)
	return nil
}

// writeJSON shows a value under a heading, texts of several lines as they are written; an empty one is left out.
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

// skillHint says where names are listed.
func skillHint(err error) error {
	if errors.Is(err, skills.ErrNotFound) {
		return hint(err, "see agent skills ls")
	}
	return staleHint(err, "agent skills show NAME")
}

// skillsSwitchCommand is enable or disable.
func (c *cli) skillsSwitchCommand(enable bool) *cobra.Command {
	var reason string
	var based *basis
	use, short := "disable NAME", "Take a skill out of service, and pause its automations"
	if enable {
		use, short = "enable NAME", "Put a skill back into service, with the automations that were paused for it"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "a skill's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.switchSkill(cmd.Context(), s, args[0], enable, reason, func(tx pgx.Tx) error { return based.hold(cmd, tx, args[0]) })
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "why, for the record")
	based = basisFlag(cmd, skills.AtRevision)
	return cmd
}

// switchSkill changes a skill's state and records that as an admin's act, in one transaction, unless hold refuses.
func (c *cli) switchSkill(ctx context.Context, s *session, name string, enable bool, reason string, hold func(tx pgx.Tx) error) error {
	paused, restored := []string{}, []string{}
	verb, output := map[bool]string{true: "enable_skill", false: "disable_skill"}[enable], map[string]any{}
	changed, err := actSaying(ctx, s, verb, map[string]any{"skill": name, "reason": reason}, output, func(tx pgx.Tx, _ string) (changed bool, err error) {
		if err := hold(tx); err != nil {
			return false, err
		}
		if enable {
			got, err := selfheal.Reenable(ctx, tx, name, admin, reason)
			restored = append(restored, got.Automations...)
			output["automations"] = restored
			return got.Settled, err
		}
		if changed, err = skills.Disable(ctx, tx, name, admin, reason, map[string]string{"by": "command line"}); err == nil {
			paused, err = automations.PausedFor(ctx, tx, name)
		}
		output["automations"] = paused
		return changed, err
	})
	if err != nil {
		return skillHint(err)
	}
	state := map[bool]string{true: "enabled", false: "disabled"}[enable]
	return c.print(map[string]any{"skill": name, "state": state, "changed": changed, "automations_paused": paused, "automations_restored": restored}, func(w io.Writer) error {
		said := map[bool]string{true: "in service", false: "out of service"}[enable]
		if !changed {
			_, err := fmt.Fprintf(w, "%s was %s already\n", name, said)
			return err
		}
		fmt.Fprintf(w, "%s is %s\n", name, said)
		for _, a := range paused {
			fmt.Fprintf(w, "automation %s is paused until it is enabled\n", a)
		}
		for _, a := range restored {
			fmt.Fprintf(w, "automation %s runs again\n", a)
		}
		return nil
	})
}
