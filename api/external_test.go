package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	osexec "os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/principals"
)

// runningAgent starts the API with an engine that sweeps often.
func runningAgent(t *testing.T, flows ...string) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	e, err := executions.New(pool, executions.Options{
		Keeper: lanes.NewKeeper(pool, lanes.Options{}), SweepEvery: 100 * time.Millisecond,
	})
	require.NoError(t, err)
	for _, name := range flows {
		err := e.Register(name, func(context.Context, json.RawMessage) (executions.Result, error) {
			return executions.Result{Summary: "ran"}, nil
		})
		require.NoError(t, err)
	}
	testkit.Run(t, e.Run)
	return newAgentWith(t, api.Options{Pool: pool, Engine: e})
}

// request expects a status and decodes the response.
func (a *agent) request(method, path, body string, status int, into any) http.Header {
	a.t.Helper()
	return a.checkResponse(a.raw(method, path, body, asAdmin()), method, path, status, into)
}

type startedExecution struct {
	ID, Status string
	TraceID    string `json:"trace_id"`
}

func (a *agent) startExternal(more string) startedExecution {
	a.t.Helper()
	var x startedExecution
	header := a.request("POST", "/v1/executions", `{"flow":"external"`+more+`}`, http.StatusCreated, &x)
	assert.Truef(a.t, x.Status == "pending" && header.Get("X-Trace-Id") == x.TraceID &&
		strings.HasPrefix(x.TraceID, "fl_"), "started %+v", x)
	return x
}

type lockAnswer struct {
	LockID      string               `json:"lock_id"`
	ExpiresAt   time.Time            `json:"expires_at"`
	Execution   executions.Execution `json:"execution"`
	Checkpoint  *struct{ Step string }
	Checkpoints map[string]any
}

func (a *agent) lock(id, owner string, ttl int) lockAnswer {
	a.t.Helper()
	var got lockAnswer
	a.request("POST", "/v1/executions/"+id+"/lock", fmt.Sprintf(`{"owner":%q,"ttl_seconds":%d}`, owner, ttl), 200, &got)
	return got
}

// recordStep posts a checkpoint.
func (a *agent) recordStep(id, lock, step, output string) *httptest.ResponseRecorder {
	a.t.Helper()
	return a.raw("POST", "/v1/executions/"+id+"/checkpoints",
		fmt.Sprintf(`{"lock_id":%q,"step":%q,"output":%s}`, lock, step, output), asAdmin())
}

// checkRefusals expects every request with the lock to fail.
func (a *agent) checkRefusals(id, lock, words string) {
	a.t.Helper()
	path := "/v1/executions/" + id + "/lock/" + lock
	for _, w := range []*httptest.ResponseRecorder{
		a.raw("PUT", path, "", asAdmin()), a.recordStep(id, lock, "late", "1"),
		a.raw("DELETE", path, `{"status":"completed"}`, asAdmin()),
	} {
		a.checkProblem(w, http.StatusConflict, words)
	}
}

