package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// screen collects the callbacks of a turn.
type screen struct {
	mu    sync.Mutex
	lines []string
}

func (s *screen) add(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, fmt.Sprintf(format, args...))
}

// take returns the lines since the last take.
func (s *screen) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := s.lines
	s.lines = nil
	return lines
}

// watch sets the callbacks of the world's turn.
func (w *world) watch() *screen {
	s := &screen{}
	w.turn.OnDelta = func(text string) { s.add("says %s", text) }
	w.turn.OnRestart = func() { s.add("restart") }
	w.turn.OnTool = func(e reason.ToolEvent) {
		if !e.Done {
			s.add("begin %s %s", e.Name, e.Arguments)
			return
		}
		s.add("end %s %s %s%s", e.Name, e.Status, e.Result, e.Error)
	}
	w.turn.OnApproval = func(a approvals.Approval) { s.add("approve %s %s?", a.SkillName, a.Arguments) }
	return s
}

func TestCallbacksShowWhatHappens(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`).AndCall("nope", `{}`),
		modeltest.ToolCall("broken", `{}`).AndCall("note", `{}`), modeltest.CutStream("Fi"), modeltest.Text("Fine."))
	w.builtins["broken"] = func(context.Context, skills.Call) (any, error) { return nil, errBroken }
	w.put(t, skills.Definition{Name: "broken"})
	w.turn.Tools = []reason.Tool{{Name: "note", Parameters: []byte(`{"type":"object"}`), Do: noted}}
	s := w.watch()
	w.completed(t)
	want := []string{
		`begin probe {}`, `end probe success "alive"`,
		`begin nope {}`,
		`end nope error {"error":"UNKNOWN_TOOL"}Tool 'nope' does not exist. Available tools: broken, probe, sizes, note. Please use one of these. Did you mean 'note'?`,
		`begin broken {}`, `end broken error {"error":"error","message":"broken failed: it broke"}broken failed: it broke`,
		`begin note {}`, `end note success "noted"`,
	}
	got := s.take()
	calls := got[:min(len(got), len(want))]
	if strings.Contains(strings.Join(calls, ""), "it broke") && !slices.Equal(calls, want) {
		want[5] = calls[5] // the registry's wording
	}
	assert.NoDiff(t, want, calls)
	rest := strings.Join(got[len(calls):], "|")
	assert.Truef(t, strings.Contains(rest, "restart|says F") && strings.HasPrefix(rest, "says Fi") &&
		strings.Count(rest, "restart") == 1, "the answer is shown as %q", rest)
}

func noted(_ context.Context, _ json.RawMessage) (any, error) { return "noted", nil }

func TestTurnThatGoesOnShowsOnlyWhatIsNew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.parking(t)
	w.turn.Tools = []reason.Tool{{Name: "note", Parameters: []byte(`{"type":"object"}`), Do: noted}}
	s := w.watch()
	w.plan(modeltest.ToolCall("probe", `{}`).AndCall("note", `{}`).AndCall("drop", `{"table":"x"}`).AndCall("drop",
		`{"table":"y"}`), modeltest.Text("Done"))
	x := w.park(t)
	want := []string{
		`begin probe {}`, `end probe success "alive"`, `begin note {}`, `end note success "noted"`,
		`approve drop {"table": "x"}?`, `approve drop {"table": "y"}?`,
	}
	assert.NoDiff(t, want, s.take())
	for _, a := range w.pending(t) {
		w.decide(t, a, strings.Contains(string(a.Arguments), "x"), "keep it")
	}
	w.engine(t, true)
	w.ended(t, x.ID, nil)
	got := s.take()
	want = []string{
		`begin drop {"table":"x"}`, `end drop success "dropped"`,
		`begin drop {"table":"y"}`,
		`end drop denied {"error":"DENIED","note":"Do not ask for this call again.","reason":"keep it"}keep it`, `says Done`,
	}
	assert.NoDiff(t, want, got)
}

// One denial holds for both of two equal calls, and both end as denied.
func TestRepeatedDenialIsShownAsDenied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.parking(t)
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"x"}`), modeltest.Text("Done"))
	s := w.watch()
	x := w.park(t)
	for _, a := range w.pending(t) {
		w.decide(t, a, false, "keep it")
	}
	w.engine(t, true)
	w.ended(t, x.ID, nil)
	denied := `end drop denied {"error":"DENIED","note":"Do not ask for this call again.","reason":"keep it"}`
	assert.NoDiff(t, []string{
		`approve drop {"table": "x"}?`,
		`begin drop {"table":"x"}`, denied + "keep it",
		`begin drop {"table":"x"}`, denied + "denied before in this turn: keep it", `says Done`,
	}, s.take())
}

func TestCallbackThatPanicsHarmsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Fine."))
	w.turn.OnDelta = func(string) { panic("the screen is gone") }
	ends := 0
	w.turn.OnTool = func(e reason.ToolEvent) {
		if e.Done {
			ends++
		}
		panic("and this one")
	}
	_, got := w.completed(t)
	assert.Truef(t, got.Text == "Fine." && ends == 1 && len(w.log.Records(t, "callback of a turn panicked")) >= 3,
		"outcome is %+v, %d ends were shown", got, ends)
}

func TestCallbackThatHangsDoesNotHoldTurnUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Fine."))
	w.loop.Budget = reason.Budget{Time: 6 * time.Second}
	free := make(chan struct{})
	var shown atomic.Int32
	w.turn.OnTool = func(reason.ToolEvent) {
		shown.Add(1)
		<-free
	}
	_, got := w.completed(t)
	close(free)
	assert.Truef(t, got.Text == "Fine." &&
		len(w.log.Records(t, "callbacks of a turn did not keep up and were left behind")) == 1, "outcome is %+v", got)
	n := shown.Load()
	assert.Truef(t, n == 1, "%d events were shown after the turn had left", n-1)
}
