package flows

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/conf"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/vm"

	"github.com/lanekeeper/lanekeeper/internal/exprcost"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// Bounds of an expression. Its values are bounded by [exprcost.Check]. Predicates over a list (all, any, …) do not nest
// and call nothing. Functions that build texts or lists in a loop (map, reduce, join, repeat, ranges) are not allowed.
const (
	maxExpression  = 2000    // bytes
	maxNodes       = 300     // nodes of the syntax tree
	maxAllocations = 100_000 // values that an expression may allocate
)

// classExpression is the error class of an expression that failed at run time.
const classExpression = "expression"

// allowedFunctions are the functions available to expressions.
var allowedFunctions = []string{
	"len", "lower", "upper", "trim", "int", "float", "string", "abs", "ceil", "floor", "round", "min", "max",
	"hasPrefix", "hasSuffix",
	"indexOf", "split", "first", "last", "keys", "values", "type", "toJSON", "fromJSON",
	"all", "any", "none", "one", "count", "filter", "find",
}

// expression is a compiled Expr program and the variables that it requires.
type expression struct {
	text    string
	program *vm.Program
	needs   []string
}

// compileExpression compiles an expression over the variables. The error names the position.
func compileExpression(text string) (*expression, error) {
	switch {
	case strings.TrimSpace(text) == "":
		return nil, errors.New("is empty")
	case len(text) > maxExpression:
		return nil, fmt.Errorf("must have at most %d bytes", maxExpression)
	case strings.Contains(text, "{{"):
		return nil, errors.New("is an expression, not a template: write variables without {{ }}")
	}
	inspection := &inspector{optional: map[ast.Node]bool{}, names: map[ast.Node]string{}, declared: map[string]bool{}}
	options := []expr.Option{
		expr.Env(map[string]any{}), expr.AllowUndefinedVariables(), expr.MaxNodes(maxNodes),
		expr.DisableAllBuiltins(), expr.Patch(inspection),
	}
	for _, name := range allowedFunctions {
		options = append(options, expr.EnableBuiltin(name))
	}
	// An identifier that is not called is a variable, even if it has the name of a function, such as count. The checker
	// uses Builtins only for identifiers; a call of a function is a BuiltinNode.
	options = append(options, func(c *conf.Config) { clear(c.Builtins) })
	program, err := expr.Compile(text, options...)
	if position, ok := errors.AsType[*file.Error](err); ok {
		message := strings.Replace(position.Message, `Operator("=")`, `"="; write == to compare`, 1)
		return nil, fmt.Errorf("%s (line %d, column %d)", message, position.Line, position.Column+1)
	}
	if err != nil {
		return nil, err
	}
	if inspection.problem != "" {
		return nil, errors.New(inspection.problem)
	}
	if err := exprcost.Check(inspection.root); err != nil {
		return nil, err
	}
	return &expression{text: text, program: program, needs: inspection.needs()}, nil
}

// inspector collects the required names of a syntax tree and rejects nodes with unbounded cost. It visits leaves first.
type inspector struct {
	names    map[ast.Node]string // the identifiers
	optional map[ast.Node]bool   // identifiers that may be unset: left of ??, or before ?.
	declared map[string]bool     // names declared by let
	problem  string
	root     ast.Node // the node of the last visit
}

// Visit implements ast.Visitor.
func (l *inspector) Visit(node *ast.Node) {
	l.root = *node
	switch n := (*node).(type) {
	case *ast.IdentifierNode:
		l.names[n] = n.Value
	case *ast.VariableDeclaratorNode:
		l.declared[n.Name] = true
	case *ast.MemberNode:
		if n.Optional {
			l.allowUnset(n.Node)
		}
	case *ast.BinaryNode:
		switch n.Operator {
		case "??":
			l.allowUnset(n.Left)
		case "..":
			l.problem = "ranges are not offered; use for_each or while"
		case "**", "^":
			l.problem = "powers are not offered"
		}
	case *ast.PredicateNode:
		walkTree(n.Node, func(inner ast.Node) {
			switch i := inner.(type) {
			case *ast.BuiltinNode, *ast.CallNode: // a call may loop, too
				l.problem = "calls within a loop over a list are not offered; use for_each"
			case *ast.BinaryNode:
				if i.Operator == "+" {
					l.problem = "+ within a loop over a list is not offered; use for_each"
				}
			}
		})
	}
}

// allowUnset lets the identifiers of a subtree be unset.
func (l *inspector) allowUnset(tree ast.Node) {
	walkTree(tree, func(n ast.Node) {
		if _, ok := n.(*ast.IdentifierNode); ok {
			l.optional[n] = true
		}
	})
}

func (l *inspector) needs() []string {
	needed := map[string]bool{}
	for node, name := range l.names {
		if !l.optional[node] && !l.declared[name] && name != "$env" {
			needed[name] = true
		}
	}
	return slices.Sorted(maps.Keys(needed))
}

// walkTree calls visit for every node of a tree.
func walkTree(tree ast.Node, visit func(ast.Node)) {
	ast.Walk(&tree, nodeVisitor(visit))
}

type nodeVisitor func(ast.Node)

// Visit implements ast.Visitor.
func (v nodeVisitor) Visit(node *ast.Node) { v(*node) }

// value evaluates the expression.
func (e *expression) value(vars map[string]any) (any, error) {
	for _, name := range e.needs {
		if _, known := vars[name]; !known {
			hint := ""
			if similar := nearest.To(name, slices.Sorted(maps.Keys(vars))); similar != "" {
				hint = fmt.Sprintf(", did you mean %q?", similar)
			}
			return nil, classErrorf(classTemplate, "variable %q is not known%s; set it before, or write (%s ?? …)", name, hint, name)
		}
	}
	machine := vm.VM{MemoryBudget: maxAllocations}
	result, err := machine.Run(e.program, vars)
	if position, ok := errors.AsType[*file.Error](err); ok {
		err = fmt.Errorf("%s (line %d, column %d)", position.Message, position.Line, position.Column+1)
	}
	if err == nil {
		result, err = normalize(result)
	}
	if err != nil {
		return nil, classErrorf(classExpression, "%s: %s", truncate(e.text), err)
	}
	return result, nil
}

// boolValue evaluates a condition.
func (e *expression) boolValue(vars map[string]any) (bool, error) {
	value, err := e.value(vars)
	if err != nil {
		return false, err
	}
	truth, ok := value.(bool)
	if !ok {
		return false, classErrorf(classExpression, "%s: is %s, not true or false", truncate(e.text),
			truncate(encodeJSON(value)))
	}
	return truth, nil
}

// CheckCondition returns an error if a text is not a condition: an expression over variables, as in flows.
func CheckCondition(text string) error {
	_, err := compileExpression(text)
	return err
}

// Condition evaluates a condition over variables. The variables are decoded JSON values.
func Condition(text string, vars map[string]any) (bool, error) {
	compiled, err := compileExpression(text)
	if err != nil {
		return false, err
	}
	return compiled.boolValue(vars)
}
