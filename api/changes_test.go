package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// change is the response of enable and disable.
type change struct {
	Name             string
	Enabled, Changed bool
	Automations      []string
	TraceID          string `json:"trace_id"`
	ActivityID       string `json:"activity_id"`
}

func TestEnableSkillRestoresAutomations(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	pgtest.Exec(t, a.pool, `insert into agent_automations (name, cron, skill_name)
		values ('nightly', '0 3 * * *', 'fetch')`)
	for range 3 {
		a.recordActivity(activity.Entry{TraceID: string(trace.New(trace.Flow)), Kind: activity.KindCall, Skill: "fetch"},
			activity.Error)
	}
	report, err := selfheal.Run(t.Context(), a.pool, selfheal.Default())
	require.Truef(t, err == nil && len(report.Healed) == 1, "self-heal: %+v, %v", report, err)
	var got change
	header := a.post("/v1/skills/fetch/enable", `{"reason":"the service is back"}`, &got)
	want := change{
		Name: "fetch", Enabled: true, Changed: true, Automations: []string{"nightly"}, TraceID: got.TraceID,
		ActivityID: got.ActivityID,
	}
	diff := cmp.Diff(want, got)
	assert.Truef(t, diff == "" && header.Get("X-Trace-Id") == got.TraceID, "%s, %v", diff, header)
	assert.True(t, pgtest.Value[bool](t, a.pool, `select enabled from agent_automations where name = 'nightly'`),
		"the automation is still paused")
	a.checkAudit(got.TraceID, got.ActivityID, "enable_skill", "the service is back")
}

// checkAudit expects one activity under an op_ trace with actor, action and reason.
func (a *agent) checkAudit(traceID, activityID, action, reason string) {
	a.t.Helper()
	var audit activity.Trace
	a.get("/v1/traces/"+traceID, &audit)
	require.Truef(a.t, audit.Surface == "operate" && len(audit.Activities) == 1, "the audit is %+v", audit)
	row := audit.Activities[0]
	assert.Truef(a.t, row.ID == activityID && row.SkillName == action && row.Purpose == reason &&
		(row.Agent == "admin" || row.Agent == principals.Root) && row.Status == activity.Success, "the audit says %+v", row)
}

func TestDisableSkill(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	var got change
	a.post("/v1/skills/fetch/disable", `{"reason":"too slow"}`, &got)
	assert.Truef(t, !got.Enabled && got.Changed, "answer is %+v", got)
	a.checkAudit(got.TraceID, got.ActivityID, "disable_skill", "too slow")
	row, err := skills.Get(t.Context(), a.pool, "fetch")
	assert.Truef(t, err == nil && !row.Enabled && row.DisabledBy == principals.Root && row.DisabledReason == "too slow",
		"skill is %+v, %v", row, err)
	if a.post("/v1/skills/fetch/disable", `{"reason":"again"}`, &got); got.Changed {
		t.Error("disabling it again changed something")
	}
}

func TestChangeRequiresAudit(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	pgtest.Exec(t, a.pool, `alter table agent_activity add constraint full_disk check (skill_name <> 'disable_skill')`)
	a.checkProblem(a.raw("POST", "/v1/skills/fetch/disable", `{"reason":"x"}`, asAdmin()),
		http.StatusInternalServerError, "log")
	row, err := skills.Get(t.Context(), a.pool, "fetch")
	assert.Truef(t, err == nil && row.Enabled, "skill is %+v, %v", row, err)
}

// escape encodes a lane as one path segment, even if it consists of dots.
func escape(lane string) string { return strings.ReplaceAll(url.PathEscape(lane), ".", "%2E") }

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

