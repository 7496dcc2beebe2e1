package telemetry

import (
	"context"
	_ "embed"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// passRows are the rows of one pass.
type passRows struct {
	activities []activityRow
	executions []executionRow
	waits      []waitRow
}

// read reads finished rows by the ids of activities and executions. The waits are those of the executions.
func read(ctx context.Context, db postgres.DB, activities, executions []string, withContent bool) (
	rows passRows, err error,
) {
	if len(activities) > 0 {
		rows.activities, err = postgres.Rows[activityRow](ctx, db, "read activities for spans", activitiesSQL, customPlan,
			postgres.Strict{"ids": activities, "content": withContent})
		if err != nil {
			return passRows{}, err
		}
	}
	if len(executions) == 0 {
		return rows, nil
	}
	rows.executions, err = postgres.Rows[executionRow](ctx, db, "read executions for spans", executionsSQL, customPlan,
		postgres.Strict{"ids": executions})
	if err != nil {
		return passRows{}, err
	}
	rows.waits, err = postgres.Rows[waitRow](ctx, db, "read waits for spans", waitsSQL, customPlan,
		postgres.Strict{"ids": executions, "most": maxWaits})
	return rows, err
}

// customPlan makes PostgreSQL plan a statement for its arguments. A generic plan would scan a whole table.
const customPlan = pgx.QueryExecModeCacheDescribe

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
	ParentEnded, OwnerEnded                                *time.Time // Owner is the execution
	OwnerID, RootID                                        *string
}

//go:embed read_activities.sql
var activitiesSQL string

// executionRow is an execution that has ended, and its place in the trace.
type executionRow struct {
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

//go:embed read_executions.sql
var executionsSQL string

// waitRow is a wait of an execution that has ended.
type waitRow struct {
	ExecutionID, Step, Kind string
	TimedOut                bool
	EndedAt                 time.Time
	PhaseID                 *string
	BeganAt                 time.Time
}

//go:embed read_waits.sql
var waitsSQL string

// maxWaits bounds the waits of the executions of one pass, because a loop may have waited any number of times. Further
// waits get no span.
const maxWaits = 5000
