package telemetry

import (
	"context"
	_ "embed"
	"encoding/json"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	askEvery    = 3 * time.Second // for any number of scrapes
	askLimit    = time.Second     // the time limit of the database
	countAtMost = 100_000
)

var (
	upDesc = prometheus.NewDesc("agent_database_up",
		"Whether the database answered within a second. Without an answer its metrics are missing.", nil, nil)
	executionsDesc = prometheus.NewDesc("agent_executions",
		"Executions that have not ended, by status, counted up to 100000.", []string{"status"}, nil)
	oldestDesc = prometheus.NewDesc("agent_queue_oldest_seconds",
		"Age of the oldest execution that has not begun; 0 when there is none.", nil, nil)
	approvalsDesc = prometheus.NewDesc("agent_approvals_pending", "Calls that wait for an admin's approval.", nil, nil)
	beatDesc      = prometheus.NewDesc("agent_heartbeat_last_success_timestamp_seconds",
		"When the last heartbeat completed that was not skipped; 0 when none did.", nil, nil)
	pausedDesc = prometheus.NewDesc("agent_paused", "1 while autonomous work is paused.", nil, nil)
	heldDesc   = prometheus.NewDesc("agent_lane_lock_held", "Lanes that are held now, by their kind.", []string{"lane"},
		nil)
)

//go:embed state.sql
var stateSQL string

// state is the result of one query.
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

	mu    sync.Mutex // held during a query; all other scrapes wait for the result
	asked time.Time
	found *state // nil if the database did not answer
}

// NewState returns a collector. It runs no query before the first scrape.
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

// look queries the database, or repeats a recent result.
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

// activityRow is an activity and its place in the trace.
type activityRow struct {
	ID, TraceID                                            string
	ExecutionID                                            *string
	Kind, SkillName, Agent, Surface, Status, Purpose, Step string
	Model, ErrorClass, ErrorMessage                        string
	PromptTokens, CompletionTokens, UnknownTokens          string
	Estimated                                              bool
	CostUsd                                                float64
	ThreadID, Lane, IdempotencyKey                         string
	CreatedAt, FinishedAt                                  time.Time
	Input, Output                                          json.RawMessage
	ParentID                                               *string
	ParentEnded, RunEnded                                  *time.Time
	RunID, RootID                                          *string
}

// runRow is an execution that has ended, and its place in the trace.
type runRow struct {
	ID, TraceID, Surface, Agent, Flow, Status, ResultType, ErrorMessage, FailedStep string
	Claim                                                                           int64
	ThreadID                                                                        string
	CreatedAt, StartedAt, CompletedAt                                               time.Time
	Detached                                                                        bool
	ParentID                                                                        *string
	ParentTrace                                                                     string
	RootID, ForkedFrom                                                              *string
	ForkedTrace                                                                     string
	Links                                                                           []string
}

// waitRow is a wait of an execution that has ended.
type waitRow struct {
	ExecutionID, Step, Event string
	TimedOut                 bool
	EndedAt                  time.Time
	PhaseID                  *string
	BeganAt                  time.Time
}

//go:embed read_activities.sql
var activitiesSQL string

//go:embed read_runs.sql
var runsSQL string

//go:embed read_waits.sql
var waitsSQL string

// waitsMost bounds the waits per pass: a loop may have waited any number of times.
const waitsMost = 5000

// found is the data of one pass.
type found struct {
	activities []activityRow
	runs       []runRow
	waits      []waitRow
}

// customPlan plans a statement for the given ids: a generic plan would scan a whole table.
const customPlan = pgx.QueryExecModeCacheDescribe

// read reads finished rows by their ids.
func read(ctx context.Context, db postgres.DB, activities, runs []string, content bool) (f found, err error) {
	if len(activities) > 0 {
		f.activities, err = postgres.Rows[activityRow](ctx, db, "read activities for spans", activitiesSQL, customPlan,
			postgres.Strict{"ids": activities, "content": content})
		if err != nil {
			return found{}, err
		}
	}
	if len(runs) == 0 {
		return f, nil
	}
	f.runs, err = postgres.Rows[runRow](ctx, db, "read executions for spans", runsSQL, customPlan,
		postgres.Strict{"ids": runs})
	if err != nil {
		return found{}, err
	}
	f.waits, err = postgres.Rows[waitRow](ctx, db, "read waits for spans", waitsSQL, customPlan,
		postgres.Strict{"ids": runs, "most": waitsMost})
	return f, err
}
