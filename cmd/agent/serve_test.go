package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

const token = "AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836"

// What is missing or wrong in the environment stops the start with exit 2 and a line each, all at once.
func TestWrongSettings(t *testing.T) {
	t.Parallel()
	const database = "DATABASE_URL=postgres://localhost:1/none"
	tests := map[string]struct {
		args     []string
		settings []string
		says     []string // a line each, in any order
	}{
		"serve without anything": {[]string{"serve"}, nil, []string{"DATABASE_URL is not set; set it", "AGENT_ADMIN_TOKEN is not set; set it"}},
		"serve without a token":  {[]string{"serve"}, []string{database}, []string{"AGENT_ADMIN_TOKEN is not set; set it"}},
		"no schedule":            {[]string{"serve"}, []string{database, token, "AGENT_HEARTBEAT_CRON=garbage"}, []string{`AGENT_HEARTBEAT_CRON: parse schedule "garbage"`}},
		"no zone":                {[]string{"serve"}, []string{database, token, "AGENT_TIMEZONE=Mars/Olympus"}, []string{`AGENT_TIMEZONE: find time zone "Mars/Olympus"`}},
		"neither on nor off":     {[]string{"heartbeat"}, []string{"AGENT_LANES=maybe"}, []string{`AGENT_LANES: "maybe" is not valid`}},
		"no URL":                 {[]string{"heartbeat"}, []string{"OPENAI_BASE_URL=nonsense"}, []string{"OPENAI_BASE_URL: it is not an http or https URL"}},
		"no address":             {[]string{"dev"}, []string{"AGENT_LISTEN=foo"}, []string{`AGENT_LISTEN: "foo" is not an address`}},
		"no port":                {[]string{"dev"}, []string{"AGENT_LISTEN=127.0.0.1:99999"}, []string{`AGENT_LISTEN: "127.0.0.1:99999" is not an address`}},
		"no database":            {[]string{"lanes", "ls"}, []string{"DATABASE_URL=mysql://x"}, []string{"DATABASE_URL: it is not a PostgreSQL URL"}},
		"no level":               {[]string{"dev"}, []string{"AGENT_LOG_LEVEL=loud"}, []string{`AGENT_LOG_LEVEL: "loud" is not a level`}},
		"weak secrets": {
			[]string{"serve"},
			[]string{database, "AGENT_ADMIN_TOKEN=changeme", "AGENT_CHAT_KEY=k,shop=replace-me-with-something"},
			[]string{"AGENT_ADMIN_TOKEN: it has fewer than 16 characters; set", "AGENT_CHAT_KEY: the key shop: it begins with", "AGENT_CHAT_KEY: the key visitor: it has fewer"},
		},
		"weak secrets in dev": {[]string{"dev"}, []string{"AGENT_ADMIN_TOKEN=changeme"}, []string{"AGENT_ADMIN_TOKEN: it has fewer than 16 characters; set"}},
		"no name of a key":    {[]string{"serve"}, []string{database, token, "AGENT_CHAT_KEY=a:b=0123456789abcdefgh"}, []string{"AGENT_CHAT_KEY: item 1 is not name=text"}},
		"many at once": {
			[]string{"serve"},
			[]string{"AGENT_LANES=maybe", "AGENT_TIMEZONE=x", "AGENT_WORKERS=0", "AGENT_MAX_TOKENS=lots"},
			[]string{"AGENT_LANES:", "AGENT_TIMEZONE:", "AGENT_WORKERS:", "AGENT_MAX_TOKENS:", "DATABASE_URL is not set", "AGENT_ADMIN_TOKEN is not set"},
		},
		"dev for all, unguarded": {[]string{"dev"}, []string{"AGENT_LISTEN=0.0.0.0:0"}, []string{"AGENT_LISTEN: 0.0.0.0:0 can be reached from other machines"}},
		"no folder":              {[]string{"dev", "/no/such/folder"}, []string{"AGENT_LISTEN=127.0.0.1:0"}, []string{"load workspace: there is no folder /no/such/folder"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := bare(t, test.settings...).run(test.args...)
			if got.code != 2 || got.out != "" || strings.Count(got.err, "\n") != len(test.says) {
				t.Errorf("exit %d, stdout %q, want 2 and %d lines on stderr:\n%s", got.code, got.out, len(test.says), got.err)
			}
			for _, says := range test.says {
				contains(t, got.err, "agent: "+says)
			}
		})
	}
}

func TestCommandsWithoutADatabase(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range [][]string{{"lanes", "ls"}, {"heartbeat"}, {"migrate"}, {"trace", "last"}, {"lanes", "run", "x", "--", "echo"}} {
		got := bare(t).run(args...)
		if got.code != 2 || got.out != "" || got.err != "agent: there is no database; set DATABASE_URL, or run `agent dev` in this folder first\n" {
			t.Errorf("agent %v: exit %d, stdout %q, stderr %q", args, got.code, got.out, got.err)
		}
	}
	got := bare(t, "DATABASE_URL=postgres://user:hunter2@127.0.0.1:1/none").run("lanes", "ls")
	if got.code != 1 || strings.Contains(got.err, "hunter2") || !strings.Contains(got.err, "check host and port") {
		t.Errorf("a database that is down: exit %d, stderr %q", got.code, got.err)
	}
}

