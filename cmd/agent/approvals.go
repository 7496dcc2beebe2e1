package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
)

func (c *cli) approvalsCommand() *cobra.Command {
	return group("approvals", "List and decide calls that need approval",
		c.approvalsListCommand(), c.approvalsShowCommand(), c.decideCommand(true), c.decideCommand(false))
}

// maxApprovals bounds the listed approvals.
const maxApprovals = 200

func (c *cli) approvalsListCommand() *cobra.Command {
	f := approvals.Filter{Limit: maxApprovals}
	var all bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List pending calls, oldest first; with --all every call, newest first; at most 200",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			var calls []approvals.Approval
			var err error
			empty := "no pending approvals"
			if all || f.Status != "" || f.TraceIDs != nil {
				empty = "no matching approvals"
				calls, err = approvals.List(cmd.Context(), s.Pool, f)
			} else {
				calls, err = approvals.Pending(cmd.Context(), s.Pool, maxApprovals)
			}
			if err != nil {
				return err
			}
			return printRows(c, calls, "", empty,
				[]string{"APPROVAL", "SKILL", "STATUS", "ARGUMENTS", "ASKED", "EXPIRES", "TRACE", "REASON"},
				func(a approvals.Approval) []string {
					return []string{
						a.ID, a.SkillName, a.Status, truncate(string(a.Arguments), 60), formatTime(a.CreatedAt),
						formatTime(a.ExpiresAt), a.TraceID, truncate(a.Reason, 80),
					}
				})
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "include decided and expired calls")
	statusFlag(cmd.Flags(), &f.Status, "only this state", "pending", "approved", "rejected", "expired", "consumed")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	return cmd
}

func (c *cli) approvalsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one call: requester, arguments, decision",
		Args: rowID("an approval", "agent approvals ls --all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := approvals.Get(cmd.Context(), s.Pool, args[0])
			if errors.Is(err, approvals.ErrNotFound) {
				return hint(err, "see agent approvals ls --all")
			}
			if err != nil {
				return err
			}
			return c.tryPrint(a, func(w io.Writer) error { return writeApproval(w, a) })
		}),
	}
}

// fourEyes explains a decision with four eyes. A holder of AGENT_ADMIN_TOKEN or of the database may always decide.
func fourEyes(a approvals.Approval) string {
	bound := slices.DeleteFunc(slices.Clone(a.RequestedBy), func(name string) bool {
		return name == principals.Root || name == activity.Admin
	})
	switch {
	case a.RootOnly():
		return "the requester is unknown: only root or the database decides"
	case len(bound) > 0:
		return "requesters cannot decide: " + strings.Join(bound, ", ") + "; root and the database can"
	case len(a.RequestedBy) > 0:
		return "the admin requested it, and may decide"
	}
	return "no principal requested it: every approver may decide"
}

// writeApproval prints the arguments exactly as the call would use them.
func writeApproval(w io.Writer, a approvals.Approval) error {
	lines := [][2]string{
		{"skill", fmt.Sprintf("%s, revision %d", a.SkillName, a.SkillRevision)},
		{"status", a.Status},
		{"requested", formatTime(a.CreatedAt)},
		{"expires", formatTime(a.ExpiresAt)},
		{"trace", a.TraceID + " (agent trace " + a.TraceID + ")"},
		{"execution", postgres.Deref(a.ExecutionID)},
	}
	if asked := a.AskedBy(); asked != "" {
		lines = append(lines, [2]string{"requested by", asked})
	}
	if a.FourEyes {
		lines = append(lines, [2]string{"four eyes", fourEyes(a)})
	}
	if a.Waits() {
		lines = append(lines, [2]string{"waits", "its execution waits for the decision"})
	}
	if a.DecidedAt != nil {
		lines = append(lines, [2]string{"decided", formatTime(*a.DecidedAt) + " by " + a.Decider()},
			[2]string{"reason", a.Reason})
	}
	if a.ConsumedAt != nil {
		lines = append(lines, [2]string{"used", formatTime(*a.ConsumedAt)})
	}
	fmt.Fprintf(w, "approval %s\n", a.ID)
	for _, l := range lines {
		fmt.Fprintf(w, "  %-12s %s\n", l[0], printable(l[1]))
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, a.Arguments, "  ", "  "); err != nil {
		return err
	}
	fmt.Fprintf(w, "  arguments\n  %s\n", escapeJSON(pretty.String()))
	return nil
}

func (c *cli) decideCommand(approve bool) *cobra.Command {
	var reason string
	use, short := "reject ID", "Reject a call; its execution resumes with the rejection"
	if approve {
		use, short = "approve ID", "Approve one call with exactly these arguments; its execution resumes, or a "+
			"heartbeat of its or the default agent runs it"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: rowID("an approval", "agent approvals ls --all"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			decided, err := approvals.Decide(cmd.Context(), s.Pool, args[0], approve, actor(cmd.Context()), reason)
			if late, ok := errors.AsType[*approvals.DecidedError](err); ok {
				return hint(err, "see agent approvals show %s", late.Approval.ID)
			}
			if errors.Is(err, approvals.ErrFourEyes) {
				return hint(err, "ask another approver; root, by AGENT_ADMIN_TOKEN or the database, may decide")
			}
			if errors.Is(err, approvals.ErrNotFound) {
				return hint(err, "see agent approvals ls --all")
			}
			if err != nil {
				return err
			}
			return c.printf(decided, "%s %s: %s %s\n", decided.Status, decided.ID, decided.SkillName,
				truncate(escapeJSON(string(decided.Arguments)), 200))
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}
