package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/memory"
)

// sharedMemory stands where an agent's name would.
const sharedMemory = "(shared)"

func (c *cli) memoryCommand() *cobra.Command {
	return group("memory", "See, search and change what the agent remembers",
		c.memoryListCommand(), c.memorySearchCommand(), c.memoryGetCommand(), c.memorySetCommand(), c.memoryForgetCommand(), c.memoryStatsCommand(),
		c.memoryConflictsCommand())
}

func memoryHint(err error) error {
	switch {
	case errors.Is(err, agents.ErrNotFound):
		return hint(err, "see agent agents ls")
	case errors.Is(err, memory.ErrNotFound):
		return hint(err, "see agent memory ls")
	case errors.Is(err, memory.ErrConflict):
		if c, ok := errors.AsType[*memory.ConflictError](err); ok && c.Theirs != nil {
			return hint(err, "agent memory get %s --category %s shows it; --if-revision %d replaces it", c.Key, c.Category, c.Theirs.Revision)
		}
		return hint(err, "--if-revision 0 writes it anew")
	case errors.Is(err, memory.ErrConflictNotFound), errors.Is(err, memory.ErrConflictDecided):
		return hint(err, "see agent memory conflicts ls")
	}
	return err
}

// agentFlag is whose memory a command is about.
func agentFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "agent", "", "the agent whose memory it is; the shared one when left out")
}

// memoryOf is the memory of the agent that --agent names.
func memoryOf(ctx context.Context, s *session, agent string) (memory.Owner, error) {
	owner, err := directory(s.config).MemoryOf(ctx, s.pool, agent)
	return memory.Owner(owner), memoryHint(err)
}

// writeMemories shows entries to a person.
func writeMemories(w io.Writer, entries []memory.Entry, none string) error {
	rows := make([][]string, len(entries))
	for i, e := range entries {
		rows[i] = []string{
			cmp.Or(string(e.Owner), sharedMemory), e.Category, e.Key, clipped(string(e.Value), 60), fmt.Sprint(e.Revision), when(e.UpdatedAt), maybe(e.ExpiresAt), e.TraceID,
		}
	}
	return table(w, none, []string{"AGENT", "CATEGORY", "KEY", "VALUE", "REVISION", "WRITTEN", "EXPIRES", "TRACE"}, rows)
}

func (c *cli) memoryListCommand() *cobra.Command {
	var f memory.Filter
	var agent string
	cmd := &cobra.Command{
		Use: "ls", Short: "List memories, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			if agent != "" {
				owner, err := memoryOf(cmd.Context(), s, agent)
				if err != nil {
					return err
				}
				f.Owner = &owner
			}
			all, err := memory.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(e memory.Entry) string { return e.ID })
			return c.print(listing(got, next), func(w io.Writer) error {
				return writeMemories(w, got, "nothing is remembered; heartbeats and `agent memory set` do")
			})
		}),
	}
	cmd.Flags().StringVar(&agent, "agent", "", "only what this agent remembers")
	cmd.Flags().StringVar(&f.Category, "category", "", "only this category")
	cmd.Flags().StringVar(&f.Prefix, "prefix", "", "only keys that begin so")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) memorySearchCommand() *cobra.Command {
	var limit int
	var agent string
	cmd := &cobra.Command{
		Use: "search WORDS", Short: "Search memories, the best match first", Args: args(1, 1, "what to search for, in quotes"),
		Example: `  agent memory search 'orders "grew by" -test'`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			index, err := newIndex(s.config, s.log)
			if err != nil {
				return err
			}
			got, err := index.Search(cmd.Context(), s.pool, owner, args[0], limit)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error { return writeMemories(w, got, "nothing matches") })
		}),
	}
	agentFlag(cmd, &agent)
	limitFlag(cmd.Flags(), &limit, 20)
	return cmd
}

func categoryFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "category", "general", "the category")
}

func (c *cli) memoryGetCommand() *cobra.Command {
	var category, agent string
	cmd := &cobra.Command{
		Use: "get KEY", Short: "Show one memory, whole", Args: args(1, 1, "a key"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			e, err := owner.Get(cmd.Context(), s.pool, category, args[0])
			if err != nil {
				return memoryHint(err)
			}
			return c.print(e, func(w io.Writer) error {
				fmt.Fprintf(w, "%s / %s, revision %d, written %s %s, expires %s\n", printable(e.Category), printable(e.Key), e.Revision, when(e.UpdatedAt), e.TraceID, maybe(e.ExpiresAt))
				writeJSON(w, "value", e.Value)
				return nil
			})
		}),
	}
	categoryFlag(cmd, &category)
	agentFlag(cmd, &agent)
	return cmd
}

// setMemory is what was stored, and what that replaced.
type setMemory struct {
	memory.Entry
	Replaced *memory.Entry `json:"replaced"` // nil: the key was new
}

