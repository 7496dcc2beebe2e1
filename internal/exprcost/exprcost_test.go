package exprcost_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/expr-lang/expr/parser"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/exprcost"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// doubled doubles v n times.
func doubled(n int, double string) string {
	text := "let a0 = v; "
	for i := range n {
		text += fmt.Sprintf("let a%d = "+strings.ReplaceAll(double, "x", fmt.Sprintf("a%d", i))+"; ", i+1)
	}
	return text + fmt.Sprintf("a%d", n)
}

// nested doubles v n times, each time in a variable of the same name.
func nested(n int) string {
	text := "v"
	for range n {
		text = "(let b = " + text + "; b + b)"
	}
	return text
}

func TestCheckRefusesExponentialValues(t *testing.T) {
	t.Parallel()
	for text, refused := range map[string]bool{
		"a > 1 and b in [1, 2]":                                       false,
		"let total = a + b; total > 10 ? total : 10":                  false,
		"let a = a + a; a":                                            false,
		"toJSON(a) == toJSON(b)":                                      false,
		strings.Repeat("v + ", 140) + "v":                             false,
		doubled(3, "x + x"):                                           false,
		doubled(20, "x + x"):                                          true,
		doubled(20, "[x, x]"):                                         true,
		doubled(20, "{p: x, q: x}"):                                   true,
		doubled(20, "toJSON(x)"):                                      true,
		doubled(20, "x + lower(x)"):                                   true,
		strings.Repeat("toJSON(", 20) + "v" + strings.Repeat(")", 20): true,
		"(let b = v; b + b) + (let b = v; b)":                         false,
		strings.Repeat("toJSON(a) == toJSON(b) and ", 20) + "true":    false,
		nested(20): true,
	} {
		tree, err := parser.Parse(text)
		require.NoError(t, err)
		err = exprcost.Check(tree.Node)
		assert.Truef(t, (err != nil) == refused, "%.60s: %v, want refused %v", text, err, refused)
	}
}
