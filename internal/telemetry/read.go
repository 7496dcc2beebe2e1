package telemetry

import (
	"context"
	_ "embed"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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

// waitsMost bounds the waits that are shown of the executions of a pass: a loop may have waited without end.
const waitsMost = 5000

// found is what is to be sent.
type found struct {
	activities []activityRow
	runs       []runRow
	waits      []waitRow
}

// anew has a statement planned for the ids at hand: a generic plan would read a table from end to end.
const anew = pgx.QueryExecModeCacheDescribe

// read reads finished rows by their ids.
func read(ctx context.Context, db postgres.DB, activities, runs []string, content bool) (f found, err error) {
	if len(activities) > 0 {
		f.activities, err = postgres.Rows[activityRow](ctx, db, "read activities for spans", activitiesSQL, anew,
			postgres.Strict{"ids": activities, "content": content})
		if err != nil {
			return found{}, err
		}
	}
	if len(runs) == 0 {
		return f, nil
	}
	f.runs, err = postgres.Rows[runRow](ctx, db, "read executions for spans", runsSQL, anew, postgres.Strict{"ids": runs})
	if err != nil {
		return found{}, err
	}
	f.waits, err = postgres.Rows[waitRow](ctx, db, "read waits for spans", waitsSQL, anew,
		postgres.Strict{"ids": runs, "most": waitsMost})
	return f, err
}
