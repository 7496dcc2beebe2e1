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

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// dropped records the calls of the skill drop.
type dropped struct {
	mu   sync.Mutex
	args []string
}

func (d *dropped) list() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(slices.Values(d.args))
}

// parking lets the world's turn wait for approvals, and adds the skill drop, which needs one.
func (w *world) parking(t *testing.T) *dropped {
	t.Helper()
	w.turn.Approvals = reason.Park
	d := &dropped{}
	w.builtins["drop"] = func(_ context.Context, c skills.Call) (any, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.args = append(d.args, string(c.Args))
		return "dropped", nil
	}
	w.put(t, dropSkill(""))
	return d
}

func dropSkill(extra string) skills.Definition {
	fields := map[string]any{"table": map[string]any{"type": "string"}}
	if extra != "" {
		fields[extra] = map[string]any{"type": "string"}
	}
	return skills.Definition{
		Name: "drop", Trust: skills.TrustApprove,
		Parameters: map[string]any{"type": "object", "properties": fields},
	}
}

// park runs the turn until it waits.
func (w *world) park(t *testing.T) executions.Execution {
	t.Helper()
	x, err := w.engine(t, false).RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
	require.Truef(t, err == nil && x.Status == executions.Waiting,
		"execution is %s: %v %s", x.Status, err, postgres.Deref(x.ErrorMessage))
	return x
}

// ended waits for the end of an execution. Meanwhile decide, if set, gets each pending approval, and each poll calls
// the other functions.
func (w *world) ended(
	t *testing.T, id string, decide func(approvals.Approval), polls ...func(),
) (x executions.Execution) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		for _, poll := range polls {
			poll()
		}
		for _, a := range w.pending(t) {
			if decide != nil {
				decide(a)
			}
		}
		var err error
		x, err = executions.Get(t.Context(), w.pool, id)
		return err == nil && x.Status.Ended()
	}, "the execution ends")
	return x
}

func (w *world) pending(t *testing.T) []approvals.Approval {
	t.Helper()
	list, err := approvals.Pending(t.Context(), w.pool, 50)
	require.NoError(t, err)
	return list
}

func (w *world) decide(t *testing.T, a approvals.Approval, approve bool, reason string) {
	t.Helper()
	_, err := approvals.Decide(t.Context(), w.pool, a.ID, approve, "ana", reason)
	require.NoError(t, err)
}

func (w *world) approveAll(t *testing.T) func(approvals.Approval) {
	t.Helper()
	return func(a approvals.Approval) { w.decide(t, a, true, "") }
}