func (c *cli) memorySetCommand() *cobra.Command {
	var note memory.Note
	var reason, agent string
	var named int
	cmd := &cobra.Command{
		Use: "set KEY VALUE", Short: "Keep something in the agent's memory", Args: args(2, 2, "a key and a value"),
		Long: `Keep a value, JSON or else text. It replaces what the key holds, says what that was, and records it, so that nothing is
lost unseen. --if-revision writes only if the key is at the revision that agent memory get has shown (0: if it is new); otherwise
nothing is written, and both values are shown. What looks like a secret is refused.`,
		Example: "  agent memory set contact '{\"name\": \"Ana\"}' --category admin --expires 720h\n  agent memory set contact Bea --if-revision 3",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			if note.Owner, err = memoryOf(cmd.Context(), s, agent); err != nil {
				return err
			}
			note.Revision = cmp.Or(revision, note.Revision)
			note.Key, note.Value = args[0], args[1]
			if json.Valid([]byte(args[1])) {
				note.Value = json.RawMessage(args[1])
			}
			set, err := setNote(cmd.Context(), s, note, reason)
			if errors.Is(err, memory.ErrInvalid) {
				return &exitError{exitUsage, seeHelp(err, cmd)}
			}
			if err != nil {
				return memoryHint(err)
			}
			return c.print(set, func(w io.Writer) error { return writeSet(w, set) })
		}),
	}
	categoryFlag(cmd, &note.Category)
	agentFlag(cmd, &agent)
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	cmd.Flags().DurationVar(&note.TTL, "expires", time.Duration(0), "how long it is kept; 0: for ever")
	ifRevisionFlag(cmd, &named, "write only if the key is at this revision; 0: only if it is new")
	cmd.Flags().IntVar(&note.Revision, "revision", 0, "the revision you have read, -1 for none")
	_ = cmd.Flags().MarkDeprecated("revision", "use --if-revision") // fails for a flag that is not there
	return cmd
}

// setNote stores a note in place of what is there, or based on the revision that it names. What it replaced is known
// for sure: it is based on that, and tried again when somebody was faster.
func setNote(ctx context.Context, s *session, note memory.Note, reason string) (set setMemory, err error) {
	const tries = 20
	for range tries {
		set, err = setOnce(ctx, s, note, reason)
		if note.Revision != 0 || !errors.Is(err, memory.ErrConflict) {
			break
		}
	}
	return set, err
}

func setOnce(ctx context.Context, s *session, note memory.Note, reason string) (set setMemory, err error) {
	output := map[string]any{}
	_, err = actSaying(ctx, s, "set_memory", memoryInput(note.Owner, note.Category, note.Key, reason), output,
		func(tx pgx.Tx, traceID string) (bool, error) {
			note.TraceID = traceID
			there, err := note.Owner.Get(ctx, tx, note.Category, note.Key)
			switch {
			case err == nil:
				set.Replaced = &there
				note.Revision = cmp.Or(note.Revision, there.Revision)
				output["replaced"] = map[string]any{"revision": there.Revision, "value": there.Value, "trace_id": there.TraceID}
			case errors.Is(err, memory.ErrNotFound):
				note.Revision = cmp.Or(note.Revision, memory.Absent)
			default:
				return false, err
			}
			set.Entry, err = memory.Save(ctx, tx, note)
			output["revision"] = set.Revision
			return err == nil, err
		})
	return set, err
}

// memoryInput is what the record of a change says.
func memoryInput(owner memory.Owner, category, key, reason string) map[string]any {
	input := map[string]any{"category": category, "key": key, "reason": reason}
	if owner != memory.Shared {
		input["agent"] = owner
	}
	return input
}

func writeSet(w io.Writer, set setMemory) error {
	if _, err := fmt.Fprintf(w, "%s / %s is at revision %d\n", printable(set.Category), printable(set.Key), set.Revision); err != nil || set.Replaced == nil {
		return err
	}
	_, err := fmt.Fprintf(w, "it replaced revision %d, written %s %s: %s\n", set.Replaced.Revision, when(set.Replaced.UpdatedAt),
		set.Replaced.TraceID, printable(clipped(string(set.Replaced.Value), 300)))
	return err
}

func (c *cli) memoryForgetCommand() *cobra.Command {
	var category, reason, agent string
	var named int
	cmd := &cobra.Command{
		Use: "forget KEY", Short: "Drop one memory, for good", Args: args(1, 1, "a key"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			changed, err := act(cmd.Context(), s, "forget_memory", memoryInput(owner, category, args[0], reason),
				func(tx pgx.Tx, _ string) (bool, error) {
					return owner.Forget(cmd.Context(), tx, category, args[0], revision)
				})
			if err != nil {
				return memoryHint(err)
			}
			return c.print(map[string]any{"category": category, "key": args[0], "forgotten": changed}, func(w io.Writer) error {
				said := "forgotten"
				if !changed {
					said = "was not remembered"
				}
				_, err := fmt.Fprintf(w, "%s / %s: %s\n", printable(category), printable(args[0]), said)
				return err
			})
		}),
	}
	categoryFlag(cmd, &category)
	agentFlag(cmd, &agent)
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	ifRevisionFlag(cmd, &named, "only if the key is at this revision")
	return cmd
}

func (c *cli) memoryStatsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats", Short: "Count memories and bytes by category", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := memory.Stats(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, st := range got {
					rows[i] = []string{
						cmp.Or(string(st.Owner), sharedMemory), st.Category, fmt.Sprint(st.Entries), fmt.Sprint(st.Bytes), fmt.Sprint(st.Expiring), when(st.UpdatedAt),
					}
				}
				return table(w, "nothing is remembered", []string{"AGENT", "CATEGORY", "ENTRIES", "BYTES", "EXPIRING", "LAST WRITTEN"}, rows)
			})
		}),
	}
}

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
