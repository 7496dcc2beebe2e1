package main

import (
	"bytes"
	"context"
	"encoding/json"
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
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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
		"no schedule": {
			[]string{"serve"},
			[]string{database, token, "AGENT_HEARTBEAT_CRON=garbage"},
			[]string{`AGENT_HEARTBEAT_CRON: parse schedule "garbage"`},
		},
		"no zone": {
			[]string{"serve"},
			[]string{database, token, "AGENT_TIMEZONE=Mars/Olympus"},
			[]string{`AGENT_TIMEZONE: find time zone "Mars/Olympus"`},
		},
		"neither on nor off": {
			[]string{"heartbeat"},
			[]string{"AGENT_LANES=maybe"},
			[]string{`AGENT_LANES: "maybe" is not valid`},
		},
		"no URL": {
			[]string{"heartbeat"},
			[]string{"OPENAI_BASE_URL=nonsense"},
			[]string{"OPENAI_BASE_URL: it is not an http or https URL"},
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
		"no level": {[]string{"dev"}, []string{"AGENT_LOG_LEVEL=loud"}, []string{`AGENT_LOG_LEVEL: "loud" is not a level`}},
		"weak secrets": {
			[]string{"serve"},
			[]string{database, "AGENT_ADMIN_TOKEN=changeme", "AGENT_CHAT_KEY=k,shop=replace-me-with-something"},
			[]string{
				"AGENT_ADMIN_TOKEN: it has fewer than 16 characters; set", "AGENT_CHAT_KEY: the key shop: it begins with",
				"AGENT_CHAT_KEY: the key visitor: it has fewer",
			},
		},
		"weak secrets in dev": {
			[]string{"dev"},
			[]string{"AGENT_ADMIN_TOKEN=changeme"},
			[]string{"AGENT_ADMIN_TOKEN: it has fewer than 16 characters; set"},
		},
		"no name of a key": {
			[]string{"serve"},
			[]string{database, token, "AGENT_CHAT_KEY=a:b=0123456789abcdefgh"},
			[]string{"AGENT_CHAT_KEY: item 1 is not name=text"},
		},
		"many at once": {
			[]string{"serve"},
			[]string{"AGENT_LANES=maybe", "AGENT_TIMEZONE=x", "AGENT_WORKERS=0", "AGENT_MAX_TOKENS=lots"},
			[]string{
				"AGENT_LANES:", "AGENT_TIMEZONE:", "AGENT_WORKERS:", "AGENT_MAX_TOKENS:", "DATABASE_URL is not set",
				"AGENT_ADMIN_TOKEN is not set",
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

func TestServeRequiresMigratedDatabase(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	got := newProgram(t, url, token, "AGENT_LISTEN=127.0.0.1:0").run("serve")
	assert.Truef(t, got.code == 2 && strings.Count(got.err, "\n") == 1 && strings.Contains(got.err, "run `agent migrate`"),
		"exit %d, stderr %q", got.code, got.err)
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

// The first run prints the trace, the addresses and what it created.
func TestDevOutput(t *testing.T) {
	t.Parallel()
	p := program{t, []string{
		"DATABASE_URL=" + withSecret(t, pgtest.EmptyURL(t)), "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_ADMIN_TOKEN=the-admins-own-token", "AGENT_CHAT_KEY=the-visitors-own-key",
	}}
	s := p.start("dev")
	base := s.find(t, `API +(http://\S+)/v1`)
	s.find(t, `\^C stops`)
	assert.Contains(t, s.out.String(), "self_heal", "follow_through", "advance_plan", "run_automations", "reflect",
		"save_memories", "total:")
	output := s.err.String()
	assert.Contains(t, output, "migrating the schema to version", "applied the caretaker example: 9 skills, 1 objective, "+
		"2 automations",
		"running a heartbeat …", "admin token  the-admins-own-token\n", "/chat#key=the-visitors-own-key\n",
		"data in      DATABASE_URL\n", "model        offline", "heartbeat    */30", "*/30 * * * * (UTC)", "^C stops")
	assert.True(t, !strings.Contains(output, "hunter2"), "the database's password is shown")
	logged := strings.Count(output, "level=WARN") // at the half hour, the scheduled heartbeat runs into the first one
	lines := strings.Count(output, "\n") - logged
	assert.Truef(t, lines <= 16, "%d lines on stderr:\n%s", lines, output)
	code, body := testkit.Get(t, base+"/readyz")
	assert.Truef(t, code == http.StatusOK, "readyz: %d %s", code, body)
	s.stop()
	if code := <-s.ended; code != 0 || !strings.HasSuffix(s.err.String(), "stopped\n") {
		t.Errorf("exit %d, stderr %s", code, s.err.String())
	}
}

func TestHeartbeat(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	story := p.must("heartbeat")
	assert.Contains(t, story, "hb_", "✓ completed", "self_heal", "save_memories", "total: 6 activities", " skills checked")
	var got struct {
		Execution struct{ ID, Status string }
		Trace     struct {
			TraceID    string `json:"trace_id"`
			Activities []struct{ Status string }
		}
	}
	p.mustJSON(&got, "heartbeat")
	assert.Truef(t, got.Execution.Status == "completed" && len(got.Trace.Activities) == 6 &&
		strings.HasPrefix(got.Trace.TraceID, "hb_"), "got %+v", got)

	for _, lane := range []string{"heartbeat", "operate"} {
		db := connect(t, url)
		pgtest.Exec(t, db, `select try_acquire_agent_lock($1, 'somebody', 600)`, lane)
		p.mustJSON(&got, "heartbeat")
		assert.Truef(t, got.Execution.Status == "completed" && len(got.Trace.Activities) == 1 &&
			got.Trace.Activities[0].Status == "skipped", "with lane %s held: %+v", lane, got)
		pgtest.Exec(t, db, `select release_agent_lock($1, 'somebody')`, lane)
	}
}

// A failed heartbeat prints its trace, and the error names it.
func TestFailedHeartbeat(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t)
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Refusal(http.StatusUnauthorized, "invalid_request_error", "invalid_api_key", "no such key", 0)
	})
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL(), "OPENAI_API_KEY=sk-none")
	p.must("apply", caretaker)
	got := p.run("heartbeat", "--json")
	var story struct{ Execution struct{ Status string } }
	if err := decodeOne(got.out, &story); err != nil || got.code != 1 || story.Execution.Status != "failed" {
		t.Errorf("exit %d, %v, status %s", got.code, err, story.Execution.Status)
	}
	last := got.err[strings.LastIndex(strings.TrimSpace(got.err), "\n")+1:]
	var fault struct {
		Error struct {
			Code, Message string
			TraceID       string `json:"trace_id"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(last), &fault), got.err)
	assert.Truef(t, fault.Error.Code == "failed" && strings.HasPrefix(fault.Error.TraceID, "hb_"), "got %+v", fault)
	assert.Contains(t, fault.Error.Message, "status 401: invalid_api_key", "such key", "check OPENAI_API_KEY")
}

func TestInterruptedHeartbeat(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t, modeltest.Hang())
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL())
	p.must("apply", caretaker)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan commandResult, 1)
	go func() { ended <- p.runWith(ctx, nil, "heartbeat") }()
	defer cancel()
	pgtest.Eventually(t, func() bool { return len(model.Requests()) > 0 }, "the model is asked")
	cancel()
	if got := <-ended; got.code != 130 || !strings.Contains(got.out, "cancelled") {
		t.Errorf("exit %d, stdout %s, stderr %s", got.code, got.out, got.err)
	}
	assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
	assert.Contains(t, p.must("executions", "ls"), "cancelled")
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	type findings struct {
		Items []struct {
			Check, Detail string
			OK            bool
		}
	}
	p := newProgram(t, pgtest.URL(t))
	assert.Contains(t, p.must("doctor"), "ok   configuration", "ok   database", "ok   schema", "ok   rights", "none alive",
		"ok   model answers")
	var all findings
	p.mustJSON(&all, "doctor")
	for _, f := range all.Items {
		assert.Truef(t, f.OK, "%s: %s", f.Check, f.Detail)
	}
	for name, environ := range map[string][]string{
		"configuration": {"AGENT_LANES=maybe", "AGENT_WORKERS=0"},
		"database":      {"DATABASE_URL=postgres://localhost:1/none"},
		"schema":        {"DATABASE_URL=" + pgtest.EmptyURL(t)},
		"rights":        {"DATABASE_URL=" + pgtest.URL(t) + "&default_transaction_read_only=on"},
		"prices":        {"DATABASE_URL=" + pgtest.URL(t), "AGENT_MODEL=gpt-4o", `AGENT_PRICES={"gpt-4o":{"input":2}}`},
		"model":         {"DATABASE_URL=" + withSecret(t, pgtest.URL(t)), "OPENAI_BASE_URL=http://me:hunter2@127.0.0.1:1/v1"},
		"model answers": {"DATABASE_URL=" + pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1"},
	} {
		got := newProgramWithoutDatabase(t, environ...).run("doctor")
		assert.Truef(t, got.code == 1 && !strings.Contains(got.err, "agent:") &&
			!strings.Contains(got.out+got.err, "hunter2") && strings.Contains(got.out, "BAD  "+name),
			"bad %s: exit %d, stderr %q, stdout:\n%s", name, got.code, got.err, got.out)
	}
}

// doctor must not wait for the lock that blocks everyone. It names the blocking session.
func TestDoctorNamesBlockingSession(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t)
	pool := pgtest.Pool(t, server.URL(), postgres.Options{ApplicationName: "upkeep"})
	p := newProgram(t, server.URL())
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `lock table agent_workers in access exclusive mode`)
	got := p.run("doctor")
	assert.Equal(t, 1, got.code)
	assert.Contains(t, got.out, "ok   commits", "BAD  workers        session ", "(upkeep, idle in transaction, ",
		"locks agent_workers; it ends with its transaction, or by pg_terminate_backend")
	require.NoError(t, tx.Rollback(t.Context()))
	pgtest.Exec(t, pool, `alter system set synchronous_standby_names = 'nobody'`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
	pgtest.Eventually(t, func() bool { // the checkpointer applies the setting to commits
		got = p.run("doctor")
		return got.code == 1
	}, "commits wait for a standby")
	assert.Contains(t, got.out, "BAD  commits        a commit is not finished after 5s; check that the standbys of "+
		"synchronous_standby_names (nobody) are connected", "ok   workers")
	pgtest.Exec(t, pool, `alter system reset synchronous_standby_names`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
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
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	assert.Equal(t, exitInterrupted, ended())
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

func TestHealthcheck(t *testing.T) {
	t.Parallel()
	_, port, _ := strings.Cut(testkit.FreeAddress(t), ":") // the port stays free after the program has stopped
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=0.0.0.0:"+port, "AGENT_LOG_LEVEL=info")
	s := p.start("serve", "--migrate")
	at, err := url.Parse(s.find(t, `msg=serving listen=(\S+)`))
	require.NoError(t, err)
	for _, listen := range []string{"0.0.0.0:", ":", "127.0.0.1:", "localhost:"} {
		check := newProgramWithoutDatabase(t, "AGENT_LISTEN="+listen+at.Port(), "AGENT_WORKERS=garbage",
			"DATABASE_URL=garbage")
		if got := check.run("healthcheck"); got.code != 0 || !strings.HasSuffix(got.out, ":"+at.Port()+"/healthz: ok\n") {
			t.Errorf("listening on %s: exit %d, %s%s", listen, got.code, got.out, got.err)
		}
	}
	check := newProgramWithoutDatabase(t, "AGENT_LISTEN=:"+at.Port())
	pgtest.Eventually(t, func() bool { return check.run("healthcheck", "--ready").code == 0 }, "it is ready")
	s.stop()
	<-s.ended
	check.mustFail(1, "check that agent serve runs with this AGENT_LISTEN", "healthcheck")
	newProgramWithoutDatabase(t, "AGENT_LISTEN=8080").mustFail(2, "AGENT_LISTEN", "healthcheck")
}

// An unready process reports the failed checks.
func TestHealthcheckFailures(t *testing.T) {
	t.Parallel()
	all, own := "[::]", "[::1]:0"
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", own)
	if err != nil { // no IPv6 here
		all, own = "0.0.0.0", "127.0.0.1:0"
		listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", own)
		require.NoError(t, err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.Copy(w, bytes.NewBufferString(
			`{"status": "unready", "checks": {"database": {"ok": false, "detail": "no answer"}, "schema": {"ok": true}}}`))
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	got := newProgramWithoutDatabase(t, "AGENT_LISTEN="+all+":"+port).run("healthcheck", "--ready")
	assert.Truef(t, got.code == 1 && strings.Contains(got.err, "503 Service Unavailable (database: no answer)"),
		"exit %d, %s", got.code, got.err)
}

// Only surfaces start internal flows, with validated input. A new internal flow must be named in package api.
func TestInternalFlowsAreNotStartable(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve")
	base := "http://" + s.find(t, `listen=http://(\S+)`)
	_, admin, _ := strings.Cut(token, "=")
	req, err := http.NewRequestWithContext(t.Context(), "POST", base+"/v1/executions",
		strings.NewReader(`{"flow":"nobody-knows-this"}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+admin)
	got, err := http.DefaultClient.Do(req)
	require.NoError(t, err, "the program said", s.err.String())
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	assert.Truef(t, err == nil && got.StatusCode == http.StatusUnprocessableEntity &&
		strings.Contains(string(body), "(known: external)"), "%d %s, %v", got.StatusCode, body, err)
}

// Command line and HTTP reject the same flows.
func TestReservedFlowsAgree(t *testing.T) {
	t.Parallel()
	if here := slices.Sorted(maps.Keys(reservedFlows)); !slices.Equal(here, executions.Reserved()) {
		t.Errorf("the command line has %v, the engine %v", here, executions.Reserved())
	}
}
