package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// cli holds the environment, streams and global flags of a command.
type cli struct {
	environ map[string]string
	// references are the values of .env for ${NAME} in a workspace.
	references map[string]string
	args       []string
	in         io.Reader
	out        io.Writer
	err        io.Writer
	json       bool
	noColor    bool
	talks      bool         // the command is a conversation, which log lines would interrupt
	server     string       // of --server; empty for commands on this machine
	host       *commandHost // of a command that a caller sent to this server
	sent       commandRequest
	folder     fs.FS // of sent; may be nil
}

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

// writeTable prints aligned columns below a heading, or empty without rows. On a narrow terminal it truncates prose
// columns.
func writeTable(w io.Writer, empty string, heading []string, rows [][]string) {
	if len(rows) == 0 {
		fmt.Fprintln(w, empty)
		return
	}
	rows = fitColumns(terminalWidth(w), heading, rows)
	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 4, 2, ' ', 0)
	for _, row := range append([][]string{heading}, rows...) {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, printable(cell))
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush() // a strings.Builder accepts every write
	for line := range strings.Lines(text.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

// writeRows prints a table with one row for each item.
func writeRows[T any](w io.Writer, empty string, heading []string, items []T, row func(T) []string) {
	rows := make([][]string, len(items))
	for i, item := range items {
		rows[i] = row(item)
	}
	writeTable(w, empty, heading, rows)
}

// printRows prints a page as a table, or as JSON with the cursor of the next page.
func printRows[T any](c *cli, items []T, next, empty string, heading []string, row func(T) []string) error {
	return c.print(pageOf(items, next), func(w io.Writer) { writeRows(w, empty, heading, items, row) })
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

// writeFields prints the pairs of name and value that have a value.
func writeFields(w io.Writer, format string, fields [][2]string) {
	for _, f := range fields {
		if f[1] != "" {
			fmt.Fprintf(w, format, f[0], printable(f[1]))
		}
	}
}

const (
	columnGap = 2  // spaces between columns
	minProse  = 16 // width of a truncated column
)

// isProse reports whether a column holds free text. Ids, names and numbers are never truncated.
func isProse(heading string) bool {
	switch heading {
	case "ABOUT", "ARGUMENTS", "CAUSE", "CONTENT", "DOES", "ERROR", "GOAL", "LAST ERROR", "REASON",
		"RESULT", "VALUE", "WHAT",
		"WHAT HAPPENS", "WHY":
		return true
	}
	return false
}

// fitColumns truncates the widest prose columns until the table fits. Width 0 means unlimited.
func fitColumns(width int, heading []string, rows [][]string) [][]string {
	widths := make([]int, len(heading))
	total := -columnGap
	for i, title := range heading {
		widths[i] = utf8.RuneCountInString(title)
		for _, row := range rows {
			if i < len(row) {
				widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
			}
		}
		total += widths[i] + columnGap
	}
	if width <= 0 || total <= width {
		return rows
	}
	for ; total > width; total-- {
		widest := -1
		for i, title := range heading {
			if isProse(title) && widths[i] > minProse && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		widths[widest]--
	}
	shown := make([][]string, len(rows))
	for n, row := range rows {
		shown[n] = slices.Clone(row)
		for i, cell := range row {
			if r := []rune(cell); i < len(widths) && len(r) > widths[i] {
				shown[n][i] = string(r[:widths[i]-1]) + "…"
			}
		}
	}
	return shown
}

// terminalWidth returns 0 when w is no terminal.
func terminalWidth(w io.Writer) int {
	if p, ok := w.(*errWriter); ok {
		w = p.w
	}
	if far, ok := w.(*callerStream); ok {
		return far.width
	}
	file, ok := w.(*os.File)
	if !ok {
		return 0
	}
	width, _, err := term.GetSize(int(file.Fd()))
	if err != nil {
		return 0
	}
	return width
}

// printable replaces control characters and line breaks by spaces.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// printableText removes control characters, but keeps tabs and line breaks.
func printableText(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return -1
	}, text)
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
	if far, ok := stream.(*callerStream); ok {
		return far.terminal
	}
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// longestLine bounds an input line in bytes.
const longestLine = 1 << 20

// eachLine calls do with each non-blank input line until do returns false, the input ends, or ctx ends.
func (c *cli) eachLine(ctx context.Context, do func(line string) (more bool, err error)) error {
	lines, failed, stop := readLines(c.in)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return &exitError{exitInterrupted, nil}
		case line, more := <-lines:
			if !more {
				return failed()
			}
			if strings.TrimSpace(line) == "" {
				continue
			}
			if more, err := do(line); err != nil || !more {
				return err
			}
		}
	}
}

// readLines reads in a goroutine, because a read cannot be interrupted. After stop it ends with the next line or the
// process. failed reports a read error once lines is closed.
func readLines(in io.Reader) (lines <-chan string, failed func() error, stop func()) {
	out, ended := make(chan string), make(chan struct{})
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, longestLine)
	go func() {
		defer close(out)
		for scanner.Scan() {
			select {
			case out <- scanner.Text():
			case <-ended:
				return
			}
		}
	}()
	failed = func() error {
		if err := scanner.Err(); err != nil {
			return fmt.Errorf("read messages: %w", err)
		}
		return nil
	}
	return out, failed, func() { close(ended) }
}

// readLine reads one line byte by byte, to consume nothing behind it.
func readLine(in io.Reader) string {
	var line []byte
	for char := make([]byte, 1); len(line) < longestLine; {
		if n, err := in.Read(char); n == 0 || err != nil || char[0] == '\n' {
			break
		}
		line = append(line, char[0])
	}
	return string(line)
}
