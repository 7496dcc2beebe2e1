package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Trace is the work of one trace id.
type Trace struct {
	TraceID     string     `json:"trace_id"`
	OTelTraceID string     `json:"otel_trace_id"` // the same 16 bytes in hex, as in tracing tools
	Surface     string     `json:"surface"`
	Status      string     `json:"status"` // of the root execution; skipped when it never started
	StartedAt   time.Time  `json:"started_at"`
	FinishedAt  *time.Time `json:"finished_at"` // nil while it runs
	Tokens      int64      `json:"tokens"`
	CostUSD     float64    `json:"cost_usd"`
	RootCause   *RootCause `json:"root_cause"` // of a failed trace
	Activities  []Row      `json:"activities"` // by created_at, id; at most 20,000
	Truncated   bool       `json:"truncated"`  // later activities are left out; tokens and cost_usd include them
	// Decisions on the approvals that activities requested, by the id of the activity.
	Decisions map[string]Decision `json:"decisions,omitempty"`

	Children []Child `json:"-"` // executions below the root
}

// Child is an execution that another execution of the trace started.
type Child struct {
	ID, ParentID, Flow, Status string
	CreatedAt, StartedAt       time.Time
	CompletedAt                *time.Time
}

// TraceOf reads a trace by its id in any form: prefixed, a bare ULID, or the 32 hex digits of OpenTelemetry. The
// error wraps trace.ErrInvalid for other input, and ErrNotFound.
func TraceOf(ctx context.Context, db postgres.DB, id string) (Trace, error) {
	ids, err := trace.ParseAny(id)
	if err != nil {
		return Trace{}, fmt.Errorf("read trace: %w", err)
	}
	roots, children, err := runsOf(ctx, db, plainStrings(ids))
	if err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	rows, err := rowsOfTraces(ctx, db, plainStrings(ids))
	if err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	if len(roots) == 0 && len(rows) == 0 {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, ErrNotFound)
	}
	more := len(rows) > maxActivities
	rows = rows[:min(len(rows), maxActivities)]
	t := assemble(roots, rows)
	t.Children, t.Truncated = children, more
	if more {
		used, costUSD, err := Spent(ctx, db, t.TraceID)
		if err != nil {
			return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
		}
		t.Tokens, t.CostUSD = int64(used.TotalTokens), RoundToMicros(costUSD)
	}
	if t.Decisions, err = DecisionsOf(ctx, db, rows); err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	if t.Status != "failed" && t.Status != "timeout" {
		return t, nil
	}
	if t.RootCause, err = RootCauseOf(ctx, db, t.TraceID); err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	return t, nil
}

// root is an execution without a parent. A trace has several if the event of a webhook starts executions.
type root struct {
	TraceID     string
	Surface     string
	Status      string
	StartedAt   time.Time
	CompletedAt *time.Time
}

// runsOf lists the executions of traces, the roots first, at most maxActivities.
func runsOf(ctx context.Context, db postgres.DB, traceIDs []string) (roots []root, children []Child, err error) {
	type run struct {
		Child
		TraceID, Surface string
	}
	list, err := postgres.Rows[run](ctx, db, "read executions of traces", `
		select e.id::text, coalesce(e.parent_id::text, '') as parent_id, e.flow, e.status, e.created_at,
		       coalesce(e.started_at, e.created_at) as started_at, e.completed_at, e.trace_id, e.surface
		  from agent_executions e where e.trace_id = any (@trace_ids)
		 order by e.parent_id is not null, e.id limit @limit`,
		customPlan, postgres.Strict{"trace_ids": traceIDs, "limit": maxActivities})
	for _, r := range list {
		if r.ParentID != "" {
			children = append(children, r.Child)
			continue
		}
		roots = append(roots, root{r.TraceID, r.Surface, r.Status, r.StartedAt, r.CompletedAt})
	}
	return roots, children, err
}

// assemble builds a trace from roots and rows, at least one of either.
func assemble(roots []root, rows []Row) Trace {
	var t Trace
	if len(roots) > 0 {
		first, last := roots[0], roots[len(roots)-1]
		t = Trace{
			TraceID: first.TraceID, Surface: first.Surface, Status: last.Status, StartedAt: first.StartedAt.UTC(),
			FinishedAt: utc(last.CompletedAt),
		}
	} else {
		t = Trace{TraceID: rows[0].TraceID, Surface: rows[0].Surface, StartedAt: rows[0].CreatedAt}
		t.Status, t.FinishedAt = statusOf(rows)
	}
	t.OTelTraceID = trace.ID(t.TraceID).OTel()
	t.Activities = rows
	for _, row := range rows {
		t.Tokens += int64(row.TokenUsage.TotalTokens)
		t.CostUSD += row.CostUSD
	}
	t.CostUSD = RoundToMicros(t.CostUSD)
	return t
}

// Spent returns the usage and cost of the model calls under a trace so far.
func Spent(ctx context.Context, db postgres.DB, traceID string) (used Usage, costUSD float64, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens')), 0)::bigint,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens')), 0)::bigint,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint,
		       coalesce(bool_or(a.token_usage -> 'estimated' = 'true'), false), coalesce(sum(a.cost_usd), 0)::float8,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens')), 0)::bigint,
		       coalesce(sum(case when jsonb_typeof(a.token_usage -> 'unknown_usd') = 'number'
		         then (a.token_usage ->> 'unknown_usd')::numeric end), 0)::float8
		  from agent_activity a
		 where a.trace_id = @trace_id and a.kind = 'model'`,
		customPlan, postgres.Strict{"trace_id": traceID}).
		Scan(&used.PromptTokens, &used.CompletionTokens, &used.TotalTokens, &used.Estimated, &costUSD,
			&used.UnknownTokens, &used.UnknownUSD)
	if err != nil {
		return Usage{}, 0, fmt.Errorf("sum spend of trace %s: %w", traceID, err)
	}
	return used, costUSD, nil
}

// RoundToMicros rounds to millionths of a dollar, as stored.
func RoundToMicros(usd float64) float64 { return float64(int64(usd*1e6+0.5)) / 1e6 }

// statusOf is the status of a trace without an execution (a skipped tick, an admin's act), in the terms of
// executions.
func statusOf(rows []Row) (status string, finished *time.Time) {
	status = "skipped"
	for _, row := range rows {
		if row.FinishedAt == nil {
			return "running", nil
		}
		if finished == nil || row.FinishedAt.After(*finished) {
			finished = row.FinishedAt
		}
		switch {
		case row.Status == Error:
			status = "failed"
		case row.Status != Skipped && status != "failed":
			status = "completed"
		}
	}
	return status, finished
}
