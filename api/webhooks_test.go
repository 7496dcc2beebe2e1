package api_test

import (
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestTargetsAndEndpointsAreSwitchedAndThatIsAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	exec(t, a.pool, `insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}')`)
	exec(t, a.pool, `insert into agent_webhook_endpoints (name, scheme, secrets, actions) values ('shop', 'standard', '{"${S}"}', '[]')`)
	for path, table := range map[string]string{"targets/ops": "agent_webhook_targets", "endpoints/shop": "agent_webhook_endpoints"} {
		var got change
		a.post("/v1/webhooks/"+path+"/disable", `{"reason":"they move"}`, &got)
		if !got.Changed || value[string](t, a.pool, `select disabled_by || ': ' || disabled_reason from `+table) != "admin: they move" {
			t.Errorf("%s: %+v", path, got)
		}
		action := map[string]string{"targets/ops": "disable_webhook_target", "endpoints/shop": "disable_webhook"}[path]
		a.audited(got.TraceID, got.ActivityID, action, "they move")
		a.post("/v1/webhooks/"+path+"/enable", `{"reason":"they are back"}`, &got)
		if !got.Changed || !value[bool](t, a.pool, `select enabled from `+table) {
			t.Errorf("%s is not back: %+v", path, got)
		}
		a.refused(a.raw("POST", "/v1/webhooks/"+path+"x/enable", `{"reason":"x"}`, asAdmin()), http.StatusNotFound, "not found")
	}
	var list struct{ Items []webhooks.Target }
	if a.get("/v1/webhooks/targets", &list); len(list.Items) != 1 || list.Items[0].Name != "ops" {
		t.Errorf("targets are %+v", list)
	}
}

func TestADeadMessageIsResentAndThatIsAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := value[string](t, a.pool, `
		with t as (insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}') returning id)
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, attempts)
		select id, 'execution.failed', '{}', 'wh_1', 'dead', 10 from t returning id::text`)
	var got change
	a.post("/v1/webhooks/outbox/"+id+"/resend", `{"reason":"they are back"}`, &got)
	if !got.Changed || value[string](t, a.pool, `select status || attempts from agent_webhook_outbox`) != "pending10" {
		t.Errorf("answer is %+v", got)
	}
	a.audited(got.TraceID, got.ActivityID, "resend_webhook", "they are back")
	a.refused(a.raw("POST", "/v1/webhooks/outbox/"+id+"/resend", `{"reason":"x"}`, asAdmin()), http.StatusConflict, "was not given up")
	a.refused(a.raw("POST", "/v1/webhooks/outbox/x/resend", `{"reason":"x"}`, asAdmin()), http.StatusBadRequest, "is not the id of")
	a.refused(a.raw("POST", "/v1/webhooks/outbox/01890000-0000-7000-8000-000000000000/resend", `{"reason":"x"}`, asAdmin()), http.StatusNotFound, "not found")
}

func TestADeadRunIsTriedAgainAndThatIsAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := value[string](t, a.pool, `
		with a as (insert into agent_automations (name, cron, skill_name) values ('nightly', '@daily', 'fetch') returning id)
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status) select id, 'cron', now(), 'dead' from a returning id::text`)
	var run automations.Run
	header := a.expect(a.raw("POST", "/v1/automations/runs/"+id+"/redrive", `{"reason":"the site is back"}`, asAdmin()),
		"POST", "/v1/automations/runs/"+id+"/redrive", http.StatusAccepted, &run)
	if run.Status != automations.Error || run.RetryAt == nil {
		t.Errorf("run is %+v", run)
	}
	told := value[string](t, a.pool, `select skill_name || ' by ' || agent || ': ' || purpose from agent_activity where trace_id = @trace`,
		postgres.Strict{"trace": header.Get("X-Trace-Id")})
	if told != "redrive_automation by admin: the site is back" {
		t.Errorf("the audit says %q", told)
	}
	a.refused(a.raw("POST", "/v1/automations/runs/"+id+"/redrive", `{"reason":"x"}`, asAdmin()), http.StatusConflict, "is not dead but error")
	a.refused(a.raw("POST", "/v1/automations/runs/01890000-0000-7000-8000-000000000000/redrive", `{"reason":"x"}`, asAdmin()), http.StatusNotFound, "not found")
}
