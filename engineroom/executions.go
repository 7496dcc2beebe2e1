package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	// executionsShown bounds the executions on a page.
	executionsShown = 50
	// maxSearched bounds the rows that one filter's index yields for the other filters, per page. A rare combination of
	// filters takes several pages instead of a table scan.
	maxSearched = 20_000
	// maxCount bounds the counts of executions.
	maxCount = 1000
)

// executionsPage lists executions and the queue.
func (room *Room) executionsPage() page {
	return page{
		path: "/executions", name: "executions", nav: "Executions", title: "Executions", open: room.openExecutions,
		parallel: true,
		parts: []part{
			{name: "states", every: 2 * time.Second, load: room.executionStates},
			room.filtersPart("/executions", "flow", "agent"),
			{name: "list", every: 2 * time.Second, load: room.listExecutions},
			{name: "bulk", load: room.bulkActions}, // somebody may be typing
			{name: "queue", every: 2 * time.Second, load: room.executionQueue},
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
	CreatedAt, UpdatedAt               time.Time
	CompletedAt                        *time.Time
	CostUSD                            float64 // of its first 500 model calls and other actions
}

// executionRowColumns are the columns of executionRow, of agent_executions e. Long ones are cut. The test for
// children follows the index order, so that the planner cannot choose a table scan.
const executionRowColumns = ` e.id::text, e.trace_id, e.surface, e.flow, e.status, left(e.agent, 200) as agent, e.parent_id::text, e.thread_id, e.forked_from::text,
	coalesce((select c.parent_id = e.id from agent_executions c where c.parent_id >= e.id order by c.parent_id limit 1), false) as children, e.priority, e.attempt, e.max_attempts,
	coalesce(e.waiting_for, '') as waiting_for, left(coalesce(e.waiting_key, ''), 600) as waiting_key, e.waiting_until,
	left(coalesce(e.error_message, e.result_summary), 600) as about, octet_length(coalesce(e.error_message, e.result_summary)) as about_bytes,
	e.created_at, e.updated_at, e.completed_at,
	(select coalesce(sum(m.cost_usd), 0)::float8 from (select a.cost_usd from agent_activity a
	   where a.execution_id = e.id and a.id >= e.id order by a.id limit 500) m) as cost_usd `

// Took is its duration in milliseconds.
func (x executionRow) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// TraceEnd is the end of the trace's id.
func (x executionRow) TraceEnd() string { return "…" + x.TraceID[max(len(x.TraceID)-6, 0):] }

// collectExecutions reads rows of a listing, redacted.
func collectExecutions(rows pgx.Rows, err error) ([]executionRow, error) {
	list, err := postgres.Collect(rows, err, "list executions", pgx.RowToStructByName[executionRow])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].About = clip(redact.Text(list[i].About, maxValue), list[i].AboutBytes, 160)
		list[i].WaitingKey = cut(120, redact.Text(list[i].WaitingKey, maxValue))
	}
	return list, nil
}

// running returns the id of a running row, for haltRunning.
func (l *executionList) running(i int) string {
	if x := l.Rows[i]; x.Status == "running" {
		return x.ID
	}
	return ""
}

// lose marks a row whose worker is lost. One without a claim is ready again.
func (l *executionList) lose(i int, h halt) {
	if h.State == stateLost && !h.Unclaimed {
		l.Rows[i].Status = h.State
	}
}

// executionList is a page of the listing.
type executionList struct {
	executionFilter
	Rows []executionRow
	// Older links to the next page. Farther means that this page reached its bound of rows, so the next page may be
	// empty.
	Older   string
	Farther bool
	Window  int64
}

// candidateColumns are what the filters and the orders of the listing read.
const candidateColumns = `x.id, x.trace_id, x.status, x.surface, x.flow, x.agent, x.created_at, x.completed_at from agent_executions x`