// notAudited lists the changing routes without an audit row, with the reason.
var notAudited = map[string]string{
	"POST /v1/events":                            "the event is kept, with who raised it; systems raise many",
	"POST /v1/executions/{id}/replay":            "changes nothing",
	"POST /v1/executions/{id}/lock":              "a worker's; the execution has rows",
	"PUT /v1/executions/{id}/lock/{lock_id}":     "a worker's",
	"DELETE /v1/executions/{id}/lock/{lock_id}":  "a worker's; the execution has rows",
	"PUT /v1/locks":                              "a worker's",
	"POST /v1/locks":                             "a worker's",
	"POST /v1/executions/{id}/lock/{lock_id}":    "a worker's",
	"POST /v1/executions/{id}/checkpoints":       "a worker's; the execution has rows",
	"POST /v1/threads/{id}/messages":             "has a row; see the tests of what an admin says",
	"POST /v1/threads/{id}/join_tokens":          "has a row; see the tests of join tokens",
	"POST /v1/threads/{id}/participants":         "has a row; see the tests of join tokens",
	"DELETE /v1/threads/{id}/access/{access_id}": "has a row; see the tests of join tokens",
	"PUT /v1/memory/entries/{category}/{key}":    "has a row; see the tests of memory",
	"DELETE /v1/memory/entries/{category}/{key}": "has a row; see the tests of memory",
	"POST /v1/memory/conflicts/{id}/decide":      "has a row; see the tests of memory",
	"POST /v1/memory/{id}/forget":                "has a row; see the tests of memory",
	"POST /v1/documents":                         "has a row; see the tests of documents",
	"DELETE /v1/documents/{id}":                  "has a row; see the tests of documents",
	"POST /v1/objectives/{id}/reject":            "as accept",
	"POST /v1/webhooks/outbox/{id}/resend":       "has a row; see the tests of webhooks",
	"POST /v1/automations/runs/{id}/redrive":     "has a row; see the tests of automations",
	"POST /v1/evals/runs":                        "has a row; see the tests of package evals/runner",
}

