package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	jsonschema "github.com/lanekeeper/lanekeeper/internal/schema"
)

const (
	// maxFlows bounds the flows on the page.
	maxFlows = 200
	// maxFlowRuns bounds the executions of a flow that a query counts from the index; larger numbers come from the counts.
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

// flowPage shows one flow, and starts it.
func (room *Room) flowPage() page {
	return page{
		path: "/flows/{name}", name: "flow", open: room.openFlow,
		parts: []part{
			{name: "facts", interval: 2 * time.Second, load: room.flowFacts},
			{name: "start", load: room.flowStart}, // an update would lose typed text
			{name: "definition", load: room.flowDefinition},
		},
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

// openFlow finds the flow.
func (room *Room) openFlow(ctx context.Context, req *pageRequest) (string, error) {
	if f, ok := req.Subject.(flowRow); ok {
		return f.Name, nil // found for the same address
	}
	if _, err := filtersOf(req.Query); err != nil {
		return "", err
	}
	name := req.path("name")
	list, err := room.readFlows(ctx, name)
	switch {
	case err != nil:
		return "", err
	case len(list) > 0:
		req.Subject = list[0]
		return list[0].Name, nil
	case executions.IsExternal(name): // an external worker may run any such flow
		req.Subject = flowRow{Name: name, Kind: flowExternal}
		return name, nil
	}
	return "", problem.New(http.StatusNotFound, "there is no flow %.100q", name)
}

// flowFacts reads the numbers of a flow, and whether a process or worker runs it.
func (room *Room) flowFacts(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(flowRow)
	one := []flowRow{f}
	if err := room.countFlows(ctx, one); err != nil {
		return nil, err
	}
	missing, err := room.missingWorkerOf(ctx, f.Name)
	if missing != nil && missing.Kind == flowExternal && (missing.Seen != nil || one[0].Runs == 0) {
		missing = nil // the database may lack an idle external worker
	}
	return map[string]any{"Flow": one[0], "Missing": missing}, err
}

// startForm is the form that starts a flow.
type startForm struct {
	flowRow
	Input, From string // From names the source of Input
	Schema      string
	Talks       bool // it needs a thread
}

// flowStart prefills the form: with the input of the newest execution, or with an example of the schema.
func (room *Room) flowStart(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(flowRow)
	form := startForm{flowRow: f, Input: "{}"}
	var schema map[string]any
	if f.Kind == flowOfYAML {
		flow, err := flows.Get(ctx, room.Read, f.Name)
		if err != nil {
			return nil, err
		}
		form.Talks = flows.Talks(flow.Definition)
		if schema = flow.Definition.Input; len(schema) > 0 {
			text, err := json.Marshal(schema)
			if err != nil {
				return nil, fmt.Errorf("read schema of flow %s: %w", f.Name, err)
			}
			form.Schema = shownJSON(string(text), int64(len(text))).Text
			text, err = json.Marshal(exampleOf(schema, 0))
			if err != nil {
				return nil, fmt.Errorf("make an example for flow %s: %w", f.Name, err)
			}
			form.Input, form.From = formatJSON(string(text)), "an example of its schema"
		}
	}
	var input string
	var size int64
	err := room.Read.QueryRow(ctx, `
		select left(coalesce(i.text, ''), 8192), coalesce(octet_length(i.text), 0)
		  from (select e.input::text as text from agent_executions e
		         where e.flow = @flow and e.claimed_by is null and (not @hide or e.thread_id is null and e.surface = 'flow')
		         order by e.id desc limit 1) i`, customPlan,
		postgres.Strict{"flow": f.Name, "hide": activity.HidesTexts(ctx)}).Scan(&input, &size)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
	case err != nil:
		return nil, fmt.Errorf("read newest input of flow %s: %w", f.Name, err)
	case input != "" && input != "null" && int64(len(input)) == size && !isAbridged(input):
		form.Input, form.From = formatJSON(input), "the input of its newest execution"
	}
	return form, nil
}

// maxExampleDepth bounds the nesting of an example.
const maxExampleDepth = 6

// exampleOf returns an example of a JSON schema: the default, the first example or value, or an empty value of the
// type.
func exampleOf(schema map[string]any, depth int) any {
	if value, ok := jsonschema.Given(schema); ok {
		return value
	}
	kind, _ := schema["type"].(string)
	if list, ok := schema["type"].([]any); ok && len(list) > 0 {
		kind, _ = list[0].(string)
	}
	properties, _ := schema["properties"].(map[string]any)
	switch {
	case kind == "object" || kind == "" && len(properties) > 0:
		object := map[string]any{}
		for name, one := range properties {
			if of, ok := one.(map[string]any); ok && depth < maxExampleDepth {
				object[name] = exampleOf(of, depth+1)
			}
		}
		return object
	case kind == "array":
		return []any{}
	case kind == "string":
		return ""
	case kind == "integer" || kind == "number":
		return numberOr0(schema["minimum"])
	case kind == "boolean":
		return false
	}
	return nil
}

// numberOr0 returns a number, or 0 for any other value.
func numberOr0(value any) any {
	switch value.(type) {
	case float64, int, json.Number:
		return value
	}
	return 0
}

// flowDefinition reads the definition of a flow of the workspace.
func (room *Room) flowDefinition(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(flowRow)
	if f.Kind != flowOfYAML {
		return shownValue{}, nil
	}
	flow, err := flows.Get(ctx, room.Read, f.Name)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(flow.Definition)
	if err != nil {
		return nil, fmt.Errorf("read definition of flow %s: %w", f.Name, err)
	}
	return shownJSON(string(text), int64(len(text))), nil
}