// executionCandidates are the rows that the leading filter yields, within the period, newest first.
const executionCandidates = `
	(select ` + candidateColumns + `
	  where @by = 'trace' and x.trace_id = any (@traces) and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)
	union all
	(select ` + candidateColumns + `
	  where @by = 'trace' and x.id = any (@ids::text[]::uuid[]) and x.trace_id <> all (@traces)
	    and x.id >= @from::uuid and x.id < @until::uuid order by x.id desc limit @looked)
	union all
	(select ` + candidateColumns + `
	  where @by = 'label' and x.id = any (array(
	    select b.execution_id from agent_execution_labels b
	     where b.value = @label and (@label_name = '' or b.name = @label_name)
	       and b.execution_id >= @from::uuid and b.execution_id < @until::uuid
	     order by b.execution_id desc limit @looked)))
	union all
	(select ` + candidateColumns + `
	  where @by = 'status' and x.status = @status and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)
	union all
	(select ` + candidateColumns + `
	  where @by = 'failed' and x.status = 'failed' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)
	union all
	(select ` + candidateColumns + `
	  where @by = 'failed' and x.status = 'timeout' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)
	union all
	(select x.* from unnest(@flows::text[]) f (name) cross join lateral (
	  select ` + candidateColumns + `
	   where @by = 'flow' and x.flow = f.name and x.claimed_by is null
	     and x.id >= @from::uuid and x.id < @until::uuid
	   order by x.id desc limit @looked_flow) x)
	union all
	(select ` + candidateColumns + `
	  where @by = 'flow' and x.flow = any (@flows) and x.claimed_by is not null
	    and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)
	union all
	(select ` + candidateColumns + `
	  where @by = 'newest' and x.id >= @from::uuid and x.id < @until::uuid
	  order by x.id desc limit @looked)`

// executionWanted are the other filters, of candidates w. Each may exclude its value.
const executionWanted = `
	(@status = '' or (w.status = @status) <> @not_status) and (not @failed or w.status in ('failed', 'timeout'))
	and (@surface = '' or (w.surface = @surface) <> @not_surface)
	and (@flows::text[] is null or (w.flow = any (@flows)) <> @not_flow)
	and (@agent = '' or (w.agent ilike @agent) <> @not_agent)
	and (@label = '' or exists (
	  select from agent_execution_labels b
	   where b.execution_id = w.id and b.value = @label and (@label_name = '' or b.name = @label_name)))`

