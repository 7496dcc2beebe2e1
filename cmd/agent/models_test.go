package main

import (
	"context"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/models"
)

// twoAgents use three models, one of them twice.
const twoAgents = "kind: agent\nname: sales\ndefault: true\nmodel: gpt-6-luna\nfallback: [gpt-5-mini]\n---\n" +
	"kind: agent\nname: billing\nmodel: house/own\nfallback: [gpt-5-mini]\neffort: low\n"

func TestModelsCheck(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(modeltest.AnswerChecks)
	url := pgtest.URL(t)
	p := newProgram(t, url, "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=gpt-4o")
	got := p.run("models", "check")
	assert.Contains(t, got.err, "7 calls to 1 model, billed by the provider")
	assert.Contains(t, got.out, "gpt-4o\n", "pass     answers", "pass     correction", "7 calls, $0.0")
	assert.Truef(t, got.code == 0 && len(server.Requests()) == 7,
		"exit %d after %d requests", got.code, len(server.Requests()))
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": twoAgents}))
	got = p.run("models", "check")
	assert.Contains(t, got.err, "28 calls to 4 models")
	assert.Contains(t, got.out, "gpt-6-luna\n", "gpt-5-mini\n", "house/own (effort low)\n", "gpt-5-mini (effort low)\n",
		"skipped  price", "set AGENT_PRICES", "7 calls, no price")
	pgtest.Equal(t, connect(t, url), 0, `select count(*) from agent_activity where skill_name = 'model_call'`)
}

// Beside agent dev, .env names the model's server.
func TestModelsCheckReadsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	server := modeltest.New(t)
	server.Handle(modeltest.AnswerChecks)
	testkit.WriteFile(t, ".env", "OPENAI_BASE_URL="+server.URL()+"\n")
	got := newProgramWithoutDatabase(t).run("models", "check", "own/model")
	assert.Truef(t, got.code == 0 && len(server.Requests()) > 0, "exit %d after %d requests: %s", got.code,
		len(server.Requests()), got.err)
}

func TestModelsCheckFailure(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if len(req.Tools) > 0 {
			return modeltest.Text("It is warm.")
		}
		return modeltest.AnswerChecks(n, req)
	})
	p := newProgramWithoutDatabase(t, "OPENAI_BASE_URL="+server.URL(), "AGENT_LOG_LEVEL=warn")
	got := p.run("models", "check", "own/model") // needs no database
	assert.Truef(t, got.code == 1 && !strings.Contains(got.err, "agent:"), "exit %d, stderr %q", got.code, got.err)
	assert.Contains(t, got.out, "FAIL     tools", "called no tool", "--enable-auto-tool-choice", "skipped  correction",
		"no tool was called")
	var all struct {
		Items []struct {
			Model  string
			Calls  int
			Checks []struct{ Check, Status, Detail, Help string }
		}
	}
	got = p.run("models", "check", "own/model", "--json")
	err := decodeOne(got.out, &all)
	require.Truef(t, err == nil && got.code == 1, "exit %d, %v in %s", got.code, err, got.out)
	if m := all.Items[0]; m.Model != "own/model" || m.Calls != 5 || len(m.Checks) != 8 || m.Checks[1].Status != "fail" {
		t.Errorf("got %+v", m)
	}
}

func TestListModels(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), `AGENT_PRICES={"house/own":{"input":1,"output":3}}`)
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": twoAgents}))
	assert.Contains(t, p.must("models", "ls"), "MODEL", "scripted    yes", "gpt-6-luna  no", "sales, billing", "400000",
		"1 / 3", "0.1 / 0.5")
	var all struct {
		Items []struct {
			Model  string
			Listed bool
			Agents []string
			Price  *struct{ Output float64 } `json:"usd_per_million"`
		}
	}
	p.mustJSON(&all, "models", "ls")
	assert.Truef(t, len(all.Items) == 4 && all.Items[0].Model == "gpt-6-luna" && len(all.Items[1].Agents) == 2 &&
		all.Items[2].Price.Output == 3 && all.Items[3].Listed && all.Items[3].Price == nil, "got %+v", all.Items)
	silent := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1",
		"AGENT_MODEL=gpt-4o").run("models", "ls")
	assert.Contains(t, silent.err, "the server lists no models", "check OPENAI_BASE_URL")
	assert.Contains(t, silent.out, "gpt-4o")
	assert.Equal(t, 0, silent.code)
	assert.True(t, len(server.Requests()) == 0, "a listing made calls")
}

