package api_test

import (
	"bytes"
	"encoding/json"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func (a *agent) declare(all ...agents.Definition) {
	a.t.Helper()
	for _, d := range all {
		_, err := agents.Put(a.t.Context(), a.pool, d)
		require.NoError(a.t, err)
	}
}

func withAgents(t *testing.T) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	return newAgentWith(t, api.Options{
		Pool: pool, Engine: engine(t, pool),
		Agents: &agents.Directory{Settings: agents.Settings{
			Name: "support", Model: "gpt-6-luna",
			Limits: agents.Limits{Tokens: 60000},
		}},
	})
}

func TestListAgents(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	if got := a.list("/v1/agents", "name", 5, nil); !slices.Equal(got, []string{"support"}) {
		t.Errorf("without declared agents: %v", got)
	}
	a.declare(agents.Definition{Name: "sales", Default: true}, agents.Definition{Name: "billing"},
		agents.Definition{Name: "returns"}, agents.Definition{Name: "zebra"})
	want := []string{"sales", "billing", "returns", "zebra"}
	if got := a.list("/v1/agents", "name", 50, nil); !slices.Equal(got, want) {
		t.Errorf("one page: %v", got)
	}
	got := a.list("/v1/agents", "name", 2, func() {
		_, err := agents.Remove(t.Context(), a.pool, []string{"sales", "returns", "zebra"})
		require.NoError(t, err)
	})
	assert.Truef(t, slices.Equal(got, want), "pages between which the last agent was removed: %v", got)
	var page struct {
		Items []struct {
			Model string
			Today struct {
				Scope string
			}
			Limits agents.Limits
		}
	}
	a.get("/v1/agents?limit=1", &page)
	one := page.Items[0]
	assert.Truef(t, one.Model == "gpt-6-luna" && one.Limits.Tokens == 60000, "not the effective values: %+v", one)
}

func TestAgentValuesHaveSources(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	a.declare(agents.Definition{Name: "sales", Default: true, Timezone: "Europe/Madrid", Skills: []string{}})
	a.declare(agents.Definition{
		Name: "sales", Default: true, Timezone: "Europe/Madrid",
		Instructions: "You are {{Nora}}.",
	})
	var shown struct {
		Instructions string
		Version      int
		Versions     []int
		Values       []agents.Value
		Skills       json.RawMessage
	}
	a.get("/v1/agents/sales", &shown)
	assert.Truef(t, shown.Version == 2 && slices.Equal(shown.Versions, []int{2, 1}) &&
		shown.Instructions == "You are {{Nora}}." && string(shown.Skills) == "null", "shown %+v", shown)
	for _, want := range []agents.Value{
		{Name: "timezone", Value: "Europe/Madrid", From: "document"},
		{Name: "model", Value: "gpt-6-luna", From: "AGENT_MODEL"},
		{Name: "memory", Value: "shared", From: "default"},
		{Name: "limits.tokens", Value: "60000", From: "AGENT_MAX_TOKENS"},
	} {
		assert.Truef(t, slices.Contains(shown.Values, want), "no %+v in %+v", want, shown.Values)
	}
	a.get("/v1/agents/sales?version=1", &shown)
	assert.Equal(t, 1, shown.Version, shown)
	assert.Equal(t, "[]", string(shown.Skills), shown)
}

