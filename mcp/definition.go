package mcp

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/skills"
)

// definition is the stored form of a tool, cleaned for display.
type definition struct {
	Description string         `json:"description"`
	InputSchema map[string]any `json:"input_schema"`
	Annotations *annotations   `json:"annotations,omitempty"`
}

// annotations are a tool's claims about its behaviour. The client does not trust them.
type annotations struct {
	DestructiveHint *bool `json:"destructiveHint,omitempty"`
	OpenWorldHint   *bool `json:"openWorldHint,omitempty"`
	ReadOnlyHint    bool  `json:"readOnlyHint,omitempty"`
	IdempotentHint  bool  `json:"idempotentHint,omitempty"`
}

// snapshot is a tool in the server's present list.
type snapshot struct {
	pin        string // hash of the raw definition
	definition definition
	problem    string // why the tool cannot become a skill
	output     any    // the schema of its structured content
}

// newSnapshot takes the snapshot of a tool. The pin covers all bytes that a model or a person can see, before cleaning.
func newSnapshot(t *sdk.Tool) snapshot {
	raw, err := json.Marshal(map[string]any{
		"name": t.Name, "description": t.Description, "inputSchema": t.InputSchema, "annotations": t.Annotations,
	})
	if err != nil {
		return snapshot{problem: "its definition cannot be written as JSON: " + cleanText(err.Error(), 200)}
	}
	sum := sha256.Sum256(raw)
	s := snapshot{pin: hex.EncodeToString(sum[:]), output: t.OutputSchema}
	switch {
	case len(raw) > maxDefinition:
		s.problem = fmt.Sprintf("its definition has %d bytes; the limit is %d", len(raw), maxDefinition)
		return s
	case strings.Contains(string(raw), `\u0000`):
		s.problem = "its definition has a NUL character"
		return s
	}
	s.definition.Description = cleanText(t.Description, maxDescription)
	if a := t.Annotations; a != nil {
		s.definition.Annotations = &annotations{a.DestructiveHint, a.OpenWorldHint, a.ReadOnlyHint, a.IdempotentHint}
	}
	s.definition.InputSchema, s.problem = schemaOf(t)
	return s
}

// schemaOf returns a cleaned copy of a tool's schema, or the reason why there is none.
func schemaOf(t *sdk.Tool) (map[string]any, string) {
	raw, err := json.Marshal(t.InputSchema)
	var schema map[string]any
	if err == nil {
		err = json.Unmarshal(raw, &schema)
	}
	if err != nil || schema == nil {
		return nil, "its input schema is no JSON object"
	}
	cleanSchema(schema)
	return schema, ""
}

// parameters returns the skill's schema. A schema without properties accepts any argument. A schema with properties
// accepts no other arguments by default, like all skills.
func (d definition) parameters() map[string]any {
	schema := make(map[string]any, len(d.InputSchema)+1)
	maps.Copy(schema, d.InputSchema)
	if schema["type"] == nil {
		schema["type"] = "object"
	}
	properties, _ := schema["properties"].(map[string]any)
	if _, set := schema["additionalProperties"]; !set && len(properties) == 0 {
		schema["additionalProperties"] = true
	}
	return schema
}

// destructive reports whether a tool declares, or by the protocol's default implies, a destructive effect. A tool
// without annotations declares nothing.
func (a *annotations) destructive() bool {
	switch {
	case a == nil:
		return false
	case a.DestructiveHint != nil:
		return *a.DestructiveHint
	}
	return !a.ReadOnlyHint
}

// trustFor returns a tool's trust: the admin's setting, or a stricter trust.
func (r Remote) trustFor(tool string, a *annotations) string {
	switch {
	case a.destructive():
		return skills.TrustApprove
	case matches(r.Auto, tool):
		return skills.TrustAuto
	}
	return r.Trust
}

// includes reports whether the workspace includes a tool.
func (r Remote) includes(tool string) bool {
	return (len(r.Include) == 0 || matches(r.Include, tool)) && !matches(r.Exclude, tool)
}

// skill returns the skill declaration of a tool.
func (r Remote) skill(tool, name, pin string, d definition) skills.Definition {
	description := cmp.Or(d.Description, "No description.")
	return skills.Definition{
		Name: name, Description: fmt.Sprintf("[tool of the MCP server %s] %s", r.Name, description),
		Parameters: d.parameters(),
		Handler:    "mcp:" + r.Name + "/" + tool, Config: map[string]any{"pin": pin}, Scope: r.Scope,
		Trust: r.trustFor(tool, d.Annotations), Idempotent: matches(r.Idempotent, tool),
		Timeout: fmt.Sprintf("%dms", r.TimeoutMS),
	}
}

// maxSkillName bounds a skill's name.
const maxSkillName = 64

// skillName returns the name of a tool's skill. If skillName replaces a character or cuts the name, a part of the hash
// of the tool's name keeps the result unique.
func skillName(server, tool string) string {
	safe := strings.Map(func(r rune) rune {
		if r < 128 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-') {
			return r
		}
		return '_'
	}, tool)
	name := "mcp__" + server + "__" + safe
	if safe == tool && len(name) <= maxSkillName {
		return name
	}
	sum := sha256.Sum256([]byte(tool))
	suffix := "_" + hex.EncodeToString(sum[:])[:8]
	return name[:min(len(name), maxSkillName-len(suffix))] + suffix
}

// nextState decides the state of a tool, in all cases. old is the tool's row, with only names for a new tool. now is
// the listed tool, nil if the server does not list it.
func nextState(r Remote, old Tool, current *snapshot) Tool {
	next := old
	next.Reason, next.SeenPin, next.Seen = "", "", json.RawMessage(`{}`)
	switch {
	case !r.includes(old.Tool):
		next.State, next.Reason = Excluded, "left out by the workspace"
	case current == nil:
		next.State, next.Reason = Gone, "the server no longer lists it"
	case old.Pin == "" && current.problem != "":
		next.State, next.Reason = Refused, current.problem
	case old.Pin == "":
		next.State, next.Pin, next.Definition = Mounted, current.pin, encode(current.definition)
	case current.pin == old.Pin:
		next.State = Mounted
	default:
		next.State, next.SeenPin, next.Seen = Quarantined, current.pin, encode(current.definition)
		next.Reason = difference(old.Definition, current.definition)
		if current.problem != "" { // its definition was not read, so nobody can accept it
			next.SeenPin, next.Reason = "", next.Reason+"; it can no longer be a skill: "+current.problem
		}
	}
	return next
}

// difference names the changed parts of a tool.
func difference(accepted json.RawMessage, listed definition) string {
	var old, current definition
	if json.Unmarshal(accepted, &old) != nil || json.Unmarshal(encode(listed), &current) != nil {
		return "it changed since it was accepted"
	}
	var parts []string
	if old.Description != current.Description {
		parts = append(parts, "description")
	}
	if !reflect.DeepEqual(old.InputSchema, current.InputSchema) {
		parts = append(parts, "input schema")
	}
	if !reflect.DeepEqual(old.Annotations, current.Annotations) {
		parts = append(parts, "annotations")
	}
	if len(parts) == 0 {
		return "it changed since it was accepted, in characters that are not shown"
	}
	return "it changed since it was accepted: " + strings.Join(parts, ", ")
}

// encode returns a definition as JSON. A definition was read from JSON, so encoding cannot fail.
func encode(d definition) json.RawMessage {
	raw, err := json.Marshal(d)
	if err != nil {
		return json.RawMessage(`{}`)
	}
	return raw
}