// The turn waits for one decision after the other. An approval that expires meanwhile is not waited for.
func TestApprovalThatExpiredDuringEarlierWaitIsDenied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	pgtest.Exec(t, w.pool, `create function expire_soon() returns trigger language plpgsql as $$ begin
		new.expires_at := clock_timestamp() + interval '2 seconds'; return new; end $$`)
	pgtest.Exec(t, w.pool, `create trigger expire_soon before insert on agent_approvals for each row
		when (new.arguments ->> 'table' = 'y') execute function expire_soon()`)
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"y"}`), modeltest.Text("Gone."))
	x := w.park(t)
	pgtest.Eventually(t, func() bool { return len(w.pending(t)) == 1 }, "the second approval expires")
	w.decide(t, w.pending(t)[0], true, "")
	w.engine(t, true)
	x = w.ended(t, x.ID, nil)
	got := outcome(t, x)
	assert.Truef(t, slices.Equal(got.Calls, []string{"drop", "drop (denied)"}), "outcome is %+v", got)
	assert.Truef(t, slices.Equal(d.list(), []string{`{"table":"x"}`}), "calls are %q", d.list())
}

// A request that an admin has approved before the call is made does not await approval.
func TestDeferredCallSaysThatItIsApproved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.parking(t)
	w.turn.Approvals = reason.Defer
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("Later."))
	for _, want := range []struct{ call, status string }{
		{"drop (awaits approval)", "pending_approval"}, {"drop (approved)", "approved"},
	} {
		_, got := w.completed(t)
		assert.Truef(t, slices.Equal(got.Calls, []string{want.call}), "calls are %q, want %q", got.Calls, want.call)
		requests := w.model.Requests()
		messages := requests[len(requests)-1].Messages
		assert.Contains(t, messages[len(messages)-1].Content, `"status":"`+want.status+`"`)
		for _, a := range w.pending(t) {
			w.decide(t, a, true, "")
		}
	}
}

func TestApprovedCallIsMadeByTurnThatWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("Gone."))
	x := w.park(t)
	asked := w.pending(t)
	if len(asked) != 1 || !asked[0].Parked || len(d.list()) != 0 || len(w.model.Requests()) != 1 {
		t.Fatalf("pending are %+v, calls %q", asked, d.list())
	}
	w.decide(t, asked[0], true, "") // while no process runs
	w.engine(t, true)
	x = w.ended(t, x.ID, nil)
	if got := outcome(t, x); got.Text != "Gone." || !slices.Equal(got.Calls, []string{"drop"}) {
		t.Errorf("execution is %s, outcome %+v", x.Status, got)
	}
	got := d.list()
	assert.Truef(t, slices.Equal(got, []string{`{"table":"x"}`}), "calls are %q", got)
	reply := w.since(t, 1)[1]
	assert.Truef(t, reply.Role == "tool" && reply.Content == `"dropped"`, "the model got %+v", reply)
	rows := named(w.rows(t, x), "drop")
	assert.Truef(t, len(rows) == 2 && rows[0].Status == "pending_approval" && rows[1].Status == "success",
		"rows are %+v", rows)
	same := pgtest.Value[bool](t, w.pool, `
		select a.consumed_for = a.execution_id || ' approved ' || a.id and c.created_at <= a.consumed_at + interval '1 second'
		  and c.step = 'approved ' || a.id
		  from agent_approvals a join agent_activity c on c.execution_id = a.execution_id and c.skill_name = 'drop'
		    and c.status = 'success'`)
	assert.True(t, same, "the grant was not consumed for the call")
}

func TestOneDenialEndsIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	w.plan(
		modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table": "x"}`),
		modeltest.ToolCall("drop", ` { "table" : "x" } `), modeltest.Text("I may not."))
	x := w.park(t)
	w.engine(t, true)
	asked := 0
	x = w.ended(t, x.ID, func(a approvals.Approval) {
		asked++
		w.decide(t, a, false, "not on a Friday")
	})
	if got := outcome(t, x); got.Text != "I may not." || len(d.list()) != 0 || asked != 1 {
		t.Errorf("execution is %s (%s), calls %q, asked %d times", x.Status, postgres.Deref(x.ErrorMessage), d.list(), asked)
	}
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals`))
	replies := 0
	for _, r := range append(w.since(t, 1), w.since(t, 2)...) {
		if r.Role != openai.ChatMessageRoleTool {
			continue
		}
		replies++
		var decoded struct{ Error, Reason string }
		err := json.Unmarshal([]byte(r.Content), &decoded)
		assert.Truef(t, err == nil && decoded.Error == "DENIED" && decoded.Reason == "not on a Friday",
			"the model got %s", r.Content)
	}
	n := pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where skill_name = 'drop'`)
	assert.Truef(t, n == 0 && replies == 3, "%d replies; a denial counts as %d calls of the skill", replies, n)
}

func TestApprovedCallMadeAgainIsAskedForAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	twice := modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"x"}`)
	w.plan(twice, modeltest.Text("Done."))
	x := w.park(t)
	w.engine(t, true)
	w.ended(t, x.ID, w.approveAll(t))
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals where status = 'consumed'`); n != 2 ||
		len(d.list()) != 2 {
		t.Errorf("%d grants for calls %q", n, d.list())
	}
}