func TestUnknownAgentProblems(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	a.declare(agents.Definition{Name: "sales", Default: true}, agents.Definition{Name: "billing"})
	_, err := agents.Remove(t.Context(), a.pool, []string{"sales"})
	require.NoError(t, err)
	for path, words := range map[string]string{
		"/v1/agents/nobody-near":       `there is no agent "nobody-near"; see GET /v1/agents`,
		"/v1/agents/salse":             `there is no agent "salse", did you mean "sales"?; see GET /v1/agents`,
		"/v1/agents/billing":           "agent billing was removed; ?version=1 shows its last version",
		"/v1/agents/sales?version=9":   "agent sales has no version 9: the latest is 1; ?version=1 shows its last version",
		"/v1/agents/billing?version=9": "agent billing has no version 9: the latest is 1; ?version=1 shows its last version",
		"/v1/agents/%00":               "see GET /v1/agents",
		"/v1/agents/nobody?version=2":  `there is no agent "nobody"; see GET /v1/agents`,
	} {
		a.checkProblem(a.raw("GET", path, "", asAdmin()), http.StatusNotFound, words)
	}
	a.checkProblem(a.raw("GET", "/v1/agents/sales?version=0", "", asAdmin()), http.StatusBadRequest, "use a number from 1")
	a.checkProblem(a.raw("GET", "/v1/agents?cursor=x", "", asAdmin()), http.StatusBadRequest, "")
	var shown agents.Shown
	a.get("/v1/agents/billing?version=1", &shown)
}

func TestListingsFilterByAgent(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, agent := range []string{"sales", "billing", "sales"} {
		x, _, err := a.engine.Start(t.Context(), a.pool, executions.Spec{Flow: "beat", Surface: trace.Flow, Agent: agent})
		require.NoError(t, err)
		pgtest.Exec(t, a.pool, `insert into agent_threads (id, channel, agent) values (@id, 'chat', @agent)`,
			postgres.Strict{"id": x.ID, "agent": agent})
	}
	for path, field := range map[string]string{"/v1/executions": "id", "/v1/traces": "trace_id", "/v1/threads": "id"} {
		got := a.list(path+"?agent=sales", field, 1, nil)
		assert.Truef(t, len(got) == 2, "%s of sales: %v", path, got)
		var page struct{ Items []struct{ Agent string } }
		a.get(path+"?agent=billing", &page)
		assert.Truef(t, len(page.Items) == 1 && page.Items[0].Agent == "billing", "%s of billing: %+v", path, page.Items)
	}
}

func TestEnableAndDisableWebhooks(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `insert into agent_webhook_targets (name, url, secrets, events)
		values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}')`)
	pgtest.Exec(t, a.pool, `insert into agent_webhook_endpoints (name, scheme, secrets, actions)
		values ('shop', 'standard', '{"${S}"}', '[]')`)
	for path, table := range map[string]string{
		"targets/ops":    "agent_webhook_targets",
		"endpoints/shop": "agent_webhook_endpoints",
	} {
		var got change
		a.post("/v1/webhooks/"+path+"/disable", `{"reason":"they move"}`, &got)
		assert.Truef(t, got.Changed && pgtest.Value[string](t, a.pool, `select disabled_by || ': ' || disabled_reason from `+
			table) == "root: they move", "%s: %+v", path, got)
		action := map[string]string{"targets/ops": "disable_webhook_target", "endpoints/shop": "disable_webhook"}[path]
		a.checkAudit(got.TraceID, got.ActivityID, action, "they move")
		a.post("/v1/webhooks/"+path+"/enable", `{"reason":"they are back"}`, &got)
		assert.Truef(t, got.Changed && pgtest.Value[bool](t, a.pool, `select enabled from `+table),
			"%s is not back: %+v", path, got)
		a.checkProblem(a.raw("POST", "/v1/webhooks/"+path+"x/enable", `{"reason":"x"}`, asAdmin()),
			http.StatusNotFound, "not found")
	}
	var list struct{ Items []webhooks.Target }
	if a.get("/v1/webhooks/targets", &list); len(list.Items) != 1 || list.Items[0].Name != "ops" {
		t.Errorf("targets are %+v", list)
	}
}

