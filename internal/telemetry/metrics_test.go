package telemetry_test

import (
	"log/slog"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
)

// scrape is what Prometheus gets, which must be what it reads.
func scrape(t *testing.T, m *telemetry.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	text := w.Body.String()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	_, err := parser.TextToMetricFamilies(strings.NewReader(text))
	require.Truef(t, err == nil && w.Code == 200, "%d: %v", w.Code, err)
	return text
}

// used is a process that has done some of everything.
func used(m *telemetry.Metrics) {
	now := time.Now()
	x := executions.Execution{Surface: "heartbeat", StartedAt: &now}
	m.RunStarted(x)
	m.RunFinished(x)
	m.ClaimLost(x)
	m.ExecutionEnded(x, executions.Completed)
	m.ActivityClosed(activity.Entry{Kind: activity.KindModel, Model: "asked"}, activity.Outcome{
		Status: activity.Success, Model: "answered", CostUSD: 0.5,
		Usage: activity.Usage{PromptTokens: 7, CompletionTokens: 3},
	}, time.Second)
	m.ActivityClosed(activity.Entry{Kind: activity.KindCall, Skill: "look"},
		activity.Outcome{Status: activity.Error, Class: "timeout"}, time.Second)
	m.ActivityClosed(activity.Entry{Kind: activity.KindCall, Skill: "invented"},
		activity.Outcome{Status: activity.Error, Class: "unknown_tool"}, 0)
	m.ActivityClosed(activity.Entry{Kind: activity.KindPhase, Skill: "reflect"},
		activity.Outcome{Status: activity.Success},
		time.Second)
	m.LaneWaited("objective:1", time.Second, true)
	m.LaneLost("my own/lane:7")
	m.Delivery("github", "accepted")
}

func TestMetricsAreAsPrometheusWantsThem(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	m := telemetry.NewMetrics("1.2.3", telemetry.NewState(db, slog.New(slog.DiscardHandler)))
	used(m)
	text := scrape(t, m)
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	assert.Truef(t, err == nil && len(problems) == 0, "promlint: %v %+v", err, problems)
	for _, line := range []string{
		`agent_runs_total{status="completed",surface="heartbeat"} 1`, `agent_claims_lost_total{surface="heartbeat"} 1`,
		`agent_runs_active{surface="heartbeat"} 0`, `agent_run_duration_seconds_count{surface="heartbeat"} 1`,
		`agent_llm_requests_total{model="answered",status="success"} 1`,
		`agent_llm_tokens_total{model="answered",type="input"} 7`,
		`agent_llm_tokens_total{model="answered",type="output"} 3`, `agent_llm_cost_usd_total{model="answered"} 0.5`,
		`agent_skill_invocations_total{skill="look",status="error"} 1`,
		`agent_skill_invocations_total{skill="unknown_tool",status="error"} 1`,
		`agent_lane_lock_wait_seconds_count{got="yes",lane="objective"} 1`, `agent_lock_lost_total{lane="other"} 1`,
		`agent_webhook_deliveries_total{result="accepted",source="github"} 1`, `agent_database_up 1`,
		`agent_executions{status="waiting"} 0`,
		`agent_approvals_pending 0`, `agent_paused 0`, `agent_lane_lock_held{lane="thread"} 0`,
		`agent_heartbeat_last_success_timestamp_seconds 0`,
	} {
		assert.Truef(t, strings.Contains(text, line+"\n"), "there is no line %s", line)
	}
	assert.True(t, !strings.Contains(text, "reflect") && !strings.Contains(text, "invented") &&
		strings.Contains(text, `version="1.2.3"`), "a phase or an invented name is counted, or the version is missing")
}

// TestAScrapeWithoutTheDatabase has what the process knows, and says that the database is away.
func TestAScrapeWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	m := telemetry.NewMetrics("test", telemetry.NewState(db, slog.New(slog.DiscardHandler)))
	used(m)
	db.Close()
	text := scrape(t, m)
	assert.Truef(t, strings.Contains(text, "agent_database_up 0\n") &&
		!strings.Contains(text, "agent_approvals_pending ") && strings.Contains(text, "agent_runs_total{"), "scraped\n%s",
		text)
}

// TestManyScrapesAskOnce: however many scrape, the database is asked once in a while.
func TestManyScrapesAskOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	m := telemetry.NewMetrics("test", telemetry.NewState(db, slog.New(slog.DiscardHandler)))
	first := scrape(t, m)
	before := db.Stat().AcquireCount()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { scrape(t, m) })
	}
	all.Wait()
	if asked := db.Stat().AcquireCount() - before; asked > 2 { // a slow machine may have needed the next one
		t.Errorf("8 scrapes asked the database %d times:\n%s", asked, first)
	}
}

// TestLabelsAreBounded: names that a model, a workspace or a lane's user invents do not grow the metrics without end.
func TestLabelsAreBounded(t *testing.T) {
	t.Parallel()
	m := telemetry.NewMetrics("test", nil)
	for i := range 3000 {
		n := strconv.Itoa(i)
		m.ActivityClosed(activity.Entry{Kind: activity.KindCall, Skill: "s" + n},
			activity.Outcome{Status: activity.Success}, 0)
		m.ActivityClosed(activity.Entry{Kind: activity.KindModel, Model: "m" + n},
			activity.Outcome{Status: activity.Success}, 0)
		m.LaneWaited("lane"+n, 0, true)
	}
	text := scrape(t, m)
	for name, most := range map[string]int{
		"agent_skill_invocations_total{": 501, "agent_llm_requests_total{": 101,
		"agent_lane_lock_wait_seconds_count{": 1,
	} {
		assert.Equal(t, most, strings.Count(text, name), name)
	}
	assert.Contains(t, text, `agent_skill_invocations_total{skill="other",status="success"} 2500`)
}

// TestNoMetrics: a nil Metrics counts nothing, and harms nobody.
func TestNoMetrics(*testing.T) { used(nil) }
