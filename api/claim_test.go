package api_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// claimRuns claims executions of a flow.
func (a *agent) claimRuns(flow, owner, more string) []lockAnswer {
	a.t.Helper()
	var got struct{ Locks []lockAnswer }
	a.request("POST", "/v1/locks", fmt.Sprintf(`{"flows":[%q],"owner":%q%s}`, flow, owner, more), 200, &got)
	return got.Locks
}

// startFlow starts an execution of an external flow.
func (a *agent) startFlow(flow, more string) string {
	a.t.Helper()
	var x startedExecution
	a.request("POST", "/v1/executions", fmt.Sprintf(`{"flow":%q%s}`, flow, more), http.StatusCreated, &x)
	return x.ID
}

func TestClaimReturnsOldestOfNamedFlows(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	first := a.startFlow("external:sum", `,"input":{"n":1}`)
	second := a.startFlow("external:sum", "")
	a.startFlow("external:other", "")
	got := a.claimRuns("external:sum", "w", `,"max":5`)
	require.Truef(t, len(got) == 2 && got[0].Execution.ID == first && got[1].Execution.ID == second &&
		string(got[0].Execution.Input) == `{"n":1}` && got[0].Execution.Status == "running", "claimed %+v", got)
	// The response was lost. A further claim of the same owner returns the executions that the request does not list.
	again := a.claimRuns("external:sum", "w", fmt.Sprintf(`,"max":5,"lock_ids":[%q]`, got[0].LockID))
	assert.Truef(t, len(again) == 1 && again[0].LockID == got[1].LockID, "after a lost response: %+v", again)
	a.startFlow("external:twice", "")
	var twice struct{ Locks []lockAnswer }
	a.request("POST", "/v1/locks", `{"flows":["external:twice","external:twice"],"owner":"w","max":5}`, 200, &twice)
	assert.Equal(t, 1, len(twice.Locks), "claims of a flow that is named twice")
	others := a.claimRuns("external:sum", "another", `,"max":5`)
	assert.Truef(t, len(others) == 0, "another owner got %+v", others)
	path := "/v1/executions/" + first + "/lock/" + got[0].LockID
	a.request("POST", path, `{"status":"completed","result":3}`, 200, &map[string]any{})
	pgtest.Equal(t, a.pool, "completed", `select status::text from agent_executions where id = $1::uuid`, first)
}

func TestConcurrentClaimsGetDifferentExecutions(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	const runs, workers = 24, 6
	for range runs {
		a.startFlow("external:sum", "")
	}
	var mu sync.Mutex
	var group sync.WaitGroup
	seen := map[string]int{}
	for i := range workers {
		group.Go(func() {
			known := []string{}
			for {
				locks, _ := json.Marshal(known)
				var got struct{ Locks []lockAnswer }
				w := a.raw("POST", "/v1/locks", fmt.Sprintf(`{"flows":["external:sum"],"owner":"worker %d","max":3,"lock_ids":%s}`,
					i, locks), asAdmin())
				if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != http.StatusOK {
					t.Errorf("%d %s, %v", w.Code, w.Body, err)
					return
				}
				if len(got.Locks) == 0 {
					return
				}
				mu.Lock()
				for _, lock := range got.Locks {
					seen[lock.Execution.ID]++
					known = append(known, lock.LockID)
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	for _, lock := range a.claimRuns("external:sum", "last", `,"max":100`) { // skipped while another claim had them locked
		seen[lock.Execution.ID]++
	}
	assert.Equal(t, runs, len(seen))
	for id, n := range seen {
		assert.Equal(t, 1, n, id)
	}
}

func TestClaimWaitsForFirstExecution(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	began := time.Now()
	pgtest.Equal(t, a.pool, 0, `select count(*)::int from agent_idle_workers`)
	defer pgtest.Equal(t, a.pool, "{external:sum}", `select flows::text from agent_idle_workers where owner = 'w'
		and expires_at > clock_timestamp() and since <= seen_at`)
	got := a.claimRuns("external:sum", "w", `,"wait_seconds":0.3`)
	if len(got) != 0 || time.Since(began) < 300*time.Millisecond {
		t.Errorf("without work: %+v after %s", got, time.Since(began))
	}
	claimed := make(chan []lockAnswer, 1)
	go func() { claimed <- a.claimRuns("external:sum", "w", `,"wait_seconds":30`) }()
	pgtest.Exec(t, a.pool, `select pg_sleep(0.3)`) // the claim may wait by now, or find the start at once
	id := a.startFlow("external:sum", "")
	select {
	case got := <-claimed:
		assert.Truef(t, len(got) == 1 && got[0].Execution.ID == id, "claimed %+v, not %s", got, id)
	case <-time.After(20 * time.Second):
		t.Fatal("the waiting claim got nothing")
	}
	// The next poll finds an execution that SQL started.
	go func() { claimed <- a.claimRuns("external:sum", "w2", `,"wait_seconds":30`) }()
	pgtest.Exec(t, a.pool, `select start_agent_execution('external:sum', '{}')`)
	got = <-claimed
	assert.Truef(t, len(got) == 1, "claimed %+v", got)
}

func TestClaimWaitsWhilePaused(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	a.startFlow("external:sum", "")
	a.request("POST", "/v1/pause", `{"reason":"maintenance"}`, 200, &map[string]any{})
	got := a.claimRuns("external:sum", "w", `,"wait_seconds":0.5`)
	assert.Truef(t, len(got) == 0, "a paused agent lent %+v", got)
	a.request("POST", "/v1/resume", `{"reason":"done"}`, 200, &map[string]any{})
	got = a.claimRuns("external:sum", "w", `,"wait_seconds":10`)
	assert.Truef(t, len(got) == 1, "after the pause: %+v", got)
}

func TestInvalidClaimProblems(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	for body, words := range map[string]string{
		`{"owner":"w"}`:                                                     "flows has 0 names",
		`{"flows":["heartbeat"],"owner":"w"}`:                               "name external flows",
		`{"flows":["external"]}`:                                            "owner is missing",
		`{"flows":["external"],"owner":"w\u0000"}`:                          "has control characters",
		`{"flows":["external"],"owner":"` + strings.Repeat("ü", 256) + `"}`: "longer than 255 characters",
		`{"flows":["external"],"owner":"w","max":0}`:                        "max is 0",
		`{"flows":["external"],"owner":"w","max":101}`:                      "max is 101",
		`{"flows":["external"],"owner":"w","wait_seconds":31}`:              "wait_seconds is 31",
		`{"flows":["external"],"owner":"w","wait_seconds":-1}`:              "wait_seconds is -1",
		`{"flows":["external"],"owner":"w","ttl_seconds":86401}`:            "ttl_seconds is 86401",
		`{"flows":["external"],"owner":"w","lock_ids":["a\u0000"]}`:         "lock_ids[0]",
		`{"flows":["external"],"owner":"w","until":1}`:                      "until",
	} {
		a.checkProblem(a.raw("POST", "/v1/locks", body, asAdmin()), http.StatusBadRequest, words)
	}
}
