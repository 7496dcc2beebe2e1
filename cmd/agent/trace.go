package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/why"
)

func (c *cli) traceCommand() *cobra.Command {
	var withPrompts bool
	cmd := &cobra.Command{
		Use:   "trace ID | last | ls",
		Short: "Show one run as a tree",
		Long: `Show all actions of one run as a tree: durations, tokens, cost, errors.

ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits that tracing tools show.`,
		Example: "  agent trace last\n  agent trace last --surface heartbeat\n  agent trace hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE " +
			"--json",
		Args: positionalArgs(1, 1, "a trace id, last, or ls"),
		RunE: c.withReader(func(cmd *cobra.Command, args []string, s *session) error {
			if withPrompts {
				return c.showPrompts(cmd.Context(), s, args[0])
			}
			return c.showTrace(cmd.Context(), s, args[0])
		}),
	}
	promptsFlag(cmd, &withPrompts)
	cmd.AddCommand(c.traceLastCommand(), c.traceListCommand())
	return cmd
}

func (c *cli) showTrace(ctx context.Context, s *session, id string) error {
	story, err := activity.TraceOf(ctx, s.Read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.tryPrint(story, func(w io.Writer) error { return activity.WriteStory(w, story, c.colour()) })
}

// newestTrace returns the newest trace of a surface, or of all surfaces.
func newestTrace(ctx context.Context, s *session, surface string) (string, error) {
	newest, _, err := activity.Traces(ctx, s.Read, activity.TraceFilter{
		Surface: surface, WithoutEvals: surface == "", Limit: 1,
	})
	if err != nil {
		return "", err
	}
	if len(newest) == 0 {
		return "", hint(errors.New("no trace yet"), "`agent heartbeat` creates one")
	}
	return newest[0].TraceID, nil
}

func (c *cli) traceLastCommand() *cobra.Command {
	var surface string
	var withPrompts bool
	cmd := &cobra.Command{
		Use: "last", Short: "Show the newest trace that is no trial of an eval", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			if withPrompts {
				return c.showPrompts(cmd.Context(), s, newest)
			}
			return c.showTrace(cmd.Context(), s, newest)
		}),
	}
	promptsFlag(cmd, &withPrompts)
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}

func (c *cli) traceListCommand() *cobra.Command {
	var f activity.TraceFilter
	cmd := &cobra.Command{
		Use: "ls", Short: "List traces, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := activity.Traces(cmd.Context(), s.Read, f)
			if err != nil {
				return err
			}
			return printRows(c, page, next, "no matching traces; `agent heartbeat` creates one",
				[]string{"TRACE", "FLOW", "STATUS", "STARTED", "TOOK", "ACTIONS", "ERRORS", "TOKENS", "COST"},
				func(t activity.TraceSummary) []string {
					return []string{
						t.TraceID, t.Flow, t.Status, formatTime(t.StartedAt), formatMillis(t.DurationMS), fmt.Sprint(t.Activities),
						fmt.Sprint(t.Errors), fmt.Sprint(t.Tokens), human.Cost(t.CostUSD, t.Tokens),
					}
				})
		}),
	}
	surfaceFlag(cmd.Flags(), &f.Surface)
	actingFlag(cmd.Flags(), &f.Agent)
	statusFlag(cmd.Flags(), &f.Status, "only traces in this state", statusWords()...)
	agoFlag(cmd.Flags(), &f.Since, "since", "", "only traces started within the last")
	limitFlag(cmd.Flags(), &f.Limit, 20)
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "next_cursor of the previous page")
	return cmd
}

// page is a listing in JSON.
type page[T any] struct {
	Items      []T     `json:"items"`
	NextCursor *string `json:"next_cursor"`
}

func pageOf[T any](items []T, next string) page[T] {
	p := page[T]{Items: items}
	if items == nil {
		p.Items = []T{}
	}
	if next != "" {
		p.NextCursor = &next
	}
	return p
}

func promptsFlag(cmd *cobra.Command, withPrompts *bool) {
	cmd.Flags().BoolVar(withPrompts, "prompts", false, "show the exact prompt of each model call, redacted")
}

func (c *cli) showPrompts(ctx context.Context, s *session, id string) error {
	all := prompts.Page{Calls: []prompts.Call{}, Parts: map[string]prompts.Part{}}
	for cursor := ""; ; cursor = *all.Next {
		page, err := prompts.Of(ctx, s.Read, id, prompts.Filter{Cursor: cursor})
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
	return c.print(all, func(w io.Writer) { writePrompts(w, all) })
}

// writePrompts prints all calls with their full prompts.
func writePrompts(w io.Writer, page prompts.Page) {
	if len(page.Calls) == 0 {
		fmt.Fprintln(w, "no model was called in this trace")
	}
	for i, call := range page.Calls {
		if i > 0 {
			fmt.Fprintln(w)
		}
		u := call.TokenUsage
		fmt.Fprintf(w, "call %d of %d  %s  %s  %s\n", i+1, len(page.Calls), printable(call.Agent),
			printable(call.Model), call.Status)
		fmt.Fprintf(w, "tokens: %d prompt (%d cached, %d cache writes), %d completion\n",
			u.PromptTokens, u.CachedTokens, u.CacheWriteTokens, u.CompletionTokens)
		if !call.Recorded {
			fmt.Fprintln(w, "prompt: not recorded, or pruned")
			continue
		}
		fmt.Fprintf(w, "options: %s\n", printable(string(call.Options)))
		digests := call.Messages
		if call.Tools != nil {
			digests = append([]string{*call.Tools}, digests...)
		}
		fmt.Fprintf(w, "parts: %d, the first %d shared with the previous call\n", len(digests), call.SharedParts)
		for _, digest := range digests {
			writePart(w, page.Parts, digest)
		}
	}
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
		fmt.Fprintln(w, printableText(strings.TrimRight(*message.Content, "\n")))
		return
	}
	fmt.Fprintln(w, printableText(strings.TrimRight(string(part.Body), "\n")))
}

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why ID | last",
		Short: "Explain a run: its cause, waits and outcome",
		Long: `Explain a run: its causes across traces, actions, waits, lane holders, lost workers, rejected writes, effects in other
traces, and cost. ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits of tracing tools. In SQL:
select * from why('hb_01JD…').`,
		Example: "  agent why last\n  agent why last --surface heartbeat\n  agent why hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE --json",
		Args:    positionalArgs(1, 1, "a trace id, or last"),
		RunE: c.withReader(func(cmd *cobra.Command, args []string, s *session) error {
			return c.showWhy(cmd, s, args[0])
		}),
	}
	cmd.AddCommand(c.whyLastCommand())
	return cmd
}

func (c *cli) showWhy(cmd *cobra.Command, s *session, id string) error {
	answer, err := why.Of(cmd.Context(), s.Read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.tryPrint(answer, func(w io.Writer) error { return why.Write(w, answer, c.colour()) })
}

func (c *cli) whyLastCommand() *cobra.Command {
	var surface string
	cmd := &cobra.Command{
		Use: "last", Short: "Explain the newest run that is no trial of an eval", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
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
