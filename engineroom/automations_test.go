package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// scheduled is an automation with a schedule.
func scheduled(t *testing.T, pool *pgxpool.Pool, name string) string {
	t.Helper()
	return put(t, pool, `
		insert into agent_automations (name, cron, skill_name, next_run_at, source)
		values ($1, '0 3 * * *', 'fetch', '2030-01-01 03:00+00', 'workspace') returning id::text`, name)
}

// ran is a run of an automation.
func ran(t *testing.T, pool *pgxpool.Pool, automation, status string) string {
	t.Helper()
	return put(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, error_message)
		values ($1::uuid, 'manual', clock_timestamp(), $2::text, 'fl_00000000000000000000000001', case when $2 = 'dead' then 'no route to host' end)
		returning id::text`, automation, status)
}

func TestAutomationsTellWhenTheyRunAndHowTheyRan(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/automations", "There is no automation", "proposes nothing", "No run was given up")
	id := scheduled(t, pool, "nightly")
	ran(t, pool, id, "success")
	dead := ran(t, pool, id, "dead")
	put(t, pool, `update agent_automations set enabled = false, disabled_by = 'self_heal', disabled_reason = 'fetch fails', paused_for = 'fetch'
		where id = $1::uuid returning name`, scheduled(t, pool, "weekly"))
	body := shows(t, server.URL+"/automations", "2030-01-01 03:00", "2030-01-02 03:00", "2030-01-03 03:00", "no route to host",
		"by self_heal", "fetch fails", "paused", `action="/act/v1/automations/runs/`+dead+`/redrive"`)
	if strings.Contains(body, "2030-01-04") {
		t.Error("more than three times are told")
	}
	if body := shows(t, server.URL+"/automations?state=enabled", "nightly"); strings.Contains(body, "weekly") {
		t.Error("what is paused is listed as enabled")
	}
	turnsAway(t, server.URL+"/automations?state=asleep", 400, "it can be enabled, disabled")
	turnsAway(t, server.URL+"/automations?before=x", 400, "no place in this list")
}

func TestAnAutomationHasTheLeversOfItsState(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	scheduled(t, pool, "on/off")
	put(t, pool, `
		insert into agent_automations (name, trigger, event, prompt, enabled, disabled_by, proposed_by, source)
		values ('idea', 'event', 'hired', 'say hello', false, 'proposal', 'agent', 'agent') returning name`)
	levers := func(url string) string {
		var all []string
		for _, after := range strings.Split(shows(t, url), `action="/act/v1/automations/`)[1:] {
			path, _, _ := strings.Cut(after, `"`)
			all = append(all, path)
		}
		return strings.Join(all, " ")
	}
	if got := levers(server.URL + "/automations/on%2Foff"); got != "on%2Foff/run on%2Foff/disable" {
		t.Errorf("one in service has %q", got)
	}
	if got := levers(server.URL + "/automations/idea"); got != "idea/accept idea/disable" {
		t.Errorf("a proposal has %q", got)
	}
	if got := levers(server.URL + "/automations"); got != "idea/accept idea/disable" {
		t.Errorf("the list has %q", got)
	}
	put(t, pool, `update agent_automations set enabled = false, disabled_by = 'admin' where name = 'on/off' returning name`)
	if got := levers(server.URL + "/automations/on%2Foff"); got != "on%2Foff/run on%2Foff/enable" {
		t.Errorf("one out of service has %q", got)
	}
	turnsAway(t, server.URL+"/automations/nothing", 404, "there is no automation")
}

func TestRunsOfAnAutomationGoOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := scheduled(t, pool, "nightly")
	ran(t, pool, scheduled(t, pool, "other"), "success")
	for range mostRuns + 1 {
		ran(t, pool, id, "success")
	}
	first := shows(t, server.URL+"/automations/nightly", "Older runs")
	_, link, _ := strings.Cut(first, `<p class="pager"><a href="`)
	link, _, _ = strings.Cut(link, `"`)
	second := shows(t, server.URL+link, "Newest runs")
	if n, m := strings.Count(first, `<tr id="run-`), strings.Count(second, `<tr id="run-`); n != mostRuns || m != 1 {
		t.Errorf("the pages have %d and %d runs", n, m)
	}
}

func TestHostileAutomationsAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	bad := strings.ReplaceAll(hostile, "\u0007", "")
	put(t, pool, `
		with a as (
		  insert into agent_automations (name, description, trigger, event, prompt, arguments, enabled, disabled_by, disabled_reason, proposed_by)
		  values ('evil', $1, 'event', $1, $1 || repeat('x', 1000000), jsonb_build_object($1, repeat('y', 1000000)), false, 'proposal', $1, $1)
		  returning id)
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, error_message, output)
		select id, 'manual', now(), 'dead', '', $1 || repeat('z', 1000000), jsonb_build_object('said', $1 || repeat('z', 1000000)) from a
		returning id::text`, bad)
	harmless(t, server.URL+"/automations")
	harmless(t, server.URL+"/automations/evil")
}

func TestRunsAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	put(t, pool, `
		with a as (insert into agent_automations (name, cron, skill_name) select 'a' || n, '@daily', 'fetch' from generate_series(1, 60) n returning id),
		     r as (insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		           select a.id, 'manual', now(), (array['success', 'error', 'dead'])[1 + n % 3] from a, generate_series(1, 300) n)
		select 'ok'`)
	analyse(t, pool, "agent_automations", "agent_automation_runs")
	for _, path := range []string{
		"/automations", "/automations?state=enabled", "/automations/a7", "/automations/a7?before=01890000-0000-7000-8000-000000000000",
	} {
		bounded(t, pool, path, "agent_automation_runs")
	}
}
