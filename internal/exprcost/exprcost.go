// Package exprcost bounds the values that an expression (expr-lang.org) may build.
//
// A let can double its variable, as in let b = a + a, and the next let doubles b. toJSON doubles the escapes of a text
// that toJSON returned. So the value of a short expression may be exponentially large, and the virtual machine does not
// count it. [Check] refuses such an expression before it runs.
package exprcost

import (
	"errors"
	"math"

	"github.com/expr-lang/expr/ast"
)

// maxGrowth bounds a value of an expression, as a multiple of its variables and constants together.
const maxGrowth = 1000

// Check returns an error if a value of the expression may be larger than maxGrowth times its variables and constants.
// It overestimates: every node of the tree counts as an operand.
func Check(tree ast.Node) error {
	g := growth{values: map[string][]ast.Node{}, sizes: map[string]float64{}}
	jsonCalls := 0
	walk(tree, func(n ast.Node) {
		switch n := n.(type) {
		case *ast.VariableDeclaratorNode:
			g.values[n.Name] = append(g.values[n.Name], n.Value)
		case *ast.BuiltinNode:
			if n.Name == "toJSON" {
				jsonCalls++
			}
		}
	})
	if g.of(tree)*math.Exp2(float64(max(jsonCalls-1, 0))) > maxGrowth {
		return errors.New("may build too large a value; use fewer let and toJSON")
	}
	return nil
}

type growth struct {
	values map[string][]ast.Node // of each variable that a let declares
	sizes  map[string]float64    // of such variables
}

// of returns the size of a tree in operands.
func (g *growth) of(tree ast.Node) (size float64) {
	walk(tree, func(n ast.Node) {
		if name, ok := n.(*ast.IdentifierNode); ok {
			size += g.ofVariable(name.Value)
			return
		}
		size++
	})
	return size
}

func (g *growth) ofVariable(name string) float64 {
	values := g.values[name]
	if size, known := g.sizes[name]; known || len(values) == 0 {
		return max(size, 1)
	}
	if len(values) > 1 { // in several scopes, and a name does not tell which
		return math.Inf(1)
	}
	g.sizes[name] = 1 // within its own let, the name is another variable
	g.sizes[name] = g.of(values[0])
	return g.sizes[name]
}

// walk calls visit for every node of a tree.
func walk(tree ast.Node, visit func(ast.Node)) { ast.Walk(&tree, visitor(visit)) }

type visitor func(ast.Node)

// Visit implements ast.Visitor.
func (v visitor) Visit(node *ast.Node) { v(*node) }