func TestExternalExecutionLifecycle(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	x := a.startExternal(`,"input":{"n":1,"token":"kept-whole-for-the-worker"},"thread_id":"t-1","progress_seconds":600`)
	path := "/v1/executions/" + x.ID
	lock := a.lock(x.ID, "worker 1", 30)
	assert.Equal(t, "running", lock.Execution.Status)
	assert.Equal(t, 600, lock.Execution.Progress)
	assert.Equal(t, "fail", lock.Execution.OnLost)
	assert.Contains(t, string(lock.Execution.Input), "kept-whole")
	assert.Truef(t, lock.Checkpoint == nil && len(lock.Checkpoints) == 0, "checkpoints of a new execution: %+v", lock)
	assert.Truef(t, time.Until(lock.ExpiresAt) <= 31*time.Second, "the lock expires at %s", lock.ExpiresAt)
	renewed := a.lock(x.ID, "worker 1", 60)
	assert.Equal(t, lock.LockID, renewed.LockID)
	assert.Truef(t, renewed.ExpiresAt.After(lock.ExpiresAt), "%s, then %s", lock.ExpiresAt, renewed.ExpiresAt)
	held := a.checkProblem(a.raw("POST", path+"/lock", `{"owner":"worker 2"}`, asAdmin()), 409, "worker 1 holds it until")
	assert.Equal(t, "worker 1", held.Holder)
	assert.Equal(t, x.TraceID, held.TraceID)
	assert.Truef(t, strings.HasSuffix(held.Type, "lock-held"), "type %s", held.Type)
	var step struct{ ID, Step string }
	a.checkResponse(a.recordStep(x.ID, lock.LockID, "one", `{"a":[1,2]}`), "POST", path+"/checkpoints", 201, &step)
	a.checkResponse(a.recordStep(x.ID, lock.LockID, "one", `{ "a": [1, 2.0] }`), "POST", path+"/checkpoints", 200, &step)
	a.checkProblem(a.recordStep(x.ID, lock.LockID, "one", `{"a":[2,1]}`), 409, "another output")
	a.checkProblem(a.recordStep(x.ID, lock.LockID+"x", "one", `{"a":[1,2]}`), 409, "locked by worker 1")
	var beat struct {
		ExpiresAt       time.Time `json:"expires_at"`
		Status          string
		CancelRequested bool `json:"cancel_requested"`
	}
	header := a.request("PUT", path+"/lock/"+lock.LockID, "", 200, &beat)
	assert.Equal(t, x.TraceID, header.Get("X-Trace-Id"))
	assert.Truef(t, beat.Status == "running" && !beat.CancelRequested, "heartbeat %+v", beat)
	assert.Truef(t, time.Until(beat.ExpiresAt) >= 30*time.Second, "the lock expires at %s", beat.ExpiresAt)
	var end startedExecution
	a.request("DELETE", path+"/lock/"+lock.LockID,
		`{"status":"waiting","waiting_for":"event","waiting_key":"paid","timeout":"7d"}`, 200, &end)
	var detail struct {
		Status     string
		Checkpoint struct{ Step string }
		Waits      []struct {
			For string `json:"waiting_for"`
			Key string `json:"waiting_key"`
		}
		ForkedFrom, FlowVersion, Inherits any
	}
	a.get(path, &detail)
	assert.Equal(t, "waiting", end.Status)
	assert.Equal(t, "waiting", detail.Status)
	assert.Equal(t, "one", detail.Checkpoint.Step)
	require.Equal(t, 1, len(detail.Waits))
	assert.Equal(t, "paid", detail.Waits[0].Key)
	a.checkProblem(a.raw("POST", path+"/lock", `{"owner":"worker 2"}`, asAdmin()), 409, "for event paid until")
	a.checkRefusals(x.ID, lock.LockID, "waits for event paid")
	a.request("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"paid","data":{"amount":3}}`, 202, &struct{}{})
	next := a.lock(x.ID, "worker 2", 30)
	want := map[string]any{"one": map[string]any{"a": []any{1.0, 2.0}}, "wait event 1": next.Checkpoints["wait event 1"]}
	assert.Equal(t, "", cmp.Diff(want, next.Checkpoints))
	assert.Equal(t, "wait event 1", next.Checkpoint.Step)
	outcome, err := json.Marshal(next.Checkpoints["wait event 1"])
	require.NoError(t, err)
	assert.Contains(t, string(outcome), `"data":{"amount":3}`)
	a.request("DELETE", path+"/lock/"+next.LockID, `{"status":"failed","error_message":"no paper"}`, 200, &end)
	a.checkRefusals(x.ID, next.LockID, "the run has ended: failed, no paper")
	a.checkProblem(a.raw("POST", path+"/lock", `{"owner":"worker 2"}`, asAdmin()), 409,
		"the run has ended: failed, no paper")
	for _, id := range []string{lock.LockID, next.LockID} {
		assert.True(t, !strings.Contains(a.log.String(), id), "the log has the id of a lock")
		listed := a.raw("GET", "/v1/lanes", "", asAdmin()).Body.String() + a.raw("GET", path, "", asAdmin()).Body.String()
		assert.True(t, !strings.Contains(listed, id), "the id of a lock is listed")
	}
	assert.Contains(t, a.log.String(), "/lock/[redacted]")
}

func TestInvalidExternalRequests(t *testing.T) {
	t.Parallel()
	a := runningAgent(t, "report", "heartbeat")
	x := a.startExternal("")
	lock := a.lock(x.ID, "w", 600)
	path, held := "/v1/executions/"+x.ID, "/v1/executions/"+x.ID+"/lock/"+lock.LockID
	const nobody = "/v1/executions/018f0000-0000-7000-8000-000000000000"
	step := func(more string) string { return `{"lock_id":"` + lock.LockID + `",` + more + `}` }
	for _, c := range []struct {
		method, path, body string
		status             int
		words              string
	}{
		{"POST", "/v1/executions", `{"flow":"reprot"}`, 422, "did you mean report?"},
		{"POST", "/v1/executions", `{"flow":"zzz"}`, 422, "external, report"},
		{"POST", "/v1/executions", `{"FLOW":"external"}`, 400, `unknown field "FLOW"`},
		{"POST", "/v1/executions", `{"flow":"heartbeat"}`, 422, "agent heartbeat"},
		{"POST", "/v1/executions", `{"flow":"external:"}`, 422, "name it external, or external:NAME"},
		{"POST", "/v1/executions", `{"flow":"external:a b"}`, 422, "letters, digits and ._-"},
		{"POST", "/v1/executions", `{}`, 400, "flow is missing"},
		{"POST", "/v1/executions", `{"flow":"external","onlost":"fail"}`, 400, "onlost"},
		{"POST", "/v1/executions", `{"flow":"external","on_lost":"resume"}`, 400, "on_lost"},
		{"POST", "/v1/executions", `{"flow":"report","on_lost":"hand_on"}`, 400, "accept resume or fail"},
		{"POST", "/v1/executions", `{"flow":"external","on_lost":"explode"}`, 400, "on_lost"},
		{"POST", "/v1/executions", `{"flow":"external","progress_seconds":-1}`, 400, "progress_seconds"},
		{"POST", "/v1/executions", `{"flow":"external","priority":5}`, 400, "priority"},
		{"POST", "/v1/executions", `{"flow":"external","queue":"fast"}`, 400, "queue"},
		{"POST", "/v1/executions", `{"flow":"external","parent_id":"x"}`, 400, "parent_id"},
		{
			"POST", "/v1/executions", `{"flow":"external","parent_id":"018f0000-0000-7000-8000-000000000000"}`, 404,
			"parent_id",
		},
		{"POST", "/v1/executions", `{"flow":"external","input":"\u0000"}`, 400, "remove \\u0000 from"},
		{"POST", "/v1/executions", `{"flow":"external","input":1e400000}`, 400, "numeric"},
		{"POST", "/v1/executions", `{"flow":"external","input":"` + strings.Repeat("x", 1<<20) + `"}`, 413, "larger"},
		{"POST", "/v1/executions/x/lock", `{"owner":"w"}`, 400, "uuid"},
		{"POST", nobody + "/lock", `{"owner":"w"}`, 404, "no such execution"},
		{"POST", path + "/lock", `{}`, 400, "owner"},
		{"POST", path + "/lock", `{"owner":"w","ttl":3}`, 400, `"ttl"`},
		{"POST", path + "/lock", `{"owner":"w","ttl_seconds":0}`, 400, "ttl_seconds"},
		{"POST", path + "/lock", `{"owner":"w","ttl_seconds":86401}`, 400, "ttl_seconds"},
		{"POST", path + "/lock", `{"owner":"a\u0000b"}`, 400, "owner"},
		{"PUT", "/v1/executions/x/lock/y", "", 400, "uuid"},
		{"PUT", nobody + "/lock/y", "", 404, "no such execution"},
		{"PUT", path + "/lock/y", "", 409, "locked by w"},
		{"PUT", path + "/lock/y", "{}", 409, "locked by w"},
		{"PUT", held, `{"ttl_seconds":60}`, 400, `unknown field "ttl_seconds"`},
		{"PUT", held, "60", 400, "not a JSON object"},
		{"PUT", path + "/lock/a%00b", "", 400, "malformed lock id"},
		{"PUT", "/v1/locks", `{"lock_ids":[]}`, 400, "lock_ids"},
		{"PUT", "/v1/locks", `{"lock_ids":["a\u0000b"]}`, 400, "lock_ids[0]"},
		{"POST", "/v1/executions/x/checkpoints", step(`"step":"a","output":1`), 400, "uuid"},
		{"POST", nobody + "/checkpoints", step(`"step":"a","output":1`), 404, "no such execution"},
		{"POST", path + "/checkpoints", step(`"step":"a"`), 400, "output"},
		{"POST", path + "/checkpoints", step(`"output":1`), 400, "step"},
		{"POST", path + "/checkpoints", `{"step":"a","output":1}`, 400, "lock_id"},
		{"POST", path + "/checkpoints", step(`"step":"a","output":"\u0000"`), 400, "remove \\u0000 from"},
		{"POST", path + "/checkpoints", step(`"step":"` + strings.Repeat("x", 501) + `","output":1`), 400, "500"},
		{"POST", path + "/checkpoints", step(`"step":"wait event 1","output":1`), 400, "the outcomes of waits"},
		{
			"DELETE", held, `{"status":"waiting","waiting_for":"agent","waiting_key":"` + strings.ToUpper(x.ID) + `"}`, 400,
			"cannot wait for itself",
		},
		{
			"DELETE", held, `{"status":"waiting","waiting_for":"agent","waiting_key":"018f0000-0000-7000-8000-000000000000"}`,
			404, "waiting_key is not valid: there is no execution",
		},
		{"DELETE", held, ``, 400, "JSON object"},
		{"DELETE", held, `{"status":"cancelled"}`, 400, "completed, failed or waiting"},
		{"DELETE", held, `{"status":"completed","waiting_for":"event"}`, 400, "status waiting"},
		{"DELETE", held, `{"status":"completed","error_message":"x"}`, 400, "status failed"},
		{"DELETE", held, `{"status":"waiting"}`, 400, "waiting_for is missing; use response, agent"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"lane","waiting_key":"x"}`, 400, "response, agent"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"event"}`, 400, "wait for event needs a key"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"agent","waiting_key":"w"}`, 400, "the id of an execution"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"delay"}`, 400, "wait for delay needs a timeout"},
		{
			"DELETE", held, `{"status":"waiting","waiting_for":"delay","timeout":"31d"}`, 400,
			"timeout 31 days of the wait for delay is not valid: give up to 30 days",
		},
		{"DELETE", held, `{"status":"waiting","waiting_for":"response","waiting_key":"t","timeout":"8d"}`, 400, "7 days"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"delay","timeout":"soon"}`, 400, "24h"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"delay","timeout":-5}`, 400, "24h"},
		{"DELETE", held, `{"status":"waiting","waiting_for":"delay","timeout":[1]}`, 400, "24h"},
	} {
		t.Run(c.method+" "+strings.ReplaceAll(c.path, lock.LockID, "id")+" "+fmt.Sprintf("%.60s", c.body),
			func(t *testing.T) {
				b := *a
				b.t = t
				b.checkProblem(b.raw(c.method, c.path, c.body, asAdmin()), c.status, c.words)
				if path, plain := a.doc["paths"].(map[string]any)[c.path].(map[string]any); plain {
					operation := path[strings.ToLower(c.method)].(map[string]any)
					assert.Truef(t, isDocumented(operation, c.status), "%d is not documented", c.status)
				}
			})
	}
	again := a.lock(x.ID, "w", 30)
	assert.Truef(t, again.LockID == lock.LockID && len(again.Checkpoints) == 0, "something was changed: %+v", again)
	inside := startedExecution{}
	a.request("POST", "/v1/executions", `{"flow":"report"}`, 201, &inside)
	a.checkProblem(a.raw("POST", "/v1/executions/"+inside.ID+"/lock", `{"owner":"w"}`, asAdmin()), 409, "external")
}

