package telemetry

import (
	"context"
	_ "embed"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	askEvery    = 3 * time.Second // however many scrape
	askLimit    = time.Second     // how long the database may take
	countAtMost = 100_000
)

var (
	upDesc = prometheus.NewDesc("agent_database_up",
		"Whether the database answered within a second. Without it what follows from it is left out.", nil, nil)
	executionsDesc = prometheus.NewDesc("agent_executions",
		"Executions that have not ended, by status, counted up to 100000.", []string{"status"}, nil)
	oldestDesc = prometheus.NewDesc("agent_queue_oldest_seconds",
		"Age of the oldest execution that has not begun; 0 when there is none.", nil, nil)
	approvalsDesc = prometheus.NewDesc("agent_approvals_pending", "Calls that wait for an admin's leave.", nil, nil)
	beatDesc      = prometheus.NewDesc("agent_heartbeat_last_success_timestamp_seconds",
		"When the last heartbeat completed that was not skipped; 0 when none did.", nil, nil)
	pausedDesc = prometheus.NewDesc("agent_paused", "1 while autonomous work is paused.", nil, nil)
	heldDesc   = prometheus.NewDesc("agent_lane_lock_held", "Lanes that are held now, by their kind.", []string{"lane"},
		nil)
)

//go:embed state.sql
var stateSQL string

// state is what one look has found.
type state struct {
	Pending, Running, Waiting, Approvals int64
	Oldest, Beat                         float64
	Paused                               bool
	Lanes                                []string
}

// State is a collector of gauges of the database.
type State struct {
	db  postgres.DB
	log *slog.Logger

	mu    sync.Mutex // held while one asks: the others wait for its answer
	asked time.Time
	found *state // nil when the database did not answer
}

// NewState returns a collector. It asks nothing before it is gathered.
func NewState(db postgres.DB, log *slog.Logger) *State { return &State{db: db, log: log} }

// Describe implements prometheus.Collector.
func (s *State) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		upDesc, executionsDesc, oldestDesc, approvalsDesc, beatDesc, pausedDesc,
		heldDesc,
	} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (s *State) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	found := s.look()
	if found == nil {
		gauge(upDesc, 0)
		return
	}
	gauge(upDesc, 1)
	gauge(executionsDesc, float64(found.Pending), "pending")
	gauge(executionsDesc, float64(found.Running), "running")
	gauge(executionsDesc, float64(found.Waiting), "waiting")
	gauge(oldestDesc, max(0, found.Oldest))
	gauge(approvalsDesc, float64(found.Approvals))
	gauge(beatDesc, found.Beat)
	paused := 0.0
	if found.Paused {
		paused = 1
	}
	gauge(pausedDesc, paused)
	held := map[string]int{}
	for _, kind := range laneKinds {
		held[kind] = 0
	}
	for _, lane := range found.Lanes {
		held[laneKind(lane)]++
	}
	for kind, n := range held {
		gauge(heldDesc, float64(n), kind)
	}
}

// look asks the database, or repeats what it said a moment ago.
func (s *State) look() *state {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.asked) < askEvery {
		return s.found
	}
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	s.found = nil
	rows, err := s.db.Query(ctx, stateSQL, postgres.Strict{"most": countAtMost})
	if err == nil {
		s.found, err = pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[state])
	}
	if err != nil {
		s.log.WarnContext(ctx, "gauges of the database not gathered", "error", err)
	}
	s.asked = time.Now()
	return s.found
}
