package mcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// serverFixture is a server that offers the skills add and fails.
type serverFixture struct {
	t        *testing.T
	pool     *pgxpool.Pool
	server   *mcp.Server
	addCalls atomic.Int32 // calls of add
	inAdd    func(ctx context.Context, call int32)
}

func newServerFixture(t *testing.T) *serverFixture {
	t.Helper()
	f := &serverFixture{t: t, pool: pgtest.DB(t), inAdd: func(context.Context, int32) {}}
	f.server = f.newServer()
	for _, d := range []skills.Definition{
		{Name: "add", Description: "Adds.", Handler: "builtin:add", Parameters: map[string]any{
			"type": "object", "required": []any{"a"}, "properties": map[string]any{
				"a": map[string]any{"type": "integer"},
				"b": map[string]any{"type": "integer"},
			},
		}},
		{Name: "fails", Handler: "builtin:fails"},
		{Name: "hidden", Handler: "builtin:add"},
	} {
		_, err := skills.Put(t.Context(), f.pool, d, skills.SourceWorkspace)
		require.NoError(t, err)
	}
	f.offer("add")
	f.offer("fails")
	return f
}

// newServer returns a server on the same database, as another process would have it.
func (f *serverFixture) newServer() *mcp.Server {
	f.t.Helper()
	registry, err := skills.New(skills.Options{Pool: f.pool, Builtins: map[string]skills.Builtin{
		"add": func(ctx context.Context, c skills.Call) (any, error) {
			f.inAdd(ctx, f.addCalls.Add(1))
			var in struct{ A, B int }
			err := json.Unmarshal(c.Args, &in)
			return map[string]int{"sum": in.A + in.B}, err
		},
		"fails": func(context.Context, skills.Call) (any, error) { return nil, errors.New("no such thing") },
	}})
	require.NoError(f.t, err)
	engine := enginetest.New(f.t, f.pool)
	loop := &reason.Loop{Pool: f.pool, Skills: registry}
	s := &mcp.Server{
		Pool: f.pool, Engine: engine, Skills: registry, Invoke: loop.Invoke, Agent: "tester", Agents: &agents.Directory{},
	}
	require.NoError(f.t, s.Register())
	return s
}

func (f *serverFixture) offer(skill string) {
	f.t.Helper()
	changed, err := mcp.Grant(f.t.Context(), f.pool, skill, "admin", "tester")
	require.Truef(f.t, err == nil && changed, "offer %s: %t, %v", skill, changed, err)
}

// requireApproval makes the skill add require approval.
func (f *serverFixture) requireApproval() {
	f.t.Helper()
	d := skills.Definition{
		Name: "add", Description: "Adds.", Handler: "builtin:add", Trust: skills.TrustApprove,
		Parameters: map[string]any{
			"type": "object", "properties": map[string]any{
				"a": map[string]any{"type": "integer"},
				"b": map[string]any{"type": "integer"},
			},
		},
	}
	_, err := skills.Put(f.t.Context(), f.pool, d, skills.SourceWorkspace)
	require.NoError(f.t, err)
}

// http returns a stock client of the handler behind a token.
func (f *serverFixture) http() *sdk.ClientSession {
	f.t.Helper()
	return f.httpAs("ana")
}

// httpAs is like http, for another principal.
func (f *serverFixture) httpAs(principal string) *sdk.ClientSession {
	f.t.Helper()
	guarded := f.server.Handler()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer admin" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		guarded.ServeHTTP(w, r.WithContext(activity.WithActor(r.Context(), activity.Actor{Name: principal})))
	}))
	f.t.Cleanup(s.Close)
	client := sdk.NewClient(&sdk.Implementation{Name: "stock", Version: "1"}, nil)
	_, err := client.Connect(f.t.Context(), &sdk.StreamableClientTransport{Endpoint: s.URL}, nil)
	assert.Error(f.t, err, "a client without a token connects")
	session, err := client.Connect(f.t.Context(), &sdk.StreamableClientTransport{
		Endpoint:   s.URL,
		HTTPClient: &http.Client{Transport: bearer{}},
	}, nil)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = session.Close() })
	return session
}

