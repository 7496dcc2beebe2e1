package mcp_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestSyncMountsToolsWithApproval(t *testing.T) {
	t.Parallel()
	for name, definition := range map[string]func(t *testing.T) mcp.Definition{
		"http":  func(t *testing.T) mcp.Definition { return httpServer(serve(t, tools("")...).URL) },
		"stdio": func(t *testing.T) mcp.Definition { return stdioServer(t, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newClientFixture(t, nil)
			f.put(definition(t))
			report := f.sync()
			assert.Equal(t, 4, report.Tools)
			assert.Equal(t, "echo hang meta pid", strings.Join(report.Mounted, " "))
			s := f.skill("echo")
			assert.Equal(t, skills.TrustApprove, s.Trust)
			assert.Equal(t, skills.ScopeInternal, s.Scope)
			assert.True(t, !s.Idempotent, "the skill is idempotent")
			assert.Equal(t, "mcp", s.Source)
			assert.Equal(t, "mcp:test/echo", s.Handler)
			assert.Contains(t, s.Description, "Says it again.")
			assert.Contains(t, string(s.Parameters()), `"times"`)
			assert.Equal(t, `"ab"`, f.mustCall("echo", `{"text":"ab"}`))
			_, err := f.call("echo", `{"text":1,"other":2}`)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), "/text") && strings.Contains(err.Error(), "other"),
				"wrong arguments: %v", err)
			again := f.sync()
			assert.Equal(t, 0, len(again.Mounted), "mounted by a second sync:", again.Mounted)
			assert.Equal(t, s.Revision, f.skill("echo").Revision, "revision after a second sync")
		})
	}
}

func TestCallSendsIdempotencyKeyAndTraceparent(t *testing.T) {
	t.Parallel()
	f, _ := newHTTPFixture(t, tools("")...)
	id := trace.New(trace.Flow)
	ctx := trace.With(t.Context(), trace.Span{TraceID: id, ActivityID: "a"})
	raw, err := f.registry.Invoke(ctx, skills.Call{Skill: f.skill("meta"), IdempotencyKey: "k1"})
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(raw, &got))
	assert.Equal(t, any("k1"), got["lanekeeper/idempotency-key"])
	parent, _ := got["traceparent"].(string)
	const length = len("00-") + 32 + len("-") + 16 + len("-01") // version, trace, span, flags
	assert.Truef(t, strings.HasPrefix(parent, "00-"+id.OTel()+"-") && len(parent) == length, "traceparent %q", parent)
}

// maxTimedOutCall bounds a call that times out, on a busy machine.
const maxTimedOutCall = 25 * time.Second

func TestTimeoutCancelsHangingTool(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]mcp.Definition{
		"http":  httpServer(serve(t, tools("")...).URL),
		"stdio": stdioServer(t, nil),
	} {
		t.Run(name, func(t *testing.T) {
			f := newClientFixture(t, nil)
			d.TimeoutMS = 4000
			f.put(d)
			f.sync()
			start := time.Now()
			f.wantFailure("hang", `{}`, skills.ClassTimeout, "4s")
			took := time.Since(start)
			assert.Truef(t, took <= maxTimedOutCall, "the call took %s", took)
			pgtest.Eventually(t, func() bool {
				raw, err := f.call("pid", `{}`)
				var p childProcess
				return err == nil && json.Unmarshal(raw, &p) == nil && p.Cancelled == 1
			}, "the tool sees the cancellation")
		})
	}
}

func TestTimeoutWhenChildStopsReading(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	d := stdioServer(t, map[string]any{childVariable: "stall"})
	d.TimeoutMS = 8000 // includes the start of the new child
	f.put(d)
	f.sync()
	start := time.Now()
	f.wantFailure("echo", `{"text":"`+strings.Repeat("x", 200_000)+`","times":0}`, skills.ClassTimeout, "8s")
	took := time.Since(start)
	assert.Truef(t, took <= maxTimedOutCall, "the call took %s", took)
	assert.Equal(t, `"back"`, f.mustCall("echo", `{"text":"back"}`))
}

// Lines of a child that are no messages do not end its session.
func TestOtherLinesOfChildAreSkipped(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	f.put(stdioServer(t, map[string]any{childVariable: "noisy"}))
	f.sync()
	assert.Equal(t, `"back"`, f.mustCall("echo", `{"text":"back"}`))
	assert.Contains(t, f.log.String(), "prints other text than messages", "[info] ready on stdio")
	assert.True(t, !strings.Contains(f.log.String(), "level\\"), "later lines are logged too: ", f.log.String())
}

