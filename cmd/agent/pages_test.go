package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// A page is as long as it was asked to be, up to the longest, and the next goes on where it ended.
func TestThePagesOfAListingHaveAllOfIt(t *testing.T) {
	t.Parallel()
	const all = `generate_series(1, 501) g`
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `
		insert into agent_executions (trace_id, surface, agent, flow, status)
		  select 'fl_' || lpad(g::text, 26, '0'), 'flow', 'agent', 'import', 'pending' from `+all+`;
		insert into agent_activity (trace_id, surface, agent, skill_name, status) select 'fl_1', 'flow', 'agent', 'import', 'success' from `+all+`;
		insert into agent_memory (key, value) select 'k' || g, '1' from `+all+`;
		insert into agent_objectives (name, goal) select 'o' || g, 'goal' from `+all+`;
		insert into agent_skills (name, handler, tool_definition) values ('sizes', 'builtin:table_sizes', '{}');
		insert into agent_automations (name, skill_name, trigger, event) select 'a' || g, 'sizes', 'event', 'order.paid' from `+all+`;
		insert into agent_automation_runs (automation_id, scheduled_for, status)
		  select id, clock_timestamp(), 'dead' from agent_automations;
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256)
		  select 'orders', 'd' || g, 'wh_1', 'wh_1', '', '' from `+all+`;
		insert into agent_requests (kind, execution_id, trace_id, items)
		  select 'document', e.id, e.trace_id, '{cv}' from agent_executions e`)
	if err != nil {
		t.Fatal(err)
	}
	p := on(t, url)
	for _, listing := range []string{
		"executions ls", "activity ls", "activity audit", "trace ls", "memory ls", "objectives ls", "automations ls", "automations runs", "automations dead",
		"webhooks ls", "requests ls",
	} {
		args := append(strings.Fields(listing), "--limit", "500")
		for _, want := range []int{500, 1} {
			var page struct {
				Items      []map[string]any `json:"items"`
				NextCursor *string          `json:"next_cursor"`
			}
			p.mustJSON(&page, args...)
			if len(page.Items) != want || (page.NextCursor != nil) != (want == 500) {
				t.Errorf("agent %s: %d rows, want %d; next %v", strings.Join(args, " "), len(page.Items), want, page.NextCursor)
				break
			}
			if page.NextCursor != nil {
				args = append(args, "--cursor", *page.NextCursor)
			}
		}
	}
}
