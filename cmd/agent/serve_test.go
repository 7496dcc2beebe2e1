package main

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const token = "AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836"

// The program reports all missing and invalid settings at once, one per line, with exit code 2.
func TestInvalidSettings(t *testing.T) {
	t.Parallel()
	const database = "DATABASE_URL=postgres://localhost:1/none"
	tests := map[string]struct {
		args     []string
		settings []string
		says     []string // one per line, in any order
	}{
		"serve without anything": {
			[]string{"serve"},
			nil,
			[]string{"DATABASE_URL is not set; set it", "AGENT_ADMIN_TOKEN is not set; set it"},
		},
		"serve without a token": {[]string{"serve"}, []string{database}, []string{"AGENT_ADMIN_TOKEN is not set; set it"}},
		"neither on nor off": {
			[]string{"heartbeat"},
			[]string{"AGENT_LANES=maybe"},
			[]string{`AGENT_LANES: "maybe" is not valid`},
		},
		"no address": {[]string{"dev"}, []string{"AGENT_LISTEN=foo"}, []string{`AGENT_LISTEN: "foo" is not an address`}},
		"no port": {
			[]string{"dev"},
			[]string{"AGENT_LISTEN=127.0.0.1:99999"},
			[]string{`AGENT_LISTEN: "127.0.0.1:99999" is not an address`},
		},
		"no database": {
			[]string{"lanes", "ls"},
			[]string{"DATABASE_URL=mysql://x"},
			[]string{"DATABASE_URL: not a PostgreSQL URL"},
		},
		"weak secrets": {
			[]string{"serve"},
			[]string{database, "AGENT_ADMIN_TOKEN=changeme", "AGENT_CHAT_KEY=k,shop=replace-me-with-something"},
			[]string{
				"AGENT_ADMIN_TOKEN: it has fewer than 16 characters; set", "AGENT_CHAT_KEY: the key shop: it begins with",
				"AGENT_CHAT_KEY: the key visitor: it has fewer",
			},
		},
		"many at once": {
			[]string{"serve"},
			[]string{
				"AGENT_LANES=maybe", "AGENT_TIMEZONE=x", "AGENT_WORKERS=0", "AGENT_MAX_TOKENS=lots",
				"OTEL_EXPORTER_OTLP_ENDPOINT=x",
			},
			[]string{
				"AGENT_LANES:", "AGENT_TIMEZONE:", "AGENT_WORKERS:", "AGENT_MAX_TOKENS:", "DATABASE_URL is not set",
				"AGENT_ADMIN_TOKEN is not set", "OTEL_EXPORTER_OTLP_ENDPOINT:",
			},
		},
		"dev for all, unguarded": {
			[]string{"dev"},
			[]string{"AGENT_LISTEN=0.0.0.0:0"},
			[]string{"AGENT_LISTEN: 0.0.0.0:0 can be reached from other machines"},
		},
		"no folder": {
			[]string{"dev", "/no/such/folder"},
			[]string{"AGENT_LISTEN=127.0.0.1:0"},
			[]string{"load workspace: there is no folder /no/such/folder"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := newProgramWithoutDatabase(t, test.settings...).run(test.args...)
			assert.Truef(t, got.code == 2 && got.out == "" && strings.Count(got.err, "\n") == len(test.says),
				"exit %d, stdout %q, want 2 and %d lines on stderr:\n%s", got.code, got.out, len(test.says), got.err)
			for _, says := range test.says {
				assert.Contains(t, got.err, "agent: "+says)
			}
		})
	}
}

func TestCommandsWithoutDatabase(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range [][]string{
		{"lanes", "ls"},
		{"heartbeat"},
		{"migrate"},
		{"trace", "last"},
		{"lanes", "run", "x", "--", "echo"},
	} {
		got := newProgramWithoutDatabase(t).run(args...)
		if got.code != 2 || got.out != "" || got.err != "agent: no database; set DATABASE_URL, or run `agent dev` in this "+
			"folder first\n" {
			t.Errorf("agent %v: exit %d, stdout %q, stderr %q", args, got.code, got.out, got.err)
		}
	}
	got := newProgramWithoutDatabase(t, "DATABASE_URL=postgres://user:hunter2@127.0.0.1:1/none").run("lanes", "ls")
	assert.Truef(t, got.code == 1 && !strings.Contains(got.err, "hunter2") &&
		strings.Contains(got.err, "check host and port"), "a database that is down: exit %d, stderr %q", got.code, got.err)
}

