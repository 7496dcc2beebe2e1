package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/memory"
)

func (c *cli) memoryConflictsCommand() *cobra.Command {
	return group("conflicts", "List and decide writes rejected because their key had changed",
		c.memoryConflictsListCommand(), c.memoryConflictsShowCommand(), c.memoryConflictsResolveCommand())
}

func (c *cli) memoryConflictsListCommand() *cobra.Command {
	var f memory.ConflictFilter
	cmd := &cobra.Command{
		Use: "ls", Short: "List memory conflicts, newest first; default the open ones",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			list, next, err := readPage(cmd.Context(), s, memory.Conflicts, &f, &f.Limit,
				func(x memory.Conflict) string { return x.ID })
			if err != nil {
				return err
			}
			return printRows(c, list, next, "no memory conflicts",
				[]string{
					"CONFLICT", "AGENT", "CATEGORY", "KEY", "STATUS", "NOT WRITTEN", "THERE NOW", "REVISION", "SINCE",
					"TRACE",
				}, func(x memory.Conflict) []string {
					return []string{
						x.ID, cmp.Or(string(x.Owner), sharedMemory), x.Category, x.Key, x.Status, truncate(string(x.Value), 40),
						valueOrNothing(x.Current), fmt.Sprint(x.Revision), formatTime(x.CreatedAt), x.TraceID,
					}
				})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state, or all", memory.ConflictOpen, memory.ConflictKept,
		memory.ConflictTaken, "all")
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func valueOrNothing(value json.RawMessage) string {
	if value == nil {
		return "nothing"
	}
	return truncate(string(value), 40)
}

func (c *cli) memoryConflictsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one memory conflict with both values",
		Args: rowID("a memory conflict", "agent memory conflicts ls"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			x, err := memory.GetConflict(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return memoryHint(err)
			}
			return c.print(x, func(w io.Writer) { writeConflict(w, x) })
		}),
	}
}

func writeConflict(w io.Writer, x memory.Conflict) {
	fmt.Fprintf(w, "%s / %s, %s since %s\n", printable(x.Category), printable(x.Key), x.Status, formatTime(x.CreatedAt))
	if x.DecidedAt != nil {
		fmt.Fprintf(w, "decided by %s %s: %s\n", printable(x.DecidedBy), formatTime(*x.DecidedAt), printable(x.DecidedReason))
	}
	fmt.Fprintf(w, "written by %s, which had read revision %d; found was revision %d of %s\n", x.TraceID, x.IfRevision,
		x.FoundRevision, x.FoundTraceID)
	writeJSON(w, "not written", x.Value)
	writeJSON(w, "found", x.FoundValue)
	if x.Revision != x.FoundRevision {
		fmt.Fprintf(w, "\nthe key is at revision %d now\n", x.Revision)
		writeJSON(w, "there now", x.Current)
	}
}

func (c *cli) memoryConflictsResolveCommand() *cobra.Command {
	var take, reason string
	var named int
	cmd := &cobra.Command{
		Use: "resolve ID --take theirs|mine", Short: "Decide a memory conflict: keep theirs, or replace it with mine",
		Args: rowID("a memory conflict", "agent memory conflicts ls"),
		Long: `Decide a memory conflict. "theirs" keeps the stored value. "mine" replaces it with the late value, if the key
is still at the revision of the conflict, or at --if-revision. Otherwise nothing is written and the conflict stays
open.`,
		Example: "  agent memory conflicts resolve 0192f0c1-2b3c-7def-8a12-3456789abcde --take mine",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if take == "" {
				return usageError("choose a value: --take theirs or --take mine")
			}
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			var decided memory.Conflict
			output := map[string]any{}
			input := map[string]any{
				"conflict": args[0],
				"decision": map[bool]string{true: "take", false: "keep"}[take == "mine"], "reason": reason,
			}
			_, err = recordChangeWith(cmd.Context(), s, "decide_memory_conflict", input, output,
				func(tx pgx.Tx, traceID string) (bool, error) {
					var err error
					decided, err = memory.Decide(cmd.Context(), tx, args[0], memory.Decision{
						Take: take == "mine", By: actor(cmd.Context()), Reason: reason, IfRevision: revision, TraceID: traceID,
					})
					maps.Copy(input, memoryInput(decided.Owner, decided.Category, decided.Key, reason))
					output["status"], output["revision"] = decided.Status, decided.Revision
					return err == nil, err
				})
			if err != nil {
				return memoryHint(err)
			}
			return c.printf(decided, "%s / %s: %s; the key is at revision %d\n", printable(decided.Category),
				printable(decided.Key), decided.Status, decided.Revision)
		}),
	}
	enumFlag(cmd.Flags(), &take, "take", "theirs, or mine", "theirs", "mine")
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	ifRevisionFlag(cmd, &named, "take mine only if the key is at this revision; 0: only if it holds nothing")
	return cmd
}
