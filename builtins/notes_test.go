package builtins_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// noter is a run that writes the note of an objective.
type noter struct {
	t        *testing.T
	registry *skills.Registry
	skills   map[string]skills.Skill
	seen     memory.Seen
}

func newNoter(t *testing.T, pool *pgxpool.Pool) *noter {
	t.Helper()
	registry, all := newRegistry(t, pool)
	for _, name := range []string{"objectives_list", "objective_update"} {
		s, err := skills.Get(t.Context(), pool, name)
		require.NoError(t, err)
		all[name] = s
	}
	return &noter{t, registry, all, memory.Seen{}}
}

// call makes a call like the runtime, with the versions that the run has read, and notes the answer.
func (n *noter) call(name string, args map[string]any) map[string]any {
	n.t.Helper()
	raw, err := json.Marshal(args)
	require.NoError(n.t, err)
	ctx := trace.With(n.t.Context(), trace.Span{TraceID: traceID, Agent: "agent", Surface: trace.Heartbeat})
	answer, err := n.registry.Invoke(ctx,
		skills.Call{Skill: n.skills[name], Args: builtins.WithRevisions(n.skills[name], raw, n.seen)})
	require.NoError(n.t, err)
	n.seen.Add(builtins.Sights(n.skills[name], answer, len(answer))...)
	n.seen.Add(builtins.SightsWritten(n.skills[name], answer)...)
	var got map[string]any
	require.NoError(n.t, json.Unmarshal(answer, &got))
	return got
}

func (n *noter) note(words string, steps ...string) map[string]any {
	n.t.Helper()
	return n.call("objective_update", map[string]any{
		"objective": "tidy", "note": words,
		"add_steps": append([]string{}, steps...),
	})
}

func tidy(t *testing.T, pool *pgxpool.Pool) objectives.Objective {
	t.Helper()
	_, err := objectives.Put(t.Context(), pool, objectives.Definition{Name: "tidy", Goal: "Be tidy."},
		objectives.SourceAdmin)
	require.NoError(t, err)
	o, err := objectives.Get(t.Context(), pool, "tidy")
	require.NoError(t, err)
	return o
}

func TestANoteReplacesOnlyTheOneThatItsRunHasRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := tidy(t, pool)
	one, two := newNoter(t, pool), newNoter(t, pool)
	stands := func(want string) {
		t.Helper()
		o, err := objectives.Get(t.Context(), pool, o.ID)
		assert.Truef(t, err == nil && o.Note == want, "the note is %q, want %q, %v", o.Note, want, err)
	}
	refused := func(answer map[string]any, theirs string) {
		t.Helper()
		current, _ := answer["theirs"].(map[string]any)
		assert.Truef(t, answer["error"] == "conflict" && current["note"] == theirs && answer["yours"] != nil,
			"the answer is %v", answer)
	}
	one.note("one") // no note existed
	one.note("one, again")
	refused(two.note("two", "sweep"), "one, again")
	stands("one, again")
	if steps, err := objectives.Steps(t.Context(), pool, o.ID); err != nil || len(steps) != 0 {
		t.Errorf("a refused call has planned %v, %v", steps, err)
	}
	two.note("one, again, and two", "sweep")
	refused(one.note("one only"), "one, again, and two")
	stands("one, again, and two")
	answer := newNoter(t, pool).note("one, again, and two")
	assert.Truef(t, answer["error"] == nil, "a call repeated after a crash does not find its own note: %v", answer)
	late := newNoter(t, pool)
	late.call("objectives_list", map[string]any{})
	_, err := objectives.Put(t.Context(), pool, objectives.Definition{Name: "tidy", Goal: "Be clean."},
		objectives.SourceAdmin)
	require.NoError(t, err)
	refused(late.note("tidy enough"), "one, again, and two")
	late.call("objective_update", map[string]any{"objective": o.ID, "note": "not clean yet"}) // by its id
	stands("not clean yet")
	for _, revision := range []int{0, 1, -1} { // without a record of reads
		answer, err := late.registry.Invoke(trace.With(t.Context(), trace.Span{TraceID: traceID}), skills.Call{
			Skill: late.skills["objective_update"],
			Args:  fmt.Appendf(nil, `{"objective":"tidy","note":"replaced","revision":%d}`, revision),
		})
		_, conflict := builtins.IsConflict(late.skills["objective_update"], answer)
		assert.Truef(t, err == nil && conflict == (revision >= 0), "at %d: %s, %v", revision, answer, err)
	}
	stands("replaced")
}

func TestANoteThatWasCutWasNotRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tidy(t, pool)
	_, err := objectives.SetNote(t.Context(), pool, "tidy", strings.Repeat("long ", 200), "op_1", 0)
	require.NoError(t, err)
	n := newNoter(t, pool)
	n.call("objectives_list", map[string]any{})
	answer := n.note("short")
	assert.Truef(t, answer["error"] == "conflict", "a partly shown note was replaced: %v", answer)
	n = newNoter(t, pool)
	n.call("objectives_list", map[string]any{"objective": "tidy"})
	if answer := n.note("short"); answer["error"] != nil || answer["note"] != "short" {
		t.Errorf("a note that was shown whole was not replaced: %v", answer)
	}
}

// house is an installation with agents of every kind of memory.
type house struct {
	t        *testing.T
	pool     *pgxpool.Pool
	registry *skills.Registry
}

func newHouse(t *testing.T) *house {
	t.Helper()
	h := &house{t: t, pool: pgtest.DB(t)}
	for _, d := range []agents.Definition{
		{Name: "front", Default: true},
		{Name: "sales", Memory: agents.MemoryOwn},
		{Name: "billing", Memory: agents.MemoryOwn},
		{Name: "mute", Memory: agents.MemoryNone},
	} {
		_, err := agents.Put(t.Context(), h.pool, d)
		require.NoError(t, err)
	}
	_, err := builtins.Put(t.Context(), h.pool)
	require.NoError(t, err)
	h.registry, err = skills.New(skills.Options{Builtins: builtins.New(h.pool, nil, nil)})
	require.NoError(t, err)
	return h
}

// as calls a skill for an agent.
func (h *house) as(ctx context.Context, agent, name, args string) (string, error) {
	h.t.Helper()
	skill, err := skills.Get(ctx, h.pool, name)
	require.NoError(h.t, err)
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Heartbeat), Agent: agent, Surface: trace.Heartbeat})
	answer, err := h.registry.Invoke(ctx, skills.Call{Skill: skill, Args: json.RawMessage(args)})
	return string(answer), err
}

func (h *house) must(agent, name, args string) string {
	h.t.Helper()
	answer, err := h.as(h.t.Context(), agent, name, args)
	require.NoError(h.t, err, name, "as", agent)
	return answer
}

// Each of three agents keeps a value under the same key, then changes, finds and deletes its own.
func TestAnAgentsOwnMemoryIsNoOtherAgents(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	all := []string{"front", "sales", "billing"}
	for _, agent := range all {
		answer := h.must(agent, "memory_write", fmt.Sprintf(`{"key": "contact", "value": "number of %s"}`, agent))
		assert.Truef(t, strings.Contains(answer, `"revision":1`), "%s finds the key of another agent: %s", agent, answer)
	}
	for _, agent := range all {
		for _, ask := range []struct{ name, args string }{
			{"recall", `{}`},
			{"recall", `{"category": "general"}`},
			{"memory_search", `{"query": "number"}`},
			{"memory_search", `{"query": "number", "category": "general"}`},
		} {
			answer := h.must(agent, ask.name, ask.args)
			for _, other := range all {
				if seen := strings.Contains(answer, "number of "+other); seen != (agent == other) {
					t.Errorf("%s %s as %s shows what %s keeps: %t; %s", ask.name, ask.args, agent, other, seen, answer)
				}
			}
		}
	}
	for i, agent := range all {
		h.must(agent, "memory_write", fmt.Sprintf(`{"key": "contact", "value": "new of %s", "revision": 1}`, agent))
		h.must(agent, "memory_forget", `{"key": "contact", "revision": 2}`)
		answer := h.must(agent, "memory_forget", `{"key": "contact", "revision": 2}`)
		assert.Truef(t, strings.Contains(answer, `"forgotten":false`), "%s forgets twice: %s", agent, answer)
		for _, other := range all[i+1:] {
			answer := h.must(other, "recall", `{}`)
			assert.Truef(t, strings.Contains(answer, "number of "+other), "%s removed an entry of %s: %s", agent, other, answer)
		}
	}
	for _, agent := range all {
		answer := h.must(agent, "memory_write", `{"key": "contact", "value": 1}`)
		assert.Truef(t, strings.Contains(answer,
			`"revision":3`), "the revisions of %s do not go on by themselves: %s", agent, answer)
	}
}

