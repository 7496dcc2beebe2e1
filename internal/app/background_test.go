package app

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestPruneDeletesRowsOfAFixedTime also without any later request or upload.
func TestPruneDeletesRowsOfAFixedTime(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_documents (name, content_type, size, sha256, is_text, content, owner_kind, owner, expires_at)
		values ('a', 'text/plain', 1, sha256('x'), true, 'x', 'key', 'app', now() - interval '1 s');
		insert into agent_idempotency (scope, key, fingerprint, attempt, lease_until, expires_at)
		values ('POST /v1/events', 'k', 'f', gen_random_uuid(), now(), now() - interval '1 s')`)
	a := &App{Options: Options{Log: slog.New(slog.DiscardHandler), Database: Database{Pool: db}}}
	require.NoError(t, a.prune(t.Context()))
	pgtest.Equal(t, db, 0, `select (select count(*) from agent_documents) + (select count(*) from agent_idempotency)`)
}

func TestFreeAnswers(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_agents (name, version, digest, definition, is_default)
		values ('sales', 1, 'x', '{"model": "house/cheap", "fallback": ["house/dear", "house/free"]}', true)`)
	log := &testkit.Log{}
	a := &App{Options: Options{
		Config: config.Config{OpenAIKey: "k", Prices: map[string]config.Price{
			"house/cheap": {Input: 1}, "house/dear": {Input: 1, Output: 2}, "house/free": {}, "house/embedding": {Input: 1},
		}},
		Log: slog.New(slog.NewTextHandler(log, nil)), Database: Database{Pool: db},
	}, Loop: &reason.Loop{Agents: &agents.Directory{}}}
	a.warnUnpriced(t.Context())
	assert.Contains(t, log.String(), "level=WARN", "no output", "models=[house/cheap]\n")
	a.Config.OpenAIKey = "" // the offline model answers
	assert.Equal(t, 0, len(FreeAnswers(a.Config, []agents.Agent{{Definition: agents.Definition{Model: "house/cheap"}}})))
}

// The remedy of an address names its own setting.
func TestRemediesNameTheirSetting(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	cfg := config.Config{DatabaseURL: config.Secret(url), DirectURL: config.Secret(url + "&database=nowhere")}
	_, err := Connect(t.Context(), cfg, url, false, slog.New(slog.DiscardHandler))
	assert.Truef(t, err != nil && strings.HasSuffix(postgres.Todo(err), "correct the name in DATABASE_DIRECT_URL"),
		"error %v", err)
}

func TestActivityIsCounted(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_activity (id, trace_id, skill_name, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'fetch', at
		  from (select clock_timestamp() - interval '1 minute' as at from generate_series(1, 100)) x`)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runActivityCounts(ctx, db, 10*time.Millisecond, slog.New(slog.DiscardHandler)) }()
	pgtest.Until(t, db, 100, `select coalesce(sum(calls), 0)::int from agent_activity_counts where span = 'day'`)
	cancel()
	assert.NoError(t, <-ended)
}
