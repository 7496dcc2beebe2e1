package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/requests"
)

func (c *cli) requestsCommand() *cobra.Command {
	return group("requests", "See and answer what was asked of people: documents, signatures, tests",
		c.requestsListCommand(), c.requestsShowCommand(), c.requestsAnswerCommand())
}

func (c *cli) requestsListCommand() *cobra.Command {
	var f requests.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List requests, newest first", Args: args(0, 0, "no arguments"),
		Long: `List what was asked of people, newest first. agent requests answer ID answers one. Over HTTP the id
is the key of the event that answers it: POST /v1/events {"event": "SIGNATURE_COMPLETED", "key": "ID", "data": {"url": "https://…"}}`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := requests.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(r requests.Record) string { return r.ID })
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, r := range got {
					about := r.Title
					if len(r.Items) > 0 {
						about += fmt.Sprintf(" (%d of %d: %s)", len(r.Received), len(r.Items), strings.Join(r.Items, ", "))
					}
					rows[i] = []string{r.ID, r.Kind, r.Status, when(r.CreatedAt), deref(r.ThreadID), clipped(about, 60)}
				}
				return table(w, "nothing was asked of anybody", []string{"REQUEST", "KIND", "STATUS", "ASKED", "THREAD", "ABOUT"}, rows)
			})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", "pending", "completed", "closed")
	wordFlag(cmd.Flags(), &f.Kind, "kind", "only this kind", requests.Document, requests.Signature, requests.Test)
	cmd.Flags().StringVar(&f.ThreadID, "thread", "", "only of this thread")
	executionFlag(cmd.Flags(), &f.ExecutionID)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) requestsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one request: what was asked, what has come, which execution waits",
		Args: rowID("a request", "agent requests ls"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			r, err := readRequest(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) error { return writeRequest(w, r) })
		}),
	}
}

// readRequest reads a request by its id.
func readRequest(ctx context.Context, s *session, id string) (requests.Record, error) {
	r, err := requests.Get(ctx, s.pool, id)
	if errors.Is(err, requests.ErrNotFound) {
		err = hint(err, "see agent requests ls")
	}
	return r, err
}

// writeRequest shows a request for people.
func writeRequest(w io.Writer, r requests.Record) error {
	lines := [][2]string{
		{"kind", r.Kind},
		{"status", r.Status},
		{"title", r.Title},
		{"asked", when(r.CreatedAt)},
		{"execution", r.ExecutionID},
		{"trace", r.TraceID + " (agent trace " + r.TraceID + ")"},
		{"thread", deref(r.ThreadID)},
	}
	for _, item := range r.Items {
		came, there := r.Received[item]
		if !there {
			came = "missing"
		}
		lines = append(lines, [2]string{"document", item + ": " + came})
	}
	if text := string(r.Details); text != "{}" && text != "" {
		lines = append(lines, [2]string{"details", text})
	}
	if len(r.Answer) > 0 && string(r.Answer) != "null" {
		lines = append(lines, [2]string{"answer", string(r.Answer)})
	}
	if r.CompletedAt != nil {
		lines = append(lines, [2]string{r.Status, when(*r.CompletedAt)})
	}
	if r.Status == requests.Pending {
		lines = append(lines, [2]string{"answer it", answerCommand(r)})
	}
	fmt.Fprintf(w, "request %s\n", r.ID)
	for _, l := range lines {
		fmt.Fprintf(w, "  %-10s %s\n", l[0], printable(l[1]))
	}
	return nil
}

// answerCommand is the command that answers a request.
func answerCommand(r requests.Record) string {
	command := "agent requests answer " + r.ID
	switch r.Kind {
	case requests.Document:
		var flags strings.Builder
		for _, item := range missingDocuments(r) {
			flags.WriteString(" --document '" + item + "=URL'")
		}
		return command + flags.String()
	case requests.Signature:
		return command + " --yes --url URL"
	}
	return command + " --yes, --no or --text RESULT, and --score NUMBER"
}

// missingDocuments are the documents that were asked for and have not come.
func missingDocuments(r requests.Record) []string {
	var missing []string
	for _, item := range r.Items {
		if _, came := r.Received[item]; !came {
			missing = append(missing, item)
		}
	}
	return missing
}