func TestUnknownParameterOfURL(t *testing.T) {
	t.Parallel()
	u, err := url.Parse(pgtest.EmptyURL(t))
	require.NoError(t, err)
	q := u.Query()
	q.Set("foo", "bar")
	u.RawQuery = q.Encode()
	newProgram(t, u.String()).mustFail(2, "remove or correct it in DATABASE_URL", "skills", "ls")
}

func TestPortInUse(t *testing.T) {
	t.Parallel()
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for _, command := range []string{"serve", "dev"} {
		got := newProgram(t, "postgres://localhost:1/none", token, "AGENT_LISTEN="+taken.Addr().String()).run(command)
		assert.Truef(t, got.code == 1 && strings.Count(got.err, "\n") == 1,
			"agent %s: exit %d, stderr %q", command, got.code, got.err)
		assert.Contains(t, got.err, "address already in use; set AGENT_LISTEN to a free address")
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.EmptyURL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve", "--migrate")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, func() bool {
		code, _ := testkit.Get(t, base+"/readyz")
		return code == http.StatusOK
	}, "it is ready")
	code, _ := testkit.Get(t, base+"/v1/lanes")
	assert.Equal(t, http.StatusUnauthorized, code, "lanes without the token")
	assert.Contains(t, s.err.String(), "engine_room="+base+"/")
	code, page := testkit.Get(t, base+"/lanes")
	assert.Truef(t, code == http.StatusOK && strings.Contains(page, "Log in to the Engine Room"),
		"a page without a login: %d\n%s", code, page)
	checkEngineRoom(t, base, strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	s.stop()
	if code := <-s.ended; code != 0 || s.out.String() != "" || !strings.Contains(s.err.String(), "msg=stopped") {
		t.Errorf("exit %d, stdout %q, stderr %s", code, s.out.String(), s.err.String())
	}
	assert.True(t, !strings.Contains(s.err.String(), "0123456789abcdef"), "the token is in the log")
}

// checkEngineRoom logs in and submits an invalid action.
func checkEngineRoom(t *testing.T, base, adminToken string) {
	t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	browser := &http.Client{Jar: jar}
	post := func(path string, form url.Values) string {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, base+path, strings.NewReader(form.Encode()))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		answer, err := browser.Do(req)
		require.NoError(t, err)
		defer answer.Body.Close()
		page, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return string(page)
	}
	assert.Contains(t, post("/login", url.Values{"token": {adminToken}, "next": {"/lanes"}}), "<h1>Lanes</h1>",
		`data-live="/live/lanes"`)
	assert.Contains(t, post("/act/v1/skills/nothing/enable", url.Values{"reason": {"a test"}, "back": {"/lanes"}}),
		"<h1>Lanes</h1>", "skill not found")
}

// withSecret adds a password to a URL of the test server, which needs none.
func withSecret(t *testing.T, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	require.NoError(t, err)
	query := u.Query()
	query.Set("password", "hunter2")
	u.RawQuery = query.Encode()
	return u.String()
}

var serving = regexp.MustCompile(`msg=serving listen=(\S+)`)

// chatKey is the key of visitors.
const chatKey = "visitor-0123456789abcdef"

// reply is a response, or the error.
type reply struct {
	status int
	closes bool // closes the connection after the response
	body   string
	err    error
}

// send sends a request on its own connection.
func send(ctx context.Context, method, url, key, body string) (got reply) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: false}}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Close, string(text), err}
}

// portClosed reports whether the port refuses connections.
func portClosed(t *testing.T, base string) bool {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		return true
	}
	_ = conn.Close()
	return false
}

// A stopping process is unready at once and keeps serving for the drain period. A second signal ends it.
func TestShutdownDrains(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0], "serve")
	cmd.Env = append(os.Environ(), asAgent+"=1", "DATABASE_URL="+pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_DRAIN_DELAY=10m")
	cmd.Args = append(cmd.Args, "--migrate")
	var errs testkit.Log
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	ended := sync.OnceValue(func() int { _ = cmd.Wait(); return cmd.ProcessState.ExitCode() })
	t.Cleanup(func() { _ = cmd.Process.Kill(); ended() })
	var base string
	pgtest.Eventually(t, func() bool {
		if found := serving.FindStringSubmatch(errs.String()); found != nil {
			base = found[1]
		}
		return base != ""
	}, "it serves")
	admin := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	pgtest.Eventually(t, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 200 },
		"it is ready")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	pgtest.Eventually(t, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 503 },
		"the process is not ready")
	if got := send(t.Context(), "GET", base+"/readyz", "", ""); !strings.Contains(got.body, `"draining":{"ok":false`) ||
		!strings.Contains(got.body, `"worker":{"ok":true`) {
		t.Errorf("/readyz says %d %s, want that it drains and works", got.status, got.body)
	}
	assert.Equal(t, 200, send(t.Context(), "GET", base+"/healthz", "", "").status)
	got := send(t.Context(), "POST", base+"/v1/executions", admin, `{"flow": "errand"}`)
	assert.Truef(t, got.status >= 200 && got.status < 500 && got.closes,
		"a request while it drains: %d %v, closes %t, want an answer and that the connection is closed", got.status, got.err,
		got.closes)
	got = send(t.Context(), "POST", base+"/v1/operate", admin, `{"message": "hello"}`)
	assert.Contains(t, got.body, "I am the offline model")
	done := make(chan int, 1)
	go func() { done <- ended() }()
	pgtest.Eventually(t, func() bool {
		_ = cmd.Process.Signal(syscall.SIGTERM) // one within 100 ms of the first has no effect
		return len(done) == 1
	}, "a second signal ends it")
	assert.Equal(t, exitInterrupted, <-done)
}

