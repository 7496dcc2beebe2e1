package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// detail is an execution by the contract.
type detail struct {
	ID         string
	TraceID    string `json:"trace_id"`
	Status     string
	Flow       string
	Input      map[string]string
	CreatedAt  string `json:"created_at"`
	Checkpoint *struct {
		Step   string
		Output any
	}
	Waits []struct {
		For   string `json:"waiting_for"`
		Key   string `json:"waiting_key"`
		Until string `json:"waiting_until"`
		Data  any    `json:"waiting_data"`
	}
}

func TestExecutionDetail(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.start("ask", trace.New(trace.Flow))
	var got detail
	header := a.get("/v1/executions/"+x.ID, &got)
	assert.Truef(t, got.ID == x.ID && got.Status == "pending" && got.Flow == "ask" && got.Input["for"] == "ask" &&
		got.Checkpoint == nil, "execution is %+v", got)
	assert.Truef(t, got.Waits != nil && len(got.Waits) == 0, "waits are %v", got.Waits)
	assert.Equal(t, x.TraceID, header.Get("X-Trace-Id"))
	at, err := time.Parse(time.RFC3339, got.CreatedAt)
	assert.Truef(t, err == nil && got.CreatedAt[len(got.CreatedAt)-1] == 'Z' && at.Equal(x.CreatedAt),
		"created at %q, want %s", got.CreatedAt, x.CreatedAt)
	a.claim(x)
	pgtest.Exec(t, a.pool, `
		insert into agent_checkpoints (execution_id, step, claim, output, created_at) values
		       (@id, 'second', 1, '{"n": 2}', clock_timestamp()),
		       (@id, 'zeroth', 1, '{"n": 1}', clock_timestamp() - interval '1 minute')`, postgres.Strict{"id": x.ID})
	pgtest.Exec(t, a.pool, `
		update agent_executions set status = 'waiting', claim = claim + 1, waiting_for = 'response', waiting_key = 'thread-7',
		       waiting_until = '2999-01-01', waiting_data = '{"asked": "when?"}' where id = @id`, postgres.Strict{"id": x.ID})
	a.get("/v1/executions/"+x.ID, &got)
	assert.Truef(t, got.Checkpoint != nil && got.Checkpoint.Step == "second", "checkpoint is %+v", got.Checkpoint)
	assert.Truef(t, len(got.Waits) == 1 && got.Waits[0].For == "response" && got.Waits[0].Key == "thread-7" &&
		got.Waits[0].Data != nil, "waits are %+v", got.Waits)
}

// The row keeps what a replay needs; the API hides secrets and truncates large values.
func TestExecutionsHideSecrets(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.start("ask", trace.New(trace.Flow))
	a.claim(x)
	pgtest.Exec(t, a.pool, `
		insert into agent_checkpoints (execution_id, step, claim, output)
		values (@id, 'login', 1, '{"password": "Zq81xLm0Kk77"}')`, postgres.Strict{"id": x.ID})
	pgtest.Exec(t, a.pool, `
		update agent_executions set status = 'waiting', claim = claim + 1, waiting_for = 'event',
		                            waiting_key = 'token=Zq81xLm0Kk77', waiting_until = '2999-01-01',
		                            waiting_data = '{"secret": "Zq81xLm0Kk77"}', variables = '{"api_key": "Zq81xLm0Kk77"}',
		                            result_summary = 'Bearer Zq81xLm0Kk77',
		                            input = jsonb_build_object('long', repeat('long ', 40000))
		 where id = @id`, postgres.Strict{"id": x.ID})
	for _, path := range []string{"/v1/executions", "/v1/executions/" + x.ID} {
		a.get(path, &struct{}{})
		got := a.raw("GET", path, "", asAdmin()).Body.String()
		assert.Truef(t, !strings.Contains(got, "Zq81xLm0Kk77") && strings.Contains(got, "[redacted]") && len(got) <= 128<<10,
			"%s: %d bytes: %.2000s", path, len(got), got)
	}
	kept, err := executions.Get(t.Context(), a.pool, x.ID)
	assert.Truef(t, err == nil && strings.Contains(string(kept.Variables), "Zq81xLm0Kk77"),
		"the row keeps %s, %v", kept.Variables, err)
}

