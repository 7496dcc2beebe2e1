package operate_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// eventNames joins the events' names. Consecutive deltas are one.
func eventNames(events []sse) string {
	var l eventLog
	for _, e := range events {
		l.add(operate.Event{Name: e.name})
	}
	return l.names()
}

func read[T any](t *testing.T, events []sse, name string) (v T) {
	t.Helper()
	for _, e := range events {
		if e.name == name {
			require.NoError(t, json.Unmarshal(e.data, &v))
			return v
		}
	}
	t.Fatalf("there is no event %s in %s", name, eventNames(events))
	return v
}

func TestEventsOverHTTP(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("wipe", `{"table":"orders"}`), modeltest.Text("It is over."))
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) { return "wiped", nil })
	p := w.process(t, true)
	resp := p.post(t, t.Context(), `{"message":"Wipe orders.","session_id":"ses_mine"}`)
	assert.Truef(t, resp.StatusCode == http.StatusOK && resp.Header.Get("Content-Type") == "text/event-stream" &&
		resp.Header.Get("X-Trace-Id") != "", "%d, %v", resp.StatusCode, resp.Header)
	events, comments := readEvents(resp.Body, func(e sse) bool {
		if e.name == "approval" {
			var a operate.Approval
			assert.NoError(t, json.Unmarshal(e.data, &a))
			pgtest.Until(t, w.pool, 1, `select count(*) from agent_executions where waiting_for = 'approval'`)
			w.decide(t, a.ID, true)
		}
		return false
	})
	got := eventNames(events)
	assert.Truef(t, strings.HasPrefix(got, "start ") && strings.HasSuffix(got, " delta done") &&
		strings.Count(got, "approval") == 1 && strings.Contains(got, "tool"), "events are %s", got)
	start, done := read[operate.Start](t, events, "start"), read[operate.Done](t, events, "done")
	want := operate.Done{
		TraceID: resp.Header.Get("X-Trace-Id"), ExecutionID: start.ExecutionID, SessionID: "ses_mine",
		Ended: "answered", Text: "It is over.",
		Usage: done.Usage, CostUSD: done.CostUSD,
	}
	diff := cmp.Diff(want, done)
	assert.Truef(t, diff == "" && start.TraceID == want.TraceID && start.SessionID == "ses_mine" &&
		done.Usage.TotalTokens != 0, "start %+v, done (-want +got):\n%s", start, diff)
	for _, e := range events {
		assert.Truef(t, e.name != "tool" || strings.Contains(string(e.data), `"arguments":{"table":"orders"}`),
			"a tool event is %s", e.data)
	}
	t.Logf("%d comments", comments)
	assert.True(t, w.laneHolder(t) != "", "the named session does not hold the lane between turns")
	if err := p.Close(t.Context()); err != nil || w.laneHolder(t) != "" {
		t.Errorf("after Close the lane is held by %q: %v", w.laneHolder(t), err)
	}
}

// A client told that the database is unreachable would look for the cause in the wrong place.
func TestLockedTableIsCalledLocked(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, false)
	pgtest.Exec(t, pgtest.Begin(t, w.pool), `lock agent_messages in exclusive mode`)
	refused := decode[problem.Problem](t, p.post(t, t.Context(), `{"message":"Hello."}`).Body)
	assert.Truef(t, refused.Status == http.StatusServiceUnavailable && strings.HasSuffix(refused.Type, ":locked") &&
		strings.Contains(refused.Detail, "is in use by another transaction of the database"), "got %+v", refused)
}

func TestStreamKeepAlive(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Done."))
	release := make(chan struct{})
	w.builtin(t, "slow", "", func(context.Context, skills.Call) (any, error) {
		<-release
		return "ok", nil
	})
	p := w.process(t, false)
	resp := p.post(t, t.Context(), `{"message":"Be slow."}`, "Accept", "text/event-stream")
	buffer, seen := make([]byte, 4096), ""
	for !strings.Contains(seen, ": keep-alive") {
		n, err := resp.Body.Read(buffer)
		require.NoError(t, err, "after", seen)
		seen += string(buffer[:n])
	}
	close(release)
	if events, _ := readEvents(resp.Body, nil); !strings.HasSuffix(eventNames(events), "delta done") {
		t.Errorf("events are %s", eventNames(events))
	}
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" },
		"a turn without a session frees the lane")
}