// Every changing route writes an audit row with admin, reason and object.
func TestEveryChangeIsAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	pgtest.Exec(t, a.pool, `insert into agent_automations (name, cron, skill_name)
		values ('nightly', '0 3 * * *', 'fetch')`)
	pgtest.Exec(t, a.pool, `insert into agent_automations (name, cron, skill_name, enabled, disabled_by, proposed_by)
		values ('proposed', '0 3 * * *', 'fetch', false, 'proposal', 'x')`)
	pgtest.Exec(t, a.pool, `insert into agent_objectives (name, goal, status, proposed_by)
		values ('later', 'g', 'proposed', 'x')`)
	pgtest.Exec(t, a.pool, `insert into agent_objectives (name, goal) values ('tidy', 'g')`)
	pgtest.Exec(t, a.pool, `insert into agent_webhook_targets (name, url, secrets, events)
		values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}')`)
	pgtest.Exec(t, a.pool, `insert into agent_webhook_endpoints (name, scheme, secrets, actions)
		values ('shop', 'standard', '{"${S}"}', '[]')`)
	pgtest.Exec(t, a.pool, `insert into agent_channels (name, type) values ('support', 'telegram')`)
	pgtest.Exec(t, a.pool, `insert into agent_channel_identities (channel, subject, conversation, status, code_sha256,
		expires_at) values ('support', '7', '7', 'pending', encode(sha256('ABCD2345'), 'hex'),
		  clock_timestamp() + interval '1 hour')`)
	trial := evalTrial(t, a.pool)
	begin := func() string {
		x, _, err := a.engine.Start(t.Context(), a.pool, executions.Spec{
			Flow: executions.External, Surface: trace.Flow,
			Agent: "x", OnLost: "fail",
		})
		require.NoError(t, err)
		return x.ID
	}
	x := begin()
	approval := pgtest.Value[string](t, a.pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		  expires_at)
		select e.trace_id, e.id, s.name, s.revision, '{}', 'h', clock_timestamp() + interval '1 day'
		  from agent_executions e, agent_skills s where e.id = $1::uuid and s.name = 'fetch' returning id::text`, x)
	a.holdLane("pipeline:x", string(trace.New(trace.Heartbeat))+"/7")
	const because = `{"reason":"why not"}`
	pgtest.Exec(t, a.pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour');
		insert into agent_skills (name, description, tool_definition, handler, enabled, disabled_by, disabled_at)
		select 'broken', description, tool_definition, handler, false, 'self_heal', now()
		  from agent_skills
		 where name = 'fetch'`)
	var verdict struct{ Mark string }
	a.get("/v1/monitor/verdict", &verdict)
	seen := map[string]bool{}
	for _, c := range [][]string{
		{
			"POST /v1/monitor/acknowledge", "", `{"reason":"why not","mark":"` + verdict.Mark + `"}`,
			"changed: skill broken disabled by self-heal",
		},
		{"POST /v1/skills/{name}/disable", "fetch", because, "skill fetch"},
		{"POST /v1/skills/{name}/enable", "fetch", because, "skill fetch"},
		{"POST /v1/approvals/{id}", approval, `{"decision":"reject","reason":"why not"}`, "decision: reject, approval " +
			approval + ", skill fetch"},
		{"POST /v1/automations/{id}/disable", "nightly", because, "automation nightly"},
		{"POST /v1/automations/{id}/enable", "nightly", because, "automation nightly"},
		{"POST /v1/automations/{id}/accept", "proposed", because, "automation proposed"},
		{"POST /v1/automations/{id}/run", "nightly", because, "automation nightly"},
		{"POST /v1/objectives/{id}/accept", "later", because, "objective later"},
		{"POST /v1/objectives/{id}/pause", "tidy", because, "objective tidy"},
		{"POST /v1/objectives/{id}/resume", "tidy", because, "objective tidy"},
		{"POST /v1/lanes/{lane}/break", "pipeline:x", because, "lane pipeline:x"},
		{"POST /v1/webhooks/targets/{id}/disable", "ops", because, "target ops"},
		{"POST /v1/webhooks/targets/{id}/enable", "ops", because, "target ops"},
		{"POST /v1/channels/pair", "", `{"code":"abcd2345","reason":"why not"}`, "channel support"},
		{"POST /v1/channels/{id}/unpair", "support", `{"sender":"7","reason":"why not"}`, "channel support"},
		{"POST /v1/channels/{id}/disable", "support", because, "channel support"},
		{"POST /v1/channels/{id}/enable", "support", because, "channel support"},
		{"POST /v1/webhooks/endpoints/{id}/disable", "shop", because, "endpoint shop"},
		{"POST /v1/webhooks/endpoints/{id}/enable", "shop", because, "endpoint shop"},
		{"POST /v1/executions", "", `{"flow":"external:x","reason":"why not"}`, "flow external:x"},
		{"POST /v1/executions/{id}/fork", x, `{"reason":"why not"}`, "execution " + x},
		{"POST /v1/executions/{id}/cancel", x, because, "execution " + x + ", flow external"},
		{"POST /v1/executions/{id}/retry", x, "", "execution " + x},
		{"POST /v1/executions/bulk", "", `{"action":"retry","ids":["` + x + `"],"reason":"why not"}`, "execution " + x},
		{"POST /v1/threads", "", `{"id":"maria"}`, "thread maria"},
		{"PATCH /v1/threads/{id}", "maria", `{"title":"Maria"}`, "thread maria"},
		{"PUT /v1/retention", "", `{"keep":{"activity":"90d"},"reason":"why not"}`, "rows: "},
		{"POST /v1/principals", "", `{"name":"anna","role":"viewer","reason":"why not"}`, "principal anna"},
		{"PATCH /v1/principals/{id}", "anna", `{"role":"approver","reason":"why not"}`, "principal anna"},
		{
			"POST /v1/principals/{id}/identities", "anna", `{"issuer":"slack:T","subject":"U1","reason":"why not"}`,
			"principal anna, identity U1",
		},
		{
			"DELETE /v1/principals/{id}/identities", "anna", `{"issuer":"slack:T","subject":"U1","reason":"why not"}`,
			"principal anna, identity U1",
		},
		{"POST /v1/principals/{id}/login_links", "anna", because, "principal anna"},
		{"POST /v1/tokens", "", `{"principal":"anna","scopes":["*"],"reason":"why not"}`, "principal anna, token "},
		{"POST /v1/tokens/{id}/revoke", a.tokenOf("bert"), because, "principal bert, token "},
		{"POST /v1/sessions/{id}/revoke", a.sessionOf("bert"), because, "principal bert, session "},
		{
			"POST /v1/evals/labels", "", `{"run":"` + trial + `","case":"late","label":"bad","note":"why not"}`,
			"run " + trial + ", eval returns, case late",
		},
		{"POST /v1/pause", "", because, ""},
		{"POST /v1/resume", "", because, ""},
	} {
		seen[c[0]] = true
		method, path, _ := strings.Cut(c[0], " ")
		for _, name := range []string{"{id}", "{name}", "{lane}"} {
			path = strings.Replace(path, name, c[1], 1)
		}
		before := pgtest.Value[string](t, a.pool, `select coalesce(max(id::text), '') from agent_activity`)
		if w := a.raw(method, path, c[2], asAdmin()); w.Code >= http.StatusMultipleChoices {
			t.Errorf("%s: %d %s", c[0], w.Code, w.Body)
			continue
		}
		var page struct{ Items []activity.AuditEntry }
		a.get("/v1/activity/audit", &page)
		found := false
		for _, r := range page.Items {
			found = found || r.ID > before && r.Actor == principals.Root && r.OnBehalfOf == activity.Admin &&
				strings.Contains(r.Object, c[3]) &&
				(r.Reason == "why not" || !strings.Contains(c[2], "why not"))
		}
		if !found {
			t.Errorf("%s: no row names the admin, the reason and %q: %+v", c[0], c[3], page.Items[:min(3, len(page.Items))])
		}
	}
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			at := strings.ToUpper(method) + " " + path
			assert.Truef(t, method == "get" || method == "parameters" || seen[at] || notAudited[at] != "",
				"%s: does it change something? Then give it a row in the audit, and a line here", at)
		}
	}
}

