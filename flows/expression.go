package flows

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/vm"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// Bounds of an expression. What is offered costs at most the length of the expression times the size of the variables:
// tests over a list (all, any, …) are not nested and call nothing, and what makes texts or lists out of others in
// a loop (map, reduce, join, repeat, ranges) is not offered at all.
const (
	maxExpression = 2000    // bytes
	maxNodes      = 300     // of its syntax tree
	maxMade       = 100_000 // values it may make
)

// classExpression is the class of actions that ended because an expression could not be computed.
const classExpression = "expression"

// offered are the functions that expressions may call.
var offered = []string{
	"len", "lower", "upper", "trim", "int", "float", "string", "abs", "ceil", "floor", "round", "min", "max", "hasPrefix", "hasSuffix",
	"indexOf", "split", "first", "last", "keys", "values", "type", "toJSON", "fromJSON",
	"all", "any", "none", "one", "count", "filter", "find",
}

// expression is an Expr program and the names it cannot do without.
type expression struct {
	text    string
	program *vm.Program
	needs   []string
}

// compileExpression reads an expression over the variables. The error names the place.
func compileExpression(text string) (*expression, error) {
	switch {
	case strings.TrimSpace(text) == "":
		return nil, errors.New("is empty")
	case len(text) > maxExpression:
		return nil, fmt.Errorf("must have at most %d bytes", maxExpression)
	case strings.Contains(text, "{{"):
		return nil, errors.New("is an expression, not a template: write variables without {{ }}")
	}
	look := &inspector{optional: map[ast.Node]bool{}, names: map[ast.Node]string{}, own: map[string]bool{}}
	options := []expr.Option{
		expr.Env(map[string]any{}), expr.AllowUndefinedVariables(), expr.MaxNodes(maxNodes), expr.DisableAllBuiltins(), expr.Patch(look),
	}
	for _, name := range offered {
		options = append(options, expr.EnableBuiltin(name))
	}
	program, err := expr.Compile(text, options...)
	if at, ok := errors.AsType[*file.Error](err); ok {
		return nil, fmt.Errorf("%s (line %d, column %d)", at.Message, at.Line, at.Column+1)
	}
	if err != nil {
		return nil, err
	}
	if look.refused != "" {
		return nil, errors.New(look.refused)
	}
	return &expression{text: text, program: program, needs: look.needs()}, nil
}

// inspector looks at a syntax tree: which names it needs, and whether its cost is bounded. Nodes are visited from the
// leaves up.
type inspector struct {
	names    map[ast.Node]string // the identifiers
	optional map[ast.Node]bool   // those of them that may be unknown: left of ??, or before ?.
	own      map[string]bool     // names that let declares
	refused  string
}

// Visit is called for every node.
func (l *inspector) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.IdentifierNode:
		l.names[n] = n.Value
	case *ast.VariableDeclaratorNode:
		l.own[n.Name] = true
	case *ast.MemberNode:
		if n.Optional {
			l.allow(n.Node)
		}
	case *ast.BinaryNode:
		switch n.Operator {
		case "??":
			l.allow(n.Left)
		case "..":
			l.refused = "ranges are not offered; use for_each or while"
		case "**", "^":
			l.refused = "powers are not offered"
		}
	case *ast.PredicateNode:
		within(n.Node, func(inner ast.Node) {
			switch i := inner.(type) {
			case *ast.BuiltinNode, *ast.CallNode: // another loop is one, too
				l.refused = "calls within a loop over a list are not offered; use for_each"
			case *ast.BinaryNode:
				if i.Operator == "+" {
					l.refused = "+ within a loop over a list is not offered; use for_each"
				}
			}
		})
	}
}

// allow lets the identifiers of a subtree be unknown.
func (l *inspector) allow(tree ast.Node) {
	within(tree, func(n ast.Node) {
		if _, ok := n.(*ast.IdentifierNode); ok {
			l.optional[n] = true
		}
	})
}

func (l *inspector) needs() []string {
	needed := map[string]bool{}
	for node, name := range l.names {
		if !l.optional[node] && !l.own[name] && name != "$env" {
			needed[name] = true
		}
	}
	return slices.Sorted(maps.Keys(needed))
}

// within calls look for every node of a tree.
func within(tree ast.Node, look func(ast.Node)) {
	ast.Walk(&tree, visitor(look))
}

type visitor func(ast.Node)

// Visit is called for every node.
func (v visitor) Visit(node *ast.Node) { v(*node) }

// value computes the expression.
func (e *expression) value(vars map[string]any) (any, error) {
	for _, name := range e.needs {
		if _, known := vars[name]; !known {
			hint := ""
			if near := nearest.To(name, slices.Sorted(maps.Keys(vars))); near != "" {
				hint = fmt.Sprintf(", did you mean %q?", near)
			}
			return nil, failure(classTemplate, "variable %q is not known%s; set it before, or write (%s ?? …)", name, hint, name)
		}
	}
	machine := vm.VM{MemoryBudget: maxMade}
	got, err := machine.Run(e.program, vars)
	if at, ok := errors.AsType[*file.Error](err); ok {
		err = fmt.Errorf("%s (line %d, column %d)", at.Message, at.Line, at.Column+1)
	}
	if err == nil {
		got, err = normal(got)
	}
	if err != nil {
		return nil, failure(classExpression, "%s: %s", shorten(e.text), err)
	}
	return got, nil
}

// truth computes a condition.
func (e *expression) truth(vars map[string]any) (bool, error) {
	value, err := e.value(vars)
	if err != nil {
		return false, err
	}
	truth, ok := value.(bool)
	if !ok {
		return false, failure(classExpression, "%s: is %s, not true or false", shorten(e.text), shorten(asJSON(value)))
	}
	return truth, nil
}
