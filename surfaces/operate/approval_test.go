package operate_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// withGuardedSkill returns a database whose model calls a skill that needs approval, then reports the result.
func withGuardedSkill(t *testing.T) (w *testDatabase, called *atomic.Int64) {
	t.Helper()
	w = newTestDatabase(t, modeltest.ToolCall("wipe", `{"table":"orders","password":"hunter2"}`),
		modeltest.Text("It is over."))
	called = &atomic.Int64{}
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) {
		called.Add(1)
		return "wiped", nil
	})
	return w, called
}

// decide decides an approval in another process.
func (w *testDatabase) decide(t *testing.T, id string, approve bool) {
	t.Helper()
	_, err := approvals.Decide(t.Context(), w.pool, id, approve, "admin", "because")
	require.NoError(t, err)
}

func TestInlineApprovalKeepsStreaming(t *testing.T) {
	t.Parallel()
	for name, approve := range map[string]bool{"approved": true, "rejected": false} {
		t.Run(name, func(t *testing.T) {
			w, called := withGuardedSkill(t)
			p := w.process(t, false) // no other process works, so the listener must resume the turn
			b := p.send(t, p.open(t, ""), "Wipe orders.", false)
			asked := waitEvent[operate.Approval](t, b, "approval")
			var args map[string]string
			err := json.Unmarshal(asked.Arguments, &args)
			assert.Truef(t, err == nil && args["table"] == "orders" && args["password"] == "hunter2",
				"asked for %s, %v", asked.Arguments, err)
			assert.Truef(t, asked.Skill == "wipe" && !asked.ExpiresAt.IsZero(), "asked %+v", asked)
			start := waitEvent[operate.Start](t, b, "start")
			x := enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
			assert.Equal(t, "approval", postgres.Deref(x.WaitingFor), "it waits for")
			assert.Equal(t, 0, called.Load())
			w.decide(t, asked.ID, approve)
			done, err := b.wait(t)
			if err != nil || done.Text != "It is over." || b.text() != "It is over." {
				t.Errorf("done %+v, %v; streamed %q", done, err, b.text())
			}
			assert.Equal(t, map[bool]int64{true: 1, false: 0}[approve], called.Load())
			assert.Equal(t, 1, strings.Count(b.names(), "approval"), b.names())
		})
	}
}

// sendGuarded sends a message that needs an approval, and waits until its turn waits for the approval.
func (p *process) sendGuarded(
	t *testing.T, w *testDatabase, s *operate.Session,
) (b *runningTurn, asked operate.Approval, start operate.Start) {
	t.Helper()
	b = p.send(t, s, "Wipe orders.", false)
	asked = waitEvent[operate.Approval](t, b, "approval")
	start = waitEvent[operate.Start](t, b, "start")
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
	return b, asked, start
}

func TestDetachedTurnFinishesHeadless(t *testing.T) {
	t.Parallel()
	w, called := withGuardedSkill(t)
	p := w.process(t, false)
	s := p.open(t, "")
	b, asked, start := p.sendGuarded(t, w, s)
	b.leave(context.Canceled) // the connection has broken
	done, err := b.wait(t)
	assert.Truef(t, err == nil && done.Ended == operate.WaitingApproval, "the turn was left as %+v, %v", done, err)
	assert.Equal(t, "", w.laneHolder(t))
	w.process(t, true) // a working process
	w.decide(t, asked.ID, true)
	x := enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
	assert.Truef(t, called.Load() == 1 && x.ResultSummary == "It is over.",
		"called %d times, %q", called.Load(), x.ResultSummary)
	pgtest.Equal(t, w.pool, "It is over.",
		`select content from agent_messages where thread_id = $1 and role = 'assistant'`, s.ID())
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the headless turn frees the lane")
}

func TestHeadlessTurnWaitsForLane(t *testing.T) {
	t.Parallel()
	w, called := withGuardedSkill(t)
	p := w.process(t, true)
	b, asked, start := p.sendGuarded(t, w, p.open(t, ""))
	b.leave(context.Canceled)
	_, err := b.wait(t)
	require.NoError(t, err)
	other := p.open(t, "")
	require.NoError(t, other.Hold(t.Context(), false))
	w.decide(t, asked.ID, true)
	pgtest.Eventually(t, func() bool {
		x := w.execution(t, start.ExecutionID)
		return x.Status == executions.Waiting && postgres.Deref(x.WaitingFor) == "lane"
	}, "the turn waits for the other admin")
	assert.Equal(t, 0, called.Load())
	require.NoError(t, other.Close(t.Context()))
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
	assert.Equal(t, 1, called.Load())
}

