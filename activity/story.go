package activity

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// WriteStory writes a trace for people: a header, one line per activity as a tree, each with how it
// stands (a sign and a word, so that colour is never the only carrier), how long it took and what it
// cost, errors below their line, and a line with the totals.
//
// Columns are as wide as their content and are left out when nothing is in them. Text that came from
// outside is shown without its control characters, so it cannot steer a terminal. colour adds ANSI
// colours to the states.
func WriteStory(w io.Writer, t Trace, colour bool) error {
	s := story{colour: colour}
	s.add(Tree(t.Activities), "", true)
	s.lines = append(s.lines, line{rule: true}, t.total())
	s.measure()

	out := bufio.NewWriter(w)
	s.header(out, t)
	for _, l := range s.lines {
		s.write(out, l)
	}
	return out.Flush()
}

// noteWidth is where error text wraps, and noteLines how much of it is shown.
const (
	noteWidth = 96
	noteLines = 4
	nameMost  = 60
)

// line is one line of the table. A note has only text, a rule nothing.
type line struct {
	cells [5]string // name with its branches, status, duration, tokens, cost
	tint  string
	note  string
	rule  bool
}

type story struct {
	colour bool
	lines  []line
	widths [5]int
}

// header names the trace and says how it went.
func (s *story) header(out *bufio.Writer, t Trace) {
	word, tint := mark(t.Status)
	when := t.StartedAt.UTC().Format("2006-01-02 15:04:05 UTC")
	if t.FinishedAt != nil {
		when += " to " + t.FinishedAt.UTC().Format("15:04:05")
	}
	fmt.Fprintf(out, "%s  %s  %s\n", t.TraceID, plain(t.Surface), s.paint(word, tint))
	fmt.Fprintf(out, "%s  %s\n\n", t.OTelTraceID, when)
}

// add appends the lines of a level of the tree; branch is what stands before each of them.
func (s *story) add(nodes []*Node, branch string, top bool) {
	for i, n := range nodes {
		joint, below := "├─ ", branch+"│  "
		if i == len(nodes)-1 {
			joint, below = "└─ ", branch+"   "
		}
		if top {
			joint, below = "", ""
		}
		s.lines = append(s.lines, n.line(branch+joint))
		s.addNote(n, below)
		s.add(n.Children, below, false)
	}
}

// addNote appends what went wrong, under the line of the activity.
func (s *story) addNote(n *Node, below string) {
	if n.Status != Error && n.Status != Unknown {
		return
	}
	text := plain(n.ErrorClass)
	if n.ErrorMessage != nil && *n.ErrorMessage != "" {
		text = strings.TrimPrefix(text+": "+plain(*n.ErrorMessage), ": ")
	}
	if text == "" {
		return
	}
	indent := below + "   "
	if len(n.Children) > 0 {
		indent = below + "│  "
	}
	for _, l := range wrap(text, noteWidth-utf8.RuneCountInString(indent)) {
		s.lines = append(s.lines, line{note: indent + l})
	}
}

// line is the activity's own line.
func (n *Node) line(branch string) line {
	name := plain(n.SkillName)
	if n.Model != "" {
		name += " (" + plain(n.Model) + ")"
	}
	word, tint := mark(string(n.Status))
	l := line{cells: [5]string{branch + cut(name, nameMost), word, "", tokens(int64(n.TokenUsage.TotalTokens)), money(n.CostUSD)}}
	if n.DurationMS != nil {
		l.cells[2] = span(time.Duration(*n.DurationMS) * time.Millisecond)
	}
	l.tint = tint
	return l
}

// total is the last line.
func (t Trace) total() line {
	failed, elapsed := 0, ""
	for _, row := range t.Activities {
		if row.Status == Error {
			failed++
		}
	}
	if t.FinishedAt != nil {
		elapsed = span(t.FinishedAt.Sub(t.StartedAt))
	}
	l := line{cells: [5]string{"total: " + count(len(t.Activities), "activity", "activities"), "", elapsed, tokens(t.Tokens), money(t.CostUSD)}}
	if failed > 0 {
		l.cells[1], l.tint = "✗ "+count(failed, "error", "errors"), red
	}
	return l
}

// measure finds the width of each column.
func (s *story) measure() {
	for _, l := range s.lines {
		for i, cell := range l.cells {
			s.widths[i] = max(s.widths[i], utf8.RuneCountInString(cell))
		}
	}
}

// write lays out one line: text to the left, numbers to the right, nothing behind the last cell.
func (s *story) write(out *bufio.Writer, l line) {
	switch {
	case l.rule:
		fmt.Fprintln(out, strings.Repeat("─", s.width()))
		return
	case l.note != "":
		fmt.Fprintln(out, l.note)
		return
	}
	var b strings.Builder
	pending := 0
	for i, cell := range l.cells {
		if s.widths[i] == 0 {
			continue
		}
		gap := s.widths[i] - utf8.RuneCountInString(cell)
		if i > 0 {
			pending += 2
		}
		if i > 1 {
			pending, gap = pending+gap, 0
		}
		if cell != "" {
			b.WriteString(strings.Repeat(" ", pending))
			b.WriteString(s.cell(i, cell, l.tint))
			pending = 0
		}
		pending += gap
	}
	fmt.Fprintln(out, b.String())
}

// cell is what a cell shows; only the status has a colour.
func (s *story) cell(column int, text, tint string) string {
	if column != 1 {
		return text
	}
	return s.paint(text, tint)
}

// width is that of the whole table.
func (s *story) width() int {
	sum := s.widths[0]
	for _, w := range s.widths[1:] {
		if w > 0 {
			sum += w + 2
		}
	}
	return sum
}

// paint colours text when colours are wanted.
func (s *story) paint(text, tint string) string {
	if !s.colour || tint == "" {
		return text
	}
	return tint + text + "\x1b[0m"
}
