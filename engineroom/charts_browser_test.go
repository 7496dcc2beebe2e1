package engineroom

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// seedTwoDays inserts two days of runs, model calls and skill calls, and counts them.
func seedTwoDays(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, agent, flow, status, wait_number, created_at, started_at,
		  completed_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || lpad(n::text, 26, '0'), 'flow',
		  (array['sales', 'billing', 'research'])[1 + n % 3], 'flow_' || n % 4,
		       case when n % 11 = 0 then 'failed' when n % 17 = 0 then 'cancelled' else 'completed' end, (n % 6 = 0)::int, at,
		       at + n % 9 * interval '90 ms', at + interval '2 seconds' + n % 40 * interval '25 seconds'
		  from (select n, now() - interval '5 minutes' - n * interval '4 minutes' as at from generate_series(1, 700) n) x;
		insert into agent_checkpoints (execution_id, step, claim, waited_for, waited_since, created_at)
		select id, 'lane', 1, 'lane', created_at, created_at + interval '700 ms' from agent_executions where wait_number = 1;
		insert into agent_activity (id, trace_id, kind, agent, skill_name, purpose, surface, status, model, token_usage,
		  cost_usd, led_to, created_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'fl_' || lpad(n::text, 26, '0'), case when n % 2 = 0 then 'model' else 'call' end,
		       (array['sales', 'billing', 'research'])[1 + n % 3], case when n % 2 = 0 then 'model_call'
		         else 'skill_' || n % 7 end,
		       case when n % 2 = 0 then 'phase_' || n % 3 else '' end, 'flow', case when n % 13 = 0 then 'error'
		         else 'success' end,
		       case when n % 2 = 0 then 'model-' || n % 5 else '' end,
		       case when n % 2 = 0 then '{"prompt_tokens": 900, "cached_tokens": 300, "completion_tokens": 100, "total_tokens": 1000}' else '{}' end::jsonb,
		       case when n % 2 = 0 then 0.01 + n % 9 * 0.01 else 0 end, case when n % 4 = 0 then '{"skill_3": 1}'
		         else '{}' end::jsonb, at, 20 + n % 900
		  from (select n, now() - interval '5 minutes' - n * interval '4 minutes' as at from generate_series(1, 700) n) x`)
	countActivity(t, pool, time.Millisecond)
	for range 4 {
		_, _, err := executions.CountPass(t.Context(), pool, 5000, time.Millisecond)
		require.NoError(t, err)
	}
}

func TestChartsShowErrorsLatencyAndSpend(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/charts", "No end of an execution in this time is counted yet.", "No skill was called")
	seedTwoDays(t, pool)
	wantTexts(t, server.URL+"/charts?agent=sales&flow=flow_1",
		`href="/executions?agent=sales&amp;failed=1&amp;flow=flow_1&amp;since=`)
	wantTexts(t, server.URL+"/spend?days=90",
		`href="/executions?since=`+today().AddDate(0, 0, -89).Format(time.DateOnly)+`&amp;sort=cost"`)
	p := browser.Open(t, browser.Look{Width: 1280, Height: 900})
	p.Go(server.URL + "/charts?range=7d")
	for _, words := range []string{
		"700 runs", "failed (9 %)", "Duration of runs", "Queue delay", "Waiting time for lanes", "Spend by agent",
		"Spend by skill", "Spend by model", "33 % of 315,000 prompt tokens", "Skill calls and errors", "p99",
	} {
		p.Shows(words)
	}
	p.Until("no label of an axis is cut off", `[...document.querySelectorAll(".chart-axis text")]
		.every(t => t.textContent && t.getBBox().x >= 0)`)
	p.Until("no labels below a chart overlap", `[...document.querySelectorAll(".chart-plot")].every(plot => {
		const boxes = [...plot.querySelectorAll("text")].map(t => t.getBoundingClientRect()).filter(b => b.width)
		return boxes.every((b, i) => i === 0 || boxes[i - 1].right < b.left)
	})`)
	p.Until("the axis of a share ends at the whole", `[...document.querySelectorAll(".panel")].some(panel =>
		panel.textContent.includes("Cached prompt") && panel.querySelector(".chart-axis text:last-child").textContent === "100 %")`)
	p.Until("values are named where one points", `document.querySelector(".chart-area title").textContent.includes("p95")`)
	p.Click(".charts details > summary")
	p.Until("a table has the numbers", `document.querySelector(".charts details[open] table td").textContent !== ""`)
	wantNoBrowserErrors(t, p)
	p.Click(`nav[aria-label="Range"] a[href*="90d"]`)
	p.Until("the range is in the address",
		`location.search === "?range=90d" && document.querySelector("[aria-current=page][href*='90d']")`)
	wantNoBrowserErrors(t, p)
	wantTexts(t, server.URL+"/charts?range=30d&flow=flow_2", "175 runs", "Spend is not counted by flow.")
	wantTexts(t, server.URL+"/charts?range=30d&agent=sales", "Spend by model",
		"Skill calls are not counted by agent or flow.")
	wantError(t, server.URL+"/charts?range=1y", 400, "range is")
}

// What yesterday cost, and why, takes one click from the overview or the spend page, and one more to a trace.
func TestSpendOfDayIsTwoClicksAway(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedTwoDays(t, pool)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	p.Go(server.URL + "/spend")
	p.Click(`p.pager a:nth-of-type(2)`)
	for _, words := range []string{
		"Spend of ", "By agent", "By skill", "By model", "By purpose", "Most expensive traces",
		"research", "skill_3", "model-4", "phase_2",
	} {
		p.Shows(words)
	}
	wantNoBrowserErrors(t, p)
	p.Click("#traces tbody a")
	p.Until("it leads to the trace", `location.pathname.startsWith("/traces/fl_")`)
	p.Go(server.URL + "/")
	p.Until("the overview leads there",
		`[...document.querySelectorAll("a")].some(a => /^\/spend\/\d{4}-/.test(a.getAttribute("href")))`)
	p.As(browser.Look{Width: 320, Height: 700})
	for _, path := range []string{"/charts", "/spend/" + time.Now().UTC().Format(time.DateOnly)} {
		p.Go(server.URL + path)
		var width int64
		p.Eval(`document.documentElement.scrollWidth`, &width)
		assert.Truef(t, width <= 320, "%s is %d wide", path, width)
	}
	wantError(t, server.URL+"/spend/2999-01-01", 404, "no day")
	wantError(t, server.URL+"/spend/soon", 404, "no day")
	assert.True(t, strings.Contains(wantTexts(t, server.URL+"/spend?by=agent", "research"),
		"<option value=\"agent\" selected>"), "the choice is not shown")
}
