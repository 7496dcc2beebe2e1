package mcp

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Options configure a client. Pool is required.
type Options struct {
	Pool *pgxpool.Pool
	// AllowPrivate lists private targets over HTTP, like the setting of http: skills.
	AllowPrivate []string
	TLS          *tls.Config         // for a private certificate authority; nil for the system's
	Getenv       func(string) string // resolves ${NAME} and the environment of child processes; os.Getenv when nil
	Logger       *slog.Logger        // nil for none
	Agent        string              // owner of the activity of a sync
	Version      string              // sent to servers
}

// Client holds this process's connections to MCP servers: one each, opened on first use. It is safe for concurrent
// use. [Client.Close] ends the connections.
type Client struct {
	opts Options
	log  *slog.Logger

	mu         sync.Mutex
	slots      map[string]*slot
	closed     bool
	closing    sync.WaitGroup  // connections that are closing
	baseCtx    context.Context // of connection attempts; ends with Close
	cancelBase context.CancelFunc
}

// slot holds one server's connection.
type slot struct {
	lock chan struct{} // guards conn; a channel, so that a waiter can give up
	conn *connection
	// After a failure, retryAt is the earliest time of the next connection.
	failures  int
	retryAt   time.Time
	lastError error
}

// NewClient returns a client. It opens no connection.
func NewClient(o Options) *Client {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	o.Version = cmp.Or(o.Version, "dev")
	c := &Client{opts: o, log: cmp.Or(o.Logger, slog.New(slog.DiscardHandler)), slots: map[string]*slot{}}
	c.baseCtx, c.cancelBase = context.WithCancel(context.Background())
	return c
}

// errClosed reports a closed client.
var errClosed = errors.New("the MCP client is closed")

// Call calls a mounted tool; it implements [skills.RemoteCall]. The tool must match the accepted definition on the
// connection in use. Otherwise Call quarantines the tool and rejects the call. Call sends a call once, and again only
// if the server rejected an unknown session.
func (c *Client) Call(ctx context.Context, t skills.RemoteTool, call skills.Call, args map[string]any) (any, error) {
	for try := 0; ; try++ {
		conn, err := c.trustedConnection(ctx, t)
		if err != nil {
			return nil, err
		}
		result, err := conn.call(ctx, &sdk.CallToolParams{Meta: callMeta(ctx, call), Name: t.Tool, Arguments: args})
		switch {
		case err == nil:
			return readResult(t, result, conn.listed()[t.Tool].output, conn.redact)
		case errors.Is(err, errSessionUnknown) && try == 0 && ctx.Err() == nil: // conn is stale, so another is opened
		default:
			return nil, c.classifyFailure(ctx, t, conn, err)
		}
	}
}

// trustedConnection returns a connection on which the tool has the accepted hash. A connection with another hash may
// be older than the acceptance, so a new connection decides.
func (c *Client) trustedConnection(ctx context.Context, t skills.RemoteTool) (*connection, error) {
	for try := 0; ; try++ {
		conn, err := c.connection(ctx, t.Server)
		if err != nil {
			return nil, err
		}
		if conn.listed()[t.Tool].pin == t.Pin {
			return conn, nil
		}
		if try == 0 && time.Since(conn.openedAt) > time.Second {
			conn.stale.Store(true)
			continue
		}
		if err := c.quarantine(ctx, conn); err != nil {
			c.log.WarnContext(ctx, "changed MCP tool not recorded", "server", t.Server, "tool", t.Tool, "error", err)
		}
		return nil, &skills.CallError{Class: skills.ClassRefused, Message: fmt.Sprintf(
			"tool %s of the MCP server %s differs from its accepted definition; see agent mcp show %s %s", t.Tool,
			t.Server, t.Server, t.Tool)}
	}
}

// quarantine settles the server's tools by a connection's list.
func (c *Client) quarantine(ctx context.Context, conn *connection) error {
	return postgres.InTx(ctx, c.opts.Pool, func(tx pgx.Tx) error {
		_, err := reconcile(ctx, tx, conn.remote.Name, c.opts.Agent, conn.listed())
		return err
	})
}

// classifyFailure classifies a failed call and retires a broken connection. Unless the server was not reached, or did
// not take the request, it may have acted.
func (c *Client) classifyFailure(ctx context.Context, t skills.RemoteTool, conn *connection, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	message := fmt.Sprintf("%s/%s: %s", t.Server, t.Tool, conn.errorText(err, 500))
	if refused, ok := protocolError(err); ok {
		return &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf("%s/%s: %s", t.Server, t.Tool,
			conn.shownText(refused, 500))}
	}
	conn.stale.Store(true)
	if conn.responseTooLong.Load() { // the SDK drops the error of the body
		message += fmt.Sprintf(" (a response of the server has more than %d bytes)", maxMessage)
	}
	class := skills.ClassNoAnswer
	if refused, ok := errors.AsType[*skills.CallError](err); ok {
		class = refused.Class
	}
	if class == skills.ClassNoAnswer {
		message += "; the call may have taken effect"
	}
	return &skills.CallError{Class: class, Message: message}
}

