package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestBulkActions(t *testing.T) {
	t.Parallel()
	a := start(t)
	type result struct {
		Done, Refused int
		Detail        string
		Items         []struct {
			ID, Status, Error string
			ExecutionID       string `json:"execution_id"`
		}
	}
	bulk := func(action string, ids ...string) (got result) {
		t.Helper()
		body, err := json.Marshal(map[string]any{"action": action, "ids": ids, "reason": "it is back"})
		require.NoError(t, err)
		w := a.raw("POST", "/v1/executions/bulk", string(body), asAdmin())
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got))
		return got
	}
	first, second := a.start("external:a", trace.New(trace.Flow)).ID, a.start("external:b", trace.New(trace.Flow)).ID
	got := bulk("cancel", first, second, "01890000-0000-7000-8000-000000000000")
	assert.Equal(t, "2 1", fmt.Sprint(got.Done, got.Refused))
	assert.Truef(t, got.Items[0].ID == first && got.Items[0].Status == "cancelled" && got.Items[2].Error != "",
		"cancelled: %+v", got)
	assert.Contains(t, got.Detail, "2 of 3 executions cancelled. 1 refused, the first because: ")
	third := a.start("external:c", trace.New(trace.Flow)).ID
	got = bulk("retry", first, third, second)
	assert.Equal(t, "2 1", fmt.Sprint(got.Done, got.Refused))
	for _, i := range []int{0, 2} {
		x, err := executions.Get(t.Context(), a.pool, got.Items[i].ExecutionID)
		assert.Truef(t, err == nil && x.ForkedFrom != nil && *x.ForkedFrom == got.Items[i].ID,
			"item %d is no retry: %+v, %v", i, x, err)
	}
	if got := bulk("cancel", first); got.Done != 0 || !strings.Contains(got.Items[0].Error, "has ended: cancelled") {
		t.Errorf("an ended one: %+v", got)
	}
	for _, act := range []string{"retry_execution", "cancel"} {
		pgtest.Equal(t, a.pool, 2, `select count(*) from agent_activity where skill_name like $1 || '%' and status = 'success'
			and input ->> 'reason' = 'it is back'`, act)
	}
	for name, body := range map[string]string{
		"action":   `{"action":"fork","ids":["` + first + `"],"reason":"x"}`,
		"none":     `{"action":"retry","ids":[],"reason":"x"}`,
		"too many": `{"action":"retry","ids":["` + strings.Repeat(first+`","`, 200) + first + `"],"reason":"x"}`,
		"twice":    `{"action":"retry","ids":["` + first + `","` + strings.ToUpper(first) + `"],"reason":"x"}`,
		"no id":    `{"action":"retry","ids":["x"],"reason":"x"}`,
		"reason":   `{"action":"retry","ids":["` + first + `"],"reason":" "}`,
	} {
		w := a.raw("POST", "/v1/executions/bulk", body, asAdmin())
		assert.Truef(t, w.Code == http.StatusBadRequest, "%s: %d %s", name, w.Code, w.Body)
	}
}

// A slow bulk retry answers before its time ends. The response tells done executions from the rest, which the client
// may send again.
func TestSlowBulkRetryAnswersInTime(t *testing.T) {
	t.Parallel()
	a := start(t)
	first, second := a.startSlowToFork()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second+200*time.Millisecond)
	defer cancel()
	w := a.send(ctx, "POST", "/v1/executions/bulk",
		fmt.Sprintf(`{"action":"retry","ids":[%q,%q],"reason":"it is back"}`, first, second), asAdmin())
	var got struct {
		Done, Refused int
		Items         []struct{ ID, Error string }
	}
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got))
	assert.Truef(t, got.Done == 1 && got.Refused == 1 && got.Items[0].Error == "" && got.Items[1].ID == second &&
		strings.Contains(got.Items[1].Error, "not tried"), "got %+v", got)
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_executions where forked_from is not null`)
}

// The client disconnects after the first retry, and sends the request again.
func TestRepeatedBulkRetryForksOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	first, second := a.startSlowToFork()
	const forks = `select count(*) from agent_executions where forked_from is not null`
	body := fmt.Sprintf(`{"action":"retry","ids":[%q,%q],"reason":"it is back"}`, first, second)
	header := asAdmin()
	header.Set("Idempotency-Key", "k")
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.send(ctx, "POST", "/v1/executions/bulk", body, header)
	}()
	pgtest.Eventually(t, func() bool { return pgtest.Value[int](t, a.pool, forks) == 1 }, "one retry is done")
	leave()
	<-done
	again := a.send(t.Context(), "POST", "/v1/executions/bulk", body, header)
	assert.Truef(t, again.Code == 200 && strings.Contains(again.Body.String(), `"done":2`),
		"%d %s", again.Code, again.Body)
	pgtest.Equal(t, a.pool, 2, forks)
}

// startSlowToFork returns two cancelled executions. The start of an execution, such as a fork, then takes 300 ms.
func (a *agent) startSlowToFork() (first, second string) {
	a.t.Helper()
	first, second = a.start("external:a", trace.New(trace.Flow)).ID, a.start("external:b", trace.New(trace.Flow)).ID
	pgtest.Exec(a.t, a.pool, `select cancel_agent_execution(id, 'ana', '') from agent_executions`)
	pgtest.Exec(a.t, a.pool, `create function delay() returns trigger language plpgsql as $$ begin
		perform pg_sleep(0.3); return new; end $$`)
	pgtest.Exec(a.t, a.pool, `create trigger delay before insert on agent_executions for each row execute function delay()`)
	return first, second
}