func TestDoctorChecksTools(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(modeltest.AnswerChecks)
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=gpt-4o")
	assert.Contains(t, p.must("doctor"), "ok   model answers", "ok   model tools")
	assert.Equal(t, 1, len(server.Requests()))
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if len(req.Tools) > 0 {
			return modeltest.Refusal(http.StatusBadRequest, "x", "", "tools are off: start with --enable-auto-tool-choice", 0)
		}
		return modeltest.AnswerChecks(n, req)
	})
	got := p.run("doctor")
	assert.Contains(t, got.out, "ok   model answers", "BAD  model tools", "tools are off",
		"set AGENT_MODEL to a model that calls tools")
	n := len(server.Requests())
	assert.Truef(t, n == 3 && got.code == 1, "exit %d after %d calls", got.code, n)
}

func TestDoctorReportsEmbeddings(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	assert.Contains(t, p.must("doctor"), "embeddings", "off: memory search matches words only")
	server := modeltest.NewEmbeddings(t, func(string) []float32 { return []float32{1, 2, 3} })
	p = newProgram(t, url, "AGENT_EMBEDDING_MODEL=small", "AGENT_EMBEDDING_BASE_URL="+server.URL(),
		"OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=key-of-the-chat-model")
	got := p.run("doctor")
	assert.Truef(t, strings.Contains(got.out, "BAD  embeddings") && strings.Contains(got.out, "create extension vector;"),
		"without the extension: %+v", got)
	p.must("memory", "set", "rule", "two signatures")
	assert.Contains(t, p.must("memory", "search", "signatures"), "rule")
	assert.Equal(t, 0, len(server.Requests()))
	db, err := postgres.Open(t.Context(), url, postgres.Options{})
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec(t.Context(), `
		insert into pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
		values (999999, 'vector', current_user::regrole, 'public'::regnamespace, false, '0.8.6')`)
	require.NoError(t, err)
	assert.Contains(t, p.run("doctor").out, "ok   embeddings", "small, 3 dimensions, pgvector 0.8.6; 0 of 1 memories "+
		"are embedded")
	assert.Equal(t, "", server.Requests()[0].Header.Get("Authorization"))
}

// mcpServer has one tool with a changeable description.
type mcpServer struct {
	*httptest.Server
	description string
}

func startMCPServer(t *testing.T) *mcpServer {
	t.Helper()
	s := &mcpServer{description: "Says hello."}
	s.Server = httptest.NewServer(sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server {
		server := sdk.NewServer(&sdk.Implementation{Name: "greeter", Version: "3"}, nil)
		server.AddTool(&sdk.Tool{
			Name: "greet", Description: s.description,
			InputSchema: json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"}}}`),
		},
			func(_ context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: "hello " + string(r.Params.Arguments)}}},
					nil
			})
		return server
	}, &sdk.StreamableHTTPOptions{Stateless: true}))
	t.Cleanup(s.Close)
	return s
}

