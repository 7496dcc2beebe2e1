package migrations

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// codeMark divides a file of schema/. The tables above it are made once. The code below it is applied again when it
// changes.
const codeMark = "\n-- Code\n"

var (
	// comments are the statements above the mark that are applied again, too.
	comments = regexp.MustCompile(`(?ms)^comment on .*?';\n`)
	// remarks are lines for readers. They may change after a release, so the baseline's hash leaves them out.
	remarks = regexp.MustCompile(`(?m)^\s*--.*\n`)
)

// noun is one file of schema/.
type noun struct {
	name   string // 030_executions
	tables string // without comments and remarks
	code   string // and comments
}

// change is one file of changes/.
type change struct {
	version int
	name    string
	sql     string
	hash    string
}

// text is the schema of one version of the program.
type text struct {
	nouns   []noun
	changes []change
	bridge  string // what brings a database of version lastNumbered to the baseline
}

// embedded is the text of this binary.
var embedded = sync.OnceValues(func() (text, error) { return load(files) })

func load(version fs.FS) (text, error) {
	var t text
	err := each(version, "schema/*.sql", func(name, sql string) error {
		tables, code, _ := strings.Cut(sql, codeMark)
		about := strings.Join(comments.FindAllString(tables, -1), "")
		tables = remarks.ReplaceAllString(comments.ReplaceAllString(tables, ""), "")
		t.nouns = append(t.nouns, noun{strings.TrimSuffix(name, ".sql"), tables, about + code})
		return nil
	})
	if err != nil {
		return t, err
	}
	err = each(version, "changes/*.sql", func(name, sql string) error {
		digits, _, _ := strings.Cut(name, "_")
		number, err := strconv.Atoi(digits)
		if err != nil || number <= baseline {
			return fmt.Errorf("change %s has no number above %d", name, baseline)
		}
		t.changes = append(t.changes, change{number, name, sql, digest(sql)})
		return nil
	})
	if err != nil {
		return t, err
	}
	return t, each(version, "bridge.sql", func(_, sql string) error {
		t.bridge = sql
		return nil
	})
}

// each calls f with the files of a pattern in the order of their names.
func each(version fs.FS, pattern string, f func(name, sql string) error) error {
	paths, err := fs.Glob(version, pattern)
	if err != nil {
		return fmt.Errorf("list %s: %w", pattern, err)
	}
	for _, p := range paths {
		sql, err := fs.ReadFile(version, p)
		if err != nil {
			return fmt.Errorf("read %s: %w", p, err)
		}
		if err := f(path.Base(p), string(sql)); err != nil {
			return err
		}
	}
	return nil
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// tables is the text of the baseline.
func (t text) tables() string {
	var all strings.Builder
	for _, n := range t.nouns {
		all.WriteString(n.tables)
	}
	return all.String()
}

// version is the number of the newest change, or of the baseline.
func (t text) version() int {
	if len(t.changes) == 0 {
		return baseline
	}
	return t.changes[len(t.changes)-1].version
}

// hash names the text. Remarks and the bridge are not in it.
func (t text) hash() string {
	var all strings.Builder
	all.WriteString(t.tables())
	for _, n := range t.nouns {
		all.WriteString(n.code)
	}
	for _, c := range t.changes {
		all.WriteString(c.hash)
	}
	return digest(all.String())
}
