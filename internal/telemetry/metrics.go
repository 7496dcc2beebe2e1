package telemetry

import (
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
)

// Metrics are the metrics of one process. They are safe for concurrent use; a nil Metrics counts nothing. Metrics
// implements executions.Observer and lanes.Observer.
type Metrics struct {
	registry *prometheus.Registry

	runs, claimsLost, requests, tokens, cost, skills, lanesLost, deliveries, spans *prometheus.CounterVec
	exportFailures                                                                 prometheus.Counter
	active                                                                         *prometheus.GaugeVec
	runDuration, requestDuration, skillDuration, laneWait                          *prometheus.HistogramVec

	models, names *labelLimiter
}

// The buckets of durations: a skill takes milliseconds or minutes, a run up to hours.
var (
	latencyBuckets  = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300}
	durationBuckets = []float64{0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400}
)

// NewMetrics returns the metrics of a process of a version. Each scrape reads state, which may be nil.
func NewMetrics(version string, state prometheus.Collector) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), models: &labelLimiter{max: 100}, names: &labelLimiter{max: 500}}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		m.registry.MustRegister(h)
		return h
	}
	m.runs = counter("agent_runs_total", "Executions that ended in this process, by surface and by the status they "+
		"ended in.", "surface", "status")
	m.runDuration = histogram("agent_run_duration_seconds", "From the begin of an execution to its end, waits included.",
		durationBuckets, "surface")
	m.claimsLost = counter("agent_claims_lost_total",
		"Executions that this process ran and lost, because its lease ended.", "surface")
	m.requests = counter("agent_llm_requests_total", "Model calls that ended, with their retries as one.", "model",
		"status")
	m.requestDuration = histogram("agent_llm_request_duration_seconds", "How long model calls took, with their retries.",
		latencyBuckets, "model")
	m.tokens = counter("agent_llm_tokens_total", "Tokens of model calls, of type input or output.", "model", "type")
	m.cost = counter("agent_llm_cost_usd_total", "Cost of model calls in US dollars, by AGENT_PRICES.", "model")
	m.skills = counter("agent_skill_invocations_total", "Calls of skills that ended.", "skill", "status")
	m.skillDuration = histogram("agent_skill_duration_seconds", "How long calls of skills took.", latencyBuckets, "skill")
	m.laneWait = histogram("agent_lane_lock_wait_seconds",
		"Duration of waits for lanes, by the kind of the lane; got is yes if it was acquired.", latencyBuckets, "lane", "got")
	m.lanesLost = counter("agent_lock_lost_total", "Lanes that this process held and lost, by their kind.", "lane")
	for _, kind := range append([]string{"other"}, laneKinds...) {
		m.lanesLost.WithLabelValues(kind) // increase() sees the first loss only if a 0 came before
	}
	m.deliveries = counter("agent_webhook_deliveries_total",
		"Received webhooks: accepted, repeated, in conflict, refused or busy.", "source", "result")
	m.spans = counter("agent_telemetry_spans_total", "Spans: sent, sampled_out, refused by the receiver, or forgotten.",
		"result")
	m.exportFailures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "agent_telemetry_export_failures_total", Help: "Failed attempts to send spans; the spans are sent again.",
	})
	m.active = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "agent_runs_active", Help: "Executions that this process runs now.",
	}, []string{"surface"})
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "agent_build_info", Help: "1; the version is in the labels.",
	}, []string{"version", "goversion"})
	build.WithLabelValues(version, runtime.Version()).Set(1)
	m.registry.MustRegister(m.exportFailures, m.active, build, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if state != nil {
		m.registry.MustRegister(state)
	}
	return m
}

// Handler serves the metrics. It omits metrics that it cannot gather, and serves the rest.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 8,
	})
}

// Registry returns the registry of the metrics.
func (m *Metrics) Registry() *prometheus.Registry { return m.registry }

// RunStarted counts an execution that this process has started to run.
func (m *Metrics) RunStarted(x executions.Execution) {
	if m != nil {
		m.active.WithLabelValues(x.Surface).Inc()
	}
}

