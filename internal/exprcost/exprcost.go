// Package exprcost bounds the values that an expression (expr-lang.org) may build.
//
// A let can double its variable, as in let b = a + a, and the next let doubles b. toJSON doubles the escapes of a text
// that toJSON returned. So the value of a short expression may be exponentially large, and the virtual machine does not
// count it. [Check] refuses such an expression before it runs.
package exprcost

import (
	"errors"

	"github.com/expr-lang/expr/ast"
)

// maxGrowth bounds a value of an expression, as a multiple of its variables and constants together.
const maxGrowth = 1000

// Check returns an error if let and toJSON may build a value larger than maxGrowth times its variables and constants.
// The virtual machine bounds ranges, lists and repeat. It overestimates: every node of the tree counts as an operand,
// and toJSON as doubling.
func Check(tree ast.Node) error {
	g := growth{values: map[*ast.IdentifierNode]ast.Node{}, sizes: map[ast.Node]float64{}}
	walk(tree, func(n ast.Node) { // inner declarations first
		if let, ok := n.(*ast.VariableDeclaratorNode); ok {
			g.declare(let)
		}
	})
	if g.of(tree) > maxGrowth {
		return errors.New("may build too large a value; use fewer let and toJSON")
	}
	return nil
}

type growth struct {
	values map[*ast.IdentifierNode]ast.Node // of the variables that a let declares
	sizes  map[ast.Node]float64             // of trees, in operands
}

// declare binds the variable's uses that no inner declaration has bound.
func (g *growth) declare(let *ast.VariableDeclaratorNode) {
	walk(let.Expr, func(n ast.Node) {
		if use, ok := n.(*ast.IdentifierNode); ok && use.Value == let.Name && g.values[use] == nil {
			g.values[use] = let.Value
		}
	})
}

// of returns the size of a tree in operands.
func (g *growth) of(tree ast.Node) float64 {
	if size, known := g.sizes[tree]; known {
		return size
	}
	size := 0.0
	walk(tree, func(n ast.Node) {
		size++
		switch n := n.(type) {
		case *ast.IdentifierNode:
			if value := g.values[n]; value != nil {
				size += g.of(value)
			}
		case *ast.BuiltinNode:
			if n.Name == "toJSON" {
				size += g.of(n.Arguments[0])
			}
		}
	})
	g.sizes[tree] = size
	return size
}

// walk calls visit for every node of a tree.
func walk(tree ast.Node, visit func(ast.Node)) { ast.Walk(&tree, visitor(visit)) }

type visitor func(ast.Node)

// Visit implements ast.Visitor.
func (v visitor) Visit(node *ast.Node) { v(*node) }
