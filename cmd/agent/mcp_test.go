package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// mcpServer is a server with one tool, whose description may be changed.
type mcpServer struct {
	*httptest.Server
	description string
}

func startMCPServer(t *testing.T) *mcpServer {
	t.Helper()
	s := &mcpServer{description: "Says hello."}
	s.Server = httptest.NewServer(sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server {
		server := sdk.NewServer(&sdk.Implementation{Name: "greeter", Version: "3"}, nil)
		server.AddTool(&sdk.Tool{Name: "greet", Description: s.description, InputSchema: json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"}}}`)},
			func(_ context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: "hello " + string(r.Params.Arguments)}}}, nil
			})
		return server
	}, &sdk.StreamableHTTPOptions{Stateless: true}))
	t.Cleanup(s.Close)
	return s
}

func TestMCPFromTheCommandLine(t *testing.T) {
	t.Parallel()
	server := startMCPServer(t)
	agent := on(t, pgtest.URL(t), "AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1")
	dir := t.TempDir()
	file := filepath.Join(dir, "mcp.yaml")
	if err := os.WriteFile(file, []byte("kind: mcp_server\nname: greeter\nurl: "+server.URL+"\nauto: [greet]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	must := func(args ...string) string {
		t.Helper()
		got := agent.run(args...)
		if got.code != 0 {
			t.Fatalf("agent %s: code %d, %s%s", strings.Join(args, " "), got.code, got.out, got.err)
		}
		return got.out
	}
	says := func(text string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("%q is not in:\n%s", part, text)
			}
		}
	}
	says(must("mcp", "ls"), "no MCP servers", "kind: mcp_server")
	says(must("apply", dir), "create", "mcp_server", "greeter")
	says(must("mcp", "ls"), "not synced yet")
	says(must("mcp", "sync"), "greeter: 1 tools", "mounted: greet")
	says(must("mcp", "ls"), "greeter 3", "mcp__greeter__greet", "mounted")
	says(must("skills", "call", "mcp__greeter__greet", "--args", `{"name":"you"}`), "hello", "you")

	server.description = "Says hello, and more."
	says(must("mcp", "sync", "greeter"), "quarantine", "greet")
	shown := must("mcp", "show", "greeter", "greet")
	says(shown, "quarantined", "Says hello.", "Says hello, and more.", "--hash ")
	if got := agent.run("skills", "call", "mcp__greeter__greet"); got.code == 0 {
		t.Errorf("a tool in quarantine was called: %s", got.out)
	}
	if got := agent.run("mcp", "accept", "greeter", "greet", "--hash", "0"); got.code == 0 || !strings.Contains(got.err, "has changed again") {
		t.Errorf("accepting another version: %d, %s", got.code, got.err)
	}
	says(must("mcp", "accept", "greeter", "greet"), "in service")
	says(must("skills", "call", "mcp__greeter__greet"), "hello")

	says(must("mcp", "offer", "mcp__greeter__greet"), "is offered")
	says(must("mcp", "offer", "mcp__greeter__greet"), "as it was before")
	var listing struct {
		Servers, Tools, Offered []map[string]any
	}
	if err := json.Unmarshal([]byte(must("mcp", "ls", "--json")), &listing); err != nil || len(listing.Servers)+len(listing.Tools)+len(listing.Offered) != 3 {
		t.Errorf("the listing is %+v, %v", listing, err)
	}
	if got := talk(t, agent); got != `hello {"name":"them"}` {
		t.Errorf("over stdio it answers %q", got)
	}
	says(must("mcp", "withdraw", "mcp__greeter__greet"), "is not offered")

	server.Close()
	if got := agent.run("mcp", "sync"); got.code != 1 || !strings.Contains(got.out, "connect") {
		t.Errorf("a sync of a server that is down: %d, %s%s", got.code, got.out, got.err)
	}
	says(must("mcp", "ls"), "unreachable")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	says(must("apply", "--prune", dir), "remove", "greeter")
	if got := agent.run("skills", "show", "mcp__greeter__greet"); got.code == 0 {
		t.Error("the skill outlives its server")
	}
	if got := agent.run("mcp", "list"); got.code != 2 {
		t.Errorf("an unknown command: %d", got.code)
	}
}

