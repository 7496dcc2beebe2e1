package api_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/skills"
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

// exemptRoutes lists the routes that TestEveryChangeIsAudited leaves out, with the reason.
var exemptRoutes = map[string]string{
	"POST /v1/events":                            "the event is kept, with who raised it; systems raise many",
	"POST /v1/executions/{id}/replay":            "changes nothing",
	"POST /v1/executions/{id}/lock":              "a worker calls it; the execution has rows",
	"PUT /v1/executions/{id}/lock/{lock_id}":     "a worker calls it",
	"DELETE /v1/executions/{id}/lock/{lock_id}":  "a worker calls it; the execution has rows",
	"PUT /v1/locks":                              "a worker calls it",
	"POST /v1/locks":                             "a worker calls it",
	"POST /v1/executions/{id}/lock/{lock_id}":    "a worker calls it",
	"POST /v1/executions/{id}/checkpoints":       "a worker calls it; the execution has rows",
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
	"POST /v1/objectives/{id}/reject":            "has a row, written like that of accept",
	"POST /v1/webhooks/outbox/{id}/resend":       "has a row; see the tests of webhooks",
	"POST /v1/automations/runs/{id}/redrive":     "has a row; see the tests of automations",
	"POST /v1/evals/runs":                        "has a row; see the tests of package evals/runner",
}

// Every changing route outside exemptRoutes writes an audit row with admin, reason and object.
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
	routes := map[string]bool{}
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			at := strings.ToUpper(method) + " " + path
			routes[at] = true
			assert.Truef(t, method == "get" || method == "parameters" || seen[at] || exemptRoutes[at] != "",
				"%s: does it change something? Then give it a row in the audit, and a line here", at)
		}
	}
	for at := range exemptRoutes {
		assert.Truef(t, routes[at], "exemptRoutes has %s, which is no route", at)
	}
}

func TestReasonOfPairingIsChecked(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `insert into agent_channels (name, type) values ('support', 'telegram')`)
	pgtest.Exec(t, a.pool, `insert into agent_channel_identities (channel, subject, conversation, status, code_sha256,
		expires_at) values ('support', '7', '7', 'pending', encode(sha256('ABCD2345'), 'hex'),
		  clock_timestamp() + interval '1 hour')`)
	for reason, words := range map[string]string{
		`a\u0000b`: "reason has control characters", strings.Repeat("x", 1001): "reason is longer than 1000 bytes",
	} {
		for path, body := range map[string]string{"pair": `{"code":"abcd2345"`, "support/unpair": `{"sender":"7"`} {
			got := a.raw("POST", "/v1/channels/"+path, body+`,"reason":"`+reason+`"}`, asAdmin())
			a.checkProblem(got, http.StatusBadRequest, words)
		}
	}
}

func TestChangesOfPrincipalsNameTheirTrace(t *testing.T) {
	t.Parallel()
	a := start(t)
	key := a.tokenOf("bert")
	session := a.sessionOf("bert")
	for path, body := range map[string]string{
		"POST /v1/tokens":                          `{"principal":"bert","scopes":["*"],"reason":"why not"}`,
		"POST /v1/principals":                      `{"name":"carl","role":"viewer","reason":"why not"}`,
		"PATCH /v1/principals/bert":                `{"role":"approver","reason":"why not"}`,
		"POST /v1/principals/bert/login_links":     `{"reason":"why not"}`,
		"POST /v1/principals/bert/identities":      `{"issuer":"slack:T","subject":"U1","reason":"why not"}`,
		"POST /v1/sessions/" + session + "/revoke": `{"reason":"why not"}`,
		"POST /v1/tokens/" + key + "/revoke":       `{"reason":"why not"}`,
	} {
		method, path, _ := strings.Cut(path, " ")
		w := a.raw(method, path, body, asAdmin())
		id := w.Header().Get("X-Trace-Id")
		pgtest.Equal(t, a.pool, 1, `select count(*) from agent_activity where trace_id = @id`, postgres.Strict{"id": id})
		var c change
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &c))
		if strings.Contains(w.Body.String(), `"activity_id"`) {
			assert.Equal(t, id, c.TraceID, path)
			pgtest.Equal(t, a.pool, c.ActivityID, `select id::text from agent_activity where trace_id = @id`,
				postgres.Strict{"id": id})
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
	id := pgtest.Value[string](t, a.pool, `select id::text from agent_automations where name = 'nightly'`)
	for _, nameOrID := range []string{"nightly", id} {
		for _, action := range []string{"disable", "enable"} {
			a.post("/v1/automations/"+nameOrID+"/"+action, `{"reason":"as agreed"}`, &got)
			a.checkAudit(got.TraceID, got.ActivityID, action+"_automation", "as agreed")
			assert.True(t, got.Changed, action, nameOrID, "changed nothing")
			var row struct{ Enabled bool }
			a.get("/v1/automations/nightly", &row)
			assert.Equal(t, action == "enable", row.Enabled, action, nameOrID)
		}
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
