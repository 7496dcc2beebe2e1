package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
)

func (c *cli) traceCommand() *cobra.Command {
	var asked bool
	cmd := &cobra.Command{
		Use:   "trace ID | last | ls",
		Short: "Show what one run did, as a tree",
		Long: `Show everything that one run did, in order, as a tree: durations, tokens, cost, errors.

ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits that tracing tools show.`,
		Example: "  agent trace last\n  agent trace last --surface heartbeat\n  agent trace hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE --json",
		Args:    args(1, 1, "a trace id, last, or ls"),
		RunE: c.reading(func(cmd *cobra.Command, args []string, s *session) error {
			if asked {
				return c.showPrompts(cmd.Context(), s, args[0])
			}
			return c.showTrace(cmd.Context(), s, args[0])
		}),
	}
	promptsFlag(cmd, &asked)
	cmd.AddCommand(c.traceLastCommand(), c.traceListCommand())
	return cmd
}

func (c *cli) showTrace(ctx context.Context, s *session, id string) error {
	story, err := activity.TraceOf(ctx, s.read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.print(story, func(w io.Writer) error { return activity.WriteStory(w, story, c.colour()) })
}

// newestTrace is the id of the newest trace of a surface, or of all when that is empty.
func newestTrace(ctx context.Context, s *session, surface string) (string, error) {
	newest, _, err := activity.Traces(ctx, s.read, activity.TraceFilter{Surface: surface, Limit: 1})
	if err != nil {
		return "", err
	}
	if len(newest) == 0 {
		return "", hint(errors.New("there is no such trace yet"), "`agent heartbeat` makes one")
	}
	return newest[0].TraceID, nil
}

func (c *cli) traceLastCommand() *cobra.Command {
	var surface string
	var asked bool
	cmd := &cobra.Command{
		Use: "last", Short: "Show the newest trace", Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			if asked {
				return c.showPrompts(cmd.Context(), s, newest)
			}
			return c.showTrace(cmd.Context(), s, newest)
		}),
	}
	promptsFlag(cmd, &asked)
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}

func (c *cli) traceListCommand() *cobra.Command {
	var f activity.TraceFilter
	cmd := &cobra.Command{
		Use: "ls", Short: "List traces, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := activity.Traces(cmd.Context(), s.read, f)
			if err != nil {
				return err
			}
			return c.print(listing(page, next), func(w io.Writer) error {
				rows := make([][]string, len(page))
				for i, t := range page {
					rows[i] = []string{
						t.TraceID, t.Flow, t.Status, when(t.StartedAt), span(t.DurationMS), fmt.Sprint(t.Activities),
						fmt.Sprint(t.Errors), fmt.Sprint(t.Tokens), money(t.CostUSD),
					}
				}
				return table(w, "no trace matches; `agent heartbeat` makes one",
					[]string{"TRACE", "FLOW", "STATUS", "STARTED", "TOOK", "ACTIONS", "ERRORS", "TOKENS", "COST"}, rows)
			})
		}),
	}
	surfaceFlag(cmd.Flags(), &f.Surface)
	actingFlag(cmd.Flags(), &f.Agent)
	statusFlag(cmd.Flags(), &f.Status, "only traces in this state", statusWords()...)
	agoFlag(cmd.Flags(), &f.Since, "since", "", "only what began in the last")
	limitFlag(cmd.Flags(), &f.Limit, 20)
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "where the page before ended")
	return cmd
}

// page is a listing as JSON shows it.
type page[T any] struct {
	Items      []T     `json:"items"`
	NextCursor *string `json:"next_cursor"`
}

// listing wraps rows for --json.
func listing[T any](items []T, next string) page[T] {
	p := page[T]{Items: items}
	if items == nil {
		p.Items = []T{}
	}
	if next != "" {
		p.NextCursor = &next
	}
	return p
}
