package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/why"
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

func promptsFlag(cmd *cobra.Command, asked *bool) {
	cmd.Flags().BoolVar(asked, "prompts", false, "show the exact prompt of each model call, redacted")
}

// showPrompts shows all model calls of a trace with their prompts.
func (c *cli) showPrompts(ctx context.Context, s *session, id string) error {
	all := prompts.Page{Calls: []prompts.Call{}, Parts: map[string]prompts.Part{}}
	for cursor := ""; ; cursor = *all.Next {
		page, err := prompts.Of(ctx, s.read, id, prompts.Filter{Cursor: cursor})
		if errors.Is(err, activity.ErrNotFound) {
			return hint(err, "see agent trace ls")
		}
		if err != nil {
			return err
		}
		all.TraceID, all.Next, all.Calls = page.TraceID, page.Next, append(all.Calls, page.Calls...)
		maps.Copy(all.Parts, page.Parts)
		if page.Next == nil {
			break
		}
	}
	return c.print(all, func(w io.Writer) error { return writePrompts(w, all) })
}

// writePrompts writes the calls in their order, and each part in full.
func writePrompts(w io.Writer, page prompts.Page) error {
	if len(page.Calls) == 0 {
		fmt.Fprintln(w, "no model was called in this trace")
	}
	for i, call := range page.Calls {
		if i > 0 {
			fmt.Fprintln(w)
		}
		u := call.TokenUsage
		fmt.Fprintf(w, "call %d of %d  %s  %s  %s\n", i+1, len(page.Calls), printable(call.Agent), printable(call.Model), call.Status)
		fmt.Fprintf(w, "tokens: %d prompt (%d cached, %d cache writes), %d completion\n",
			u.PromptTokens, u.CachedTokens, u.CacheWriteTokens, u.CompletionTokens)
		if !call.Recorded {
			fmt.Fprintln(w, "prompt: not recorded, or no longer kept")
			continue
		}
		fmt.Fprintf(w, "options: %s\n", printable(string(call.Options)))
		digests := call.Messages
		if call.Tools != nil {
			digests = append([]string{*call.Tools}, digests...)
		}
		fmt.Fprintf(w, "parts: %d, of which the first %d are those of the call before\n", len(digests), call.SharedParts)
		for _, digest := range digests {
			writePart(w, page.Parts, digest)
		}
	}
	return nil
}

func writePart(w io.Writer, parts map[string]prompts.Part, digest string) {
	part, found := parts[digest]
	role := part.Role
	switch {
	case !found:
		fmt.Fprintf(w, "\n[part %.12s is no longer kept]\n", digest)
		return
	case role == "":
		role = "tools"
	}
	cut := ""
	if part.Truncated {
		cut = ", truncated"
	}
	fmt.Fprintf(w, "\n[%s, %d bytes%s]\n", printable(role), part.Bytes, cut)
	var message struct {
		Content *string `json:"content"`
	}
	if json.Unmarshal(part.Body, &message) == nil && message.Content != nil && part.Role != "assistant" {
		fmt.Fprintln(w, printableLines(*message.Content))
		return
	}
	fmt.Fprintln(w, printableLines(string(part.Body)))
}

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why ID | last",
		Short: "Say why a run happened, what it waited for and what came of it",
		Long: `Say why a run happened: what caused it, across other traces, from the first cause on; what it did and waited for; who had
which lane; workers lost and writes refused; what came of it, also in other traces; what it cost.

ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits that tracing tools show. The same in SQL:
select * from why('hb_01JD…').`,
		Example: "  agent why last\n  agent why last --surface heartbeat\n  agent why hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE --json",
		Args:    args(1, 1, "a trace id, or last"),
		RunE: c.reading(func(cmd *cobra.Command, args []string, s *session) error {
			return c.showWhy(cmd, s, args[0])
		}),
	}
	cmd.AddCommand(c.whyLastCommand())
	return cmd
}

func (c *cli) showWhy(cmd *cobra.Command, s *session, id string) error {
	answer, err := why.Of(cmd.Context(), s.read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.print(answer, func(w io.Writer) error { return why.Write(w, answer, c.colour()) })
}

func (c *cli) whyLastCommand() *cobra.Command {
	var surface string
	cmd := &cobra.Command{
		Use: "last", Short: "Say why the newest run happened", Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			return c.showWhy(cmd, s, newest)
		}),
	}
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}
