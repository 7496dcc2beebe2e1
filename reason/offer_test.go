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
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// addManySkills adds 59 skills in scope, among them send_invoice, and the skill visitorInvoices out of scope. It
// returns the number of calls of these two.
func (w *world) addManySkills(t *testing.T) *atomic.Int32 {
	t.Helper()
	w.addProbes(t, 58)
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

// addProbes adds n skills, whose names precede all others.
func (w *world) addProbes(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		name := fmt.Sprintf("aa_%02d", i)
		w.builtins[name] = w.builtins["probe"]
		w.put(t, skills.Definition{Name: name})
	}
}

func TestSearchFindsSkillsBeyondTheOffer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sent := w.addManySkills(t)
	w.turn.Prompt = "Please probe it."
	w.plan(
		modeltest.ToolCall("send_invoice", `{}`),
		modeltest.ToolCall("skill_search", `{"query":"Invoices"}`),
		modeltest.ToolCall("send_invoice", `{}`).AndCall("visitorInvoices", `{}`), modeltest.Text("Sent."))
	x, got := w.completed(t)
	requests := w.model.Requests()
	first, afterSearch := toolNames(requests[0]), toolNames(requests[2])
	assert.Equal(t, 31, len(first), "30 skills and skill_search", first)
	assert.True(t, slices.Contains(first, "skill_search"), "skill_search is not offered:", first)
	assert.True(t, slices.Contains(first, "probe"), "the skill of the prompt is not offered:", first)
	assert.True(t, !slices.Contains(first, "send_invoice"), "send_invoice is offered before the search:", first)
	refusal := w.since(t, 1)[2].Content
	assert.Contains(t, refusal, "skill_search")
	found := w.since(t, 2)[1].Content
	assert.Contains(t, found, "send_invoice")
	assert.True(t, !strings.Contains(found, "visitor"), "the search found a skill out of scope:", found)
	assert.Equal(t, 32, len(afterSearch), "the offer after the search", afterSearch)
	assert.True(t, slices.Contains(afterSearch, "send_invoice"), "the found skill is not offered:", afterSearch)
	assert.Equal(t, 1, sent.Load(), "invoices")
	assert.Equal(t, "skill_search send_invoice", strings.Join(got.Calls, " "))
	rows := w.rows(t, x)
	refused, searches := named(rows, "visitorInvoices"), named(rows, "skill_search")
	require.Equal(t, 1, len(refused))
	assert.Equal(t, "unknown_tool", refused[0].Class)
	require.Equal(t, 1, len(searches))
	assert.Equal(t, `{"found": ["send_invoice"]}`, string(searches[0].Output))
}

// The database sorts names by its own collation, in which "probe" precedes "Query".
func TestAnExtraSkillInScopeIsOfferedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Done."))
	w.builtins["Query"] = w.builtins["probe"]
	w.put(t, skills.Definition{Name: "Query"})
	var list []skills.Skill
	for _, name := range []string{"probe", "Query", "sizes"} {
		s, err := skills.Get(t.Context(), w.pool, name)
		require.NoError(t, err)
		list = append(list, s)
	}
	w.turn.Available, w.turn.ExtraSkills = &reason.Available{Skills: list}, []string{"probe"}
	w.completed(t)
	assert.Equal(t, "Query probe sizes", strings.Join(toolNames(w.model.Requests()[0]), " "))
}

func TestOffer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		skills, offered int
		search          bool
	}{
		{40, 40, false}, // the limit
		{41, 31, true},  // 30 skills and skill_search
	} {
		t.Run(fmt.Sprint(c.skills, " skills"), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, modeltest.Text("ok"))
			w.addProbes(t, c.skills-2) // newWorld has sizes and probe
			w.completed(t)
			offered := toolNames(w.model.Requests()[0])
			assert.Equal(t, c.offered, len(offered))
			assert.Equal(t, c.search, slices.Contains(offered, "skill_search"), "skill_search is offered")
		})
	}
}

func TestSearchThatFindsNothingSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addManySkills(t)
	w.plan(modeltest.ToolCall("skill_search", `{"query":"zzz"}`), modeltest.Text("ok"))
	w.completed(t)
	assert.Contains(t, w.since(t, 1)[1].Content, "Nothing was found")
}

func TestFoundSkillStaysCallableAfterCrash(t *testing.T) {
	t.Parallel()
	for before, step := range map[string]int{"search": 3, "second request": 4, "call": 5, "last request": 6} {
		t.Run("before "+before, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sent := w.addManySkills(t)
			w.plan(modeltest.ToolCall("skill_search", `{"query":"invoice"}`), modeltest.ToolCall("send_invoice", `{}`),
				modeltest.Text("Sent."))
			c := newCrash()
			w.crashBefore(step, c)
			x := w.survive(t, c)
			assert.True(t, c.done.Load(), "no crash")
			assert.Equal(t, "Sent.", outcome(t, x).Text, x.Status, postgres.Deref(x.ErrorMessage))
			assert.Equal(t, 3, len(w.transcripts(t)), "requests")
			assert.Equal(t, 1, sent.Load(), "invoices")
		})
	}
}
