package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StatusCount is a row of the view agent_executions_by_status: how many executions are in a state that is not terminal,
// and for how long they have been there on average.
type StatusCount struct {
	Status        Status  `json:"status"`
	Count         int64   `json:"count"`
	AvgAgeSeconds float64 `json:"avg_age_seconds"`
}

// CountByStatus reads how many executions are pending, running and waiting.
func CountByStatus(ctx context.Context, db postgres.DB) ([]StatusCount, error) {
	rows, err := db.Query(ctx, `
		select status, count, avg_age_seconds::float8 from agent_executions_by_status order by status`)
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[StatusCount])
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	return got, nil
}

// WaitingRow is an execution that waits, as the views agent_executions_waiting and agent_executions_stuck show it.
type WaitingRow struct {
	ID           string          `json:"id"`
	TraceID      string          `json:"trace_id"`
	Surface      string          `json:"surface"`
	Agent        string          `json:"agent"`
	Flow         string          `json:"flow"`
	WaitingFor   string          `json:"waiting_for"`
	WaitingKey   string          `json:"waiting_key"`
	WaitingUntil time.Time       `json:"waiting_until"`
	WaitingData  json.RawMessage `json:"waiting_data"`
	Waited       float64         `json:"waited_seconds"`
}

// Redacted is the row as it may be shown; see [Execution.Redacted].
func (w WaitingRow) Redacted() WaitingRow {
	w.WaitingData = shown(w.WaitingData)
	return w
}

// ListWaiting reads what waits, the nearest deadline first; at most 500. kind narrows to one kind of wait, and stuck to what the
// deadline has passed of and nobody has touched for an hour.
func ListWaiting(ctx context.Context, db postgres.DB, kind string, stuck bool, limit int) ([]WaitingRow, error) {
	rows, err := db.Query(ctx, `
		select w.id::text, w.trace_id, w.surface, w.agent, w.flow, coalesce(w.waiting_for, ''), coalesce(w.waiting_key, ''), w.waiting_until,
		       w.waiting_data, extract(epoch from w.waiting_time)::float8
		  from agent_executions_waiting w
		 where (@kind = '' or w.waiting_for = @kind) and (not @stuck or w.id in (select s.id from agent_executions_stuck s))
		 order by w.waiting_until, w.id limit @limit`,
		postgres.Strict{"kind": kind, "stuck": stuck, "limit": min(max(limit, 1), 500)})
	if err != nil {
		return nil, fmt.Errorf("list waiting executions: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[WaitingRow])
	if err != nil {
		return nil, fmt.Errorf("list waiting executions: %w", err)
	}
	return got, nil
}

// Relative is an execution that belongs to another: its child, or its fork.
type Relative struct {
	ID     string `json:"id"`
	Flow   string `json:"flow"`
	Status Status `json:"status"`
	// From is the step that a fork began with; empty for children, and for forks of all that was recorded.
	From string `json:"from"`
	Fork bool   `json:"fork"`
}

// Relatives reads the children and the forks of an execution, in the order in which they were started; at most 500.
func Relatives(ctx context.Context, db postgres.DB, id string) ([]Relative, error) {
	rows, err := db.Query(ctx, `
		select id::text, flow, status, coalesce(forked_step, ''), coalesce(forked_from = @id::uuid, false) from agent_executions
		 where parent_id = @id::uuid or forked_from = @id::uuid order by id limit 500`, postgres.Strict{"id": id})
	if err != nil {
		return nil, fmt.Errorf("list children of execution %s: %w", id, err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Relative])
	if err != nil {
		return nil, fmt.Errorf("list children of execution %s: %w", id, err)
	}
	return got, nil
}
