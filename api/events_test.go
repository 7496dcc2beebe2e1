package api_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// raiseEvent posts an event and returns its id and the resumed executions.
func (a *agent) raiseEvent(body string, header http.Header) (id string, resumed []string) {
	a.t.Helper()
	var delivered struct {
		ID      string `json:"event_id"`
		Resumed []string
	}
	a.checkResponse(a.raw("POST", "/v1/events", body, header), "POST", "/v1/events", http.StatusAccepted, &delivered)
	return delivered.ID, delivered.Resumed
}

func TestEventResumesWaiterOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	err := a.engine.Register("wait", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Wait(ctx, "for it", executions.Event("order-7", time.Hour))
		return executions.Result{}, err
	})
	require.NoError(t, err)
	x, err := a.engine.RunSync(context.WithoutCancel(t.Context()), executions.Spec{Flow: "wait", Surface: trace.Flow})
	require.NoError(t, err)
	const body = `{"event":"EVENT_COMPLETED","key":"order-7","data":{"paid":true},"id":"e1"}`
	first, resumed := a.raiseEvent(body, asAdmin())
	assert.NoDiff(t, []string{x.ID}, resumed)
	again, resumed := a.raiseEvent(body, asAdmin())
	assert.Truef(t, again == first && len(resumed) == 0, "again: %s, %v", again, resumed)
	for _, other := range []string{`"EVENT_COMPLETED","key":"order-8"`, `"TEST_COMPLETED","key":"order-7"`} {
		a.checkProblem(a.raw("POST", "/v1/events", `{"event":`+other+`,"id":"e1"}`, asAdmin()), 400, `'e1' was used`)
	}
	hints := pgtest.Value[int](t, a.pool, `select count(*) from river.river_job where args::text like '%' || @id || '%'`,
		postgres.Strict{"id": x.ID})
	assert.True(t, hints != 0, "no worker was notified")
	keyed := asAdmin()
	keyed.Set("Idempotency-Key", "k")
	bare := `{"event":"TEST_COMPLETED","key":"k"}`
	one, _ := a.raiseEvent(bare, keyed)
	pgtest.Exec(t, a.pool, `delete from agent_idempotency`) // like a crash before the response was stored
	two, _ := a.raiseEvent(bare, keyed)
	assert.Equal(t, one, two, "the same key")
	_, key := a.key(principals.User, principals.Admin, 0, "*")
	other := bearer(key)
	other.Set("Idempotency-Key", "k")
	foreign, _ := a.raiseEvent(bare, other)
	assert.True(t, foreign != one, "another caller's event with the same key and body is the first caller's")
	three, _ := a.raiseEvent(bare, asAdmin())
	four, _ := a.raiseEvent(bare, asAdmin())
	assert.True(t, three != one && three != four, "events without id or key are one")
}

// A message raised as an event is stored in its thread. An unknown thread is no error.
func TestRaisedMessageIsInThread(t *testing.T) {
	t.Parallel()
	a := start(t)
	_, _, err := threads.Ensure(t.Context(), a.pool, threads.Thread{ID: "ana"})
	require.NoError(t, err)
	first, _ := a.raiseEvent(
		`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"text":"yes","n":12345678901234567890},"id":"m1"}`, asAdmin())
	again, _ := a.raiseEvent(`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"text":"yes"},"id":"m1"}`, asAdmin())
	assert.Equal(t, first, again)
	a.raiseEvent(`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"photo":7}}`, asAdmin())
	a.raiseEvent(`{"event":"MESSAGE_RECEIVED","key":"elsewhere","data":{"content":"yes"}}`, asAdmin())
	long := `","data":{"content":"` + strings.Repeat("x", 64<<10+1) + `"}}`
	a.checkProblem(a.raw("POST", "/v1/events", `{"event":"MESSAGE_RECEIVED","key":"ana`+long, asAdmin()), 400, "longer than")
	a.raiseEvent(`{"event":"MESSAGE_RECEIVED","key":"elsewhere`+long, asAdmin())
	pgtest.Equal(t, a.pool, "ana user received yes", `select string_agg(concat_ws(' ', thread_id, role, status, content),
		'; ') from agent_messages`)
	pgtest.Equal(t, a.pool, "yes 12345678901234567890", `select concat_ws(' ', data ->> 'content', data ->> 'n')
		from agent_events where external_id = 'm1'`)
	pgtest.Equal(t, a.pool, 4, `select count(*) from agent_events where event = 'MESSAGE_RECEIVED'`)
}

// The longest key of a wait is a key of an event.
func TestEventEndsWaitWithLongKey(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	var x executions.Execution
	a.request("POST", "/v1/executions", `{"flow":"external"}`, 201, &x)
	var lock struct {
		LockID string `json:"lock_id"`
	}
	a.request("POST", "/v1/executions/"+x.ID+"/lock", `{"owner":"w"}`, 200, &lock)
	path, key := "/v1/executions/"+x.ID+"/lock/"+lock.LockID, strings.Repeat("k", 2400)
	wait := `{"status":"waiting","waiting_for":"signature","waiting_key":"` + key
	a.checkProblem(a.raw("DELETE", path, wait+`k"}`, asAdmin()), 400, "2400 bytes")
	a.request("DELETE", path, wait+`"}`, 200, &struct{}{})
	event := `{"event":"SIGNATURE_COMPLETED","key":"` + key
	a.checkProblem(a.raw("POST", "/v1/events", event+"k"+`"}`, asAdmin()), 400, "2400 bytes")
	_, resumed := a.raiseEvent(event+`","data":{"url":"x"}}`, asAdmin())
	assert.NoDiff(t, []string{x.ID}, resumed)
}

func TestOnlyExternalEventsCanBeRaised(t *testing.T) {
	t.Parallel()
	a := start(t)
	for name, test := range map[string]struct{ body, words string }{
		"approval":  {`{"event":"APPROVAL_DECIDED","key":"x"}`, "APPROVAL_DECIDED"},
		"end":       {`{"event":"AGENT_COMPLETED","key":"x"}`, "AGENT_COMPLETED"},
		"time":      {`{"event":"SCHEDULE_REACHED","key":"x"}`, "SCHEDULE_REACHED"},
		"lane":      {`{"event":"LANE_FREED","key":"x"}`, "LANE_FREED"},
		"unknown":   {`{"event":"x","key":"x"}`, "event"},
		"no key":    {`{"event":"EVENT_COMPLETED"}`, "key"},
		"NUL":       {`{"event":"EVENT_COMPLETED","key":"x","data":{"a":"\u0000"}}`, `remove \u0000 from {"a":"\u0000`},
		"number":    {`{"event":"EVENT_COMPLETED","key":"x","data":{"a":1e400000}}`, "numeric"},
		"not UTF-8": {"{\"event\":\"EVENT_COMPLETED\",\"key\":\"a\xff\"}", "UTF-8"},
		"own id": {
			`{"event":"EVENT_COMPLETED","key":"x","id":"completed 018f0000-0000-7000-8000-000000000000"}`,
			"completed",
		},
		"approval id": {
			`{"event":"EVENT_COMPLETED","key":"x","id":"approval 018f0000-0000-7000-8000-000000000000"}`,
			"approval",
		},
		"field": {`{"event":"EVENT_COMPLETED","key":"x","trace":"y"}`, "trace"},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.checkProblem(a.raw("POST", "/v1/events", test.body, asAdmin()), http.StatusBadRequest, test.words)
		})
	}
	pgtest.Equal(t, a.pool, 0, `select count(*) from agent_events`)
}
