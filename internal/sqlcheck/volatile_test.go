package sqlcheck_test

import (
	"path/filepath"
	"regexp"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// oldRows matches a search for old rows, oldest first, that no index can serve: clock_timestamp is volatile, so
// PostgreSQL compares it with every row.
var oldRows = regexp.MustCompile(`(?i)(\w+)\s*<=?\s*clock_timestamp\(\)[^()]*?\border by (?:\w+\.)?(\w+)`)

// Such a search costs as much as the table has rows, however few are old. statement_timestamp is stable.
func TestASearchForOldRowsCanUseAnIndex(t *testing.T) {
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
