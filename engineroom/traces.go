package engineroom

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	tracesPerPage = 50
	// tracesSummed bounds the rows of one trace that the listing adds up. The sum of a longer trace is a lower bound.
	tracesSummed = 2000
)

// tracesPage lists traces, one a line.
func (room *Room) tracesPage() page {
	return page{
		path: "/traces", name: "traces", navLabel: "Traces", title: "Traces", open: room.openTraces,
		parts: []part{
			room.filtersPart("/traces", "agent"),
			{name: "list", interval: 2 * time.Second, refreshOnActivity: true, load: room.listTraces},
		},
	}
}

// traceFilter holds the filters of the listing.
type traceFilter struct {
	Surface, Status, Agent, Before string
	Trace                          string // as entered
	Errors                         bool   // only traces with a failed action
	timeRange
	ids []string // ids that match Trace; nil if Trace is empty
}

// traceRow is a trace in the listing.
type traceRow struct {
	ExecutionID, TraceID, Surface, Flow, Summary, Status string
	Agent                                                string
	ThreadID                                             *string
	Failed                                               bool // Summary is an error, not a result
	StartedAt                                            time.Time
	FinishedAt                                           *time.Time
	Tokens, Rows, Errors                                 int64
	CostUSD                                              float64
	More                                                 bool // the sums include only the first tracesSummed rows
}

// Took is the duration in short form; empty while the trace runs.
func (r traceRow) Took() string {
	if ms := millisBetween(r.StartedAt, r.FinishedAt); ms != nil {
		return human.Millis(*ms)
	}
	return ""
}

// millisBetween returns the milliseconds between two moments; nil without the second moment.
func millisBetween(from time.Time, to *time.Time) *int64 {
	if to == nil {
		return nil
	}
	return new(max(to.Sub(from).Milliseconds(), 0))
}

// openTraces reads the filters. It rejects an unknown value. Otherwise a reader could mistake the whole list for a
// filtered list.
func (room *Room) openTraces(ctx context.Context, req *pageRequest) (string, error) {
	q, err := filtersOf(req.Query, append([]string{"surface", "status", "agent", "before", "trace", "errors"},
		rangeFilters...)...)
	if err != nil {
		return "", err
	}
	f := traceFilter{
		Surface: q["surface"], Status: q["status"], Agent: q["agent"], Trace: q["trace"], Errors: q["errors"] != "",
	}
	if f.ids, err = room.tracesFor(ctx, f.Trace); err != nil {
		return "", err
	}
	if f.Before, err = req.uuidFilter("before"); err != nil {
		return "", err
	}
	surface, _ := parseExclusion(f.Surface)
	if err := checkOneOf("surface", surface, trace.Surfaces()); err != nil {
		return "", err
	}
	status, _ := parseExclusion(f.Status)
	if err := checkOneOf("status", status, executions.Statuses()); err != nil {
		return "", err
	}
	if err := checkOneOf("errors", q["errors"], []string{"1"}); err != nil {
		return "", err
	}
	f.timeRange, err = req.timeRange()
	req.Subject = f
	return "Traces", err
}

// listTraces reads one page. The surface's index yields the newest traces of each surface, and the index of claims
// yields the claimed traces. Without a filter by id, the query reads no child executions.
func (room *Room) listTraces(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(traceFilter)
	if f.Errors || f.Sort != "" {
		return room.rankedTraces(ctx, req, f)
	}
	list, err := room.readTraces(ctx, f, tracesPerPage)
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, tracesPerPage)
	older := ""
	if more {
		older = req.withParam("before", list[len(list)-1].ExecutionID)
	}
	return traceList(req, f, list, older), nil
}

// traceList is the data of the list.
func traceList(req *pageRequest, f traceFilter, list []traceRow, older string) map[string]any {
	return map[string]any{
		"Traces": list, "Older": older, "Newest": req.withParam("before", ""), "Wanted": f, "Most": int64(tracesSummed),
		"Window": int64(maxSearched), "Ranked": int64(maxRanked),
		"Sampled": slices.ContainsFunc(list, func(r traceRow) bool { return r.More }),
	}
}

