package skills

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

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