// A response that has started, streamed or not, completes before the process ends.
func TestShutdownWaitsForResponses(t *testing.T) {
	t.Parallel()
	asked, free := make(chan struct{}, 2), make(chan struct{})
	model := modeltest.New(t)
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		asked <- struct{}{}
		<-free
		return modeltest.Text("All is well.")
	})
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_CHAT_KEY="+chatKey,
		"OPENAI_BASE_URL="+model.URL(), "OPENAI_API_KEY=sk-none", "AGENT_MODEL="+modeltest.Model)
	p.must("migrate")
	s := p.start("serve")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 200 },
		"it is ready")
	var asking sync.WaitGroup
	got := map[string]*reply{"false": {}, "true": {}}
	for streamed, into := range got {
		asking.Go(func() {
			*into = send(t.Context(), "POST", base+"/v1/chat/completions", chatKey,
				`{"model": "agent", "stream": `+streamed+`, "messages": [{"role": "user", "content": "How is it?"}]}`)
		})
	}
	watched := make(chan reply, 1)
	go func() {
		watched <- send(t.Context(), "GET", base+"/v1/operate/watch", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), "")
	}()
	<-asked
	<-asked
	s.stop()
	pgtest.Eventually(t, func() bool { return portClosed(t, base) }, "the process accepts no connection")
	assert.NoError(t, (<-watched).err, "a stream that is watched ended with")
	require.True(t, len(s.ended) == 0, "it has ended before it answered")
	close(free)
	asking.Wait()
	for streamed, a := range got {
		assert.Truef(t, a.status == 200 && a.err == nil && strings.Contains(a.body, "All is well.") &&
			(streamed != "true" || strings.Contains(a.body, "[DONE]")), "streamed %s: %d %v %s", streamed, a.status, a.err,
			a.body)
	}
	assert.Equal(t, 0, <-s.ended, s.err.String())
}

// The program notifies systemd of readiness, liveness and stop.
func TestSystemdNotify(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "lk") //nolint:usetesting // a socket path must be short
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	require.NoError(t, err)
	defer conn.Close()
	hear := func(want string) {
		t.Helper()
		buf := make([]byte, 100)
		for {
			n, err := conn.Read(buf)
			require.NoError(t, err)
			if got := string(buf[:n]); got == want {
				return
			} else if got != "WATCHDOG=1" {
				t.Fatalf("the manager received %q, want %q", got, want)
			}
		}
	}
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=100000")
	s := p.start("serve", "--migrate")
	hear("READY=1")
	hear("WATCHDOG=1")
	s.stop()
	hear("STOPPING=1")
	assert.Equal(t, 0, <-s.ended, s.err.String())
}

// Only surfaces start internal flows, with validated input. A new internal flow must be named in package api.
func TestInternalFlowsAreNotStartable(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve")
	base := s.find(t, `listen=(http://\S+)`)
	got := send(t.Context(), "POST", base+"/v1/executions", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="),
		`{"flow":"nobody-knows-this"}`)
	assert.Truef(t, got.status == http.StatusUnprocessableEntity && strings.Contains(got.body, "(known: external)"),
		"%d %s, %v", got.status, got.body, got.err)
}

// Command line and HTTP reject the same flows.
func TestReservedFlowsAgree(t *testing.T) {
	t.Parallel()
	if here := slices.Sorted(maps.Keys(reservedFlows)); !slices.Equal(here, executions.Reserved()) {
		t.Errorf("the command line has %v, the engine %v", here, executions.Reserved())
	}
}