type bearer struct{}

func (bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer admin")
	return http.DefaultTransport.RoundTrip(r)
}

// stdio returns a stock client of a Serve session.
func (f *serverFixture) stdio(options *sdk.ClientOptions) *sdk.ClientSession {
	f.t.Helper()
	theirIn, ourOut := io.Pipe()
	ourIn, theirOut := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- f.server.Serve(context.WithoutCancel(f.t.Context()), ourIn, ourOut) }()
	client := sdk.NewClient(&sdk.Implementation{Name: "stock", Version: "1"}, options)
	session, err := client.Connect(f.t.Context(), &sdk.IOTransport{Reader: theirIn, Writer: theirOut}, nil)
	require.NoError(f.t, err)
	f.t.Cleanup(func() {
		_ = session.Close()
		assert.NoError(f.t, <-ended, "the session ended with")
	})
	return session
}

func TestApprovalNamesItsRequester(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	callTool(t, f.http(), "add", map[string]int{"a": 1})
	pgtest.Equal(t, f.pool, "ana", `select array_to_string(requested_by, ' ') from agent_approvals`)
}

func TestApprovedAnswerBelongsToItsCaller(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	args := map[string]int{"a": 1}
	ana, bob := f.http(), f.httpAs("bob")
	id := wantPendingApproval(t, callTool(t, ana, "add", args))
	_, err := approvals.Decide(t.Context(), f.pool, id, true, "admin", "")
	require.NoError(t, err)
	assert.True(t, id != wantPendingApproval(t, callTool(t, bob, "add", args)), "bob's call has ana's approval")
	r := callTool(t, ana, "add", args)
	assert.Truef(t, !r.IsError, "ana's call answers %s", resultText(r))
}

// Two clients of one principal number their calls alike. A notification cancels the call of its own client.
func TestHTTPClientCancelsItsCall(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	entered, release := make(chan struct{}, 2), make(chan struct{})
	f.inAdd = func(ctx context.Context, _ int32) {
		entered <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
	}
	server := httptest.NewServer(f.server.Handler())
	t.Cleanup(server.Close)
	post := func(session, body string) (header http.Header, answer string) {
		r, err := http.NewRequestWithContext(t.Context(), "POST", server.URL, strings.NewReader(body))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		r.Header.Set("Mcp-Protocol-Version", "2025-11-25")
		if session != "" {
			r.Header.Set("Mcp-Session-Id", session)
		}
		w, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		defer w.Body.Close()
		text, err := io.ReadAll(w.Body)
		require.NoError(t, err)
		return w.Header, string(text)
	}
	begin := func() string {
		header, _ := post("", `{"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25",
			"capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}}`)
		return header.Get("Mcp-Session-Id")
	}
	a, b := begin(), begin()
	require.Truef(t, a != "" && b != "" && a != b, "sessions %q, %q", a, b)
	answers := map[string]chan string{a: make(chan string, 1), b: make(chan string, 1)}
	for session, answer := range answers {
		go func() {
			_, text := post(session, `{"jsonrpc": "2.0", "id": 1, "method": "tools/call",
				"params": {"name": "add", "arguments": {"a": 1, "b": 2}}}`)
			answer <- text
		}()
	}
	<-entered
	<-entered
	const cancel = `{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}`
	post("", cancel) // names no client
	post(a, cancel)
	assert.Contains(t, <-answers[a], "cancel")
	close(release)
	assert.Contains(t, <-answers[b], "lanekeeper/trace-id")
	pgtest.Equal(t, f.pool, "cancelled completed", `
		select string_agg(status, ' ' order by status) from agent_executions where flow = 'mcp.call'`)
}

func toolNames(t *testing.T, session *sdk.ClientSession) []string {
	t.Helper()
	var all []string
	for tool, err := range session.Tools(t.Context(), nil) {
		require.NoError(t, err)
		all = append(all, tool.Name)
	}
	return all
}

func callTool(t *testing.T, session *sdk.ClientSession, name string, args any) *sdk.CallToolResult {
	t.Helper()
	result, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: name, Arguments: args})
	require.NoError(t, err, "call", name)
	return result
}

