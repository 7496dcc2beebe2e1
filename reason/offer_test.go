package reason_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// many adds 60 skills in scope; one of them sends invoices. It adds one skill out of scope, which sends invoices, too.
func (w *world) many(t *testing.T) *atomic.Int32 {
	t.Helper()
	for i := range 58 {
		w.put(t, skills.Definition{Name: fmt.Sprintf("aa_%02d", i)})
		w.builtins[fmt.Sprintf("aa_%02d", i)] = func(context.Context, skills.Call) (any, error) { return nil, nil }
	}
	sent := &atomic.Int32{}
	for name, scope := range map[string]string{
		"send_invoice":    skills.ScopeInternal,
		"visitorInvoices": skills.ScopeExternal,
	} {
		w.builtins[name] = func(context.Context, skills.Call) (any, error) {
			sent.Add(1)
			return "sent", nil
		}
		w.put(t, skills.Definition{Name: name, Scope: scope})
	}
	return sent
}

func TestOfVeryManySkillsOthersAreFoundBySearch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sent := w.many(t)
	w.turn.Prompt = "Please probe it."
	w.plan(
		modeltest.ToolCall("send_invoice", `{}`),
		modeltest.ToolCall("skill_search", `{"query":"Invoices"}`),
		modeltest.ToolCall("send_invoice", `{}`).AndCall("visitorInvoices", `{}`), modeltest.Text("Sent."))
	x, got := w.completed(t)
	requests := w.model.Requests()
	offered := toolNames(requests[0])
	assert.Truef(t, len(offered) == 31 && slices.Contains(offered, "skill_search") && slices.Contains(offered, "probe") &&
		!slices.Contains(offered, "send_invoice"), "%d are offered: %q", len(offered), offered)
	assert.Contains(t, w.since(t, 1)[2].Content, "skill_search")
	text := w.since(t, 2)[1].Content
	assert.Truef(t, strings.Contains(text, "send_invoice") && !strings.Contains(text, "visitor"), "found %s", text)
	after := toolNames(requests[2])
	assert.Truef(t, len(after) == 32 && slices.Contains(after, "send_invoice"), "after the search %q are offered", after)
	assert.Truef(t, sent.Load() == 1 && slices.Equal(got.Calls, []string{"skill_search", "send_invoice"}),
		"%d invoices were sent, outcome %+v", sent.Load(), got)
	refused := named(w.rows(t, x), "visitorInvoices")
	assert.Truef(t, len(refused) == 1 && refused[0].Class == "unknown_tool", "rows are %+v", refused)
	rows := named(w.rows(t, x), "skill_search")
	assert.Truef(t, len(rows) == 1 && string(rows[0].Output) == `{"found": ["send_invoice"]}`, "rows are %+v", rows)
}

func TestFortySkillsAreAllOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	for i := range 38 { // and sizes and probe
		w.builtins[fmt.Sprintf("s%d", i)] = w.builtins["probe"]
		w.put(t, skills.Definition{Name: fmt.Sprintf("s%d", i)})
	}
	w.completed(t)
	offered := toolNames(w.model.Requests()[0])
	assert.Truef(t, len(offered) == 40 && !slices.Contains(offered, "skill_search"), "%d are offered", len(offered))
}

func TestSearchThatFindsNothingSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.many(t)
	w.plan(modeltest.ToolCall("skill_search", `{"query":"zzz"}`), modeltest.Text("ok"))
	w.completed(t)
	assert.Contains(t, w.since(t, 1)[1].Content, "Nothing was found")
}

func TestWhatWasFoundStaysCallableAfterCrash(t *testing.T) {
	t.Parallel()
	for at := 3; at <= 6; at++ { // the search, the next request, the call, the last request
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sent := w.many(t)
			w.plan(modeltest.ToolCall("skill_search", `{"query":"invoice"}`), modeltest.ToolCall("send_invoice", `{}`),
				modeltest.Text("Sent."))
			c := newCrash()
			w.crashBefore(at, c)
			x := w.survive(t, c)
			if got := outcome(t, x); got.Text != "Sent." || !c.done.Load() {
				t.Errorf("execution is %s (%s), outcome %+v", x.Status, postgres.Deref(x.ErrorMessage), got)
			}
			n := len(w.transcripts(t))
			assert.Truef(t, n == 3 && sent.Load() == 1, "%d requests, %d invoices", n, sent.Load())
		})
	}
}
