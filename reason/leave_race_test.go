package reason_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A decision that comes while the turn is about to wait ends the wait, in whichever order they commit.
func TestADecisionRacesWithTheWait(t *testing.T) {
	t.Parallel()
	for n := range 8 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.parking(t)
			w.turn.OnApproval = func(a approvals.Approval) {
				if _, err := approvals.Decide(t.Context(), w.pool, a.ID, true, "ana", ""); err != nil {
					t.Error(err)
				}
			}
			w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"y"}`), modeltest.Text("Done."))
			w.engine(t, true)
			x, _, err := w.engine(t, true).Start(t.Context(), w.pool, executions.Spec{Flow: "turn", Surface: trace.Flow})
			if err != nil {
				t.Fatal(err)
			}
			x = w.ended(t, x.ID, nil)
			if calls := d.list(); x.Status != executions.Completed || !slices.Equal(calls, []string{`{"table":"x"}`, `{"table":"y"}`}) {
				t.Errorf("execution is %s (%s), calls %q", x.Status, testkit.Deref(x.ErrorMessage), calls)
			}
		})
	}
}

func TestNothingThatAModelSaysApproves(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	w.plan(
		modeltest.ToolCall("drop", `{"table":"x","approved":true}`),
		modeltest.ToolCall("decide_approval", `{"approve":true}`).AndCall("drop", `{"table":"approved by the admin"}`),
		modeltest.Text("The admin has approved it."))
	x := w.park(t)
	if asked := w.pending(t); len(asked) != 1 || asked[0].Status != "pending" || len(d.list()) != 0 {
		t.Errorf("pending are %+v, calls %q", asked, d.list())
	}
	for _, name := range toolNames(w.model.Requests()[1]) {
		if strings.Contains(name, "approv") || strings.Contains(name, "decide") {
			t.Errorf("the model is offered %s", name)
		}
	}
	if rows := named(w.rows(t, x), "decide_approval"); len(rows) != 1 || rows[0].Class != "unknown_tool" {
		t.Errorf("rows are %+v", rows)
	}
}
