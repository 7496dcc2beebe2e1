package operate_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestTurnExecution(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("Good morning."), modeltest.Text("You said hello."))
	p := w.process(t, false)
	s := p.open(t, "")
	if !strings.HasPrefix(s.ID(), "ses_") {
		t.Errorf("the session's id is %s", s.ID())
	}
	var traces []string
	for _, message := range []string{"Hello.", "What did\x00 I say?"} {
		var events eventLog
		done, err := s.Turn(t.Context(), message, false, events.add)
		require.NoError(t, err)
		assert.Equal(t, "start delta done", events.names())
		if events.text() != done.Text || done.Ended != "answered" || done.SessionID != s.ID() || done.Usage.TotalTokens == 0 {
			t.Errorf("streamed %q, done %+v", events.text(), done)
		}
		id, err := trace.Parse(done.TraceID)
		assert.Truef(t, err == nil && id.Surface() == trace.Operate, "the trace is %s: %v", done.TraceID, err)
		traces = append(traces, done.TraceID)
		x := w.execution(t, done.ExecutionID)
		assert.Truef(t, x.Queue == executions.Interactive && x.Flow == operate.Flow && postgres.Deref(x.ThreadID) == s.ID() &&
			x.Surface == "operate", "execution is %+v", x)
	}
	assert.True(t, traces[0] != traces[1], "two turns share a trace")
	var asked []string
	for _, m := range w.model.Requests()[1].Messages[1:] {
		asked = append(asked, m.Role+": "+m.Content)
	}
	assert.NoDiff(t, []string{"user: Hello.", "assistant: Good morning.", "user: What did I say?"}, asked)
	pgtest.Equal(t, w.pool, "user received, assistant sent, user received, assistant sent",
		`select string_agg(role || ' ' || status, ', ' order by seq) from agent_messages where thread_id = $1`, s.ID())
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_activity where lane <> 'operate'`)
}

func TestToolCallEventsHideSecrets(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("look", `{"password":"hunter2","table":"orders"}`).AndCall("broken", `{}`),
		modeltest.Text("Done."))
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) {
		return map[string]any{"api_key": "sk-live-0123456789abcdef", "rows": 42}, nil
	})
	w.builtin(t, "broken", "", func(context.Context, skills.Call) (any, error) {
		return nil, &skills.CallError{Class: "http_status", Message: "the service answered 503"}
	})
	var events eventLog
	done, err := w.process(t, false).open(t, "").Turn(t.Context(), "Look.", false, events.add)
	require.NoError(t, err)
	assert.Equal(t, "start tool tool tool tool delta done", events.names())
	var calls []operate.ToolCall
	for _, e := range events.events {
		if c, ok := e.Data.(operate.ToolCall); ok {
			calls = append(calls, c)
		}
	}
	assert.Truef(t, string(calls[0].Arguments) == `{"password":"[redacted]","table":"orders"}` &&
		calls[0].Status == "started", "first event is %+v: %s", calls[0], calls[0].Arguments)
	assert.Truef(t, string(calls[1].Result) == `{"api_key":"[redacted]","rows":42}` && calls[1].Status == "success" &&
		calls[1].DurationMS != nil, "second event is %+v: %s", calls[1], calls[1].Result)
	assert.Truef(t, calls[3].Status == "error" && strings.Contains(calls[3].Error, "503") && calls[3].ID == calls[2].ID &&
		calls[3].ID != calls[1].ID, "fourth event is %+v", calls[3])
	assert.Equal(t, "Done.", done.Text, done)
}

// withHangingTurn returns a database with an http skill that never responds, or a sql skill that sleeps.
func withHangingTurn(t *testing.T, kind string) (w *testDatabase, runs, stopped func() bool) {
	t.Helper()
	w = newTestDatabase(t, modeltest.ToolCall("slow", `{}`))
	if kind == "sql" {
		w.addSkill(t, skills.Definition{Name: "slow", Handler: "sql:select pg_sleep(600)"})
		sleeping := func() bool {
			return pgtest.Value[int](t, w.pool, `select count(*) from pg_stat_activity where datname = current_database()
				and state = 'active'
				and query like '%pg_sleep(600)%' and pid <> pg_backend_pid()`) > 0
		}
		return w, sleeping, func() bool { return !sleeping() }
	}
	var came, gone atomic.Bool
	url := testkit.Serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		came.Store(true)
		<-r.Context().Done()
		gone.Store(true)
	}))
	w.addSkill(t, skills.Definition{Name: "slow", Handler: "http:GET " + url})
	return w, came.Load, gone.Load
}

func TestInterruptStopsTools(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"http", "sql"} {
		t.Run(kind, func(t *testing.T) {
			w, runs, stopped := withHangingTurn(t, kind)
			p := w.process(t, false)
			s := p.open(t, "")
			b := p.send(t, s, "Be slow.", false)
			call := waitEvent[operate.ToolCall](t, b, "tool")
			start := waitEvent[operate.Start](t, b, "start")
			require.Equal(t, "started", call.Status, call)
			pgtest.Eventually(t, runs, "the skill runs")
			began := time.Now()
			b.leave(operate.ErrInterrupt)
			_, err := b.wait(t)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), "cancelled by admin"), "the turn ended with %v", err)
			took := time.Since(began)
			assert.Truef(t, took <= 25*time.Second, "the interrupt took %s", took)
			pgtest.Eventually(t, stopped, "the skill is stopped")
			x := w.execution(t, start.ExecutionID)
			assert.Truef(t, x.Status == executions.Cancelled && postgres.Deref(x.CancelledBy) == "admin" &&
				postgres.Deref(x.CancelReason) == "interrupted", "the execution is %s by %s: %s", x.Status,
				postgres.Deref(x.CancelledBy), postgres.Deref(x.CancelReason))
			assert.Equal(t, "model_call success, slow unknown", w.traceRows(t, start.TraceID))
			assert.True(t, w.laneHolder(t) != "", "the admin is still there, and lost the lane")
		})
	}
}

func TestEndOfAccessIsReasonOfCancel(t *testing.T) {
	t.Parallel()
	w, runs, _ := withHangingTurn(t, "http")
	p := w.process(t, false)
	b := p.send(t, p.open(t, ""), "Be slow.", false)
	start := waitEvent[operate.Start](t, b, "start")
	pgtest.Eventually(t, runs, "the skill runs")
	b.leave(&principals.AccessEnded{By: "root", Reason: "the token of bob was revoked"})
	_, err := b.wait(t)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "cancelled by root: the token of bob was revoked"),
		"the turn ended with %v", err)
	x := w.execution(t, start.ExecutionID)
	assert.Truef(t, postgres.Deref(x.CancelledBy) == "root" &&
		postgres.Deref(x.CancelReason) == "the token of bob was revoked", "the execution is %+v", x)
}

// postWithKey sends a turn with an Idempotency-Key directly to the surface, like after a crash of the first attempt's
// process.
func (p *process) postWithKey(t *testing.T, body string) *http.Response {
	t.Helper()
	return p.post(t, t.Context(), body, "Idempotency-Key", "k")
}

func TestRequestWithKeyIsOneTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."), modeltest.Text("Two."), modeltest.Text("Three."))
	p, other := w.process(t, false), w.process(t, false)
	first := p.postWithKey(t, `{"message":"Hello."}`)
	events, _ := readEvents(first.Body, nil)
	start := read[operate.Start](t, events, "start")
	assert.Equal(t, start.SessionID, first.Header.Get("X-Thread-Id"))
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	resp := other.postWithKey(t, `{"message":"Hello."}`)
	got := decode[problem.Problem](t, resp.Body)
	assert.Truef(t, resp.StatusCode == http.StatusConflict && strings.HasSuffix(got.Type, ":idempotency-key-used") &&
		got.TraceID == start.TraceID && strings.Contains(got.Detail, start.SessionID), "the same again: %d, %+v",
		resp.StatusCode, got)
	if events, _ := readEvents(other.postWithKey(t, `{"message":"Hello you."}`).Body,
		nil); eventNames(events) != "start delta done" {
		t.Errorf("another message: %s", eventNames(events))
	}
	caller := activity.WithActor(t.Context(), activity.Actor{Name: "someone else"})
	req := httptest.NewRequestWithContext(caller, http.MethodPost, "/v1/operate",
		strings.NewReader(`{"message":"Hello."}`))
	req.Header.Set("Idempotency-Key", "k")
	recorder := httptest.NewRecorder()
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	p.Handler().ServeHTTP(recorder, req)
	events, _ = readEvents(recorder.Body, nil)
	assert.Equal(t, "start delta done", eventNames(events), "the same key of another caller")
}

func TestWaitingRequestsWithKeyAreOneTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("Hello."))
	p := w.process(t, false)
	first := p.open(t, "ses_one")
	require.NoError(t, first.Hold(t.Context(), false))
	var got [2][]sse
	var reading sync.WaitGroup
	for i := range got {
		body := p.postWithKey(t, `{"message":"Hello.","wait":true}`).Body // both wait: neither has begun
		reading.Go(func() { got[i], _ = readEvents(body, nil) })
	}
	require.NoError(t, first.Close(t.Context()))
	reading.Wait()
	if eventNames(got[0]) == "error" {
		got[0], got[1] = got[1], got[0]
	}
	if eventNames(got[0]) != "start delta done" || eventNames(got[1]) != "error" {
		t.Fatalf("events are %s and %s", eventNames(got[0]), eventNames(got[1]))
	}
	refused, start := read[problem.Problem](t, got[1], "error"), read[operate.Start](t, got[0], "start")
	assert.Truef(t, strings.HasSuffix(refused.Type, ":idempotency-key-used") && refused.TraceID == start.TraceID,
		"the second was told %+v", refused)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_threads`)
}

func TestKeyOfFailedOrOldTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0),
		modeltest.Text("Now."), modeltest.Text("And now."))
	p := w.process(t, false)
	for _, want := range []string{"start error", "start delta done"} {
		if events, _ := readEvents(p.postWithKey(t, `{"message":"Hello."}`).Body, nil); eventNames(events) != want {
			t.Fatalf("events are %s, not %s", eventNames(events), want)
		}
		pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	}
	assert.Equal(t, http.StatusConflict, p.postWithKey(t, `{"message":"Hello."}`).StatusCode)
	pgtest.Exec(t, w.pool, `update agent_executions set created_at = created_at - interval '1 day'`)
	if events, _ := readEvents(p.postWithKey(t, `{"message":"Hello."}`).Body,
		nil); eventNames(events) != "start delta done" {
		t.Errorf("a day later: %s", eventNames(events))
	}
}

func TestFollowTurnOfOtherProcess(t *testing.T) {
	t.Parallel()
	w, called := withGuardedSkill(t)
	other := w.process(t, true)
	// The listener polls rarely, so the other process always wins.
	p := w.process(t, false, func(o *operate.Options) { o.Poll = 1500 * time.Millisecond })
	b := p.send(t, p.open(t, ""), "Wipe orders.", false)
	asked := waitEvent[operate.Approval](t, b, "approval")
	start := waitEvent[operate.Start](t, b, "start")
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
	w.decide(t, asked.ID, true)
	require.NoError(t, other.engine.Sweep(t.Context()))
	done, err := b.wait(t)
	if err != nil || done.Text != "It is over." || b.text() != done.Text || called.Load() != 1 {
		t.Errorf("done %+v, %v; streamed %q; called %d times", done, err, b.text(), called.Load())
	}
	if !strings.HasPrefix(w.laneHolder(t), "op_") {
		t.Errorf("the admin is still there, but the lane is held by %q", w.laneHolder(t))
	}
}

