package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/skills"
)

// definition is a tool as it is kept: cleaned, so that it can be shown.
type definition struct {
	Description string         `json:"description"`
	InputSchema map[string]any `json:"input_schema"`
	Annotations *annotations   `json:"annotations,omitempty"`
}

// annotations are what a tool says about its own behaviour. They are not trusted.
type annotations struct {
	DestructiveHint *bool `json:"destructiveHint,omitempty"`
	OpenWorldHint   *bool `json:"openWorldHint,omitempty"`
	ReadOnlyHint    bool  `json:"readOnlyHint,omitempty"`
	IdempotentHint  bool  `json:"idempotentHint,omitempty"`
}

// snapshot is a tool as a server shows it now.
type snapshot struct {
	pin        string // the hash of it as it came
	definition definition
	problem    string // why it cannot be a skill
}

// look takes the snapshot of a tool. The pin covers every byte of what a model or a person could be shown, before it
// is cleaned.
func look(t *sdk.Tool) snapshot {
	raw, err := json.Marshal(map[string]any{
		"name": t.Name, "description": t.Description, "inputSchema": t.InputSchema, "annotations": t.Annotations,
	})
	if err != nil {
		return snapshot{problem: "its definition cannot be written as JSON: " + cleanText(err.Error(), 200)}
	}
	sum := sha256.Sum256(raw)
	s := snapshot{pin: hex.EncodeToString(sum[:])}
	switch {
	case len(raw) > maxDefinition:
		s.problem = fmt.Sprintf("its definition has %d bytes; at most %d are taken", len(raw), maxDefinition)
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

// schemaOf is a cleaned copy of a tool's schema, or why there is none.
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

// parameters is the schema as the skill has it. One that lists no properties takes what comes; one that lists some and
// says nothing of others takes no others, as everywhere in skills.
func (d definition) parameters() map[string]any {
	schema := make(map[string]any, len(d.InputSchema)+1)
	maps.Copy(schema, d.InputSchema)
	if schema["type"] == nil {
		schema["type"] = "object"
	}
	properties, _ := schema["properties"].(map[string]any)
	if _, said := schema["additionalProperties"]; !said && len(properties) == 0 {
		schema["additionalProperties"] = true
	}
	return schema
}

// destructive reports whether a tool says, or by the protocol's default implies, that it may destroy something. A
// tool without any annotations says nothing.
func (a *annotations) destructive() bool {
	switch {
	case a == nil:
		return false
	case a.DestructiveHint != nil:
		return *a.DestructiveHint
	}
	return !a.ReadOnlyHint
}

// trustOf is how much a tool is trusted: as the admin set, or less.
func (r Remote) trustOf(tool string, a *annotations) string {
	switch {
	case a.destructive():
		return skills.TrustApprove
	case matches(r.Auto, tool):
		return skills.TrustAuto
	}
	return r.Trust
}

// includes reports whether the workspace wants a tool.
func (r Remote) includes(tool string) bool {
	return (len(r.Include) == 0 || matches(r.Include, tool)) && !matches(r.Exclude, tool)
}

// skill is what a tool is mounted as.
func (r Remote) skill(tool, name, pin string, d definition) skills.Definition {
	about := d.Description
	if about == "" {
		about = "No description."
	}
	return skills.Definition{
		Name: name, Description: fmt.Sprintf("[tool of the MCP server %s] %s", r.Name, about), Parameters: d.parameters(),
		Handler: "mcp:" + r.Name + "/" + tool, Config: map[string]any{"pin": pin}, Scope: r.Scope,
		Trust: r.trustOf(tool, d.Annotations), Idempotent: matches(r.Idempotent, tool),
		Timeout: fmt.Sprintf("%dms", r.TimeoutMS),
	}
}

// longestSkill is how long a skill's name may be.
const longestSkill = 64

// skillName is the name of a tool's skill. Where a letter had to go or the name was too long, a part of the hash of
// the tool's own name keeps it apart from others.
func skillName(server, tool string) string {
	safe := strings.Map(func(r rune) rune {
		if r < 128 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-') {
			return r
		}
		return '_'
	}, tool)
	name := "mcp__" + server + "__" + safe
	if safe == tool && len(name) <= longestSkill {
		return name
	}
	sum := sha256.Sum256([]byte(tool))
	mark := "_" + hex.EncodeToString(sum[:])[:8]
	return name[:min(len(name), longestSkill-len(mark))] + mark
}