// listExecutions reads a page of the listing.
func (room *Room) listExecutions(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	switch {
	case f.View != "":
		return room.listWaiting(ctx, f)
	case f.Sort != "":
		return room.rankExecutions(ctx, f)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select w.id from (
`+executionCandidates+`) w
		  where `+executionWanted+`
		  order by w.id desc limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by e.id desc`, freshPlan,
		f.wanted(maxSearched, executionsShown))
	got := executionList{executionFilter: f, Window: maxSearched}
	if got.Rows, err = collectExecutions(rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(got.Rows), got.running, got.lose)
	}
	if err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		got.Older = f.with("before", got.Rows[executionsShown-1].ID)
		return got, nil
	}
	return room.lastSearched(ctx, f, got)
}

// rankExecutions reads the slowest or the dearest executions of the newest maxRanked, or of their model calls.
func (room *Room) rankExecutions(ctx context.Context, f executionFilter) (any, error) {
	args := f.wanted(maxRanked, rankedShown)
	var rows pgx.Rows
	var err error
	if f.Sort == byTook {
		rows, err = room.Read.Query(ctx, `
			select w.id::text from (
`+executionCandidates+`) w
			 where (w.completed_at is not null or w.status = 'running') and `+executionWanted+`
			 order by coalesce(w.completed_at, clock_timestamp()) - w.created_at desc, w.id desc limit @most`, freshPlan, args)
	} else {
		for _, unused := range []string{"by", "looked_flow"} {
			delete(args, unused)
		}
		rows, err = room.Read.Query(ctx, `
			select w.id::text from (
			  select c.execution_id, sum(c.cost_usd) as cost from (
			    select a.execution_id, a.cost_usd from agent_activity a
			     where a.skill_name between 'model_call' and 'model_call' and a.id >= @from::uuid and a.id < @until::uuid
			     order by a.skill_name desc, a.id desc limit @looked) c
			   where c.cost_usd > 0 group by c.execution_id) c
			 cross join lateral (select * from agent_executions x where x.id = c.execution_id offset 0) w
			 where w.id >= @from::uuid and w.id < @until::uuid and `+executionWanted+`
			   and (@traces::text[] is null or w.trace_id = any (@traces) or w.id = any (@ids::text[]::uuid[]))
			 order by c.cost desc, w.id desc limit @most`, freshPlan, args)
	}
	ids, err := postgres.Collect(rows, err, "rank executions", pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	rows, err = room.Read.Query(ctx, `
		select `+executionRowColumns+` from unnest(@ids::text[]::uuid[]) with ordinality p (id, place)
		  join agent_executions e on e.id = p.id order by p.place`, freshPlan, postgres.Strict{"ids": ids})
	got := executionList{executionFilter: f, Window: maxRanked}
	if got.Rows, err = collectExecutions(rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(got.Rows), got.running, got.lose)
	}
	return got, err
}

// lastSearched finds the last searched row of a page, if there are more. Rows beyond it belong to the next page, also
// those of another state, so that no row is on both.
func (room *Room) lastSearched(ctx context.Context, f executionFilter, got executionList) (executionList, error) {
	if f.searchesAll() {
		return got, nil
	}
	var end string
	from, until := f.bounds(f.Before)
	name, label := executions.ParseLabel(f.Label)
	err := room.Read.QueryRow(ctx, `
		select coalesce((select w.id::text from (
		  (select b.execution_id as id from agent_execution_labels b
		    where @by = 'label' and b.value = @label and (@label_name = '' or b.name = @label_name)
		      and b.execution_id >= @from::uuid and b.execution_id < @until::uuid
		    order by b.execution_id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'status' and x.status = @status and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from unnest(@flows::text[]) f (name) cross join lateral (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = f.name and x.claimed_by is null
		      and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked_flow - 1 limit 1) x)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = any (@flows) and x.claimed_by is not null
		      and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'newest' and x.id >= @from::uuid and x.id < @until::uuid
		    order by x.id desc offset @looked - 1 limit 1)) w
		 order by w.id desc limit 1), '')`, freshPlan,
		postgres.Strict{
			"by": f.leadingFilter(), "status": f.Status, "flows": f.flows, "from": from, "until": until,
			"looked": maxSearched, "looked_flow": f.perFlow(maxSearched), "label": label, "label_name": name,
		}).Scan(&end)
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

// listWaiting reads waiting executions by deadline, or stuck ones. Other filters apply to the maxSearched nearest.
func (room *Room) listWaiting(ctx context.Context, f executionFilter) (any, error) {
	args := f.wanted(maxSearched, executionsShown)
	args["from"], args["until"] = f.bounds("")
	args["view"], args["kind"], args["after"], args["before"] = f.View, f.Kind, f.after, f.Before
	for _, unused := range []string{"by", "looked_flow", "status", "not_status", "failed"} {
		delete(args, unused)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select l.id, l.waiting_until from (
		  (select w.id, w.waiting_until, w.waiting_for, w.surface, w.flow, w.agent, w.trace_id from agent_executions w
		    where w.status = 'waiting' and @view = 'waiting'
		      and (@after::timestamptz is null or (w.waiting_until, w.id) > (@after, nullif(@before, '')::uuid))
		    order by w.waiting_until, w.id limit @looked)
		  union all
		  (select s.id, s.waiting_until, s.waiting_for, s.surface, s.flow, s.agent, s.trace_id from agent_executions_stuck s
		    where @view = 'stuck' and s.waiting_until <= now()
		      and (@after::timestamptz is null or (s.waiting_until, s.id) > (@after, nullif(@before, '')::uuid))
		    order by s.waiting_until, s.id limit @looked)) l
		   where (@kind = '' or l.waiting_for = @kind) and (@surface = '' or (l.surface = @surface) <> @not_surface)
		     and (@flows::text[] is null or (l.flow = any (@flows)) <> @not_flow)
		     and (@agent = '' or (l.agent ilike @agent) <> @not_agent)
		     and (@label = '' or exists (
		       select from agent_execution_labels b
		        where b.execution_id = l.id and b.value = @label and (@label_name = '' or b.name = @label_name)))
		     and l.id >= @from::uuid and l.id < @until::uuid
		       and (@traces::text[] is null or l.trace_id = any (@traces) or l.id = any (@ids::text[]::uuid[]))
		   order by l.waiting_until, l.id limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by p.waiting_until, p.id`, freshPlan,
		args)
	got := executionList{executionFilter: f, Window: maxSearched}
	if got.Rows, err = collectExecutions(rows, err); err == nil {
		err = haltRunning(ctx, room.Read, len(got.Rows), got.running, got.lose)
	}
	if err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		last := got.Rows[executionsShown-1]
		if last.WaitingUntil != nil { // it may have resumed meanwhile
			got.Older = f.with("before", last.WaitingUntil.UTC().Format(time.RFC3339Nano)+" "+last.ID)
		}
	}
	return got, nil
}

