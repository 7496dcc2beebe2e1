package telemetry

import (
	"context"
	_ "embed"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	queryInterval = 3 * time.Second // shortest time between two queries, for any number of scrapes
	queryTimeout  = time.Second
	maxCount      = 100_000 // executions of a status that are counted
	maxDue        = 10_000  // due runs of automations that are counted
)

var (
	upDesc = prometheus.NewDesc("agent_database_up",
		"Whether the database answered within a second. Without an answer its metrics are missing.", nil, nil)
	executionsDesc = prometheus.NewDesc("agent_executions",
		"Executions that have not ended, by status, counted up to 100000.", []string{"status"}, nil)
	oldestDesc = prometheus.NewDesc("agent_queue_oldest_seconds",
		"Age of the oldest execution that has not begun; 0 when there is none.", nil, nil)
	runsDueDesc = prometheus.NewDesc("agent_automation_runs_due",
		"Due runs of enabled automations, counted up to 10000.", nil, nil)
	oldestDueDesc = prometheus.NewDesc("agent_automation_runs_oldest_due_seconds",
		"Age of the oldest due run of an enabled automation; 0 when there is none.", nil, nil)
	approvalsDesc = prometheus.NewDesc("agent_approvals_pending", "Calls that wait for an admin's approval.", nil, nil)
	heartbeatDesc = prometheus.NewDesc("agent_heartbeat_last_success_timestamp_seconds",
		"When the last heartbeat completed that was not skipped; 0 when none did.", nil, nil)
	pausedDesc = prometheus.NewDesc("agent_paused", "1 while autonomous work is paused.", nil, nil)
	heldDesc   = prometheus.NewDesc("agent_lane_lock_held", "Lanes that are held now, by their kind.", []string{"lane"},
		nil)
)

//go:embed state.sql
var stateSQL string

// state is a row of state.sql.
type state struct {
	Pending, Running, Waiting, Approvals, RunsDue int64
	Oldest, Beat, OldestDue                       float64
	Paused                                        bool
	Lanes                                         []string
}

// State is a collector of gauges of the database.
type State struct {
	db  postgres.DB
	log *slog.Logger

	mu        sync.Mutex // held during a query, so concurrent scrapes share one result
	queriedAt time.Time
	last      *state // nil if the database did not answer
	failures  logging.Failures
}

// NewState returns a collector. It runs no query before the first scrape.
func NewState(db postgres.DB, log *slog.Logger) *State { return &State{db: db, log: log} }

// Describe implements prometheus.Collector.
func (s *State) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		upDesc, executionsDesc, oldestDesc, runsDueDesc, oldestDueDesc, approvalsDesc, heartbeatDesc,
		pausedDesc, heldDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *State) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	latest := s.read()
	if latest == nil {
		gauge(upDesc, 0)
		return
	}
	gauge(upDesc, 1)
	gauge(executionsDesc, float64(latest.Pending), "pending")
	gauge(executionsDesc, float64(latest.Running), "running")
	gauge(executionsDesc, float64(latest.Waiting), "waiting")
	gauge(oldestDesc, max(0, latest.Oldest))
	gauge(runsDueDesc, float64(latest.RunsDue))
	gauge(oldestDueDesc, max(0, latest.OldestDue))
	gauge(approvalsDesc, float64(latest.Approvals))
	gauge(heartbeatDesc, latest.Beat)
	paused := 0.0
	if latest.Paused {
		paused = 1
	}
	gauge(pausedDesc, paused)
	held := map[string]int{}
	for _, kind := range laneKinds {
		held[kind] = 0
	}
	for _, lane := range latest.Lanes {
		held[laneKind(lane)]++
	}
	for kind, n := range held {
		gauge(heldDesc, float64(n), kind)
	}
}

// read queries the database, or returns a recent result.
func (s *State) read() *state {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.queriedAt) < queryInterval {
		return s.last
	}
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	s.last = nil
	rows, err := s.db.Query(ctx, stateSQL, postgres.Strict{"most": maxCount, "most_due": maxDue})
	if err == nil {
		s.last, err = pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[state])
	}
	s.failures.Log(context.Background(), s.log, "gauges of the database not gathered", err)
	s.queriedAt = time.Now()
	return s.last
}
