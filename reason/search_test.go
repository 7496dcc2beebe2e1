package reason_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
)

// many adds 60 skills in scope, one of which sends invoices, and one that sends invoices out of scope.
func (w *world) many(t *testing.T) *atomic.Int32 {
	t.Helper()
	for i := range 58 {
		w.put(t, skills.Definition{Name: fmt.Sprintf("aa_%02d", i)})
		w.builtins[fmt.Sprintf("aa_%02d", i)] = func(context.Context, skills.Call) (any, error) { return nil, nil }
	}
	sent := &atomic.Int32{}
	for name, scope := range map[string]string{"send_invoice": skills.ScopeInternal, "visitorInvoices": skills.ScopeExternal} {
		w.builtins[name] = func(context.Context, skills.Call) (any, error) {
			sent.Add(1)
			return "sent", nil
		}
		w.put(t, skills.Definition{Name: name, Scope: scope})
	}
	return sent
}

func TestOfVeryManySkillsTheOthersAreFoundBySearch(t *testing.T) {
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
	if len(offered) != 31 || !slices.Contains(offered, "skill_search") || !slices.Contains(offered, "probe") || slices.Contains(offered, "send_invoice") {
		t.Errorf("%d are offered: %q", len(offered), offered)
	}
	if told := w.since(t, 1)[2].Content; !strings.Contains(told, "skill_search") {
		t.Errorf("of a skill that is not offered the model is told %q", told)
	}
	if told := w.since(t, 2)[1].Content; !strings.Contains(told, "send_invoice") || strings.Contains(told, "visitor") {
		t.Errorf("found %s", told)
	}
	if after := toolNames(requests[2]); len(after) != 32 || !slices.Contains(after, "send_invoice") {
		t.Errorf("after the search %q are offered", after)
	}
	if sent.Load() != 1 || !slices.Equal(got.Calls, []string{"skill_search", "send_invoice"}) {
		t.Errorf("%d invoices were sent, outcome %+v", sent.Load(), got)
	}
	if refused := named(w.rows(t, x), "visitorInvoices"); len(refused) != 1 || refused[0].Class != "unknown_tool" {
		t.Errorf("rows are %+v", refused)
	}
	if rows := named(w.rows(t, x), "skill_search"); len(rows) != 1 || string(rows[0].Output) != `{"found": ["send_invoice"]}` {
		t.Errorf("rows are %+v", rows)
	}
}

func TestFortySkillsAreAllOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	for i := range 38 { // and sizes and probe
		w.builtins[fmt.Sprintf("s%d", i)] = w.builtins["probe"]
		w.put(t, skills.Definition{Name: fmt.Sprintf("s%d", i)})
	}
	w.completed(t)
	if offered := toolNames(w.model.Requests()[0]); len(offered) != 40 || slices.Contains(offered, "skill_search") {
		t.Errorf("%d are offered", len(offered))
	}
}

func TestASearchThatFindsNothingSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.many(t)
	w.plan(modeltest.ToolCall("skill_search", `{"query":"zzz"}`), modeltest.Text("ok"))
	w.completed(t)
	if told := w.since(t, 1)[1].Content; !strings.Contains(told, "Nothing was found") {
		t.Errorf("the model was told %s", told)
	}
}

func TestWhatWasFoundStaysCallableAfterACrash(t *testing.T) {
	t.Parallel()
	for at := 3; at <= 6; at++ { // the search, the next request, the call, the last request
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sent := w.many(t)
			w.plan(modeltest.ToolCall("skill_search", `{"query":"invoice"}`), modeltest.ToolCall("send_invoice", `{}`), modeltest.Text("Sent."))
			c := newCrash()
			var steps atomic.Int32
			w.wrap = func(ctx context.Context) context.Context {
				return executions.Gate(ctx, func(ctx context.Context) error {
					if int(steps.Add(1)) == at {
						c.here(ctx)
					}
					return nil
				})
			}
			x := w.survive(t, c)
			if got := outcome(t, x); got.Text != "Sent." || !c.done.Load() {
				t.Errorf("execution is %s (%s), outcome %+v", x.Status, testkit.Deref(x.ErrorMessage), got)
			}
			if n := len(w.transcripts(t)); n != 3 || sent.Load() != 1 {
				t.Errorf("%d requests, %d invoices", n, sent.Load())
			}
		})
	}
}