func TestAPortThatIsTaken(t *testing.T) {
	t.Parallel()
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, command := range []string{"serve", "dev"} {
		got := on(t, "postgres://localhost:1/none", token, "AGENT_LISTEN="+taken.Addr().String()).run(command)
		if got.code != 1 || strings.Count(got.err, "\n") != 1 {
			t.Errorf("agent %s: exit %d, stderr %q", command, got.code, got.err)
		}
		contains(t, got.err, "address already in use; set AGENT_LISTEN to a free address")
	}
}

func TestServeRefusesAnUnmigratedDatabase(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	got := on(t, url, token, "AGENT_LISTEN=127.0.0.1:0").run("serve")
	if got.code != 2 || strings.Count(got.err, "\n") != 1 || !strings.Contains(got.err, "run `agent migrate`") {
		t.Errorf("exit %d, stderr %q", got.code, got.err)
	}
}

func TestServeWorksUntilItIsStopped(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.EmptyURL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve", "--migrate")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, pgWait, func() bool {
		code, _ := get(t, base+"/readyz")
		return code == http.StatusOK
	}, "it is ready")
	if code, _ := get(t, base+"/v1/lanes"); code != http.StatusUnauthorized {
		t.Errorf("lanes without the token: %d", code)
	}
	contains(t, s.err.String(), "engine_room="+base+"/")
	if code, page := get(t, base+"/lanes"); code != http.StatusOK || !strings.Contains(page, "Log in to the Engine Room") {
		t.Errorf("a page without a login: %d\n%s", code, page)
	}
	seesRoom(t, base, strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	s.stop()
	if code := <-s.ended; code != 0 || s.out.String() != "" || !strings.Contains(s.err.String(), "msg=stopped") {
		t.Errorf("exit %d, stdout %q, stderr %s", code, s.out.String(), s.err.String())
	}
	if strings.Contains(s.err.String(), "0123456789abcdef") {
		t.Error("the token is in the log")
	}
}

// seesRoom logs in, and pulls a lever that cannot be pulled.
func seesRoom(t *testing.T, base, adminToken string) {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	browser := &http.Client{Jar: jar}
	post := func(path string, form url.Values) string {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, base+path, strings.NewReader(form.Encode()))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		answer, err := browser.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		page, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(page)
	}
	contains(t, post("/login", url.Values{"token": {adminToken}, "next": {"/lanes"}}), "<h1>Lanes</h1>", `data-live="/live/lanes"`)
	contains(t, post("/act/v1/skills/nothing/enable", url.Values{"reason": {"a test"}, "back": {"/lanes"}}), "<h1>Lanes</h1>", "skill not found")
}

// withSecret puts a password into a URL of the test server, which asks for none.
func withSecret(t *testing.T, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("password", "hunter2")
	u.RawQuery = query.Encode()
	return u.String()
}

func get(t *testing.T, address string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(body)
}

// The first run is short enough to read: what was made, the story, where everything is.
func TestDevShowsAStoryAndWhereEverythingIs(t *testing.T) {
	t.Parallel()
	p := program{t, []string{
		"DATABASE_URL=" + withSecret(t, pgtest.EmptyURL(t)), "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_ADMIN_TOKEN=the-admins-own-token", "AGENT_CHAT_KEY=the-visitors-own-key",
	}}
	s := p.start("dev")
	base := s.find(t, `API +(http://\S+)/v1`)
	s.find(t, `\^C stops`)
	contains(t, s.out.String(), "self_heal", "follow_through", "advance_plan", "run_automations", "reflect", "save_memories", "total:")
	said := s.err.String()
	contains(t, said, "bringing the schema to version", "applied the caretaker example: 9 skills, 1 objective, 2 automations",
		"running a heartbeat …", "admin token  the-admins-own-token\n", "/chat#key=the-visitors-own-key\n",
		"data in      DATABASE_URL\n", "model        offline", "heartbeat    */30", "*/30 * * * * (UTC)", "^C stops")
	if strings.Contains(said, "hunter2") {
		t.Error("the database's password is shown")
	}
	if lines := strings.Count(said, "\n"); lines > 16 {
		t.Errorf("%d lines on stderr:\n%s", lines, said)
	}
	if code, body := get(t, base+"/readyz"); code != http.StatusOK {
		t.Errorf("readyz: %d %s", code, body)
	}
	s.stop()
	if code := <-s.ended; code != 0 || !strings.HasSuffix(s.err.String(), "stopped\n") {
		t.Errorf("exit %d, stderr %s", code, s.err.String())
	}
}

