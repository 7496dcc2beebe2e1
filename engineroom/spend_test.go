package engineroom

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestSpendByChatKeyAndModel(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	price := func(string) string { return "list price of 2026-07-24: $1 in, $2 out" }
	room := newRoom(t, Options{Pool: pool, PriceOf: price})
	server := serveRoom(t, room)
	pgtest.Exec(t, pool, `
		insert into agent_threads (id, channel, owner_kind, owner) values ('t', 'chat', 'visitor', 'shop <site>');
		insert into agent_activity (trace_id, surface, kind, skill_name, purpose, model, thread_id, status, duration_ms,
		  token_usage, led_to)
		select 'ch_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'chat', 'model', 'model_call', 'turn', 'm-1',
		       case n when 4 then null else 't' end, case n when 1 then 'error' else 'success' end, 1000 * n,
		       '{"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "cached_tokens": 25}',
		       '{"fetch": 2, "price": 1}'
		  from generate_series(1, 4) n`)
	check := func() {
		wantTexts(t, server.URL+"/spend?by=key", "shop &lt;site&gt;", "no price", "360", "1 (33 %)", "25 %")
		wantTexts(t, server.URL+"/spend?by=model", "m-1", "list price of 2026-07-24", "1 (25 %)", "480")
		wantTexts(t, server.URL+"/spend?by=agent", "agent", "480")
		body := wantTexts(t, server.URL+"/spend", `title="Counted at the skill that the answers called most">shared<`)
		for _, text := range []string{"$0.00", `#calls">0</a>`} {
			assert.Truef(t, !strings.Contains(body, text), "the page says %q", text)
		}
	}
	check() // of rows not counted yet
	countActivity(t, pool, -time.Minute)
	check()
	wantTexts(t, server.URL+"/spend?by=model", `data-label="p50">3`, `data-label="p95">3`)
}

// countActivity counts all rows older than lag. An open transaction, even of another database, delays that.
func countActivity(t *testing.T, pool *pgxpool.Pool, lag time.Duration) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		_, _, err := activity.CountPass(t.Context(), pool, 5000, lag)
		require.NoError(t, err)
		return pgtest.Value[bool](t, pool, `
			select not exists (select from agent_activity a where a.id >= c.counted_upto
			                     and a.id < lanekeeper.agent_uuid7_floor(now() - $1::interval))
			  from agent_activity_counted c`, lag)
	}, "the activity is counted")
}

// insertModelCall inserts a model call.
func insertModelCall(t *testing.T, pool *pgxpool.Pool, purpose, model, cost, ago string) {
	t.Helper()
	insert(t, pool, `
		insert into agent_activity (id, trace_id, kind, skill_name, purpose, model, surface, cost_usd, token_usage,
		  created_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'model', 'model_call', $1, $2, 'heartbeat',
		       $3::text::numeric, '{"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}', at, 1234
		  from (select clock_timestamp() - $4::text::interval as at) x returning id::text`, purpose, model, cost, ago)
}

func TestSpendByPurposeSurfaceAndModel(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/spend", "No model was called", "agent heartbeat")
	insertModelCall(t, pool, "advance_plan", "model-one", "0.75", "0")
	insertModelCall(t, pool, "reflect", "model-two", "0.25", "0")
	insertModelCall(t, pool, "reflect", "model-two", "9", "10 days")
	wantTexts(t, server.URL+"/spend?days=1", "$1.00 and 2,000 tokens today", "no skill", "100 %", "<svg", "Show as table")
	wantTexts(t, server.URL+"/spend?days=1&by=purpose", "advance_plan", "75 %")
	wantTexts(t, server.URL+"/spend?days=30&by=purpose", "$10.00 and 3,000 tokens in 30 days",
		"by=model&amp;days=30&amp;purpose=reflect#calls")
	wantTexts(t, server.URL+"/spend?by=model", "model-two", "25 %")
	wantTexts(t, server.URL+"/spend?by=surface&per=hour", "heartbeat", "100 %")
	pgtest.Exec(t, pool, `
		update agent_activity set token_usage = token_usage || '{"unknown_tokens": 400, "unknown_usd": 0.1}'
		 where model = 'model-one'`)
	wantTexts(t, server.URL+"/spend?days=1", "$0.10 and 400 tokens of it are unknown")
	body := wantTexts(t, server.URL+"/spend?days=30&by=model&purpose=reflect", "$9.25", "Newest model calls")
	assert.True(t, !strings.Contains(body, "model-one"), "the page shows a model without calls")
	wantTexts(t, server.URL+"/", "$1.00 · 2,000 tokens", "Most of it, 7 days", "Skill health")
}