func TestResendDeadMessage(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := pgtest.Value[string](t, a.pool, `
		with t as (insert into agent_webhook_targets (name, url, secrets, events)
		  values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}') returning id)
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, attempts)
		select id, 'execution.failed', '{}', 'wh_1', 'dead', 10 from t returning id::text`)
	var got change
	a.post("/v1/webhooks/outbox/"+id+"/resend", `{"reason":"they are back"}`, &got)
	assert.Truef(t, got.Changed && pgtest.Value[string](t, a.pool,
		`select status || attempts from agent_webhook_outbox`) == "pending10", "answer is %+v", got)
	a.checkAudit(got.TraceID, got.ActivityID, "resend_webhook", "they are back")
	a.checkProblem(a.raw("POST", "/v1/webhooks/outbox/"+id+"/resend", `{"reason":"x"}`, asAdmin()),
		http.StatusConflict, "is not dead")
	a.checkProblem(a.raw("POST", "/v1/webhooks/outbox/x/resend", `{"reason":"x"}`, asAdmin()), http.StatusBadRequest,
		"is not the id (uuid) of")
	a.checkProblem(a.raw("POST", "/v1/webhooks/outbox/01890000-0000-7000-8000-000000000000/resend", `{"reason":"x"}`,
		asAdmin()), http.StatusNotFound, "not found")
}

func TestRedriveDeadRun(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := pgtest.Value[string](t, a.pool, `
		with a as (insert into agent_automations (name, cron, skill_name) values ('nightly', '@daily', 'fetch') returning id)
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status) select id, 'cron', now(), 'dead'
		  from a returning id::text`)
	var run automations.Run
	upper := "/v1/automations/runs/" + strings.ToUpper(id) + "/redrive"
	header := a.checkResponse(a.raw("POST", upper, `{"reason":"the site is back"}`, asAdmin()),
		"POST", "/v1/automations/runs/"+id+"/redrive", http.StatusAccepted, &run)
	assert.Truef(t, run.Status == automations.Error && run.RetryAt != nil, "run is %+v", run)
	pgtest.Equal(t, a.pool, "redrive_automation by admin: the site is back",
		`select skill_name || ' by ' || agent || ': ' || purpose from agent_activity where trace_id = @trace`,
		postgres.Strict{"trace": header.Get("X-Trace-Id")})
	a.checkProblem(a.raw("POST", "/v1/automations/runs/"+id+"/redrive", `{"reason":"x"}`, asAdmin()), http.StatusConflict,
		"is not dead: status error")
	a.checkProblem(a.raw("POST", "/v1/automations/runs/01890000-0000-7000-8000-000000000000/redrive", `{"reason":"x"}`,
		asAdmin()), http.StatusNotFound, "not found")
}

// fileForm returns a multipart body with one file, and its content type.
func fileForm(t *testing.T, name, content string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, err := w.CreateFormFile("file", name)
	if err == nil {
		_, err = part.Write([]byte(content))
	}
	require.True(t, err == nil && w.Close() == nil, err)
	return b.String(), w.FormDataContentType()
}

func stored(t *testing.T, body []byte) (d documents.Document) {
	t.Helper()
	require.NoError(t, json.Unmarshal(body, &d), body)
	return d
}