// connection returns the server's connection, or opens a new connection if none is usable. A start that takes longer
// than the call continues and serves the next call.
func (c *Client) connection(ctx context.Context, server string) (*connection, error) {
	r, err := Get(ctx, c.opts.Pool, server)
	if errors.Is(err, ErrNotFound) {
		return nil, &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf("MCP server %s was removed", server)}
	}
	if err != nil {
		return nil, err
	}
	s, err := c.slot(server)
	if err != nil {
		return nil, unavailableError(server, err)
	}
	select {
	case s.lock <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.baseCtx.Done(): // Close keeps the lock
		return nil, unavailableError(server, errClosed)
	}
	var conn *connection
	opened := make(chan struct{})
	go func() { // ends at the latest with Close, which waits for the lock
		defer func() { close(opened); <-s.lock }()
		conn, err = c.connectionLocked(c.baseCtx, s, r)
	}()
	select {
	case <-opened:
		return conn, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// connectionLocked is like connection. The caller holds the slot's lock.
func (c *Client) connectionLocked(ctx context.Context, s *slot, r Remote) (*connection, error) {
	if s.conn != nil && s.conn.usable(ctx, r) {
		return s.conn, nil
	}
	if s.conn != nil {
		replaced := s.conn
		c.closing.Go(func() { replaced.retire(ctx) })
		s.conn = nil
	}
	if wait := time.Until(s.retryAt); wait > 0 {
		return nil, unavailableError(r.Name, fmt.Errorf("%w; the next try is in %s", s.lastError,
			wait.Round(100*time.Millisecond)))
	}
	conn, err := c.connect(ctx, r, c.closing.Go)
	if err != nil {
		return nil, s.recordFailure(ctx, r.Name, err)
	}
	if !c.storeConnection(s, conn) {
		conn.close()
		return nil, unavailableError(r.Name, errClosed)
	}
	return conn, nil
}

func (c *Client) slot(server string) (*slot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed
	}
	if c.slots[server] == nil {
		c.slots[server] = &slot{lock: make(chan struct{}, 1)}
	}
	return c.slots[server], nil
}

// storeConnection stores a new connection in its slot. It returns false if Close ended the client meanwhile.
func (c *Client) storeConnection(s *slot, conn *connection) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	s.conn, s.failures, s.retryAt = conn, 0, time.Time{}
	return true
}

// recordFailure records a failed connection. The first failure permits an immediate retry. A failure by Close, which
// ends ctx, does not count.
func (s *slot) recordFailure(ctx context.Context, server string, err error) error {
	if ctx.Err() != nil {
		return unavailableError(server, errClosed)
	}
	s.lastError = err
	if s.failures++; s.failures > 1 {
		s.retryAt = time.Now().Add(min(time.Second<<min(s.failures-2, 10), maxBackoff))
	}
	return unavailableError(server, err)
}

// unavailableError reports that a server has no usable connection. A [skills.CallError] in err keeps its class.
func unavailableError(server string, err error) error {
	class := skills.ClassUnavailable
	if refused, ok := errors.AsType[*skills.CallError](err); ok {
		class = refused.Class
	}
	return &skills.CallError{
		Class:   class,
		Message: fmt.Sprintf("MCP server %s: %s", server, cleanText(err.Error(), 500)),
	}
}

// Close ends all connections and their child processes, and waits for them. Later calls fail.
func (c *Client) Close() {
	c.cancelBase()
	c.mu.Lock()
	c.closed = true
	slots := c.slots
	c.slots = map[string]*slot{}
	c.mu.Unlock()
	for _, s := range slots {
		c.closing.Go(func() {
			s.lock <- struct{}{} // kept: a waiting call ends with baseCtx
			if s.conn != nil {
				s.conn.close()
			}
		})
	}
	c.closing.Wait()
}

// callMeta returns the metadata of a call: its idempotency key and the W3C trace context.
func callMeta(ctx context.Context, call skills.Call) sdk.Meta {
	m := sdk.Meta{}
	if call.IdempotencyKey != "" {
		m["lanekeeper/idempotency-key"] = call.IdempotencyKey
	}
	if parent := trace.Traceparent(ctx); parent != "" {
		m["traceparent"] = parent
	}
	return m
}

// Run syncs due servers, and closes the connections to removed ones, until ctx ends; then it closes the client and
// returns nil. A server is due after a new declaration, 15 minutes after its last sync, and one minute after a failure.
// Run also prunes old calls that external clients made through [Server].
func (c *Client) Run(ctx context.Context) error {
	defer c.Close()
	ticker := time.NewTicker(syncRetryInterval / 4)
	defer ticker.Stop()
	for {
		c.closeRemoved(ctx)
		c.syncDue(ctx)
		c.prune(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// closeRemoved closes the connections to servers that the workspace no longer has, with their child processes.
func (c *Client) closeRemoved(ctx context.Context) {
	c.mu.Lock()
	slots := maps.Clone(c.slots)
	c.mu.Unlock()
	removed, err := postgres.Names(ctx, c.opts.Pool, "find removed MCP servers", `
		select g.name from unnest(@names::text[]) g (name)
		 where not exists (select from agent_mcp_servers s where s.name = g.name)`,
		postgres.Strict{"names": slices.AppendSeq([]string{}, maps.Keys(slots))})
	if err != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "connections to removed MCP servers not closed", "error", err)
	}
	for _, name := range removed {
		s := slots[name]
		select {
		case s.lock <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if s.conn != nil {
			c.closing.Go(s.conn.close) // Close waits for the lock, so it cannot have ended
			s.conn = nil
		}
		<-s.lock
	}
}

// prune deletes old calls of external clients. A call whose answer nobody collected is old when its execution is.
func (c *Client) prune(ctx context.Context) {
	_, err := c.opts.Pool.Exec(ctx, `
		delete from agent_mcp_calls c using (select statement_timestamp() - make_interval(secs => @life) as before) o
		 where c.collected_at < o.before
		    or c.collected_at is null and c.created_at < o.before
		       and not exists (select from agent_executions x
		                        where x.dedupe_key = 'mcp.call ' || c.id
		                          and (x.completed_at is null or x.completed_at >= o.before))`,
		postgres.Strict{"life": callTTL.Seconds()})
	if err != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "old MCP calls not removed", "error", err)
	}
}
