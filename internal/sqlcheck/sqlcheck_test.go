package sqlcheck_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

// composed are the files that compose statements at run time, with the reason. Their other statements are checked like
// all others.
var composed = map[string]string{
	"cmd/agent/demo.go":                 "names a database",
	"channels/inbox.go":                 "runs the statements of its callers, which are checked where they stand",
	"internal/enginetest/enginetest.go": "pgtest takes the test first",
	"engineroom/finders.go":             "joins queries for ids with a query for their rows",
	"engineroom/fragment.go":            "names one of five tables",
	"engineroom/suggest.go":             "names a column with its table and index; the test of indexes runs each",
	"internal/pgserver/data.go":         "names a database",
	"engineroom/page.go":                "openByID is given a statement",
	"internal/pgtest/query.go":          "passes on the statements of tests",
	"internal/pgtest/server.go":         "names databases",
	"activity/report.go":                "reads a page of any report; the test of the reports runs each",
	"internal/pgtest/template.go":       "names databases",
	"internal/testkit/bills/bills.go":   "pgtest takes the test first",
	"internal/testkit/rows/rows.go":     "pgtest takes the test first",
	"internal/postgres/listener.go":     "names a channel",
	"internal/postgres/revision.go":     "runs the statements of its callers, which are checked where they stand",
	"memory/index.go":                   "names the schema of the extension vector",
	"migrations/apply.go":               "runs the embedded migrations",
	"migrations/client.go":              "runs the embedded grants",
	"migrations/months.go":              "names a partition",
	"internal/postgres/declared.go":     "makes a statement of the names of columns",
	"internal/postgres/postgres.go":     "passes on the statements of others",
	"internal/replica/source.go":        "passes on the statements of others",
	"retention/partitions.go":           "names a partition",
	"retention/pass.go":                 "runs a statement of the table of kinds, which is in kinds.go",
	"retention/batch.go":                "runs the statements of the table of kinds, which is in kinds.go",
	"skills/sql.go":                     "names a role, and wraps a skill's query",
	"skills/sqlcheck.go":                "names a role",
	"skills/sqleffect.go":               "names a role, and wraps a skill's query",
	"threads/outbox.go":                 "runs statements of executions, where they are checked",
}

// utility matches statements that PostgreSQL parses without the schema, and that no pooled session may run here.
var utility = regexp.MustCompile(`(?i)^\s*(listen|unlisten|create|drop|alter|set|begin|commit|rollback|vacuum|do)\b`)

func TestEveryStatementParses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	// The ledger of effects is in other databases.
	require.NoError(t, skills.PrepareEffects(t.Context(), skills.Database{Pool: pool}))
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	var checked int
	var used []string
	for _, s := range statements(t, root) {
		switch {
		case s.err != nil && composed[s.file] != "":
			used = append(used, s.file)
		case s.err != nil:
			t.Errorf("%s: the statement is put together while the program runs (%v): make it a constant, or list the file here",
				s.at, s.err)
		case utility.MatchString(s.sql):
		default:
			checked++
			assert.NoError(t, prepare(t, conn.Conn(), s.sql), s.at)
		}
	}
	assert.Truef(t, checked >= 50, "only %d statements were found: the search is broken", checked)
	for file := range composed {
		assert.Truef(t, slices.Contains(used, file), "%s has no composed statement any more", file)
	}
}

// prepare has the server parse a statement, with named arguments like pgx.
func prepare(t *testing.T, conn *pgx.Conn, sql string) error {
	t.Helper()
	text, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn, sql, nil)
	if err != nil {
		return err
	}
	_, err = conn.Prepare(t.Context(), "", text)
	return err
}

func TestCheckFindsErrors(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	found := statements(t, filepath.Join("testdata", "wrong"))
	want := map[string]string{
		"wrong.go:14": `column "colour" does not exist`,
		"wrong.go:15": `inconsistent types deduced for parameter $1`,
		"wrong.go:17": `relation "agent_nothing" does not exist`,
		"wrong.go:18": `put together`,
		"wrong.go:19": ``,
		"wrong.go:20": `column "size" does not exist`,
	}
	assert.Equal(t, len(want), len(found), found)
	for _, s := range found {
		says := "put together"
		if s.err == nil {
			says = ""
			if err := prepare(t, conn.Conn(), s.sql); err != nil {
				says = err.Error()
			}
		}
		expected, known := want[s.at]
		assert.Truef(t, known && (expected == "") == (says == "") &&
			regexp.MustCompile(regexp.QuoteMeta(expected)).MatchString(says), "%s: %q, want %q", s.at, says, expected)
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }

// oldRows matches a search for old rows, oldest first, that no index can serve. clock_timestamp is volatile, so
// PostgreSQL compares it with every row.
var oldRows = regexp.MustCompile(`(?i)(\w+)\s*<=?\s*clock_timestamp\(\)[^()]*?\border by (?:\w+\.)?(\w+)`)

// Such a search reads the whole table, however few rows are old. statement_timestamp is stable.
func TestSearchForOldRowsUsesIndex(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	for _, s := range statements(t, root) {
		for _, m := range oldRows.FindAllStringSubmatch(s.sql, -1) {
			if m[1] == m[2] {
				t.Errorf("%s: no index serves %q: use statement_timestamp()", s.at, m[0])
			}
		}
	}
}

// statement is SQL in the source, or an argument that does not resolve to text.
type statement struct {
	at   string // file:line
	file string
	sql  string
	err  error
}

// sender has the functions that send SQL, with the position of the statement among their arguments. Queue has no
// context. Row, Rows and Names are those of package postgres.
var sender = map[string]int{"Exec": 1, "Query": 1, "QueryRow": 1, "Queue": 0, "Row": 3, "Rows": 3, "Names": 3}

// beginsLikeSQL matches statements that reach the database through a function of the package.
var beginsLikeSQL = regexp.MustCompile(
	`(?is)^\s*(select\s|insert\s+into\s|update\s+\w+.*\sset\s|delete\s+from\s|with\s+(recursive\s+)?\w+\s+as\s)`)

// statements reads all packages below root. It skips testdata, tests, and the benchmarks, which create their own
// tables.
func statements(t *testing.T, root string) []statement {
	t.Helper()
	var all []statement
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if name := d.Name(); path != root && (name == "testdata" || name == "bench" || strings.HasPrefix(name, ".")) {
			return filepath.SkipDir
		}
		found, err := inFolder(root, path)
		all = append(all, found...)
		return err
	})
	require.NoError(t, err)
	return all
}

