package why

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
)

// titles are the headings of the parts.
var titles = []struct {
	part  Part
	title string
}{
	{Because, "Causes"},
	{Did, "Executions"},
	{Waits, "Waits"},
	{Lanes, "Lanes"},
	{Trouble, "Problems"},
	{LedTo, "Effects"},
	{Spend, "Cost"},
}

// Parts returns the parts with rows below the first line, in order.
func (a Answer) Parts() []Part {
	var parts []Part
	for _, t := range titles {
		if len(a.Of(t.part)) > 0 {
			parts = append(parts, t.part)
		}
	}
	return parts
}

// Title returns the heading of a part.
func (p Part) Title() string {
	for _, t := range titles {
		if t.part == p {
			return t.title
		}
	}
	return string(p)
}

// blocked is the kind of a row about the holder of the lane that the row above waited for.
const blocked = "blocked"

// maxDepth bounds the indentation.
const maxDepth = 12

const (
	bold  = "\x1b[1m"
	dim   = "\x1b[2m"
	red   = "\x1b[31m"
	reset = "\x1b[0m"
)

// Write writes an answer for people: the trace, the root cause of a failure, and the parts below. Rows of spend have no
// time. Causes and children are indented below their cause. Foreign text is shown without control characters. colour
// adds ANSI colours, which carry no extra information.
func Write(w io.Writer, a Answer, colour bool) error {
	out := bufio.NewWriter(w)
	p := page{out: out, answer: a, colour: colour}
	for _, r := range a.Of(Head) {
		fmt.Fprintf(out, "%s  %s\n%s\n", p.paint(a.TraceID, bold), plain(r.What), p.paint(a.OTelTraceID+when(r.At), dim))
		p.began = r.At
	}
	if a.RootCause != nil {
		fmt.Fprintf(out, "\n%s\n  %s  %s\n", p.paint("Root cause", bold), p.paint(p.clock(&a.RootCause.At), dim),
			p.paint("✗ "+plain(a.RootCause.String()), red))
	}
	for _, part := range a.Parts() {
		p.part(part)
	}
	return out.Flush()
}

type page struct {
	out    *bufio.Writer
	answer Answer
	began  *time.Time
	colour bool
}

func (p page) part(part Part) {
	rows := p.answer.Of(part)
	fmt.Fprintf(p.out, "\n%s\n", p.paint(part.Title(), bold))
	depths := p.answer.Depths(part)
	for i, r := range rows {
		joint := ""
		if depths[i] > 0 {
			joint = strings.Repeat("   ", depths[i]-1) + "└─ "
		}
		text := plain(r.What)
		if part == Trouble && r.Kind != More {
			text = p.paint("✗ "+text, red)
		}
		line := fmt.Sprintf("  %s  %s%s", p.paint(p.clock(r.At), dim), joint, text)
		if r.TraceID != p.answer.TraceID && r.Kind != More {
			line += "  " + p.paint(plain(r.TraceID), dim)
		}
		fmt.Fprintln(p.out, line)
	}
}

// Depths returns the depth of each row of a part below its first cause or execution. A lane's holder is below its
// waiter. Lists have depth 0.
func (a Answer) Depths(p Part) []int {
	rows := a.Of(p)
	depths := make([]int, len(rows))
	if p == Waits {
		for i, r := range rows {
			if r.Kind == blocked {
				depths[i] = 1
			}
		}
	}
	if p != Because && p != Did && p != LedTo {
		return depths
	}
	of := map[string]int{}
	for i, r := range rows {
		above, below := of[r.FromRef]
		if below && r.FromRef != "" {
			depths[i] = min(above+1, maxDepth)
		}
		of[r.ToRef] = depths[i]
	}
	return depths
}

// clock returns the time of day, with the date if it differs from the trace's.
func (p page) clock(at *time.Time) string {
	switch {
	case at == nil:
		return strings.Repeat(" ", len("15:04:05"))
	case p.began != nil && at.UTC().YearDay() == p.began.UTC().YearDay() && at.UTC().Year() == p.began.UTC().Year():
		return at.UTC().Format("15:04:05")
	}
	return at.UTC().Format("2006-01-02 15:04:05")
}

func when(at *time.Time) string {
	if at == nil {
		return ""
	}
	return at.UTC().Format("  2006-01-02 15:04:05 UTC")
}

func (p page) paint(text, tint string) string {
	if !p.colour || strings.TrimSpace(text) == "" {
		return text
	}
	return tint + text + reset
}

// plain returns foreign text on one line, without control characters.
func plain(s string) string {
	return strings.Join(strings.Fields(strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '\uFFFD'
		}
		return r
	}, s)), " ")
}
