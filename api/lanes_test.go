package api_test

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// brokenLane is the response of break.
type brokenLane struct {
	Lane, Holder string
	Broken       bool
	TraceID      string `json:"trace_id"`
	ActivityID   string `json:"activity_id"`
}

func TestBreakLane(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, lane := range []string{"heartbeat", "pipeline:prices", "file:/etc/a b/%2F?x#y", "..", "a//b", "überlauf"} {
		holder := trace.New(trace.Heartbeat)
		a.holdLane(lane, string(holder)+"/7")
		var got brokenLane
		header := a.post("/v1/lanes/"+escape(lane)+"/break", `{"reason":"stuck"}`, &got)
		want := brokenLane{lane, string(holder) + "/7", true, string(holder), got.ActivityID}
		diff := cmp.Diff(want, got)
		assert.Truef(t, diff == "" && header.Get("X-Trace-Id") == string(holder), "%s: %s, %v", lane, diff, header)
		assert.Truef(t, !pgtest.Value[bool](t, a.pool, `select is_agent_lock_held(@lane)`, postgres.Strict{"lane": lane}),
			"%s is still held", lane)
		a.checkProblem(a.raw("POST", "/v1/lanes/"+escape(lane)+"/break", `{"reason":"stuck"}`, asAdmin()), 404, "is not held")
		var audit activity.Trace
		a.get("/v1/traces/"+string(holder), &audit)
		assert.Truef(t, len(audit.Activities) == 1 && audit.Activities[0].ID == got.ActivityID &&
			audit.Activities[0].SkillName == "break_lane", "the audit is %+v", audit.Activities)
	}
}

func TestBreakLaneConflict(t *testing.T) {
	t.Parallel()
	a := start(t)
	holder := trace.New(trace.Webhook)
	a.holdLane("pipeline:prices", string(holder)+"/1")
	tx, err := a.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select 1 from agent_locks where lane = 'pipeline:prices' for key share`)
	p := a.checkProblem(a.raw("POST", "/v1/lanes/pipeline:prices/break", `{"reason":"now"}`, asAdmin()),
		http.StatusConflict, "in use by pid ")
	assert.Truef(t, p.Holder == string(holder)+"/1" && p.TraceID == string(holder), "problem is %+v", p)
}

func TestListLanesAndExecutions(t *testing.T) {
	t.Parallel()
	a := start(t)
	holder := trace.New(trace.Operate)
	a.holdLane("operate", string(holder)+"/1")
	x := a.start("beat", trace.New(trace.Heartbeat))
	a.claim(x)
	var got struct {
		Items []struct {
			Lane      string
			LockedBy  string   `json:"locked_by"`
			TraceID   string   `json:"trace_id"`
			ExpiresIn *float64 `json:"expires_in"`
		}
	}
	a.get("/v1/lanes", &got)
	require.Equal(t, 2, len(got.Items), got.Items)
	lane, run := got.Items[0], got.Items[1]
	assert.Truef(t, lane.Lane == "operate" && lane.LockedBy == string(holder)+"/1" && lane.TraceID == string(holder) &&
		*lane.ExpiresIn >= 200, "lane is %+v", lane)
	assert.Truef(t, run.Lane == "execution:"+x.ID && run.TraceID == x.TraceID, "run is %+v", run)
	first := a.list("/v1/lanes", "lane", 1, nil)
	assert.Truef(t, len(first) == 2 && first[1] == run.Lane, "by pages of one: %v", first)
}

// escape encodes a lane as one path segment, even if it consists of dots.
func escape(lane string) string { return strings.ReplaceAll(url.PathEscape(lane), ".", "%2E") }
