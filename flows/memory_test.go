package flows_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// newMemoryProcess starts a process with the builtins. The memory has the value "first" for the key contact.
func newMemoryProcess(t *testing.T, documents ...string) *testProcess {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		putFlow(t, pool, text)
	}
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil), Pool: pool})
	require.NoError(t, err)
	saveContact(t, pool, "first")
	return startProcess(t, pool, &reason.Loop{Pool: pool, Skills: registry, Logger: slog.New(slog.DiscardHandler)})
}

// saveContact writes the key contact, as another writer.
func saveContact(t *testing.T, pool *pgxpool.Pool, value string) {
	t.Helper()
	_, err := memory.Save(t.Context(), pool, memory.Note{Key: "contact", Value: value, TraceID: "op_1"})
	require.NoError(t, err)
}

const (
	recallAction = "  - {actionType: skill, saveAs: known, parameters: {name: recall, arguments: {query: contact}}}\n"
	waitAction   = "  - {actionType: wait_for_event, parameters: {key: go}}\n"
	writeAction  = "  - {id: write, actionType: skill, saveAs: kept, parameters: {name: memory_write, arguments: {key: " +
		"contact, value: mine}}}\n"
	forgetAction = "  - {id: forget, actionType: skill, parameters: {name: memory_forget, arguments: {key: contact}}}\n"
)

func TestMemoryWriteRequiresRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		actions      string
		overwritten  bool   // another writer writes the key during the wait
		want         string // the final value and its revision
		failedAction string // the action that fails; empty for none
	}{
		"read": {recallAction + waitAction + writeAction, false, `"mine" at 2`, ""},
		"read, own, and again": {
			recallAction + waitAction + writeAction + strings.ReplaceAll(writeAction, "mine", "mine again"), false,
			`"mine again" at 3`, "",
		},
		"read in a loop": {
			"  - actionType: for_each\n    parameters:\n      items: [1]\n      actions:\n" +
				strings.ReplaceAll(recallAction, "  -", "        -") + waitAction + writeAction,
			false, `"mine" at 2`, "",
		},
		"read at a timeout": {
			"  - actionType: wait_for_event\n    timeout: 10ms\n    onTimeout: continue\n    parameters: {key: other}\n" +
				"    timeoutActions:\n" + strings.ReplaceAll(recallAction, "  -", "      -") + waitAction + writeAction,
			false, `"mine" at 2`, "",
		},
		"read and overwritten":       {recallAction + waitAction + writeAction, true, `"theirs" at 2`, "write"},
		"never read":                 {waitAction + writeAction, false, `"first" at 1`, "write"},
		"read and forgotten":         {recallAction + waitAction + forgetAction, false, "nothing", ""},
		"overwritten, not forgotten": {recallAction + waitAction + forgetAction, true, `"theirs" at 2`, "forget"},
		"read after overwrite":       {waitAction + recallAction + writeAction, true, `"mine" at 3`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newMemoryProcess(t, flowYAML("keeps", strings.ReplaceAll(test.actions,
				"id: write, actionType: skill, saveAs: kept, "+
					"parameters: {name: memory_write, arguments: {key: contact, value: mine again}",
				"id: again, actionType: skill, parameters: {name: memory_write, arguments: {key: contact, value: mine again}")))
			id := w.startInThread(t, "keeps", nil)
			awaitWaiting(t, w.pool, id, strings.Count(test.actions, "wait_for_event"))
			if test.overwritten {
				saveContact(t, w.pool, "theirs")
			}
			deliverEvent(t, w, "EVENT_COMPLETED", "go", `{}`)
			if test.failedAction == "" {
				enginetest.Await(t, w.pool, id, executions.Completed)
			} else {
				x := enginetest.Await(t, w.pool, id, executions.Failed)
				stored, _, _ := strings.Cut(test.want, " ")
				message := postgres.Deref(x.ErrorMessage)
				assert.Truef(t, strings.Contains(message, test.failedAction) && strings.Contains(message, "nothing was changed") &&
					strings.Contains(message, stored), "the error is %q", message)
				pgtest.Equal(t, w.pool, "skipped", `select status from agent_activity
					where skill_name in ('memory_write', 'memory_forget') and kind = 'call'`)
			}
			pgtest.Equal(t, w.pool, test.want, `select coalesce((select value::text || ' at ' || revision from agent_memory),
				'nothing')`)
		})
	}
}
