package mcp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"sync/atomic"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/skills"
)

// transport prepares the transport: a child process, or HTTP.
func (c *Client) transport(conn *connection, values map[string]string) (sdk.Transport, error) {
	r := conn.remote
	if r.Transport == TransportHTTP {
		return httpTransport(conn, values, c.opts.AllowPrivate, c.opts.TLS)
	}
	var err error
	conn.child, err = startProcess(r.Command, childEnv(values, c.opts.Getenv), c.log.With("server", r.Name), conn.redact)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", r.Command[0], err)
	}
	return &sdk.IOTransport{
		Reader: c.childReader(conn), Writer: conn.child.stdin, MaxLineLength: maxMessage,
	}, nil
}

// childReader reads a child's messages. It skips other lines, because some servers print their log to stdout, and logs
// the first. A broken message ends the session, because the call that waits for it would time out.
func (c *Client) childReader(conn *connection) io.ReadCloser {
	var warned bool
	stdout := conn.child.stdout
	return &lineReader{
		Closer: stdout, in: bufio.NewReader(stdout), maxBytes: maxMessage,
		accept: func(line []byte) (bool, error) {
			if maybeMessage(line) {
				return true, nil
			}
			if !warned {
				c.log.Warn("MCP server prints other text than messages", "server", conn.remote.Name,
					"line", conn.shownText(string(line), maxStderrLine))
			}
			warned = true
			return false, nil
		},
	}
}

// maybeMessage reports whether a line may be a message, whole or broken. A line of a log is text, or JSON without the
// version of JSON-RPC.
func maybeMessage(line []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(line, "[ "), []byte("{")) &&
		(bytes.Contains(line, []byte(`"jsonrpc"`)) || !json.Valid(line))
}

// childEnv returns the environment of a child: the minimum for a program to start, and the declared variables.
func childEnv(declared map[string]string, getenv func(string) string) []string {
	env := make([]string, 0, len(declared)+3)
	for _, name := range []string{"PATH", "HOME", "LANG"} {
		if value := getenv(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	for name, value := range declared {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env
}

// httpTransport speaks streamable HTTP through the guarded dialer. It does not resume a broken stream: the call
// fails.
func httpTransport(conn *connection, headers map[string]string, allow []string, tlsConfig *tls.Config) (
	sdk.Transport, error,
) {
	client, err := skills.NewGuardedClient(allow, tlsConfig)
	if err != nil {
		return nil, err
	}
	client.Transport = &boundedTransport{next: client.Transport, headers: headers, conn: conn}
	return &sdk.StreamableClientTransport{
		Endpoint: conn.remote.URL, HTTPClient: client, MaxRetries: -1, DisableStandaloneSSE: true, MaxEventSize: maxMessage,
	}, nil
}

// unprocessed are the statuses of a server that did not process the request.
var unprocessed = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests, http.StatusServiceUnavailable,
}

// errSessionUnknown reports that the server did not process the request, because it does not know the session.
var errSessionUnknown = &skills.CallError{
	Class: skills.ClassUnavailable, Message: "the server does not know the session",
}

// boundedTransport adds the declared headers to each request and bounds each response. It makes an error of a status
// that says the server did not process the request. Such an error fails that request, but no other of the session.
type boundedTransport struct {
	next    http.RoundTripper
	headers map[string]string
	conn    *connection
}

func (b *boundedTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	var connected atomic.Bool
	request = request.Clone(httptrace.WithClientTrace(request.Context(), &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	}))
	for name, value := range b.headers {
		request.Header.Set(name, value)
	}
	cancel := func() {}
	if request.Method == http.MethodDelete { // a session must end quickly
		var ctx context.Context
		ctx, cancel = context.WithTimeout(request.Context(), stopTimeout)
		request = request.WithContext(ctx)
	}
	response, err := b.next.RoundTrip(request)
	if err != nil {
		cancel()
		if _, classified := errors.AsType[*skills.CallError](err); !classified && !connected.Load() {
			err = &skills.CallError{Class: skills.ClassUnavailable, Message: err.Error()} // no byte was sent
		}
		return nil, err
	}
	if request.Method == http.MethodPost && slices.Contains(unprocessed, response.StatusCode) {
		cancel()
		failure := &skills.CallError{Class: skills.ClassUnavailable, Message: response.Status}
		if code := response.StatusCode; code == http.StatusUnauthorized || code == http.StatusForbidden {
			failure = skills.NewConfigError("the server refuses the credentials (%s): check headers of mcp_server %s",
				response.Status, b.conn.remote.Name)
		}
		return nil, errors.Join(failure, response.Body.Close())
	}
	if request.Method == http.MethodPost && request.Header.Get("Mcp-Session-Id") != "" {
		switch response.StatusCode {
		case http.StatusNotFound: // whatever the body is
			cancel()
			b.conn.stale.Store(true)
			return nil, errors.Join(errSessionUnknown, response.Body.Close())
		case http.StatusBadRequest: // some servers say so of an unknown session
			b.conn.stale.Store(true)
		}
	}
	response.Body = &boundedBody{
		ReadCloser: response.Body, remaining: maxMessage, responseTooLong: &b.conn.responseTooLong, cancel: cancel,
	}
	return response, nil
}

// boundedBody fails when a response is too long.
type boundedBody struct {
	io.ReadCloser
	remaining       int
	responseTooLong *atomic.Bool
	cancel          func()
}

func (b *boundedBody) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), b.remaining+1)])
	if b.remaining -= n; b.remaining < 0 {
		b.responseTooLong.Store(true)
		return 0, fmt.Errorf("the response has more than %d bytes", maxMessage)
	}
	return n, err
}
