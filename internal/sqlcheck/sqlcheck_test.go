package sqlcheck_test

import (
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

// composed are the files whose statements are put together while the program runs, and why. Their other
// statements are checked like all.
var composed = map[string]string{
	"cmd/agent/demo.go":             "names a database",
	"channels/inbox.go":             "runs the statements of its callers, which are checked where they stand",
	"engineroom/find.go":            "joins statements that select ids with one that reads the rows",
	"engineroom/fragment.go":        "names one of five tables",
	"engineroom/suggest.go":         "names a column with its table and index; the test of indexes runs each",
	"internal/pgserver/ready.go":    "names a database",
	"internal/pgtest/query.go":      "passes on the statements of tests",
	"internal/pgtest/server.go":     "names databases",
	"activity/report.go":            "reads a page of any report; the test of the reports runs each",
	"internal/pgtest/template.go":   "names databases",
	"internal/postgres/listener.go": "names a channel",
	"internal/postgres/revision.go": "runs the statements of its callers, which are checked where they stand",
	"memory/search.go":              "names the schema of the extension vector",
	"migrations/apply.go":           "runs the embedded migrations",
	"migrations/client.go":          "runs the embedded grants",
	"migrations/months.go":          "names a partition",
	"internal/postgres/declared.go": "makes a statement of the names of columns",
	"internal/postgres/postgres.go": "passes on the statements of others",
	"internal/replica/source.go":    "passes on the statements of others",
	"retention/partitions.go":       "names a partition",
	"retention/pass.go":             "runs a statement of the table of kinds, which is in kinds.go",
	"retention/piece.go":            "runs the statements of the table of kinds, which is in kinds.go",
	"skills/sql.go":                 "names a role, and wraps a skill's query",
	"skills/sqlcheck.go":            "names a role",
	"skills/sqleffect.go":           "names a role, and wraps a skill's query",
	"threads/outbox.go":             "runs statements of executions, where they are checked",
}

// utility are statements that PostgreSQL parses without looking at the schema, and that must not be run
// through a pooled session here.
var utility = regexp.MustCompile(`(?i)^\s*(listen|unlisten|create|drop|alter|set|begin|commit|rollback|vacuum|do)\b`)

func TestPostgresAcceptsEveryStatementInTheSource(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	// The ledger of effects is in the databases of others.
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

// prepare lets the server parse a statement, with named arguments as pgx would send them.
func prepare(t *testing.T, conn *pgx.Conn, sql string) error {
	t.Helper()
	text, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn, sql, nil)
	if err != nil {
		return err
	}
	_, err = conn.Prepare(t.Context(), "", text)
	return err
}

func TestTheCheckSeesWhatIsWrong(t *testing.T) {
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