// folder is the source of one package.
type folder struct {
	root  string
	fset  *token.FileSet
	texts map[string]ast.Expr // constants by name
	files map[string]string   // embedded files, by the variable's name
}

func inFolder(root, path string) ([]statement, error) {
	f := folder{root: root, fset: token.NewFileSet(), texts: map[string]ast.Expr{}, files: map[string]string{}}
	names, err := filepath.Glob(filepath.Join(path, "*.go"))
	if err != nil {
		return nil, err
	}
	var parsed []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(f.fset, name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, file)
		if err := f.learn(path, file); err != nil {
			return nil, err
		}
	}
	var all []statement
	for _, file := range parsed {
		all = append(all, f.search(file)...)
	}
	return all, nil
}

// learn takes the constants and the embedded files of one source file.
func (f *folder) learn(path string, file *ast.File) (err error) {
	ast.Inspect(file, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok {
			return true
		}
		for _, s := range decl.Specs {
			v, ok := s.(*ast.ValueSpec)
			if !ok {
				continue
			}
			if decl.Tok == token.CONST {
				for i, name := range v.Names {
					if i < len(v.Values) {
						f.texts[name.Name] = v.Values[i]
					}
				}
			}
			if decl.Doc == nil || !strings.HasSuffix(decl.Doc.List[len(decl.Doc.List)-1].Text, ".sql") {
				continue
			}
			if embedded, is := strings.CutPrefix(decl.Doc.List[len(decl.Doc.List)-1].Text, "//go:embed "); is &&
				!strings.Contains(embedded, "*") {
				var text []byte
				if text, err = os.ReadFile(filepath.Join(path, embedded)); err != nil {
					return false
				}
				f.files[v.Names[0].Name] = string(text)
			}
		}
		return err == nil
	})
	return err
}

// search finds the statements of one source file.
func (f *folder) search(file *ast.File) []statement {
	var all []statement
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			fun := n.Fun
			if of, ok := fun.(*ast.IndexExpr); ok {
				fun = of.X
			}
			if method, ok := fun.(*ast.SelectorExpr); ok {
				if i, sends := sender[method.Sel.Name]; sends && len(n.Args) > i {
					all = append(all, f.sent(n.Args[i])...)
				}
			}
		case *ast.BasicLit, *ast.BinaryExpr:
			if e := n.(ast.Expr); f.looksLikeSQL(e) {
				text, err := f.text(e)
				all = append(all, f.statement(n, text, err))
				return false
			}
		}
		return true
	})
	return all
}

// sent returns the statement in the argument of a sending method, unless its text was found already.
func (f *folder) sent(arg ast.Expr) []statement {
	if f.looksLikeSQL(arg) {
		return nil
	}
	text, err := f.text(arg)
	return []statement{f.statement(arg, text, err)}
}

// looksLikeSQL reports whether a literal, or the first term of a sum, begins like SQL.
func (f *folder) looksLikeSQL(e ast.Expr) bool {
	if sum, ok := e.(*ast.BinaryExpr); ok {
		if text, err := f.text(sum); err == nil {
			return beginsLikeSQL.MatchString(text)
		}
		return f.looksLikeSQL(sum.X)
	}
	literal, ok := e.(*ast.BasicLit)
	if !ok {
		return false
	}
	text, err := f.text(literal)
	return err == nil && beginsLikeSQL.MatchString(text)
}

func (f *folder) statement(n ast.Node, text string, err error) statement {
	p := f.fset.Position(n.Pos())
	name, relative := filepath.Rel(f.root, p.Filename)
	if relative != nil {
		name = p.Filename
	}
	return statement{at: fmt.Sprintf("%s:%d", name, p.Line), file: filepath.ToSlash(name), sql: text, err: err}
}

// text returns the value of a constant string expression.
func (f *folder) text(e ast.Expr) (string, error) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			return strconv.Unquote(e.Value)
		}
	case *ast.ParenExpr:
		return f.text(e.X)
	case *ast.BinaryExpr:
		left, err := f.text(e.X)
		if err != nil || e.Op != token.ADD {
			return "", fmt.Errorf("not a constant: %w", err)
		}
		right, err := f.text(e.Y)
		return left + right, err
	case *ast.Ident:
		if text, ok := f.files[e.Name]; ok {
			return text, nil
		}
		if value, ok := f.texts[e.Name]; ok {
			return f.text(value)
		}
		return "", fmt.Errorf("%s is not a constant", e.Name)
	}
	return "", fmt.Errorf("%T is not a constant", e)
}
