package mcp_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
)

// childVariable makes the test binary a stdio server.
const childVariable = "LANEKEEPER_TEST_MCP"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childVariable); kind != "" {
		os.Exit(runChild(kind))
	}
	pgtest.Main(m)
}

// runChild runs a stdio server. The kind "slow" starts late; the kind "stall" stops reading after 100,000 bytes;
// the kind "change" changes its tools after their first list; the kind "noisy" prints log lines to stdout;
// the kind "broken" has the tool cut, whose response is cut; the kind "exits" has the tool exit, which ends the child.
func runChild(kind string) int {
	fmt.Fprintln(os.Stderr, "child begins")
	if kind == "slow" {
		time.Sleep(4 * time.Second)
	}
	if kind == "noisy" {
		fmt.Print("[info] ready on stdio\n\n{\"level\": \"info\"}\n")
	}
	if kind == "change" {
		if err := changingServer().Run(context.Background(), &sdk.StdioTransport{}); err != nil {
			return 1
		}
		return 0
	}
	if kind == "stall" {
		in := &stallingReader{remaining: 100_000}
		t := &sdk.IOTransport{Reader: in, Writer: os.Stdout}
		_ = newServer(tools("")...).Run(context.Background(), t)
		return 0
	}
	all := tools(os.Getenv("DESCRIPTION"))
	if kind == "broken" {
		all = append(all, tool{
			sdk.Tool{Name: "cut", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(ctx context.Context, _ *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				fmt.Println(`{"jsonrpc":"2.0","id":2,"resu`)
				<-ctx.Done()
				return nil, ctx.Err()
			},
		})
	}
	if kind == "exits" {
		all = append(all, tool{
			sdk.Tool{Name: "exit", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				os.Exit(1)
				return nil, nil
			},
		})
	}
	if err := newServer(all...).Run(context.Background(), &sdk.StdioTransport{}); err != nil {
		return 1
	}
	return 0
}

// changingServer adds a tool after the first list. It has the tool slow, which ends later than a replaced child would,
// and the tool count, which counts lists, or calls of slow.
func changingServer() *sdk.Server {
	var lists, slow atomic.Int32
	all := tools("")
	s := newServer(all...)
	s.AddReceivingMiddleware(func(next sdk.MethodHandler) sdk.MethodHandler {
		return func(ctx context.Context, method string, r sdk.Request) (sdk.Result, error) {
			result, err := next(ctx, method, r)
			if method == "tools/list" && lists.Add(1) == 1 {
				s.AddTool(&sdk.Tool{Name: "more", InputSchema: json.RawMessage(`{"type":"object"}`)}, all[0].handler)
			}
			return result, err
		}
	})
	s.AddTool(&sdk.Tool{Name: "slow", InputSchema: json.RawMessage(`{"type":"object"}`)},
		func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
			slow.Add(1)
			time.Sleep(6 * time.Second)
			return text("done"), nil
		})
	s.AddTool(&sdk.Tool{Name: "count", InputSchema: json.RawMessage(`{"type":"object"}`)},
		func(_ context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
			if strings.Contains(string(r.Params.Arguments), "slow") {
				return text(fmt.Sprint(slow.Load())), nil
			}
			return text(fmt.Sprint(lists.Load())), nil
		})
	return s
}

// stallingReader reads some bytes of standard input, then blocks.
type stallingReader struct{ remaining int }

func (d *stallingReader) Read(p []byte) (int, error) {
	if d.remaining <= 0 {
		time.Sleep(time.Hour) // without cgo, an empty select would be a deadlock
	}
	n, err := os.Stdin.Read(p[:min(len(p), d.remaining)])
	d.remaining -= n
	return n, err
}

func (d *stallingReader) Close() error { return nil }

// tool is a tool with its implementation.
type tool struct {
	sdk.Tool
	handler sdk.ToolHandler
}

func newServer(all ...tool) *sdk.Server {
	s := sdk.NewServer(&sdk.Implementation{Name: "test", Version: "1.0"}, nil)
	for _, t := range all {
		s.AddTool(&t.Tool, t.handler)
	}
	return s
}