// maxFilter bounds a filter's text, in bytes.
const maxFilter = 300

// executionFilter holds the filters of the listing. They combine.
type executionFilter struct {
	View                  string // waiting or stuck: by deadline; empty: newest first
	Status, Surface, Flow string
	Agent                 string
	Label                 string // name=value, or a value
	Trace                 string // as entered
	Failed                bool   // failed or timed out
	Kind                  string // of the wait, in the views
	Before                string // the last id of the previous page
	timeRange
	after       *time.Time
	traces, ids []string // that Trace means; nil without it
	flows       []string // that Flow means
}

func executionStatuses() []string {
	return []string{
		string(executions.Pending), string(executions.Running), string(executions.Waiting), string(executions.Completed),
		string(executions.Failed), string(executions.Timeout), string(executions.Cancelled),
	}
}

func surfaceNames() []string { return slices.Clone(activitySurfaces) }

func waitKinds() []string {
	return []string{"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane"}
}

// Statuses are the options of Status.
func (executionFilter) Statuses() []string { return executionStatuses() }

// Surfaces are the options of Surface.
func (executionFilter) Surfaces() []string { return surfaceNames() }

// Kinds are the options of Kind.
func (executionFilter) Kinds() []string { return waitKinds() }

// openExecutions reads the filters.
func (room *Room) openExecutions(ctx context.Context, v *visit) (string, error) {
	if f, is := v.About.(executionFilter); is {
		return titleOf(f), nil // found for the same address
	}
	q, err := filtersOf(v.Query, append([]string{
		"view", "status", "surface", "flow", "agent", "label", "trace_id", "failed", "for", "before",
	}, rangeFilters...)...)
	if err != nil {
		return "", err
	}
	f := executionFilter{
		View: q["view"], Status: q["status"], Surface: q["surface"], Flow: q["flow"], Agent: q["agent"],
		Label: q["label"], Trace: q["trace_id"], Kind: q["for"],
	}
	for _, one := range []struct {
		name  string
		known []string
	}{
		{"view", []string{"waiting", "stuck"}},
		{"status", executionStatuses()},
		{"surface", surfaceNames()},
		{"for", waitKinds()},
		{"failed", []string{"1"}},
	} {
		value := q[one.name]
		if one.name == "status" || one.name == "surface" {
			value, _ = without(value)
		}
		if err := oneOf(one.name, value, one.known); err != nil {
			return "", err
		}
	}
	if f.timeRange, err = v.timeRange(); err != nil {
		return "", err
	}
	f.Failed = q["failed"] != ""
	switch {
	case f.View != "" && (f.Status != "" || f.Failed):
		return "", badFilter("view=%s lists what waits: leave status and failed out", f.View)
	case f.View != "" && f.Sort != "":
		return "", badFilter("view=%s is by deadline: leave sort out", f.View)
	case f.View == "" && f.Kind != "":
		return "", badFilter("for narrows what waits: use it with view=waiting or view=stuck")
	}
	if f.traces, f.ids, err = room.runsFor(ctx, f.Trace); err != nil {
		return "", err
	}
	flow, _ := without(f.Flow)
	if f.flows, err = room.namesLike(ctx, "flow", flow); err != nil {
		return "", err
	}
	if err := f.begin(q["before"]); err != nil {
		return "", err
	}
	v.About = f
	return titleOf(f), nil
}

