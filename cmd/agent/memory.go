package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/memory"
)

// sharedMemory replaces an agent's name in tables.
const sharedMemory = "(shared)"

func (c *cli) memoryCommand() *cobra.Command {
	return group("memory", "List, search and change the agent's memory",
		c.memoryListCommand(), c.memorySearchCommand(), c.memoryGetCommand(), c.memorySetCommand(), c.memoryForgetCommand(),
		c.memoryStatsCommand(),
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
			return hint(err, "agent memory get %s --category %s shows it; --if-revision %d replaces it", c.Key,
				c.Category, c.Theirs.Revision)
		}
		return hint(err, "--if-revision 0 creates it")
	case errors.Is(err, memory.ErrConflictNotFound), errors.Is(err, memory.ErrConflictDecided):
		return hint(err, "see agent memory conflicts ls")
	}
	return err
}

// agentFlag selects the memory's owner.
func agentFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "agent", "", "the owner of the memory; default the shared memory")
}

func memoryOf(ctx context.Context, s *session, agent string) (memory.Owner, error) {
	owner, err := app.NewDirectory(s.config).MemoryOf(ctx, s.Pool, agent)
	return memory.Owner(owner), memoryHint(err)
}

func writeMemories(w io.Writer, entries []memory.Entry, none string) {
	writeRows(w, none,
		[]string{"AGENT", "CATEGORY", "KEY", "VALUE", "REVISION", "WRITTEN", "EXPIRES", "TRACE"}, entries,
		func(e memory.Entry) []string {
			return []string{
				cmp.Or(string(e.Owner), sharedMemory), e.Category, e.Key, truncate(string(e.Value), 60), fmt.Sprint(e.Revision),
				formatTime(e.UpdatedAt), timeOrDash(e.ExpiresAt), e.TraceID,
			}
		})
}

func (c *cli) memoryListCommand() *cobra.Command {
	var f memory.Filter
	var agent string
	cmd := &cobra.Command{
		Use: "ls", Short: "List memories, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			if agent != "" {
				owner, err := memoryOf(cmd.Context(), s, agent)
				if err != nil {
					return err
				}
				f.Owner = &owner
			}
			entries, next, err := readPage(cmd.Context(), s, memory.List, &f, &f.Limit,
				func(e memory.Entry) string { return e.ID })
			if err != nil {
				return err
			}
			return c.print(pageOf(entries, next), func(w io.Writer) {
				writeMemories(w, entries, "no memories; heartbeats and `agent memory set` create some")
			})
		}),
	}
	cmd.Flags().StringVar(&agent, "agent", "", "only this agent's memory")
	cmd.Flags().StringVar(&f.Category, "category", "", "only this category")
	cmd.Flags().StringVar(&f.Prefix, "prefix", "", "only keys with this prefix")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) memorySearchCommand() *cobra.Command {
	var limit int
	var agent string
	cmd := &cobra.Command{
		Use: "search WORDS", Short: "Search memories, best match first", Args: positionalArgs(1, 1, "a query in quotes"),
		Example: `  agent memory search 'orders "grew by" -test'`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			index, err := app.NewIndex(s.config, s.log)
			if err != nil {
				return err
			}
			matches, err := index.Search(cmd.Context(), s.Pool, owner, args[0], limit)
			if err != nil {
				return err
			}
			return c.print(pageOf(matches, ""), func(w io.Writer) { writeMemories(w, matches, "nothing matches") })
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
		Use: "get KEY", Short: "Show one memory", Args: positionalArgs(1, 1, "a key"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			e, err := owner.Get(cmd.Context(), s.Pool, category, args[0])
			if err != nil {
				return memoryHint(err)
			}
			return c.print(e, func(w io.Writer) {
				fmt.Fprintf(w, "%s / %s, revision %d, written %s %s, expires %s\n", printable(e.Category), printable(e.Key),
					e.Revision, formatTime(e.UpdatedAt), e.TraceID, timeOrDash(e.ExpiresAt))
				writeJSON(w, "value", e.Value)
			})
		}),
	}
	categoryFlag(cmd, &category)
	agentFlag(cmd, &agent)
	return cmd
}

// storedMemory is the JSON result of agent memory set.
type storedMemory struct {
	memory.Entry
	Replaced *memory.Entry `json:"replaced"` // nil for a new key
}