// A broken response fails its call before the timeout.
func TestBrokenMessageOfChildEndsSession(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	d := stdioServer(t, map[string]any{childVariable: "broken"})
	d.TimeoutMS = 60_000
	f.put(d)
	f.sync()
	start := time.Now()
	f.wantFailure("cut", `{}`, skills.ClassNoAnswer, "")
	took := time.Since(start)
	assert.Truef(t, took <= maxTimedOutCall, "the call took %s", took)
}

// A child that starts or responds slowly fails calls, but keeps running.
func TestTimeoutsKeepSlowChild(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	d := stdioServer(t, map[string]any{childVariable: "slow"})
	f.put(d)
	f.sync()
	d.TimeoutMS = 2000
	f.put(d)
	f.wantFailure("echo", `{"text":"a","times":1}`, skills.ClassTimeout, "2s") // the child is still starting
	pgtest.Eventually(t, func() bool {
		_, err := f.call("pid", `{}`)
		return err == nil
	}, "the child has started")
	first := f.process().PID
	for range 4 {
		f.wantFailure("hang", `{}`, skills.ClassTimeout, "2s")
	}
	assert.Equal(t, first, f.process().PID, "process id after the timeouts")
}

// A server that was reached may have acted, so its call is not safe to repeat.
func TestCallWithoutAnswerMayHaveActed(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	f.put(stdioServer(t, map[string]any{childVariable: "exits"}))
	f.sync()
	f.wantFailure("exit", `{}`, skills.ClassNoAnswer, "test/exit: the server closed the connection; its error output is "+
		"in the log; the call may have taken effect")
	assert.True(t, !f.skill("exit").Idempotent, "the call is repeated")
}

func TestStatusOfAGateway(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	s := serve(t, tools("")...)
	var status atomic.Int64
	server := s.Config.Handler
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if code := int(status.Load()); code != 0 {
			w.WriteHeader(code)
			return
		}
		server.ServeHTTP(w, r)
	}))
	t.Cleanup(gateway.Close)
	f.put(httpServer(gateway.URL))
	for code, want := range map[int64]string{
		401: skills.ClassConfiguration, 403: skills.ClassConfiguration, 429: skills.ClassUnavailable,
		500: skills.ClassNoAnswer, 502: skills.ClassNoAnswer, 503: skills.ClassUnavailable, 504: skills.ClassNoAnswer,
	} {
		status.Store(0)
		f.sync()
		f.mustCall("echo", `{"text":"a"}`)
		status.Store(code)
		f.wantFailure("echo", `{"text":"a"}`, want, http.StatusText(int(code)))
		_, err := f.client.Sync(t.Context(), "test")
		require.True(t, err != nil, "a sync succeeds with status ", code)
		assert.Contains(t, err.Error(), http.StatusText(int(code)))
		assert.True(t, !strings.Contains(err.Error(), "calling"), err)
	}
}

// No byte of a call leaves before the TLS handshake, so the call is safe to repeat.
func TestCallWithoutHandshakeWasNotSent(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	var refuse atomic.Bool
	s := httptest.NewUnstartedServer(serve(t, tools("")...).Config.Handler)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if refuse.Load() {
			return nil, errors.New("no handshake")
		}
		return nil, nil
	}}
	s.StartTLS()
	t.Cleanup(s.Close)
	f.tls = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	f.restart(nil)
	f.put(httpServer(s.URL))
	f.sync()
	f.mustCall("echo", `{"text":"a"}`)
	refuse.Store(true)
	f.wantFailure("echo", `{"text":"a"}`, skills.ClassUnavailable, "tls")
}

func TestSyncErrorNamesConnectTimeout(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // otherwise the server does not notice the disconnect
		<-r.Context().Done()
	}))
	t.Cleanup(silent.Close)
	d := httpServer(silent.URL)
	d.TimeoutMS = 1000 // shorter than the minimum to connect, 5s
	f.put(d)
	_, err := f.client.Sync(t.Context(), "test")
	assert.Truef(t, err != nil && strings.Contains(err.Error(), `"test": the server has not answered within 5s`), "%v",
		err)
}

