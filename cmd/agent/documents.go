package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) documentsCommand() *cobra.Command {
	return group("documents", "Store, see and fetch files that the agent was given",
		c.documentsAddCommand(), c.documentsListCommand(), c.documentsShowCommand(), c.documentsGetCommand(), c.documentsRemoveCommand())
}

func documentHint(err error) error {
	switch {
	case errors.Is(err, documents.ErrNotFound):
		return hint(err, "see agent documents ls")
	case errors.Is(err, threads.ErrNotFound):
		return hint(err, "see agent threads ls")
	case errors.Is(err, documents.ErrTooLarge):
		return hint(err, "AGENT_DOCUMENT_MAX_BYTES sets the limit")
	case errors.Is(err, documents.ErrTooMany):
		return hint(err, "agent documents rm deletes what is not needed")
	}
	return err
}

func (c *cli) documentsAddCommand() *cobra.Command {
	var u documents.Upload
	var reason string
	cmd := &cobra.Command{
		Use: "add FILE", Short: "Store a file as a document", Args: args(1, 1, "a file, or - to read the standard input"),
		Long: `Store a file in the database as a document. With --thread it belongs to that thread, and goes with it. Without, it stays
until agent documents rm.`,
		Example: "  agent documents add contract.pdf --thread maria\n  pg_dump --schema-only shop | agent documents add - --name schema.sql",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			u.MaxBytes, u.By = int64(s.config.DocumentMaxBytes), threads.Admin
			if err := c.readFile(&u, args[0]); err != nil {
				return documentHint(err)
			}
			d, err := addDocument(cmd.Context(), s, u, reason)
			if err != nil {
				return documentHint(err)
			}
			return c.print(d, func(w io.Writer) error { return writeDocuments(w, []documents.Document{d}) })
		}),
	}
	cmd.Flags().StringVar(&u.ThreadID, "thread", "", "the thread whose visitors, flows and models see it")
	cmd.Flags().StringVar(&u.Name, "name", "", "its name; the file's when left out")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

// readFile reads a file, but no more of it than is stored.
func (c *cli) readFile(u *documents.Upload, path string) (err error) {
	from := c.in
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("read document: %w", err)
		}
		defer file.Close()
		from = file
		if u.Name == "" {
			u.Name = filepath.Base(path)
		}
	}
	if u.Content, err = io.ReadAll(io.LimitReader(from, u.MaxBytes+1)); err != nil {
		return fmt.Errorf("read document: %w", err)
	}
	return nil
}

// addDocument stores a document, and records that.
func addDocument(ctx context.Context, s *session, u documents.Upload, reason string) (d documents.Document, err error) {
	input := map[string]any{"name": documents.CleanName(u.Name), "reason": reason}
	_, err = act(ctx, s, "add_document", input, func(tx pgx.Tx, traceID string) (bool, error) {
		u.TraceID = traceID
		d, err = documents.Add(ctx, tx, u)
		input["document"] = d.ID
		return err == nil, err
	})
	return d, err
}

// writeDocuments shows documents to a person.
func writeDocuments(w io.Writer, list []documents.Document) error {
	rows := make([][]string, len(list))
	for i, d := range list {
		rows[i] = []string{
			d.ID, clipped(d.Name, 40), d.ContentType, documents.Size(d.Size), deref(d.ThreadID), d.UploadedBy, when(d.CreatedAt),
		}
	}
	return table(w, "no documents; agent documents add FILE stores one",
		[]string{"DOCUMENT", "NAME", "TYPE", "SIZE", "THREAD", "FROM", "STORED"}, rows)
}

func (c *cli) documentsListCommand() *cobra.Command {
	var f documents.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List documents, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := documents.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(d documents.Document) string { return d.ID })
			return c.print(listing(got, next), func(w io.Writer) error { return writeDocuments(w, got) })
		}),
	}
	cmd.Flags().StringVar(&f.ThreadID, "thread", "", "only of this thread")
	executionFlag(cmd.Flags(), &f.ExecutionID)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) documentsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show a document without its content", Args: args(1, 1, "the id of a document"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := documents.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return documentHint(err)
			}
			return c.print(d, func(w io.Writer) error {
				readable := "not text"
				if d.IsText {
					readable = "text"
				}
				_, err := fmt.Fprintf(w, "%s\n%s, %d bytes, %s\nsha256 %s\nfrom %s, %s  %s\nthread %s  execution %s  expires %s\n", printable(d.Name),
					d.ContentType, d.Size, readable, d.SHA256, printable(d.UploadedBy), when(d.CreatedAt), d.TraceID, orDash(d.ThreadID),
					orDash(d.ExecutionID), maybe(d.ExpiresAt))
				return err
			})
		}),
	}
}

// orDash is a text that may be missing.
func orDash(text *string) string {
	if text == nil {
		return "-"
	}
	return printable(*text)
}

// fetched is where the content of a document was written.
type fetched struct {
	documents.Document
	Path string `json:"path"`
}

func (c *cli) documentsGetCommand() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use: "get ID", Short: "Fetch the content of a document", Args: args(1, 1, "the id of a document"),
		Long: "Write the content of a document to the standard output, or to a new file with -o.",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := documents.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return documentHint(err)
			}
			if path == "" && (c.json || !d.IsText && terminal(c.out)) {
				return &exitError{exitUsage, hint(errors.New("the content does not go to a terminal, or into JSON"), "name a file with -o FILE")}
			}
			content, err := documents.Content(cmd.Context(), s.pool, d.ID)
			if err != nil {
				return documentHint(err)
			}
			if path == "" {
				_, err := c.out.Write(content)
				return err
			}
			if err := createFile(path, content); err != nil {
				return err
			}
			return c.print(fetched{d, path}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: %d bytes\n", printable(path), len(content))
				return err
			})
		}),
	}
	cmd.Flags().StringVarP(&path, "output", "o", "", "the file to write; it must not exist")
	return cmd
}

// createFile writes a file that does not exist.
func createFile(path string, content []byte) (err error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write document: %w", err)
	}
	_, err = file.Write(content)
	return errors.Join(err, file.Close())
}

func (c *cli) documentsRemoveCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "rm ID", Short: "Delete a document, for good", Args: args(1, 1, "the id of a document"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			var d documents.Document
			output := map[string]any{}
			_, err := actSaying(cmd.Context(), s, "delete_document", map[string]any{"document": args[0], "reason": reason}, output,
				func(tx pgx.Tx, _ string) (bool, error) {
					var err error
					d, err = documents.Delete(cmd.Context(), tx, args[0])
					output["name"], output["sha256"] = d.Name, d.SHA256
					return err == nil, err
				})
			if err != nil {
				return documentHint(err)
			}
			return c.print(d, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s  %s is deleted\n", d.ID, printable(d.Name))
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}