func TestDocuments(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `insert into agent_threads (id, channel, owner_kind, owner)
		values ('maria', 'chat', 'admin', 'admin')`)
	body, kind := fileForm(t, "../../a \"b\".html", "<html><script>alert(1)</script>")
	w := a.raw("POST", "/v1/documents?thread_id=maria", body, withHeader("Content-Type", kind))
	require.Truef(t, w.Code == 201 && w.Header().Get("X-Trace-Id") != "", "%d %s", w.Code, w.Body)
	d := stored(t, w.Body.Bytes())
	assert.Truef(t, d.Name == `a "b".html` && d.ContentType == "text/html" && d.ThreadID != nil && *d.ThreadID == "maria",
		"%+v", d)
	raw := stored(t, a.raw("POST", "/v1/documents?name=x.bin", "\x00\x01",
		withHeader("Content-Type", "application/x-thing")).Body.Bytes())
	assert.Truef(t, raw.Name == "x.bin" && raw.Size == 2 && raw.ThreadID == nil, "%+v", raw)
	got := a.raw("GET", "/v1/documents/"+d.ID+"/content", "", asAdmin())
	h := got.Header()
	assert.Truef(t, got.Body.String() == "<html><script>alert(1)</script>" &&
		h.Get("X-Content-Type-Options") == "nosniff" && strings.HasPrefix(h.Get("Content-Disposition"), "attachment") &&
		h.Get("Content-Security-Policy") != "", "%v %s", h, got.Body)
	var list struct{ Items []documents.Document }
	a.get("/v1/documents?thread_id=maria", &list)
	assert.Truef(t, len(list.Items) == 1 && list.Items[0].ID == d.ID, "%+v", list)
	w = a.raw("DELETE", "/v1/documents/"+d.ID, `{"reason":"by mistake"}`, asAdmin())
	assert.Truef(t, w.Code == 200, "%d %s", w.Code, w.Body)
	a.checkProblem(a.raw("GET", "/v1/documents/"+d.ID, "", asAdmin()), 404, "no such document")
	a.checkProblem(a.raw("GET", "/v1/documents/"+d.ID+"/content", "", asAdmin()), 404, "no such document")
	a.checkProblem(a.raw("DELETE", "/v1/documents/"+d.ID, `{"reason":"again"}`, asAdmin()), 404, "no such document")
	pgtest.Equal(t, a.pool, "add_document"+d.ID+" add_document"+raw.ID+" delete_document"+d.ID, `
		select string_agg(skill_name || coalesce(input ->> 'document', ''), ' ' order by id) from agent_activity
		  where skill_name like '%\_document'`)
	pgtest.Equal(t, a.pool, 0, `select count(*) from agent_activity a where a::text like '%alert(1)%'`)
}

