package flows_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// knowing is a process with the builtins, and a key that holds "first".
func knowing(t *testing.T, documents ...string) *world {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		put(t, pool, text)
	}
	if _, err := builtins.Put(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil), Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	keep(t, pool, "first")
	return process(t, pool, &reason.Loop{Pool: pool, Skills: registry, Logger: slog.New(slog.DiscardHandler)})
}

// keep writes the key as somebody else.
func keep(t *testing.T, pool *pgxpool.Pool, value string) {
	t.Helper()
	if _, err := memory.Save(t.Context(), pool, memory.Note{Key: "contact", Value: value, TraceID: "op_1"}); err != nil {
		t.Fatal(err)
	}
}

const (
	recalls = "  - {actionType: skill, saveAs: known, parameters: {name: recall, arguments: {query: contact}}}\n"
	pauses  = "  - {actionType: wait_for_event, parameters: {key: go}}\n"
	writes  = "  - {id: write, actionType: skill, saveAs: kept, parameters: {name: memory_write, arguments: {key: contact, value: mine}}}\n"
	forgets = "  - {id: forget, actionType: skill, parameters: {name: memory_forget, arguments: {key: contact}}}\n"
)

func TestAFlowWritesOnlyOverWhatItHasRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		actions   string
		meanwhile bool
		want      string // what is there in the end
		failed    string // the action at which it ends
	}{
		"read":                   {recalls + pauses + writes, false, `"mine" at 2`, ""},
		"read, own, and again":   {recalls + pauses + writes + strings.ReplaceAll(writes, "mine", "mine again"), false, `"mine again" at 3`, ""},
		"read and written":       {recalls + pauses + writes, true, `"theirs" at 2`, "write"},
		"never read":             {pauses + writes, false, `"first" at 1`, "write"},
		"read and forgotten":     {recalls + pauses + forgets, false, "nothing", ""},
		"written, not forgotten": {recalls + pauses + forgets, true, `"theirs" at 2`, "forget"},
		"read after all":         {pauses + recalls + writes, true, `"mine" at 3`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := knowing(t, flow("keeps", strings.ReplaceAll(test.actions, "id: write, actionType: skill, saveAs: kept, parameters: {name: memory_write, arguments: {key: contact, value: mine again}",
				"id: again, actionType: skill, parameters: {name: memory_write, arguments: {key: contact, value: mine again}")))
			id := w.begin(t, "keeps", nil)
			waits(t, w.pool, id, 1)
			if test.meanwhile {
				keep(t, w.pool, "theirs")
			}
			deliver(t, w, "EVENT_COMPLETED", "go", `{}`)
			if test.failed == "" {
				until(t, w.pool, id, executions.Completed)
			} else {
				x := until(t, w.pool, id, executions.Failed)
				there, _, _ := strings.Cut(test.want, " ")
				if said := deref(x.ErrorMessage); !strings.Contains(said, test.failed) || !strings.Contains(said, "nothing was changed") || !strings.Contains(said, there) {
					t.Errorf("it says %q", said)
				}
				status := value[string](t, w.pool, `select status from agent_activity where skill_name in ('memory_write', 'memory_forget') and kind = 'call'`)
				if status != "skipped" {
					t.Errorf("the call is %s", status)
				}
			}
			got := value[string](t, w.pool, `select coalesce((select value::text || ' at ' || revision from agent_memory), 'nothing')`)
			if got != test.want {
				t.Errorf("it holds %s, want %s", got, test.want)
			}
		})
	}
}
