package heartbeat_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/memory"
)

// What a heartbeat remembers goes to the memory of its agent; a fact of the same key in the shared one is no conflict.
func TestAHeartbeatSavesToTheMemoryOfItsAgent(t *testing.T) {
	t.Parallel()
	w := knowing(t, modeltest.ToolCall("remember", `{"key":"contact","value":"Bea"}`), modeltest.Text("Done."))
	w.beat.Loop.Agents = &agents.Directory{}
	house := agents.Definition{Name: "house", Default: true, Memory: agents.MemoryOwn}
	if _, err := agents.Put(t.Context(), w.pool, house, "workspace"); err != nil {
		t.Fatal(err)
	}
	w.completed(t)
	if e := w.contact(t); string(e.Value) != `"Ana"` {
		t.Errorf("the shared memory has %s", e.Value)
	}
	if e, err := memory.Owner("house").Get(t.Context(), w.pool, "observation", "contact"); err != nil || string(e.Value) != `"Bea"` {
		t.Errorf("the agent's own memory has %s, %v", e.Value, err)
	}
	if open, err := memory.Conflicts(t.Context(), w.pool, memory.ConflictFilter{}); err != nil || len(open) != 0 {
		t.Errorf("there are conflicts: %v, %v", open, err)
	}
}