// Each attempt of a client has a boundary of its own.
func TestRepeatedUploadIsStoredOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	upload := func(content string) *httptest.ResponseRecorder {
		body, kind := fileForm(t, "a.txt", content)
		header := withHeader("Content-Type", kind)
		header.Set("Idempotency-Key", "k")
		return a.raw("POST", "/v1/documents", body, header)
	}
	first, again := upload("x"), upload("x")
	assert.Truef(t, first.Code == 201 && again.Body.String() == first.Body.String(),
		"%d %s, then %d %s", first.Code, first.Body, again.Code, again.Body)
	a.checkProblem(upload("y"), 422, "a different request")
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_documents`)
}

func TestInvalidUploads(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := newAgentWith(t, api.Options{Pool: pool, Engine: engine(t, pool), DocumentBytes: 2000})
	noFile, kind := fileForm(t, "a", "x")
	noFile = strings.Replace(noFile, `name="file"`, `name="other"`, 1)
	large, largeKind := fileForm(t, "a", strings.Repeat("x", 2001))
	for what, c := range map[string]struct {
		path, body, kind string
		status           int
		want             string
	}{
		"too large":       {"", strings.Repeat("x", 2001), "text/plain", 413, "limit is 2000 bytes"},
		"too large form":  {"", large, largeKind, 413, "limit is 2000 bytes"},
		"far too large":   {"", strings.Repeat("x", 100_000), "text/plain", 413, "bytes"},
		"empty":           {"", "", "text/plain", 400, "empty"},
		"no file":         {"", noFile, kind, 400, "no part named file"},
		"broken form":     {"", "x", kind, 400, "no file"},
		"unknown thread":  {"?thread_id=nobody", "x", "text/plain", 404, "thread"},
		"wrong parameter": {"?thread=nobody", "x", "text/plain", 400, "unknown parameter"},
	} {
		t.Run(what, func(t *testing.T) {
			a.checkProblem(a.raw("POST", "/v1/documents"+c.path, c.body, withHeader("Content-Type", c.kind)), c.status, c.want)
		})
	}
	assert.Equal(t, 401, a.raw("POST", "/v1/documents", "x", http.Header{}).Code)
	pgtest.Equal(t, a.pool, 0, `select count(*) from agent_documents`)
}

func TestSetRetention(t *testing.T) {
	t.Parallel()
	a := start(t)
	var list struct{ Items []retention.Policy }
	keep := func() map[string]string {
		a.get("/v1/retention", &list)
		all := map[string]string{}
		for _, p := range list.Items {
			all[p.Kind] = p.Keep
		}
		return all
	}
	got := keep()
	assert.Truef(t, len(got) == 14 && got["activity"] == "forever" && got["deliveries"] == "90 days", "at first: %v", got)
	var change retention.Change
	header := a.checkResponse(a.raw("PUT", "/v1/retention",
		`{"keep":{"activity":"90d","events":"36 hours"},"reason":"the disk is small"}`, asAdmin()),
		"PUT", "/v1/retention", 200, &change)
	assert.Truef(t, change.Changed && header.Get("X-Trace-Id") == change.TraceID, "%+v, %v", change, header)
	a.checkAudit(change.TraceID, change.ActivityID, "set_retention", "the disk is small")
	if got := keep(); got["activity"] != "90 days" || got["events"] != "36:00:00" || got["messages"] != "forever" {
		t.Errorf("then: %v", got)
	}
	for body, want := range map[string]string{
		`{"reason":"why"}`: "keep is missing", `{"keep":{"activity":"90d"}}`: "reason is missing",
		`{"keep":{"memory":"90d"},"reason":"why"}`: "'memory' is not a kind of retention policy",
		`{"keep":{"messages":"90d","events":"1s"},"reason":"why"}`: "events cannot be kept for 00:00:01: give 1 day to " +
			"100 years, or forever",
		`{"keep":{"messages":"a while"},"reason":"why"}`:            "'a while' is not a retention time for messages",
		`{"keep":{"activity":90},"reason":"why"}`:                   "keep",
		`{"keep":{"activity":"90d"},"reason":"why","forever":true}`: "forever",
	} {
		a.checkProblem(a.raw("PUT", "/v1/retention", body, asAdmin()), 400, want)
	}
	got = keep()
	assert.Truef(t, got["messages"] == "forever", "the refused change was stored in part: %v", got)
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

func TestEnableSkillKeepsQuarantine(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	pgtest.Exec(t, a.pool, `update agent_skills set source = 'mcp'`)
	_, err := skills.Disable(t.Context(), a.pool, "fetch", mcp.Actor, "it changed", nil)
	require.NoError(t, err)
	a.checkProblem(a.raw("POST", "/v1/skills/fetch/enable", `{"reason":"a mistake"}`, asAdmin()), http.StatusConflict,
		"not the accepted one: it changed")
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

func TestListSkillsWithHealth(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("idle")
	a.skill("busy")
	for _, status := range []activity.Status{activity.Success, activity.Success, activity.Error, activity.Error} {
		a.recordActivity(activity.Entry{TraceID: string(trace.New(trace.Flow)), Kind: activity.KindCall, Skill: "busy"},
			status)
	}
	var got struct {
		Items []struct {
			Name   string
			Health struct {
				Calls, Streak int
				Rate          *float64 `json:"success_rate"`
				P50           *float64 `json:"p50_ms"`
				P95           *float64 `json:"p95_ms"`
				State         string
			}
		}
	}
	a.get("/v1/skills", &got)
	busy, idle := got.Items[0], got.Items[1]
	assert.Truef(t, busy.Name == "busy" && busy.Health.Calls == 4 && busy.Health.Streak == 2 && *busy.Health.Rate == 0.5 &&
		busy.Health.P95 != nil, "busy is %+v", busy)
	assert.Truef(t, idle.Name == "idle" && idle.Health.Calls == 0 && idle.Health.Rate == nil &&
		idle.Health.State == "enabled", "idle is %+v", idle)
}
