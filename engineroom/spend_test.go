package engineroom

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestSpendByChatKeyAndModel(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	price := func(string) string { return "list price of 2026-07-24: $1 in, $2 out" }
	room, err := New(Options{Pool: pool, PriceOf: price})
	require.NoError(t, err)
	server := serveRoom(t, room)
	pgtest.Exec(t, pool, `
		insert into agent_threads (id, channel, owner_kind, owner) values ('t', 'chat', 'visitor', 'shop <site>');
		insert into agent_activity (trace_id, surface, kind, skill_name, purpose, model, thread_id, status, duration_ms, token_usage, led_to)
		select 'ch_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'chat', 'model', 'model_call', 'turn', 'm-1', case n when 4 then null else 't' end,
		       case n when 1 then 'error' else 'success' end, 1000 * n,
		       '{"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "cached_tokens": 25}', '{"fetch": 2, "price": 1}'
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
