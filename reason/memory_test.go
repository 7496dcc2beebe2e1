package reason_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// remembering returns a world with the builtins, and an entry k of two revisions.
func remembering(t *testing.T, replies ...modeltest.Reply) *world {
	t.Helper()
	w := newWorld(t)
	maps.Copy(w.builtins, builtins.New(w.pool, nil, nil))
	_, err := builtins.Put(t.Context(), w.pool)
	require.NoError(t, err)
	for _, value := range []string{"first", "second"} {
		w.keep(t, value)
	}
	w.plan(replies...)
	return w
}

// keep writes k like another writer.
func (w *world) keep(t *testing.T, value any) {
	t.Helper()
	_, err := memory.Save(t.Context(), w.pool, memory.Note{Key: "k", Value: value, TraceID: "op_1"})
	require.NoError(t, err)
}

// kept returns the value of k with its revision.
func (w *world) kept(t *testing.T) string {
	t.Helper()
	e, err := memory.Shared.Get(t.Context(), w.pool, "general", "k")
	require.NoError(t, err)
	return fmt.Sprintf("%s at %d", e.Value, e.Revision)
}

var (
	readK  = modeltest.ToolCall("recall", `{"query":"k"}`)
	writeK = modeltest.ToolCall("memory_write", `{"key":"k","value":"mine"}`)
	bye    = modeltest.Text("Done.")
)

// during calls happen while the model works on answer n.
func (w *world) during(n int, happen func(), replies ...modeltest.Reply) {
	done := false
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := answersIn(req)
		if answers == n && !done {
			done = true
			happen()
		}
		return replies[min(answers, len(replies)-1)]
	})
}

func TestTurnReplacesWhatItHasRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"read":             {readK, writeK, bye},
		"named wrongly":    {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":7}`), bye},
		"after a conflict": {writeK, writeK, bye},
		"own work": {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"draft"}`).AndCall("memory_write",
			`{"key":"k","value":"mine"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			w.completed(t)
			got := w.kept(t)
			assert.Truef(t, strings.HasPrefix(got, `"mine" at `), "it holds %s", got)
		})
	}
}

// The answer of the read is older than the write after it.
func TestReadInTheReplyOfAWriteKeepsItsRevision(t *testing.T) {
	t.Parallel()
	w := remembering(t, readK, modeltest.ToolCall("recall", `{"query":"k"}`).AndCall("memory_write",
		`{"key":"k","value":"draft"}`), writeK, bye)
	x, _ := w.completed(t)
	assert.Equal(t, `"mine" at 4`, w.kept(t))
	for _, row := range named(w.rows(t, x), "memory_write") {
		assert.Equal(t, "success", row.Status, row.Message)
	}
}

func TestTurnWritesThroughSkillThatDoesNotKnowRevisions(t *testing.T) {
	t.Parallel()
	w := remembering(t, readK, writeK, bye)
	w.put(t, skills.Definition{Name: "memory_write", Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"key": map[string]any{}, "value": map[string]any{}},
	}})
	w.completed(t)
	assert.Equal(t, `"mine" at 3`, w.kept(t))
}

func TestTurnDoesNotReplaceWhatItHasNotRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"never read":        {writeK, bye},
		"guessed":           {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":2}`), bye},
		"whatever is there": {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":-1}`), bye},
		"read in one breath": {modeltest.ToolCall("recall", `{"query":"k"}`).AndCall("memory_write",
			`{"key":"k","value":"mine"}`), bye},
		"forgotten": {modeltest.ToolCall("memory_forget", `{"key":"k"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			x, _ := w.completed(t)
			assert.Equal(t, `"second" at 2`, w.kept(t))
			rows := named(w.rows(t, x), "memory_write")
			rows = append(rows, named(w.rows(t, x), "memory_forget")...)
			assert.Truef(t, len(rows) == 1 && rows[0].Status == "skipped", "the row is %+v", rows)
		})
	}
}

func TestConflictGivesModelBothValues(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	w.during(1, func() { w.keep(t, "theirs") }, readK, writeK, writeK, bye)
	w.completed(t)
	assert.Equal(t, `"mine" at 4`, w.kept(t))
	since := w.since(t, 2)
	last := since[len(since)-1].Content
	var both struct {
		Error, Yours string
		Theirs       memory.Entry
	}
	err := json.Unmarshal([]byte(last), &both)
	assert.Truef(t, err == nil && both.Error == "conflict" && both.Yours == "mine" &&
		string(both.Theirs.Value) == `"theirs"` && both.Theirs.Revision == 3, "the model gets %s", last)
}

func TestTurnWritesAgainWhatWasForgotten(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	w.during(1, func() {
		forgotten, err := memory.Shared.Forget(t.Context(), w.pool, "general", "k", 0)
		assert.True(t, forgotten && err == nil, err)
	}, readK, writeK, writeK, bye)
	w.completed(t)
	assert.Equal(t, `"mine" at 3`, w.kept(t))
	since := w.since(t, 2)
	assert.Contains(t, since[len(since)-1].Content, `"theirs":null`, "this key has no entry any more")
}

func TestWhatTurnHasReadSurvivesItsProcess(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	c := newCrash()
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		n := answersIn(req)
		if n == 1 && c.done.CompareAndSwap(false, true) { // the run has read, and stops before its write
			w.keep(t, "theirs")
			c.came <- pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
			return modeltest.Custom(func(http.ResponseWriter, *http.Request) {
				<-c.wake
				panic(http.ErrAbortHandler)
			})
		}
		return []modeltest.Reply{readK, writeK, bye}[min(n, 2)]
	})
	x := w.survive(t, c)
	require.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	assert.Equal(t, `"theirs" at 3`, w.kept(t))
}

func TestEntryThatWasCutIsReadWhenItWasReadOn(t *testing.T) {
	t.Parallel()
	on := modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16384}`)
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		want    string
	}{
		"cut":     {[]modeltest.Reply{readK, writeK, bye}, "3"},
		"read on": {[]modeltest.Reply{readK, on, writeK, bye}, "4"},
		"skipped": {[]modeltest.Reply{
			readK, modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16500}`), writeK,
			bye,
		}, "3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, test.replies...)
			w.keep(t, strings.Repeat("k and more ", 2000))
			w.completed(t)
			if got := w.kept(t); !strings.HasSuffix(got, " at "+test.want) {
				t.Errorf("the entry is at %s", got[len(got)-2:])
			}
		})
	}
}
