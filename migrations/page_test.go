package migrations_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/schemadoc"
	"github.com/lanekeeper/lanekeeper/migrations"
)

var update = flag.Bool("update", false, "write docs/schema.md")

func TestTheSchemaPageIsThatOfTheDatabase(t *testing.T) {
	t.Parallel()
	nouns, err := schemadoc.Read(t.Context(), pgtest.DB(t), migrations.Files())
	require.NoError(t, err)
	if missing := schemadoc.Missing(nouns); len(missing) > 0 {
		t.Errorf("without a comment in migrations/schema, or a table: %s", strings.Join(missing, ", "))
	}
	const path = "../docs/schema.md"
	want := schemadoc.Page(nouns)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "", cmp.Diff(strings.Split(string(got), "\n"), strings.Split(want, "\n")), path)
}

func TestThePageShowsWhatAChangeAddsAndAsksForItsComments(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		create domain agent_mood as text check (value is null or value in ('glad', 'sad'));
		create table agent_webhook_moods (
		  execution_id uuid primary key references agent_executions (id), mood agent_mood, size int);
		create index agent_webhook_moods_size on agent_webhook_moods (size);
		comment on column agent_webhook_moods.size is 'In | bytes.'`)
	nouns, err := schemadoc.Read(t.Context(), db, migrations.Files())
	require.NoError(t, err)
	missing := "agent_mood, agent_webhook_moods, agent_webhook_moods.mood, agent_webhook_moods_size"
	assert.Equal(t, missing, strings.Join(schemadoc.Missing(nouns), ", "))
	page := schemadoc.Page(nouns)
	for _, want := range []string{
		"| `size` | integer, *null* |  | In \\| bytes. |", "`agent_mood` (glad, sad)", "  agent_webhook_moods {\n    key " +
			"execution_id PK\n  }\n",
		`agent_executions ||--o{ agent_webhook_moods : "execution_id"`,
	} {
		assert.Contains(t, page, want)
	}
}
