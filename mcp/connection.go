package mcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"regexp"
	"sync/atomic"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
)

// maxTimeouts is the number of consecutive timeouts after which a connection must answer a ping. Otherwise the client
// replaces the connection.
const maxTimeouts = 3

// connection is a session with a server, and the listed tools.
type connection struct {
	remote     Remote
	session    *sdk.ClientSession
	child      *process // nil over HTTP
	redact     func(string) string
	openedAt   time.Time
	tools      atomic.Pointer[map[string]snapshot]
	serverInfo string

	stale           atomic.Bool  // the next call must open another connection
	relist          atomic.Bool  // the next call must list the tools first
	timeouts        atomic.Int32 // consecutive timeouts
	calls           atomic.Int32 // pending calls
	responseTooLong atomic.Bool  // an HTTP response was longer than maxMessage
	done            chan struct{}
}

// connect opens a connection and lists the server's tools. ctx bounds these two steps, but not the connection's life.
// cleanup runs a function after a failure, now or in the background.
func (c *Client) connect(ctx context.Context, r Remote, cleanup func(func())) (*connection, error) {
	limit := connectTimeout
	if r.Transport == TransportHTTP { // there is nothing to start
		limit = min(limit, max(minConnect, time.Duration(r.TimeoutMS)*time.Millisecond))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the server has not answered within %s", limit))
	defer cancel()
	defer time.AfterFunc(slowConnectNotice, func() {
		c.log.InfoContext(ctx, "waiting for MCP server", "server", r.Name, "limit", limit.String())
	}).Stop()
	declared := r.Headers
	if r.Transport == TransportStdio {
		declared = r.Env
	}
	values, secrets, err := resolve(declared, c.opts.Getenv)
	if err != nil {
		return nil, err
	}
	conn := &connection{remote: r, redact: redact.Secrets(secrets), openedAt: time.Now(), done: make(chan struct{})}
	transport, err := c.transport(conn, values)
	if err != nil {
		return nil, conn.redactError(err)
	}
	if err := conn.open(ctx, transport, c.opts.Version); err != nil {
		if conn.session != nil {
			cleanup(conn.close)
		} else if conn.child != nil {
			cleanup(conn.child.stop)
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, conn.redactError(err)
	}
	return conn, nil
}

// sdkCalls matches the names of the SDK's calls at the beginning of its errors.
var sdkCalls = regexp.MustCompile(`(calling|sending) "[^"]*": |rejected by transport: |(Post|Get) "[^"]*": `)

// errorText returns the text of an error for an operator.
func (conn *connection) errorText(err error, limit int) string {
	text := sdkCalls.ReplaceAllString(err.Error(), "")
	if errors.Is(err, io.EOF) || errors.Is(err, sdk.ErrConnectionClosed) {
		text = "the server closed the connection"
		if conn.child != nil {
			text += "; its error output is in the log"
		}
	}
	return conn.shownText(text, limit)
}

// redactError redacts secrets in an error.
func (conn *connection) redactError(err error) error {
	text := conn.errorText(err, 900)
	if refused, ok := errors.AsType[*skills.CallError](err); ok {
		return &skills.CallError{Class: refused.Class, Message: text}
	}
	return errors.New(text)
}

// shownText returns a foreign text without secrets, of at most limit characters. It redacts before it cuts, so no part
// of a secret stays.
func (conn *connection) shownText(text string, limit int) string {
	return cleanText(conn.redact(cleanText(text, len(text))), limit)
}

// open begins the session and lists the tools.
func (conn *connection) open(ctx context.Context, transport sdk.Transport, version string) error {
	options := &sdk.ClientOptions{Capabilities: &sdk.ClientCapabilities{}, Logger: slog.New(slog.DiscardHandler)}
	if conn.child != nil { // over HTTP this would hold a stream open; there, the client refreshes the list by age
		options.ToolListChangedHandler = func(context.Context, *sdk.ToolListChangedRequest) { conn.relist.Store(true) }
	}
	client := sdk.NewClient(&sdk.Implementation{Name: "lanekeeper", Version: version}, options)
	session, err := client.Connect(ctx, transport, nil)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	conn.session = session
	go func() { // ends with the session; close waits for it
		defer close(conn.done)
		_ = session.Wait() // the pending call reports the error
	}()
	if result := session.InitializeResult(); result != nil && result.ServerInfo != nil {
		conn.serverInfo = cleanText(fmt.Sprintf("%s %s, MCP %s", result.ServerInfo.Name, result.ServerInfo.Version,
			result.ProtocolVersion), 200)
	}
	return conn.list(ctx)
}

// list lists the tools.
func (conn *connection) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	conn.relist.Store(false) // before the request, so a later announcement counts
	tools, err := listTools(ctx, conn.session)
	if err == nil {
		conn.tools.Store(&tools)
	}
	return err
}

// listed returns the tools of the last list.
func (conn *connection) listed() map[string]snapshot { return *conn.tools.Load() }

// listTools reads a server's tools within bounds. The first tool of each name counts. A tool with an unusable name gets
// another name and a problem.
func listTools(ctx context.Context, session *sdk.ClientSession) (map[string]snapshot, error) {
	listed, unusable := make(map[string]snapshot), make(map[string]snapshot)
	params := &sdk.ListToolsParams{}
	for range maxPages {
		page, err := session.ListTools(ctx, params)
		if err != nil {
			return nil, fmt.Errorf("list tools: %w", err)
		}
		for _, t := range page.Tools {
			if _, duplicate := listed[t.Name]; duplicate {
				continue
			}
			if len(listed)+len(unusable) == maxTools {
				return nil, fmt.Errorf("list tools: there are more than %d; let the server list fewer", maxTools)
			}
			if name := cleanText(t.Name, 128); name == "" || len(t.Name) > 128 || name != t.Name {
				unusable[cmp.Or(name, "(no name)")] = snapshot{
					problem: "its name is empty, longer than 128 bytes, or has invisible characters",
				}
				continue
			}
			listed[t.Name] = newSnapshot(t)
		}
		if page.NextCursor == "" {
			maps.Copy(unusable, listed)
			return unusable, nil
		}
		params = &sdk.ListToolsParams{Cursor: page.NextCursor}
	}
	return nil, fmt.Errorf("list tools: there are more than %d pages", maxPages)
}

// usable reports whether the next call may use the connection. It lists the tools again after the server announced a
// change. r is the current declaration.
func (conn *connection) usable(ctx context.Context, r Remote) bool {
	select {
	case <-conn.done:
		return false
	default:
	}
	if conn.child != nil && conn.child.waitExit(0) {
		return false
	}
	tooOld := conn.child == nil && time.Since(conn.openedAt) > maxConnectionAge
	return !tooOld && !conn.stale.Load() && conn.remote.Revision == r.Revision &&
		(conn.timeouts.Load() < maxTimeouts || conn.respondsToPing(ctx)) &&
		(!conn.relist.Load() || conn.list(ctx) == nil)
}

// respondsToPing reports whether the server answers a ping. The client must not end a server that is only slow.
func (conn *connection) respondsToPing(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	answered := make(chan error, 1)
	go func() { answered <- conn.session.Ping(ctx, nil) }() // ends with the connection
	select {
	case err := <-answered:
		if _, refused := protocolError(err); err != nil && !refused {
			return false
		}
		conn.timeouts.Store(0)
		return true
	case <-ctx.Done():
		return false
	}
}

// retire closes a replaced connection after its pending calls. It does not wait for a server that ended or is
// unresponsive, nor after ctx.
func (conn *connection) retire(ctx context.Context) {
	defer conn.close()
	ticker := time.NewTicker(callPollInterval)
	defer ticker.Stop()
	for conn.calls.Load() > 0 && conn.timeouts.Load() < maxTimeouts && (conn.child == nil || !conn.child.waitExit(0)) {
		select {
		case <-ticker.C:
		case <-conn.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

// close ends the session with its pending calls, and the child.
func (conn *connection) close() {
	if conn.child != nil {
		defer conn.child.stop()
	}
	closed := make(chan struct{})
	go func() { // ends at the latest with the child's kill
		defer close(closed)
		_ = conn.session.Close() // the connection may be closed already
	}()
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
		if conn.child != nil {
			conn.child.kill()
			<-closed
		}
	}
}

// call sends one call and waits for its answer. It returns soon after ctx ends, even if the child does not read.
func (conn *connection) call(ctx context.Context, params *sdk.CallToolParams) (*sdk.CallToolResult, error) {
	conn.calls.Add(1)
	defer conn.calls.Add(-1)
	type answer struct {
		result *sdk.CallToolResult
		err    error
	}
	answered := make(chan answer, 1)
	go func() { // ends with the call; a child that does not read is killed below
		result, err := conn.session.CallTool(ctx, params)
		answered <- answer{result, err}
	}()
	var a answer
	select {
	case a = <-answered:
	case <-ctx.Done():
		timer := time.NewTimer(stopTimeout)
		defer timer.Stop()
		select {
		case a = <-answered:
		case <-timer.C:
			conn.stale.Store(true)
			if conn.child != nil {
				conn.child.kill()
			}
			a = answer{err: io.ErrClosedPipe}
		}
	}
	if ctx.Err() != nil {
		conn.timeouts.Add(1)
		return nil, ctx.Err()
	}
	if a.err == nil {
		conn.timeouts.Store(0)
	}
	return a.result, a.err
}