// tokenOf adds a principal with a token, and returns the id of the token.
func (a *agent) tokenOf(name string) string {
	a.t.Helper()
	_, err := principals.Create(a.t.Context(), a.pool,
		principals.CreateParams{Name: name, Kind: principals.User, Role: principals.Viewer})
	require.NoError(a.t, err)
	made, _, err := principals.CreateToken(a.t.Context(), a.pool,
		principals.TokenParams{Principal: name, Scopes: []string{"*"}})
	require.NoError(a.t, err)
	return made.ID
}

// sessionOf logs a principal in, and returns the id of the session.
func (a *agent) sessionOf(name string) string {
	a.t.Helper()
	_, err := principals.LogIn(a.t.Context(), a.pool,
		principals.SessionParams{Principal: name, Method: principals.WithLink})
	require.NoError(a.t, err)
	return pgtest.Value[string](a.t, a.pool, `select id::text from agent_sessions`)
}

// objective declares an objective.
func (a *agent) objective(name string) string {
	a.t.Helper()
	d := objectives.Definition{Name: name, Goal: "be done", Steps: []string{"one", "two"}}
	_, err := objectives.Put(a.t.Context(), a.pool, d, objectives.SourceAdmin)
	require.NoError(a.t, err)
	return name
}

// automation declares an automation.
func (a *agent) automation(name string) string {
	a.t.Helper()
	d := automations.Definition{Name: name, Cron: "0 3 * * *", Prompt: "look around"}
	_, err := automations.Put(a.t.Context(), a.pool, d)
	require.NoError(a.t, err)
	return name
}

// approval makes a call of the skill drop that needs approval. With park, the execution waits for it.
func (a *agent) approval(args string, park bool) (got approvals.Approval) {
	a.t.Helper()
	d := skills.Definition{Name: "drop", Description: "drops a table", Handler: "builtin:drop", Trust: skills.TrustApprove}
	_, err := skills.Put(a.t.Context(), a.pool, d, skills.SourceWorkspace)
	require.NoError(a.t, err)
	skill, err := skills.Get(a.t.Context(), a.pool, "drop")
	require.NoError(a.t, err)
	flow := fmt.Sprintf("ask_%d", askCount.Add(1))
	err = a.engine.Register(flow, func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		var err error
		got, err = approvals.Ask(ctx, approvals.Request{
			Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: json.RawMessage(args), Park: park,
		})
		if err == nil && park {
			_, err = executions.Wait(ctx, "approval", executions.Approval(got.ID, time.Hour))
		}
		return executions.Result{}, err
	})
	require.NoError(a.t, err)
	_, err = a.engine.RunSync(context.WithoutCancel(a.t.Context()), executions.Spec{Flow: flow, Surface: trace.Flow})
	require.NoError(a.t, err)
	return got
}

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
	pgtest.Equal(t, a.pool, "ana user received yes", `select string_agg(concat_ws(' ', thread_id, role, status, content),
		'; ') from agent_messages`)
	pgtest.Equal(t, a.pool, "yes 12345678901234567890", `select concat_ws(' ', data ->> 'content', data ->> 'n')
		from agent_events where external_id = 'm1'`)
	pgtest.Equal(t, a.pool, 3, `select count(*) from agent_events where event = 'MESSAGE_RECEIVED'`)
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