func text(s string) *sdk.CallToolResult {
	return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: s}}}
}

var echoSchema = json.RawMessage(
	`{"type":"object","properties":{"text":{"type":"string"},"times":{"type":"integer","default":1}},"required":["text"]}`)

// tools returns echo, hang, which ends with its cancellation, and two tools that report on the call and the process.
func tools(description string) []tool {
	if description == "" {
		description = "Says it again."
	}
	var cancelled atomic.Int32 // calls of hang
	return []tool{
		{
			sdk.Tool{Name: "echo", Description: description, InputSchema: echoSchema},
			func(_ context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				var in struct {
					Text  string
					Times int
				}
				if err := json.Unmarshal(r.Params.Arguments, &in); err != nil {
					return nil, err
				}
				return text(strings.Repeat(in.Text, in.Times)), nil
			},
		},
		{
			sdk.Tool{Name: "pid", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				return &sdk.CallToolResult{StructuredContent: childProcess{os.Getpid(), os.Environ(), cancelled.Load()}}, nil
			},
		},
		{
			sdk.Tool{Name: "hang", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(ctx context.Context, _ *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				<-ctx.Done()
				cancelled.Add(1)
				return nil, ctx.Err()
			},
		},
		{
			sdk.Tool{Name: "meta", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(_ context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				return &sdk.CallToolResult{StructuredContent: r.Params.Meta}, nil
			},
		},
	}
}

// childProcess is the report of the tool pid.
type childProcess struct {
	PID       int      `json:"pid"`
	Env       []string `json:"env"`
	Cancelled int32    `json:"cancelled"` // calls of hang
}

// fakeServer is an HTTP server with replaceable tools.
type fakeServer struct {
	*httptest.Server
	mu      sync.Mutex
	server  *sdk.Server
	headers []http.Header
}

func serve(t *testing.T, all ...tool) *fakeServer {
	t.Helper()
	s := &fakeServer{server: newServer(all...)}
	handler := sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.headers = append(s.headers, r.Header.Clone())
		return s.server
	}, &sdk.StreamableHTTPOptions{Stateless: true, PropagateRequestCancellation: true})
	s.Server = httptest.NewServer(handler)
	t.Cleanup(s.Close)
	return s
}

// replaceTools replaces the server's tools.
func (s *fakeServer) replaceTools(all ...tool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = newServer(all...)
}

func (s *fakeServer) sawHeader(name, value string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.headers, func(h http.Header) bool { return h.Get(name) == value })
}

func (s *fakeServer) requestCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.headers)
}

// sessionServer is an HTTP server with sessions.
type sessionServer struct {
	*httptest.Server
	mu        sync.Mutex
	forgotten map[string]bool // by session id
}

