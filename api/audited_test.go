package api_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
)

// unaudited lists the changing routes without an audit row, with the reason.
var unaudited = map[string]string{
	"POST /v1/events":                            "the event is kept, with who raised it; systems raise many",
	"POST /v1/executions/{id}/replay":            "changes nothing",
	"POST /v1/executions/{id}/lock":              "a worker's; the execution has rows",
	"PUT /v1/executions/{id}/lock/{lock_id}":     "a worker's",
	"DELETE /v1/executions/{id}/lock/{lock_id}":  "a worker's; the execution has rows",
	"PUT /v1/locks":                              "a worker's",
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
}

// Every route by which an admin changes something leaves a row, of the admin, with the reason and the object.
func TestEveryRouteThatChangesSomethingIsInTheAudit(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("fetch")
	exec(t, a.pool, `insert into agent_automations (name, cron, skill_name) values ('nightly', '0 3 * * *', 'fetch')`)
	exec(t, a.pool, `insert into agent_automations (name, cron, skill_name, enabled, disabled_by, proposed_by) values ('proposed', '0 3 * * *', 'fetch', false, 'proposal', 'x')`)
	exec(t, a.pool, `insert into agent_objectives (name, goal, status, proposed_by) values ('later', 'g', 'proposed', 'x')`)
	exec(t, a.pool, `insert into agent_objectives (name, goal) values ('tidy', 'g')`)
	exec(t, a.pool, `insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}')`)
	exec(t, a.pool, `insert into agent_webhook_endpoints (name, scheme, secrets, actions) values ('shop', 'standard', '{"${S}"}', '[]')`)
	begin := func() string {
		x, _, err := a.engine.Start(t.Context(), a.pool, executions.Spec{Flow: executions.External, Surface: trace.Flow, Agent: "x", OnLost: "fail"})
		if err != nil {
			t.Fatal(err)
		}
		return x.ID
	}
	x := begin()
	approval := value[string](t, a.pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select e.trace_id, e.id, s.name, s.revision, '{}', 'h', clock_timestamp() + interval '1 day'
		  from agent_executions e, agent_skills s where e.id = $1::uuid and s.name = 'fetch' returning id::text`, x)
	a.take("pipeline:x", string(trace.New(trace.Heartbeat))+"/7")
	const because = `{"reason":"why not"}`
	seen := map[string]bool{}
	for _, c := range [][]string{
		{"POST /v1/skills/{name}/disable", "fetch", because, "skill fetch"},
		{"POST /v1/skills/{name}/enable", "fetch", because, "skill fetch"},
		{"POST /v1/approvals/{id}", approval, `{"decision":"reject","reason":"why not"}`, "decision: reject, approval " + approval + ", skill fetch"},
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
		{"POST /v1/webhooks/endpoints/{id}/disable", "shop", because, "endpoint shop"},
		{"POST /v1/webhooks/endpoints/{id}/enable", "shop", because, "endpoint shop"},
		{"POST /v1/executions", "", `{"flow":"external:x","reason":"why not"}`, "flow external:x"},
		{"POST /v1/executions/{id}/fork", x, `{"reason":"why not"}`, "execution " + x},
		{"POST /v1/executions/{id}/cancel", x, because, "execution " + x + ", flow external"},
		{"POST /v1/executions/{id}/retry", x, "", "execution " + x},
		{"POST /v1/threads", "", `{"id":"maria"}`, "thread maria"},
		{"PUT /v1/retention", "", `{"keep":{"activity":"90d"},"reason":"why not"}`, "rows: "},
		{"POST /v1/pause", "", because, ""},
		{"POST /v1/resume", "", because, ""},
	} {
		seen[c[0]] = true
		method, path, _ := strings.Cut(c[0], " ")
		for _, name := range []string{"{id}", "{name}", "{lane}"} {
			path = strings.Replace(path, name, c[1], 1)
		}
		before := value[string](t, a.pool, `select coalesce(max(id::text), '') from agent_activity`)
		if w := a.raw(method, path, c[2], asAdmin()); w.Code >= http.StatusMultipleChoices {
			t.Errorf("%s: %d %s", c[0], w.Code, w.Body)
			continue
		}
		var page struct{ Items []activity.Audited }
		a.get("/v1/activity/audit", &page)
		found := false
		for _, r := range page.Items {
			found = found || r.ID > before && r.Actor == activity.Admin && r.OnBehalfOf == activity.Admin && strings.Contains(r.Object, c[3]) &&
				(r.Reason == "why not" || !strings.Contains(c[2], "why not"))
		}
		if !found {
			t.Errorf("%s: no row names the admin, the reason and %q: %+v", c[0], c[3], page.Items[:min(3, len(page.Items))])
		}
	}
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			if at := strings.ToUpper(method) + " " + path; method != "get" && method != "parameters" && !seen[at] && unaudited[at] == "" {
				t.Errorf("%s: does it change something? Then give it a row in the audit, and a line here", at)
			}
		}
	}
}
