package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/requests"
)

func (c *cli) requestsCommand() *cobra.Command {
	return group("requests", "See what was asked of people: documents, signatures, tests", c.requestsListCommand())
}

func (c *cli) requestsListCommand() *cobra.Command {
	var f requests.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List requests, newest first", Args: args(0, 0, "no arguments"),
		Long: `List what was asked of people, newest first. The id is the key of the event that answers it:
agent executions event SIGNATURE_COMPLETED ID --data '{"url": "https://…"}'`,
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