func TestStartWithKeyAndChild(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	header := asAdmin()
	header.Set("Idempotency-Key", "start 1")
	a.declare(agents.Definition{Name: "support", Default: true})
	var first, again, child startedExecution
	body := `{"flow":"external:sum","input":{"a":1},"labels":{"order":"A-1001"}}`
	a.checkResponse(a.raw("POST", "/v1/executions", body, header), "POST", "/v1/executions", 201, &first)
	a.checkResponse(a.raw("POST", "/v1/executions", body, header), "POST", "/v1/executions", 201, &again)
	pgtest.Exec(t, a.pool, `delete from agent_idempotency`) // like a crash before the response was stored
	a.checkResponse(a.raw("POST", "/v1/executions", body, header), "POST", "/v1/executions", 201, &child)
	assert.Equal(t, again, first)
	assert.Equal(t, child, first)
	pgtest.Equal(t, a.pool, "support", `select agent from agent_executions where id = $1`, first.ID)
	var found struct{ Items []struct{ ID string } }
	a.request("GET", "/v1/executions?label=order%3DA-1001", "", 200, &found)
	var detail struct{ Labels map[string]string }
	a.request("GET", "/v1/executions/"+first.ID, "", 200, &detail)
	assert.Truef(t, len(found.Items) == 1 && found.Items[0].ID == first.ID && detail.Labels["order"] == "A-1001",
		"found %+v, labels %v", found, detail.Labels)
	_, key := a.key(principals.User, principals.Admin, 0, "*")
	other := bearer(key)
	other.Set("Idempotency-Key", "start 1")
	a.checkResponse(a.raw("POST", "/v1/executions", body, other), "POST", "/v1/executions", 201, &child)
	assert.True(t, child.ID != first.ID, "another caller's request with the same key and body is the first caller's")
	a.checkProblem(a.raw("POST", "/v1/executions", `{"flow":"external","labels":{"No":"x"}}`, asAdmin()), 400, "labels")
	a.request("POST", "/v1/executions", `{"flow":"external","parent_id":"`+first.ID+
		`","queue":"interactive","priority":1,"reason":"a second check"}`, 201, &child)
	assert.Truef(t, child.TraceID == first.TraceID && child.ID != first.ID, "the child is %+v", child)
	pgtest.Equal(t, a.pool, first.ID+" "+child.ID+" "+first.TraceID, `
		select concat_ws(' ', input ->> 'parent_id', output ->> 'execution_id', trace_id) from agent_activity
		 where skill_name = 'start_execution' and purpose = 'a second check'`)
	a.request("POST", "/v1/executions/"+first.ID+"/cancel", `{"reason":"enough"}`, 200, &again)
	a.checkProblem(a.raw("POST", "/v1/executions", `{"flow":"external","parent_id":"`+first.ID+`"}`, asAdmin()), 409,
		"has ended")
}

