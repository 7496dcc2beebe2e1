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
	return group("conflicts", "See and decide what was not written because its key had changed meanwhile",
		c.memoryConflictsListCommand(), c.memoryConflictsShowCommand(), c.memoryConflictsResolveCommand())
}

func (c *cli) memoryConflictsListCommand() *cobra.Command {
	var f memory.ConflictFilter
	cmd := &cobra.Command{
		Use: "ls", Short: "List memory conflicts, newest first; those that are open, unless --status says otherwise", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := memory.Conflicts(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(x memory.Conflict) string { return x.ID })
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, x := range got {
					rows[i] = []string{
						x.ID, cmp.Or(string(x.Owner), sharedMemory), x.Category, x.Key, x.Status, clipped(string(x.Value), 40), nothingOr(x.Current), fmt.Sprint(x.Revision), when(x.CreatedAt), x.TraceID,
					}
				}
				return table(w, "no memory conflict; nothing was written too late",
					[]string{"CONFLICT", "AGENT", "CATEGORY", "KEY", "STATUS", "NOT WRITTEN", "THERE NOW", "REVISION", "SINCE", "TRACE"}, rows)
			})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state, or all", memory.ConflictOpen, memory.ConflictKept, memory.ConflictTaken, "all")
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func nothingOr(value json.RawMessage) string {
	if value == nil {
		return "nothing"
	}
	return clipped(string(value), 40)
}

func (c *cli) memoryConflictsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one memory conflict with both values", Args: rowID("a memory conflict", "agent memory conflicts ls"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			x, err := memory.GetConflict(cmd.Context(), s.pool, args[0])
			if err != nil {
				return memoryHint(err)
			}
			return c.print(x, func(w io.Writer) error { return writeConflict(w, x) })
		}),
	}
}

// writeConflict shows a conflict to a person.
func writeConflict(w io.Writer, x memory.Conflict) error {
	fmt.Fprintf(w, "%s / %s, %s since %s\n", printable(x.Category), printable(x.Key), x.Status, when(x.CreatedAt))
	if x.DecidedAt != nil {
		fmt.Fprintf(w, "decided by %s %s: %s\n", printable(x.DecidedBy), when(*x.DecidedAt), printable(x.DecidedReason))
	}
	fmt.Fprintf(w, "written by %s, which had read revision %d; found was revision %d of %s\n", x.TraceID, x.IfRevision, x.FoundRevision, x.FoundTraceID)
	writeJSON(w, "not written", x.Value)
	writeJSON(w, "found", x.FoundValue)
	if x.Revision != x.FoundRevision {
		fmt.Fprintf(w, "\nthe key is at revision %d now\n", x.Revision)
		writeJSON(w, "there now", x.Current)
	}
	return nil
}

func (c *cli) memoryConflictsResolveCommand() *cobra.Command {
	var take, reason string
	var named int
	cmd := &cobra.Command{
		Use: "resolve ID --take theirs|mine", Short: "Decide a memory conflict: theirs stays, or mine, the late value, replaces it",
		Args: rowID("a memory conflict", "agent memory conflicts ls"),
		Long: `Decide a memory conflict. "theirs" is what is there, and stays; "mine" is the late value, and replaces it if the key is still
as it was when the conflict arose, or at the revision that --if-revision names. Otherwise nothing is written, and the conflict stays open.`,
		Example: "  agent memory conflicts resolve 0192f0c1-2b3c-7def-8a12-3456789abcde --take mine",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if take == "" {
				return usageError("say which value to take: --take theirs or --take mine")
			}
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			var decided memory.Conflict
			output := map[string]any{}
			input := map[string]any{"conflict": args[0], "decision": map[bool]string{true: "take", false: "keep"}[take == "mine"], "reason": reason}
			_, err = actSaying(cmd.Context(), s, "decide_memory_conflict", input, output,
				func(tx pgx.Tx, traceID string) (bool, error) {
					var err error
					decided, err = memory.Decide(cmd.Context(), tx, args[0], memory.Decision{
						Take: take == "mine", By: admin, Reason: reason, IfRevision: revision, TraceID: traceID,
					})
					maps.Copy(input, memoryInput(decided.Owner, decided.Category, decided.Key, reason))
					output["status"], output["revision"] = decided.Status, decided.Revision
					return err == nil, err
				})
			if err != nil {
				return memoryHint(err)
			}
			return c.print(decided, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s / %s: %s; the key is at revision %d\n", printable(decided.Category), printable(decided.Key), decided.Status, decided.Revision)
				return err
			})
		}),
	}
	wordFlag(cmd.Flags(), &take, "take", "theirs, or mine", "theirs", "mine")
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "why, for the record")
	ifRevisionFlag(cmd, &named, "take mine only if the key is at this revision; 0: only if it holds nothing")
	return cmd
}