func TestDisconnectCancelsTurn(t *testing.T) {
	t.Parallel()
	w, runs, stopped := withHangingTurn(t, "http")
	p := w.process(t, true)
	ctx, leave := context.WithCancel(t.Context())
	resp := p.post(t, ctx, `{"message":"Be slow."}`)
	events, _ := readEvents(resp.Body, func(e sse) bool { return e.name == "tool" })
	start := read[operate.Start](t, events, "start")
	pgtest.Eventually(t, runs, "the skill runs")
	leave()
	x := enginetest.Await(t, w.pool, start.ExecutionID, executions.Cancelled)
	assert.Equal(t, "admin", postgres.Deref(x.CancelledBy))
	pgtest.Eventually(t, stopped, "the skill is stopped")
	pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
}

func TestJSONResponse(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("look", `{"token":"abcdefghijklmnop"}`), modeltest.Text("Done."),
		modeltest.ToolCall("wipe", `{}`), modeltest.Text("Later."))
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) { return 42, nil })
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) { return "wiped", nil })
	p := w.process(t, true)
	resp := p.post(t, t.Context(), `{"message":"Look."}`, "Accept", "application/json")
	got := decode[operate.Answer](t, resp.Body)
	assert.Truef(t, resp.StatusCode == http.StatusOK && got.Text == "Done." && got.Ended == "answered" &&
		len(got.Tools) == 1 && got.TraceID == resp.Header.Get("X-Trace-Id"), "%d, %+v", resp.StatusCode, got)
	resp = p.post(t, t.Context(), `{"message":"Wipe."}`, "Accept", "application/json")
	got = decode[operate.Answer](t, resp.Body)
	require.Truef(t, resp.StatusCode == http.StatusAccepted && got.Ended == operate.WaitingApproval &&
		len(got.Approvals) == 1, "%d, %+v", resp.StatusCode, got)
	spent := pgtest.Value[int](t, w.pool, `select (token_usage ->> 'total_tokens')::int from agent_activity
		where trace_id = $1 and kind = 'model'`, got.TraceID)
	assert.Truef(t, spent != 0 && got.Usage.TotalTokens == spent && got.Usage.TotalTokens == got.Usage.PromptTokens+
		got.Usage.CompletionTokens, "the call before the wait used %d tokens, the answer says %+v", spent, got.Usage)
	w.decide(t, got.Approvals[0].ID, true)
	assert.Equal(t, "Later.", enginetest.Await(t, w.pool, got.ExecutionID, executions.Completed).ResultSummary)
}

func TestJSONResponseWithDelegatedApproval(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("delegate", `{"task":"Wipe."}`), modeltest.ToolCall("wipe", `{}`),
		modeltest.Text("Wiped."), modeltest.Text("Later."))
	w.builtin(t, "wipe", skills.TrustApprove, func(context.Context, skills.Call) (any, error) { return "wiped", nil })
	p := w.process(t, true, w.delegates(t))
	watch := p.watch(t)
	resp := p.post(t, t.Context(), `{"message":"Have it wiped."}`, "Accept", "application/json")
	got := decode[operate.Answer](t, resp.Body)
	require.Truef(t, resp.StatusCode == http.StatusAccepted && got.Ended == operate.WaitingApproval &&
		len(got.Approvals) == 1, "%d, %+v", resp.StatusCode, got)
	assert.Equal(t, "", w.laneHolder(t))
	events, _ := readEvents(watch, func(e sse) bool { return e.name == "approval" })
	assert.Equal(t, got.Approvals[0].ID, read[operate.Approval](t, events, "approval").ID)
	w.decide(t, got.Approvals[0].ID, true)
	assert.Equal(t, "Later.", enginetest.Await(t, w.pool, got.ExecutionID, executions.Completed).ResultSummary)
}

