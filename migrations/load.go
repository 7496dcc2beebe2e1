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

// codeMark divides a file of schema/. The tables above it are created once. The code below it is applied again when it
// changes.
const codeMark = "\n-- Code\n"

var (
	// commentStatements are the statements above the mark that are applied again, too.
	commentStatements = regexp.MustCompile(`(?ms)^comment on .*?';\n`)
	// commentLines are comments for readers. They may change after a release, so the baseline's hash leaves them out.
	commentLines = regexp.MustCompile(`(?m)^\s*--.*\n`)
)

// schemaFile is one file of schema/.
type schemaFile struct {
	name   string // 030_executions
	tables string // without comment statements and comment lines
	code   string // with the comment statements
}

// change is one file of changes/.
type change struct {
	version int
	name    string
	sql     string
	hash    string
}

// release is the schema of one version of the program.
type release struct {
	files   []schemaFile
	changes []change
	bridges map[int]string // by the version from which they lead
}

// embedded is the release of this binary.
var embedded = sync.OnceValues(func() (release, error) { return load(files) })

// load reads the files of a release.
func load(version fs.FS) (release, error) {
	var r release
	err := each(version, "schema/*.sql", func(name, sql string) error {
		tables, code, _ := strings.Cut(sql, codeMark)
		about := strings.Join(commentStatements.FindAllString(tables, -1), "")
		tables = commentLines.ReplaceAllString(commentStatements.ReplaceAllString(tables, ""), "")
		r.files = append(r.files, schemaFile{strings.TrimSuffix(name, ".sql"), tables, about + code})
		return nil
	})
	if err != nil {
		return r, err
	}
	err = each(version, "changes/*.sql", func(name, sql string) error {
		digits, _, _ := strings.Cut(name, "_")
		number, err := strconv.Atoi(digits)
		if err != nil || number <= baseline {
			return fmt.Errorf("change %s has no number above %d", name, baseline)
		}
		r.changes = append(r.changes, change{number, name, sql, digest(sql)})
		return nil
	})
	if err != nil {
		return r, err
	}
	r.bridges = map[int]string{}
	return r, each(version, "bridges/*.sql", func(name, sql string) error {
		former, err := strconv.Atoi(strings.TrimSuffix(name, ".sql"))
		r.bridges[former] = sql
		return err
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

// tables returns the SQL of the baseline.
func (r release) tables() string {
	var all strings.Builder
	for _, n := range r.files {
		all.WriteString(n.tables)
	}
	return all.String()
}

// version returns the number of the newest change, or of the baseline.
func (r release) version() int {
	if len(r.changes) == 0 {
		return baseline
	}
	return r.changes[len(r.changes)-1].version
}

// hash identifies the SQL of the release. It excludes comment lines of the baseline, and the bridges.
func (r release) hash() string {
	var all strings.Builder
	all.WriteString(r.tables())
	for _, n := range r.files {
		all.WriteString(n.code)
	}
	for _, c := range r.changes {
		all.WriteString(c.hash)
	}
	return digest(all.String())
}
