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

// house is an agent with skills.
type house struct {
	t      *testing.T
	pool   *pgxpool.Pool
	server *mcp.Server
	made   atomic.Int32 // calls of add
}

func newHouse(t *testing.T) *house {
	t.Helper()
	h := &house{t: t, pool: pgtest.DB(t)}
	h.server = h.process()
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
		_, err := skills.Put(t.Context(), h.pool, d, skills.SourceWorkspace)
		require.NoError(t, err)
	}
	h.offer("add")
	h.offer("fails")
	return h
}

// process returns a server like that of another process.
func (h *house) process() *mcp.Server {
	h.t.Helper()
	registry, err := skills.New(skills.Options{Pool: h.pool, Builtins: map[string]skills.Builtin{
		"add": func(_ context.Context, c skills.Call) (any, error) {
			h.made.Add(1)
			var in struct{ A, B int }
			err := json.Unmarshal(c.Args, &in)
			return map[string]int{"sum": in.A + in.B}, err
		},
		"fails": func(context.Context, skills.Call) (any, error) { return nil, errors.New("no such thing") },
	}})
	require.NoError(h.t, err)
	engine := enginetest.New(h.t, h.pool)
	loop := &reason.Loop{Pool: h.pool, Skills: registry}
	s := &mcp.Server{
		Pool: h.pool, Engine: engine, Skills: registry, Invoke: loop.Invoke, Agent: "tester", Agents: &agents.Directory{},
	}
	require.NoError(h.t, s.Register())
	return s
}

func (h *house) offer(skill string) {
	h.t.Helper()
	changed, err := mcp.Grant(h.t.Context(), h.pool, skill, "admin", "tester")
	require.Truef(h.t, err == nil && changed, "offer %s: %t, %v", skill, changed, err)
}

// approve makes the skill add require approval.
func (h *house) approve() {
	h.t.Helper()
	d := skills.Definition{
		Name: "add", Description: "Adds.", Handler: "builtin:add", Trust: skills.TrustApprove,
		Parameters: map[string]any{
			"type": "object", "properties": map[string]any{
				"a": map[string]any{"type": "integer"},
				"b": map[string]any{"type": "integer"},
			},
		},
	}
	_, err := skills.Put(h.t.Context(), h.pool, d, skills.SourceWorkspace)
	require.NoError(h.t, err)
}

// http returns a stock client of the handler behind a token.
func (h *house) http() *sdk.ClientSession {
	h.t.Helper()
	guarded := h.server.Handler()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer admin" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		guarded.ServeHTTP(w, r.WithContext(activity.WithActor(r.Context(), activity.Actor{Name: "ana"})))
	}))
	h.t.Cleanup(s.Close)
	client := sdk.NewClient(&sdk.Implementation{Name: "stock", Version: "1"}, nil)
	_, err := client.Connect(h.t.Context(), &sdk.StreamableClientTransport{Endpoint: s.URL}, nil)
	assert.Error(h.t, err, "a client without a token connects")
	session, err := client.Connect(h.t.Context(), &sdk.StreamableClientTransport{
		Endpoint:   s.URL,
		HTTPClient: &http.Client{Transport: bearer{}},
	}, nil)
	require.NoError(h.t, err)
	h.t.Cleanup(func() { _ = session.Close() })
	return session
}

type bearer struct{}

func (bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer admin")
	return http.DefaultTransport.RoundTrip(r)
}

// stdio returns a stock client of a Serve session.
func (h *house) stdio(options *sdk.ClientOptions) *sdk.ClientSession {
	h.t.Helper()
	theirIn, ourOut := io.Pipe()
	ourIn, theirOut := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- h.server.Serve(context.WithoutCancel(h.t.Context()), ourIn, ourOut) }()
	client := sdk.NewClient(&sdk.Implementation{Name: "stock", Version: "1"}, options)
	session, err := client.Connect(h.t.Context(), &sdk.IOTransport{Reader: theirIn, Writer: theirOut}, nil)
	require.NoError(h.t, err)
	h.t.Cleanup(func() {
		_ = session.Close()
		assert.NoError(h.t, <-ended, "the session ended with")
	})
	return session
}

