package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) documentsCommand() *cobra.Command {
	return group("documents", "Store, list and fetch files for the agent",
		c.documentsAddCommand(), c.documentsListCommand(), c.documentsShowCommand(), c.documentsGetCommand(),
		c.documentsRemoveCommand())
}

// documentHint adds the next step to an error of a document.
func documentHint(err error) error {
	switch {
	case errors.Is(err, documents.ErrNotFound):
		return hint(err, "see agent documents ls")
	case errors.Is(err, threads.ErrNotFound):
		return hint(err, "see agent threads ls")
	case errors.Is(err, documents.ErrTooLarge):
		return hint(err, "AGENT_DOCUMENT_MAX_BYTES sets the limit")
	case errors.Is(err, documents.ErrTooMany):
		return hint(err, "delete unused documents with agent documents rm")
	}
	return err
}

func (c *cli) documentsAddCommand() *cobra.Command {
	var u documents.Upload
	var reason string
	cmd := &cobra.Command{
		Use: "add FILE", Short: "Store a file as a document", Args: positionalArgs(1, 1, "a file, or - for standard input"),
		Long: `Store a file in the database as a document. With --thread it is deleted with its thread; without, it stays
until agent documents rm.`,
		Example: "  agent documents add contract.pdf --thread maria\n  pg_dump --schema-only shop | agent documents add - " +
			"--name schema.sql",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			u.MaxBytes, u.By = int64(s.config.DocumentMaxBytes), threads.Admin
			if err := c.readFile(&u, args[0]); err != nil {
				return documentHint(err)
			}
			d, err := addDocument(cmd.Context(), s, u, reason)
			if err != nil {
				return documentHint(err)
			}
			return c.print(d, func(w io.Writer) { writeDocuments(w, []documents.Document{d}) })
		}),
	}
	cmd.Flags().StringVar(&u.ThreadID, "thread", "", "the thread with access to it")
	cmd.Flags().StringVar(&u.Name, "name", "", "its name; default the file's")
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// readFile reads a file into u, up to one byte over the size limit. It names u after the file.
func (c *cli) readFile(u *documents.Upload, path string) (err error) {
	from := c.in
	if path != "-" {
		file, err := c.openFile(path)
		if err != nil {
			return fmt.Errorf("read document: %w", err)
		}
		defer file.Close()
		from, u.Name = file, cmp.Or(u.Name, filepath.Base(path))
	}
	if u.Content, err = io.ReadAll(io.LimitReader(from, u.MaxBytes+1)); err != nil {
		return fmt.Errorf("read document: %w", err)
	}
	return nil
}

// addDocument stores a document and records the change.
func addDocument(ctx context.Context, s *session, u documents.Upload, reason string) (d documents.Document, err error) {
	input := map[string]any{"name": documents.CleanName(u.Name), "reason": reason}
	_, err = recordChange(ctx, s, "add_document", input, func(tx pgx.Tx, traceID string) (bool, error) {
		u.TraceID = traceID
		d, err = documents.Add(ctx, tx, u)
		input["document"] = d.ID
		return err == nil, err
	})
	return d, err
}

func writeDocuments(w io.Writer, list []documents.Document) {
	writeRows(w, "no documents; agent documents add FILE stores one",
		[]string{"DOCUMENT", "NAME", "TYPE", "SIZE", "THREAD", "FROM", "STORED"}, list, func(d documents.Document) []string {
			return []string{
				d.ID, truncate(d.Name, 40), d.ContentType, human.Bytes(d.Size), postgres.Deref(d.ThreadID), d.UploadedBy,
				formatTime(d.CreatedAt),
			}
		})
}

func (c *cli) documentsListCommand() *cobra.Command {
	var f documents.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List documents, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := readPage(cmd.Context(), s, documents.List, &f, &f.Limit,
				func(d documents.Document) string { return d.ID })
			if err != nil {
				return err
			}
			return c.print(pageOf(page, next), func(w io.Writer) { writeDocuments(w, page) })
		}),
	}
	cmd.Flags().StringVar(&f.ThreadID, "thread", "", "only this thread")
	executionFlag(cmd.Flags(), &f.ExecutionID)
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) documentsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show a document without its content", Args: positionalArgs(1, 1, "the id of a document"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := documents.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return documentHint(err)
			}
			return c.print(d, func(w io.Writer) {
				kind := "not text"
				if d.IsText {
					kind = "text"
				}
				fmt.Fprintf(w, "%s\n%s, %d bytes, %s\nsha256 %s\n", printable(d.Name), d.ContentType, d.Size, kind, d.SHA256)
				fmt.Fprintf(w, "from %s, %s  %s\n", printable(d.UploadedBy), formatTime(d.CreatedAt), d.TraceID)
				fmt.Fprintf(w, "thread %s  execution %s  expires %s\n", textOrDash(d.ThreadID), textOrDash(d.ExecutionID),
					timeOrDash(d.ExpiresAt))
			})
		}),
	}
}

func (c *cli) documentsGetCommand() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use: "get ID", Short: "Fetch the content of a document", Args: positionalArgs(1, 1, "the id of a document"),
		Long: "Write the content of a document to standard output, or to a new file with -o.",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := documents.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return documentHint(err)
			}
			if path == "" && (c.json || (!d.IsText && terminal(c.out))) {
				return &exitError{exitUsage, hint(errors.New("cannot print the content to a terminal or as JSON"),
					"name a file with -o FILE")}
			}
			content, err := documents.Content(cmd.Context(), s.Pool, d.ID)
			if err != nil {
				return documentHint(err)
			}
			if path == "" {
				if terminal(c.out) { // a visitor's file may have escape sequences
					content = []byte(printableText(string(content)))
				}
				_, err := c.out.Write(content)
				return err
			}
			if err := c.writeFile(path, content, false); err != nil {
				return err
			}
			return c.printf(struct {
				documents.Document
				Path string `json:"path"`
			}{d, path}, "%s: %d bytes\n", printable(path), len(content))
		}),
	}
	cmd.Flags().StringVarP(&path, "output", "o", "", "a new file to write")
	return cmd
}

func (c *cli) documentsRemoveCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "rm ID", Short: "Delete a document permanently", Args: positionalArgs(1, 1, "the id of a document"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			var d documents.Document
			output := map[string]any{}
			_, err := recordChangeWith(cmd.Context(), s, "delete_document",
				map[string]any{"document": args[0], "reason": reason}, output,
				func(tx pgx.Tx, _ string) (bool, error) {
					var err error
					d, err = documents.Delete(cmd.Context(), tx, args[0])
					output["name"], output["sha256"] = d.Name, d.SHA256
					return err == nil, err
				})
			if err != nil {
				return documentHint(err)
			}
			return c.printf(d, "%s  %s is deleted\n", d.ID, printable(d.Name))
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}
