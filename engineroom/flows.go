package engineroom

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// maxFlows bounds the flows on the page.
	maxFlows = 200
	// maxFlowRuns bounds the executions of a flow that a query counts from the index; larger numbers come from the
	// counts.
	maxFlowRuns = 300
)

// flowsPage lists the flows.
func (room *Room) flowsPage() page {
	return page{
		path: "/flows", name: "flows", navLabel: "Flows", title: "Flows",
		open: func(_ context.Context, req *pageRequest) (string, error) {
			_, err := filtersOf(req.Query)
			return "", err
		},
		parts: []part{{name: "list", interval: 5 * time.Second, refreshOnActivity: true, load: room.listFlows}},
	}
}

// flowRow is a flow with its executions of 7 days.
type flowRow struct {
	Name, Kind, Source, About string
	Version                   *int
	Live                      bool // of a flow in Go: a live process has it
	Runs, Failed              int64
	Newest                    *flowRun
}

// flowRun is the newest execution of a flow.
type flowRun struct {
	ID, TraceID, Status string
	CreatedAt           time.Time
}

// Startable reports whether an admin may start it.
func (f flowRow) Startable() bool { return f.Kind != flowBuiltIn }

// listFlows reads the flows: those of the workspace, those of live processes, and those with executions.
func (room *Room) listFlows(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := room.readFlows(ctx, "")
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxFlows)
	return map[string]any{"Flows": list, "More": more}, room.countFlows(ctx, list)
}

// readFlows reads the names and kinds of all flows, or of one flow, by name. Startable flows come first.
func (room *Room) readFlows(ctx context.Context, only string) ([]flowRow, error) {
	data, err := postgres.Rows[struct {
		Name, Source, About string
		Version             *int
	}](ctx, room.Read, "list flows", `
		select f.name, f.version, left(f.source, 200) as source,
		       left(coalesce(f.definition ->> 'description', ''), 300) as about
		  from agent_flows f where f.current and (@only = '' or f.name = @only) order by f.name limit @limit + 1`, customPlan,
		postgres.Strict{"only": only, "limit": maxFlows})
	if err != nil {
		return nil, err
	}
	found := map[string]flowRow{}
	for _, f := range data {
		found[f.Name] = flowRow{
			Name: f.Name, Kind: flowOfYAML, Source: f.Source, About: f.About, Version: f.Version, Live: true,
		}
	}
	live, err := postgres.Rows[struct{ Name string }](ctx, room.Read, "list flows of processes", `
		select distinct f.name from (
		  select p.go_flows from agent_workers p where p.kind = 'process' and p.expires_at > clock_timestamp()
		   order by p.expires_at desc limit @workers) w cross join lateral unnest(w.go_flows) f (name)
		 where @only = '' or f.name = @only order by f.name limit @limit + 1`, customPlan,
		postgres.Strict{"only": only, "limit": maxFlows, "workers": maxCount})
	if err != nil {
		return nil, err
	}
	seen, err := room.suggested(ctx, "flow")
	if err != nil {
		return nil, err
	}
	add := func(name string, live bool) {
		if _, known := found[name]; known || only != "" && name != only {
			return
		}
		f := flowRow{Name: name, Kind: flowInGo, Live: live}
		switch {
		case executions.IsReserved(name):
			f.Kind = flowBuiltIn
		case executions.IsExternal(name):
			f.Kind = flowExternal
		}
		found[name] = f
	}
	for _, f := range live {
		add(f.Name, true)
	}
	for _, s := range seen {
		add(s.Value, false)
	}
	list := make([]flowRow, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		list = append(list, found[name])
	}
	slices.SortStableFunc(list, func(a, b flowRow) int { // startable flows come first
		return strings.Compare(strconv.FormatBool(b.Startable()), strconv.FormatBool(a.Startable()))
	})
	return list, nil
}

// countFlows counts the executions of flows of the last 7 days, and finds the newest.
func (room *Room) countFlows(ctx context.Context, list []flowRow) error {
	names := make([]string, len(list))
	for i, f := range list {
		names[i] = f.Name
	}
	counts, err := postgres.Rows[struct {
		Place                int
		Runs, Failed         int64
		Newest, TraceID, How *string
		At                   *time.Time
	}](ctx, room.Read, "count executions of flows", `
		with running as materialized (
		  select x.flow, count(*) as runs, max(x.id::text)::uuid as newest
		    from (select e.flow, e.id from agent_executions e where e.claimed_by is not null limit @running) x
		   group by x.flow),
		counted as materialized (
		  select c.flow, sum(c.completed + c.failed + c.timeout + c.cancelled)::bigint as runs,
		         sum(c.failed + c.timeout)::bigint as failed
		    from agent_execution_counts c
		   where c.span = 'day' and c.start > clock_timestamp() - interval '7 days' group by c.flow)
		select f.place::int,
		       coalesce(r.runs, 0) + case when i.runs > @limit then greatest(c.runs, i.runs) else i.runs end as runs,
		       case when i.runs > @limit then greatest(c.failed, i.failed) else i.failed end as failed,
		       n.id::text as newest, n.trace_id, n.status as how, n.created_at as at
		  from unnest(@names::text[]) with ordinality f (name, place)
		  left join running r on r.flow = f.name left join counted c on c.flow = f.name
		 cross join lateral (
		   select count(*) as runs, count(*) filter (where x.status in ('failed', 'timeout')) as failed from (
		     select e.status from agent_executions e
		      where e.flow = f.name and e.claimed_by is null
		        and e.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days')
		      order by e.id desc limit @limit + 1) x) i
		  left join lateral (
		    select e.id from agent_executions e where e.flow = f.name and e.claimed_by is null
		     order by e.id desc limit 1) q on true
		  left join agent_executions n on n.id = greatest(q.id, r.newest)
		 order by f.place`, customPlan, postgres.Strict{"names": names, "limit": maxFlowRuns, "running": maxLocks})
	if err != nil {
		return err
	}
	for _, c := range counts {
		f := &list[c.Place-1]
		f.Runs, f.Failed = c.Runs, c.Failed
		if c.Newest != nil {
			f.Newest = &flowRun{ID: *c.Newest, TraceID: *c.TraceID, Status: *c.How, CreatedAt: *c.At}
		}
	}
	return nil
}