func TestTheCallerIsTheRequesterOfTheApproval(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.approve()
	callTool(t, h.http(), "add", map[string]int{"a": 1})
	pgtest.Equal(t, h.pool, "ana", `select array_to_string(requested_by, ' ') from agent_approvals`)
}

func names(t *testing.T, session *sdk.ClientSession) []string {
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

// joined returns the text of a result.
func joined(r *sdk.CallToolResult) string {
	var parts []string
	for _, c := range r.Content {
		if text, ok := c.(*sdk.TextContent); ok {
			parts = append(parts, text.Text)
		}
	}
	return strings.Join(parts, "\n")
}

func TestAStockClientCallsWhatIsOffered(t *testing.T) {
	t.Parallel()
	for name, connect := range map[string]func(h *house) *sdk.ClientSession{
		"http":  func(h *house) *sdk.ClientSession { return h.http() },
		"stdio": func(h *house) *sdk.ClientSession { return h.stdio(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t)
			session := connect(h)
			got := names(t, session)
			assert.Truef(t, slices.Equal(got, []string{"add", "fails"}), "offered are %v", got)
			r := callTool(t, session, "add", map[string]any{"a": 1, "b": 2})
			if r.IsError || joined(r) != `{"sum":3}` && joined(r) != `{"sum": 3}` || r.StructuredContent == nil {
				t.Errorf("add answers %q, %v", joined(r), r.StructuredContent)
			}
			id, _ := r.Meta["lanekeeper/trace-id"].(string)
			rows, _, err := activity.Recent(t.Context(), h.pool, activity.Filter{TraceID: id})
			assert.Truef(t, err == nil && strings.HasPrefix(id, "fl_") && len(rows) == 1 && rows[0].SkillName == "add",
				"trace %s has %+v, %v", id, rows, err)
			if r := callTool(t, session, "add", map[string]any{"a": "x", "c": 1}); !r.IsError ||
				!strings.Contains(joined(r), "/a") {
				t.Errorf("wrong arguments answer %q", joined(r))
			}
			if r := callTool(t, session, "fails", nil); !r.IsError || !strings.Contains(joined(r), "no such thing") {
				t.Errorf("a failing skill answers %q", joined(r))
			}
			for _, unknown := range []string{"hidden", "none"} {
				_, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: unknown})
				refused, ok := errors.AsType[*jsonrpc.Error](err)
				assert.Truef(t, ok && refused.Code == jsonrpc.CodeInvalidParams, "call %s: %v", unknown, err)
			}
			assert.Equal(t, 1, h.made.Load())
		})
	}
}

func TestTheListFollowsTheOffers(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	changed := make(chan struct{}, 8)
	overHTTP, overStdio := h.http(), h.stdio(&sdk.ClientOptions{
		ToolListChangedHandler: func(context.Context, *sdk.ToolListChangedRequest) { changed <- struct{}{} },
	})
	h.offer("hidden")
	_, err := mcp.Withdraw(t.Context(), h.pool, "fails", "admin", "tester")
	require.NoError(t, err)
	_, err = skills.Disable(t.Context(), h.pool, "add", "admin", "broken", nil)
	require.NoError(t, err)
	got := names(t, overHTTP)
	assert.Truef(t, slices.Equal(got, []string{"hidden"}), "over HTTP are offered %v", got)
	<-changed
	pgtest.Eventually(t, func() bool { return slices.Equal(names(t, overStdio), []string{"hidden"}) },
		"the session over stdio follows")
	_, err = mcp.Grant(t.Context(), h.pool, "none", "admin", "tester")
	assert.ErrorIs(t, err, skills.ErrNotFound, "offering what is not there")
}

