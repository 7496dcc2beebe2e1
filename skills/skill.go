// Package skills owns the agent's skills: the table agent_skills, and the registry that validates and makes a call.
//
// A skill is a row: a name, a JSON Schema of its parameters, and a handler. A workspace file or the binary declares it
// ([Definition]). A declaration does not change the skill's state (enabled, on trial). The revision grows when any
// declared value but the source changes, and an approval holds for one revision.
// The revision does not cover what a call reaches: code of a builtin, environment variables, other programs.
//
// The registry guarantees for every handler:
//
//   - The registry validates arguments against the schema first, and reports up to 100 violations ([InvalidParams]).
//   - A timeout stops the call itself. It cancels the query on the server, closes the HTTP request, or ends the context
//     of a builtin. The builtin must return then.
//   - A failure has a class ([CallError]). A panic is a failure. The end of the caller's context is no failure; the
//     call returns that context's error.
//   - A result is JSON that PostgreSQL can store (no NUL, no lone surrogates), of at most 256 KiB.
//
// sql: runs one query in a read-only transaction or, with config.writes, one statement in a named database. The
// definition fixes its text, and arguments travel separately in the extended protocol, which rejects a second
// statement. So no argument can change the query.
//
// http: connects only to public addresses by default. It checks the address at the dial, after name resolution, so DNS
// rebinding does not pass. A header names a secret as ${env:NAME}. The handler reads the secret at the call, and
// redacts it from answers and errors if it has four bytes or more.
//
// mcp: calls a tool of another program, through package mcp ([RemoteCall]).
//
// flow: starts an execution of a flow with the arguments as its input. Calls with one idempotency key share the
// execution, so the skill is idempotent. With wait the skill returns the outcome, or before its timeout the present
// status. An execution that failed or was cancelled fails the call.
package skills

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/models"
)

// The scopes of a skill.
const (
	ScopeInternal = "internal" // heartbeat, operate, webhooks
	ScopeExternal = "external" // visitors
	ScopeBoth     = "both"
)

// The trust levels of a skill.
const (
	TrustAuto    = "auto"    // calls need no approval
	TrustNotify  = "notify"  // calls need no approval and notify an admin
	TrustApprove = "approve" // calls need an admin's approval
)

// Trusts returns the trust levels.
func Trusts() []string { return []string{TrustAuto, TrustNotify, TrustApprove} }

// Sources of a declaration.
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
	FourEyes       bool            `json:"four_eyes"` // the person who caused a call cannot approve it
	Idempotent     bool            `json:"idempotent"`
	TimeoutMS      int             `json:"timeout_ms"`
	Enabled        bool            `json:"enabled"`
	DisabledReason string          `json:"disabled_reason"`
	DisabledBy     string          `json:"disabled_by"`
	DisabledAt     *time.Time      `json:"disabled_at"`
	EnabledAt      time.Time       `json:"enabled_at"` // earlier failures do not count
	TrialAt        *time.Time      `json:"trial_at"`   // when self-heal offered a trial; nil for none
	Evidence       json.RawMessage `json:"evidence"`
	Revision       int             `json:"revision"`       // grows when the declaration changes
	StateRevision  int             `json:"state_revision"` // grows when the behaviour or the state changes
	Source         string          `json:"source"`
	CreatedAt      time.Time       `json:"created_at"`
	UpdatedAt      time.Time       `json:"updated_at"`
}

// Timeout bounds the duration of a call.
func (s Skill) Timeout() time.Duration { return time.Duration(s.TimeoutMS) * time.Millisecond }

// Callable reports whether a caller without a model may call the skill: it is enabled, or it is on trial and needs no
// approval. Of several concurrent calls on trial, the runtime admits one.
func (s Skill) Callable() bool { return s.Enabled || s.TrialAt != nil && s.Trust != TrustApprove }

