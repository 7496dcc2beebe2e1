package mcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
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
		os.Exit(child(kind))
	}
	pgtest.Main(m)
}

// child is a stdio server. The kind "deaf" never reads.
func child(kind string) int {
	fmt.Fprintln(os.Stderr, "child begins")
	if kind == "slow" {
		time.Sleep(4 * time.Second)
	}
	if kind == "deaf-later" {
		in := &deafen{rest: 100_000}
		t := &sdk.IOTransport{Reader: in, Writer: os.Stdout}
		_ = newServer(tools("")...).Run(context.Background(), t)
		return 0
	}
	if err := newServer(tools(os.Getenv("DESCRIPTION"))...).Run(context.Background(), &sdk.StdioTransport{}); err != nil {
		return 1
	}
	return 0
}

// deafen reads some bytes, then blocks.
type deafen struct{ rest int }

func (d *deafen) Read(p []byte) (int, error) {
	if d.rest <= 0 {
		time.Sleep(time.Hour) // without cgo, an empty select would be a deadlock
	}
	n, err := os.Stdin.Read(p[:min(len(p), d.rest)])
	d.rest -= n
	return n, err
}

func (d *deafen) Close() error { return nil }

// tool is a tool with its implementation.
type tool struct {
	sdk.Tool
	do sdk.ToolHandler
}

func newServer(all ...tool) *sdk.Server {
	s := sdk.NewServer(&sdk.Implementation{Name: "test", Version: "1.0"}, nil)
	for _, t := range all {
		s.AddTool(&t.Tool, t.do)
	}
	return s
}

func text(s string) *sdk.CallToolResult {
	return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: s}}}
}

var echoSchema = json.RawMessage(
	`{"type":"object","properties":{"text":{"type":"string"},"times":{"type":"integer","default":1}},"required":["text"]}`)

// tools returns echo and some tools that report on the process.
func tools(description string) []tool {
	if description == "" {
		description = "Says it again."
	}
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
				return &sdk.CallToolResult{StructuredContent: map[string]any{"pid": os.Getpid(), "env": os.Environ()}}, nil
			},
		},
		{
			sdk.Tool{Name: "hang", InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(ctx context.Context, _ *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				<-ctx.Done()
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

// served is an HTTP server with replaceable tools.
type served struct {
	*httptest.Server
	mu      sync.Mutex
	server  *sdk.Server
	headers []http.Header
}

func serve(t *testing.T, all ...tool) *served {
	t.Helper()
	s := &served{server: newServer(all...)}
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

// become replaces the server's tools.
func (s *served) become(all ...tool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = newServer(all...)
}

func (s *served) sawHeader(name, value string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.headers, func(h http.Header) bool { return h.Get(name) == value })
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

// world is a database with a client and a registry.
type world struct {
	t        *testing.T
	pool     *pgxpool.Pool
	client   *mcp.Client
	registry *skills.Registry
	log      testkit.Log
}

func newWorld(t *testing.T, getenv func(string) string) *world {
	t.Helper()
	w := &world{t: t, pool: pgtest.DB(t)}
	w.restart(getenv)
	return w
}

// restart simulates a new process.
func (w *world) restart(getenv func(string) string) {
	w.t.Helper()
	client := mcp.NewClient(mcp.Options{
		Pool: w.pool, AllowPrivate: []string{"127.0.0.1"},
		Getenv: getenv, Agent: "tester", Logger: slog.New(slog.NewTextHandler(&w.log, nil)),
	})
	w.t.Cleanup(client.Close)
	registry, err := skills.New(skills.Options{MCP: client.Call, Pool: w.pool})
	require.NoError(w.t, err)
	w.client, w.registry = client, registry
}

func (w *world) put(d mcp.Definition) {
	w.t.Helper()
	_, err := mcp.Put(w.t.Context(), w.pool, d)
	require.NoError(w.t, err)
}

func (w *world) sync() mcp.Report {
	w.t.Helper()
	report, err := w.client.Sync(w.t.Context(), "test")
	require.NoError(w.t, err)
	return report
}

func (w *world) skill(tool string) skills.Skill {
	w.t.Helper()
	s, err := skills.Get(w.t.Context(), w.pool, "mcp__test__"+tool)
	require.NoError(w.t, err)
	return s
}

func (w *world) tool(name string) mcp.Tool {
	w.t.Helper()
	all, err := mcp.Tools(w.t.Context(), w.pool, "test")
	require.NoError(w.t, err)
	for _, t := range all {
		if t.Tool == name {
			return t
		}
	}
	w.t.Fatalf("there is no tool %s among %d", name, len(all))
	return mcp.Tool{}
}

func (w *world) call(tool, args string) (json.RawMessage, error) {
	w.t.Helper()
	return w.registry.Invoke(w.t.Context(), skills.Call{
		Skill: w.skill(tool), Args: json.RawMessage(args),
		IdempotencyKey: "key of " + tool,
	})
}

// must calls a tool that must succeed.
func (w *world) must(tool, args string) string {
	w.t.Helper()
	result, err := w.call(tool, args)
	require.NoError(w.t, err, "call", tool)
	return string(result)
}

// fails expects a call to fail with a class and a part of its message.
func (w *world) fails(tool, args, class, part string) {
	w.t.Helper()
	_, err := w.call(tool, args)
	failure, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(w.t, ok && failure.Class == class && strings.Contains(failure.Message, part),
		"call %s: error %#v, want class %s and %q", tool, err, class, part)
}

// serveAt is serve on a given address.
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
