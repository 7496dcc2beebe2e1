// Package mcp implements the Model Context Protocol in both directions. It mounts the tools of other programs as
// skills, and offers chosen skills as tools.
//
// # Mounted tools
//
// The workspace declares a server ([Definition]). The client reaches it over streamable HTTP, or as a child process
// over stdio. A sync lists its tools and mounts each as the skill mcp__{server}__{tool}. Its trust is "approve"
// unless an admin sets another. Such a skill has validated arguments, a timeout that cancels the call, a durable
// step, and self-heal.
//
// A server is not trusted:
//
//   - Tools are pinned. The skill stores the hash of the tool's name, description, input schema and annotations. The
//     client quarantines a tool with another hash: it disables the skill until an admin accepts the new version. Every
//     call compares the pin with the list of its connection. Over stdio, the client lists again when the server
//     announces a change; over HTTP, on a connection older than ten minutes.
//   - Annotations can only restrict. A tool that declares itself destructive needs approval. A tool that declares
//     itself read-only gains nothing. Only the admin decides whether the client may repeat a call.
//   - The client removes control and invisible characters from descriptions and errors, but not from results. It bounds
//     schemas, results and messages. It redacts secrets that a server repeats.
//   - Private addresses need the operator's permission. A child process gets PATH, HOME, LANG and the declared
//     variables.
//
// For calls, the client opens one connection per server, on first use, and again after a failure. A sync uses a
// connection of its own. The client sends a call again only if the server rejected the first because it did not know
// the session. A call to an unreachable server fails with class unavailable.
//
// # Offered skills
//
// [Server] offers skills over HTTP, behind the caller's access check, and over stdio. Each call is an execution of
// the flow mcp.call. A skill whose trust is "approve" waits for an approval: the caller receives the approval's id.
// After the decision, the same call of this caller with the same arguments receives the answer once.
package mcp

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Errors that callers distinguish.
var (
	// ErrNotFound reports an unknown server or tool.
	ErrNotFound = errors.New("no such MCP server or tool")
	// ErrNothingToAccept reports that a tool has no version to accept, or another one than the admin read.
	ErrNothingToAccept = errors.New("nothing to accept")
)

// Actor is the name under which this package disables skills.
const Actor = "mcp"

// Limits on input from a server.
const (
	maxTools       = 256
	maxPages       = 64
	maxDefinition  = 64 << 10
	maxDescription = 1500
	maxSchemaText  = 400
	maxOutputDepth = 64      // nesting of an output schema that is compared with results
	maxMessage     = 8 << 20 // bounds a message, and an HTTP response
	maxStderrLine  = 2000
)

// Timeouts and intervals.
const (
	connectTimeout     = 90 * time.Second // npx may download a package first
	slowConnectNotice  = 2 * time.Second  // after this time, the log reports the wait for a server
	minConnect         = 5 * time.Second  // applies over HTTP, if timeout_ms is shorter
	maxConcurrentSyncs = 4                // a silent server blocks one of them
	listTimeout        = 30 * time.Second
	maxConnectionAge   = 10 * time.Minute // an older HTTP connection, with its list of tools, is replaced
	syncInterval       = 15 * time.Minute
	syncRetryInterval  = time.Minute
	maxBackoff         = 30 * time.Second
	callTTL            = 7 * 24 * time.Hour
)

// Source marks mounted skills.
const Source = skills.SourceMCP

// Transports.
const (
	TransportHTTP  = "http"  // streamable HTTP
	TransportStdio = "stdio" // a child process
)

// Definition declares a server with tools to mount, in a workspace file. Defaults: scope internal, trust approve, all
// tools, a timeout of 30 s per call. The transport follows from url or command. Patterns are those of path.Match, on
// the tool's own name.
type Definition struct {
	Name      string         `yaml:"name" json:"name"`
	Transport string         `yaml:"transport" json:"transport,omitempty"` // http or stdio
	URL       string         `yaml:"url" json:"url,omitempty"`             // http only
	Headers   map[string]any `yaml:"headers" json:"headers,omitempty"`     // http only; secrets as ${NAME} or file:/path
	Command   []string       `yaml:"command" json:"command,omitempty"`     // stdio only
	Env       map[string]any `yaml:"env" json:"env,omitempty"`             // stdio only; secrets as ${NAME} or file:/path
	Scope     string         `yaml:"scope" json:"scope,omitempty"`
	Trust     string         `yaml:"trust" json:"trust,omitempty"`
	// Auto are patterns of tools that need no approval, for any Trust. A tool that declares itself destructive needs
	// approval nevertheless.
	Auto       []string `yaml:"auto" json:"auto,omitempty"`
	Include    []string `yaml:"include" json:"include,omitempty"`
	Exclude    []string `yaml:"exclude" json:"exclude,omitempty"`
	Idempotent []string `yaml:"idempotent" json:"idempotent,omitempty"` // tools whose calls may repeat after a crash
	TimeoutMS  int      `yaml:"timeout_ms" json:"timeout_ms,omitempty"`
}

