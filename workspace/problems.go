package workspace

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// Problem is one error of a workspace.
type Problem struct {
	Position
	Message string `json:"message"`
}

func (p Problem) Error() string { return p.String() + ": " + p.Message }

// Problems lists errors by file and line. [Load], [LoadDir], [Plan] and [Apply] return it for invalid files.
type Problems []Problem

// Error lists the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.Error()
	}
	return strings.Join(lines, "\n")
}

// err returns p sorted, or nil if empty.
func (p Problems) err() error {
	if len(p) == 0 {
		return nil
	}
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return p
}

func (p *Problems) add(at Position, format string, args ...any) {
	*p = append(*p, Problem{Position: at, Message: fmt.Sprintf(format, args...)})
}

// Position is a place in a file. Line and Column start at 1; 0 is unknown.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
}

// String returns file:line:column, as editors expect.
func (p Position) String() string {
	switch {
	case p.Line == 0:
		return p.File
	case p.Column == 0:
		return fmt.Sprintf("%s:%d", p.File, p.Line)
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

func position(file string, node *yaml.Node) Position {
	return Position{File: file, Line: node.Line, Column: node.Column}
}

// unknownName returns the message about an unknown name, with the nearest known name or all of them. what is the kind
// of name, shown its spelling in the message.
func unknownName(what, shown, name string, known []string) string {
	// "-" is the tag of a field that no file sets.
	known = slices.DeleteFunc(slices.Clone(known), func(k string) bool { return k == "" || k == "-" })
	shown = textcut.Text(shown, longestName)
	if near := suggestion(name, known); near != "" {
		return fmt.Sprintf("unknown %s %q%s", what, shown, near)
	}
	if len(known) == 0 {
		return fmt.Sprintf("unknown %s %q; there is none", what, shown)
	}
	slices.Sort(known)
	return fmt.Sprintf("unknown %s %q; known are %s", what, shown, strings.Join(known, ", "))
}

// longestName bounds a name in a message, in bytes.
const longestName = 80

// suggestion returns the question about the nearest known name; "" if none is near.
func suggestion(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}