func TestAlteredResultIsMarked(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.start("ask", trace.New(trace.Flow))
	for result, want := range map[string]bool{
		`null`: false, `{"bb": 1.50, "a": [1e30, "<ü>"]}`: false, `{"token": "Zq81xLm0Kk77"}`: true,
		`"` + strings.Repeat("x", 65<<10) + `"`: true,
	} {
		pgtest.Exec(t, a.pool, `update agent_executions set result = $1::text::jsonb`, result)
		var got struct {
			Altered bool `json:"result_altered"`
		}
		a.get("/v1/executions/"+x.ID, &got)
		assert.Equal(t, want, got.Altered, result[:min(len(result), 40)])
	}
}

func TestCancelExecutionOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.start("beat", trace.New(trace.Flow))
	var got struct {
		Status  string
		TraceID string `json:"trace_id"`
	}
	for range 2 {
		header := a.post("/v1/executions/"+x.ID+"/cancel", `{"reason":"not needed"}`, &got)
		assert.Truef(t, got.Status == "cancelled" && header.Get("X-Trace-Id") == x.TraceID, "answer is %+v, %v", got, header)
	}
	row, err := executions.Get(t.Context(), a.pool, x.ID)
	assert.Truef(t, err == nil && *row.CancelledBy == "root" && *row.CancelReason == "not needed",
		"row is %+v, %v", row, err)
	done := a.start("beat", trace.New(trace.Flow))
	a.fail(done)
	a.post("/v1/executions/"+done.ID+"/cancel", `{"reason":"too late"}`, &got)
	assert.Equal(t, "failed", got.Status)
	locked := a.start("beat", trace.New(trace.Flow))
	tx, err := a.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { assert.NoError(t, tx.Rollback(context.Background())) }()
	_, err = tx.Exec(t.Context(), `select from agent_executions where id = $1 for update`, locked.ID)
	require.NoError(t, err)
	path := "/v1/executions/" + locked.ID + "/cancel"
	a.checkResponse(a.raw("POST", path, `{"reason":"in the way"}`, asAdmin()), "POST", path, http.StatusAccepted, &got)
	assert.Equal(t, "pending", got.Status)
	var bulk struct{ Detail string }
	a.post("/v1/executions/bulk", `{"action":"cancel","ids":["`+locked.ID+`"],"reason":"in the way"}`, &bulk)
	assert.Contains(t, bulk.Detail, "0 of 1 executions cancelled. 1 requested: ")
}

func TestForkRetryAndReplayOverHTTP(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	err := e.Register("greet", func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
		var in struct{ Name string }
		if err := json.Unmarshal(raw, &in); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Step(ctx, "look up", func(context.Context) (int, error) { return 1, nil },
			executions.Input(in.Name))
		if err == nil {
			_, err = executions.Step(ctx, "say", func(context.Context) (int, error) {
				if in.Name == "nobody" {
					return 0, fmt.Errorf("there is nobody")
				}
				return 1, nil
			})
		}
		return executions.Result{Summary: "hello " + in.Name}, err
	})
	require.NoError(t, err)
	a := newAgent(t, pool, e)
	testkit.Run(t, e.Run)
	run := func(name string, want executions.Status) executions.Execution {
		x, err := e.RunSync(t.Context(), executions.Spec{
			Flow: "greet", Surface: trace.Flow,
			Input: map[string]string{"name": name},
		})
		require.Truef(t, err == nil && x.Status == want, "%s: %s, %v", name, x.Status, err)
		return x
	}
	good, bad := run("Ana", executions.Completed), run("nobody", executions.Failed)
	type forked struct {
		ID, Status, From string
		TraceID          string `json:"trace_id"`
		ForkedFrom       string `json:"forked_from"`
	}
	var got forked
	header := a.request("POST", "/v1/executions/"+good.ID+"/fork",
		`{"from": "say", "input": {"name": "Ana", "more": true}}`, 201, &got)
	assert.Truef(t, got.ForkedFrom == good.ID && got.From == "say" && got.Status == "pending" &&
		header.Get("X-Trace-Id") == got.TraceID && got.TraceID != good.TraceID, "fork is %+v", got)
	a.request("POST", "/v1/executions/"+bad.ID+"/retry", ``, 201, &got)
	assert.Equal(t, bad.ID, got.ForkedFrom, got)
	assert.Equal(t, "say", got.From, got)
	var replayed executions.Replayed
	for _, x := range []executions.Execution{good, bad} {
		a.post("/v1/executions/"+x.ID+"/replay", ``, &replayed)
		assert.Truef(t, replayed.Equal && replayed.Digest != "" && replayed.Steps == 2 && replayed.TraceID == x.TraceID,
			"replay is %+v", replayed)
	}
	for path, c := range map[string]struct {
		body   string
		status int
		words  string
	}{
		"/v1/executions/" + good.ID + "/fork": {
			`{"from": "say", "input": {"name": "Eva"}}`,
			http.StatusConflict, "step look up",
		},
		"/v1/executions/" + strings.ToUpper(bad.ID) +
			"/fork": {`{"from": "look up", "input": {"name": "\u0000"}}`, http.StatusBadRequest, "remove \\u0000 from"},
		"/v1/executions/" + bad.ID + "/fork":   {`{"from": "sing"}`, http.StatusBadRequest, "no such recorded step"},
		"/v1/executions/" + good.ID + "/retry": {``, http.StatusConflict, "only a failed"},
		"/v1/executions/nonsense/replay":       {``, http.StatusBadRequest, "not the id (uuid) of an execution"},
		"/v1/executions/" + "0198c0de-0000-7000-8000-000000000000" +
			"/replay": {``, http.StatusNotFound, "no such execution"},
	} {
		a.checkProblem(a.raw("POST", path, c.body, asAdmin()), c.status, c.words)
	}
}