func TestAConflictIsAboutOneAgentsMemory(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.must("front", "memory_write", `{"key": "contact", "value": "shared"}`)
	h.must("sales", "memory_write", `{"key": "contact", "value": "ours"}`)
	late := memory.Note{Owner: "sales", Key: "contact", Category: "general", Value: "late", Revision: 7}
	_, err := memory.Save(t.Context(), h.pool, late)
	conflict, ok := errors.AsType[*memory.ConflictError](err)
	require.Truef(t, ok && string(conflict.Theirs.Value) == `"ours"`, "a write to sales met %v", err)
	id, err := memory.StoreConflict(t.Context(), h.pool, late, conflict, "")
	require.NoError(t, err)
	other := memory.Owner("billing")
	list, err := memory.Conflicts(t.Context(), h.pool, memory.ConflictFilter{Owner: &other})
	assert.Truef(t, err == nil && len(list) == 0, "billing has the conflicts %v, %v", list, err)
	tx, err := h.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = memory.Decide(t.Context(), tx, id, memory.Decision{Take: true, By: "admin", IfRevision: 1})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	if ours, shared := h.must("sales", "recall", `{}`), h.must("front", "recall", `{}`); !strings.Contains(ours, "late") ||
		!strings.Contains(shared, `"shared"`) {
		t.Errorf("the decision wrote: sales %s, shared %s", ours, shared)
	}
}

func TestWhoseMemoryItIsDependsOnWhoActs(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.must("visitor_chat", "memory_write", `{"key": "k", "value": "shared one"}`)
	assert.Contains(t, h.must("front", "recall", `{}`), "shared one")
	for name, args := range map[string]string{
		"recall": `{}`, "memory_search": `{"query": "one"}`, "memory_write": `{"key": "k", "value": 1}`,
		"memory_forget": `{"key": "k"}`,
	} {
		_, err := h.as(t.Context(), "mute", name, args)
		assert.ErrorContains(t, err, "has no memory (memory: none)", name)
	}
	// A turn finishes with the agent version of its start, even if its agent is removed meanwhile.
	directory := &agents.Directory{}
	sales, err := directory.Find(t.Context(), h.pool, "sales")
	require.NoError(t, err)
	_, err = agents.Remove(t.Context(), h.pool, []string{"front"})
	require.NoError(t, err)
	_, err = h.as(agents.With(t.Context(), sales), "sales", "memory_write", `{"key": "late", "value": "of sales"}`)
	require.NoError(t, err)
	if answer := h.must("front", "recall", `{}`); strings.Contains(answer, "of sales") {
		t.Errorf("a removed agent's turn has written to the shared memory: %s", answer)
	}
	owner, err := directory.MemoryOf(t.Context(), h.pool, "sales")
	assert.Truef(t, owner == "sales" && err == nil, "the memory of a removed agent is %q, %v", owner, err)
	_, err = directory.MemoryOf(t.Context(), h.pool, "nobody")
	assert.Error(t, err, "no agent has a memory")
}
