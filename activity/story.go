package activity

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

// WriteStory writes a trace for people: a header, the activities and child executions as a tree, and a total. Each line
// has status (a sign and a word, so colour is never the only carrier), duration and cost; errors follow below it. A
// request for approval has the state of the decision. Columns fit their content, and empty ones are left out. External
// text is shown without control characters, so it cannot steer a terminal. colour adds ANSI colours to the states.
func WriteStory(w io.Writer, t Trace, colour bool) error {
	s := story{colour: colour, decisions: t.Decisions}
	s.add(Tree(t.withChildren()), "", true)
	s.lines = append(s.lines, line{rule: true}, t.total())
	s.measure()

	out := bufio.NewWriter(w)
	s.header(out, t)
	for _, l := range s.lines {
		s.write(out, l)
	}
	if t.Truncated {
		fmt.Fprintf(out, "only the first %d activities are shown; see `agent activity ls --trace %s`\n",
			len(t.Activities), t.TraceID)
	}
	if len(t.Activities) == 0 {
		fmt.Fprintf(out, "no activity is recorded; see `agent why %s`\n", t.TraceID)
	}
	if t.RootCause != nil {
		fmt.Fprintf(out, "root cause: %s\n", s.paint(t.RootCause.String(), red))
	}
	return out.Flush()
}

// noteWidth is the width of wrapped error text, and noteLines bounds its lines.
const (
	noteWidth = 96
	noteLines = 4
	nameMost  = 60
)

// line is one line of the table. A note has only text, a rule nothing.
type line struct {
	cells [5]string // name with branches, status, duration, tokens, cost
	tint  string
	note  string
	rule  bool
}

type story struct {
	colour bool
	lines  []line
	widths [5]int

	decisions map[string]Decision
}

// header writes the trace's name and result.
func (s *story) header(out *bufio.Writer, t Trace) {
	word, tint := statusMark(t.Status)
	when := t.StartedAt.UTC().Format("2006-01-02 15:04:05 UTC")
	if t.FinishedAt != nil {
		when += " to " + t.FinishedAt.UTC().Format("15:04:05")
		var open int64
		for _, c := range t.Children {
			if c.CompletedAt == nil {
				open++
			}
		}
		if open > 0 {
			when += ", children still open: " + human.Count(open)
		}
	}
	fmt.Fprintf(out, "%s  %s  %s\n", t.TraceID, plainText(t.Surface), s.paint(word, tint))
	fmt.Fprintf(out, "%s  %s\n\n", t.OTelTraceID, when)
}

// add appends one level of the tree; branch is the prefix of its lines.
func (s *story) add(nodes []*Node, branch string, top bool) {
	for i, n := range nodes {
		joint, below := "├─ ", branch+"│  "
		if i == len(nodes)-1 {
			joint, below = "└─ ", branch+"   "
		}
		if top {
			joint, below = "", ""
		}
		s.lines = append(s.lines, s.line(n, branch+joint))
		s.addNote(n, below)
		s.add(n.Children, below, false)
	}
}

// addNote appends the error, or the decision, below its activity.
func (s *story) addNote(n *Node, below string) {
	decision, decided := s.decisions[n.ID]
	if n.Status != Error && n.Status != Unknown && !decided {
		return
	}
	text := plainText(n.ErrorClass)
	if decided {
		text = plainText(decision.String())
	} else if n.ErrorMessage != nil && *n.ErrorMessage != "" {
		text = strings.TrimPrefix(text+": "+plainText(*n.ErrorMessage), ": ")
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

// line is the activity's line.
func (s *story) line(n *Node, branch string) line {
	name := plainText(n.SkillName)
	if n.Model != "" {
		name += " (" + plainText(n.Model) + ")"
	}
	name = truncate(name, nameMost)
	if round := Round(n.Step); round != "" {
		name += ", round " + round
	}
	status := string(n.Status)
	if decision, decided := s.decisions[n.ID]; decided {
		status = decision.Status
	}
	word, tint := statusMark(status)
	l := line{cells: [5]string{
		branch + name, word, "", formatTokens(int64(n.TokenUsage.TotalTokens)),
		formatUSD(n.CostUSD),
	}}
	if n.DurationMS != nil {
		l.cells[2] = human.Millis(*n.DurationMS)
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
		elapsed = human.Duration(t.FinishedAt.Sub(t.StartedAt))
	}
	l := line{cells: [5]string{
		"total: " + count(len(t.Activities), "activity", "activities"), "", elapsed,
		formatTokens(t.Tokens), formatUSD(t.CostUSD),
	}}
	if failed > 0 {
		l.cells[1], l.tint = "✗ "+count(failed, "error", "errors"), red
	}
	return l
}

// measure computes the column widths.
func (s *story) measure() {
	for _, l := range s.lines {
		for i, cell := range l.cells {
			s.widths[i] = max(s.widths[i], utf8.RuneCountInString(cell))
		}
	}
}

// write formats one line: text left, numbers right, no trailing space.
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

// cell formats a cell; only the status has a colour.
func (s *story) cell(column int, text, tint string) string {
	if column != 1 {
		return text
	}
	return s.paint(text, tint)
}

// width is the width of the whole table.
func (s *story) width() int {
	sum := s.widths[0]
	for _, w := range s.widths[1:] {
		if w > 0 {
			sum += w + 2
		}
	}
	return sum
}

// paint colours text if colours are on.
func (s *story) paint(text, tint string) string {
	if !s.colour || tint == "" {
		return text
	}
	return tint + text + "\x1b[0m"
}

// ANSI colours of states.
const (
	green  = "\x1b[32m"
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	cyan   = "\x1b[36m"
	grey   = "\x1b[90m"
)

// statusMark is a state as a sign and a word, with its colour. It covers activities and executions.
func statusMark(status string) (word, tint string) {
	sign := "·"
	switch status {
	case "success", "completed", "approved":
		sign, tint = "✓", green
	case "error", "failed", "timeout":
		sign, tint = "✗", red
	case "rejected":
		sign, tint = "✗", yellow
	case "unknown":
		sign, tint = "?", yellow
	case "pending_approval", "waiting":
		sign, tint = "‖", yellow
	case "running", "pending":
		sign, tint = "▸", cyan
	case "skipped", "cancelled", "expired":
		sign, tint = "–", grey
	}
	return sign + " " + plainText(status), tint
}