// RunFinished undoes the count of RunStarted, for every outcome.
func (m *Metrics) RunFinished(x executions.Execution) {
	if m != nil {
		m.active.WithLabelValues(x.Surface).Dec()
	}
}

// ClaimLost counts a lost claim.
func (m *Metrics) ClaimLost(x executions.Execution) {
	if m != nil {
		m.claimsLost.WithLabelValues(x.Surface).Inc()
	}
}

// ExecutionEnded counts an execution whose end this process recorded.
func (m *Metrics) ExecutionEnded(x executions.Execution, status executions.Status) {
	if m == nil {
		return
	}
	m.runs.WithLabelValues(x.Surface, string(status)).Inc()
	if x.StartedAt != nil {
		m.runDuration.WithLabelValues(x.Surface).Observe(max(0, time.Since(*x.StartedAt).Seconds()))
	}
}

// ActivityClosed counts an activity whose end this process recorded.
func (m *Metrics) ActivityClosed(e activity.Entry, o activity.Outcome, duration time.Duration) {
	if m == nil {
		return
	}
	status := string(o.Status)
	switch e.Kind {
	case activity.KindModel:
		model := e.Model
		if o.Model != "" {
			model = o.Model
		}
		model = m.models.limit(model)
		m.requests.WithLabelValues(model, status).Inc()
		m.requestDuration.WithLabelValues(model).Observe(duration.Seconds())
		m.tokens.WithLabelValues(model, "input").Add(float64(max(0, o.Usage.PromptTokens)))
		m.tokens.WithLabelValues(model, "output").Add(float64(max(0, o.Usage.CompletionTokens)))
		m.cost.WithLabelValues(model).Add(max(0, o.CostUSD))
	case activity.KindCall:
		skill := m.names.limit(e.Skill)
		if o.Class == "unknown_tool" {
			skill = "unknown_tool" // a name that the model invented
		}
		m.skills.WithLabelValues(skill, status).Inc()
		m.skillDuration.WithLabelValues(skill).Observe(duration.Seconds())
	case activity.KindPhase, activity.KindNote:
	}
}

// LaneWaited counts a wait for a lane.
func (m *Metrics) LaneWaited(lane string, duration time.Duration, acquired bool) {
	if m != nil {
		result := map[bool]string{true: "yes", false: "no"}[acquired]
		m.laneWait.WithLabelValues(laneKind(lane), result).Observe(duration.Seconds())
	}
}

// LaneLost counts a lost lane.
func (m *Metrics) LaneLost(lane string) {
	if m != nil {
		m.lanesLost.WithLabelValues(laneKind(lane)).Inc()
	}
}

// Delivery counts a webhook delivery to a declared endpoint.
func (m *Metrics) Delivery(endpoint, result string) {
	if m != nil {
		m.deliveries.WithLabelValues(m.names.limit(endpoint), result).Inc()
	}
}

func (m *Metrics) exported(result string, n int) {
	if m != nil && n > 0 {
		m.spans.WithLabelValues(result).Add(float64(n))
	}
}

func (m *Metrics) exportFailed() {
	if m != nil {
		m.exportFailures.Inc()
	}
}

// laneKinds are the kinds of lanes of this product; users may name others.
var laneKinds = []string{"heartbeat", "operate", "webhook", "thread", "automation", "objective", "pipeline"}

// laneKind returns the part of a lane's name before the colon, if it is in laneKinds.
func laneKind(lane string) string {
	kind, _, _ := strings.Cut(lane, ":")
	if slices.Contains(laneKinds, kind) {
		return kind
	}
	return "other"
}

// labelLimiter bounds the values of a label: further values become "other".
type labelLimiter struct {
	max  int
	mu   sync.Mutex
	seen map[string]bool
}

func (f *labelLimiter) limit(value string) string {
	value = strings.ToValidUTF8(value, "\uFFFD")
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.seen[value] {
		if len(f.seen) >= f.max || len(value) > 255 {
			return "other"
		}
		if f.seen == nil {
			f.seen = map[string]bool{}
		}
		f.seen[value] = true
	}
	return value
}
