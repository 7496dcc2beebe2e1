package heartbeat_test

import (
	"maps"
	"strings"
	"sync/atomic"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/trace"
)

// newHeartbeatWithMemory returns a heartbeat with the memory builtins and a value for the key contact.
func newHeartbeatWithMemory(t *testing.T, script ...modeltest.Reply) *testHeartbeat {
	t.Helper()
	w := newTestHeartbeat(t)
	maps.Copy(w.builtins, builtins.New(w.pool, nil, nil))
	_, err := builtins.Put(t.Context(), w.pool)
	require.NoError(t, err)
	w.storeMemory(t, "Ana")
	w.addObjective(t, objectives.Definition{Name: "tidy", Goal: "Keep it tidy.", Steps: []string{"a"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective tidy": script})
	return w
}

// storeMemory writes contact as an admin.
func (w *testHeartbeat) storeMemory(t *testing.T, value string) {
	t.Helper()
	_, err := memory.Save(t.Context(), w.pool, memory.Note{
		Category: "observation", Key: "contact", Value: value,
		TraceID: "op_1",
	})
	require.NoError(t, err)
}

func (w *testHeartbeat) contact(t *testing.T) memory.Entry {
	t.Helper()
	e, err := memory.Shared.Get(t.Context(), w.pool, "observation", "contact")
	require.NoError(t, err)
	return e
}

var (
	recallCall   = modeltest.ToolCall("recall", `{"category":"observation"}`)
	rememberCall = modeltest.ToolCall("remember", `{"key":"contact","value":"Bea"}`)
)

func TestStaleNoteIsConflict(t *testing.T) {
	t.Parallel()
	w := newHeartbeatWithMemory(t)
	script := []modeltest.Reply{recallCall, rememberCall}
	var wrote atomic.Bool
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(req.Messages[1].Content, "Reflect") && wrote.CompareAndSwap(false, true) {
			w.storeMemory(t, "Carla, says the admin")
		}
		return replyForTask(map[string][]modeltest.Reply{"Objective tidy": script}, req)
	})
	x, got := w.runCompleted(t)
	if e := w.contact(t); string(e.Value) != `"Carla, says the admin"` || e.Revision != 2 {
		t.Errorf("it holds %s at %d", e.Value, e.Revision)
	}
	open, err := memory.Conflicts(t.Context(), w.pool, memory.ConflictFilter{})
	assert.Truef(t, err == nil && len(open) == 1 && string(open[0].Value) == `"Bea"` && open[0].IfRevision == 1 &&
		open[0].FoundRevision == 2 && open[0].TraceID == x.TraceID && *open[0].ExecutionID == x.ID, "the conflict is %+v, %v",
		open, err)
	assert.Contains(t, got.Phases["save_memories"], "1 kept as conflicts")
	pgtest.Equal(t, w.pool, "skipped", `select status from agent_activity where skill_name = 'save_memory'`)
}

func TestNoteReplacesReadValue(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script    []modeltest.Reply
		want      string
		conflicts int
	}{
		"read":     {[]modeltest.Reply{recallCall, rememberCall}, `"Bea" 2`, 0},
		"not read": {[]modeltest.Reply{rememberCall}, `"Ana" 1`, 1},
		"noted again": {[]modeltest.Reply{
			recallCall, rememberCall,
			modeltest.ToolCall("remember", `{"key":"contact","value":"Dora"}`),
		}, `"Dora" 3`, 0},
		"a secret between": {[]modeltest.Reply{
			recallCall, rememberCall, // the model is told that it is a secret
			modeltest.ToolCall("remember", `{"key":"contact","value":"password: hunter2-and-more"}`),
			modeltest.ToolCall("remember", `{"key":"contact","value":"Dora"}`),
		}, `"Dora" 3`, 0},
		"not read twice": {
			[]modeltest.Reply{rememberCall, modeltest.ToolCall("remember", `{"key":"contact","value":"Dora"}`)},
			`"Ana" 1`, 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHeartbeatWithMemory(t, test.script...)
			w.runCompleted(t)
			pgtest.Equal(t, w.pool, test.want, `select value::text || ' ' || revision from agent_memory`)
			open, err := memory.Conflicts(t.Context(), w.pool, memory.ConflictFilter{})
			assert.Truef(t, err == nil && len(open) == test.conflicts, "%d conflicts, %v", len(open), err)
		})
	}
}