func TestTurnResumesAfterCrash(t *testing.T) {
	t.Parallel()
	for name, elsewhere := range map[string]bool{
		"under the lane that it had":  false,
		"when another admin has left": true,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testResumesHeadless(t, elsewhere)
		})
	}
}

func testResumesHeadless(t *testing.T, elsewhere bool) {
	w := newTestDatabase(t, modeltest.ToolCall("first", `{}`), modeltest.ToolCall("second", `{}`),
		modeltest.Text("All done."))
	var first, second atomic.Int64
	reached, gone := make(chan struct{}), make(chan struct{})
	w.builtin(t, "first", "", func(context.Context, skills.Call) (any, error) {
		first.Add(1)
		return "one", nil
	})
	w.builtin(t, "second", "", func(ctx context.Context, _ skills.Call) (any, error) {
		if second.Add(1) == 1 {
			close(reached)
			<-ctx.Done()
			close(gone)
			return nil, ctx.Err()
		}
		return "two", nil
	})
	pgtest.Exec(t, w.pool, `update agent_skills set idempotent = true`)
	p := w.process(t, false)
	s := p.open(t, "")
	b := p.send(t, s, "Do both.", false)
	<-reached
	start := waitEvent[operate.Start](t, b, "start")
	// The process is paused past its lease and renews nothing. Its lane still belongs to the turn.
	const lost = `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`
	if elsewhere { // in one statement: else the turn may continue under the lane in between
		pgtest.Exec(t, w.pool, `with lost as (`+lost+`)
			select release_agent_lock('operate', l.locked_by), try_acquire_agent_lock('operate', 'another admin', 300)
			  from agent_locks l where l.lane = 'operate'`)
	} else {
		pgtest.Exec(t, w.pool, lost)
	}
	other := w.process(t, true)
	if elsewhere {
		x := enginetest.Await(t, w.pool, start.ExecutionID, executions.Waiting)
		if postgres.Deref(x.WaitingFor) != "lane" || w.laneHolder(t) != "another admin" {
			t.Errorf("it waits for %s, the lane is held by %q", postgres.Deref(x.WaitingFor), w.laneHolder(t))
		}
		pgtest.Exec(t, w.pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 second'
			where lane = 'operate'`)
		require.NoError(t, other.engine.Sweep(t.Context()))
	}
	x := enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
	assert.Truef(t, x.ResultSummary == "All done." && first.Load() == 1 && second.Load() == 2,
		"%q; first was called %d times, second %d", x.ResultSummary, first.Load(), second.Load())
}

func TestShutdownHandsTurnOver(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Done."))
	reached := make(chan struct{}, 2)
	var calls atomic.Int64
	w.builtin(t, "slow", "", func(ctx context.Context, _ skills.Call) (any, error) {
		reached <- struct{}{}
		if calls.Add(1) == 1 {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return "ok", nil
	})
	pgtest.Exec(t, w.pool, `update agent_skills set idempotent = true`)
	p := w.process(t, true)
	b := p.send(t, p.open(t, ""), "Be slow.", false)
	<-reached
	start := waitEvent[operate.Start](t, b, "start")
	p.stop()
	done, err := b.wait(t)
	assert.Truef(t, err == nil && done.Ended == operate.HandedOn, "left as %+v, %v", done, err)
	require.NoError(t, p.Close(t.Context()))
	w.process(t, true)
	enginetest.Await(t, w.pool, start.ExecutionID, executions.Completed)
}

// Between two turns only the process holds the lane. After a crash the next admin must not wait for the lease.
func TestSessionLaneEndsWithProcess(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("Hello."), modeltest.Text("Hello."))
	dead, alive := w.process(t, false), w.process(t, true)
	_, err := dead.send(t, dead.open(t, ""), "Hello.", false).wait(t)
	require.NoError(t, err)
	next := alive.open(t, "")
	require.NoError(t, alive.engine.Sweep(t.Context()))
	require.ErrorIs(t, next.Hold(t.Context(), false), lanes.ErrBusy, "the lane of a living process")
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second' where id::text =
	                   (select split_part(locked_by, '@', 2) from agent_locks where lane = 'operate')`)
	pgtest.Eventually(t, func() bool { // an earlier sweep may still run
		require.NoError(t, alive.engine.Sweep(t.Context()))
		return next.Hold(t.Context(), false) == nil
	}, "the lane of a dead process is free")
}

func TestLongSessionIsSummarized(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, false, func(o *operate.Options) { o.History = 400 })
	s := p.open(t, "")
	longest, summarised := 0, false
	w.model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(r.Messages[0].Content, "summary") && len(r.Messages) == 2 && len(r.Tools) == 0 {
			return modeltest.Text("The admin counts.")
		}
		size := 0
		for _, m := range r.Messages {
			size += len(m.Content)
		}
		longest = max(longest, size)
		summarised = summarised || strings.Contains(r.Messages[1].Content, "The admin counts.")
		return modeltest.Text(strings.Repeat("word ", 60))
	})
	for n := range 25 {
		_, err := s.Turn(t.Context(), fmt.Sprintf("Turn %d. %s", n, strings.Repeat("word ", 20)), false,
			func(operate.Event) {})
		require.NoError(t, err)
	}
	assert.True(t, summarised, "no turn was given the summary")
	assert.Truef(t, longest <= 6000, "the longest request has %d bytes", longest)
	through := pgtest.Value[int](t, w.pool, `select summary_through from agent_threads where id = $1`, s.ID())
	assert.Truef(t, through >= 20, "the summary reaches to %d", through)
}