// readTraces reads the newest traces of a filter. If more than limit match, it reads one more.
func (room *Room) readTraces(ctx context.Context, f traceFilter, limit int) ([]traceRow, error) {
	from, until := f.bounds(f.Before)
	status, notStatus := parseExclusion(f.Status)
	agent, notAgent := parseExclusion(f.Agent)
	list, err := postgres.Rows[traceRow](ctx, room.Read, "list traces", `
		select r.id::text as execution_id, r.trace_id, r.surface, r.agent, r.flow, r.summary, r.failed, r.thread_id, r.status,
		       r.started_at, r.completed_at as finished_at, t.tokens, t.cost_usd, t.rows, t.errors, t.rows > @max_rows as more
		  from (select e.id, e.trace_id, s.surface, e.agent, e.flow, e.summary, e.failed, e.thread_id, e.status, e.started_at,
		               e.completed_at
		          from unnest(@surfaces::text[]) s (surface)
		         cross join lateral (
		               select x.id, x.trace_id, left(x.agent, 200) as agent, left(x.flow, 200) as flow, x.status,
		                      x.completed_at, left(coalesce(nullif(x.error_message, ''), x.result_summary), 300) as summary,
		                      coalesce(x.error_message, '') <> '' as failed, x.thread_id,
		                      coalesce(x.started_at, x.created_at) as started_at
		                 from ((select k.id from agent_executions k
		                         where k.trace_id = any (@traces::text[]) and k.surface = s.surface and k.parent_id is null
		                           and (@status::text = '' or (k.status = @status) <> @not_status)
		                             and (@agent::text = '' or (k.agent ilike @agent) <> @not_agent)
		                           and k.id >= @from::uuid and k.id < @until::uuid)
		                       union all
		                       (select w.id from (select k.id, k.agent, k.status from agent_executions k
		                         where @traces::text[] is null and k.surface = s.surface and k.parent_id is null
		                           and k.claimed_by is null
		                           and (@status::text = '' or @not_status or k.status = @status)
		                           and k.id >= @from::uuid and k.id < @until::uuid
		                         order by k.id desc limit case when @agent::text = '' and not @not_status then @limit::int + 1
		                           else @searched::int end) w
                         where (@agent::text = '' or (w.agent ilike @agent) <> @not_agent)
                           and (not @not_status or w.status <> @status::text) order by w.id desc limit @limit::int + 1)
		                       union all
		                       (select w.id from (select k.id, k.agent, k.status from agent_executions k
		                         where @traces::text[] is null and k.surface = s.surface and k.parent_id is null
		                           and k.claimed_by is not null
		                           and (@status::text = '' or @not_status or k.status = @status)
		                           and k.id >= @from::uuid and k.id < @until::uuid
		                         order by k.id desc limit case when @agent::text = '' and not @not_status then @limit::int + 1
		                           else @searched::int end) w
                         where (@agent::text = '' or (w.agent ilike @agent) <> @not_agent)
                           and (not @not_status or w.status <> @status::text) order by w.id desc limit @limit::int + 1)
		                       order by id desc limit @limit::int + 1) p
		                cross join lateral (select * from agent_executions i where i.id = p.id offset 0) x) e
		         order by e.id desc limit @limit::int + 1) r
		 cross join lateral (
		       select count(*) as rows, count(*) filter (where a.status = 'error') as errors,
		              coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint as tokens,
		              coalesce(sum(a.cost_usd), 0)::float8 as cost_usd
		         from (select y.status, y.token_usage, y.cost_usd from agent_activity y
		                where y.trace_id = r.trace_id order by y.created_at limit @max_rows::int + 1) a) t
		 order by r.id desc`, customPlan, postgres.Strict{
		"surfaces": f.surfaces(), "status": status, "not_status": notStatus, "agent": containsPattern(agent),
		"not_agent": notAgent,
		"traces":    f.ids, "from": from, "until": until, "limit": limit, "max_rows": tracesSummed, "searched": maxSearched,
	})
	for i := range list {
		if w := &list[i]; !w.Failed {
			hideResult(ctx, &w.Summary, w.Flow, w.Surface, w.ThreadID)
		}
		list[i].Summary = redact.Text(list[i].Summary, 1000)
	}
	return list, err
}

// rankedTraces reads the traces with errors, the slowest traces or the most expensive traces. It searches for failed
// actions among the newest maxRanked rows of the log. For the most expensive, it searches as many model calls; for the
// slowest, as many traces. With errors alone, the next page continues with older rows of the log, and Before is a row's
// id.
func (room *Room) rankedTraces(ctx context.Context, req *pageRequest, f traceFilter) (any, error) {
	from, until := f.bounds(f.Before)
	status, notStatus := parseExclusion(f.Status)
	agent, notAgent := parseExclusion(f.Agent)
	ranked, err := postgres.Rows[rankedTrace](ctx, room.Read, "rank traces", rankedTracesSQL, customPlan, postgres.Strict{
		"sort": f.Sort, "errors": f.Errors, "from": from, "until": until, "searched": maxRanked,
		"surfaces": f.surfaces(), "traces": f.ids, "status": status, "not_status": notStatus,
		"agent": containsPattern(agent), "not_agent": notAgent, "limit": rankedShown,
	})
	if err != nil {
		return nil, err
	}
	ranked, more := firstN(ranked, rankedShown)
	older := ""
	if f.Sort == "" {
		var end string
		if more {
			end = ranked[rankedShown-1].Last
		} else if end, err = room.lastSearchedRow(ctx, from, until); err != nil {
			return nil, err
		}
		if end != "" {
			older = req.withParam("before", end)
		}
	}
	place, shown := map[string]int{}, f
	shown.timeRange, shown.Before, shown.ids = timeRange{}, "", []string{}
	for i, r := range ranked {
		if _, duplicate := place[r.TraceID]; !duplicate { // a trace may have several roots
			place[r.TraceID] = i
			shown.ids = append(shown.ids, r.TraceID)
		}
	}
	rows, err := room.readTraces(ctx, shown, 2*rankedShown)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(rows, func(a, b traceRow) int { return cmp.Compare(place[a.TraceID], place[b.TraceID]) })
	rows = slices.CompactFunc(rows, func(a, b traceRow) bool { return a.TraceID == b.TraceID })
	return traceList(req, f, rows, older), nil
}

