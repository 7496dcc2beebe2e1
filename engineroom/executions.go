package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	// executionsShown bounds the executions on a page.
	executionsShown = 50
	// maxSearched bounds the rows per page that the leading filter's index yields and all other filters check. A rare
	// combination of filters takes several pages instead of a table scan.
	maxSearched = 20_000
	// maxCount bounds the counts of executions.
	maxCount = 1000
)

// executionsPage lists executions and the queue.
func (room *Room) executionsPage() page {
	return page{
		path: "/executions", name: "executions", navLabel: "Executions", title: "Executions", open: room.openExecutions,
		parallel: true,
		parts: []part{
			{name: "states", interval: 2 * time.Second, load: room.executionStates},
			room.filtersPart("/executions", "flow", "agent"),
			{name: "list", interval: 2 * time.Second, load: room.listExecutions},
			{name: "bulk", load: room.bulkActions}, // an update would lose typed text
			{name: "queue", interval: 2 * time.Second, load: room.executionQueue},
		},
	}
}

// executionRow is an execution in a listing.
type executionRow struct {
	ID, TraceID, Surface, Flow, Status string
	Agent                              string
	ParentID, ThreadID, ForkedFrom     *string
	Children                           bool // it has children
	Priority, Attempt, MaxAttempts     int
	WaitingFor, WaitingKey             string
	WaitingUntil                       *time.Time
	About                              string
	AboutBytes                         int64
	Failed                             bool // About is an error, not a result
	CreatedAt, UpdatedAt               time.Time
	CompletedAt                        *time.Time
	Costs                              []float64 // the cost and the number of its first maxCosted + 1 actions
}

// maxCosted bounds the actions whose cost a listing sums up exactly.
const maxCosted = 500

// CostUSD is the cost of its first actions.
func (x executionRow) CostUSD() float64 { return x.Costs[0] }

// CostsMore reports whether CostUSD is a lower bound.
func (x executionRow) CostsMore() bool { return x.Costs[1] > maxCosted }

// executionRowColumns are the columns of executionRow, of agent_executions e. They cut long values. The test for
// children follows the index order, so the planner cannot choose a table scan.
const executionRowColumns = ` e.id::text, e.trace_id, e.surface, e.flow, e.status, left(e.agent, 200) as agent,
	e.parent_id::text, e.thread_id, e.forked_from::text,
	coalesce((select c.parent_id = e.id from agent_executions c where c.parent_id >= e.id order by c.parent_id limit 1),
	         false) as children,
	e.priority, e.attempt, e.max_attempts,
	coalesce(e.waiting_for, '') as waiting_for, left(coalesce(e.waiting_key, ''), 600) as waiting_key, e.waiting_until,
	left(coalesce(e.error_message, e.result_summary), 600) as about,
	octet_length(coalesce(e.error_message, e.result_summary)) as about_bytes, e.error_message is not null as failed,
	e.created_at, e.updated_at, e.completed_at,
	(select array[coalesce(sum(m.cost_usd), 0)::float8, count(*)] from (select a.cost_usd from agent_activity a
	   where a.execution_id = e.id and a.id >= e.id order by a.id limit 501) m) as costs `

// Took is its duration in milliseconds.
func (x executionRow) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// collectExecutions reads rows of a listing, redacted.
func collectExecutions(ctx context.Context, rows pgx.Rows, err error) ([]executionRow, error) {
	list, err := postgres.Collect(rows, err, "list executions", pgx.RowToStructByName[executionRow])
	if err != nil {
		return nil, err
	}
	for i := range list {
		if x := &list[i]; !x.Failed {
			hideResult(ctx, &x.About, x.Flow, x.Surface, x.ThreadID)
		}
		list[i].About = clip(redact.Text(list[i].About, maxValue), list[i].AboutBytes, 160)
		list[i].WaitingKey = cut(120, redact.Text(list[i].WaitingKey, maxValue))
	}
	return list, nil
}

// runningID returns the id of a running row, for haltRunning; empty for other rows.
func (l *executionList) runningID(i int) string {
	if x := l.Rows[i]; x.Status == "running" {
		return x.ID
	}
	return ""
}

// markLost marks a row with a lost worker. A row without a claim is ready again.
func (l *executionList) markLost(i int, h halt) {
	if h.State == stateLost && !h.Unclaimed {
		l.Rows[i].Status = h.State
	}
}

// executionList is a page of the listing.
type executionList struct {
	executionFilter
	Rows []executionRow
	// Older links to the next page; empty for none. Farther means that this page reached its bound of Window rows, so the
	// next page may be empty.
	Older   string
	Farther bool
	Window  int64
}

// candidateColumns are the columns that the listing's filters and orders read, with their table.
const candidateColumns = `x.id, x.trace_id, x.status, x.surface, x.flow, x.agent, x.created_at, x.completed_at
	  from agent_executions x`