// talk is a stock client on agent mcp: it lists the tools and calls the one.
func talk(t *testing.T, agent program) string {
	t.Helper()
	theirIn, ourOut := io.Pipe()
	ourIn, theirOut := io.Pipe()
	ended := make(chan int, 1)
	var errs stream
	go func() {
		ended <- run(context.WithoutCancel(t.Context()), []string{"mcp"}, agent.environ, ourIn, ourOut, &errs)
		_ = ourOut.Close()
	}()
	session, err := sdk.NewClient(&sdk.Implementation{Name: "stock"}, nil).Connect(t.Context(), &sdk.IOTransport{Reader: theirIn, Writer: theirOut}, nil)
	if err != nil {
		t.Fatalf("connect: %v; %s", err, errs.String())
	}
	listed, err := session.ListTools(t.Context(), nil)
	if err != nil || !slices.ContainsFunc(listed.Tools, func(tool *sdk.Tool) bool { return tool.Name == "mcp__greeter__greet" }) {
		t.Fatalf("listed are %+v, %v", listed, err)
	}
	result, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: "mcp__greeter__greet", Arguments: map[string]string{"name": "them"}})
	if err != nil || result.IsError || len(result.Content) != 1 {
		t.Fatalf("the call: %+v, %v", result, err)
	}
	_ = session.Close()
	if code := <-ended; code != 0 {
		t.Errorf("agent mcp ends with %d: %s", code, errs.String())
	}
	text, _ := result.Content[0].(*sdk.TextContent)
	return text.Text
}

// adminBearer adds the token that the tests serve with.
type adminBearer struct{}

func (adminBearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	_, secret, _ := strings.Cut(token, "=")
	r.Header.Set("Authorization", "Bearer "+secret)
	return http.DefaultTransport.RoundTrip(r)
}

func TestServeMountsAndOffersOverHTTP(t *testing.T) {
	t.Parallel()
	server := startMCPServer(t)
	address := pgtest.URL(t)
	agent := on(t, address, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mcp.yaml"), []byte("kind: mcp_server\nname: greeter\nurl: "+server.URL+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := agent.run("apply", dir); got.code != 0 {
		t.Fatal(got.err)
	}
	s := agent.start("serve")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, pgWait, func() bool { return agent.run("mcp", "offer", "mcp__greeter__greet").code == 0 }, "the tool is mounted")
	client := sdk.NewClient(&sdk.Implementation{Name: "stock"}, nil)
	if code, _ := get(t, base+"/mcp"); code != http.StatusUnauthorized {
		t.Errorf("/mcp without the token: %d", code)
	}
	session, err := client.Connect(t.Context(), &sdk.StreamableClientTransport{Endpoint: base + "/mcp", HTTPClient: &http.Client{Transport: adminBearer{}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	call := func() *sdk.CallToolResult {
		t.Helper()
		result, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: "mcp__greeter__greet", Arguments: map[string]string{"name": "all"}})
		if err != nil {
			t.Fatal(err)
		}
		return result
	}
	waits, _ := call().StructuredContent.(map[string]any)
	id, _ := waits["approval_id"].(string)
	if got := agent.run("approvals", "approve", id); got.code != 0 {
		t.Fatalf("approve %q: %s", id, got.err)
	}
	result := call()
	if text, ok := result.Content[0].(*sdk.TextContent); !ok || result.IsError || text.Text != `hello {"name":"all"}` {
		t.Errorf("after the approval: %+v", result)
	}
	s.stop()
	if code := <-s.ended; code != 0 {
		t.Errorf("serve ends with %d: %s", code, s.err.String())
	}
}