func TestMCPCommands(t *testing.T) {
	t.Parallel()
	server := startMCPServer(t)
	agent := newProgram(t, pgtest.URL(t), "AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1")
	dir := t.TempDir()
	file := filepath.Join(dir, "mcp.yaml")
	testkit.WriteFile(t, file, "kind: mcp_server\nname: greeter\nurl: "+server.URL+"\nauto: [greet]\n")
	must := func(args ...string) string {
		t.Helper()
		got := agent.run(args...)
		require.Equal(t, 0, got.code, strings.Join(args, " "), got.out, got.err)
		return got.out
	}
	says := func(text string, parts ...string) {
		t.Helper()
		assert.Contains(t, text, parts...)
	}
	says(must("mcp", "ls"), "no MCP servers", "kind: mcp_server")
	says(must("apply", dir), "create", "mcp_server", "greeter")
	says(must("mcp", "ls"), "not synced yet")
	says(must("mcp", "sync"), "greeter: 1 tool (", "mounted: greet")
	says(must("mcp", "ls"), "greeter 3", "mcp__greeter__greet", "mounted")
	says(must("skills", "call", "mcp__greeter__greet", "--args", `{"name":"you"}`), "hello", "you")

	server.description = "Says hello, and more."
	says(must("mcp", "sync", "greeter"), "quarantine", "greet")
	shown := must("mcp", "show", "greeter", "greet")
	says(shown, "quarantined", "Says hello.", "Says hello, and more.", "--hash ")
	got := agent.run("skills", "call", "mcp__greeter__greet")
	assert.Truef(t, got.code != 0, "a tool in quarantine was called: %s", got.out)
	assert.Contains(t, got.err, "agent mcp accept greeter greet")
	assert.True(t, !strings.Contains(got.err, "skills enable"), got.err)
	got = agent.run("skills", "enable", "mcp__greeter__greet")
	assert.Equal(t, exitFailed, got.code)
	assert.Contains(t, got.err, "its MCP tool is not the accepted one", "agent mcp accept greeter greet")
	got = agent.run("mcp", "accept", "greeter", "greet", "--hash", "0")
	assert.Truef(t, got.code != 0 && strings.Contains(got.err, "another version is current"),
		"accepting another version: %d, %s", got.code, got.err)
	says(must("mcp", "accept", "greeter", "greet"), "in service")
	assert.Contains(t, agent.run("mcp", "accept", "greeter", "greet").err, "nothing to accept: it is mounted")
	says(must("skills", "call", "mcp__greeter__greet"), "hello")

	says(must("mcp", "offer", "mcp__greeter__greet"), "is offered")
	says(must("mcp", "offer", "mcp__greeter__greet"), "as it was before")
	var listing struct {
		Servers, Tools, Offered []map[string]any
	}
	err := json.Unmarshal([]byte(must("mcp", "ls", "--json")), &listing)
	assert.Truef(t, err == nil && len(listing.Servers)+
		len(listing.Tools)+len(listing.Offered) == 3, "the listing is %+v, %v", listing, err)
	assert.Equal(t, `hello {"name":"them"}`, exerciseMCP(t, agent))
	says(must("mcp", "withdraw", "mcp__greeter__greet"), "is not offered")

	server.Close()
	if got := agent.run("mcp", "sync"); got.code != 1 || !strings.Contains(got.out, "connect") {
		t.Errorf("a sync of a server that is down: %d, %s%s", got.code, got.out, got.err)
	}
	says(must("mcp", "ls"), "sync failed: connect")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	says(must("apply", "--prune", dir), "remove", "greeter")
	assert.True(t, agent.run("skills", "show", "mcp__greeter__greet").code != 0, "the skill outlives its server")
	assert.Equal(t, 2, agent.run("mcp", "list").code)
}

// exerciseMCP connects a standard client to agent mcp, lists the tools and calls one.
func exerciseMCP(t *testing.T, agent program) string {
	t.Helper()
	theirIn, ourOut := io.Pipe()
	ourIn, theirOut := io.Pipe()
	ended := make(chan int, 1)
	var errs testkit.Log
	go func() {
		ended <- run(context.WithoutCancel(t.Context()), []string{"mcp"}, agent.environ, ourIn, ourOut, &errs)
		_ = ourOut.Close()
	}()
	session, err := sdk.NewClient(&sdk.Implementation{Name: "stock"}, nil).Connect(t.Context(),
		&sdk.IOTransport{Reader: theirIn, Writer: theirOut}, nil)
	require.NoError(t, err, "connect", errs.String())
	listed, err := session.ListTools(t.Context(), nil)
	require.Truef(t, err == nil && slices.ContainsFunc(listed.Tools,
		func(tool *sdk.Tool) bool { return tool.Name == "mcp__greeter__greet" }), "listed are %+v, %v", listed, err)
	result, err := session.CallTool(t.Context(), &sdk.CallToolParams{
		Name:      "mcp__greeter__greet",
		Arguments: map[string]string{"name": "them"},
	})
	require.Truef(t, err == nil && !result.IsError && len(result.Content) == 1, "the call: %+v, %v", result, err)
	_ = session.Close()
	assert.Equal(t, 0, <-ended, errs.String())
	text, _ := result.Content[0].(*sdk.TextContent)
	return text.Text
}

// adminBearer adds the admin token.
type adminBearer struct{}

func (adminBearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	_, secret, _ := strings.Cut(token, "=")
	r.Header.Set("Authorization", "Bearer "+secret)
	return http.DefaultTransport.RoundTrip(r)
}

