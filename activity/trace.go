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
	Activities  []Row      `json:"activities"` // by created_at, id
	// Decisions on the approvals that activities requested, by the id of the activity.
	Decisions map[string]Decision `json:"decisions,omitempty"`

	OpenChildren int64 `json:"-"` // executions below the root that still run
}

// TraceOf reads a trace by its id in any form: prefixed, a bare ULID, or the 32 hex digits of OpenTelemetry. The
// error wraps trace.ErrInvalid for other input, and ErrNotFound.
func TraceOf(ctx context.Context, db postgres.DB, id string) (Trace, error) {
	ids, err := trace.ParseAny(id)
	if err != nil {
		return Trace{}, fmt.Errorf("read trace: %w", err)
	}
	roots, err := rootsOf(ctx, db, words(ids))
	if err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	rows, err := rowsOfTraces(ctx, db, words(ids))
	if err != nil {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, err)
	}
	if len(roots) == 0 && len(rows) == 0 {
		return Trace{}, fmt.Errorf("read trace %s: %w", id, ErrNotFound)
	}
	t := assemble(roots, rows)
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

// root is an execution without a parent. A trace has one; a fork adds another.
type root struct {
	TraceID     string
	Surface     string
	Status      string
	StartedAt   time.Time
	CompletedAt *time.Time
	Open        int64 // children that still run
}

func rootsOf(ctx context.Context, db postgres.DB, traceIDs []string) ([]root, error) {
	return postgres.Rows[root](ctx, db, "read roots of traces", `
		select e.trace_id, e.surface, e.status, coalesce(e.started_at, e.created_at) as started_at, e.completed_at,
		       (select count(*) from agent_executions c
		         where c.trace_id = e.trace_id and c.parent_id is not null and c.completed_at is null) as open
		  from agent_executions e
		 where e.trace_id = any (@trace_ids) and e.parent_id is null
		 order by e.id`,
		perQuery, postgres.Strict{"trace_ids": traceIDs})
}

