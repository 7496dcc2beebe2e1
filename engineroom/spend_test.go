package engineroom

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/trace"
)

// spend writes a model call.
func spend(t *testing.T, pool *pgxpool.Pool, purpose, model, cost, ago string) {
	t.Helper()
	put(t, pool, `
		insert into agent_activity (id, trace_id, kind, skill_name, purpose, model, surface, cost_usd, token_usage, created_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'model', 'model_call', $1, $2, 'heartbeat', $3::text::numeric,
		       '{"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}', at, 1234
		  from (select clock_timestamp() - $4::text::interval as at) x returning id::text`, purpose, model, cost, ago)
}

func TestSpendIsShownByWhatItWasForSurfaceAndModel(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/spend", "No model was called", "agent heartbeat")
	spend(t, pool, "advance_plan", "model-one", "0.75", "0")
	spend(t, pool, "reflect", "model-two", "0.25", "0")
	spend(t, pool, "reflect", "model-two", "9", "10 days")
	shows(t, server.URL+"/spend?days=1", "$1.00 and 2,000 tokens today", "no skill", "100 %", "<svg", "The numbers of this chart")
	shows(t, server.URL+"/spend?days=1&by=purpose", "advance_plan", "75 %")
	shows(t, server.URL+"/spend?days=30&by=purpose", "$10.00 and 3,000 tokens in 30 days", "by=model&amp;days=30&amp;purpose=reflect#calls")
	shows(t, server.URL+"/spend?by=model", "model-two", "25 %")
	shows(t, server.URL+"/spend?by=surface&per=hour", "heartbeat", "100 %")
	if _, err := pool.Exec(t.Context(), `
		update agent_activity set token_usage = token_usage || '{"unknown_tokens": 400, "unknown_usd": 0.1}'
		 where model = 'model-one'`); err != nil {
		t.Fatal(err)
	}
	shows(t, server.URL+"/spend?days=1", "$0.1000 and 400 tokens of it are unknown")
	body := shows(t, server.URL+"/spend?days=30&by=model&purpose=reflect", "$9.25", "Newest model calls")
	if strings.Contains(body, "model-one") {
		t.Error("a model that was not called for it is shown")
	}
	shows(t, server.URL+"/", "$1.00 · 2,000 tokens", "Most of it, 7 days", "Skill health")
}

func TestSpendRefusesFiltersItDoesNotKnow(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	for query, why := range map[string]string{
		"days=3": "days is", "by=lane": "by is", "per=week": "per is", "per=hour&days=30": "1 or 7 days", "surface=moon": "surface is",
		"by=purpose&skill=a": "by skill or by purpose", "by=skill&purpose=a": "by skill or by purpose",
		"skill=" + strings.Repeat("x", 301): "skill is not text",
	} {
		turnsAway(t, server.URL+"/spend?"+query, 400, why)
	}
}

func TestHostileTextInSpendIsText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	spend(t, pool, hostile, hostile, "1", "0")
	spend(t, pool, strings.Repeat("ñ", 500_000), strings.Repeat("m", 1_000_000), "1", "0")
	for _, path := range []string{"/spend", "/spend?by=purpose", "/spend?by=model", "/"} {
		harmless(t, server.URL+path)
	}
}

func TestTheBudgetSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	if _, err := pool.Exec(t.Context(), `
		insert into agent_budgets (scope, tokens, cost_usd, reserved_tokens, reserved_usd, unknown_tokens)
		select 'day:' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') || s, 5000, 4, 1000, 1, 700 from unnest(array['', ':chat']) s`); err != nil {
		t.Fatal(err)
	}
	room := &Room{Options: Options{Read: replica.Primary(pool), Limits: budgets.Limits{
		Day: budgets.Limit{USD: 10}, Surface: map[trace.Surface]budgets.Limit{trace.Chat: {Tokens: 5000}},
	}}}
	got, err := room.budgetLines(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []budgetLine{
		{Spent: "$4.00", Aside: "$1.00", Limit: "$10.00", Left: "$5.00", Used: .4, Held: .1, Percent: "40 %"},
		{Spent: "5,000 tokens", Unknown: "700 tokens", Aside: "1,000 tokens"},
		{Surface: "chat", Spent: "5,000 tokens", Unknown: "700 tokens", Aside: "1,000 tokens", Limit: "5,000 tokens", Left: "0 tokens", Used: 1, Over: true, Percent: "100 %"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAHeartbeatHasItsPrice(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	spend(t, pool, "reflect", "m", "1.50", "0")
	for _, sql := range []string{
		`insert into agent_executions (trace_id, surface, flow) select 'hb_' || n, 'heartbeat', 'heartbeat' from generate_series(1, 4) n`,
		`update agent_executions set status = 'running'`,
		`update agent_executions set status = case trace_id when 'hb_3' then 'failed' else 'completed' end,
		        result_summary = case trace_id when 'hb_4' then 'skipped: an admin is at work' else '' end`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	shows(t, server.URL+"/", "$0.7500 · 500 tokens", "2 successful ones")
}
