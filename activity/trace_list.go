package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

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
		customPlan, postgres.Strict{
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