func TestObjectiveNoteReplacesPromptValue(t *testing.T) {
	t.Parallel()
	update := modeltest.ToolCall("objective_update", `{"objective":"tidy","note":"half of it is done"}`)
	for name, test := range map[string]struct {
		meanwhile string
		script    []modeltest.Reply
		want      string
	}{
		"nobody wrote": {"", []modeltest.Reply{update}, "half of it is done"},
		"somebody wrote": {
			"look at b first, says the admin", []modeltest.Reply{update}, "look at b first, says the admin",
		},
		"decided by the model": {"look at b first, says the admin", []modeltest.Reply{update, update}, "half of it is done"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHeartbeatWithMemory(t, test.script...)
			note := func(words string) {
				_, err := objectives.SetNote(t.Context(), w.pool, "tidy", words, "op_1", 0)
				assert.NoError(t, err)
			}
			note("nothing is done")
			var wrote atomic.Bool
			w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
				if strings.Contains(req.Messages[1].Content, "Objective tidy") && test.meanwhile != "" &&
					wrote.CompareAndSwap(false, true) {
					note(test.meanwhile)
				}
				return replyForTask(map[string][]modeltest.Reply{"Objective tidy": test.script}, req)
			})
			w.runCompleted(t)
			pgtest.Equal(t, w.pool, test.want, `select note from agent_objectives`)
			first := pgtest.Value[string](t, w.pool, `select status from agent_activity where skill_name = 'objective_update'
				order by id limit 1`)
			assert.Equal(t, test.meanwhile != "", (first == "skipped"), first)
		})
	}
}

// The heartbeats of an agent replace their own notes without a conflict.
func TestNoteReplacesEarlierHeartbeat(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before    func(t *testing.T, w *testHeartbeat)
		want      string
		conflicts int
	}{
		"an earlier heartbeat's": {
			func(t *testing.T, w *testHeartbeat) { w.recordWrite(t, trace.Heartbeat, "Ana") },
			`"Bea" 2`, 0,
		},
		"another agent's": {func(t *testing.T, w *testHeartbeat) {
			w.recordWrite(t, trace.Heartbeat, "Ana")
			pgtest.Exec(t, w.pool, `insert into agent_executions (trace_id, surface, flow, agent)
				select m.trace_id, 'heartbeat', 'heartbeat', 'sales' from agent_memory m`)
			pgtest.Exec(t, w.pool, `update agent_executions set status = 'running' where agent = 'sales'`)
			pgtest.Exec(t, w.pool, `update agent_executions set status = 'completed' where agent = 'sales'`)
		}, `"Ana" 1`, 1},
		"an admin's": {func(t *testing.T, w *testHeartbeat) { w.recordWrite(t, trace.Operate, "Ana") }, `"Ana" 1`, 1},
		"changed by an admin": {func(t *testing.T, w *testHeartbeat) {
			w.recordWrite(t, trace.Heartbeat, "Ana")
			w.recordWrite(t, trace.Operate, "Carla")
		}, `"Carla" 2`, 1},
		"an admin's of the same value": {
			func(t *testing.T, w *testHeartbeat) { w.recordWrite(t, trace.Operate, "Bea") },
			`"Bea" 1`, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHeartbeatWithMemory(t, rememberCall)
			pgtest.Exec(t, w.pool, `delete from agent_memory`)
			pgtest.Exec(t, w.pool, `delete from agent_memory_forgotten`)
			test.before(t, w)
			w.runCompleted(t)
			pgtest.Equal(t, w.pool, test.want, `select value::text || ' ' || revision from agent_memory`)
			open, err := memory.Conflicts(t.Context(), w.pool, memory.ConflictFilter{})
			assert.Truef(t, err == nil && len(open) == test.conflicts, "%d conflicts, %v", len(open), err)
		})
	}
}

// recordWrite writes contact as a run of a surface.
func (w *testHeartbeat) recordWrite(t *testing.T, s trace.Surface, value string) {
	t.Helper()
	note := memory.Note{Category: "observation", Key: "contact", Value: value, TraceID: string(trace.New(s))}
	_, err := memory.Save(t.Context(), w.pool, note)
	require.NoError(t, err)
}
