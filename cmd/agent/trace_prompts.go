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
	"github.com/lanekeeper/lanekeeper/prompts"
)

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
