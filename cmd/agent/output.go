package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/term"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// print writes a result: one JSON document with --json, else text.
func (c *cli) print(value any, text func(w io.Writer)) error {
	return c.tryPrint(value, func(w io.Writer) error {
		text(w)
		return nil
	})
}

// printf writes a result whose text is one line.
func (c *cli) printf(value any, format string, args ...any) error {
	return c.print(value, func(w io.Writer) { fmt.Fprintf(w, format, args...) })
}

// tryPrint is print for a text that may fail.
func (c *cli) tryPrint(value any, text func(w io.Writer) error) error {
	out := &errWriter{w: c.out}
	var err error
	if c.json {
		err = encodeJSON(out, value)
	} else {
		err = text(out)
	}
	if err := errors.Join(err, out.err); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// encodeJSON writes indented JSON.
func encodeJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// errWriter stores the first write error, so that callers need not check each write.
type errWriter struct {
	w   io.Writer
	err error
}

func (p *errWriter) Write(text []byte) (int, error) {
	if p.err == nil {
		_, p.err = p.w.Write(text)
	}
	return len(text), nil
}

// readPage lists one row more than limit, which is a field of f, to learn whether a next page exists. It returns the
// page and its cursor.
func readPage[T, F any](
	ctx context.Context, s *session, list func(context.Context, postgres.DB, F) ([]T, error), f *F, limit *int,
	id func(T) string,
) (page []T, next string, err error) {
	most := *limit
	*limit = most + 1
	all, err := list(ctx, s.Pool, *f)
	if err != nil || len(all) <= most {
		return all, "", err
	}
	return all[:most], id(all[most-1]), nil
}

// infof prints a line to stderr.
func (c *cli) infof(format string, args ...any) { fmt.Fprintf(c.err, format+"\n", args...) }

func (c *cli) colour() bool {
	if c.noColor || c.json || c.environ["NO_COLOR"] != "" || c.environ["TERM"] == "dumb" {
		return false
	}
	if c.environ["CLICOLOR_FORCE"] != "" && c.environ["CLICOLOR_FORCE"] != "0" {
		return true
	}
	return terminal(c.out)
}

func terminal(stream any) bool {
	if remote, ok := stream.(*callerStream); ok {
		return remote.terminal
	}
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// writeJSON prints the fields of a value under a heading, with multi-line texts unescaped. It skips empty values.
func writeJSON(w io.Writer, heading string, value json.RawMessage) {
	switch string(value) {
	case "", "{}", "null":
		return
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(value, &fields) != nil {
		fields = map[string]json.RawMessage{"value": value}
	}
	fmt.Fprintf(w, "\n%s\n", heading)
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		var text string
		if json.Unmarshal(fields[name], &text) != nil {
			text = string(fields[name])
			var indented bytes.Buffer
			if len(text) > 100 && json.Indent(&indented, fields[name], "", "  ") == nil {
				text = indented.String()
			}
		}
		if strings.Contains(strings.TrimSpace(text), "\n") {
			text = "\n    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ")
		}
		fmt.Fprintf(w, "  %s: %s\n", name, text)
	}
}

// writeUntrustedJSON prints foreign JSON escaped, so that it cannot control the terminal.
func writeUntrustedJSON(w io.Writer, heading string, value json.RawMessage) {
	var indented bytes.Buffer
	if len(value) == 0 || json.Indent(&indented, value, "  ", "  ") != nil {
		return
	}
	fmt.Fprintf(w, "\n%s\n", heading)
	for line := range strings.Lines("  " + indented.String()) {
		fmt.Fprintln(w, printable(strings.TrimSuffix(line, "\n")))
	}
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