// resultText returns the texts of a result.
func resultText(r *sdk.CallToolResult) string {
	var parts []string
	for _, c := range r.Content {
		if text, ok := c.(*sdk.TextContent); ok {
			parts = append(parts, text.Text)
		}
	}
	return strings.Join(parts, "\n")
}

func TestStockClientCallsOfferedSkills(t *testing.T) {
	t.Parallel()
	for name, connect := range map[string]func(f *serverFixture) *sdk.ClientSession{
		"http":  func(f *serverFixture) *sdk.ClientSession { return f.http() },
		"stdio": func(f *serverFixture) *sdk.ClientSession { return f.stdio(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newServerFixture(t)
			session := connect(f)
			got := toolNames(t, session)
			assert.Truef(t, slices.Equal(got, []string{"add", "fails"}), "tools: %v", got)
			list, err := session.ListTools(t.Context(), nil)
			require.NoError(t, err)
			assert.Equal(t, "private", list.CacheScope)
			r := callTool(t, session, "add", map[string]any{"a": 1, "b": 2})
			if r.IsError || resultText(r) != `{"sum":3}` && resultText(r) != `{"sum": 3}` || r.StructuredContent == nil {
				t.Errorf("add answers %q, %v", resultText(r), r.StructuredContent)
			}
			id, _ := r.Meta["lanekeeper/trace-id"].(string)
			rows, _, err := activity.Recent(t.Context(), f.pool, activity.Filter{TraceID: id})
			assert.Truef(t, err == nil && strings.HasPrefix(id, "fl_") && len(rows) == 1 && rows[0].SkillName == "add",
				"trace %s has %+v, %v", id, rows, err)
			if r := callTool(t, session, "add", map[string]any{"a": "x", "c": 1}); !r.IsError ||
				!strings.Contains(resultText(r), "/a") {
				t.Errorf("wrong arguments answer %q", resultText(r))
			}
			if r := callTool(t, session, "fails", nil); !r.IsError || !strings.Contains(resultText(r), "no such thing") {
				t.Errorf("a failing skill answers %q", resultText(r))
			}
			for _, unknown := range []string{"hidden", "none"} {
				_, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: unknown})
				refused, ok := errors.AsType[*jsonrpc.Error](err)
				assert.Truef(t, ok && refused.Code == jsonrpc.CodeInvalidParams, "call %s: %v", unknown, err)
			}
			assert.Equal(t, 1, f.addCalls.Load())
		})
	}
}

// A process loses the execution of its call. The client must not repeat the call beside it.
func TestCallWaitsForItsLostExecution(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	pgtest.Exec(t, f.pool, `update agent_skills set idempotent = true`)
	f.inAdd = func(_ context.Context, call int32) {
		if call == 1 {
			pgtest.Exec(t, f.pool, `select lanekeeper.release_agent_claim(id, claim) from agent_executions`)
		}
	}
	r := callTool(t, f.http(), "add", map[string]int{"a": 1, "b": 2})
	assert.Truef(t, !r.IsError && strings.Contains(resultText(r), "3"), "the call answers %q", resultText(r))
	pgtest.Equal(t, f.pool, 1, `select count(*) from agent_executions`)
}

func TestToolListFollowsOffers(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	changed := make(chan struct{}, 8)
	overHTTP, overStdio := f.http(), f.stdio(&sdk.ClientOptions{
		ToolListChangedHandler: func(context.Context, *sdk.ToolListChangedRequest) { changed <- struct{}{} },
	})
	f.offer("hidden")
	_, err := mcp.Withdraw(t.Context(), f.pool, "fails", "admin", "tester")
	require.NoError(t, err)
	_, err = skills.Disable(t.Context(), f.pool, "add", "admin", "broken", nil)
	require.NoError(t, err)
	got := toolNames(t, overHTTP)
	assert.Truef(t, slices.Equal(got, []string{"hidden"}), "tools over HTTP: %v", got)
	<-changed
	pgtest.Eventually(t, func() bool { return slices.Equal(toolNames(t, overStdio), []string{"hidden"}) },
		"the stdio session lists the new offers")
	_, err = mcp.Grant(t.Context(), f.pool, "none", "admin", "tester")
	assert.ErrorIs(t, err, skills.ErrNotFound, "offer of an unknown skill")
}

