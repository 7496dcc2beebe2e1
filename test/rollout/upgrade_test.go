//go:build unix

package rollout_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// nextRelease builds the program as a release after this one may be: a change of the tables, and other code in each
// function that has a body.
func nextRelease(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	replaced := map[string]string{}
	replace := func(path, text string) {
		at, err := filepath.Abs(path)
		require.NoError(t, err)
		with := filepath.Join(dir, filepath.Base(path))
		require.NoError(t, os.WriteFile(with, []byte(text), 0o600))
		replaced[at] = with
	}
	paths, err := filepath.Glob("../../migrations/schema/*.sql")
	require.Truef(t, err == nil && len(paths) >= 10, "%d files of the schema, %v", len(paths), err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		tables, code, _ := strings.Cut(string(text), "\n-- Code\n")
		replace(path, tables+"\n-- Code\n"+strings.ReplaceAll(code, "\nbegin\n", "\nbegin -- of the next release\n")+
			"\n-- The end.\n")
	}
	replace("../../migrations/changes/9001_next.sql", `
		alter table agent_executions add column more int not null default 1, add column maybe text;
		alter table agent_checkpoints add column more int not null default 1;
		alter table agent_messages add column more int not null default 1;
		alter table agent_activity add column more int not null default 1;
		alter table agent_locks add column more int not null default 1;
`)
	overlay := filepath.Join(dir, "overlay.json")
	text, err := json.Marshal(map[string]any{"Replace": replaced})
	if err == nil {
		err = os.WriteFile(overlay, text, 0o600)
	}
	require.NoError(t, err)
	next, err := proctest.Build("rollout-next", "-overlay", overlay)
	require.NoError(t, err)
	return next
}

// The next release migrates under load, replaces each process of this one in turn, and nobody notices.
func TestTheNextReleaseReplacesThisOneUnderLoad(t *testing.T) {
	next := nextRelease(t)
	w := newWorld(t, program, pgtest.URL(t), false)
	replicas := []*proctest.Process{w.add(), w.add()}
	l := w.begin()
	l.hasBegun()
	w.migrate(next)
	n := len(pgtest.Column[string](w.t, w.db, `select name from agent_migrations where version = 9001
		union all select c.name from agent_schema_code c, agent_migrations m where m.version = 200
		and c.applied_at > m.applied_at + interval '1 second'`))
	assert.Truef(t, n >= 10, "the next release applied %d files", n)
	l.hasBegun() // this release works on the schema of the next
	w.program = next
	l.roll(replicas)
	l.settle()
	l.check()
}

// beforeBridge is the last commit of schema version 118, which the bridge begins at.
const beforeBridge = "f100ec951fa2ac40858a55555aa8f38ce64c2233"

// The step from version 118 to the baseline is not an expansion: processes of version 118 write nothing after it. They
// refuse requests until they are replaced, and what they had under way goes on in their successors.
func TestTheBridgeIsCrossedUnderLoad(t *testing.T) {
	if rounds() == 1 {
		t.Skip("make prove ONLY=rolling crosses the bridge: it builds the program of another commit")
	}
	old, err := proctest.BuildCommit("rollout-118", beforeBridge)
	if errors.Is(err, proctest.ErrNoCommit) {
		t.Skip(err)
	}
	require.NoError(t, err)
	w := newWorld(t, old, pgtest.EmptyURL(t), true, "AGENT_WORKER_LEASE=10s")
	replicas := []*proctest.Process{w.add(), w.add()}
	l := w.begin()
	l.hasBegun()
	l.crossing.Store(true)
	l.crossed = true
	w.program = program
	w.migrate(program)
	l.roll(replicas)
	l.crossing.Store(false)
	l.hasBegun()
	l.settle()
	l.check()
}
