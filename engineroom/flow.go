package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	jsonschema "github.com/lanekeeper/lanekeeper/internal/schema"
)

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