func (c *cli) memorySetCommand() *cobra.Command {
	var note memory.Note
	var reason, agent string
	var named int
	cmd := &cobra.Command{
		Use: "set KEY VALUE", Short: "Store a memory", Args: positionalArgs(2, 2, "a key and a value"),
		Long: `Store a value, JSON or else text. It prints and records the replaced value. --if-revision writes only if the
key is at the revision of agent memory get (0: new); otherwise it writes nothing and shows both values. It rejects
values that look like secrets.`,
		Example: "  agent memory set contact '{\"name\": \"Ana\"}' --category admin --expires 30d\n  agent memory set " +
			"contact Bea --if-revision 3",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			var err error
			if note.Revision, err = revisionOf(cmd, named); err != nil {
				return err
			}
			if note.Owner, err = memoryOf(cmd.Context(), s, agent); err != nil {
				return err
			}
			note.Key, note.Value = args[0], args[1]
			if json.Valid([]byte(args[1])) {
				note.Value = json.RawMessage(args[1])
			}
			set, err := storeNote(cmd.Context(), s, note, reason)
			if errors.Is(err, memory.ErrInvalid) {
				return &exitError{exitUsage, helpHint(err, cmd)}
			}
			if err != nil {
				return memoryHint(err)
			}
			return c.print(set, func(w io.Writer) { writeSet(w, set) })
		}),
	}
	categoryFlag(cmd, &note.Category)
	agentFlag(cmd, &agent)
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	lifetimeFlag(cmd.Flags(), &note.TTL, "expires", "lifetime: 12h, 7d; 0 keeps it for ever")
	ifRevisionFlag(cmd, &named, "write only if the key is at this revision; 0: only if it is new")
	return cmd
}

// storeNote stores a note. Without an expected revision it retries up to 20 conflicts, so the replaced value is exact.
func storeNote(ctx context.Context, s *session, note memory.Note, reason string) (set storedMemory, err error) {
	const tries = 20
	for range tries {
		set, err = storeNoteOnce(ctx, s, note, reason)
		if note.Revision != 0 || !errors.Is(err, memory.ErrConflict) {
			break
		}
	}
	return set, err
}

func storeNoteOnce(ctx context.Context, s *session, note memory.Note, reason string) (set storedMemory, err error) {
	output := map[string]any{}
	_, err = recordChangeWith(ctx, s, "set_memory", memoryInput(note.Owner, note.Category, note.Key, reason), output,
		func(tx pgx.Tx, traceID string) (bool, error) {
			note.TraceID = traceID
			current, err := note.Owner.Get(ctx, tx, note.Category, note.Key)
			switch {
			case err == nil:
				set.Replaced = &current
				note.Revision = cmp.Or(note.Revision, current.Revision)
				output["replaced"] = map[string]any{
					"revision": current.Revision, "value": current.Value, "trace_id": current.TraceID,
				}
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

// memoryInput describes a change of memory for its record.
func memoryInput(owner memory.Owner, category, key, reason string) map[string]any {
	input := map[string]any{"category": category, "key": key, "reason": reason}
	if owner != memory.Shared {
		input["agent"] = owner
	}
	return input
}

func writeSet(w io.Writer, set storedMemory) {
	fmt.Fprintf(w, "%s / %s is at revision %d\n", printable(set.Category), printable(set.Key), set.Revision)
	if old := set.Replaced; old != nil {
		fmt.Fprintf(w, "it replaced revision %d, written %s %s: %s\n", old.Revision, formatTime(old.UpdatedAt), old.TraceID,
			printable(truncate(string(old.Value), 300)))
	}
}

func (c *cli) memoryForgetCommand() *cobra.Command {
	var category, reason, agent string
	var named int
	cmd := &cobra.Command{
		Use: "forget KEY", Short: "Delete one memory permanently", Args: positionalArgs(1, 1, "a key"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			revision, err := revisionOf(cmd, named)
			if err != nil {
				return err
			}
			owner, err := memoryOf(cmd.Context(), s, agent)
			if err != nil {
				return err
			}
			_, err = recordChange(cmd.Context(), s, "forget_memory", memoryInput(owner, category, args[0], reason),
				func(tx pgx.Tx, _ string) (bool, error) {
					forgotten, err := owner.Forget(cmd.Context(), tx, category, args[0], revision)
					if err == nil && !forgotten {
						err = fmt.Errorf("forget memory %q of category %q: %w", args[0], category, memory.ErrNotFound)
					}
					return forgotten, err
				})
			if err != nil {
				return memoryHint(err)
			}
			return c.print(map[string]any{"category": category, "key": args[0], "forgotten": true}, func(w io.Writer) {
				fmt.Fprintf(w, "%s / %s: forgotten\n", printable(category), printable(args[0]))
			})
		}),
	}
	categoryFlag(cmd, &category)
	agentFlag(cmd, &agent)
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	ifRevisionFlag(cmd, &named, "only if the key is at this revision")
	return cmd
}

func (c *cli) memoryStatsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats", Short: "Count memories and bytes by category", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			stats, err := memory.Stats(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, stats, "", "no memories",
				[]string{"AGENT", "CATEGORY", "ENTRIES", "BYTES", "EXPIRING", "LAST WRITTEN"},
				func(st memory.CategoryStats) []string {
					return []string{
						cmp.Or(string(st.Owner), sharedMemory), st.Category, fmt.Sprint(st.Entries), fmt.Sprint(st.Bytes),
						fmt.Sprint(st.Expiring), formatTime(st.UpdatedAt),
					}
				})
		}),
	}
}
