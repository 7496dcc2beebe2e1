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
// sql: runs one query in a read-only transaction. The query's text is fixed by its definition and arguments travel
// beside it in the extended protocol, which also refuses a second statement: no argument can change what is asked.
// http: connects only to public addresses unless told otherwise; the check is made on the address that is dialled,
// after the name was resolved, so a name that resolves to something else the second time does not pass. A secret is
// named in a header as ${env:NAME}, is read when the call is made, and is blotted out of answers and errors. mcp:
// calls a tool of another program, which package mcp mounts and reaches ([RemoteCall]). flow: starts an execution of
// a flow with the arguments as its input, one for each call however often it is made, so such a skill is idempotent;
// with wait it answers how that ended, or, when the skill's time is up, that it goes on.
package skills

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
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

// Callable reports whether what names the skill, and asks no model, may call it: it is in service, or on trial and
// nobody's leave is needed. Of those who try it one is let through, by the call.
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

const (
	defaultTimeout = 30 * time.Second
	maxTimeout     = time.Hour
	maxDescription = 4096
)

var namePattern = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// Definition is what a workspace file, or the binary, declares about a skill. Empty fields mean:
// scope internal, trust auto, timeout 30s, no parameters. A schema that says nothing about further
// properties allows none, so that a misspelt argument is an error and not silently dropped.
type Definition struct {
	Name        string         `yaml:"name" json:"name"`
	Description string         `yaml:"description" json:"description"`
	Parameters  map[string]any `yaml:"parameters" json:"parameters,omitempty"` // JSON Schema of type object
	Handler     string         `yaml:"handler" json:"handler"`                 // builtin:NAME, sql:, http:, http:GET https://…, mcp:SERVER/TOOL, flow:NAME
	Config      map[string]any `yaml:"config" json:"config,omitempty"`         // of the handler
	Scope       string         `yaml:"scope" json:"scope,omitempty"`
	Trust       string         `yaml:"trust" json:"trust,omitempty"`
	Idempotent  bool           `yaml:"idempotent" json:"idempotent,omitempty"`
	Timeout     string         `yaml:"timeout" json:"timeout,omitempty"` // 500ms, 30s, 5m
}

// Validate reports everything that is wrong with d, each problem as "field path: what is wrong".
// It needs neither database nor network. The problems are joined as by [errors.Join].
func Validate(d Definition) error {
	_, err := resolve(d)
	return err
}

// resolved is a valid definition as it is stored.
type resolved struct {
	name, description string
	tool, config      json.RawMessage
	handler           string
	scope, trust      string
	idempotent        bool
	timeout           time.Duration
}

func resolve(d Definition) (resolved, error) {
	r := resolved{
		name: d.Name, description: strings.TrimSpace(d.Description), handler: strings.TrimSpace(d.Handler),
		scope: orElse(d.Scope, ScopeInternal), trust: orElse(d.Trust, TrustAuto), idempotent: d.Idempotent,
	}
	var problems []error
	add := func(errs ...error) { problems = append(problems, errs...) }
	if !namePattern.MatchString(d.Name) {
		add(fmt.Errorf("name: %q must be 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name))
	}
	if len(r.description) > maxDescription || strings.ContainsRune(r.description, 0) {
		add(fmt.Errorf("description: must have at most %d bytes and no NUL character", maxDescription))
	}
	add(oneOf("scope", r.scope, ScopeInternal, ScopeExternal, ScopeBoth)...)
	add(oneOf("trust", r.trust, TrustAuto, TrustNotify, TrustApprove)...)
	timeout, err := parseTimeout(d.Timeout)
	if err != nil {
		add(err)
	}
	r.timeout = timeout
	parameters, names, errs := resolveParameters(d.Parameters)
	add(errs...)
	var act handler
	if r.config, err = marshalConfig(d.Config); err != nil {
		add(err)
	} else {
		var errs []error
		act, errs = parseHandler(r.handler, r.config, names)
		add(errs...)
	}
	if len(problems) > 0 {
		return resolved{}, errors.Join(problems...)
	}
	if strings.HasPrefix(r.handler, "flow:") {
		r.idempotent = true // one call is one execution, however often it is made
	}
	if query, ok := act.(sqlHandler); ok && query.writes {
		r.idempotent = true // agent_effects records the call in the transaction that makes it
	}
	r.tool, err = json.Marshal(toolDefinition{Name: r.name, Description: r.description, Parameters: parameters})
	return r, err
}

func parseTimeout(s string) (time.Duration, error) {
	if s == "" {
		return defaultTimeout, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("timeout: %q is not a duration: write 500ms, 30s or 5m", s)
	}
	if d < time.Millisecond || d > maxTimeout {
		return 0, fmt.Errorf("timeout: %s must be between 1ms and %s", s, maxTimeout)
	}
	return d, nil
}

func marshalConfig(config map[string]any) (json.RawMessage, error) {
	if len(config) == 0 {
		return json.RawMessage(`{}`), nil
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if strings.Contains(string(raw), `\u0000`) {
		return nil, errors.New("config: has a NUL character")
	}
	return raw, nil
}

func oneOf(field, value string, allowed ...string) []error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return []error{fmt.Errorf("%s: %q is not one of %s", field, value, strings.Join(allowed, ", "))}
}

func orElse(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}
