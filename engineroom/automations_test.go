package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// insertAutomation inserts an automation with a schedule.
func insertAutomation(t *testing.T, pool *pgxpool.Pool, name string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_automations (name, cron, skill_name, next_run_at, source)
		values ($1, '0 3 * * *', 'fetch', '2030-01-01 03:00+00', 'workspace') returning id::text`, name)
}

// insertAutomationRun inserts a run of an automation.
func insertAutomationRun(t *testing.T, pool *pgxpool.Pool, automation, status string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, error_message)
		values ($1::uuid, 'manual', clock_timestamp(), $2::text, 'fl_00000000000000000000000001', case
		  when $2 = 'dead' then 'no route to host' end)
		returning id::text`, automation, status)
}

func TestAutomationsShowScheduleAndRuns(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/automations", "No automation yet", "no open proposal", "No run has used up its attempts")
	id := insertAutomation(t, pool, "nightly")
	insertAutomationRun(t, pool, id, "success")
	dead := insertAutomationRun(t, pool, id, "dead")
	// The key crosses the cut at 2000, so the page must redact before it cuts.
	rows.Quiet(t, pool, `update agent_automation_runs set output = jsonb_build_object('password', 'hunter22', 'text',
		repeat('x', 1965) || ' AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBW4')`)
	insert(t, pool, `update agent_automations set enabled = false, disabled_by = 'self_heal', disabled_reason = 'fetch fails',
		paused_for = 'fetch'
		where id = $1::uuid returning name`, insertAutomation(t, pool, "weekly"))
	body := wantTexts(t, server.URL+"/automations", "2030-01-01 03:00", "2030-01-02 03:00",
		"2030-01-03 03:00", "no route to host",
		"paused by self_heal", "fetch fails", `action="/act/v1/automations/runs/`+dead+`/redrive"`)
	assert.True(t, !strings.Contains(body, "2030-01-04"), "the page shows more than three planned runs")
	assert.True(t, !strings.Contains(body, "hunter22"), "the list of all automations shows a secret")
	body = wantTexts(t, server.URL+"/automations/nightly", "[redacted]")
	assert.True(t, !strings.Contains(body, "hunter22") && !strings.Contains(body, "AIzaSyD"),
		"the page of the automation shows a secret, or a part of one")
	body = wantTexts(t, server.URL+"/automations?state=enabled", `id="automation-`+id+`"`)
	assert.True(t, !strings.Contains(body, "weekly"), "a paused automation is listed as enabled")
	wantError(t, server.URL+"/automations?state=asleep", 400, "it can be enabled, disabled")
	wantError(t, server.URL+"/automations?before=x", 400, "no place in this list")
}

func TestAutomationActionsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertAutomation(t, pool, "on/off")
	insert(t, pool, `
		insert into agent_automations (name, trigger, event, prompt, enabled, disabled_by, proposed_by, source)
		values ('idea', 'event', 'hired', 'say hello', false, 'proposal', 'agent', 'agent') returning name`)
	actions := func(url string) string {
		var all []string
		for _, after := range strings.Split(wantTexts(t, url), `action="/act/v1/automations/`)[1:] {
			path, _, _ := strings.Cut(after, `"`)
			all = append(all, path)
		}
		return strings.Join(all, " ")
	}
	assert.Equal(t, "on%2Foff/run on%2Foff/disable", actions(server.URL+"/automations/on%2Foff"))
	assert.Equal(t, "idea/accept idea/disable", actions(server.URL+"/automations/idea"))
	assert.Equal(t, "idea/accept idea/disable", actions(server.URL+"/automations"))
	insert(t, pool,
		`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'on/off' returning name`)
	assert.Equal(t, "on%2Foff/run on%2Foff/enable", actions(server.URL+"/automations/on%2Foff"))
	wantError(t, server.URL+"/automations/nothing", 404, "there is no automation")
}