// A session over stdio refreshes its tools every few seconds. A withdrawn skill is not callable in between.
func TestWithdrawnSkillIsNotCalled(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	session := f.stdio(nil)
	_, err := mcp.Withdraw(t.Context(), f.pool, "add", "admin", "tester")
	require.NoError(t, err)
	r, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: "add", Arguments: map[string]int{"a": 1}})
	if err == nil { // otherwise a refresh removed the tool first
		assert.Truef(t, r.IsError && strings.Contains(resultText(r), "no longer offered"), "the call answers %q",
			resultText(r))
	}
	assert.Equal(t, 0, f.addCalls.Load())
}

// wantPendingApproval checks that a call waits for an approval, and returns its id.
func wantPendingApproval(t *testing.T, r *sdk.CallToolResult) string {
	t.Helper()
	fields, _ := r.StructuredContent.(map[string]any)
	id, _ := fields["approval_id"].(string)
	if !r.IsError || id == "" || fields["status"] != "pending_approval" || !strings.Contains(resultText(r), id) {
		t.Fatalf("the call answers %q, %v", resultText(r), r.StructuredContent)
	}
	return id
}

func TestApprovedCallRunsOnce(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	session := f.http()
	args := map[string]any{"a": 2, "b": 3}
	id := wantPendingApproval(t, callTool(t, session, "add", args))
	assert.Equal(t, id, wantPendingApproval(t, callTool(t, session, "add",
		map[string]any{"b": 3, "a": json.RawMessage(`2e0`)})))
	other := wantPendingApproval(t, callTool(t, session, "add", map[string]any{"a": 2, "b": 4}))
	assert.True(t, other != id, "a call with other arguments waits for the same approval")
	require.Equal(t, 0, f.addCalls.Load())
	f.server = f.newServer() // replaces the process that received the call
	session = f.http()
	_, err := approvals.Decide(t.Context(), f.pool, id, true, "admin", "")
	require.NoError(t, err)
	if r := callTool(t, session, "add", args); r.IsError || !strings.Contains(resultText(r), "5") {
		t.Errorf("after the approval: %q", resultText(r))
	}
	_, err = agents.Put(t.Context(), f.pool, agents.Definition{Name: "support", Default: true})
	require.NoError(t, err)
	assert.Contains(t, f.http().InitializeResult().Instructions, "of the agent support.")
	next := wantPendingApproval(t, callTool(t, session, "add", args))
	pgtest.Equal(t, f.pool, "support", `select agent from agent_executions order by id desc limit 1`)
	assert.Truef(t, next != id && f.addCalls.Load() == 1, "the approval was used twice: %s, %d calls", next,
		f.addCalls.Load())
}

func TestRejectedCallDoesNotRun(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	session := f.stdio(nil)
	id := wantPendingApproval(t, callTool(t, session, "add", map[string]any{"a": 1}))
	_, err := approvals.Decide(t.Context(), f.pool, id, false, "admin", "not on a Friday")
	require.NoError(t, err)
	if r := callTool(t, session, "add", map[string]any{"a": 1}); !r.IsError ||
		!strings.Contains(resultText(r), "not on a Friday") {
		t.Errorf("after the rejection: %q", resultText(r))
	}
	pgtest.Equal(t, f.pool, 1, `select count(*) from lanekeeper.agent_rejected_executions(10) r
		join agent_executions x on x.id = r and x.status = 'failed'`)
	assert.Equal(t, 0, f.addCalls.Load())
}

