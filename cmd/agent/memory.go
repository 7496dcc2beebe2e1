package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/memory"
)

func (c *cli) memoryCommand() *cobra.Command {
	return group("memory", "See, search and change what the agent remembers",
		c.memoryListCommand(), c.memorySearchCommand(), c.memoryGetCommand(), c.memorySetCommand(), c.memoryForgetCommand(), c.memoryStatsCommand())
}

func memoryHint(err error) error {
	switch {
	case errors.Is(err, memory.ErrNotFound):
		return hint(err, "see agent memory ls")
	case errors.Is(err, memory.ErrConflict):
		return hint(err, "see agent memory get KEY")
	}
	return err
}

// writeMemories shows entries to a person.
func writeMemories(w io.Writer, entries []memory.Entry, none string) error {
	rows := make([][]string, len(entries))
	for i, e := range entries {
		rows[i] = []string{e.Category, e.Key, clipped(string(e.Value), 60), fmt.Sprint(e.Revision), when(e.UpdatedAt), maybe(e.ExpiresAt), e.TraceID}
	}
	return table(w, none, []string{"CATEGORY", "KEY", "VALUE", "REVISION", "WRITTEN", "EXPIRES", "TRACE"}, rows)
}

func (c *cli) memoryListCommand() *cobra.Command {
	var f memory.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List memories, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
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
	cmd.Flags().StringVar(&f.Category, "category", "", "only this category")
	cmd.Flags().StringVar(&f.Prefix, "prefix", "", "only keys that begin so")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) memorySearchCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "search WORDS", Short: "Search memories, the best match first", Args: args(1, 1, "what to search for, in quotes"),
		Example: `  agent memory search 'orders "grew by" -test'`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			got, err := memory.Search(cmd.Context(), s.pool, args[0], limit)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error { return writeMemories(w, got, "nothing matches") })
		}),
	}
	limitFlag(cmd.Flags(), &limit, 20)
	return cmd
}

func categoryFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "category", "general", "the category")
}

func (c *cli) memoryGetCommand() *cobra.Command {
	var category string
	cmd := &cobra.Command{
		Use: "get KEY", Short: "Show one memory, whole", Args: args(1, 1, "a key"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			e, err := memory.Get(cmd.Context(), s.pool, category, args[0])
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
	return cmd
}

func (c *cli) memorySetCommand() *cobra.Command {
	var note memory.Note
	cmd := &cobra.Command{
		Use: "set KEY VALUE", Short: "Keep something in the agent's memory", Args: args(2, 2, "a key and a value"),
		Long: `Keep a value, JSON or else text, in place of what the key holds. --revision makes it an error when the entry is not at
the revision you have read (-1: when there is one at all). What looks like a secret is refused.`,
		Example: "  agent memory set contact '{\"name\": \"Ana\"}' --category admin --expires 720h",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			note.Key, note.Value = args[0], args[1]
			if json.Valid([]byte(args[1])) {
				note.Value = json.RawMessage(args[1])
			}
			var saved memory.Entry
			_, err := act(cmd.Context(), s, "set_memory", map[string]any{"category": note.Category, "key": note.Key},
				func(tx pgx.Tx, traceID string) (bool, error) {
					note.TraceID = traceID
					var err error
					saved, err = memory.Save(cmd.Context(), tx, note)
					return err == nil, err
				})
			if errors.Is(err, memory.ErrInvalid) {
				return &exitError{exitUsage, seeHelp(err, cmd)}
			}
			if err != nil {
				return memoryHint(err)
			}
			return c.print(saved, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s / %s is at revision %d\n", printable(saved.Category), printable(saved.Key), saved.Revision)
				return err
			})
		}),
	}
	categoryFlag(cmd, &note.Category)
	cmd.Flags().DurationVar(&note.TTL, "expires", time.Duration(0), "how long it is kept; 0: for ever")
	cmd.Flags().IntVar(&note.Revision, "revision", 0, "the revision you have read; 0: whatever is there")
	return cmd
}

func (c *cli) memoryForgetCommand() *cobra.Command {
	var category string
	cmd := &cobra.Command{
		Use: "forget KEY", Short: "Drop one memory, for good", Args: args(1, 1, "a key"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := act(cmd.Context(), s, "forget_memory", map[string]any{"category": category, "key": args[0]},
				func(tx pgx.Tx, _ string) (bool, error) { return memory.Forget(cmd.Context(), tx, category, args[0]) })
			if err != nil {
				return err
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
					rows[i] = []string{st.Category, fmt.Sprint(st.Entries), fmt.Sprint(st.Bytes), fmt.Sprint(st.Expiring), when(st.UpdatedAt)}
				}
				return table(w, "nothing is remembered", []string{"CATEGORY", "ENTRIES", "BYTES", "EXPIRING", "LAST WRITTEN"}, rows)
			})
		}),
	}
}