func TestAllIsAskedAndRestIsDoneBeforeFirstWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	var probed atomic.Int32
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		probed.Add(1)
		return "alive", nil
	}
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("probe", `{}`).AndCall("drop", `{"table":"y"}`),
		modeltest.Text("Done."))
	x := w.park(t)
	asked := w.pending(t)
	require.Truef(t, len(asked) == 2 && probed.Load() == 1, "%d pending, %d probes", len(asked), probed.Load())
	w.engine(t, true)
	w.decide(t, asked[1], false, "keep y") // decides the second one first
	w.decide(t, asked[0], true, "")
	w.ended(t, x.ID, nil)
	added := w.since(t, 1)
	assert.Truef(t, len(added) == 4 && added[1].Content == `"dropped"` && added[2].Content == `"alive"` &&
		strings.Contains(added[3].Content, "keep y"), "the model got %+v", added)
	if !slices.Equal(d.list(), []string{`{"table":"x"}`}) {
		t.Errorf("calls are %q", d.list())
	}
}

func TestApprovalThatNobodyDecidesIsDenial(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("Nobody."))
	x := w.park(t)
	pgtest.Exec(t, w.pool, `update agent_executions set waiting_until = clock_timestamp() where id = @id`,
		postgres.Strict{"id": x.ID})
	w.engine(t, true)
	w.ended(t, x.ID, nil)
	if content := w.since(t, 1)[1].Content; !strings.Contains(content, `"DENIED"`) ||
		!strings.Contains(content, "nobody decided in time") || len(d.list()) != 0 {
		t.Errorf("the model got %s, calls %q", content, d.list())
	}
}

func TestGrantOfSkillThatChangedSinceIsVoid(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	w.plan(modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("Well."))
	x := w.park(t)
	w.decide(t, w.pending(t)[0], true, "")
	w.put(t, dropSkill("cascade"))
	w.engine(t, true)
	x = w.ended(t, x.ID, nil)
	if content := w.since(t, 1)[1].Content; !strings.Contains(content, `"DENIED"`) || len(d.list()) != 0 ||
		x.Status != executions.Completed {
		t.Errorf("the model got %s, calls %q", content, d.list())
	}
}

func TestSkillThatNeedsLeaveSinceTurnBeganIsNotCalledWithout(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.parking(t)
	open := dropSkill("")
	open.Trust = skills.TrustAuto
	w.put(t, open)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n > 0 {
			return modeltest.Text("ok")
		}
		w.put(t, dropSkill(""))
		return modeltest.ToolCall("drop", `{"table":"x"}`)
	})
	w.completed(t)
	if content := w.since(t, 1)[1].Content; !strings.Contains(content, `"disabled"`) || len(d.list()) != 0 {
		t.Errorf("the model got %s, calls %q", content, d.list())
	}
}

// Callbacks store the displayed text, and the run after the decision reads it. So a turn waits only after its callbacks
// have finished.
func TestTurnWaitsForLeaveWhenWhatItSaidWasShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("ok"))
	w.parking(t)
	states := make(chan string, 1)
	w.turn.OnApproval = func(approvals.Approval) {
		var status string
		for range 20 { // a slow store
			if err := w.pool.QueryRow(context.Background(), `select status from agent_executions where flow = 'turn'`).Scan(
				&status); err != nil {
				status = err.Error()
			}
			time.Sleep(5 * time.Millisecond)
		}
		states <- status
	}
	w.park(t)
	assert.Equal(t, "running", <-states)
}