func TestBusyLaneNamesPrincipal(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."))
	p := w.process(t, false)
	first := p.open(t, "ses_one")
	require.NoError(t, first.Hold(t.Context(), false))
	bob := activity.WithActor(t.Context(), activity.Actor{Name: "bob", Via: "http"})
	_, err := first.Turn(bob, "Hello.", false, func(operate.Event) {})
	require.NoError(t, err)
	resp := p.post(t, t.Context(), `{"message":"Hello.","session_id":"ses_two"}`)
	got := decode[problem.Problem](t, resp.Body)
	assert.Equal(t, w.laneHolder(t), got.Holder)
	assert.Truef(t, strings.HasPrefix(got.Detail, "lane busy: held by bob, session ses_one; its last turn ended "),
		"the detail is %q", got.Detail)
}

func TestBusyLaneDescribesNewestTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."), modeltest.ToolCall("slow", `{}`), modeltest.Text("Two."))
	runs, release := make(chan struct{}), make(chan struct{})
	w.builtin(t, "slow", "", func(context.Context, skills.Call) (any, error) {
		close(runs)
		<-release
		return "ok", nil
	})
	p := w.process(t, false)
	first := p.open(t, "ses_one")
	require.NoError(t, first.Hold(t.Context(), false))
	_, err := first.Turn(t.Context(), "Hello.", false, func(operate.Event) {})
	require.NoError(t, err)
	second := make(chan error, 1)
	go func() {
		_, err := first.Turn(t.Context(), "Be slow.", false, func(operate.Event) {})
		second <- err
	}()
	<-runs
	got := decode[problem.Problem](t, p.post(t, t.Context(), `{"message":"Hello.","session_id":"ses_two"}`).Body)
	close(release)
	require.NoError(t, <-second)
	assert.Contains(t, got.Detail, "held by session ses_one; at work for ")
}