// serveSessions starts a server that answers an unknown session with a status and a body.
func serveSessions(t *testing.T, status int, body string, all ...tool) *sessionServer {
	t.Helper()
	server := newServer(all...)
	handler := sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return server }, nil)
	s := &sessionServer{forgotten: map[string]bool{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Mcp-Session-Id")
		s.mu.Lock()
		forgotten := s.forgotten[id]
		if id != "" && !forgotten {
			s.forgotten[id] = false
		}
		s.mu.Unlock()
		if forgotten {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

// forget makes all present sessions unknown.
func (s *sessionServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.forgotten {
		s.forgotten[id] = true
	}
}

// sessionError returns the body of a server that does not know a session.
func sessionError(code int, message string) string {
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":"server-error","error":{"code":%d,"message":%q}}`, code, message)
}

func httpServer(url string) mcp.Definition { return mcp.Definition{Name: "test", URL: url} }

func stdioServer(t *testing.T, env map[string]any) mcp.Definition {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	all := map[string]any{childVariable: "1"}
	maps.Copy(all, env)
	return mcp.Definition{Name: "test", Command: []string{self}, Env: all, TimeoutMS: 10_000}
}

// clientFixture is a database with a client and a registry.
type clientFixture struct {
	t        *testing.T
	pool     *pgxpool.Pool
	client   *mcp.Client
	registry *skills.Registry
	log      testkit.Log
	tls      *tls.Config
}

func newClientFixture(t *testing.T, getenv func(string) string) *clientFixture {
	t.Helper()
	f := &clientFixture{t: t, pool: pgtest.DB(t)}
	f.restart(getenv)
	return f
}

// restart replaces the client and the registry, as a new process would.
func (f *clientFixture) restart(getenv func(string) string) {
	f.t.Helper()
	client := mcp.NewClient(mcp.Options{
		Pool: f.pool, AllowPrivate: []string{"127.0.0.1"}, TLS: f.tls,
		Getenv: getenv, Agent: "tester", Logger: slog.New(slog.NewTextHandler(&f.log, nil)),
	})
	f.t.Cleanup(client.Close)
	registry, err := skills.New(skills.Options{MCP: client.Call, Pool: f.pool})
	require.NoError(f.t, err)
	f.client, f.registry = client, registry
}

// newHTTPFixture returns a client that has synced the tools of an HTTP server.
func newHTTPFixture(t *testing.T, all ...tool) (*clientFixture, *fakeServer) {
	t.Helper()
	f, s := newClientFixture(t, nil), serve(t, all...)
	f.put(httpServer(s.URL))
	f.sync()
	return f, s
}

func (f *clientFixture) put(d mcp.Definition) {
	f.t.Helper()
	_, err := mcp.Put(f.t.Context(), f.pool, d)
	require.NoError(f.t, err)
}

func (f *clientFixture) sync() mcp.Report {
	f.t.Helper()
	report, err := f.client.Sync(f.t.Context(), "test")
	require.NoError(f.t, err)
	return report
}

func (f *clientFixture) skill(tool string) skills.Skill {
	f.t.Helper()
	s, err := skills.Get(f.t.Context(), f.pool, "mcp__test__"+tool)
	require.NoError(f.t, err)
	return s
}

func (f *clientFixture) tool(name string) mcp.Tool {
	f.t.Helper()
	all, err := mcp.Tools(f.t.Context(), f.pool, "test")
	require.NoError(f.t, err)
	for _, t := range all {
		if t.Tool == name {
			return t
		}
	}
	f.t.Fatalf("there is no tool %s among %d", name, len(all))
	return mcp.Tool{}
}

func (f *clientFixture) call(tool, args string) (json.RawMessage, error) {
	f.t.Helper()
	return f.registry.Invoke(f.t.Context(), skills.Call{
		Skill: f.skill(tool), Args: json.RawMessage(args),
		IdempotencyKey: "key of " + tool,
	})
}

// mustCall calls a tool and fails the test if the call fails.
func (f *clientFixture) mustCall(tool, args string) string {
	f.t.Helper()
	result, err := f.call(tool, args)
	require.NoError(f.t, err, "call", tool)
	return string(result)
}

// process returns the report of the tool pid.
func (f *clientFixture) process() (p childProcess) {
	f.t.Helper()
	require.NoError(f.t, json.Unmarshal([]byte(f.mustCall("pid", `{}`)), &p))
	return p
}

// wantFailure checks that a call fails with a class, and with a part of its message.
func (f *clientFixture) wantFailure(tool, args, class, part string) {
	f.t.Helper()
	_, err := f.call(tool, args)
	failure, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(f.t, ok && failure.Class == class && strings.Contains(failure.Message, part),
		"call %s: error %#v, want class %s and %q", tool, err, class, part)
}

// serveAt starts a server at a given address.
func serveAt(t *testing.T, address string, all ...tool) *httptest.Server {
	t.Helper()
	server := newServer(all...)
	s := httptest.NewUnstartedServer(sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return server },
		&sdk.StreamableHTTPOptions{Stateless: true}))
	listener, err := net.Listen("tcp", address)
	require.NoError(t, err)
	require.NoError(t, s.Listener.Close())
	s.Listener = listener
	s.Start()
	return s
}
