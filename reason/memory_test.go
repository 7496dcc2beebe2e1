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
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/memory"
)

// remembering is a world with the builtins and an entry k of two revisions.
func remembering(t *testing.T, replies ...modeltest.Reply) *world {
	t.Helper()
	w := newWorld(t)
	maps.Copy(w.builtins, builtins.New(w.pool, nil, nil))
	if _, err := builtins.Put(t.Context(), w.pool); err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"first", "second"} {
		w.keep(t, value)
	}
	w.plan(replies...)
	return w
}

// keep writes k as somebody else.
func (w *world) keep(t *testing.T, value any) {
	t.Helper()
	if _, err := memory.Save(t.Context(), w.pool, memory.Note{Key: "k", Value: value, TraceID: "op_1"}); err != nil {
		t.Fatal(err)
	}
}

// kept is what k holds, with its revision.
func (w *world) kept(t *testing.T) string {
	t.Helper()
	e, err := memory.Shared.Get(t.Context(), w.pool, "general", "k")
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s at %d", e.Value, e.Revision)
}

var (
	readK  = modeltest.ToolCall("recall", `{"query":"k"}`)
	writeK = modeltest.ToolCall("memory_write", `{"key":"k","value":"mine"}`)
	bye    = modeltest.Text("Done.")
)

// during lets something happen while the model thinks about answer n.
func (w *world) during(n int, happen func(), replies ...modeltest.Reply) {
	done := false
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := 0
		for _, m := range req.Messages {
			if m.Role == openai.ChatMessageRoleAssistant {
				answers++
			}
		}
		if answers == n && !done {
			done = true
			happen()
		}
		return replies[min(answers, len(replies)-1)]
	})
}

func TestATurnReplacesWhatItHasRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"read":             {readK, writeK, bye},
		"named wrongly":    {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":7}`), bye},
		"after a conflict": {writeK, writeK, bye},
		"own work":         {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"draft"}`).AndCall("memory_write", `{"key":"k","value":"mine"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			w.completed(t)
			if got := w.kept(t); !strings.HasPrefix(got, `"mine" at `) {
				t.Errorf("it holds %s", got)
			}
		})
	}
}

func TestATurnDoesNotReplaceWhatItHasNotRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"never read":         {writeK, bye},
		"guessed":            {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":2}`), bye},
		"whatever is there":  {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":-1}`), bye},
		"read in one breath": {modeltest.ToolCall("recall", `{"query":"k"}`).AndCall("memory_write", `{"key":"k","value":"mine"}`), bye},
		"forgotten":          {modeltest.ToolCall("memory_forget", `{"key":"k"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			x, _ := w.completed(t)
			if got := w.kept(t); got != `"second" at 2` {
				t.Errorf("it holds %s", got)
			}
			rows := named(w.rows(t, x), "memory_write")
			if rows = append(rows, named(w.rows(t, x), "memory_forget")...); len(rows) != 1 || rows[0].Status != "skipped" {
				t.Errorf("the row is %+v", rows)
			}
		})
	}
}

func TestAConflictGivesTheModelBothValues(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	w.during(1, func() { w.keep(t, "theirs") }, readK, writeK, writeK, bye)
	w.completed(t)
	if got := w.kept(t); got != `"mine" at 4` {
		t.Errorf("it holds %s", got)
	}
	told := w.since(t, 2)
	said := told[len(told)-1].Content
	var both struct {
		Error, Yours string
		Theirs       memory.Entry
	}
	if err := json.Unmarshal([]byte(said), &both); err != nil || both.Error != "conflict" || both.Yours != "mine" || string(both.Theirs.Value) != `"theirs"` || both.Theirs.Revision != 3 {
		t.Errorf("the model is told %s", said)
	}
}

func TestWhatATurnHasReadSurvivesItsProcess(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	c := newCrash()
	answers := func(req openai.ChatCompletionRequest) (n int) {
		for _, m := range req.Messages {
			if m.Role == openai.ChatMessageRoleAssistant {
				n++
			}
		}
		return n
	}
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		n := answers(req)
		if n == 1 && c.done.CompareAndSwap(false, true) { // it has read, and is lost before it writes
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
	if x.Status != executions.Completed {
		t.Fatalf("the turn is %s: %s", x.Status, testkit.Deref(x.ErrorMessage))
	}
	if got := w.kept(t); got != `"theirs" at 3` {
		t.Errorf("it holds %s", got)
	}
}

func TestAnEntryThatWasCutIsReadWhenItWasReadOn(t *testing.T) {
	t.Parallel()
	on := modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16384}`)
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		want    string
	}{
		"cut":     {[]modeltest.Reply{readK, writeK, bye}, "3"},
		"read on": {[]modeltest.Reply{readK, on, writeK, bye}, "4"},
		"skipped": {[]modeltest.Reply{readK, modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16500}`), writeK, bye}, "3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, test.replies...)
			w.keep(t, strings.Repeat("k and more ", 2000))
			w.completed(t)
			if got := w.kept(t); !strings.HasSuffix(got, " at "+test.want) {
				t.Errorf("it is at %s", got[len(got)-2:])
			}
		})
	}
}
