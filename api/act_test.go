package api_test

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// change is the answer to enable and disable.
type change struct {
	Name             string
	Enabled, Changed bool
	Automations      []string
	TraceID          string `json:"trace_id"`
	ActivityID       string `json:"activity_id"`
}

func TestEnablingASkillRestoresWhatSelfHealPausedAndIsAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	exec(t, a.pool, `insert into agent_automations (name, cron, skill_name) values ('nightly', '0 3 * * *', 'fetch')`)
	for range 3 {
		a.note(activity.Entry{TraceID: string(trace.New(trace.Flow)), Kind: activity.KindCall, Skill: "fetch"}, activity.Error)
	}
	if report, err := selfheal.Run(t.Context(), a.pool, selfheal.Default()); err != nil || len(report.Healed) != 1 {
		t.Fatalf("self-heal: %+v, %v", report, err)
	}
	var got change
	header := a.post("/v1/skills/fetch/enable", `{"reason":"the service is back"}`, &got)
	want := change{Name: "fetch", Enabled: true, Changed: true, Automations: []string{"nightly"}, TraceID: got.TraceID, ActivityID: got.ActivityID}
	if diff := cmp.Diff(want, got); diff != "" || header.Get("X-Trace-Id") != got.TraceID {
		t.Errorf("%s, %v", diff, header)
	}
	if !value[bool](t, a.pool, `select enabled from agent_automations where name = 'nightly'`) {
		t.Error("the automation is still paused")
	}
	a.audited(got.TraceID, got.ActivityID, "enable_skill", "the service is back")
}

// audited expects one activity under an op_ trace that says who did what and why.
func (a *agent) audited(traceID, activityID, action, reason string) {
	a.t.Helper()
	var told activity.Trace
	a.get("/v1/traces/"+traceID, &told)
	if told.Surface != "operate" || len(told.Activities) != 1 {
		a.t.Fatalf("the audit is %+v", told)
	}
	row := told.Activities[0]
	if row.ID != activityID || row.SkillName != action || row.Agent != "admin" || row.Purpose != reason || row.Status != activity.Success {
		a.t.Errorf("the audit says %+v", row)
	}
}

func TestDisablingASkillIsAuditedAndDoneOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	var got change
	a.post("/v1/skills/fetch/disable", `{"reason":"too slow"}`, &got)
	if got.Enabled || !got.Changed {
		t.Errorf("answer is %+v", got)
	}
	a.audited(got.TraceID, got.ActivityID, "disable_skill", "too slow")
	row, err := skills.Get(t.Context(), a.pool, "fetch")
	if err != nil || row.Enabled || row.DisabledBy != "admin" || row.DisabledReason != "too slow" {
		t.Errorf("skill is %+v, %v", row, err)
	}
	if a.post("/v1/skills/fetch/disable", `{"reason":"again"}`, &got); got.Changed {
		t.Error("disabling it again changed something")
	}
}

func TestAChangeThatCannotBeAuditedIsNotMade(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	exec(t, a.pool, `alter table agent_activity add constraint full_disk check (skill_name <> 'disable_skill')`)
	a.refused(a.raw("POST", "/v1/skills/fetch/disable", `{"reason":"x"}`, asAdmin()), http.StatusInternalServerError, "log")
	if row, err := skills.Get(t.Context(), a.pool, "fetch"); err != nil || !row.Enabled {
		t.Errorf("skill is %+v, %v", row, err)
	}
}

// escape makes a lane one segment of a path, also when it is dots.
func escape(lane string) string { return strings.ReplaceAll(url.PathEscape(lane), ".", "%2E") }

// broken is the answer to break.
type broken struct {
	Lane, Holder string
	Broken       bool
	TraceID      string `json:"trace_id"`
	ActivityID   string `json:"activity_id"`
}

func TestALaneIsBrokenUnderItsHoldersTrace(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, lane := range []string{"heartbeat", "pipeline:prices", "file:/etc/a b/%2F?x#y", "..", "a//b", "überlauf"} {
		holder := trace.New(trace.Heartbeat)
		a.take(lane, string(holder)+"/7")
		var got broken
		header := a.post("/v1/lanes/"+escape(lane)+"/break", `{"reason":"stuck"}`, &got)
		want := broken{lane, string(holder) + "/7", true, string(holder), got.ActivityID}
		if diff := cmp.Diff(want, got); diff != "" || header.Get("X-Trace-Id") != string(holder) {
			t.Errorf("%s: %s, %v", lane, diff, header)
		}
		if value[bool](t, a.pool, `select is_agent_lock_held(@lane)`, postgres.Strict{"lane": lane}) {
			t.Errorf("%s is still held", lane)
		}
		a.refused(a.raw("POST", "/v1/lanes/"+escape(lane)+"/break", `{"reason":"stuck"}`, asAdmin()), 404, "nobody holds")
		var told activity.Trace
		a.get("/v1/traces/"+string(holder), &told)
		if len(told.Activities) != 1 || told.Activities[0].ID != got.ActivityID || told.Activities[0].SkillName != "break_lane" {
			t.Errorf("the audit is %+v", told.Activities)
		}
	}
}

func TestALaneInAProtectedWriteIsAConflictThatNamesTheHolder(t *testing.T) {
	t.Parallel()
	a := start(t)
	holder := trace.New(trace.Webhook)
	a.take("pipeline:prices", string(holder)+"/1")
	tx, err := a.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `select 1 from agent_locks where lane = 'pipeline:prices' for key share`); err != nil {
		t.Fatal(err)
	}
	p := a.refused(a.raw("POST", "/v1/lanes/pipeline:prices/break", `{"reason":"now"}`, asAdmin()), http.StatusConflict, "in use by pid ")
	if p.Holder != string(holder)+"/1" || p.TraceID != string(holder) {
		t.Errorf("problem is %+v", p)
	}
}

func TestLanesAndRunsAreListedWithTheirHolders(t *testing.T) {
	t.Parallel()
	a := start(t)
	holder := trace.New(trace.Operate)
	a.take("operate", string(holder)+"/1")
	x := a.begin("beat", trace.New(trace.Heartbeat))
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
	if len(got.Items) != 2 {
		t.Fatalf("lanes are %+v", got.Items)
	}
	lane, run := got.Items[0], got.Items[1]
	if lane.Lane != "operate" || lane.LockedBy != string(holder)+"/1" || lane.TraceID != string(holder) || *lane.ExpiresIn < 200 {
		t.Errorf("lane is %+v", lane)
	}
	if run.Lane != "execution:"+x.ID || run.TraceID != x.TraceID {
		t.Errorf("run is %+v", run)
	}
	if first := a.list("/v1/lanes", "lane", 1, nil); len(first) != 2 || first[1] != run.Lane {
		t.Errorf("by pages of one: %v", first)
	}
}
