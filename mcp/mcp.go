// Package mcp speaks the Model Context Protocol in both directions: tools of other programs become skills, and
// chosen skills become tools of others.
//
// # Their tools as our skills
//
// A server is declared in the workspace ([Definition]) and reached over streamable HTTP or as a child process over
// stdio. A sync lists its tools and mounts each as the skill mcp__{server}__{tool}, whose trust is "approve" unless
// an admin said otherwise. From then on it is a skill like any other: checked arguments, a timeout that cancels the
// call, a durable step, self-heal.
//
// What a server says about itself is a stranger's word, so:
//
//   - A tool is pinned: the hash of its name, description, input schema and annotations is kept with the skill. A tool
//     that shows another hash is quarantined (its skill is disabled, both versions are kept) until an admin accepts it. The
//     pin is compared with what the connection in use lists, not only at a sync, and the listing of a connection is
//     taken anew when the server says that it changed and, over HTTP, every ten minutes.
//   - Annotations only raise the gate: a tool that says it is destructive needs approval whatever was set, and one that
//     says it only reads gains nothing. Whether a call may be repeated is the admin's word alone.
//   - Texts are cleaned of control and invisible characters and cut, schemas, results and messages are bounded, secrets that
//     a server repeats are blotted out.
//   - Private addresses are dialled only when allowed; a child gets PATH, HOME, LANG and what was declared.
//
// Connections are made when first needed, one per server, and made again after a failure; a call is never sent
// twice. A server that cannot be reached fails the call with class unavailable.
//
// # Our skills as their tools
//
// [Server] offers the skills that an admin chose, over HTTP behind the caller's access check and over stdio. Each
// call is an execution of the flow mcp.call. A skill whose trust is "approve" parks it: the caller is told the
// approval's id and, calling again with the same arguments after the decision, gets the answer, once.
package mcp

import (
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/skills"
)

// Errors that callers tell apart.
var (
	// ErrNotFound reports a server or a tool that does not exist.
	ErrNotFound = errors.New("no such MCP server or tool")
	// ErrNothingToAccept reports a tool that is not in quarantine, or has changed again since it was looked at.
	ErrNothingToAccept = errors.New("the tool is not in quarantine, or has changed again")
)

// By is the name under which this package disables skills.
const By = "mcp"

// Limits of what is taken from a server.
const (
	maxTools       = 256
	maxPages       = 64
	maxDefinition  = 64 << 10
	maxDescription = 1500
	maxSchemaText  = 400
	maxMessage     = 8 << 20 // one message, and one HTTP answer
	maxStderrLine  = 2000
)

// Times.
const (
	connectTimeout = 90 * time.Second // npx may fetch a package first
	listTimeout    = 30 * time.Second
	maxAge         = 10 * time.Minute // of an HTTP connection and its listing
	syncEvery      = 15 * time.Minute
	retryEvery     = time.Minute
	longestPause   = 30 * time.Second
	keepCalls      = 7 * 24 * time.Hour
)

// Source marks the skills that were mounted.
const Source = skills.SourceMCP
