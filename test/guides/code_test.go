//go:build unix

package guides_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// The Go that the pages show stands, line by line, in a test or an example of the repository, so that it compiles.
func TestTheGoOfThePagesIsThatOfTests(t *testing.T) {
	var paths, sources []string
	err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case strings.HasSuffix(path, ".md"):
			paths = append(paths, path)
		case strings.HasSuffix(path, "_test.go"), strings.Contains(path, "/examples/") && strings.HasSuffix(path, ".go"):
			text, err := os.ReadFile(path)
			sources = append(sources, bare(strings.Split(string(text), "\n")))
			return err
		}
		return nil
	})
	require.NoError(t, err)
	shown := 0
	for _, path := range paths {
		for _, b := range readPage(t, path).blocks {
			if !b.is("go") {
				continue
			}
			shown++
			assert.Truef(t, slices.ContainsFunc(sources, func(s string) bool { return strings.Contains(s, bare(b.lines)) }),
				"%s:%d: no test has this code: make it that of an example", path, b.line)
		}
	}
	assert.Truef(t, shown >= 3, "%d blocks of Go in all pages: the test does not see them", shown)
}

// bare is text without its indentation, each line between two newlines.
func bare(lines []string) string {
	trimmed := make([]string, len(lines))
	for i, line := range lines {
		trimmed[i] = strings.TrimSpace(line)
	}
	return "\n" + strings.Join(trimmed, "\n") + "\n"
}
