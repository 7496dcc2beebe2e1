package flows

import (
	"encoding/json"
	"slices"

	"github.com/lanekeeper/lanekeeper/executions"
)

// schemaID names the published schema.
const schemaID = "https://lanekeeper.dev/schemas/flow.json"

type node = map[string]any

// JSONSchema is the JSON Schema (draft 2020-12) of a flow's document, for editors and other programs. It is made from
// the list of actions that Validate reads.
func JSONSchema() (json.RawMessage, error) {
	definitions := node{
		"template":   node{"type": "string", "minLength": 1, "description": "A text; {{name}} stands for a variable."},
		"expression": node{"type": []string{"string", "boolean"}, "minLength": 1, "description": "Expr (expr-lang.org) over the variables."},
		"variable":   node{"type": "string", "pattern": variableForm.String(), "not": node{"enum": slices.Concat(reserved, words)}},
		"actions":    node{"type": "array", "items": node{"$ref": "#/$defs/action"}},
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
			"kind": node{"const": "flow"}, "name": node{"type": "string", "pattern": flowName.String(), "not": node{"const": executions.External}},
			"description": node{"type": "string", "maxLength": maxText},
			"input": node{
				"$ref": "https://json-schema.org/draft/2020-12/schema", "type": "object",
				"if": node{"minProperties": 1}, "then": node{"required": []string{"type"}, "properties": node{"type": node{"const": "object"}}},
			},
			"variables": node{"type": "object", "propertyNames": ref("variable")},
			"channel":   node{"enum": append([]string{""}, channelSort.choices()...)}, "target": node{"type": "string"},
			"actions": node{"type": "array", "minItems": 1, "items": ref("action")},
		},
		"allOf": []node{targetRule()}, "$defs": definitions,
	}, "", "  ")
}

func ref(name string) node { return node{"$ref": "#/$defs/" + name} }

// targetRule says that only channel webhook has a target.
func targetRule() node {
	return node{
		"if":   node{"required": []string{"target"}, "properties": node{"target": node{"minLength": 1}}},
		"then": node{"required": []string{"channel"}, "properties": node{"channel": node{"const": channelWebhook}}},
	}
}

// schema is that of one type of action.
func (a Action) schema() node {
	properties := node{
		"id": node{"type": "string", "pattern": idForm.String()}, "actionType": node{"const": a.Type},
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
	var once []node
	for _, key := range timeoutKeys {
		properties[key] = timeoutSchema(key)
		once = append(once, node{"not": node{
			"required": []string{key, "parameters"}, "properties": node{"parameters": node{"required": []string{key}}},
		}})
	}
	s["allOf"] = once
	return s
}

func timeoutSchema(key string) node {
	switch key {
	case "timeout":
		return node{"type": "string", "pattern": lengthPattern}
	case "onTimeout":
		return node{"enum": reactionSort.choices()}
	}
	return ref("actions")
}

func (a Action) parameterSchema() node {
	properties := node{}
	var required []string
	for _, p := range a.Parameters {
		schema := p.sort.schema()
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
	s := node{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		s["required"] = required
	}
	if _, talks := a.parameter("channel"); talks {
		s["not"] = node{"required": []string{"channel", "target"}, "properties": node{"channel": node{"enum": []string{channelChat, channelLog}}}}
	}
	for _, group := range a.OneOf {
		s["oneOf"] = requireEach(group)
	}
	for _, group := range a.AnyOf {
		s["anyOf"] = requireEach(group)
	}
	return s
}

func requireEach(names []string) []node {
	var all []node
	for _, name := range names {
		all = append(all, node{"required": []string{name}})
	}
	return all
}

// schema is that of a parameter.
func (s sort) schema() node {
	switch s {
	case textSort:
		return ref("template")
	case textsSort:
		return node{"anyOf": []node{ref("template"), {"type": "array", "minItems": 1, "items": ref("template")}}}
	case objectSort:
		return node{"type": "object"}
	case setSort:
		return node{"type": "object", "propertyNames": ref("variable")}
	case exprsSort:
		return node{"type": "object", "propertyNames": ref("variable"), "additionalProperties": ref("expression")}
	case listSort:
		return node{"anyOf": []node{{"type": "array"}, {"type": "string", "pattern": `^\{\{.*\}\}$`}}}
	case nameSort:
		return ref("variable")
	case skillSort:
		return node{"type": "string", "pattern": skillForm.String()}
	case agentSort:
		return node{"type": "string", "pattern": agentForm.String()}
	case namesSort:
		return node{"type": "array", "items": node{"type": "string", "pattern": skillForm.String()}}
	case flowSort:
		return node{"type": "string", "pattern": flowReference.String()}
	case lengthSort:
		return node{"type": "string", "anyOf": []node{{"pattern": lengthPattern}, {"pattern": `\{\{`}}}
	case timeSort:
		return node{"type": "string", "anyOf": []node{{"format": "date-time"}, {"pattern": `\{\{`}}}
	case boolSort:
		return node{"type": "boolean"}
	case countSort:
		return node{"type": "integer", "minimum": 1, "maximum": maxTimes}
	case exprSort:
		return ref("expression")
	case actionsSort:
		return ref("actions")
	case casesSort:
		return node{"type": "array", "minItems": 1, "items": ref("case")}
	case channelSort, failureSort, statusSort:
		return node{"enum": s.choices()}
	default:
		return node{}
	}
}