func TestConcurrentLockRequests(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	x := a.startExternal("")
	var won, lost atomic.Int32
	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			w := a.raw("POST", "/v1/executions/"+x.ID+"/lock", fmt.Sprintf(`{"owner":"w%d"}`, i), asAdmin())
			var p problem
			switch {
			case w.Code == 200:
				won.Add(1)
			case w.Code == 409 && json.Unmarshal(w.Body.Bytes(), &p) == nil && p.Holder != "":
				lost.Add(1)
			default:
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	group.Wait()
	assert.Truef(t, won.Load() == 1 && lost.Load() == 49, "%d got it, %d did not", won.Load(), lost.Load())
}

func TestBatchRenewalReportsCancel(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	x, y := a.startExternal(""), a.startExternal("")
	one, two := a.lock(x.ID, "w", 30), a.lock(y.ID, "w", 30)
	a.request("POST", "/v1/executions/"+y.ID+"/cancel", `{"reason":"enough"}`, 200, &struct{}{})
	var got struct {
		Locks []struct {
			LockID          string  `json:"lock_id"`
			ExecutionID     *string `json:"execution_id"`
			Live            bool
			ExpiresAt       *time.Time `json:"expires_at"`
			Status          *string
			CancelRequested bool `json:"cancel_requested"`
		}
	}
	body := fmt.Sprintf(`{"lock_ids":[%q,%q,"gone",""]}`, one.LockID, two.LockID)
	a.request("PUT", "/v1/locks", body, 200, &got)
	l := got.Locks
	assert.Truef(t, len(l) == 4 && l[0].Live && *l[0].ExecutionID == x.ID && *l[0].Status == "running" &&
		!l[0].CancelRequested && l[1].Live && l[1].CancelRequested && *l[1].Status == "cancelled" && !l[2].Live &&
		l[2].ExecutionID == nil && l[2].ExpiresAt == nil && !l[3].Live && l[3].ExecutionID == nil, "beats are %+v", l)
	a.checkRefusals(y.ID, two.LockID, "cancelled, enough")
}

// followStatus reads the statuses of an execution until its end.
func (a *agent) followStatus(url, last string) (statuses, ids []string) {
	a.t.Helper()
	r, err := http.NewRequestWithContext(a.t.Context(), "GET", url, http.NoBody)
	require.NoError(a.t, err)
	r.Header = bearer(token)
	if last != "" {
		r.Header.Set("Last-Event-ID", last)
	}
	got, err := http.DefaultClient.Do(r)
	require.NoError(a.t, err)
	defer got.Body.Close()
	for lines := bufio.NewScanner(got.Body); ; {
		e := readEvent(a.t, lines)
		if len(e) == 0 {
			return statuses, ids
		}
		var data struct{ Status string }
		require.NoError(a.t, json.Unmarshal([]byte(e["data"]), &data))
		statuses, ids = append(statuses, data.Status), append(ids, e["id"])
	}
}

func TestStatusStreamResumesWithoutGap(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	server := a.listen(nil)
	x := a.startExternal("")
	url := server.URL + "/v1/executions/" + x.ID + "/events"
	type seen struct{ statuses, ids []string }
	all := make(chan seen, 1)
	first := a.call(t.Context(), "GET", url, token)
	defer first.Body.Close()
	lines := bufio.NewScanner(first.Body)
	pending := readEvent(t, lines) // from here on the stream misses no change
	go func() {
		statuses, ids := []string{"pending"}, []string{pending["id"]}
		for e := readEvent(t, lines); len(e) > 0; e = readEvent(t, lines) {
			_, status, _ := strings.Cut(e["id"], "-")
			statuses, ids = append(statuses, status), append(ids, e["id"])
		}
		all <- seen{statuses, ids}
	}()
	path := "/v1/executions/" + x.ID + "/lock"
	for range 2 {
		l := a.lock(x.ID, "w", 30)
		a.request("DELETE", path+"/"+l.LockID, `{"status":"waiting","waiting_for":"event","waiting_key":"k"}`, 200,
			&struct{}{})
		a.request("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"k"}`, 202, &struct{}{})
	}
	l := a.lock(x.ID, "w", 1) // without a heartbeat: it fails
	want := []string{"pending", "running", "waiting", "running", "waiting", "running", "failed"}
	got := <-all
	require.Equal(t, "", cmp.Diff(want, got.statuses))
	a.checkRefusals(x.ID, l.LockID, "lease expired")
	for i, id := range got.ids[:len(got.ids)-1] {
		again, _ := a.followStatus(url, id)
		assert.Truef(t, slices.Equal(again, want[i+1:]), "after %s it sees %v", id, again)
	}
	again, _ := a.followStatus(url, "")
	assert.Truef(t, slices.Equal(again, []string{"failed"}), "a new reader gets %v", again)
}

func TestWrongFieldTypeProblem(t *testing.T) {
	t.Parallel()
	a := start(t)
	for body, words := range map[string]string{
		`{"flow": "external", "progress_seconds": 1.5}`: "progress_seconds must be an integer, got number 1.5",
		`{"flow": 7}`: "flow must be a string, got number",
		`{"flow": "external", "labels": {"order": 1}}`: "each value of labels must be a string, got number",
		`{"flow": "external", "labels": "order"}`:      "labels must be an object, got string",
	} {
		a.checkProblem(a.raw("POST", "/v1/executions", body, asAdmin()), http.StatusBadRequest, words)
	}
	p := a.checkProblem(a.raw("PUT", "/v1/retention", `{"reason": 5}`, asAdmin()), http.StatusBadRequest, "reason")
	assert.Equal(t, "reason must be a string, got number", p.Detail)
	long := strings.Repeat("1", 10_000)
	for _, body := range []string{
		`{"flow": "external", "progress_seconds": ` + long + `}`, `{"` + long + `": 1}`, `{"labels": {"a": ` + long + `}}`,
	} {
		p := a.checkProblem(a.raw("POST", "/v1/executions", body, asAdmin()), http.StatusBadRequest, "")
		assert.Truef(t, len(p.Detail) < 300, "the response repeats the body: %d bytes", len(p.Detail))
	}
}

// A child works the same for an external parent as for an internal one.
func TestExternalParentWaitsForChild(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	a.create("/v1/threads", `{"id":"t"}`, nil)
	parent := a.startExternal(`,"thread_id":"t"`)
	for more, want := range map[string]string{
		`"wait_for_completion":true`:                          "t true true",
		`"wait_for_completion":true,"can_inherit_lock":false`: "t true false",
		`"wait_for_completion":false`:                         "false false",
		`"wait_for_completion":true,"thread_id":"t"`:          "t true true",
		`"wait_for_completion":true,"can_inherit_lock":true`:  "t true true",
	} {
		child := a.startExternal(fmt.Sprintf(`,"parent_id":%q,%s`, parent.ID, more))
		pgtest.Equal(t, a.pool, want, `select concat_ws(' ', thread_id, awaited::text, inherits::text) from agent_executions
			where id = $1`, child.ID)
	}
	for body, words := range map[string]string{
		`{"flow":"external","wait_for_completion":true}`:                              "parent_id",
		`{"flow":"external","parent_id":"` + parent.ID + `","can_inherit_lock":true}`: "wait_for_completion",
	} {
		a.checkProblem(a.raw("POST", "/v1/executions", body, asAdmin()), 400, words)
	}
}

func TestPauseAndResumeOverHTTP(t *testing.T) {
	t.Parallel()
	a := start(t)
	var state executions.Pause
	if a.get("/v1/pause", &state); state.Paused || state.PausedAt != nil {
		t.Errorf("state: %+v", state)
	}
	var first, again, over executions.PauseChange
	header := a.post("/v1/pause", `{"reason":"prices look wrong"}`, &first)
	assert.Truef(t, first.Changed && first.Paused && first.PausedBy == "root" && header.Get("X-Trace-Id") == first.TraceID,
		"pause: %+v, %v", first, header)
	a.checkAudit(first.TraceID, first.ActivityID, "pause_agent", "prices look wrong")
	if a.post("/v1/pause", `{"reason":"really"}`, &again); again.Changed || again.TraceID != first.TraceID ||
		again.Reason != "prices look wrong" {
		t.Errorf("again: %+v", again)
	}
	if a.get("/v1/pause", &state); !state.Paused || state.TraceID != first.TraceID || state.Reason != first.Reason {
		t.Errorf("state: %+v", state)
	}
	a.checkProblem(a.raw("POST", "/v1/pause", `{}`, asAdmin()), 400, "reason")
	a.checkProblem(a.raw("POST", "/v1/resume", `{"reason":" "}`, asAdmin()), 400, "reason")
	a.post("/v1/resume", `{"reason":"they were right"}`, &over)
	assert.Truef(t, over.Changed && !over.Paused && over.Reason == "prices look wrong" && over.ResumedAt != nil,
		"resume: %+v", over)
	a.checkAudit(over.TraceID, over.ActivityID, "resume_agent", "they were right")
	var none executions.PauseChange
	if a.post("/v1/resume", `{"reason":"again"}`, &none); none.Changed || none.PausedAt != nil {
		t.Errorf("resumed twice: %+v", none)
	}
}

func TestLockIsRejectedWhilePaused(t *testing.T) {
	t.Parallel()
	a := start(t)
	var x struct{ ID string }
	a.checkResponse(a.raw("POST", "/v1/executions", `{"flow":"external"}`, asAdmin()), "POST", "/v1/executions", 201, &x)
	a.post("/v1/pause", `{"reason":"prices look wrong"}`, &struct{}{})
	p := a.checkProblem(a.raw("POST", "/v1/executions/"+x.ID+"/lock", `{"owner":"worker 1"}`, asAdmin()), 409,
		"by root: prices look wrong")
	assert.Equal(t, "urn:lanekeeper:problem:paused", p.Type, p)
	a.post("/v1/resume", `{"reason":"they were right"}`, &struct{}{})
	a.post("/v1/executions/"+x.ID+"/lock", `{"owner":"worker 1"}`, &struct{}{})
}

// nodeWorker is the example worker in Node.
type nodeWorker struct {
	cmd *osexec.Cmd
	out *testkit.Log
}

func (a *agent) startNodeWorker(base, name, id, pause string, environ ...string) *nodeWorker {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.t.Context()), 3*time.Minute)
	n := &nodeWorker{
		cmd: osexec.CommandContext(ctx, "node", "../examples/outside-worker/worker.mjs", id, "8", pause),
		out: &testkit.Log{},
	}
	n.cmd.Env = append(os.Environ(), "AGENT_URL="+base, "AGENT_ADMIN_TOKEN="+token, "WORKER="+name, "TTL_SECONDS=600")
	n.cmd.Env = append(n.cmd.Env, environ...)
	n.cmd.Stdout, n.cmd.Stderr = n.out, n.out
	require.NoError(a.t, n.cmd.Start())
	a.t.Cleanup(func() {
		cancel()
		_ = n.cmd.Wait() // may have returned already, or is killed
	})
	return n
}