func TestChildLifecycle(t *testing.T) {
	t.Setenv("SHELL_SECRET", "not for children")
	f := newClientFixture(t, func(name string) string {
		return map[string]string{"PATH": os.Getenv("PATH"), "HOME": "/home/x", "TOKEN": "tok-12345", "OTHER": "o"}[name]
	})
	f.put(stdioServer(t, map[string]any{"GIVEN": "${TOKEN}"}))
	f.sync()
	child := f.process()
	first, env := child.PID, child.Env
	slices.Sort(env)
	want := []string{"GIVEN=[secret]", "HOME=/home/x", childVariable + "=1", "PATH=" + os.Getenv("PATH")}
	assert.Truef(t, slices.Equal(env, want), "the child's environment is %q, want %q", env, want)
	assert.Equal(t, first, f.process().PID, "process id of the second call")
	require.NoError(t, syscall.Kill(first, syscall.SIGKILL))
	var second int
	pgtest.Eventually(t, func() bool { // the first call after the kill may still go to the dead child
		if _, err := f.call("pid", `{}`); err != nil {
			return false
		}
		second = f.process().PID
		return true
	}, "a new child answers")
	assert.True(t, second != first, "the dead child answered")
	f.client.Close()
	assert.Error(t, syscall.Kill(second, 0), "child", second, "runs after Close")
	f.wantFailure("echo", `{"text":"a"}`, skills.ClassUnavailable, "closed")
}

// A changed declaration replaces the child, but not before its calls have ended.
func TestReplacedChildEndsItsCalls(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	d := stdioServer(t, map[string]any{childVariable: "change"})
	f.put(d)
	f.sync()
	first := f.process().PID
	slow := skills.Call{Skill: f.skill("slow")}
	type answer struct {
		result json.RawMessage
		err    error
	}
	ended := make(chan answer, 1)
	go func() {
		result, err := f.registry.Invoke(context.WithoutCancel(t.Context()), slow)
		ended <- answer{result, err}
	}()
	pgtest.Eventually(t, func() bool { return f.mustCall("count", `{"tool":"slow"}`) == `"1"` }, "the slow call runs")
	d.TimeoutMS++
	f.put(d)
	assert.True(t, f.process().PID != first, "the first child answers")
	got := <-ended
	assert.Truef(t, got.err == nil && string(got.result) == `"done"`, "the call ended with %s, %v", got.result, got.err)
	pgtest.Eventually(t, func() bool { return syscall.Kill(first, 0) != nil }, "the first child ends")
}

// A child that announces a change of its tools is asked for them again, and keeps running.
func TestAnnouncedChangeKeepsChild(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	f.put(stdioServer(t, map[string]any{childVariable: "change"}))
	f.sync()
	first := f.process().PID
	pgtest.Eventually(t, func() bool {
		return f.mustCall("count", `{"tool":"tools/list"}`) == `"2"` || f.process().PID != first
	}, "the client lists the tools again")
	assert.Equal(t, first, f.process().PID, "process id after the announcement")
}

func TestChildOfARemovedServerEnds(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	f.put(stdioServer(t, nil))
	f.sync()
	child := f.process().PID
	_, err := mcp.Remove(t.Context(), f.pool, nil)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- f.client.Run(ctx) }()
	pgtest.Eventually(t, func() bool { return syscall.Kill(child, 0) != nil }, "the child ends")
	stop()
	require.NoError(t, <-ended)
}

func TestCallsResumeAfterServerRestart(t *testing.T) {
	t.Parallel()
	f, s := newHTTPFixture(t, tools("")...)
	address := strings.TrimPrefix(s.URL, "http://")
	s.Close()
	f.wantFailure("echo", `{"text":"a"}`, skills.ClassUnavailable, "test")
	report, err := f.client.Sync(t.Context(), "test")
	assert.Truef(t, err != nil && report.Error != "", "a sync of a server that is down: %+v, %v", report, err)
	r, err := mcp.Get(t.Context(), f.pool, "test")
	assert.Truef(t, err == nil && r.SyncError != "" && f.skill("echo").Enabled, "after a failed sync: %+v, %v", r, err)
	back := serveAt(t, address, tools("")...)
	defer back.Close()
	pgtest.Eventually(t, func() bool { _, err := f.call("echo", `{"text":"a"}`); return err == nil },
		"a call succeeds after the restart")
}