// lastSearchedRow returns the id of the last of maxRanked rows of the log; empty for fewer rows.
func (room *Room) lastSearchedRow(ctx context.Context, from, until string) (id string, err error) {
	err = room.Read.QueryRow(ctx, `
		select coalesce((select a.id::text from agent_activity a where a.id >= @from::uuid and a.id < @until::uuid
		  order by a.id desc offset @searched - 1 limit 1), '')`, customPlan,
		postgres.Strict{"from": from, "until": until, "searched": maxRanked}).Scan(&id)
	if err != nil {
		return "", fmt.Errorf("find the last searched row: %w", err)
	}
	return id, nil
}

// rankedTrace is a trace in the order of rankedTracesSQL. Last is the newest failed action; empty without a search for
// errors.
type rankedTrace struct{ TraceID, Last string }

const rankedTracesSQL = `
	with failed as materialized (
	  select a.trace_id, max(a.id::text) as last from (
	    select y.trace_id, y.id, y.status from agent_activity y
	     where @errors and y.id >= @from::uuid and y.id < @until::uuid order by y.id desc limit @searched) a
	   where a.status = 'error' group by a.trace_id),
	spent as materialized (
	  select c.trace_id, sum(c.cost_usd) as cost from (
	    select y.trace_id, y.cost_usd from agent_activity y
	     where @sort = 'cost' and y.skill_name between 'model_call' and 'model_call' and y.id >= @from::uuid
	       and y.id < @until::uuid order by y.skill_name desc, y.id desc limit @searched) c
	   where c.cost_usd > 0 group by c.trace_id),
	newest as (
	  select k.id from unnest(@surfaces::text[]) s (surface) cross join lateral (
	    (select x.id from agent_executions x
	      where @sort = 'took' and not @errors and x.surface between s.surface and s.surface and x.parent_id is null
	        and x.claimed_by is null
	        and x.id >= @from::uuid and x.id < @until::uuid order by x.surface desc, x.id desc limit @searched)
	    union all
	    (select x.id from agent_executions x
	      where @sort = 'took' and not @errors and x.surface between s.surface and s.surface and x.parent_id is null
	        and x.claimed_by is not null and x.id >= @from::uuid and x.id < @until::uuid
	      order by x.surface desc, x.id desc limit @searched)) k
	   order by k.id desc limit @searched),
	found as (
	  select f.trace_id, f.last, 0::numeric as cost, null::uuid as root from failed f where @sort <> 'cost'
	  union all
	  select s.trace_id, '', s.cost, null from spent s where not @errors or s.trace_id in (select f.trace_id from failed f)
	  union all
	  select null, '', 0::numeric, n.id from newest n)
	select e.trace_id, f.last from found f
	 cross join lateral (
	   select coalesce(f.root, (select k.id from agent_executions k
	     where k.trace_id = f.trace_id and k.parent_id is null order by k.id limit 1)) as id) r
	 cross join lateral (select i.* from agent_executions i where i.id = r.id offset 0) e
	 where e.id >= @from::uuid and e.id < @until::uuid and e.surface = any (@surfaces::text[])
	   and (@status::text = '' or (e.status = @status) <> @not_status)
	   and (@agent::text = '' or (e.agent ilike @agent) <> @not_agent)
	   and (@traces::text[] is null or e.trace_id = any (@traces))
	   and (@sort <> 'took' or e.completed_at is not null or e.status = 'running')
	 order by f.cost desc, case when @sort = 'took'
	            then coalesce(e.completed_at, clock_timestamp()) - coalesce(e.started_at, e.created_at) end desc,
	            f.last desc
	 limit @limit + 1`

// surfaces returns the surfaces of the listing.
func (f traceFilter) surfaces() []string {
	switch surface, excluded := parseExclusion(f.Surface); {
	case surface == "":
		return trace.Surfaces()
	case excluded:
		return slices.DeleteFunc(trace.Surfaces(), func(name string) bool { return name == surface })
	default:
		return []string{surface}
	}
}

// Surfaces are the options of Surface.
func (traceFilter) Surfaces() []string { return trace.Surfaces() }

// States are the options of Status. A line has the status of its root run.
func (traceFilter) States() []string { return executions.Statuses() }

// Narrowed reports whether a filter is set.
func (f traceFilter) Narrowed() bool {
	return f.Surface != "" || f.Status != "" || f.Agent != "" || f.Bounded() || f.Before != "" ||
		f.Trace != "" || f.Errors
}