func (n *nodeWorker) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	require.NoError(t, n.cmd.Process.Signal(s))
}

// waitSteps waits until a worker has recorded some steps.
func (a *agent) waitSteps(n *nodeWorker, steps int) {
	a.t.Helper()
	pgtest.Eventually(a.t, func() bool { return strings.Count(n.out.String(), "recorded add") >= steps },
		"the worker records its steps")
}

func TestNodeWorkerResumesAfterKill(t *testing.T) {
	t.Parallel()
	if _, err := osexec.LookPath("node"); err != nil {
		t.Skip("node is not installed: the worker in another language is not tried")
	}
	a := runningAgent(t)
	base := a.listen(nil).URL
	x := a.startExternal(`,"on_lost":"hand_on","input":{"start":10}`)
	over := func() { // instead of waiting ten minutes
		t.Helper()
		pgtest.Exec(t, a.pool, `update agent_workers set expires_at = clock_timestamp() where execution_id = $1`, x.ID)
		pgtest.Until(t, a.pool, true, `select claimed_by is null and status = 'running' from agent_executions
				where id = $1`, x.ID)
	}
	first := a.startNodeWorker(base, "first", x.ID, "500")
	a.waitSteps(first, 2)
	first.signal(t, syscall.SIGSTOP)
	intruder := a.startNodeWorker(base, "intruder", x.ID, "0")
	err := intruder.cmd.Wait()
	assert.Truef(t, intruder.cmd.ProcessState.ExitCode() == 9 &&
		strings.Contains(intruder.out.String(), "first holds it until"), "who came too early: %v %s", err, intruder.out)
	first.signal(t, syscall.SIGKILL)
	_ = first.cmd.Wait() // killed
	over()
	second := a.startNodeWorker(base, "second", x.ID, "500")
	a.waitSteps(second, 2)
	second.signal(t, syscall.SIGSTOP) // alive, but without heartbeats
	over()
	third := a.startNodeWorker(base, "third", x.ID, "0")
	err = third.cmd.Wait()
	assert.Truef(t, err == nil && strings.Contains(third.out.String(), "completed: 46"), "third: %v %s", err, third.out)
	second.signal(t, syscall.SIGCONT)
	err = second.cmd.Wait()
	assert.Truef(t, second.cmd.ProcessState.ExitCode() == 9 && strings.Contains(second.out.String(), ": 409 "),
		"who was woken late: %v %s", err, second.out)
	steps := pgtest.Value[int](t, a.pool, `select count(*)::int from agent_checkpoints where execution_id = $1`, x.ID)
	claims := pgtest.Value[int](t, a.pool, `select count(distinct claim)::int from agent_checkpoints
		where execution_id = $1`, x.ID)
	var ended struct {
		Status  string
		Summary string `json:"result_summary"`
	}
	a.get("/v1/executions/"+x.ID, &ended)
	assert.Truef(t, steps == 8 && claims == 3 && ended.Status == "completed" && ended.Summary == "the sum is 46",
		"%d steps under %d claims, %+v", steps, claims, ended)
	for _, n := range []*nodeWorker{second, third} { // no worker repeats a recorded step
		assert.Truef(t, !strings.Contains(n.out.String(), "recorded add 1\n") &&
			!strings.Contains(n.out.String(), "locked with 0"), "it began anew: %s", n.out)
	}
}