// titleOf returns the listing's title.
func titleOf(f executionFilter) string {
	switch {
	case f.View == "waiting":
		return "Waiting executions, by deadline"
	case f.View == "stuck":
		return "Stuck executions"
	case f.Failed:
		return "Failed executions"
	case f.Status != "":
		return "Executions: " + f.Status
	}
	return "Executions"
}

// markReadStart reads the position of a page.
func (f *executionFilter) begin(before string) error {
	if before == "" {
		return nil
	}
	id := before
	if f.View != "" {
		at, rest, _ := strings.Cut(before, " ")
		deadline, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return badCursor()
		}
		f.after, id = &deadline, rest
	}
	if !uuidShape.MatchString(id) {
		return badCursor()
	}
	f.Before = id
	return nil
}

// perFlow bounds the rows of each flow that are searched, of so many in all.
func (f executionFilter) perFlow(looked int) int { return looked / max(len(f.flows), 1) }

// wanted returns the arguments of executionCandidates and executionWanted, which search so many rows, and how many to
// return.
func (f executionFilter) wanted(looked, most int) postgres.Strict {
	from, until := f.bounds(f.Before)
	status, notStatus := without(f.Status)
	surface, notSurface := without(f.Surface)
	_, notFlow := without(f.Flow)
	agent, notAgent := without(f.Agent)
	name, label := executions.ParseLabel(f.Label)
	return postgres.Strict{
		"by": f.leadingFilter(), "traces": f.traces, "ids": f.ids, "from": from, "until": until, "looked": looked,
		"looked_flow": f.perFlow(looked), "status": status, "not_status": notStatus, "failed": f.Failed,
		"surface": surface, "not_surface": notSurface, "flows": f.flows, "not_flow": notFlow,
		"agent": likePart(agent), "not_agent": notAgent, "label": label, "label_name": name, "most": most,
	}
}

// leadingFilter returns the filter whose index yields the rows.
func (f executionFilter) leadingFilter() string {
	switch {
	case f.traces != nil:
		return "trace"
	case f.Label != "":
		return "label"
	case f.Status != "" && !strings.HasPrefix(f.Status, "!") && (f.Flow == "" || f.Status != string(executions.Completed)):
		return "status" // rare, except for completed
	case f.Failed:
		return "failed"
	case f.Flow != "" && !strings.HasPrefix(f.Flow, "!"):
		return "flow"
	}
	return "newest"
}

// searchesAll reports whether the searched rows are all rows.
func (f executionFilter) searchesAll() bool {
	by := f.leadingFilter()
	others := (f.Label != "" && by != "label") || f.Surface != "" || f.Agent != "" ||
		(f.Flow != "" && by != "flow") || (f.Status != "" && by != "status") ||
		(f.Failed && by != "failed")
	return by == "trace" || !others
}

// Narrowed reports whether a filter beyond the view or tab is set.
func (f executionFilter) Narrowed() bool {
	return f.Surface != "" || f.Flow != "" || f.Agent != "" || f.Label != "" || f.Trace != "" || f.Bounded()
}

