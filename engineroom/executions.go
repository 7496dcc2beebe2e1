package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	// executionsShown is how many executions are on a page of the listing.
	executionsShown = 50
	// lookedAt is how many rows that one filter finds are looked at for the others, per page: a rare combination of
	// filters takes several pages, never a walk through the whole table.
	lookedAt = 20_000
	// countedMost is up to where executions are counted.
	countedMost = 1000
)

// executionsPage lists durable runs, and what stands in the queue.
func (room *Room) executionsPage() page {
	return page{
		path: "/executions", name: "executions", nav: "Executions", title: "Executions", open: openExecutions,
		parts: []part{
			{name: "states", every: 2 * time.Second, load: room.executionStates},
			{name: "list", every: 2 * time.Second, load: room.listExecutions},
			{name: "queue", every: 2 * time.Second, load: room.executionQueue},
		},
	}
}

// executionRow is an execution in a listing.
type executionRow struct {
	ID, TraceID, Surface, Flow, Status string
	Agent                              string
	ParentID, ThreadID, ForkedFrom     *string
	Children                           bool // it has started others
	Priority, Attempt, MaxAttempts     int
	WaitingFor, WaitingKey             string
	WaitingUntil                       *time.Time
	About                              string
	AboutBytes                         int64
	CreatedAt, UpdatedAt               time.Time
	CompletedAt                        *time.Time
}

// executionRowColumns are those of executionRow, of agent_executions e. What can be long is cut here. Whether there are children
// is asked for in the order of the index, so that no guess of the planner makes it a walk through the table.
const executionRowColumns = ` e.id::text, e.trace_id, e.surface, e.flow, e.status, left(e.agent, 200) as agent, e.parent_id::text, e.thread_id, e.forked_from::text,
	coalesce((select c.parent_id = e.id from agent_executions c where c.parent_id >= e.id order by c.parent_id limit 1), false) as children, e.priority, e.attempt, e.max_attempts,
	coalesce(e.waiting_for, '') as waiting_for, left(coalesce(e.waiting_key, ''), 600) as waiting_key, e.waiting_until,
	left(coalesce(e.error_message, e.result_summary), 600) as about, octet_length(coalesce(e.error_message, e.result_summary)) as about_bytes,
	e.created_at, e.updated_at, e.completed_at `

// Took is how long it took from its beginning to its end, in milliseconds.
func (x executionRow) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// TraceEnd is the end of the trace's id, enough to tell it from its neighbours.
func (x executionRow) TraceEnd() string { return "…" + x.TraceID[max(len(x.TraceID)-6, 0):] }

// collectExecutions reads rows of a listing, without secrets.
func collectExecutions(rows pgx.Rows, err error) ([]executionRow, error) {
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[executionRow])
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	for i := range list {
		list[i].About = clip(redact.Text(list[i].About, maxValue), list[i].AboutBytes, 160)
		list[i].WaitingKey = cut(120, redact.Text(list[i].WaitingKey, maxValue))
	}
	return list, nil
}

// executionList is a page of the listing.
type executionList struct {
	executionFilter
	Rows []executionRow
	// Older leads to the next page; Farther says that it is not known whether anything is there, because this page has
	// looked at as many rows as a page may.
	Older   string
	Farther bool
	Window  int64
}

// listExecutions reads a page of the listing.
func (room *Room) listExecutions(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	if f.View != "" {
		return room.listWaiting(ctx, f)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select w.id from (
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'trace' and x.trace_id = any (@traces) and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'status' and x.status = @status and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is not null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'newest' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)) w
		  where (@status = '' or w.status = @status) and (not @failed or w.status in ('failed', 'timeout'))
		    and (@surface = '' or w.surface = @surface) and (@flow = '' or w.flow = @flow) and (@agent = '' or w.agent = @agent)
		  order by w.id desc limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by e.id desc`, freshPlan,
		postgres.Strict{
			"by": f.by(), "traces": f.traces, "before": f.Before, "looked": lookedAt, "status": f.Status, "failed": f.Failed,
			"surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "most": executionsShown,
		})
	got := executionList{executionFilter: f, Window: lookedAt}
	if got.Rows, err = collectExecutions(rows, err); err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		got.Older = f.with("before", got.Rows[executionsShown-1].ID)
		return got, nil
	}
	return room.farther(ctx, f, got)
}

// farther finds where the rows end that a page has looked at, when there are more. What lies beyond is left to the next
// page, also what one of two states has there, so that no row is on both.
func (room *Room) farther(ctx context.Context, f executionFilter, got executionList) (executionList, error) {
	if f.narrow() {
		return got, nil
	}
	var end string
	err := room.Read.QueryRow(ctx, `
		select coalesce((select w.id::text from (
		  (select x.id from agent_executions x
		    where @by = 'status' and x.status = @status and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is not null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'newest' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)) w
		 order by w.id desc limit 1), '')`, freshPlan,
		postgres.Strict{"by": f.by(), "status": f.Status, "flow": f.Flow, "before": f.Before, "looked": lookedAt}).Scan(&end)
	if err != nil {
		return got, fmt.Errorf("look how far executions were looked at: %w", err)
	}
	if end == "" {
		return got, nil
	}
	for len(got.Rows) > 0 && got.Rows[len(got.Rows)-1].ID < end {
		got.Rows = got.Rows[:len(got.Rows)-1]
	}
	got.Older, got.Farther = f.with("before", end), true
	return got, nil
}

// listWaiting reads what waits, the nearest deadline first, or what is stuck. Other filters narrow down the lookedAt nearest.
func (room *Room) listWaiting(ctx context.Context, f executionFilter) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select l.id, l.waiting_until from (
		  (select w.id, w.waiting_until, w.waiting_for, w.surface, w.flow, w.agent, w.trace_id from agent_executions w
		    where w.status = 'waiting' and @view = 'waiting' and (@after::timestamptz is null or (w.waiting_until, w.id) > (@after, nullif(@before, '')::uuid))
		    order by w.waiting_until, w.id limit @looked)
		  union all
		  (select s.id, s.waiting_until, s.waiting_for, s.surface, s.flow, s.agent, s.trace_id from agent_executions_stuck s
		    where @view = 'stuck' and s.waiting_until <= now() and (@after::timestamptz is null or (s.waiting_until, s.id) > (@after, nullif(@before, '')::uuid))
		    order by s.waiting_until, s.id limit @looked)) l
		   where (@kind = '' or l.waiting_for = @kind) and (@surface = '' or l.surface = @surface)
		     and (@flow = '' or l.flow = @flow) and (@agent = '' or l.agent = @agent) and (@traces::text[] is null or l.trace_id = any (@traces))
		   order by l.waiting_until, l.id limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by p.waiting_until, p.id`, freshPlan,
		postgres.Strict{
			"view": f.View, "kind": f.Kind, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "traces": f.traces, "after": f.after,
			"before": f.Before, "most": executionsShown, "looked": lookedAt,
		})
	got := executionList{executionFilter: f, Window: lookedAt}
	if got.Rows, err = collectExecutions(rows, err); err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		last := got.Rows[executionsShown-1]
		if last.WaitingUntil != nil { // it may have gone on meanwhile
			got.Older = f.with("before", last.WaitingUntil.UTC().Format(time.RFC3339Nano)+" "+last.ID)
		}
	}
	return got, nil
}
