package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"golang.org/x/term"
)

// printRows prints a page as a table, or as JSON with the cursor of the next page.
func printRows[T any](c *cli, items []T, next, empty string, heading []string, row func(T) []string) error {
	return c.print(pageOf(items, next), func(w io.Writer) { writeRows(w, empty, heading, items, row) })
}

// writeRows prints a table with one row for each item.
func writeRows[T any](w io.Writer, empty string, heading []string, items []T, row func(T) []string) {
	rows := make([][]string, len(items))
	for i, item := range items {
		rows[i] = row(item)
	}
	writeTable(w, empty, heading, rows)
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
	if remote, ok := w.(*callerStream); ok {
		return remote.width
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

// writeFields prints the pairs of name and value that have a value.
func writeFields(w io.Writer, format string, fields [][2]string) {
	for _, f := range fields {
		if f[1] != "" {
			fmt.Fprintf(w, format, f[0], printable(f[1]))
		}
	}
}
