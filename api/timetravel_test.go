package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestForkRetryAndReplayOverHTTP(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	err := e.Register("greet", func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
		var in struct{ Name string }
		if err := json.Unmarshal(raw, &in); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Step(ctx, "look up", func(context.Context) (int, error) { return 1, nil }, executions.Input(in.Name))
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
	if err != nil {
		t.Fatal(err)
	}
	a := with(t, pool, e)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var group errgroup.Group
	group.Go(func() error { return e.Run(ctx) })
	t.Cleanup(func() {
		stop()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
	run := func(name string, want executions.Status) executions.Execution {
		x, err := e.RunNow(t.Context(), executions.Spec{Flow: "greet", Surface: trace.Flow, Input: map[string]string{"name": name}})
		if err != nil || x.Status != want {
			t.Fatalf("%s: %s, %v", name, x.Status, err)
		}
		return x
	}
	good, bad := run("Ana", executions.Completed), run("nobody", executions.Failed)
	type forked struct {
		ID, Status, From string
		TraceID          string `json:"trace_id"`
		ForkedFrom       string `json:"forked_from"`
	}
	var got forked
	header := a.does("POST", "/v1/executions/"+good.ID+"/fork", `{"from": "say", "input": {"name": "Ana", "more": true}}`, 201, &got)
	if got.ForkedFrom != good.ID || got.From != "say" || got.Status != "pending" || header.Get("X-Trace-Id") != got.TraceID || got.TraceID == good.TraceID {
		t.Errorf("fork is %+v", got)
	}
	a.does("POST", "/v1/executions/"+bad.ID+"/retry", ``, 201, &got)
	if got.ForkedFrom != bad.ID || got.From != "say" {
		t.Errorf("retry is %+v", got)
	}
	var replayed executions.Replayed
	for _, x := range []executions.Execution{good, bad} {
		a.post("/v1/executions/"+x.ID+"/replay", ``, &replayed)
		if !replayed.Equal || replayed.Digest == "" || replayed.Steps != 2 || replayed.TraceID != x.TraceID {
			t.Errorf("replay is %+v", replayed)
		}
	}
	for path, c := range map[string]struct {
		body   string
		status int
		words  string
	}{
		"/v1/executions/" + good.ID + "/fork":                                  {`{"from": "say", "input": {"name": "Eva"}}`, http.StatusConflict, "step look up"},
		"/v1/executions/" + strings.ToUpper(bad.ID) + "/fork":                  {`{"from": "look up", "input": {"name": "\u0000"}}`, http.StatusBadRequest, "u0000 cannot be converted"},
		"/v1/executions/" + bad.ID + "/fork":                                   {`{"from": "sing"}`, http.StatusBadRequest, "no such recorded step"},
		"/v1/executions/" + good.ID + "/retry":                                 {``, http.StatusConflict, "only what has failed"},
		"/v1/executions/nonsense/replay":                                       {``, http.StatusBadRequest, "not the id of an execution"},
		"/v1/executions/" + "0198c0de-0000-7000-8000-000000000000" + "/replay": {``, http.StatusNotFound, "no such execution"},
	} {
		a.refused(a.raw("POST", path, c.body, asAdmin()), c.status, c.words)
	}
}

func TestMonitoringOverHTTP(t *testing.T) {
	t.Parallel()
	a := start(t)
	exec(t, a.pool, `
		insert into agent_executions (trace_id, surface, flow, status) values ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'a', 'pending'),
		       ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'b', 'running'), ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'c', 'running')`)
	exec(t, a.pool, `
		update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = flow,
		       waiting_until = clock_timestamp() + case flow when 'b' then interval '-2 hours' else interval '1 hour' end where status = 'running'`)
	exec(t, a.pool, `update agent_executions set updated_at = clock_timestamp() - interval '2 hours' where flow = 'b'`)
	items := func(path string) (got []map[string]any) {
		t.Helper()
		w := a.raw("GET", path, "", asAdmin())
		var page struct{ Items []map[string]any }
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != http.StatusOK {
			t.Fatalf("%s: %d %s", path, w.Code, w.Body)
		}
		return page.Items
	}
	if got := items("/v1/monitor/status"); len(got) != 3 || fmt.Sprint(got[0]["status"], got[0]["count"], got[2]["count"]) != "pending1 2" {
		t.Errorf("status: %v", got)
	}
	if got := items("/v1/monitor/waiting"); len(got) != 2 || got[0]["flow"] != "b" || got[1]["waiting_key"] != "c" {
		t.Errorf("waiting: %v", got)
	}
	if got := items("/v1/monitor/waiting?for=delay"); len(got) != 0 {
		t.Errorf("waiting for time: %v", got)
	}
	if got := items("/v1/monitor/stuck"); len(got) != 1 || got[0]["flow"] != "b" {
		t.Errorf("stuck: %v", got)
	}
}