func TestHeartbeat(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	story := p.must("heartbeat")
	contains(t, story, "hb_", "✓ completed", "self_heal", "save_memories", "total: 6 activities", " skills checked")
	var got struct {
		Execution struct{ ID, Status string }
		Trace     struct {
			TraceID    string `json:"trace_id"`
			Activities []struct{ Status string }
		}
	}
	p.mustJSON(&got, "heartbeat")
	if got.Execution.Status != "completed" || len(got.Trace.Activities) != 6 || !strings.HasPrefix(got.Trace.TraceID, "hb_") {
		t.Errorf("got %+v", got)
	}

	for _, lane := range []string{"heartbeat", "operate"} {
		db := connect(t, url)
		if _, err := db.Exec(t.Context(), `select try_acquire_agent_lock($1, 'somebody', 600)`, lane); err != nil {
			t.Fatal(err)
		}
		p.mustJSON(&got, "heartbeat")
		if got.Execution.Status != "completed" || len(got.Trace.Activities) != 1 || got.Trace.Activities[0].Status != "skipped" {
			t.Errorf("with lane %s held: %+v", lane, got)
		}
		if _, err := db.Exec(t.Context(), `select release_agent_lock($1, 'somebody')`, lane); err != nil {
			t.Fatal(err)
		}
	}
}

// A heartbeat whose model refuses fails: its story is told, and the error names its trace.
func TestAHeartbeatThatFails(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t)
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Refusal(http.StatusUnauthorized, "invalid_request_error", "invalid_api_key", "no such key", 0)
	})
	p := on(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL(), "OPENAI_API_KEY=sk-none")
	p.must("apply", caretaker)
	got := p.run("heartbeat", "--json")
	var story struct{ Execution struct{ Status string } }
	if err := oneDocument(got.out, &story); err != nil || got.code != 1 || story.Execution.Status != "failed" {
		t.Errorf("exit %d, %v, status %s", got.code, err, story.Execution.Status)
	}
	last := got.err[strings.LastIndex(strings.TrimSpace(got.err), "\n")+1:]
	var fault struct {
		Error struct {
			Code, Message string
			TraceID       string `json:"trace_id"`
		}
	}
	if err := json.Unmarshal([]byte(last), &fault); err != nil {
		t.Fatalf("%v: %s", err, got.err)
	}
	if fault.Error.Code != "failed" || !strings.HasPrefix(fault.Error.TraceID, "hb_") {
		t.Errorf("got %+v", fault)
	}
	contains(t, fault.Error.Message, "status 401: invalid_api_key", "such key", "check OPENAI_API_KEY")
}

func TestAnInterruptedHeartbeat(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t, modeltest.Hang())
	p := on(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL())
	p.must("apply", caretaker)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan answer, 1)
	go func() { ended <- p.runWith(ctx, nil, "heartbeat") }()
	defer cancel()
	pgtest.Eventually(t, pgWait, func() bool { return len(model.Requests()) > 0 }, "the model is asked")
	cancel()
	if got := <-ended; got.code != 130 || !strings.Contains(got.out, "cancelled") {
		t.Errorf("exit %d, stdout %s, stderr %s", got.code, got.out, got.err)
	}
	contains(t, p.must("lanes", "ls"), "no lane is held")
	contains(t, p.must("executions", "ls"), "cancelled")
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	type findings struct {
		Items []struct {
			Check, Detail string
			OK            bool
		}
	}
	p := on(t, pgtest.URL(t))
	contains(t, p.must("doctor"), "ok   configuration", "ok   database", "ok   schema", "ok   rights", "none alive", "ok   model answers")
	var all findings
	p.mustJSON(&all, "doctor")
	for _, f := range all.Items {
		if !f.OK {
			t.Errorf("%s: %s", f.Check, f.Detail)
		}
	}
	for name, environ := range map[string][]string{
		"configuration": {"AGENT_LANES=maybe", "AGENT_WORKERS=0"},
		"database":      {"DATABASE_URL=postgres://localhost:1/none"},
		"schema":        {"DATABASE_URL=" + pgtest.EmptyURL(t)},
		"rights":        {"DATABASE_URL=" + pgtest.URL(t) + "&default_transaction_read_only=on"},
		"model":         {"DATABASE_URL=" + withSecret(t, pgtest.URL(t)), "OPENAI_BASE_URL=http://me:hunter2@127.0.0.1:1/v1"},
		"model answers": {"DATABASE_URL=" + pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1"},
	} {
		got := bare(t, environ...).run("doctor")
		if got.code != 1 || strings.Contains(got.err, "agent:") || strings.Contains(got.out+got.err, "hunter2") || !strings.Contains(got.out, "BAD  "+name) {
			t.Errorf("bad %s: exit %d, stderr %q, stdout:\n%s", name, got.code, got.err, got.out)
		}
	}
}