// A server that was restarted does not know the session. Servers say so in different ways.
func TestCallAfterLostSession(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		body   string
		fails  bool // the first call
	}{
		"plain":       {http.StatusNotFound, "session not found", false},
		"json body":   {http.StatusNotFound, sessionError(-32600, "Session not found"), false},
		"bad request": {http.StatusBadRequest, sessionError(-32000, "Bad Request: No valid session ID provided"), true},
	} {
		t.Run(name, func(t *testing.T) {
			f, s := newClientFixture(t, nil), serveSessions(t, c.status, c.body, tools("")...)
			f.put(httpServer(s.URL))
			f.sync()
			f.mustCall("echo", `{"text":"a"}`)
			s.forget()
			if c.fails {
				f.wantFailure("echo", `{"text":"a"}`, skills.ClassHandler, "No valid session ID")
			}
			assert.Equal(t, `"b"`, f.mustCall("echo", `{"text":"b","times":1}`))
		})
	}
}

// A call that the server runs is not sent again when it does not know the session of the next call.
func TestLostSessionRepeatsNoOtherCall(t *testing.T) {
	t.Parallel()
	var runs atomic.Int32
	end := make(chan struct{})
	slow := tool{
		sdk.Tool{Name: "slow", InputSchema: json.RawMessage(`{"type":"object"}`)},
		func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
			runs.Add(1)
			<-end
			return text("done"), nil
		},
	}
	f, s := newClientFixture(t, nil), serveSessions(t, http.StatusNotFound, "", append(tools(""), slow)...)
	f.put(httpServer(s.URL))
	f.sync()
	call := skills.Call{Skill: f.skill("slow")}
	type answer struct {
		result json.RawMessage
		err    error
	}
	ended := make(chan answer, 1)
	go func() {
		result, err := f.registry.Invoke(context.WithoutCancel(t.Context()), call)
		ended <- answer{result, err}
	}()
	pgtest.Eventually(t, func() bool { return runs.Load() == 1 }, "the server runs the slow call")
	s.forget()
	f.mustCall("echo", `{"text":"a"}`)
	close(end)
	got := <-ended
	assert.Truef(t, got.err == nil && string(got.result) == `"done"`, "the call ended with %s, %v", got.result, got.err)
	assert.Equal(t, int32(1), runs.Load(), "runs of the slow call")
}

func TestRepeatedFailuresDelayTheNextConnection(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, func(string) string { return "key" })
	d := httpServer(serve(t, tools("")...).URL)
	d.Headers = map[string]any{"X-Key": "${TOKEN}"}
	f.put(d)
	f.sync()
	f.restart(func(string) string { return "" })
	pgtest.Eventually(t, func() bool {
		_, err := f.call("echo", `{"text":"a"}`)
		failure, ok := errors.AsType[*skills.CallError](err)
		require.Truef(t, ok && failure.Class == skills.ClassConfiguration, "%#v", err)
		return strings.HasPrefix(failure.Message, "MCP server test: ") &&
			strings.Contains(failure.Message, "; the next try is in ")
	}, "a failure names the server and the time until the next connection")
}

func TestFailedReconciliationIsAnAttempt(t *testing.T) {
	t.Parallel()
	f := newClientFixture(t, nil)
	f.put(httpServer(serve(t, tools("")...).URL))
	pgtest.Exec(t, f.pool, `alter table agent_mcp_tools add constraint no_echo check (tool <> 'echo')`)
	report, err := f.client.Sync(t.Context(), "test")
	assert.Truef(t, err != nil && strings.Contains(report.Error, "no_echo"), "%+v, %v", report, err)
	r, err := mcp.Get(t.Context(), f.pool, "test")
	require.NoError(t, err)
	assert.Truef(t, r.AttemptedAt != nil && strings.Contains(r.SyncError, "no_echo"), "the server is due at once: %+v", r)
}

func TestTooLongResponseFailsCall(t *testing.T) {
	t.Parallel()
	f, _ := newHTTPFixture(t, tools("")...)
	f.wantFailure("echo", `{"text":"0123456789","times":1000000}`, skills.ClassNoAnswer, "more than 8388608 bytes")
}

