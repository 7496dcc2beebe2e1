package reason

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/executions"
)

// colleague is an agent that a turn may delegate to.
type colleague struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
}

// toAgents lets a tool that delegates name the agents that the turn's own agent may delegate to.
func (w *turn) toAgents(t Tool) Tool {
	if len(w.colleagues) == 0 {
		return t
	}
	var schema map[string]any
	if json.Unmarshal(t.Parameters, &schema) != nil {
		return t
	}
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return t
	}
	names, lines := make([]string, len(w.colleagues)), make([]string, len(w.colleagues))
	for i, c := range w.colleagues {
		names[i], lines[i] = c.Name, strings.TrimSuffix(c.Name+": "+c.Description, ": ")
	}
	properties["agent"] = map[string]any{
		"type": "string", "enum": names,
		"description": "who does it, with skills of its own; you yourself when left out. " + strings.Join(lines, "; "),
	}
	changed, err := json.Marshal(schema)
	if err != nil {
		return t
	}
	t.Parameters = changed
	return t
}

// delegateTo is the agent of a child: the one that the model names, if the turn's agent may delegate to it, or the
// turn's own.
func (w *turn) delegateTo(asked delegateArgs, own string) (string, error) {
	switch {
	case asked.Agent == "":
		return own, nil
	case !slices.ContainsFunc(w.colleagues, func(c colleague) bool { return c.Name == asked.Agent }):
		return "", &executions.StepError{
			Class: classInvalid, Message: fmt.Sprintf("agent: %q is none that you may delegate to", shown(asked.Agent)),
		}
	case len(asked.Skills) > 0:
		return "", &executions.StepError{
			Class:   classInvalid,
			Message: "skills: another agent uses its own; name either an agent or skills",
		}
	}
	return asked.Agent, nil
}