func TestProposedObjectiveDecision(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, name := range []string{"grow", "shrink"} {
		d := objectives.Definition{Name: name, Goal: "be another size"}
		_, err := objectives.Propose(t.Context(), a.pool, d, "agent", string(trace.New(trace.Heartbeat)))
		require.NoError(t, err)
	}
	for path, status := range map[string]string{"grow/accept": "active", "shrink/reject": "rejected"} {
		name, action, _ := strings.Cut(path, "/")
		var got change
		a.post("/v1/objectives/"+path, `{"reason":"as agreed"}`, &got)
		assert.Truef(t, got.Name == name && got.Changed, "answer is %+v", got)
		a.checkAudit(got.TraceID, got.ActivityID, action+"_objective", "as agreed")
		var o struct {
			Status  string
			Decided string `json:"decided_by"`
			Steps   []any
		}
		a.get("/v1/objectives/"+name, &o)
		assert.Truef(t, o.Status == status && o.Decided == principals.Root && o.Steps != nil, "objective is %+v", o)
	}
	a.checkProblem(a.raw("POST", "/v1/objectives/grow/reject", `{"reason":"x"}`, asAdmin()), 409,
		"is not an open proposal")
	a.checkProblem(a.raw("POST", "/v1/objectives/none/accept", `{"reason":"x"}`, asAdmin()), 404, "not found")
	a.checkProblem(a.raw("GET", "/v1/objectives/none", "", asAdmin()), 404, "not found")
	pgtest.Equal(t, a.pool, 2, `select count(*) from agent_activity where skill_name like '%_objective'`)
	assert.NoDiff(t, []string{"grow"}, a.list("/v1/objectives?status=active", "name", 10, nil))
}

// A model chooses a proposal's name. Any name can be rejected.
func TestRejectProposalOfAnyName(t *testing.T) {
	t.Parallel()
	a := start(t)
	const name = "\u202egnp.exe\u200b\u0085\x1b[31m"
	traceID := string(trace.New(trace.Heartbeat))
	_, err := objectives.Propose(t.Context(), a.pool, objectives.Definition{Name: name, Goal: "hide"}, "agent", traceID)
	require.NoError(t, err)
	d := automations.Definition{Name: name, Cron: "0 * * * *", Prompt: "look"}
	_, err = automations.Propose(t.Context(), a.pool, d, "agent", traceID)
	require.NoError(t, err)
	var got change
	a.post("/v1/objectives/"+escape(name)+"/reject", `{"reason":"no"}`, &got)
	a.checkAudit(got.TraceID, got.ActivityID, "reject_objective", "no")
	a.post("/v1/automations/"+escape(name)+"/disable", `{"reason":"no"}`, &got)
	a.checkAudit(got.TraceID, got.ActivityID, "disable_automation", "no")
	for _, missing := range []string{"a%00b", "a%FFb"} {
		a.checkProblem(a.raw("POST", "/v1/automations/"+missing+"/disable", `{"reason":"no"}`, asAdmin()), 404, "not found")
	}
}

func TestAutomations(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.automation("nightly")
	proposal := automations.Definition{Name: "hourly", Cron: "0 * * * *", Prompt: "look"}
	_, err := automations.Propose(t.Context(), a.pool, proposal, "agent", string(trace.New(trace.Heartbeat)))
	require.NoError(t, err)
	var got change
	for _, action := range []string{"disable", "enable"} {
		a.post("/v1/automations/nightly/"+action, `{"reason":"as agreed"}`, &got)
		a.checkAudit(got.TraceID, got.ActivityID, action+"_automation", "as agreed")
		var row struct{ Enabled bool }
		a.get("/v1/automations/nightly", &row)
		assert.Truef(t, row.Enabled == (action == "enable") && got.Changed, "after %s: %+v, %+v", action, row, got)
	}
	a.checkProblem(a.raw("POST", "/v1/automations/hourly/enable", `{"reason":"x"}`, asAdmin()), 409, "accept it first")
	a.checkProblem(a.raw("POST", "/v1/automations/hourly/run", `{"reason":"x"}`, asAdmin()), 409, "accept it first")
	a.post("/v1/automations/hourly/accept", `{"reason":"useful"}`, &got)
	a.checkProblem(a.raw("POST", "/v1/automations/hourly/accept", `{"reason":"x"}`, asAdmin()), 409,
		"is not an open proposal")
	a.checkProblem(a.raw("POST", "/v1/automations/none/run", `{"reason":"x"}`, asAdmin()), 404, "not found")
	var run automations.Run
	header := a.checkResponse(a.raw("POST", "/v1/automations/nightly/run", `{"reason":"now"}`, asAdmin()),
		"POST", "/v1/automations/nightly/run", http.StatusAccepted, &run)
	assert.Truef(t, run.Status == automations.DueNow && header.Get("X-Trace-Id") == run.TraceID, "run is %+v", run)
	var detail struct{ Runs []automations.Run }
	a.get("/v1/automations/nightly", &detail)
	assert.Truef(t, len(detail.Runs) == 1 && detail.Runs[0].ID == run.ID, "runs are %+v", detail.Runs)
	assert.NoDiff(t, []string{"hourly", "nightly"}, a.list("/v1/automations?enabled=true", "name", 10, nil))
}

