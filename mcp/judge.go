package mcp

import (
	"encoding/json"
	"reflect"
	"strings"
)

// judge says what becomes of a tool: old is its row (new ones have only names), now is how the server shows it, nil
// when it does not. It decides alone, so that every case can be seen in one place.
func judge(r Remote, old Tool, now *snapshot) Tool {
	next := old
	next.Reason, next.SeenPin, next.Seen = "", "", json.RawMessage(`{}`)
	switch {
	case !r.includes(old.Tool):
		next.State, next.Reason = Excluded, "left out by the workspace"
	case now == nil:
		next.State, next.Reason = Gone, "the server no longer lists it"
	case old.Pin == "" && now.problem != "":
		next.State, next.Reason = Refused, now.problem
	case old.Pin == "":
		next.State, next.Pin, next.Definition = Mounted, now.pin, encode(now.definition)
	case now.pin == old.Pin:
		next.State = Mounted
	default:
		next.State, next.SeenPin, next.Seen = Quarantined, now.pin, encode(now.definition)
		next.Reason = difference(old.Definition, now.definition)
		if now.problem != "" {
			next.Reason += "; it can no longer be a skill: " + now.problem
		}
	}
	return next
}

// difference says which parts of a tool changed.
func difference(accepted json.RawMessage, now definition) string {
	var then, current definition
	if json.Unmarshal(accepted, &then) != nil || json.Unmarshal(encode(now), &current) != nil {
		return "it changed since it was accepted"
	}
	var parts []string
	if then.Description != current.Description {
		parts = append(parts, "description")
	}
	if !reflect.DeepEqual(then.InputSchema, current.InputSchema) {
		parts = append(parts, "input schema")
	}
	if !reflect.DeepEqual(then.Annotations, current.Annotations) {
		parts = append(parts, "annotations")
	}
	if len(parts) == 0 {
		return "it changed since it was accepted, in characters that are not shown"
	}
	return "it changed since it was accepted: " + strings.Join(parts, ", ")
}

// encode writes what came from JSON and so can be written again.
func encode(d definition) json.RawMessage {
	raw, err := json.Marshal(d)
	if err != nil {
		return json.RawMessage(`{}`)
	}
	return raw
}