// The worker repeats a request that a busy server refuses. While a beat has no answer, it sends no other.
func TestNodeWorkerWaitsForBusyServer(t *testing.T) {
	t.Parallel()
	if _, err := osexec.LookPath("node"); err != nil {
		t.Skip("node is not installed: the worker in another language is not tried")
	}
	var refused atomic.Bool
	var beats atomic.Int32
	released := make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	base := testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPut:
			assert.Equal(t, 1, beats.Add(1), "beats without an answer")
			select {
			case <-released:
			case <-r.Context().Done():
			}
			beats.Add(-1)
			http.Error(w, `{"detail":"the run has ended"}`, http.StatusConflict)
		case !refused.Swap(true):
			http.Error(w, `{"detail":"busy"}`, http.StatusTooManyRequests)
		case r.Method == http.MethodDelete:
			release()
			fallthrough
		default:
			fmt.Fprint(w, `{"lock_id":"lock","checkpoints":{},"execution":{"input":{}}}`)
		}
	}))
	worker := (&agent{t: t}).startNodeWorker(base, "first", "x", "100", "TTL_SECONDS=0.1")
	err := worker.cmd.Wait()
	assert.Truef(t, err == nil && strings.Contains(worker.out.String(), "completed: 36"), "%v %s", err, worker.out)
}
