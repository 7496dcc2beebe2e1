package operate_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestATurnIsOneExecutionWithATraceOfItsOwnInTheSessionsThread(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Good morning."), modeltest.Text("You said hello."))
	p := w.process(t, false)
	s := p.open(t, "")
	if !strings.HasPrefix(s.ID(), "ses_") {
		t.Errorf("the session's id is %s", s.ID())
	}
	var traces []string
	for _, message := range []string{"Hello.", "What did\x00 I say?"} {
		var events log
		done, err := s.Turn(t.Context(), message, false, events.add)
		if err != nil {
			t.Fatal(err)
		}
		if got := events.names(); got != "start delta done" {
			t.Errorf("events are %s", got)
		}
		if events.text() != done.Text || done.Ended != "answered" || done.SessionID != s.ID() || done.Usage.TotalTokens == 0 {
			t.Errorf("streamed %q, done %+v", events.text(), done)
		}
		if id, err := trace.Parse(done.TraceID); err != nil || id.Surface() != trace.Operate {
			t.Errorf("the trace is %s: %v", done.TraceID, err)
		}
		traces = append(traces, done.TraceID)
		x := w.execution(t, done.ExecutionID)
		if x.Queue != executions.Interactive || x.Flow != operate.Flow || deref(x.ThreadID) != s.ID() || x.Surface != "operate" {
			t.Errorf("execution is %+v", x)
		}
	}
	if traces[0] == traces[1] {
		t.Error("two turns share a trace")
	}
	var asked []string
	for _, m := range w.model.Requests()[1].Messages[1:] {
		asked = append(asked, m.Role+": "+m.Content)
	}
	if diff := cmp.Diff([]string{"user: Hello.", "assistant: Good morning.", "user: What did I say?"}, asked); diff != "" {
		t.Errorf("the second turn's model got (-want +got):\n%s", diff)
	}
	said := value[string](t, w.pool, `select string_agg(role || ' ' || status, ', ' order by seq) from agent_messages where thread_id = $1`, s.ID())
	if said != "user received, assistant sent, user received, assistant sent" {
		t.Errorf("the thread has %s", said)
	}
	if n := value[int](t, w.pool, `select count(*) from agent_activity where lane <> 'operate'`); n != 0 {
		t.Errorf("%d rows do not name the lane", n)
	}
}

func TestToolCallsAreShownAsTheyHappenWithoutSecrets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("look", `{"password":"hunter2","table":"orders"}`).AndCall("broken", `{}`), modeltest.Text("Done."))
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) {
		return map[string]any{"api_key": "sk-live-0123456789abcdef", "rows": 42}, nil
	})
	w.builtin(t, "broken", "", func(context.Context, skills.Call) (any, error) {
		return nil, &skills.CallError{Class: "http_status", Message: "the service answered 503"}
	})
	var events log
	done, err := w.process(t, false).open(t, "").Turn(t.Context(), "Look.", false, events.add)
	if err != nil {
		t.Fatal(err)
	}
	if got := events.names(); got != "start tool tool tool tool delta done" {
		t.Errorf("events are %s", got)
	}
	var calls []operate.ToolCall
	for _, e := range events.events {
		if c, ok := e.Data.(operate.ToolCall); ok {
			calls = append(calls, c)
		}
	}
	if string(calls[0].Arguments) != `{"password":"[redacted]","table":"orders"}` || calls[0].Status != "started" {
		t.Errorf("first event is %+v: %s", calls[0], calls[0].Arguments)
	}
	if string(calls[1].Result) != `{"api_key":"[redacted]","rows":42}` || calls[1].Status != "success" || calls[1].DurationMS == nil {
		t.Errorf("second event is %+v: %s", calls[1], calls[1].Result)
	}
	if calls[3].Status != "error" || !strings.Contains(calls[3].Error, "503") || calls[3].ID != calls[2].ID || calls[3].ID == calls[1].ID {
		t.Errorf("fourth event is %+v", calls[3])
	}
	if done.Text != "Done." {
		t.Errorf("done is %+v", done)
	}
}

// hanging is a world with an http skill that never answers, or a sql skill that sleeps.
func hanging(t *testing.T, kind string) (w *world, runs, stopped func() bool) {
	t.Helper()
	w = newWorld(t, modeltest.ToolCall("slow", `{}`))
	if kind == "sql" {
		w.put(t, skills.Definition{Name: "slow", Handler: "sql:select pg_sleep(600)"})
		sleeping := func() bool {
			return value[int](t, w.pool, `select count(*) from pg_stat_activity where datname = current_database() and state = 'active'
				and query like '%pg_sleep(600)%' and pid <> pg_backend_pid()`) > 0
		}
		return w, sleeping, func() bool { return !sleeping() }
	}
	var came, gone atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		came.Store(true)
		<-r.Context().Done()
		gone.Store(true)
	}))
	t.Cleanup(server.Close)
	w.put(t, skills.Definition{Name: "slow", Handler: "http:GET " + server.URL})
	return w, came.Load, gone.Load
}

func TestAnInterruptStopsWhatRuns(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"http", "sql"} {
		t.Run(kind, func(t *testing.T) {
			w, runs, stopped := hanging(t, kind)
			p := w.process(t, false)
			s := p.open(t, "")
			b := p.say(t, s, "Be slow.", false)
			call := until[operate.ToolCall](t, b, "tool")
			start := until[operate.Start](t, b, "start")
			if call.Status != "started" {
				t.Fatalf("the call is %+v", call)
			}
			pgtest.Eventually(t, patience, runs, "the skill runs")
			began := time.Now()
			b.leave(operate.ErrInterrupt)
			if _, err := b.wait(t); err == nil || !strings.Contains(err.Error(), "cancelled by admin") {
				t.Errorf("the turn ended with %v", err)
			}
			if took := time.Since(began); took > 25*time.Second {
				t.Errorf("the interrupt took %s", took)
			}
			pgtest.Eventually(t, patience, stopped, "the skill is stopped")
			x := w.execution(t, start.ExecutionID)
			if x.Status != executions.Cancelled || deref(x.CancelledBy) != "admin" || deref(x.CancelReason) != "interrupted" {
				t.Errorf("the execution is %s by %s: %s", x.Status, deref(x.CancelledBy), deref(x.CancelReason))
			}
			if got := w.rows(t, start.TraceID); got != "model_call success, slow unknown" {
				t.Errorf("the story is %s", got)
			}
			if w.held(t) == "" {
				t.Error("the admin is still there, and lost the lane")
			}
		})
	}
}
