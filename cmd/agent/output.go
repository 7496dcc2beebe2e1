package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// cli is what every command works with.
type cli struct {
	environ map[string]string
	// references are what .env has for ${NAME} in a workspace, and for nothing else.
	references map[string]string
	args       []string
	in         io.Reader
	out        io.Writer
	err        io.Writer
	json       bool
	noColor    bool
}

// print shows a result: one JSON document with --json, else what text writes.
func (c *cli) print(value any, text func(w io.Writer) error) error {
	if !c.json {
		out := &printer{to: c.out}
		if err := errors.Join(text(out), out.err); err != nil {
			return fmt.Errorf("print result: %w", err)
		}
		return nil
	}
	encoder := json.NewEncoder(c.out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// printer remembers that something could not be written, so that what writes need not look each time.
type printer struct {
	to  io.Writer
	err error
}

func (p *printer) Write(text []byte) (int, error) {
	if p.err == nil {
		_, p.err = p.to.Write(text)
	}
	return len(text), nil
}

// table writes aligned columns; the first row is the heading. With no rows it says so and what to do.
// On a terminal that is too narrow, prose is cut.
func table(w io.Writer, empty string, heading []string, rows [][]string) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, empty)
		return err
	}
	rows = fit(terminalWidth(w), heading, rows)
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
	if err := t.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
	return nil
}

const (
	columnGap = 2  // spaces between two columns
	minProse  = 16 // characters that a cut column keeps
)

// isProse reports whether a column holds text for people. Ids, names and figures are never cut.
func isProse(heading string) bool {
	switch heading {
	case "ABOUT", "ARGUMENTS", "CAUSE", "CONTENT", "DOES", "ERROR", "GOAL", "LAST ERROR", "REASON", "RESULT", "VALUE", "WHAT",
		"WHAT HAPPENS", "WHY":
		return true
	}
	return false
}

// fit cuts the widest columns of prose until the table is at most width characters wide. Width 0 cuts nothing.
func fit(width int, heading []string, rows [][]string) [][]string {
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

// terminalWidth is the width of the terminal that w writes to; 0 where it writes to none.
func terminalWidth(w io.Writer) int {
	if p, ok := w.(*printer); ok {
		w = p.to
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

// printable is a text without what could steer a terminal or break a line.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// printableLines is text of several lines without anything that a terminal would act on.
func printableLines(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	return strings.Join(lines, "\n")
}

// say tells a person something that is not the result.
func (c *cli) say(format string, args ...any) { fmt.Fprintf(c.err, format+"\n", args...) }

// colour reports whether the result may be coloured: on a terminal that is not told otherwise.
func (c *cli) colour() bool {
	if c.noColor || c.json || c.environ["NO_COLOR"] != "" || c.environ["TERM"] == "dumb" {
		return false
	}
	if c.environ["CLICOLOR_FORCE"] != "" && c.environ["CLICOLOR_FORCE"] != "0" {
		return true
	}
	return terminal(c.out)
}

// terminal reports whether a stream is one.
func terminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// longestLine bounds a line of the input, in bytes.
const longestLine = 1 << 20

// eachLine calls do with each line of the input that is not blank, until do wants no more, there is none, or ctx ends.
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

// readLines reads in a goroutine, because a read cannot be interrupted: after stop it ends with the next line or with
// the process. When lines is closed, failed says whether it could be read to its end.
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

// readLine reads one line and nothing behind it.
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