var (
	serverName      = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,23}$`)
	headerName      = regexp.MustCompile("^[a-zA-Z0-9!#$%&'*+.^_`|~-]+$")
	envName         = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	reservedHeaders = []string{
		"accept", "connection", "content-length", "content-type", "host", "mcp-protocol-version",
		"mcp-session-id", "transfer-encoding", "upgrade",
	}
)

// Validate returns all problems of d, each as "field path: problem", joined like [errors.Join]. It resolves no secret
// and reaches no server.
func Validate(d Definition) error {
	var problems fielderr.List
	if !serverName.MatchString(d.Name) {
		problems.Add("name", "%q must be 1 to 24 of the characters a-z 0-9 - and begin with a letter or digit", d.Name)
	}
	switch d.transport() {
	case TransportHTTP:
		problems = append(problems, d.checkHTTP()...)
	case TransportStdio:
		problems = append(problems, d.checkStdio()...)
	default:
		problems.Add("transport", "%q is not one of http, stdio", d.Transport)
	}
	if scope := d.scope(); scope != skills.ScopeInternal && scope != skills.ScopeExternal && scope != skills.ScopeBoth {
		problems.Add("scope", "%q is not one of internal, external, both", scope)
	}
	if trust := d.trust(); trust != skills.TrustAuto && trust != skills.TrustNotify && trust != skills.TrustApprove {
		problems.Add("trust", "%q is not one of auto, notify, approve", trust)
	}
	if t := d.timeout(); t < 10*time.Millisecond || t > time.Hour {
		problems.Add("timeout_ms", "%d must be between 10 and 3600000", d.TimeoutMS)
	}
	for field, patterns := range map[string][]string{
		"auto": d.Auto, "include": d.Include, "exclude": d.Exclude,
		"idempotent": d.Idempotent,
	} {
		for i, p := range patterns {
			if _, err := path.Match(p, ""); err != nil || p == "" {
				problems.Add(fmt.Sprintf("%s[%d]", field, i), "%q is not a pattern; write a tool's name, or read_*", p)
			}
		}
	}
	slices.SortStableFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

func (d Definition) checkHTTP() fielderr.List {
	var problems fielderr.List
	u, err := url.Parse(d.URL)
	switch {
	case d.URL == "":
		problems.Add("url", "is empty; write the address of the server's MCP endpoint, or a command for stdio")
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		problems.Add("url", "must begin with https:// or http:// and a host")
	case u.User != nil || u.Fragment != "" || hasSecretQuery(u):
		problems.Add("url", "must hold no user, password, key or fragment; put a secret into headers, as ${NAME}")
	}
	if len(d.Command) > 0 || len(d.Env) > 0 {
		problems.Add("command", "a server is reached over http or over stdio; keep url and headers, or command and env")
	}
	for name, value := range d.Headers {
		field := "headers." + name
		if !headerName.MatchString(name) || slices.Contains(reservedHeaders, strings.ToLower(name)) {
			problems.Add(field, "is no header that may be set")
		}
		problems = append(problems, checkValue(field, name, value)...)
	}
	return problems
}

func (d Definition) checkStdio() fielderr.List {
	var problems fielderr.List
	if len(d.Command) == 0 || d.Command[0] == "" {
		problems.Add("command", "is empty; write the program and its arguments as a list, or a url for http")
	}
	if d.URL != "" || len(d.Headers) > 0 {
		problems.Add("url", "a server is reached over http or over stdio; keep url and headers, or command and env")
	}
	for i, arg := range d.Command {
		if strings.ContainsRune(arg, 0) || redact.Text(arg, 10_000) != arg {
			problems.Add(fmt.Sprintf("command[%d]", i), "looks like a secret, and every user of the machine "+
				"sees arguments; pass it in env, as ${NAME}")
		}
	}
	for name, value := range d.Env {
		field := "env." + name
		if !envName.MatchString(name) {
			problems.Add(field, "is not the name of an environment variable")
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

func (d Definition) scope() string { return cmp.Or(d.Scope, skills.ScopeInternal) }

func (d Definition) trust() string { return cmp.Or(d.Trust, skills.TrustApprove) }

func (d Definition) timeout() time.Duration {
	return time.Duration(cmp.Or(d.TimeoutMS, 30_000)) * time.Millisecond
}

// matches reports whether a pattern matches a tool's name.
func matches(patterns []string, tool string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, tool)
		return err == nil && ok
	})
}
