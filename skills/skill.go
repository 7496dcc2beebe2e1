// Package skills is what the agent can do: the table agent_skills, and the registry that checks and
// makes a call.
//
// A skill is a row: a name, a JSON Schema of its parameters, and a handler that acts. A workspace
// file or the binary declares it ([Definition]); whether it is in service (enabled, on trial) is
// learned and never touched by a declaration. The revision grows when, and only when, what a call
// would do changes, so an approval bound to a revision cannot be spent on something else.
//
// The registry promises, for every handler:
//
//   - arguments are checked against the schema first, and every violation is reported ([InvalidParams]);
//   - a timeout stops the call itself: the server-side query is cancelled, the HTTP request is closed,
//     the context of a builtin ends. A builtin must return when its context ends;
//   - a failure has a class ([CallError]); a panic is a failure; the end of the caller's own context is
//     not, and comes back as that context's error;
//   - a result is JSON that PostgreSQL can store (no NUL, no lone surrogates) of at most 256 KiB.
//
// sql: runs one query in a read-only transaction. The query's text is fixed by its definition and
// arguments travel beside it in the extended protocol, which also refuses a second statement: no
// argument can change what is asked. http: connects only to public addresses unless told otherwise; the
// check is made on the address that is dialled, after the name was resolved, so a name that
// resolves to something else the second time does not pass. A secret is named in a header as
// ${env:NAME}, is read when the call is made, and is blotted out of answers and errors. mcp: calls a tool of another
// program, which package mcp mounts and reaches ([RemoteCall]). flow: starts an execution of a flow with the arguments as its
// input, one for each call however often it is made, so such a skill is idempotent; with wait it answers how that ended, or,
// when the skill's time is up, that it goes on.
package skills

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/models"
)

// Who may be offered a skill.
const (
	ScopeInternal = "internal" // heartbeat, operate, webhooks
	ScopeExternal = "external" // visitors
	ScopeBoth     = "both"
)

// How much a skill is trusted to act.
const (
	TrustAuto    = "auto"    // acts
	TrustNotify  = "notify"  // acts and tells an admin
	TrustApprove = "approve" // acts after an admin's approval
)

// Where a declaration came from.
const (
	SourceWorkspace = "workspace"
	SourceBuiltin   = "builtin"
	SourceMCP       = "mcp" // mounted from an MCP server
)

// Skill is a row of agent_skills.
type Skill struct {
	ID             string          `json:"id"`
	Name           string          `json:"name"`
	Description    string          `json:"description"`
	ToolDefinition json.RawMessage `json:"tool_definition"` // name, description, parameters
	Handler        string          `json:"handler"`
	Config         json.RawMessage `json:"config"`
	Scope          string          `json:"scope"`
	Trust          string          `json:"trust"`
	Idempotent     bool            `json:"idempotent"`
	TimeoutMS      int             `json:"timeout_ms"`
	Enabled        bool            `json:"enabled"`
	DisabledReason string          `json:"disabled_reason"`
	DisabledBy     string          `json:"disabled_by"`
	DisabledAt     *time.Time      `json:"disabled_at"`
	EnabledAt      time.Time       `json:"enabled_at"` // failures before it do not count
	TrialAt        *time.Time      `json:"trial_at"`   // when the one try after the cool-down was granted
	Evidence       json.RawMessage `json:"evidence"`
	Revision       int             `json:"revision"`       // grows when what a call would do changes
	StateRevision  int             `json:"state_revision"` // grows when that, or whether it is in service, changes
	Source         string          `json:"source"`
	CreatedAt      time.Time       `json:"created_at"`
	UpdatedAt      time.Time       `json:"updated_at"`
}

// Timeout is the longest a call may take.
func (s Skill) Timeout() time.Duration { return time.Duration(s.TimeoutMS) * time.Millisecond }

// Callable reports whether what names the skill, and asks no model, may call it: it is in service, or on trial and nobody's
// leave is needed. Of those who try it one is let through, by the call.
func (s Skill) Callable() bool { return s.Enabled || s.TrialAt != nil && s.Trust != TrustApprove }

// OutOfService says why a skill cannot be called now, as the end of a sentence that begins with its name.
func (s Skill) OutOfService() string {
	if s.TrialAt != nil {
		return fmt.Sprintf("is on trial: its next call decides whether it returns to service; it was disabled by %s: %s", s.DisabledBy, s.DisabledReason)
	}
	return fmt.Sprintf("is disabled by %s: %s", s.DisabledBy, s.DisabledReason)
}

// Parameters is the JSON Schema of the arguments; an empty object's schema when the row has none.
func (s Skill) Parameters() json.RawMessage {
	var tool toolDefinition
	if err := json.Unmarshal(s.ToolDefinition, &tool); err != nil || len(tool.Parameters) == 0 {
		return json.RawMessage(`{"type":"object","properties":{}}`)
	}
	return tool.Parameters
}

// Tool is the skill as a model is offered it.
func (s Skill) Tool() models.Tool {
	return models.Tool{Name: s.Name, Description: s.Description, Parameters: s.Parameters()}
}

type toolDefinition struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"`
}