// assemble builds a trace from roots and rows, at least one of either.
func assemble(roots []root, rows []Row) Trace {
	var t Trace
	if len(roots) > 0 {
		first, last := roots[0], roots[len(roots)-1]
		t = Trace{
			TraceID: first.TraceID, Surface: first.Surface, Status: last.Status, StartedAt: first.StartedAt.UTC(),
			FinishedAt: utc(last.CompletedAt), OpenChildren: last.Open,
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
	t.CostUSD = micros(t.CostUSD)
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
		perQuery, postgres.Strict{"trace_id": traceID}).
		Scan(&used.PromptTokens, &used.CompletionTokens, &used.TotalTokens, &used.Estimated, &costUSD,
			&used.UnknownTokens, &used.UnknownUSD)
	if err != nil {
		return Usage{}, 0, fmt.Errorf("sum spend of trace %s: %w", traceID, err)
	}
	return used, costUSD, nil
}

// micros rounds to millionths of a dollar, as stored.
func micros(usd float64) float64 { return float64(int64(usd*1e6+0.5)) / 1e6 }

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

// TraceFilter selects traces; empty fields select all.
type TraceFilter struct {
	Surface string
	// WithoutEvals leaves out trials of evals, without a Surface.
	WithoutEvals bool

	Agent  string    // of the root execution
	Status string    // likewise
	Since  time.Time // inclusive, to the millisecond
	Limit  int       // 50 when 0, at most MaxLimit
	Cursor string    // from the previous page
}

// TraceSummary is a trace in one line.
type TraceSummary struct {
	ExecutionID string     `json:"execution_id"` // of its root
	TraceID     string     `json:"trace_id"`
	OTelTraceID string     `json:"otel_trace_id" db:"-"`
	Surface     string     `json:"surface"`
	Agent       string     `json:"agent"`
	Flow        string     `json:"flow"`
	Status      string     `json:"status"`
	StartedAt   time.Time  `json:"started_at"`
	FinishedAt  *time.Time `json:"finished_at"`
	DurationMS  *int64     `json:"duration_ms"` // nil while it runs
	Tokens      int64      `json:"tokens"`
	CostUSD     float64    `json:"cost_usd"`
	Activities  int64      `json:"activities"`
	Errors      int64      `json:"errors"`
}

// Traces lists the root executions, newest first, with the sums of their traces, and returns the cursor of the next
// page; empty after the last one. It sums only the rows of the page. Claimed executions are not in the surface's
// index, so they are read separately. The error wraps ErrCursor for an invalid cursor.
func Traces(ctx context.Context, db postgres.DB, f TraceFilter) (page []TraceSummary, next string, err error) {
	last, err := FromCursor(f.Cursor)
	if err != nil {
		return nil, "", fmt.Errorf("list traces: %w", err)
	}
	page, err = postgres.Rows[TraceSummary](ctx, db, "list traces", `
		select r.id as execution_id, r.trace_id, r.surface, r.agent, r.flow, r.status, r.started_at,
		       r.completed_at as finished_at,
		       (extract(epoch from r.completed_at - r.started_at) * 1000)::bigint as duration_ms,
		       t.tokens, t.cost_usd, t.activities, t.errors
		  from (select e.id, e.trace_id, e.surface, e.agent, e.flow, e.status,
		               coalesce(e.started_at, e.created_at) as started_at, e.completed_at
		          from ((select k.id from agent_executions k
		                  where @surface::text = '' and k.parent_id is null and (not @without_evals or k.surface <> 'eval')
		                    and (@status::text = '' or k.status = @status) and (@agent::text = '' or k.agent = @agent)
		                    and (@since::timestamptz is null or k.id >= lanekeeper.agent_uuid7_floor(@since))
		                    and (@before::text is null or k.id < @before::text::uuid)
		                  order by k.id desc limit @limit::int + 1)
		                union all
		                (select k.id from agent_executions k
		                  where k.surface = nullif(@surface::text, '') and k.parent_id is null and k.claimed_by is null
		                    and (@status::text = '' or k.status = @status) and (@agent::text = '' or k.agent = @agent)
		                    and (@since::timestamptz is null or k.id >= lanekeeper.agent_uuid7_floor(@since))
		                    and (@before::text is null or k.id < @before::text::uuid)
		                  order by k.id desc limit @limit::int + 1)
		                union all
		                (select k.id from agent_executions k
		                  where k.surface = nullif(@surface::text, '') and k.parent_id is null and k.claimed_by is not null
		                    and (@status::text = '' or k.status = @status) and (@agent::text = '' or k.agent = @agent)
		                    and (@since::timestamptz is null or k.id >= lanekeeper.agent_uuid7_floor(@since))
		                    and (@before::text is null or k.id < @before::text::uuid)
		                  order by k.id desc limit @limit::int + 1)
		                order by id desc limit @limit::int + 1) p
		         cross join lateral (select * from agent_executions i where i.id = p.id offset 0) e) r
		 cross join lateral (
		       select count(*) as activities, count(*) filter (where a.status = 'error') as errors,
		              coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint as tokens,
		              coalesce(sum(a.cost_usd), 0)::float8 as cost_usd
		         from agent_activity a where a.trace_id = r.trace_id) t
		 order by r.id desc`,
		perQuery, postgres.Strict{
			"surface": f.Surface, "status": f.Status, "agent": f.Agent, "since": timeArg(f.Since), "before": last,
			"limit": pageSize(f.Limit), "without_evals": f.WithoutEvals,
		})
	if err != nil {
		return nil, "", err
	}
	if size := pageSize(f.Limit); len(page) > size {
		page = page[:size]
		next = ToCursor(page[size-1].ExecutionID)
	}
	for i := range page {
		page[i].OTelTraceID = trace.ID(page[i].TraceID).OTel()
		page[i].StartedAt, page[i].FinishedAt = page[i].StartedAt.UTC(), utc(page[i].FinishedAt)
	}
	return page, next, nil
}