func TestServeMCP(t *testing.T) {
	t.Parallel()
	server := startMCPServer(t)
	address := pgtest.URL(t)
	agent := newProgram(t, address, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info",
		"AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1")
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "mcp.yaml"), "kind: mcp_server\nname: greeter\nurl: "+server.URL+"\n")
	got := agent.run("apply", dir)
	require.True(t, got.code == 0, got.err)
	s := agent.start("serve")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, func() bool { return agent.run("mcp", "offer", "mcp__greeter__greet").code == 0 },
		"the tool is mounted")
	client := sdk.NewClient(&sdk.Implementation{Name: "stock"}, nil)
	code, _ := testkit.Get(t, base+"/mcp")
	assert.Equal(t, http.StatusUnauthorized, code, "/mcp without the token")
	session, err := client.Connect(t.Context(), &sdk.StreamableClientTransport{
		Endpoint:   base + "/mcp",
		HTTPClient: &http.Client{Transport: adminBearer{}},
	}, nil)
	require.NoError(t, err)
	defer session.Close()
	call := func() *sdk.CallToolResult {
		t.Helper()
		result, err := session.CallTool(t.Context(), &sdk.CallToolParams{
			Name:      "mcp__greeter__greet",
			Arguments: map[string]string{"name": "all"},
		})
		require.NoError(t, err)
		return result
	}
	waits, _ := call().StructuredContent.(map[string]any)
	id, _ := waits["approval_id"].(string)
	got = agent.run("approvals", "approve", id)
	require.Truef(t, got.code == 0, "approve %q: %s", id, got.err)
	result := call()
	text, ok := result.Content[0].(*sdk.TextContent)
	assert.Truef(t, ok && !result.IsError && text.Text == `hello {"name":"all"}`, "after the approval: %+v", result)
	s.stop()
	assert.Equal(t, 0, <-s.ended, s.err.String())
}

func TestModelServerSettings(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("It is 42."), modeltest.Text("It is 43."))
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=scripted",
		"AGENT_REASONING_EFFORT=low",
		`AGENT_MODEL_HEADERS={"api-key":"key-of-azure"}`, `AGENT_MODEL_QUERY={"api-version":"2026-10-01"}`,
		`AGENT_MODEL_EXTRA={"chat_template_kwargs":{"enable_thinking":false}}`)
	assert.Contains(t, p.must("operate", "how many?"), "It is 42.")
	asked := server.Requests()[0]
	assert.Truef(t, asked.Path == "/v1/chat/completions" && asked.Header.Get("Api-Key") == "key-of-azure" &&
		asked.Query.Get("api-version") == "2026-10-01", "asked at %s with %v, %v", asked.Path, asked.Header, asked.Query)
	assert.Contains(t, asked.Body, `"reasoning_effort":"low"`, `"chat_template_kwargs":{"enable_thinking":false}`)
	p = newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL_API=responses")
	got := p.run("operate", "how many?")
	assert.Contains(t, got.out, "It is 43.")
	assert.Contains(t, got.err, "AGENT_MODEL is not set")
	if asked := server.Requests()[1]; asked.Path != "/v1/responses" || asked.Model != app.DefaultModel {
		t.Errorf("asked %s at %s", asked.Model, asked.Path)
	}
	got = newProgram(t, pgtest.URL(t), "AGENT_MODEL=scripted").run("operate", "how many?")
	assert.Contains(t, got.err, "AGENT_MODEL is ignored, using the offline model")
}

func TestModelPrices(t *testing.T) {
	t.Parallel()
	table := app.Prices(config.Config{Prices: map[string]config.Price{
		"m": {Input: 2, Cached: 0.2, CacheWrite: 2.5, Output: 10, Long: config.Long{Over: 1000, Input: 4, Output: 15}},
	}})
	price, found := table.Of("m")
	for _, c := range []struct {
		used models.Usage
		want float64
	}{
		{models.Usage{PromptTokens: 1000, CompletionTokens: 10, CachedTokens: 500, CacheWriteTokens: 300}, 0.00135},
		{models.Usage{PromptTokens: 2000, CompletionTokens: 10, CachedTokens: 500}, 0.00815},
	} {
		got := price.Cost(c.used)
		assert.Truef(t, found && math.Abs(got-c.want) <= 1e-9, "%+v costs %g, not %g", c.used, got, c.want)
	}
}