// query returns the filters as URL parameters, without the position.
func (f executionFilter) query() url.Values {
	q := url.Values{}
	for name, value := range map[string]string{
		"view": f.View, "status": f.Status, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "label": f.Label,
		"trace_id": f.Trace,
		"for":      f.Kind,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.Failed {
		q.Set("failed", "1")
	}
	f.put(q)
	return q
}

// with returns the listing's URL with one more filter.
func (f executionFilter) with(name, value string) string {
	q := f.query()
	q.Set(name, value)
	return "/executions?" + q.Encode()
}

// tab returns the listing's URL for a tab.
func (f executionFilter) tab(name, value string) string {
	f.View, f.Status, f.Failed, f.Kind = "", "", false, ""
	if name == "view" {
		f.Sort = ""
	}
	q := f.query()
	if name != "" {
		q.Set(name, value)
	}
	if len(q) == 0 {
		return "/executions"
	}
	return "/executions?" + q.Encode()
}

// filtersOf reads URL parameters: each at most once, known ones only, without empty ones, which forms send.
func filtersOf(values url.Values, known ...string) (map[string]string, error) {
	q := map[string]string{}
	for name, given := range values {
		switch {
		case !slices.Contains(known, name):
			return nil, badFilter("there is no filter %.60q here; there are %s", name, strings.Join(known, ", "))
		case len(given) > 1:
			return nil, badFilter("filter %s is given %d times", name, len(given))
		case len(given[0]) > maxFilter || !utf8.ValidString(given[0]) || strings.ContainsFunc(given[0], unicode.IsControl):
			return nil, badFilter("filter %s has to be text of at most %d bytes", name, maxFilter)
		case strings.TrimSpace(given[0]) != "":
			q[name] = given[0]
		}
	}
	return q, nil
}

// tracesFor returns the ids of the traces that a pasted text means; empty for none, nil without a text.
func (room *Room) tracesFor(ctx context.Context, text string) ([]string, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	f, _ := fragmentOf(text)
	found, err := room.matchTraces(ctx, f, maxMatches)
	if found == nil {
		found = []string{}
	}
	return found, err
}

// runsFor returns the traces and the executions that a pasted text means. Both are nil without a text.
func (room *Room) runsFor(ctx context.Context, text string) (traces, ids []string, err error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil, nil
	}
	f, _ := fragmentOf(text)
	if ids, err = room.matchUUIDs(ctx, "agent_executions", f, maxMatches); err != nil {
		return nil, nil, err
	}
	if traces, err = room.matchTraceIDs(ctx, f, maxMatches); traces == nil {
		traces = []string{}
	}
	return traces, ids, err
}

func badFilter(format string, args ...any) error {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-parameter", "Bad parameter")
}

func badCursor() error {
	return badFilter("this is not where a page of this listing begins: take it from the page before")
}

// queueKinds bounds the kinds of work and the limits on the page.
const queueKinds = 100

// stateTab links to the executions of one state.
type stateTab struct {
	Word, Link string
	Count      string // with "+" beyond maxCount; empty where it is not counted
	Now        bool   // the current tab
}

// executionStates are the tabs, the one filter of states: failed ones include those that timed out, and waiting ones
// are in the order of their deadlines. A tab keeps the filters. Counts cover all executions, so they are shown
// without filters.
func (room *Room) executionStates(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	counts := map[string]string{}
	if !f.Narrowed() {
		var err error
		if counts, err = room.countStates(ctx); err != nil {
			return nil, err
		}
	}
	tabs := []stateTab{{Word: "All", Link: f.tab("", ""), Now: f.View == "" && f.Status == "" && !f.Failed}}
	for _, s := range executionStatuses() {
		tab := stateTab{Word: s, Link: f.tab("status", s), Count: counts[s], Now: f.Status == s}
		switch s {
		case string(executions.Waiting):
			tab.Link, tab.Now = f.tab("view", s), tab.Now || f.View == s
		case string(executions.Failed):
			tab.Link, tab.Now = f.tab("failed", "1"), tab.Now || f.Failed || f.Status == string(executions.Timeout)
		case string(executions.Timeout):
			continue // with the failed ones
		}
		tabs = append(tabs, tab)
	}
	return append(tabs, stateTab{
		Word: "stuck", Link: f.tab("view", "stuck"), Count: counts["stuck"], Now: f.View == "stuck",
	}), nil
}