func TestOneOfManyCallersGetsApprovedAnswer(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	session := f.http()
	args := map[string]any{"a": 7}
	id := wantPendingApproval(t, callTool(t, session, "add", args))
	_, err := approvals.Decide(t.Context(), f.pool, id, true, "admin", "")
	require.NoError(t, err)
	answers := make(chan bool, 8)
	for range 8 {
		go func() {
			r, err := session.CallTool(context.WithoutCancel(t.Context()), &sdk.CallToolParams{Name: "add", Arguments: args})
			answers <- err == nil && !r.IsError
		}()
	}
	winners := 0
	for range 8 {
		if <-answers {
			winners++
		}
	}
	assert.Truef(t, winners == 1 && f.addCalls.Load() == 1, "%d callers got the answer of %d calls", winners,
		f.addCalls.Load())
}

func TestStaleAnswerIsNotGiven(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	session := f.http()
	for i, c := range []struct {
		name, change string
		approve      bool
		answered     bool
	}{
		{
			"recent answer", `update agent_executions set completed_at = completed_at - interval '23 hours' where id = $1`,
			true, true,
		},
		{
			"old answer", `update agent_executions set completed_at = completed_at - interval '25 hours' where id = $1`,
			true, false,
		},
		{"no decision", `update agent_executions set waiting_until = clock_timestamp() where id = $1`, false, false},
	} {
		args := map[string]int{"a": i, "b": 100}
		approval := wantPendingApproval(t, callTool(t, session, "add", args))
		id := pgtest.Value[string](t, f.pool, `select id::text from agent_executions order by id desc limit 1`)
		end := func() {
			require.NoError(t, f.server.Engine.Sweep(t.Context()))
			require.NoError(t, f.server.Engine.ClaimAndRun(t.Context(), id))
		}
		if c.approve {
			_, err := approvals.Decide(t.Context(), f.pool, approval, true, "admin", "")
			require.NoError(t, err)
			end()
		}
		pgtest.Exec(t, f.pool, c.change, id)
		end()
		pgtest.Equal(t, f.pool, true, `select completed_at is not null from agent_executions where id = $1`, id)
		r := callTool(t, session, "add", args)
		if c.answered {
			assert.Truef(t, !r.IsError, "%s: the call answers %q", c.name, resultText(r))
			continue
		}
		assert.True(t, approval != wantPendingApproval(t, r), c.name)
	}
	assert.Equal(t, 2, f.addCalls.Load())
}

// A call that nobody collects would keep its execution for ever.
func TestUncollectedCallsArePruned(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	f.requireApproval()
	session := f.http()
	for a := range 3 {
		wantPendingApproval(t, callTool(t, session, "add", map[string]int{"a": a}))
	}
	pgtest.Exec(t, f.pool, `select cancel_agent_execution(id, 'admin', 'why') from agent_executions
	  where input -> 'args' ->> 'a' <> '0'`)
	pgtest.Exec(t, f.pool, `update agent_mcp_calls set created_at = now() - interval '8 days'`)
	pgtest.Exec(t, f.pool, `update agent_executions set completed_at = now() - interval '8 days'
	  where input -> 'args' ->> 'a' = '2'`)
	client := mcp.NewClient(mcp.Options{Pool: f.pool})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- client.Run(ctx) }()
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[int](t, f.pool, `select count(*) from agent_mcp_calls`) < 3
	}, "the old call is pruned")
	stop()
	require.NoError(t, <-ended)
	pgtest.Equal(t, f.pool, "0 1", `select string_agg(x.input -> 'args' ->> 'a', ' ' order by x.id)
		from agent_mcp_calls c join agent_executions x on x.dedupe_key = 'mcp.call ' || c.id`)
}

func TestMountedToolCanBeOffered(t *testing.T) {
	t.Parallel()
	client := newClientFixture(t, nil)
	d := httpServer(serve(t, tools("")...).URL)
	d.Trust = skills.TrustAuto
	client.put(d)
	client.sync()
	f := &serverFixture{t: t, pool: client.pool}
	f.server = f.newServer()
	f.server.Skills = client.registry
	loop := &reason.Loop{Pool: client.pool, Skills: client.registry}
	f.server.Invoke = loop.Invoke
	f.offer("mcp__test__echo")
	if r := callTool(t, f.http(), "mcp__test__echo", map[string]any{"text": "through"}); r.IsError ||
		resultText(r) != "through" {
		t.Errorf("the mounted tool answers %q", resultText(r))
	}
}