// OutOfService returns why a skill cannot be called, as the end of a sentence that starts with its name.
func (s Skill) OutOfService() string {
	if s.TrialAt != nil {
		return fmt.Sprintf("is on trial: its next call decides whether it returns to service; it was disabled by %s: %s",
			s.DisabledBy, s.DisabledReason)
	}
	return fmt.Sprintf("is disabled by %s: %s", s.DisabledBy, s.DisabledReason)
}

// Parameters returns the JSON Schema of the arguments; by default the schema of an empty object.
func (s Skill) Parameters() json.RawMessage {
	var tool toolDefinition
	if err := json.Unmarshal(s.ToolDefinition, &tool); err != nil || len(tool.Parameters) == 0 {
		return json.RawMessage(`{"type":"object","properties":{}}`)
	}
	return tool.Parameters
}

// Tool returns the skill as a model's tool.
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

// Definition declares a skill, in a workspace file or in the binary. Defaults: scope internal, trust auto, timeout 30s,
// no parameters. Undeclared properties are errors unless the schema allows them, so a misspelt argument causes an
// error.
type Definition struct {
	Name        string         `yaml:"name" json:"name"`
	Description string         `yaml:"description" json:"description"`
	Parameters  map[string]any `yaml:"parameters" json:"parameters,omitempty"` // JSON Schema of type object
	// builtin:NAME, sql:, http:, http:GET https://…, mcp:SERVER/TOOL, flow:NAME
	Handler    string         `yaml:"handler" json:"handler"`
	Config     map[string]any `yaml:"config" json:"config,omitempty"` // of the handler
	Scope      string         `yaml:"scope" json:"scope,omitempty"`
	Trust      string         `yaml:"trust" json:"trust,omitempty"`
	Idempotent bool           `yaml:"idempotent" json:"idempotent,omitempty"`
	Timeout    string         `yaml:"timeout" json:"timeout,omitempty"` // 500ms, 30s, 5m
	Approvals  Approvals      `yaml:"approvals" json:"approvals,omitzero"`
}

// Approvals says who may approve calls of a skill with trust approve.
type Approvals struct {
	FourEyes bool `yaml:"four_eyes" json:"four_eyes,omitempty"` // the person who caused a call cannot approve it
}

// Validate returns all problems of d, each as "field path: problem", joined as by [errors.Join]. It uses neither
// database nor network.
func Validate(d Definition) error {
	_, err := resolve(d)
	return err
}

// resolved is a valid definition in its stored form.
type resolved struct {
	name, description string
	tool, config      json.RawMessage
	handler           string
	scope, trust      string
	fourEyes          bool
	idempotent        bool
	timeout           time.Duration
}

// resolve checks a definition and fills in its defaults. Its error joins all problems, each beginning with the field.
func resolve(d Definition) (resolved, error) {
	r := resolved{
		name: d.Name, description: strings.TrimSpace(d.Description), handler: strings.TrimSpace(d.Handler),
		scope: cmp.Or(d.Scope, ScopeInternal), trust: cmp.Or(d.Trust, TrustAuto), idempotent: d.Idempotent,
		fourEyes: d.Approvals.FourEyes,
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
	add(oneOf("trust", r.trust, Trusts()...)...)
	if r.fourEyes && r.trust != TrustApprove {
		add(fmt.Errorf("approvals: four_eyes needs trust: %s", TrustApprove))
	}
	timeout, err := parseTimeout(d.Timeout)
	if err != nil {
		add(err)
	}
	r.timeout = timeout
	parameters, names, errs := resolveParameters(d)
	add(errs...)
	var parsed handler
	if r.config, err = marshalConfig(d.Config); err != nil {
		add(err)
	} else {
		var errs []error
		parsed, errs = parseHandler(r.handler, r.config, names)
		add(errs...)
	}
	if len(problems) > 0 {
		return resolved{}, errors.Join(problems...)
	}
	switch h := parsed.(type) {
	case flowHandler: // repeated calls share one execution
		r.idempotent = true
	case sqlHandler: // a read, or agent_effects records the call in its own transaction
		r.idempotent = true
	case httpHandler:
		r.idempotent = r.idempotent || !h.acts()
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