func TestMonitoringOverHTTP(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `
		insert into agent_executions (trace_id, surface, flow, status)
		  values ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'a', 'pending'),
		       ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'b', 'running'),
		         ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'c', 'running')`)
	pgtest.Exec(t, a.pool, `
		update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = flow,
		       waiting_until = clock_timestamp() + case flow when 'b' then interval '-2 hours' else interval '1 hour' end
		         where status = 'running'`)
	pgtest.Exec(t, a.pool, `update agent_executions set updated_at = clock_timestamp() - interval '2 hours'
		where flow = 'b'`)
	items := func(path string) (got []map[string]any) {
		t.Helper()
		w := a.raw("GET", path, "", asAdmin())
		var page struct{ Items []map[string]any }
		err := json.Unmarshal(w.Body.Bytes(), &page)
		require.Truef(t, err == nil && w.Code == http.StatusOK, "%s: %d %s", path, w.Code, w.Body)
		return page.Items
	}
	got := items("/v1/monitor/status")
	assert.Truef(t, len(got) == 3 && fmt.Sprint(got[0]["status"], got[0]["count"], got[2]["count"]) == "pending1 2",
		"status: %v", got)
	got = items("/v1/monitor/waiting")
	assert.Truef(t, len(got) == 2 && got[0]["flow"] == "b" && got[1]["waiting_key"] == "c", "waiting: %v", got)
	got = items("/v1/monitor/waiting?for=delay")
	assert.Truef(t, len(got) == 0, "waiting for time: %v", got)
	got = items("/v1/monitor/stuck")
	assert.Truef(t, len(got) == 1 && got[0]["flow"] == "b", "stuck: %v", got)
}

// Outputs may be large, so the handler reads the latest checkpoint alone.
func TestExecutionDetailReadsOneCheckpoint(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	recorded, recorder := pgtest.Recorded(t, pool)
	a := newAgentWith(t, api.Options{Pool: recorded, Engine: engine(t, recorded)})
	x := a.start("ask", trace.New(trace.Flow))
	a.claim(x)
	pgtest.Exec(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, output, created_at)
		select @id, 'step ' || n, 1, to_jsonb(n), now() - n * interval '1 s' from generate_series(1, 100) n`,
		postgres.Strict{"id": x.ID})
	var got detail
	a.get("/v1/executions/"+x.ID, &got)
	assert.Truef(t, got.Checkpoint != nil && got.Checkpoint.Step == "step 1", "checkpoint %+v", got.Checkpoint)
	checked := 0
	for _, q := range recorder.Queries() {
		if strings.Contains(q.SQL, "from agent_checkpoints") {
			tag, err := pool.Exec(t.Context(), q.SQL, q.Args...)
			require.NoError(t, err)
			assert.Equal(t, int64(1), tag.RowsAffected(), q.SQL)
			checked++
		}
	}
	assert.Equal(t, 1, checked, "reads of checkpoints")
}