func (a *agent) storeMemory(key, category string) string {
	a.t.Helper()
	note := memory.Note{
		Category: category, Key: key, Value: "what is known of " + key,
		TraceID: string(trace.New(trace.Heartbeat)),
	}
	_, err := memory.Save(a.t.Context(), a.pool, note)
	require.NoError(a.t, err)
	return key
}

func TestMemoryFiltersAndSearch(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.storeMemory("coffee", "habits")
	a.storeMemory("office", "places")
	for query, want := range map[string][]string{
		"": {"office", "coffee"}, "?q=coffee": {"coffee"}, "?category=places": {"office"},
		"?prefix=cof": {"coffee"}, "?q=nothing": nil,
	} {
		assert.Equal(t, "", cmp.Diff(want, a.list("/v1/memory"+query, "key", 10, nil)), query)
	}
	// A value from the command line has a trace without executions.
	op := trace.New(trace.Operate)
	_, err := memory.Save(t.Context(), a.pool, memory.Note{Key: "tea", Value: 1, TraceID: string(op)})
	require.NoError(t, err)
	for _, form := range []string{string(op), op.OTel(), strings.ToUpper(op.OTel()), op.Suffix()} {
		assert.Equal(t, "", cmp.Diff([]string{"tea"}, a.list("/v1/memory?trace_id="+form, "key", 10, nil)), form)
	}
	a.checkProblem(a.raw("GET", "/v1/memory?q=coffee&category=habits", "", asAdmin()), 400, "cannot be combined")
}

func TestThreadPages(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, id := range []string{"first", "second/with a slash"} {
		_, _, err := threads.Ensure(t.Context(), a.pool, threads.Thread{ID: id, Channel: "chat", Owner: "website"})
		require.NoError(t, err)
	}
	for i := range 7 {
		d := threads.NewMessage{
			ThreadID: "first", Role: threads.User, Content: fmt.Sprint(i), Channel: "chat",
			Status: threads.Received,
		}
		_, err := threads.Post(t.Context(), a.pool, d)
		require.NoError(t, err)
	}
	assert.NoDiff(t, []string{"first", "second/with a slash"}, a.list("/v1/threads?channel=chat", "id", 1, nil))
	var contents []string
	path := "/v1/threads/first?limit=3"
	for path != "" {
		var got struct {
			ID       string
			Messages []threads.Message
			Next     *string `json:"next_cursor"`
		}
		a.get(path, &got)
		for _, m := range got.Messages {
			contents = append(contents, m.Content)
		}
		path = ""
		if got.Next != nil {
			path = "/v1/threads/first?limit=3&cursor=" + *got.Next
		}
	}
	assert.NoDiff(t, []string{"6", "5", "4", "3", "2", "1", "0"}, contents)
	var other struct{ Messages []any }
	a.get("/v1/threads/second%2Fwith%20a%20slash", &other)
	assert.Truef(t, other.Messages != nil && len(other.Messages) == 0, "messages are %v", other.Messages)
	a.checkProblem(a.raw("GET", "/v1/threads/none", "", asAdmin()), 404, "no such thread")
	a.checkProblem(a.raw("GET", "/v1/threads/%00", "", asAdmin()), 400, "printable")
	a.checkProblem(a.raw("GET", "/v1/threads/first?cursor=x", "", asAdmin()), 400, "cursor")
	a.checkProblem(a.raw("GET", "/v1/threads?cursor=x", "", asAdmin()), 400, "cursor")
}
