package api_test

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// askCount makes flow names unique.
var askCount atomic.Int64

func TestApprovalDecisionResumesExecution(t *testing.T) {
	t.Parallel()
	a := start(t)
	open := a.approval(`{"table":"x"}`, true)
	x, err := executions.Get(t.Context(), a.pool, *open.ExecutionID)
	require.Truef(t, err == nil && x.Status == executions.Waiting, "execution is %+v, %v", x, err)
	var seen approvals.Approval
	header := a.get("/v1/approvals/"+open.ID, &seen)
	assert.Truef(t, seen.Status == "pending" && string(seen.Arguments) == `{"table":"x"}` &&
		header.Get("X-Trace-Id") == open.TraceID, "approval is %+v", seen)
	var statuses [600]atomic.Int64
	var traceID atomic.Value
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			verb := map[bool]string{true: "approve", false: "reject"}[i%2 == 0]
			w := a.raw("POST", "/v1/approvals/"+open.ID, `{"decision":"`+verb+`","reason":"looked at it"}`, asAdmin())
			statuses[w.Code].Add(1)
			if w.Code == http.StatusOK {
				traceID.Store(w.Header().Get("X-Trace-Id"))
			}
		})
	}
	group.Wait()
	require.Truef(t, statuses[200].Load() == 1 && statuses[409].Load() == 19,
		"%d decided, %d were refused", statuses[200].Load(), statuses[409].Load())
	var audit activity.Trace
	a.get("/v1/traces/"+traceID.Load().(string), &audit)
	assert.Truef(t, audit.Surface == "operate" && len(audit.Activities) == 1 &&
		audit.Activities[0].SkillName == "decide_approval", "the audit is %+v", audit)
	x, err = executions.Get(t.Context(), a.pool, *open.ExecutionID)
	assert.Truef(t, err == nil && x.Status != executions.Waiting, "the waiting execution is %+v, %v", x, err)
	late := a.raw("POST", "/v1/approvals/"+open.ID, `{"decision":"approve"}`, asAdmin())
	p := a.checkProblem(late, 409, "decided already")
	assert.Truef(t, p.TraceID == open.TraceID && late.Header().Get("X-Trace-Id") == open.TraceID,
		"refused under trace %q, not %q", p.TraceID, open.TraceID)
}

func TestApprovalFiltersAndInvalidDecisions(t *testing.T) {
	t.Parallel()
	a := start(t)
	first, second := a.approval(`{"n":1}`, false), a.approval(`{"n":2}`, false)
	a.post("/v1/approvals/"+first.ID, `{"decision":"reject"}`, &struct{}{})
	for query, want := range map[string][]string{
		"?status=pending": {second.ID}, "?status=rejected": {first.ID}, "?status=consumed": nil,
		"?skill=drop": {second.ID, first.ID}, "?trace_id=" + first.TraceID: {first.ID},
	} {
		assert.Equal(t, "", cmp.Diff(want, a.list("/v1/approvals"+query, "id", 10, nil)), query)
	}
	pgtest.Exec(t, a.pool, `update agent_approvals set expires_at = clock_timestamp() where id = @id`,
		postgres.Strict{"id": second.ID})
	const unknown = "018f0000-0000-7000-8000-000000000000"
	for name, test := range map[string]struct {
		id, body string
		status   int
		words    string
	}{
		"expired":     {second.ID, `{"decision":"approve"}`, 409, "expired"},
		"unknown":     {unknown, `{"decision":"approve"}`, 404, "no such approval"},
		"malformed":   {"42", `{"decision":"approve"}`, 400, "uuid"},
		"no decision": {second.ID, `{}`, 400, "approve or reject"},
		"maybe":       {second.ID, `{"decision":"maybe"}`, 400, "maybe"},
		"field":       {second.ID, `{"decision":"approve","arguments":{}}`, 400, "arguments"},
		"reason":      {second.ID, `{"decision":"approve","reason":"\u0000"}`, 400, "reason"},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.checkProblem(a.raw("POST", "/v1/approvals/"+test.id, test.body, asAdmin()), test.status, test.words)
		})
	}
}