// The answer is in the thread, so a repeated request must not get a second one.
func TestInterruptDuringSummaryKeepsAnsweredTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, false, func(o *operate.Options) { o.History = 100 })
	var summaries atomic.Int32
	w.model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(r.Messages[0].Content, "summary of a conversation") {
			summaries.Add(1)
			return modeltest.Hang()
		}
		return modeltest.Text(strings.Repeat("word ", 60))
	})
	s := p.open(t, "")
	for n := 0; summaries.Load() == 0; n++ {
		b := p.send(t, s, fmt.Sprintf("Turn %d.", n), false)
		pgtest.Eventually(t, func() bool {
			select {
			case <-b.over:
				return true
			default:
				return summaries.Load() > 0
			}
		}, "the turn ends, or makes a summary")
		if summaries.Load() > 0 {
			b.leave(operate.ErrInterrupt)
		}
		done, err := b.wait(t)
		require.NoError(t, err)
		assert.Equal(t, reason.Answered, done.Ended, n)
		start := waitEvent[operate.Start](t, b, "start")
		assert.Equal(t, executions.Completed, w.execution(t, start.ExecutionID).Status, n)
	}
}

func TestSessionHasOneAgent(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."), modeltest.Text("Two."), modeltest.Text("Three."))
	p := w.process(t, true)
	p.Loop.Agents = &agents.Directory{Settings: agents.Settings{Name: "house"}}
	for _, d := range []agents.Definition{
		{Name: "sales", Default: true, Instructions: "You sell."}, {Name: "billing", Instructions: "You bill."},
	} {
		_, err := agents.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
	}
	s := p.open(t, "")
	assert.Error(t, s.SetAgent(t.Context(), "nobody"), "an agent that there is none of acts")
	for _, c := range []struct{ session, agent, message string }{
		{"first", "", "You sell."}, {"second", "billing", "You bill."}, {"second", "", "You bill."}, {"first", "billing", ""},
	} {
		s := p.open(t, c.session)
		require.NoError(t, s.SetAgent(t.Context(), c.agent))
		b := p.send(t, s, "hello", true)
		<-b.over
		if c.message == "" {
			refusal, _ := problem.Of(b.err)
			assert.Truef(t, b.err != nil && refusal.Status == http.StatusConflict &&
				strings.Contains(refusal.Detail, "is one with sales"), "another agent in the session: %v", b.err)
			continue
		}
		require.NoError(t, b.err)
		requests := w.model.Requests()
		got := requests[len(requests)-1].Messages[0].Content
		assert.Truef(t, strings.Contains(got, c.message), "session %s as %q got %s", c.session, c.agent, got)
		require.NoError(t, s.Close(t.Context()))
	}
	pgtest.Equal(t, w.pool, "sales billing billing", `select string_agg(agent, ' ' order by id) from agent_executions
		where flow = 'operate'`)
}

