package telemetry_test

import (
	"log/slog"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
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

func TestLoad(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	standard := telemetry.Settings{
		Endpoint: "http://c:4318/v1/traces", Headers: map[string]string{}, Timeout: 10 * time.Second, Service: "lanekeeper",
		Attributes: map[string]string{},
	}
	with := func(change func(*telemetry.Settings)) telemetry.Settings {
		s := standard
		change(&s)
		return s
	}
	for name, c := range map[string]struct {
		environ map[string]string
		want    telemetry.Settings
		wrong   []string // variables that the error names
	}{
		"nothing":  {nil, telemetry.Settings{}, nil},
		"disabled": {map[string]string{endpoint: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, telemetry.Settings{}, nil},
		"no exporter": {
			map[string]string{endpoint: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
			telemetry.Settings{},
			nil,
		},
		"off, so not read":    {map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, telemetry.Settings{}, nil},
		"endpoint":            {map[string]string{endpoint: "http://c:4318"}, standard, nil},
		"endpoint with slash": {map[string]string{endpoint: "http://c:4318/"}, standard, nil},
		"of traces": {
			map[string]string{endpoint: "http://other", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in?x=1"},
			with(func(s *telemetry.Settings) { s.Endpoint = "https://c/in?x=1" }), nil,
		},
		"all": {
			map[string]string{
				endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, a = b",
				"OTEL_EXPORTER_OTLP_TIMEOUT":     "2500",
				"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
				"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
				"OTEL_RESOURCE_ATTRIBUTES":    "service.name=a,deployment.environment=prod", "OTEL_SERVICE_NAME": "b",
				"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true",
			},
			with(func(s *telemetry.Settings) {
				s.Headers = map[string]string{"authorization": "Bearer x", "a": "b"}
				s.Timeout, s.Gzip, s.JSON, s.Service, s.Content = 2500*time.Millisecond, true, true, "b", true
				s.Attributes = map[string]string{"service.name": "a", "deployment.environment": "prod"}
			}), nil,
		},
		"all wrong": {
			map[string]string{
				endpoint: "c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_HEADERS": "secret",
				"OTEL_EXPORTER_OTLP_TIMEOUT":     "10s",
				"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd", "OTEL_TRACES_SAMPLER": "jaeger_remote", "OTEL_TRACES_EXPORTER": "zipkin",
				"OTEL_RESOURCE_ATTRIBUTES": "a=%zz",
			},
			telemetry.Settings{},
			[]string{
				endpoint, "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_COMPRESSION",
				"OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER",
			},
		},
		"ratio": {
			map[string]string{endpoint: "http://c:4318", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
			telemetry.Settings{},
			[]string{"OTEL_TRACES_SAMPLER"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := telemetry.Load(c.environ)
			if err != nil {
				var named []string
				for line := range strings.SplitSeq(err.Error(), "\n") {
					variable, _, _ := strings.Cut(line, ":")
					named = append(named, variable)
				}
				diff := cmp.Diff(c.wrong, named)
				assert.Truef(t, diff == "" && !strings.Contains(err.Error(), "secret"), "the error is\n%v\n%s", err, diff)
				return
			}
			diff := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(telemetry.Settings{}))
			assert.Truef(t, diff == "" && c.wrong == nil, "(-want +got):\n%s", diff)
		})
	}
}

func TestVariablesAreDocumented(t *testing.T) {
	source, err := os.ReadFile("settings.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/settings.md")
	require.NoError(t, err)
	names := regexp.MustCompile(`(get|lookup)\("?(\w+)"?\)`).FindAllStringSubmatch(string(source), -1)
	assert.Truef(t, len(names) >= 13, "the source has only the variables %q", names)
	for _, name := range names {
		variable := name[2]
		switch {
		case name[1] == "lookup":
			variable = "OTEL_EXPORTER_OTLP_" + variable
		case variable == "captureContent":
			variable = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
		case variable == "traces":
			variable = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
		}
		assert.Contains(t, string(page), "| `"+variable+"` |")
	}
}

// scrape returns the metrics in Prometheus's format, and checks that Prometheus can parse them.
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

// recordAll counts work of every kind.
func recordAll(m *telemetry.Metrics) {
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

func TestMetricsFormat(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		with a as (
		  insert into agent_automations (name, skill_name, trigger, event, enabled, disabled_by)
		  select 'a' || n, 'look', 'event', 'e', n > 1, case n when 1 then 'admin' else '' end
		    from generate_series(1, 3) n returning id)
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, created_at)
		select a.id, 'signal', now() - n * interval '1 hour', s, now() - n * interval '1 hour'
		  from a, generate_series(1, 3) n, unnest(array['due', 'dead']) s`)
	m := telemetry.NewMetrics("1.2.3", telemetry.NewState(db, slog.New(slog.DiscardHandler)))
	recordAll(m)
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
		`agent_lock_lost_total{lane="thread"} 0`,
		`agent_webhook_deliveries_total{result="accepted",source="github"} 1`, `agent_database_up 1`,
		`agent_executions{status="waiting"} 0`, `agent_automation_runs_due 6`,
		`agent_approvals_pending 0`, `agent_paused 0`, `agent_lane_lock_held{lane="thread"} 0`,
		`agent_heartbeat_last_success_timestamp_seconds 0`,
	} {
		assert.Truef(t, strings.Contains(text, line+"\n"), "there is no line %s", line)
	}
	assert.Contains(t, text, "agent_automation_runs_oldest_due_seconds 10") // from 3 hours on
	assert.True(t, !strings.Contains(text, "reflect") && !strings.Contains(text, "invented") &&
		strings.Contains(text, `version="1.2.3"`), "a phase or an invented name is counted, or the version is missing")
}

// TestScrapeWithoutDatabase: a scrape has the metrics of the process, and reports that the database is down.
func TestScrapeWithoutDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	m := telemetry.NewMetrics("test", telemetry.NewState(db, slog.New(slog.DiscardHandler)))
	recordAll(m)
	db.Close()
	text := scrape(t, m)
	assert.Truef(t, strings.Contains(text, "agent_database_up 0\n") &&
		!strings.Contains(text, "agent_approvals_pending ") && strings.Contains(text, "agent_runs_total{"), "scraped\n%s",
		text)
}

// TestScrapesShareOneQuery: many scrapes share one query of the database.
func TestScrapesShareOneQuery(t *testing.T) {
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
	if asked := db.Stat().AcquireCount() - before; asked > 2 { // a slow machine may need one more
		t.Errorf("8 scrapes asked the database %d times:\n%s", asked, first)
	}
}

// TestLabelsAreBounded: names from a model, a workspace or a lane's user do not grow the metrics without bound.
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

// TestNilMetrics: a nil Metrics counts nothing and does not panic.
func TestNilMetrics(*testing.T) { recordAll(nil) }

func TestMain(m *testing.M) { pgtest.Main(m) }
