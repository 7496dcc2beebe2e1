package logging_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// The program's own words must not look like the name of a secret. Otherwise the handler hides the value of an
// attribute, or the first word of a cause.
func TestOwnKeysAndErrorsAreShown(t *testing.T) {
	t.Parallel()
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			called, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			isLog := strings.HasSuffix(called.Sel.Name, "Context")
			isError := called.Sel.Name == "Errorf" && !strings.HasPrefix(path, "../../cmd/") // commands print errors whole
			for i, arg := range call.Args {
				text := literal(arg)
				what, wraps := strings.CutSuffix(text, ": %w")
				hidden := isLog && i >= 2 && i%2 == 0 && redact.Key(text) ||
					isError && wraps && strings.Contains(redact.Text(what+": failed to connect", 0), redact.Marker)
				assert.Truef(t, !hidden, "%s: logs hide what follows %q", files.Position(arg.Pos()), text)
			}
			return true
		})
		return nil
	})
	require.NoError(t, err)
}

// literal is the value of a string literal; empty for any other expression.
func literal(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	text, _ := strconv.Unquote(lit.Value)
	return text
}
