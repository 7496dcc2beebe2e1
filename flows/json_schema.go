package flows

import (
	"encoding/json"
	"slices"

	"github.com/lanekeeper/lanekeeper/executions"
)

// JSONSchema returns the JSON Schema (draft 2020-12) of a flow's document, for editors and other programs. It is
// generated from the specification that Validate uses.
func JSONSchema() (json.RawMessage, error) {
	definitions := node{
		"template": node{"type": "string", "minLength": 1, "description": "A text; {{name}} stands for a variable."},
		"expression": node{
			"type": []string{"string", "boolean"}, "minLength": 1,
			"description": "Expr (expr-lang.org) over the variables.",
		},
		"variable": node{
			"type": "string", "pattern": variableRegexp.String(),
			"not": node{"enum": slices.Concat(reserved, keywords)},
		},
		"actions": node{"type": "array", "items": node{"$ref": "#/$defs/action"}},
		"case": node{
			"type": "object", "additionalProperties": false, "required": []string{"actions"},
			"properties": node{"condition": ref("expression"), "equals": node{}, "actions": ref("actions")},
			"oneOf":      []node{{"required": []string{"condition"}}, {"required": []string{"equals"}}},
		},
	}
	var choices []node
	for _, a := range Actions() {
		definitions[a.Type] = a.schema()
		choices = append(choices, node{
			"if":   node{"properties": node{"actionType": node{"const": a.Type}}},
			"then": ref(a.Type),
		})
	}
	definitions["action"] = node{
		"type": "object", "required": []string{"actionType"},
		"properties": node{"actionType": node{"enum": typeNames()}}, "allOf": choices,
	}
	return json.MarshalIndent(node{
		"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": schemaID, "title": "Lanekeeper flow",
		"type": "object", "additionalProperties": false, "required": []string{"name", "actions"},
		"properties": node{
			"kind": node{"const": "flow"}, "name": node{
				"type": "string", "pattern": flowNameRegexp.String(),
				"not": node{"const": executions.External},
			},
			"description": node{"type": "string", "maxLength": maxText},
			"input": node{
				"$ref": "https://json-schema.org/draft/2020-12/schema", "type": "object",
				"if":   node{"minProperties": 1},
				"then": node{"required": []string{"type"}, "properties": node{"type": node{"const": "object"}}},
			},
			"labels": node{
				"type": "object", "maxProperties": executions.MaxLabels, "additionalProperties": node{"type": "string"},
				"propertyNames": node{"pattern": executions.LabelNamePattern},
			},
			"variables": node{"type": "object", "propertyNames": ref("variable")},
			"channel":   node{"enum": append([]string{""}, channelKind.choices()...)}, "target": node{"type": "string"},
			"actions": node{"type": "array", "minItems": 1, "items": ref("action")},
		},
		"allOf": []node{targetRule()}, "$defs": definitions,
	}, "", "  ")
}

type node = map[string]any

func ref(name string) node { return node{"$ref": "#/$defs/" + name} }

// schemaID is the id of the published schema.
const schemaID = "https://lanekeeper.dev/schemas/flow.json"

// targetRule restricts target to channel webhook.
func targetRule() node {
	return node{
		"if":   node{"required": []string{"target"}, "properties": node{"target": node{"minLength": 1}}},
		"then": node{"required": []string{"channel"}, "properties": node{"channel": node{"const": channelWebhook}}},
	}
}

// schema returns the schema of an action type.
func (a Action) schema() node {
	properties := node{
		"id": node{"type": "string", "pattern": idRegexp.String()}, "actionType": node{"const": a.Type},
		"when": ref("expression"), "parameters": a.parameterSchema(),
	}
	if a.saves() {
		properties["saveAs"] = ref("variable")
	}
	s := node{"type": "object", "description": a.About, "additionalProperties": false, "properties": properties}
	required := []string{"actionType"}
	if len(a.OneOf)+len(a.AnyOf) > 0 || slices.ContainsFunc(a.Parameters, func(p Parameter) bool { return p.Required }) {
		required = append(required, "parameters")
	}
	s["required"] = required
	if a.Waits == "" {
		return s
	}
	var exclusive []node
	for _, key := range timeoutKeys {
		properties[key] = timeoutSchema(key)
		exclusive = append(exclusive, node{"not": node{
			"required": []string{key, "parameters"}, "properties": node{"parameters": node{"required": []string{key}}},
		}})
	}
	s["allOf"] = exclusive
	return s
}

func timeoutSchema(key string) node {
	switch key {
	case "timeout":
		return node{"type": "string", "pattern": durationPattern}
	case "onTimeout":
		return node{"enum": reactionKind.choices()}
	}
	return ref("actions")
}

// parameterSchema returns the JSON Schema of the action's parameters.
func (a Action) parameterSchema() node {
	properties := node{}
	var required []string
	for _, p := range a.Parameters {
		schema := p.kind.schema()
		schema["description"] = p.About
		properties[p.Name] = schema
		if p.Required {
			required = append(required, p.Name)
		}
	}
	if a.Waits != "" {
		for _, key := range timeoutKeys {
			properties[key] = timeoutSchema(key)
		}
	}
	object := node{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		object["required"] = required
	}
	if _, talks := a.parameter("channel"); talks {
		object["not"] = node{
			"required":   []string{"channel", "target"},
			"properties": node{"channel": node{"enum": []string{channelChat, channelLog}}},
		}
	}
	for _, group := range a.OneOf {
		object["oneOf"] = requireEach(group)
	}
	for _, group := range a.AnyOf {
		object["anyOf"] = requireEach(group)
	}
	return object
}

func requireEach(names []string) []node {
	var all []node
	for _, name := range names {
		all = append(all, node{"required": []string{name}})
	}
	return all
}

// schema returns the schema of a parameter.
func (kind paramKind) schema() node {
	switch kind {
	case textKind:
		return ref("template")
	case textsKind:
		return node{"anyOf": []node{ref("template"), {"type": "array", "minItems": 1, "items": ref("template")}}}
	case objectKind:
		return node{"type": "object"}
	case setKind:
		return node{"type": "object", "propertyNames": ref("variable")}
	case exprsKind:
		return node{"type": "object", "propertyNames": ref("variable"), "additionalProperties": ref("expression")}
	case listKind:
		return node{"anyOf": []node{{"type": "array"}, {"type": "string", "pattern": `^\{\{.*\}\}$`}}}
	case nameKind:
		return ref("variable")
	case skillKind:
		return node{"type": "string", "pattern": skillRegexp.String()}
	case agentKind:
		return node{"type": "string", "pattern": agentRegexp.String()}
	case namesKind:
		return node{"type": "array", "items": node{"type": "string", "pattern": skillRegexp.String()}}
	case flowKind:
		return node{"type": "string", "pattern": flowReferenceRegexp.String()}
	case durationKind:
		return node{"type": "string", "anyOf": []node{{"pattern": durationPattern}, {"pattern": `\{\{`}}}
	case timeKind:
		return node{"type": "string", "anyOf": []node{{"format": "date-time"}, {"pattern": `\{\{`}}}
	case boolKind:
		return node{"type": "boolean"}
	case countKind:
		return node{"type": "integer", "minimum": 1, "maximum": maxIterations}
	case exprKind:
		return ref("expression")
	case actionsKind:
		return ref("actions")
	case casesKind:
		return node{"type": "array", "minItems": 1, "items": ref("case")}
	case channelKind, failureKind, statusKind:
		return node{"enum": kind.choices()}
	default:
		return node{}
	}
}
