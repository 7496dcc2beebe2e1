package workspace

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Position is a place in a file. Line and Column begin with 1; 0 is unknown.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
}

// String is file:line:column, the way editors and terminals take it.
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

// Problem is one thing that is wrong with a workspace.
type Problem struct {
	Position
	Message string `json:"message"`
}

func (p Problem) Error() string { return p.String() + ": " + p.Message }

// Problems is everything that is wrong with a workspace, by file and line. It is the error of
// [Load], [LoadDir], [Plan] and [Apply] when the files are at fault.
type Problems []Problem

// Error lists the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.Error()
	}
	return strings.Join(lines, "\n")
}

// err is p in order, or nil when there is none.
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