// A model call that led to several skills counts as a call of one of them. The rest have a cost without a call.
func TestSpendOfDayShowsOthersWithoutCalls(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	pool, server := openRoom(t)
	insertModelCall(t, pool, "reflect", "m", "1.40", "0")
	pgtest.Exec(t, pool, `
		update agent_activity set led_to = (select jsonb_object_agg('skill_' || n, 1) from generate_series(10, 23) n)`)
	wantTexts(t, server.URL+"/spend/"+today().Format(time.DateOnly), "$1.40 and 1,000 tokens in 1 call", "skill_21",
		`>others</th><td class="number" data-label="Cost">$0.20</td>`)
}

func TestSpendRejectsInvalidFilters(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	for query, why := range map[string]string{
		"days=3": "days is", "by=lane": "by is", "per=week": "per is", "per=hour&days=30": "1 or 7 days",
		"surface=moon":       "surface is",
		"by=purpose&skill=a": "by skill or by purpose", "by=skill&purpose=a": "by skill or by purpose",
		"skill=" + strings.Repeat("x", maxFilterBytes+1): "skill is not text",
	} {
		wantError(t, server.URL+"/spend?"+query, 400, why)
	}
}

func TestBudgetLines(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	pool, _ := openRoom(t)
	pgtest.Exec(t, pool, `
		insert into agent_budgets (scope, tokens, cost_usd, reserved_tokens, reserved_usd, unknown_tokens)
		select 'day:' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') || s, 5000, 4, 1000, 1, 700
		  from unnest(array['', ':chat', ':agent:sales', ':agent:other']) s`)
	pgtest.Exec(t, pool, `
		insert into agent_agents (name, version, digest, definition, is_default)
		values ('sales', 1, 'x', '{"limits": {"day_usd": 10}}', true), ('other', 1, 'x', '{}', false)`)
	room := &Room{Options: Options{Read: replica.Primary(pool), Agents: &agents.Directory{}, Limits: budgets.Limits{
		Day: budgets.Limit{USD: 10}, Surface: map[trace.Surface]budgets.Limit{trace.Chat: {Tokens: 5000}},
	}}}
	got, err := room.budgetLines(t.Context(), nil)
	require.NoError(t, err)
	want := []budgetLine{
		{
			Spent: "$4.00", Reserved: "$1.00", Limit: "$10.00", Left: "$5.00", UsedShare: .4, ReservedShare: .1,
			Percent: "40 %",
		},
		{Spent: "5,000 tokens", Unknown: "700 tokens", Reserved: "1,000 tokens"},
		{
			Scope: "chat", Spent: "5,000 tokens", Unknown: "700 tokens", Reserved: "1,000 tokens", Limit: "5,000 tokens",
			Left: "0 tokens", UsedShare: 1, Over: true, Percent: "100 %",
		},
		{
			Scope: "agent sales", Spent: "$4.00", Reserved: "$1.00", Limit: "$10.00", Left: "$5.00", UsedShare: .4,
			ReservedShare: .1,
			Percent:       "40 %",
		},
	}
	assert.NoDiff(t, any(want), got)
	limited := newRoom(t, Options{Pool: pool, Limits: budgets.Limits{Day: budgets.Limit{Tokens: 5000}}})
	wantTexts(t, serveRoom(t, limited).URL+"/", "5,000 tokens</a> of 5,000 tokens, 700 tokens of it unknown")
}

func TestCostOfHeartbeat(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	pool, server := openRoom(t)
	insertModelCall(t, pool, "reflect", "m", "1.50", "0")
	for _, sql := range []string{
		`insert into agent_executions (trace_id, surface, flow) select 'hb_' || n, 'heartbeat', 'heartbeat'
			from generate_series(1, 4) n`,
		`update agent_executions set status = 'running'`,
		`update agent_executions set status = case trace_id when 'hb_3' then 'failed' else 'completed' end,
		        result_summary = case trace_id when 'hb_4' then 'skipped: an admin is at work' else '' end`,
	} {
		pgtest.Exec(t, pool, sql)
	}
	wantTexts(t, server.URL+"/", "$0.75 · 500 tokens", "2 successful ones")
}
