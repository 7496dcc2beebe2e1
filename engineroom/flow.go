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
			{name: "start", load: room.flowStart}, // no interval: an update would discard the user's input
			{name: "definition", load: room.flowDefinition},
		},
	}
}

// openFlow finds the flow.
func (room *Room) openFlow(ctx context.Context, req *pageRequest) (string, error) {
	if f, ok := req.Subject.(flowRow); ok {
		return f.Name, nil // another part of this page has found it
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

// flowFacts reads the numbers of a flow. Missing warns of a flow that no process or worker can run.
func (room *Room) flowFacts(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(flowRow)
	counted := []flowRow{f}
	if err := room.countFlows(ctx, counted); err != nil {
		return nil, err
	}
	missing, err := room.missingWorkerOf(ctx, f.Name)
	if err != nil {
		return nil, err
	}
	// An idle external worker may have no row. The page warns only if none ever took one of the flow's executions.
	if missing != nil && missing.Kind == flowExternal && (missing.Seen != nil || counted[0].Runs == 0) {
		missing = nil
	}
	return map[string]any{"Flow": counted[0], "Missing": missing}, nil
}

// startForm is the form that starts a flow.
type startForm struct {
	flowRow
	Input, InputSource string
	Schema             string
	NeedsThread        bool
}

// flowStart prefills the form: with the input of the newest execution, or with an example of the schema.
func (room *Room) flowStart(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(flowRow)
	form := startForm{flowRow: f, Input: "{}"}
	if f.Kind == flowOfYAML {
		flow, err := flows.Get(ctx, room.Read, f.Name)
		if err != nil {
			return nil, err
		}
		form.NeedsThread = flows.Talks(flow.Definition)
		if err := form.useSchema(flow.Definition.Input); err != nil {
			return nil, err
		}
	}
	input, err := room.newestInput(ctx, f.Name)
	if err != nil {
		return nil, err
	}
	if input != "" {
		form.Input, form.InputSource = formatJSON(input), "the input of its newest execution"
	}
	return form, nil
}

// useSchema shows the schema and makes an example of it the input. It does nothing without a schema.
func (form *startForm) useSchema(schema map[string]any) error {
	if len(schema) == 0 {
		return nil
	}
	text, err := json.Marshal(schema)
	if err != nil {
		return fmt.Errorf("read schema of flow %s: %w", form.Name, err)
	}
	form.Schema = shownJSON(string(text), int64(len(text))).Text
	text, err = json.Marshal(exampleOf(schema, 0))
	if err != nil {
		return fmt.Errorf("make an example for flow %s: %w", form.Name, err)
	}
	form.Input, form.InputSource = formatJSON(string(text)), "an example of its schema"
	return nil
}

// newestInput returns the input of the newest execution of a flow. It is empty for no execution, a long input, and an
// input with a secret. If texts are hidden, it is also empty for an execution of a thread or of another surface.
func (room *Room) newestInput(ctx context.Context, flow string) (string, error) {
	var input string
	var size int64
	// The index of a flow's executions has no claimed ones.
	err := room.Read.QueryRow(ctx, `
		with claimed as materialized (
		  select e.id, e.flow from agent_executions e where e.claimed_by is not null limit @claimed),
		newest as (
		  (select e.id from agent_executions e where e.flow = @flow and e.claimed_by is null order by e.id desc limit 1)
		   union all
		  (select c.id from claimed c where c.flow = @flow order by c.id desc limit 1)
		  order by id desc limit 1)
		select left(coalesce(e.input::text, ''), 8192), coalesce(octet_length(e.input::text), 0)
		  from newest n join agent_executions e on e.id = n.id
		 where not @hide_texts or e.thread_id is null and e.surface = 'flow'`, customPlan,
		postgres.Strict{"flow": flow, "hide_texts": activity.HidesTexts(ctx), "claimed": maxLocks}).Scan(&input, &size)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read newest input of flow %s: %w", flow, err)
	case input == "null" || int64(len(input)) != size || isAbridged(input):
		return "", nil
	}
	return input, nil
}

// maxExampleDepth bounds the nesting of an example.
const maxExampleDepth = 6

// exampleOf returns an example of a JSON schema: its constant or default, its first example or enumerated value, or an
// empty value of the type.
func exampleOf(schema map[string]any, depth int) any {
	if value, ok := jsonschema.Given(schema); ok {
		return value
	}
	typ, _ := schema["type"].(string)
	if list, ok := schema["type"].([]any); ok && len(list) > 0 {
		typ, _ = list[0].(string)
	}
	properties, _ := schema["properties"].(map[string]any)
	switch {
	case typ == "object" || typ == "" && len(properties) > 0:
		object := map[string]any{}
		for name, property := range properties {
			if schema, ok := property.(map[string]any); ok && depth < maxExampleDepth {
				object[name] = exampleOf(schema, depth+1)
			}
		}
		return object
	case typ == "array":
		return []any{}
	case typ == "string":
		return ""
	case typ == "integer" || typ == "number":
		return numberOr0(schema["minimum"])
	case typ == "boolean":
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
