package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/approvals"
)

func (c *cli) approvalsCommand() *cobra.Command {
	return group("approvals", "See and decide the calls that wait for leave",
		c.approvalsListCommand(), c.approvalsShowCommand(), c.decideCommand(true), c.decideCommand(false))
}

func (c *cli) approvalsListCommand() *cobra.Command {
	var f approvals.Filter
	var all bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List calls that wait for a decision, oldest first; with --all every one, newest first",
		Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := approvals.Pending(cmd.Context(), s.pool, 200)
			if all || f.Status != "" || f.TraceIDs != nil {
				f.Limit = 200
				got, err = approvals.List(cmd.Context(), s.pool, f)
			}
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, a := range got {
					rows[i] = []string{a.ID, a.SkillName, a.Status, clipped(string(a.Arguments), 60), when(a.CreatedAt), when(a.ExpiresAt), a.TraceID, clipped(a.Reason, 80)}
				}
				return table(w, "nothing waits for approval",
					[]string{"APPROVAL", "SKILL", "STATUS", "ARGUMENTS", "ASKED", "EXPIRES", "TRACE", "REASON"}, rows)
			})
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "decided and expired ones too")
	statusFlag(cmd.Flags(), &f.Status, "only those that are", "pending", "approved", "rejected", "expired", "consumed")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	return cmd
}

func (c *cli) approvalsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one call: who asked for it, all of its arguments, what was decided", Args: rowID("an approval", "agent approvals ls --all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := approvals.Get(cmd.Context(), s.pool, args[0])
			if errors.Is(err, approvals.ErrNotFound) {
				return hint(err, "see agent approvals ls --all")
			}
			if err != nil {
				return err
			}
			return c.print(a, func(w io.Writer) error { return writeApproval(w, a) })
		}),
	}
}

// writeApproval shows the arguments exactly as they would be used.
func writeApproval(w io.Writer, a approvals.Approval) error {
	lines := [][2]string{
		{"skill", fmt.Sprintf("%s, revision %d", a.SkillName, a.SkillRevision)},
		{"status", a.Status},
		{"asked", when(a.CreatedAt)},
		{"expires", when(a.ExpiresAt)},
		{"trace", a.TraceID + " (agent trace " + a.TraceID + ")"},
		{"execution", deref(a.ExecutionID)},
	}
	if asked := a.AskedBy(); asked != "" {
		lines = append(lines, [2]string{"asked by", asked})
	}
	if a.Waits() {
		lines = append(lines, [2]string{"waits", "its execution waits for the decision"})
	}
	if a.DecidedAt != nil {
		lines = append(lines, [2]string{"decided", when(*a.DecidedAt) + " by " + a.DecidedBy}, [2]string{"reason", a.Reason})
	}
	if a.ConsumedAt != nil {
		lines = append(lines, [2]string{"used", when(*a.ConsumedAt)})
	}
	fmt.Fprintf(w, "approval %s\n", a.ID)
	for _, l := range lines {
		fmt.Fprintf(w, "  %-10s %s\n", l[0], printable(l[1]))
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, a.Arguments, "  ", "  "); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "  arguments\n  %s\n", escaped(pretty.String()))
	return err
}

// escaped is JSON in which what does not print is an escape: what is approved has to be what is seen.
func escaped(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r == '\n' || unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}

func (c *cli) decideCommand(approve bool) *cobra.Command {
	var reason string
	use, short := "reject ID", "Refuse a call; who waits for it is told"
	if approve {
		use, short = "approve ID", "Allow a call once, with exactly these arguments; who waits for it goes on, else the next heartbeat makes it"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: rowID("an approval", "agent approvals ls --all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			decided, err := approvals.Decide(cmd.Context(), s.pool, args[0], approve, "admin", reason)
			if late, ok := errors.AsType[*approvals.DecidedError](err); ok {
				return hint(err, "see agent approvals show %s", late.Approval.ID)
			}
			if errors.Is(err, approvals.ErrNotFound) {
				return hint(err, "see agent approvals ls --all")
			}
			if err != nil {
				return err
			}
			return c.print(decided, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s %s: %s %s\n", decided.Status, decided.ID, decided.SkillName, clipped(string(decided.Arguments), 200))
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}