// executionCandidates are the rows that the leading filter yields, within the period, newest first.
const executionCandidates = `
	(select ` + candidateColumns + `
	  where @by = 'trace' and x.trace_id = any (@traces) and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)
	union all
	(select ` + candidateColumns + `
	  where @by = 'trace' and x.id = any (@ids::text[]::uuid[]) and x.trace_id <> all (@traces)
	    and x.id >= @from::uuid and x.id < @until::uuid order by x.id desc limit @searched)
	union all
	(select ` + candidateColumns + `
	  where @by = 'label' and x.id = any (array(
	    select b.execution_id from agent_execution_labels b
	     where b.value = @label and (@label_name = '' or b.name = @label_name)
	       and b.execution_id >= @from::uuid and b.execution_id < @until::uuid
	     order by b.execution_id desc limit @searched)))
	union all
	(select ` + candidateColumns + `
	  where @by = 'status' and x.status = @status and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)
	union all
	(select ` + candidateColumns + `
	  where @by = 'failed' and x.status = 'failed' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)
	union all
	(select ` + candidateColumns + `
	  where @by = 'failed' and x.status = 'timeout' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)
	union all
	(select x.* from unnest(@flows::text[]) f (name) cross join lateral (
	  select ` + candidateColumns + `
	   where @by = 'flow' and x.flow = f.name and x.claimed_by is null
	     and x.id >= @from::uuid and x.id < @until::uuid
	   order by x.id desc limit @searched_flow) x)
	union all
	(select ` + candidateColumns + `
	  where @by = 'flow' and x.flow = any (@flows) and x.claimed_by is not null
	    and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)
	union all
	(select ` + candidateColumns + `
	  where @by = 'newest' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @searched)`

// executionConditions has all other filters, for candidates w. Each filter may exclude its value.
const executionConditions = `
	(@status = '' or (w.status = @status) <> @not_status) and (not @failed or w.status in ('failed', 'timeout'))
	and (@surface = '' or (w.surface = @surface) <> @not_surface)
	and (@flows::text[] is null or (w.flow = any (@flows)) <> @not_flow)
	and (@agent = '' or (w.agent ilike @agent) <> @not_agent)
	and (@label = '' or exists (
	  select from agent_execution_labels b
	   where b.execution_id = w.id and b.value = @label and (@label_name = '' or b.name = @label_name)))`