// awaits checks that a call waits for an approval, and returns its id.
func awaits(t *testing.T, r *sdk.CallToolResult) string {
	t.Helper()
	fields, _ := r.StructuredContent.(map[string]any)
	id, _ := fields["approval_id"].(string)
	if !r.IsError || id == "" || fields["status"] != "pending_approval" || !strings.Contains(joined(r), id) {
		t.Fatalf("the call answers %q, %v", joined(r), r.StructuredContent)
	}
	return id
}

func TestACallThatNeedsApprovalIsMadeOnceAfterIt(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.approve()
	session := h.http()
	args := map[string]any{"a": 2, "b": 3}
	id := awaits(t, callTool(t, session, "add", args))
	assert.Equal(t, id, awaits(t, callTool(t, session, "add", map[string]any{"b": 3, "a": json.RawMessage(`2e0`)})))
	other := awaits(t, callTool(t, session, "add", map[string]any{"a": 2, "b": 4}))
	assert.True(t, other != id, "another call waits for the same approval")
	require.Equal(t, 0, h.made.Load())
	h.server = h.process() // the calling process has died
	session = h.http()
	_, err := approvals.Decide(t.Context(), h.pool, id, true, "admin", "")
	require.NoError(t, err)
	if r := callTool(t, session, "add", args); r.IsError || !strings.Contains(joined(r), "5") {
		t.Errorf("after the approval: %q", joined(r))
	}
	_, err = agents.Put(t.Context(), h.pool, agents.Definition{Name: "support", Default: true})
	require.NoError(t, err)
	assert.Contains(t, h.http().InitializeResult().Instructions, "of the agent support.")
	next := awaits(t, callTool(t, session, "add", args))
	pgtest.Equal(t, h.pool, "support", `select agent from agent_executions order by id desc limit 1`)
	assert.Truef(t, next != id && h.made.Load() == 1, "the approval was used twice: %s, %d calls", next, h.made.Load())
}

func TestACallThatIsNotApprovedIsNotMade(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.approve()
	session := h.stdio(nil)
	id := awaits(t, callTool(t, session, "add", map[string]any{"a": 1}))
	_, err := approvals.Decide(t.Context(), h.pool, id, false, "admin", "not on a Friday")
	require.NoError(t, err)
	if r := callTool(t, session, "add", map[string]any{"a": 1}); !r.IsError ||
		!strings.Contains(joined(r), "not on a Friday") {
		t.Errorf("after the rejection: %q", joined(r))
	}
	pgtest.Equal(t, h.pool, 1, `select count(*) from lanekeeper.agent_rejected_executions(10) r
		join agent_executions x on x.id = r and x.status = 'failed'`)
	assert.Equal(t, 0, h.made.Load())
}

func TestManyCallersOfOneApprovedCallGetOneAnswer(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.approve()
	session := h.http()
	args := map[string]any{"a": 7}
	id := awaits(t, callTool(t, session, "add", args))
	_, err := approvals.Decide(t.Context(), h.pool, id, true, "admin", "")
	require.NoError(t, err)
	answers := make(chan bool, 8)
	for range 8 {
		go func() {
			r, err := session.CallTool(context.WithoutCancel(t.Context()), &sdk.CallToolParams{Name: "add", Arguments: args})
			answers <- err == nil && !r.IsError
		}()
	}
	won := 0
	for range 8 {
		if <-answers {
			won++
		}
	}
	assert.Truef(t, won == 1 && h.made.Load() == 1, "%d callers got the answer of %d calls", won, h.made.Load())
}

func TestAMountedToolCanBeOfferedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	d := httpServer(serve(t, tools("")...).URL)
	d.Trust = skills.TrustAuto
	w.put(d)
	w.sync()
	h := &house{t: t, pool: w.pool}
	h.server = h.process()
	h.server.Skills = w.registry
	loop := &reason.Loop{Pool: w.pool, Skills: w.registry}
	h.server.Invoke = loop.Invoke
	h.offer("mcp__test__echo")
	if r := callTool(t, h.http(), "mcp__test__echo", map[string]any{"text": "through"}); r.IsError ||
		joined(r) != "through" {
		t.Errorf("it answers %q", joined(r))
	}
}