func TestResultMatchesOutputSchema(t *testing.T) {
	t.Parallel()
	var all []tool
	for name, value := range map[string]any{"honest": 1, "wrong": "one"} {
		all = append(all, tool{
			sdk.Tool{
				Name: name, InputSchema: json.RawMessage(`{"type":"object"}`),
				OutputSchema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}`),
			},
			func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
				return &sdk.CallToolResult{StructuredContent: map[string]any{"n": value}}, nil
			},
		})
	}
	f, _ := newHTTPFixture(t, all...)
	assert.Equal(t, `{"n":1}`, f.mustCall("honest", `{}`))
	f.wantFailure("wrong", `{}`, skills.ClassNoAnswer,
		"test/wrong: its result does not match its outputSchema: at '/n': got string, want integer")
}

func TestPrivateAddressNeedsPermission(t *testing.T) {
	t.Parallel()
	f, s := newHTTPFixture(t, tools("")...)
	guarded := mcp.NewClient(mcp.Options{Pool: f.pool})
	defer guarded.Close()
	registry, err := skills.New(skills.Options{MCP: guarded.Call})
	require.NoError(t, err)
	f.registry = registry
	before := s.requestCount()
	f.wantFailure("echo", `{"text":"a"}`, skills.ClassRefused, "AGENT_ALLOW_PRIVATE_HTTP")
	assert.Equal(t, before, s.requestCount(), "requests after the refused call")
}

func TestSecretsAreSentAndRedacted(t *testing.T) {
	t.Parallel()
	s := serve(t, tools("")...)
	f := newClientFixture(t, func(name string) string { return map[string]string{"TOKEN": "tok-12345"}[name] })
	d := httpServer(s.URL)
	d.Headers = map[string]any{"Authorization": "Bearer ${TOKEN}"}
	f.put(d)
	f.sync()
	assert.Equal(t, `"is it [secret]?"`, f.mustCall("echo", `{"text":"is it tok-12345?"}`))
	assert.True(t, s.sawHeader("Authorization", "Bearer tok-12345"), "the server did not get the header")
	f.restart(func(string) string { return "" })
	f.wantFailure("echo", `{"text":"a"}`, skills.ClassConfiguration, "set the environment variable TOKEN")
}

func TestResultConversion(t *testing.T) {
	t.Parallel()
	results := map[string]*sdk.CallToolResult{
		"texts":      {Content: []sdk.Content{&sdk.TextContent{Text: "a"}, &sdk.TextContent{Text: "b"}}},
		"structured": {StructuredContent: map[string]any{"n": 1}, Content: []sdk.Content{&sdk.TextContent{Text: `{"n":1}`}}},
		"exact": {
			StructuredContent: json.RawMessage(`{"id":9007199254740993}`),
			Content:           []sdk.Content{&sdk.TextContent{Text: `{"id": 9007199254740993}`}},
		},
		"image": {Content: []sdk.Content{
			&sdk.TextContent{Text: "see"},
			&sdk.ImageContent{Data: []byte("png!"), MIMEType: "image/png"},
		}},
		"resource": {Content: []sdk.Content{
			&sdk.EmbeddedResource{Resource: &sdk.ResourceContents{URI: "file:///a", Text: "inside"}},
		}},
		"failed": {IsError: true, Content: []sdk.Content{&sdk.TextContent{Text: "no such city"}}},
		"large":  text(strings.Repeat("x", 300<<10)),
		"huge":   text(strings.Repeat("x", 9<<20)),
		"empty":  {},
		"nul":    text("a\x00b"),
	}
	var all []tool
	for name, r := range results {
		all = append(all, tool{
			sdk.Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`)},
			func(context.Context, *sdk.CallToolRequest) (*sdk.CallToolResult, error) { return r, nil },
		})
	}
	f, _ := newHTTPFixture(t, all...)
	const imageHash = "53ec22c455168e29791219d4017c53b8203153e83853cc7a232b4ab446a8c6b7" // of png!
	for name, want := range map[string]string{
		"texts": `"a\nb"`, "structured": `{"n":1}`, "exact": `{"id":9007199254740993}`, "empty": `""`, "nul": "\"a\uFFFDb\"",
		"image": `{"attached":[{"bytes":4,"mime":"image/png","sha256":"` + imageHash +
			`","type":"image"}],"text":"see"}`,
		"resource": `{"attached":[{"mime":"","text":"inside","type":"resource","uri":"file:///a"}]}`,
	} {
		got := f.mustCall(name, `{}`)
		assert.Equal(t, want, got, name)
	}
	f.wantFailure("failed", `{}`, skills.ClassHandler, "no such city")
	f.wantFailure("large", `{}`, skills.ClassTooLarge, "bytes")
	f.wantFailure("huge", `{}`, skills.ClassNoAnswer, "test/huge")
	// The client survives the oversized response.
	assert.Equal(t, `"a\nb"`, f.mustCall("texts", `{}`))
}