func TestBusyLaneProblem(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("Now you."))
	p := w.process(t, false)
	first := p.open(t, "")
	require.NoError(t, first.Hold(t.Context(), false))
	for _, headers := range [][]string{nil, {"Accept", "application/json"}} {
		resp := p.post(t, t.Context(), `{"message":"Hello.","session_id":"ses_two"}`, headers...)
		got := decode[problem.Problem](t, resp.Body)
		assert.Truef(t, resp.StatusCode == http.StatusConflict && got.Holder == w.laneHolder(t) &&
			resp.Header.Get("Content-Type") == problem.ContentType, "%d, %+v", resp.StatusCode, got)
		assert.Equal(t, "skipped", pgtest.Value[string](t, w.pool,
			`select max(status) from agent_activity where trace_id = $1`, resp.Header.Get("X-Trace-Id")))
	}
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_executions`)
	resp := p.post(t, t.Context(), `{"message":"Hello.","session_id":"ses_two","wait":true}`)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.NoError(t, first.Close(t.Context()))
	if events, _ := readEvents(resp.Body, nil); eventNames(events) != "start delta done" {
		t.Errorf("events are %s", eventNames(events))
	}
	resp = p.post(t, t.Context(), `{"message":"Hello.","session_id":"ses_three"}`)
	got := decode[problem.Problem](t, resp.Body)
	assert.Contains(t, got.Detail, "held by session ses_two; its last turn ended", "keeps the lane for 5m0s after a turn")
}

func TestFailedTurnEvent(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0),
		modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0))
	p := w.process(t, false)
	events, _ := readEvents(p.post(t, t.Context(), `{"message":"Hello."}`).Body, nil)
	require.Equal(t, "start error", eventNames(events))
	start, got := read[operate.Start](t, events, "start"), read[problem.Problem](t, events, "error")
	assert.Truef(t, got.TraceID == start.TraceID && strings.Contains(got.Detail, "Incorrect API key") &&
		got.Type == "urn:lanekeeper:problem:turn-failed", "the problem is %+v", got)
	resp := p.post(t, t.Context(), `{"message":"Hello."}`, "Accept", "application/json")
	got = decode[problem.Problem](t, resp.Body)
	assert.Truef(t, resp.StatusCode == http.StatusInternalServerError && got.TraceID != "" &&
		got.TraceID == resp.Header.Get("X-Trace-Id"), "%d, %+v", resp.StatusCode, got)
}

func TestInvalidTurnRequests(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, false, func(o *operate.Options) { o.MaxMessage = 100 })
	pgtest.Exec(t, w.pool, `insert into agent_threads (id, channel, owner) values ('visitors', 'chat', 'key')`)
	for name, test := range map[string]struct {
		body   string
		status int
		says   string
	}{
		"no JSON":       {`hello`, 400, "invalid character"},
		"no object":     {`[1]`, 400, "it is a array"},
		"nothing":       {``, 400, "it is empty"},
		"no message":    {`{}`, 400, "message is empty"},
		"blank message": {`{"message":" \n"}`, 400, "message is empty"},
		"NUL message":   {`{"message":"\u0000"}`, 400, "message is empty"},
		"unknown field": {`{"message":"x","sesion_id":"y"}`, 400, `unknown field \"sesion_id\"`},
		"capitals":      {`{"message":"x","Session_ID":"y"}`, 400, `unknown field \"Session_ID\"`},
		"wrong type":    {`{"message":7}`, 400, "message is a number"},
		"two documents": {`{"message":"x"}{"message":"y"}`, 400, "more follows"},
		"bad session":   {`{"message":"x","session_id":"a\nb"}`, 400, "session_id"},
		"long message":  {`{"message":"` + strings.Repeat("x", 101) + `"}`, 413, "the most is 100"},
		"long body":     {`{"message":"` + strings.Repeat("x", 10000) + `"}`, 413, "longer than"},
		"a visitor's":   {`{"message":"x","session_id":"visitors"}`, 409, "no session"},
	} {
		t.Run(name, func(t *testing.T) {
			resp := p.post(t, t.Context(), test.body)
			got := decode[json.RawMessage](t, resp.Body)
			assert.Truef(t, resp.StatusCode == test.status && strings.Contains(string(got), test.says),
				"%d, %s", resp.StatusCode, got)
		})
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_executions`); n != 0 || w.laneHolder(t) != "" {
		t.Errorf("%d executions, lane held by %q", n, w.laneHolder(t))
	}
}

// watch follows the turns until the test ends.
func (p *process) watch(t *testing.T) io.Reader {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.http.URL+"/v1/operate/watch", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp.Body
}

func TestWatchTurns(t *testing.T) {
	t.Parallel()
	w, _ := withGuardedSkill(t)
	p := w.process(t, true)
	other := w.process(t, false)
	watch := other.watch(t)
	s := p.open(t, "")
	b := p.send(t, s, "Wipe orders.", false)
	events, _ := readEvents(watch, func(e sse) bool {
		if e.name == "approval" {
			var a operate.Approval
			assert.NoError(t, json.Unmarshal(e.data, &a))
			w.decide(t, a.ID, true)
		}
		return e.name == "done"
	})
	done, err := b.wait(t)
	require.NoError(t, err)
	assert.NoDiff(t, done, read[operate.Done](t, events, "done"))
	text := eventNames(events)
	assert.Truef(t, strings.HasPrefix(text, "lane ") && strings.Contains(text, "start") &&
		strings.Count(text, "approval") == 1 &&
		!strings.Contains(string(read[json.RawMessage](t, events, "tool")), "hunter2"), "events are %s", text)
	holders := 0
	for _, e := range events {
		if e.name == "lane" && strings.Contains(string(e.data), done.TraceID) {
			holders++
		}
	}
	assert.Equal(t, 1, holders)
}