func TestHeadlessApprovalFreesLane(t *testing.T) {
	t.Parallel()
	one, two := modeltest.ToolCall("wipe", `{"table":"one"}`), modeltest.ToolCall("wipe", `{"table":"two"}`)
	for name, replies := range map[string][]modeltest.Reply{
		"own":        {one, two},
		"same reply": {one.AndCall("wipe", `{"table":"two"}`)},
		"delegated":  {one, modeltest.ToolCall("delegate", `{"task":"Wipe two."}`), two, modeltest.Text("Two.")},
	} {
		t.Run(name, func(t *testing.T) { checkHeadlessApproval(t, replies) })
	}
}

func checkHeadlessApproval(t *testing.T, replies []modeltest.Reply) {
	t.Helper()
	w := newTestDatabase(t, append(replies, modeltest.Text("Both."))...)
	var called atomic.Int64
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) {
		called.Add(1)
		return "wiped", nil
	})
	p := w.process(t, true, w.delegates(t))
	b := p.send(t, p.open(t, ""), "Wipe both.", false)
	start := waitEvent[operate.Start](t, b, "start")
	first := enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
	b.leave(context.Canceled)
	_, err := b.wait(t)
	require.NoError(t, err)
	w.decide(t, postgres.Deref(first.WaitingKey), true)
	second := ""
	pgtest.Eventually(t, func() bool {
		waiting, err := approvals.Pending(t.Context(), w.pool, 10)
		if len(waiting) == 1 {
			second = waiting[0].ID
		}
		return err == nil && second != "" && called.Load() == 1 &&
			w.execution(t, start.ExecutionID).Status == executions.Waiting
	}, "the second approval is requested")
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" },
		"the turn that waits for a person frees the lane")
	w.decide(t, second, true)
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
}

// Another process runs the decided calls, and requests a further approval. The listener reports all events as if the
// turn had run here.
func TestCallsOfAnotherProcessAreReported(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("wipe", `{"table":"one"}`), modeltest.ToolCall("wipe", `{"table":"two"}`),
		modeltest.Text("One of them."))
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) { return "wiped", nil })
	p := w.process(t, false, func(o *operate.Options) { o.Poll = time.Hour }) // it polls when it is notified
	s := p.open(t, "")
	b, first, start := p.sendGuarded(t, w, s)
	w.process(t, true)
	w.decide(t, first.ID, true)
	pgtest.Until(t, w.pool, "lane", `select coalesce(waiting_for, '') from agent_executions`)
	s.Wake() // it lends the lane
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_approvals where status = 'pending'`)
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
	s.Wake()
	pgtest.Eventually(t, func() bool { return strings.Count(b.names(), "approval") == 2 }, "it asks again")
	second, _ := lastEvent[operate.Approval](&b.eventLog, "approval")
	w.decide(t, second.ID, false)
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
	s.Wake()
	done, err := b.wait(t)
	assert.Truef(t, err == nil && done.Text == "One of them." && b.text() == done.Text,
		"done %+v, %v; %q", done, err, b.text())
	assert.Equal(t, "start approval tool tool approval tool tool delta done", b.names())
	var calls []string
	for _, e := range b.events {
		if c, is := e.Data.(operate.ToolCall); is {
			calls = append(calls, c.Name+" "+string(c.Arguments)+" "+c.Status+" "+string(c.Result)+c.Error)
		}
	}
	assert.NoDiff(t, []string{
		`wipe {"table":"one"} started `, `wipe {"table":"one"} success "wiped"`,
		`wipe {"table":"two"} started `, `wipe {"table":"two"} denied because`,
	}, calls)
}

func TestApprovalDecidedLater(t *testing.T) {
	t.Parallel()
	w, called := withGuardedSkill(t)
	p := w.process(t, false)
	s := p.open(t, "")
	b, asked, start := p.sendGuarded(t, w, s)
	b.leave(operate.ErrDetach)
	if done, err := b.wait(t); err != nil || done.Ended != operate.WaitingApproval || w.laneHolder(t) == "" {
		t.Errorf("left as %+v, %v; lane %q", done, err, w.laneHolder(t))
	}
	w.decide(t, asked.ID, true)
	var events eventLog
	done, err := s.Resume(t.Context(), start.ExecutionID, events.add)
	if err != nil || done.Text != "It is over." || events.text() != done.Text || called.Load() != 1 {
		t.Errorf("resumed: %+v, %v, streamed %q", done, err, events.text())
	}
}

func TestInterruptCancelsWaitingTurn(t *testing.T) {
	t.Parallel()
	w, called := withGuardedSkill(t)
	p := w.process(t, false)
	b, asked, start := p.sendGuarded(t, w, p.open(t, ""))
	b.leave(operate.ErrInterrupt)
	_, err := b.wait(t)
	assert.Error(t, err, "the turn has an answer")
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Cancelled)
	_, err = approvals.Decide(t.Context(), w.pool, asked.ID, true, "admin", "")
	assert.Truef(t, err != nil && called.Load() == 0, "an approval of a cancelled turn can be granted: %v", err)
}