// countStates counts the executions of each state, up to maxCount, from the state's index. A plain condition could
// make the planner scan the table for a rare state. Completed ones have no such index: they are counted among the
// newest.
func (room *Room) countStates(ctx context.Context) (map[string]string, error) {
	rows, err := room.Read.Query(ctx, `
		select s.status, false as more, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('pending', 'running', 'waiting')
		            and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['pending', 'running', 'waiting']) s (status)
		union all
		select s.status, false, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('failed', 'timeout', 'cancelled')
		            and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['failed', 'timeout', 'cancelled']) s (status)
		union all
		select 'completed', exists (select e.id from agent_executions e order by e.id desc offset @looked limit 1),
		  (select count(*) from (
		         select from (select e.status from agent_executions e order by e.id desc limit @looked) x
		           where x.status = 'completed' limit @most + 1) y)
		union all
		select 'stuck', false, (select count(*)
		  from (select from agent_executions_stuck k where k.waiting_until <= now() limit @most + 1) x)`, freshPlan,
		postgres.Strict{"most": maxCount, "looked": 4 * maxCount})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	counts := map[string]string{}
	var status string
	var more bool
	var n, failed int64
	_, err = pgx.ForEachRow(rows, []any{&status, &more, &n}, func() error {
		switch status {
		case string(executions.Failed), string(executions.Timeout):
			failed += n
			return nil
		}
		counts[status] = capped(n, maxCount)
		if more && n <= maxCount {
			counts[status] += "+"
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	counts[string(executions.Failed)] = capped(failed, maxCount)
	return counts, nil
}

// capped formats a bounded count.
func capped(n, most int64) string {
	if n > most {
		return human.Count(most) + "+"
	}
	return human.Count(n)
}

// readyKind is ready work of one kind without a worker.
type readyKind struct {
	Queue, Flow, Surface string
	Ready                int64
}

// Count formats Ready.
func (k readyKind) Count() string { return capped(k.Ready, maxCount) }

// admission is a limit with its usage.
type admission struct {
	Kind, Name string
	Most       int
	Running    int64
}

// Full reports an exhausted limit.
func (a admission) Full() bool { return a.Running >= int64(a.Most) }

// executionQueue reads the ready work by kind, and the limits.
func (room *Room) executionQueue(ctx context.Context, _ *visit) (any, error) {
	ready, err := postgres.Rows[readyKind](ctx, room.Read, "read the queue", `
		select k.queue, left(k.flow, 200) as flow, k.surface,
		       (select count(*) from (select from agent_executions x
		          where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = k.queue
		            and x.flow = k.flow and x.surface = k.surface limit @counted + 1) c) as ready
		  from lanekeeper.agent_ready_kinds k
		 order by k.queue desc, k.flow, k.surface
		 limit @most + 1`, freshPlan, postgres.Strict{"counted": maxCount, "most": queueKinds})
	if err != nil {
		return nil, err
	}
	limits, err := postgres.Rows[admission](ctx, room.Read, "read the limits", `
		select l.kind, left(l.name, 200) as name, l.running as most, case l.kind
		         when 'flow' then (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.flow = l.name limit @counted + 1) c)
		         else (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.surface = l.name limit @counted + 1) c) end as running
		  from agent_limits l order by l.kind, l.name limit @most`, freshPlan,
		postgres.Strict{"counted": maxCount, "most": queueKinds})
	if err != nil {
		return nil, err
	}
	ready, more := onPage(ready, queueKinds)
	return map[string]any{"Ready": ready, "More": more, "Limits": limits}, nil
}
