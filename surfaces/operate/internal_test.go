package operate

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A client may leave while its turn waits for a delegated task. The response reports no error of the interrupted claim.
func TestAdvanceOfLeftTurn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	engine, err := executions.New(pool, executions.Options{Keeper: keeper})
	require.NoError(t, err)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	s := &Session{o: &Operate{Options: Options{Engine: engine, Poll: time.Second}}}
	_, err = s.advance(ctx, executions.Execution{
		Status: executions.Waiting, WaitingFor: new("agent"), WaitingKey: new("01a224f5-41c3-71ca-b539-3b06ddc0fa0a"),
	})
	require.NoError(t, err)
}

// Two executions of external workers may wait for each other.
func TestWaitsInCircleAreNoApproval(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	engine, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(t, err)
	var ids [2]string
	for i := range ids {
		x, _, err := engine.Start(t.Context(), pool, executions.Spec{Flow: "external", Surface: trace.Operate})
		require.NoError(t, err)
		ids[i] = x.ID
	}
	pgtest.Exec(t, pool, `update agent_executions set status = 'running'`)
	pgtest.Exec(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'agent', waiting_step = 'wait agent 1',
		                            waiting_until = now() + interval '1 hour',
		                            waiting_key = case id when $1::text::uuid then $2::text else $1::text end`,
		ids[0], ids[1])
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	assert.True(t, !(&Operate{Options: Options{Pool: pool}}).isWaitingForApproval(ctx, ids[0], &listener{}), "it waits")
	assert.NoError(t, ctx.Err())
}

func TestRejectedRequestChangesNoSession(t *testing.T) {
	t.Parallel()
	o := &Operate{
		Options: Options{Loop: &reason.Loop{}, Agent: "agent", MaxMessage: 100, KeepAlive: time.Minute},
		log:     slog.New(slog.DiscardHandler), sessions: map[string]*Session{},
	}
	post := func(body string) int {
		w := httptest.NewRecorder()
		o.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "POST", "/v1/operate", strings.NewReader(body)))
		return w.Code
	}
	assert.Equal(t, http.StatusNotFound, post(`{"message":"x","agent":"nobody"}`))
	assert.Equal(t, 0, len(o.sessions), "sessions of an unknown agent")
	s, err := o.Session("busy", true)
	require.NoError(t, err)
	require.NoError(t, s.acquireSlot(t.Context(), false))
	assert.Equal(t, http.StatusConflict, post(`{"message":"x","session_id":"busy","agent":"agent"}`))
	assert.Equal(t, "", s.agent, "the agent of a request during another turn")
}

// A resumed run that only waits for approval must free the lane that it acquired. Otherwise it would hold the lane
// until the decision.
func TestWaitingTurnFreesLane(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	log := slog.New(slog.DiscardHandler)
	listener := postgres.NewListener(postgres.Dialer(pool), log)
	keeper := lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: log})
	engine, err := executions.New(pool, executions.Options{Keeper: keeper, Listener: listener, Logger: log, Workers: 2})
	require.NoError(t, err)
	o := &Operate{Options: Options{Keeper: keeper}, log: log}
	freed := make(chan string, 1)
	err = engine.Register("waits", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		if current, _ := executions.Current(ctx); current.WaitNumber == 0 {
			if _, err := executions.Lane(ctx, Lane); err != nil {
				return executions.Result{}, err
			}
		}
		if _, err := executions.Wait(ctx, "first", executions.Event("first", time.Hour)); err != nil {
			return executions.Result{}, err
		}
		current, _ := executions.Current(ctx)
		_, p := o.guardLane(ctx, current.ID, nil)
		p.release(ctx)
		var holder string
		err := pool.QueryRow(ctx, `select coalesce((select locked_by from agent_locks_live where lane = @lane), '')`,
			postgres.Strict{"lane": Lane}).Scan(&holder)
		freed <- holder
		return executions.Result{}, err
	})
	require.NoError(t, err)
	testkit.Run(t, listener.Run, keeper.Run, engine.Run)
	_, _, err = engine.Start(t.Context(), pool, executions.Spec{Flow: "waits", Surface: trace.Operate})
	require.NoError(t, err)
	pgtest.Until(t, pool, true, `
		select exists (select from agent_executions e join agent_locks l on l.execution_id = e.id where e.status = 'waiting'
		  and l.lane = @lane)`, postgres.Strict{"lane": Lane})
	pgtest.Exec(t, pool, `select deliver_agent_event('EVENT_COMPLETED', 'first', '{}')`)
	assert.Equal(t, "", testkit.Receive(t, freed))
}

// FuzzStream writes events of any content and reads them like a client.
func FuzzStream(f *testing.F) {
	for _, s := range []string{
		"", "a\nb\r\nc\rd", "\n\nevent: done\ndata: {}\n\n", "\x00\u2028\xff", "</script>",
		strings.Repeat("a\r\n", 2000),
	} {
		f.Add(s, `{"a": "b"}`)
		f.Add(s, "{\n\n\"event\":\t\"\\n\\n\"\r\n}")
	}
	f.Fuzz(func(t *testing.T, text, arguments string) {
		if !json.Valid([]byte(arguments)) {
			arguments = "null"
		}
		w := httptest.NewRecorder()
		_, leave := context.WithCancelCause(t.Context())
		s := newEventStream(w, leave)
		sent := []Event{
			{"start", Start{TraceID: "op_0", SessionID: text}},
			{"delta", Delta{text}},
			{"tool", ToolCall{ID: text, Name: "f", Arguments: json.RawMessage(arguments), Error: text}},
			{text, Delta{text}},
			{"done", Done{Text: text}},
		}
		for _, e := range sent {
			s.sendEvent(e)
			s.sendComment("sign of life")
		}
		got := ssetest.Read(w.Body.String())
		require.Truef(t, len(got.Events) == len(sent) && len(got.Comments) == len(sent) &&
			len(got.Unknown)+len(got.Retry) == 0 && got.Left == "", "%d events: %q", len(got.Events), w.Body)
		for i, e := range got.Events {
			assert.Truef(t, json.Valid([]byte(e.Data)) && (i == 3 || e.Name == sent[i].Name), "event %d is %+v", i, e)
		}
		var delta Delta
		var call ToolCall
		var done Done
		for i, into := range map[int]any{1: &delta, 2: &call, 4: &done} {
			assert.NoError(t, json.Unmarshal([]byte(got.Events[i].Data), into), "event", i, got.Events[i].Data)
		}
		if !utf8.ValidString(text + arguments) {
			return
		}
		call.Arguments = nil // equal as JSON, not as text
		want := ToolCall{ID: text, Name: "f", Error: text}
		assert.Equal(t, "", cmp.Diff(want, call)+cmp.Diff(Done{Text: text}, done)+cmp.Diff(Delta{text}, delta), text)
	})
}

// The float of a sum has digits that no row of the log has.
func TestCostOfTurnIsRounded(t *testing.T) {
	t.Parallel()
	x := executions.Execution{Status: executions.Completed, Result: json.RawMessage(`{"cost_usd": 0.007700000000000001}`)}
	done, err := new(Session).readOutcome(t.Context(), Done{}, x)
	require.NoError(t, err)
	assert.Equal(t, 0.0077, done.CostUSD)
}