// A process dies before any new step of a turn, before or after an approval. The turn continues elsewhere, with one
// request for approval and one call.
func TestCrashAnywhereAroundApproval(t *testing.T) {
	t.Parallel()
	const all = 9 // the number of the turn's steps
	for at := 1; at <= all+1; at++ {
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.parking(t)
			w.turn.OnApproval = func(approvals.Approval) {}
			w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"y"}`).AndCall("sizes", `{"limit":1}`),
				modeltest.Text("Done."))
			c := newCrash()
			w.crashBefore(at, c)
			x, _, err := w.engine(t, true).Start(t.Context(), w.pool, executions.Spec{Flow: "turn", Surface: trace.Flow})
			require.NoError(t, err)
			second := false
			got := w.ended(t, x.ID, w.approveAll(t), func() { second = second || w.restart(t, c) })
			close(c.wake)
			assert.Equal(t, at <= all, second)
			if o := outcome(t, got); o.Text != "Done." || o.Iterations != 2 {
				t.Fatalf("execution is %s (%s), outcome %+v", got.Status, postgres.Deref(got.ErrorMessage), o)
			}
			calls := d.list()
			assert.Truef(t, slices.Equal(calls, []string{`{"table":"x"}`, `{"table":"y"}`}), "calls are %q", calls)
			assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals where status = 'consumed'`))
			if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals`); n != 2 || len(w.transcripts(t)) != 2 {
				t.Errorf("%d approvals, %d model calls", n, len(w.transcripts(t)))
			}
		})
	}
}

// restart continues in another process after the first one has stopped at c. It reports whether that happened.
func (w *world) restart(t *testing.T, c *crash) bool {
	t.Helper()
	select {
	case <-c.came:
		pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
		w.engine(t, true)
		return true
	default:
		return false
	}
}

func TestCrashDuringApprovedCall(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		idempotent bool
		calls      int32
	}{"idempotent": {true, 2}, "not": {false, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.turn.Approvals = reason.Park
			c := newCrash()
			var calls atomic.Int32
			w.builtins["drop"] = func(ctx context.Context, _ skills.Call) (any, error) {
				calls.Add(1)
				c.here(ctx)
				return "dropped", nil
			}
			skill := dropSkill("")
			skill.Idempotent = test.idempotent
			w.put(t, skill)
			w.plan(modeltest.ToolCall("drop", `{"table":"x"}`), modeltest.Text("Done."))
			x := w.park(t)
			w.engine(t, true)
			got := w.ended(t, x.ID, w.approveAll(t), func() { w.restart(t, c) })
			close(c.wake)
			assert.Truef(t, got.Status == executions.Completed && calls.Load() == test.calls,
				"execution is %s (%s), %d calls", got.Status, postgres.Deref(got.ErrorMessage), calls.Load())
			assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals where status = 'consumed'`))
			content := w.since(t, len(w.model.Requests())-1)[1].Content
			assert.Truef(t, test.idempotent == (content == `"dropped"`) &&
				(test.idempotent || strings.Contains(content, `"error":"unknown"`)), "the model got %s", content)
		})
	}
}

// A decision and the wait for it run at once. The wait ends, whichever commits first.
func TestDecisionRacesWithWait(t *testing.T) {
	t.Parallel()
	for n := range 8 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.parking(t)
			w.turn.OnApproval = func(a approvals.Approval) {
				_, err := approvals.Decide(t.Context(), w.pool, a.ID, true, "ana", "")
				assert.NoError(t, err)
			}
			w.plan(modeltest.ToolCall("drop", `{"table":"x"}`).AndCall("drop", `{"table":"y"}`), modeltest.Text("Done."))
			w.engine(t, true)
			x, _, err := w.engine(t, true).Start(t.Context(), w.pool, executions.Spec{Flow: "turn", Surface: trace.Flow})
			require.NoError(t, err)
			x = w.ended(t, x.ID, nil)
			calls := d.list()
			assert.Truef(t, x.Status == executions.Completed && slices.Equal(calls, []string{`{"table":"x"}`, `{"table":"y"}`}),
				"execution is %s (%s), calls %q", x.Status, postgres.Deref(x.ErrorMessage), calls)
		})
	}
}

func TestNothingThatModelSaysApproves(t *testing.T) {
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
		assert.Truef(t, !strings.Contains(name, "approv") && !strings.Contains(name, "decide"),
			"the model is offered %s", name)
	}
	rows := named(w.rows(t, x), "decide_approval")
	assert.Truef(t, len(rows) == 1 && rows[0].Class == "unknown_tool", "rows are %+v", rows)
}