func TestHeartbeatYieldsToSession(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, true)
	s := p.open(t, "")
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) {
		return "seen", s.Hold(t.Context(), false)
	})
	pgtest.Exec(t, w.pool, `
		insert into agent_automations (name, trigger, cron, skill_name, next_run_at, source)
		values ('looking', 'cron', '0 0 1 1 *', 'look', clock_timestamp() - interval '1 minute', 'workspace')`)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Nothing to report.") })
	beat, _, err := p.engine.Start(t.Context(), w.pool, heartbeat.Spec("agent"))
	require.NoError(t, err)
	x := enginetest.Await(t, w.pool, beat.ID, executions.Waiting)
	require.Truef(t, postgres.Deref(x.WaitingFor) == "lane" && postgres.Deref(x.WaitingKey) == operate.Lane,
		"the heartbeat waits for %s %s", postgres.Deref(x.WaitingFor), postgres.Deref(x.WaitingKey))
	done, err := s.Turn(t.Context(), "Hello.", false, func(operate.Event) {})
	assert.Truef(t, err == nil && done.Ended == "answered", "the admin's turn: %+v, %v", done, err)
	tick, err := p.engine.RunSync(t.Context(), heartbeat.Spec("agent"))
	if err != nil || !strings.HasPrefix(tick.ResultSummary, "skipped") ||
		w.traceRows(t, tick.TraceID) != "heartbeat skipped" {
		t.Errorf("the tick is %s: %q, %v; %s", tick.Status, tick.ResultSummary, err, w.traceRows(t, tick.TraceID))
	}
	assert.Equal(t, executions.Waiting, w.execution(t, beat.ID).Status)
	require.NoError(t, s.Close(t.Context()))
	enginetest.Await(t, w.pool, beat.ID, executions.Completed)
	assert.Equal(t, 1, strings.Count(w.traceRows(t, x.TraceID), "look success"), w.traceRows(t, x.TraceID))
}
