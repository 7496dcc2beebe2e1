package mcp

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Transports.
const (
	TransportHTTP  = "http"  // streamable HTTP
	TransportStdio = "stdio" // a child process
)

// Definition is what a workspace file declares about a server whose tools are mounted. Empty fields mean: transport
// by what is given, scope internal, trust approve, all tools, a timeout of 30 s per call. Patterns are those of
// path.Match, on the tool's own name.
type Definition struct {
	Name      string         `yaml:"name" json:"name"`
	Transport string         `yaml:"transport" json:"transport,omitempty"` // http or stdio
	URL       string         `yaml:"url" json:"url,omitempty"`             // of http
	Headers   map[string]any `yaml:"headers" json:"headers,omitempty"`     // of http; secrets as ${NAME} or file:/path
	Command   []string       `yaml:"command" json:"command,omitempty"`     // of stdio
	Env       map[string]any `yaml:"env" json:"env,omitempty"`             // of stdio; secrets as ${NAME} or file:/path
	Scope     string         `yaml:"scope" json:"scope,omitempty"`
	Trust     string         `yaml:"trust" json:"trust,omitempty"`
	// Auto are patterns of tools that act without approval, whatever Trust says; a tool that says it is destructive
	// needs approval nevertheless.
	Auto       []string `yaml:"auto" json:"auto,omitempty"`
	Include    []string `yaml:"include" json:"include,omitempty"`
	Exclude    []string `yaml:"exclude" json:"exclude,omitempty"`
	Idempotent []string `yaml:"idempotent" json:"idempotent,omitempty"` // may be called again after a crash
	TimeoutMS  int      `yaml:"timeout_ms" json:"timeout_ms,omitempty"`
}

var (
	serverName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,23}$`)
	headerName = regexp.MustCompile("^[a-zA-Z0-9!#$%&'*+.^_`|~-]+$")
	envName    = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	ownHeaders = []string{"accept", "connection", "content-length", "content-type", "host", "mcp-protocol-version", "mcp-session-id", "transfer-encoding", "upgrade"}
)

// Validate reports everything that is wrong with d, each problem as "field path: what is wrong", joined as by
// [errors.Join]. It resolves no secret and reaches no server.
func Validate(d Definition) error {
	var problems []error
	add := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if !serverName.MatchString(d.Name) {
		add("name: %q must be 1 to 24 of the characters a-z 0-9 - and begin with a letter or digit", d.Name)
	}
	switch d.transport() {
	case TransportHTTP:
		problems = append(problems, d.checkHTTP()...)
	case TransportStdio:
		problems = append(problems, d.checkStdio()...)
	default:
		add("transport: %q is not one of http, stdio", d.Transport)
	}
	if scope := d.scope(); scope != skills.ScopeInternal && scope != skills.ScopeExternal && scope != skills.ScopeBoth {
		add("scope: %q is not one of internal, external, both", scope)
	}
	if trust := d.trust(); trust != skills.TrustAuto && trust != skills.TrustNotify && trust != skills.TrustApprove {
		add("trust: %q is not one of auto, notify, approve", trust)
	}
	if t := d.timeout(); t < 10*time.Millisecond || t > time.Hour {
		add("timeout_ms: %d must be between 10 and 3600000", d.TimeoutMS)
	}
	for field, patterns := range map[string][]string{"auto": d.Auto, "include": d.Include, "exclude": d.Exclude, "idempotent": d.Idempotent} {
		for i, p := range patterns {
			if _, err := path.Match(p, ""); err != nil || p == "" {
				add("%s[%d]: %q is not a pattern; write a tool's name, or read_*", field, i, p)
			}
		}
	}
	slices.SortStableFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

func (d Definition) checkHTTP() []error {
	var problems []error
	u, err := url.Parse(d.URL)
	switch {
	case d.URL == "":
		problems = append(problems, errors.New("url: is empty; write the address of the server's MCP endpoint, or a command for stdio"))
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		problems = append(problems, errors.New("url: must begin with https:// or http:// and a host"))
	case u.User != nil || u.Fragment != "" || secretQuery(u):
		problems = append(problems, errors.New("url: must hold no user, password, key or fragment; put a secret into headers, as ${NAME}"))
	}
	if len(d.Command) > 0 || len(d.Env) > 0 {
		problems = append(problems, errors.New("command: a server is reached over http or over stdio; keep url and headers, or command and env"))
	}
	for name, value := range d.Headers {
		field := "headers." + name
		if !headerName.MatchString(name) || slices.Contains(ownHeaders, strings.ToLower(name)) {
			problems = append(problems, fmt.Errorf("%s: is no header that may be set", field))
		}
		problems = append(problems, checkValue(field, name, value)...)
	}
	return problems
}

// secretQuery reports whether a URL's query holds what looks like a secret.
func secretQuery(u *url.URL) bool {
	for name, values := range u.Query() {
		for _, v := range values {
			if redact.Hides(name, v) || redact.Text(v, 10_000) != v {
				return true
			}
		}
	}
	return false
}

func (d Definition) checkStdio() []error {
	var problems []error
	if len(d.Command) == 0 || d.Command[0] == "" {
		problems = append(problems, errors.New("command: is empty; write the program and its arguments as a list, or a url for http"))
	}
	if d.URL != "" || len(d.Headers) > 0 {
		problems = append(problems, errors.New("url: a server is reached over http or over stdio; keep url and headers, or command and env"))
	}
	for i, arg := range d.Command {
		if strings.ContainsRune(arg, 0) || redact.Text(arg, 10_000) != arg {
			problems = append(problems, fmt.Errorf("command[%d]: looks like a secret, and everybody on the machine sees arguments; pass it in env, as ${NAME}", i))
		}
	}
	for name, value := range d.Env {
		field := "env." + name
		if !envName.MatchString(name) {
			problems = append(problems, fmt.Errorf("%s: is not the name of an environment variable", field))
		}
		problems = append(problems, checkValue(field, name, value)...)
	}
	return problems
}

func (d Definition) transport() string {
	switch {
	case d.Transport != "":
		return d.Transport
	case len(d.Command) > 0 && d.URL == "":
		return TransportStdio
	}
	return TransportHTTP
}

func (d Definition) scope() string {
	if d.Scope == "" {
		return skills.ScopeInternal
	}
	return d.Scope
}

func (d Definition) trust() string {
	if d.Trust == "" {
		return skills.TrustApprove
	}
	return d.Trust
}

func (d Definition) timeout() time.Duration {
	if d.TimeoutMS == 0 {
		return 30 * time.Second
	}
	return time.Duration(d.TimeoutMS) * time.Millisecond
}

// matches reports whether one of the patterns fits a tool's name.
func matches(patterns []string, tool string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, tool)
		return err == nil && ok
	})
}