// listExecutions reads a page of the listing.
func (room *Room) listExecutions(ctx context.Context, req *pageRequest) (any, error) {
	f := req.Subject.(executionFilter)
	switch {
	case f.View != "":
		return room.listWaiting(ctx, req)
	case f.Sort != "":
		return room.rankExecutions(ctx, f)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select w.id from (
`+executionCandidates+`) w
		  where `+executionConditions+`
		  order by w.id desc limit @limit + 1) p
		  join agent_executions e on e.id = p.id
		 order by e.id desc`, customPlan, f.args(maxSearched, executionsShown))
	result := executionList{executionFilter: f, Window: maxSearched}
	if result.Rows, err = collectExecutions(ctx, rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(result.Rows), result.runningID, result.markLost)
	}
	if err != nil {
		return nil, err
	}
	if len(result.Rows) > executionsShown {
		result.Rows = result.Rows[:executionsShown]
		result.Older = req.withParam("before", result.Rows[executionsShown-1].ID)
		return result, nil
	}
	return room.lastSearched(ctx, req, result)
}

// rankExecutions reads the slowest of the newest maxRanked executions, or the most expensive by the newest maxRanked
// model calls.
func (room *Room) rankExecutions(ctx context.Context, f executionFilter) (any, error) {
	args := f.args(maxRanked, rankedShown)
	var rows pgx.Rows
	var err error
	if f.Sort == byTook {
		rows, err = room.Read.Query(ctx, `
			select w.id::text from (
`+executionCandidates+`) w
			 where (w.completed_at is not null or w.status = 'running') and `+executionConditions+`
			 order by coalesce(w.completed_at, clock_timestamp()) - w.created_at desc, w.id desc limit @limit`, customPlan, args)
	} else {
		for _, unused := range []string{"by", "searched_flow"} {
			delete(args, unused)
		}
		rows, err = room.Read.Query(ctx, `
			select w.id::text from (
			  select c.execution_id, sum(c.cost_usd) as cost from (
			    select a.execution_id, a.cost_usd from agent_activity a
			     where a.skill_name between 'model_call' and 'model_call' and a.id >= @from::uuid and a.id < @until::uuid
			     order by a.skill_name desc, a.id desc limit @searched) c
			   where c.cost_usd > 0 group by c.execution_id) c
			 cross join lateral (select * from agent_executions x where x.id = c.execution_id offset 0) w
			 where w.id >= @from::uuid and w.id < @until::uuid and `+executionConditions+`
			   and (@traces::text[] is null or w.trace_id = any (@traces) or w.id = any (@ids::text[]::uuid[]))
			 order by c.cost desc, w.id desc limit @limit`, customPlan, args)
	}
	ids, err := postgres.Collect(rows, err, "rank executions", pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	rows, err = room.Read.Query(ctx, `
		select `+executionRowColumns+` from unnest(@ids::text[]::uuid[]) with ordinality p (id, place)
		  join agent_executions e on e.id = p.id order by p.place`, customPlan, postgres.Strict{"ids": ids})
	result := executionList{executionFilter: f, Window: maxRanked}
	if result.Rows, err = collectExecutions(ctx, rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(result.Rows), result.runningID, result.markLost)
	}
	return result, err
}

// lastSearched finds the last searched row of a page, if more rows follow. Later rows of any state belong to the next
// page, so no row is on both pages.
func (room *Room) lastSearched(ctx context.Context, req *pageRequest, result executionList) (executionList, error) {
	f := result.executionFilter
	if f.searchesAll() {
		return result, nil
	}
	var end string
	from, until := f.bounds(f.Before)
	name, label := executions.ParseLabel(f.Label)
	err := room.Read.QueryRow(ctx, `
		select coalesce((select w.id::text from (
		  (select b.execution_id as id from agent_execution_labels b
		    where @by = 'label' and b.value = @label and (@label_name = '' or b.name = @label_name)
		      and b.execution_id >= @from::uuid and b.execution_id < @until::uuid
		    order by b.execution_id desc offset @searched - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'status' and x.status = @status and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched - 1 limit 1)
		  union all
		  (select x.id from unnest(@flows::text[]) f (name) cross join lateral (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = f.name and x.claimed_by is null
		      and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched_flow - 1 limit 1) x)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = any (@flows) and x.claimed_by is not null
		      and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'newest' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @searched - 1 limit 1)) w
		 order by w.id desc limit 1), '')`, customPlan,
		postgres.Strict{
			"by": f.leadingFilter(), "status": f.Status, "flows": f.flows, "from": from, "until": until,
			"searched": maxSearched, "searched_flow": f.searchedPerFlow(maxSearched), "label": label, "label_name": name,
		}).Scan(&end)
	if err != nil {
		return result, fmt.Errorf("read how far the search went: %w", err)
	}
	if end == "" {
		return result, nil
	}
	for len(result.Rows) > 0 && result.Rows[len(result.Rows)-1].ID < end {
		result.Rows = result.Rows[:len(result.Rows)-1]
	}
	result.Older, result.Farther = req.withParam("before", end), true
	return result, nil
}

// listWaiting reads waiting executions by deadline, or stuck executions. Other filters apply to the maxSearched
// nearest.
func (room *Room) listWaiting(ctx context.Context, req *pageRequest) (any, error) {
	f := req.Subject.(executionFilter)
	args := f.args(maxSearched, executionsShown)
	args["from"], args["until"] = f.bounds("")
	args["view"], args["kind"], args["after"], args["before"] = f.View, f.Kind, f.after, f.Before
	for _, unused := range []string{"by", "searched_flow", "status", "not_status", "failed"} {
		delete(args, unused)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select l.id, l.waiting_until from (
		  (select w.id, w.waiting_until, w.waiting_for, w.surface, w.flow, w.agent, w.trace_id from agent_executions w
		    where w.status = 'waiting' and @view = 'waiting'
		      and (@after::timestamptz is null or (w.waiting_until, w.id) > (@after, nullif(@before, '')::uuid))
		    order by w.waiting_until, w.id limit @searched)
		  union all
		  (select s.id, s.waiting_until, s.waiting_for, s.surface, s.flow, s.agent, s.trace_id from agent_executions_stuck s
		    where @view = 'stuck' and s.waiting_until <= now()
		      and (@after::timestamptz is null or (s.waiting_until, s.id) > (@after, nullif(@before, '')::uuid))
		    order by s.waiting_until, s.id limit @searched)) l
		   where (@kind = '' or l.waiting_for = @kind) and (@surface = '' or (l.surface = @surface) <> @not_surface)
		     and (@flows::text[] is null or (l.flow = any (@flows)) <> @not_flow)
		     and (@agent = '' or (l.agent ilike @agent) <> @not_agent)
		     and (@label = '' or exists (
		       select from agent_execution_labels b
		        where b.execution_id = l.id and b.value = @label and (@label_name = '' or b.name = @label_name)))
		     and l.id >= @from::uuid and l.id < @until::uuid
		       and (@traces::text[] is null or l.trace_id = any (@traces) or l.id = any (@ids::text[]::uuid[]))
		   order by l.waiting_until, l.id limit @limit + 1) p
		  join agent_executions e on e.id = p.id
		 order by p.waiting_until, p.id`, customPlan,
		args)
	result := executionList{executionFilter: f, Window: maxSearched}
	if result.Rows, err = collectExecutions(ctx, rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(result.Rows), result.runningID, result.markLost)
	}
	if err != nil {
		return nil, err
	}
	if len(result.Rows) > executionsShown {
		result.Rows = result.Rows[:executionsShown]
		last := result.Rows[executionsShown-1]
		if last.WaitingUntil != nil { // the execution may have resumed meanwhile
			result.Older = req.withParam("before", timeCursor{*last.WaitingUntil, last.ID}.String())
		}
	}
	return result, nil
}
