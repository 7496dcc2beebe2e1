package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/principals"
)

// remote starts agent serve. It returns a program that sends its commands there, with only a token.
func (p program) remote(settings ...string) (remote program, server *started) {
	p.t.Helper()
	server = program{p.t, append(slices.Clone(p.environ), append([]string{
		token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_HEARTBEAT_CRON=0 0 1 1 *",
	}, settings...)...)}.start("serve")
	base := "http://" + server.find(p.t, `listen=http://(\S+)`)
	secret := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	return newProgramWithoutDatabase(p.t, "AGENT_SERVER="+base, "AGENT_TOKEN="+secret, "AGENT_LOG_LEVEL=warn"), server
}

func TestEveryCommandDeclaresWhereItRuns(t *testing.T) {
	t.Parallel()
	for name, cmd := range everyCommand(t) {
		_, _, listed := placeOf(cmd)
		assert.Truef(t, !cmd.Runnable() || listed, "agent %s: list it in remoteCommands or in localCommands", name)
		scope, _, _ := placeOf(cmd)
		reads := slices.Contains([]principals.Scope{
			principals.RunsRead, principals.ThreadsRead, principals.ApprovalsRead,
		}, scope)
		assert.Truef(t, !reads || cmd.Flags().Lookup("reason") == nil, "agent %s changes something with the scope %s",
			name, scope)
	}
}

// On a server, a command may open only files that its caller sent.
func TestCommandsOpenFilesThroughTheCLI(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	opens := regexp.MustCompile(`os\.(Open|OpenFile|ReadFile|ReadDir|DirFS|Create|WriteFile)\(`)
	local := []string{"init.go", "init_files.go", "login.go", "remote_files.go", "remote_request.go"}
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		found := len(opens.FindAll(text, -1))
		assert.Truef(t, found <= 0 || strings.HasSuffix(name, "_test.go") || slices.Contains(local, name),
			"%s opens files: use openFile or writeFile of cli, which on a server take those of the caller", name)
	}
}

// volatile matches the parts that differ between two runs of a command.
var volatile = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}|[0-9A-Z]{26}|\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d\S*|` +
	`\d+ min( \d+ s)?|\d+(\.\d+)? ?(ms|s|min)\b|  +`) // columns are as wide as their widest value

func TestRemoteCommandsEqualLocalOnes(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	local := newProgram(t, url, "AGENT_HEARTBEAT_CRON=0 0 1 1 *")
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a/skills.yaml":   "kind: skill\nname: seven\ndescription: seven\nhandler: \"sql:\"\nconfig: {query: select 7}\n",
		"a/agent.yaml":    "kind: agent\nname: clerk\ndescription: d\ninstructions_file: words.md\ndefault: true\n",
		"a/words.md":      "Be brief.\n",
		"wrong/x.yaml":    "kind: skill\nname: x\ncolour: y\nhandler: \"sql:\"\n",
		"orders.csv":      "id,total\n1,9.50\n",
		"input.json":      `{"customer": "c-7"}`,
		"binary":          "\x00\xff\xfe" + strings.Repeat("x", 100_000),
		"none/readme.txt": "no workspace",
	} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700))
		testkit.WriteFile(t, filepath.Join(dir, name), text)
	}
	remote, _ := local.remote()
	local.must("apply", filepath.Join(dir, "a"))
	local.must("memory", "set", "tone", `"kind"`)
	db := connect(t, url)
	pgtest.Exec(t, db, `select acquire_agent_lock('operate', 'somebody', 600)`)
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{"apply", filepath.Join(dir, "a")}, 0},
		{[]string{"apply", filepath.Join(dir, "wrong")}, 2},
		{[]string{"apply", filepath.Join(dir, "none")}, 2},
		{[]string{"apply", filepath.Join(dir, "nowhere")}, 2},
		{[]string{"apply", filepath.Join(dir, "a"), "--dry-run", "--json"}, 0},
		{[]string{"skills", "ls"}, 0},
		{[]string{"skills", "ls", "--json"}, 0},
		{[]string{"skills", "show", "seven"}, 0},
		{[]string{"skills", "call", "seven"}, 0},
		{[]string{"skills", "call", "nope"}, 1},
		{[]string{"skills", "disable", "seven", "--nope"}, 2},
		{[]string{"skills"}, 0},
		{[]string{"skills", "--json"}, 2},
		{[]string{"skills", "nonsense"}, 2},
		{[]string{"agents", "show", "clerk"}, 0},
		{[]string{"lanes", "ls"}, 0},
		{[]string{"lanes", "release", "nothing"}, 1},
		{[]string{"trace", "nonsense"}, 2},
		{[]string{"trace", "nonsense", "--json"}, 2},
		{[]string{"operate", "hello"}, 75},
		{[]string{"operate", "hello", "--json"}, 75},
		{[]string{"documents", "add", filepath.Join(dir, "orders.csv")}, 0},
		{[]string{"documents", "add", filepath.Join(dir, "nowhere")}, 1},
		{[]string{"executions", "start", "nope", "--input", "@" + filepath.Join(dir, "input.json")}, 1},
		{[]string{"executions", "event", "nope", "x", "--data", "@" + filepath.Join(dir, "nowhere")}, 2},
		{[]string{"activity", "audit", "--json"}, 0},
		{[]string{"memory", "get", "tone"}, 0},
		{[]string{"chat", "hello"}, 0},
		{[]string{"version"}, 0},
		{[]string{"models", "ls"}, 0},
	} {
		var got [2]commandResult
		for i, p := range []program{local, remote} {
			got[i] = p.run(c.args...)
			got[i].out, got[i].err = volatile.ReplaceAllString(got[i].out, "#"), volatile.ReplaceAllString(got[i].err, "#")
		}
		assert.Truef(t, got[0] == got[1] && got[0].code == c.code,
			"agent %q, want exit %d\nlocal:  %+v\nremote: %+v", c.args, c.code, got[0], got[1])
	}
	checkRemoteFiles(t, remote, dir)
}

// checkRemoteFiles copies a file to the server and back, and reads standard input.
func checkRemoteFiles(t *testing.T, remote program, dir string) {
	t.Helper()
	var d documents.Document
	remote.mustJSON(&d, "documents", "add", filepath.Join(dir, "binary"))
	want, err := os.ReadFile(filepath.Join(dir, "binary"))
	require.NoError(t, err)
	assert.Equal(t, string(want), remote.must("documents", "get", d.ID))
	out := filepath.Join(dir, "out")
	assert.Contains(t, remote.must("documents", "get", d.ID, "-o", out), fmt.Sprintf("%d bytes", len(want)))
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got))
	remote.mustFail(1, "exists", "documents", "get", d.ID, "-o", out)
	piped := remote.runWith(t.Context(), strings.NewReader("from a pipe"), "documents", "add", "-", "--name", "p.txt",
		"--json")
	require.NoError(t, json.Unmarshal([]byte(piped.out), &d))
	assert.Equal(t, "from a pipe", remote.must("documents", "get", d.ID))
	lines := remote.runWith(t.Context(), strings.NewReader("hello\nhello again\n"), "chat")
	assert.Truef(t, lines.code == 0 && strings.Count(lines.err, "thread th_") == 2, "two lines: %+v", lines)
}

func TestRemoteRejectsAccessToServerMachine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	local := newProgram(t, url)
	remote, _ := local.remote("OPENAI_API_KEY=sk-of-the-server", "OPENAI_BASE_URL=http://127.0.0.1:1")
	secret := "kind: webhook_target\nname: out\nurl: https://example.com/x\nevents: [execution.completed]\nsecrets: "
	for stderr, document := range map[string]string{
		"it reads OPENAI_API_KEY, a secret of the server": secret + "[\"${OPENAI_API_\\u004bEY}\"]\n",
		"it reads a file of the server, /etc/passwd":      secret + "[\"file:/etc/passwd\"]\n",
		"it runs a program on the server":                 "kind: mcp_server\nname: sh\ncommand: [sh, -c, id]\n",
		"it reads AGENT_ADMIN_TOKEN, a secret": `
kind: channel
name: c
type: telegram
secrets: {token: "${AGENT_ADMIN_TOKEN}"}
settings: {base_url: "https://example.com"}
`,
		"channel m: it reads a file of the server": `
kind: channel
name: m
type: email
secrets: {key: "${MAIL_KEY}"}
settings: {address: a@example.com, smtp: "example.com:25", listen: ":2525", tls_cert: /etc/c, tls_key: /etc/k}
`,
		"it reads DATABASE_READ_URL, a secret": `
kind: database
name: d
description: d
url_env: DATABASE_READ_URL
access: read
`,
		"skill leak: it reads PGPASSWORD, a secret": `
kind: skill
name: leak
description: d
handler: "http:"
config: {method: GET, url: "https://example.com/", headers: {X-Key: "${env:PGPASSWORD}"}}
`,
		"webhook in: it reads OTEL_EXPORTER_OTLP_HEADERS, a secret": `
kind: webhook
name: in
scheme: bearer
secrets: ["${OTEL_EXPORTER_OTLP_HEADERS}"]
actions: [{prompt: p}]
`,
	} {
		dir := writeFolder(t, map[string]string{"x.yaml": document})
		remote.mustFail(2, stderr, "apply", dir)
		if strings.Contains(stderr, "file") { // after a local apply, the file does not matter
			local.must("apply", dir)
			remote.must("apply", dir)
		}
	}
	remote.must("apply", writeFolder(t, map[string]string{"x.yaml": "kind: webhook_target\nname: file\n" +
		"description: \"file: its format\"\nurl: https://example.com/x\nevents: [execution.completed]\n" +
		"secrets: [\"${HOOK}\"]\n"}))
	post := func(body string) string {
		got := send(t.Context(), "POST", strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")+commandsPath,
			strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), body)
		require.NoError(t, got.err)
		return got.body
	}
	for body, want := range map[string]string{
		`{"args":["init"]}`:                                    `"exit":2`,
		`{"args":["serve"]}`:                                   `"exit":2`,
		`{"args":["lanes","run","x","--","id"]}`:               `"exit":2`,
		`{"args":["documents","add","/etc/passwd"]}`:           `"exit":1`,
		`{"args":["apply","/etc"]}`:                            `"exit":2`,
		`{"args":["apply","--watch","/etc/ssl"]}`:              `"exit":2`,
		`{"args":["version"],"environ":{"DATABASE_URL":"x"}}`:  `environ: \"DATABASE_URL\" cannot be set`,
		`{"args":["version"],"folder":"AAAA"}`:                 `folder: zip`,
		`{"args":["version"],"more":1}`:                        `no command`,
		`{"args":["--server","http://127.0.0.1:1","version"]}`: `"exit":0`,
	} {
		got := post(body)
		assert.Truef(t, strings.Contains(got, want), "%s: %s, want %s", body, got, want)
	}
}

func TestRemoteCommandLimitsAndPanics(t *testing.T) {
	t.Parallel()
	host := newCommandHost(&cli{environ: map[string]string{}}, &session{}) // without a database each query panics
	send := func() *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		ctx := principals.WithCaller(t.Context(), principals.RootCaller(), "http")
		host.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, commandsPath,
			strings.NewReader(`{"args":["skills","ls","--json"]}`)))
		return w
	}
	got := send().Body.String()
	assert.Contains(t, got, `{"exit":1}`)
	for line := range strings.Lines(got) {
		var f commandFrame
		require.NoError(t, json.Unmarshal([]byte(line), &f))
		if len(f.Err) > 0 {
			assert.Contains(t, string(f.Err), "internal error")
		}
	}
	for range maxCommands {
		host.slots <- struct{}{}
	}
	if w := send(); w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
		t.Errorf("one command too many: %d %s", w.Code, w.Body)
	}
}

// A command needs the scope of its route, and its changes name the caller.
func TestRemoteCommandsNeedScopeOfRoute(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	remote, _ := newProgram(t, url).remote()
	db := connect(t, url)
	as := func(role principals.Role, scopes ...string) program {
		name := strings.Join(append([]string{string(role)}, scopes...), "-")
		name = strings.NewReplacer(":", "", "*", "all").Replace(name)
		_, err := principals.Create(t.Context(), db,
			principals.CreateParams{Name: name, Kind: principals.Service, Role: role})
		require.NoError(t, err)
		_, secret, err := principals.CreateToken(t.Context(), db, principals.TokenParams{Principal: name, Scopes: scopes})
		require.NoError(t, err)
		return newProgramWithoutDatabase(t, remote.environ[0], "AGENT_TOKEN="+secret)
	}
	viewer, operator, narrow := as(principals.Viewer, "*"), as(principals.Operator, "*"), as(principals.Admin, "runs:read")
	viewer.must("skills", "ls")
	viewer.must("version")
	for _, args := range [][]string{
		{"skills", "disable", "recall"},
		{"threads", "ls"},
		{"trace", "last", "--prompts"},
		{"eval", "labels"},
		{"approvals", "approve", "01890000-0000-7000-8000-000000000000"},
		{"memory", "ls"},
		{"operate", "hello"},
		{"apply", "."},
	} {
		if args[0] == "apply" {
			args[1] = caretaker
		}
		viewer.mustFail(1, "which viewer-all (role viewer) does not have here", args...)
	}
	narrow.mustFail(1, "needs the scope operate", "skills", "disable", "recall")
	operator.mustFail(1, "needs the scope admin", "apply", caretaker)
	operator.must("skills", "disable", "recall", "--reason", "r")
	pgtest.Equal(t, db, "operator-all cli",
		`select concat_ws(' ', actor, via) from agent_audit where act = 'disable_skill'`)
	pgtest.Exec(t, db, `insert into agent_threads (id, channel) values ('maria', 'chat')`)
	operator.must("threads", "invite", "maria")
	operator.must("threads", "open", "maria", "--flow", "support")
	pgtest.Equal(t, db, "operator-all operator-all",
		`select string_agg(created_by, ' ') from agent_thread_access where thread_id = 'maria'`)
	conflict := pgtest.Value[string](t, db, `
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, found_value, trace_id,
		  found_trace_id)
		values ('admin', 'contact', '"b"', 1, 1, '"a"', 'op_x', 'op_y')
		returning id::text`)
	operator.must("memory", "conflicts", "resolve", conflict, "--take", "theirs")
	pgtest.Equal(t, db, "operator-all", `select decided_by from agent_memory_conflicts`)
}

func TestRemoteInterruptCancelsTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("slow", `{}`))
	remote, _ := d.remote()
	olga, _, id := d.principal(remote, "olga", principals.Operator)
	s := olga.start("operate", "Be slow.")
	d.waitSlow()
	s.stop()
	if code := <-s.ended; code != exitInterrupted || !strings.Contains(s.err.String(), "interrupted") {
		t.Errorf("exit %d, stderr %s", code, s.err.String())
	}
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[string](t, d.pool, `select status from agent_executions`) == "cancelled" && !d.laneHeld(t)
	}, "the server cancels the turn")
	pgtest.Equal(t, d.pool, "olga cli "+id,
		`select concat_ws(' ', actor, via, token_id) from agent_audit where act = 'cancel_execution'`)
	pgtest.Equal(t, d.pool, "olga", `select cancelled_by from agent_executions`)
	why := d.must("why", pgtest.Value[string](t, d.pool, `select trace_id from agent_executions`))
	assert.Contains(t, why, "by olga via cli with token "+id)
	execution := pgtest.Value[string](t, d.pool, `select id::text from agent_executions`)
	assert.Contains(t, d.must("why", execution), "by olga via cli with token "+id)
	assert.Contains(t, d.must("trace", execution), "cancelled")
	d.mustFail(1, "see agent executions ls", "why", "00000000-0000-0000-0000-000000000001")
	w := remote.start("operate", "--watch")
	pgtest.Eventually(t, func() bool { return strings.Contains(w.err.String(), "no admin is active") },
		"the watch begins")
	w.stop()
	assert.Equal(t, 0, <-w.ended)
}

func TestServerShutdownEndsRemoteCommand(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("slow", `{}`))
	remote, server := d.remote("AGENT_DRAIN_DELAY=0s", "AGENT_SHUTDOWN_TIMEOUT=1s")
	s := remote.start("operate", "Be slow.")
	d.waitSlow()
	server.stop()
	if code := <-s.ended; code != exitFailed || !strings.Contains(s.err.String(), "the command may have been done") {
		t.Errorf("exit %d, stderr %s", code, s.err.String())
	}
}

// fakeCommandServer responds to a command with lines, then closes the connection.
func fakeCommandServer(t *testing.T, pause time.Duration, lines ...string) program {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", framesType)
		for _, line := range lines {
			_, _ = io.WriteString(w, line+"\n")
			_ = http.NewResponseController(w).Flush()
			time.Sleep(pause)
		}
	}))
	t.Cleanup(server.Close)
	return newProgramWithoutDatabase(t, "AGENT_SERVER="+server.URL, "AGENT_TOKEN=t")
}

func TestRemoteFailures(t *testing.T) {
	t.Parallel()
	clientOf := func(url string) program {
		return newProgramWithoutDatabase(t, "AGENT_SERVER="+url, "AGENT_TOKEN=t")
	}
	refusing := func(status int, body string) program {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "http://elsewhere.invalid/")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}))
		t.Cleanup(server.Close)
		return clientOf(server.URL)
	}
	version := fmt.Sprintf(`{"version":%q}`, buildVersion())
	for name, tc := range map[string]struct {
		client program
		code   int
		stderr string // a part of it
	}{
		"dies": {
			client: fakeCommandServer(t, 0, version, `{"out":"b25lCg=="}`),
			code:   1, stderr: "the connection ended before the command",
		},
		"never begins": {
			client: fakeCommandServer(t, 0),
			code:   1, stderr: "the command may have been done: see agent activity ls",
		},
		"other version": {
			client: fakeCommandServer(t, 0, `{"version":"v9.9.9"}`, `{"exit":0}`),
			code:   0, stderr: "the server runs v9.9.9, this is " + buildVersion(),
		},
		"exit code": {client: fakeCommandServer(t, 0, version, `{"exit":75}`), code: 75},
		"slow": {
			client: fakeCommandServer(t, 50*time.Millisecond, version, `{}`, `{}`, `{"err":"b25lCg=="}`, `{"exit":1}`),
			code:   1, stderr: "one\n",
		},
		"401": {
			client: refusing(401, `{"detail":"wrong token"}`),
			code:   2, stderr: "401 Unauthorized: wrong token; set AGENT_TOKEN",
		},
		"403": {
			client: refusing(403, `{"detail":"the scope operate is missing"}`),
			code:   1, stderr: "the scope operate is missing",
		},
		"older":       {client: refusing(404, `{"detail":"no route"}`), code: 1, stderr: "of this version or newer"},
		"redirect":    {client: refusing(302, ""), code: 2, stderr: "redirects are not followed"},
		"proxy":       {client: refusing(502, "<html>\x1b[31m"), code: 1, stderr: "502 Bad Gateway"},
		"unreachable": {client: clientOf("http://127.0.0.1:1"), code: 1, stderr: "connection refused"},
		"no token": {
			client: newProgramWithoutDatabase(t, "AGENT_SERVER=http://127.0.0.1:1", "HOME="+t.TempDir()),
			code:   2, stderr: "set AGENT_TOKEN, or run agent login http://127.0.0.1:1",
		},
		"http":       {client: clientOf("http://example.com"), code: 2, stderr: "use https"},
		"no address": {client: clientOf("example.com"), code: 2, stderr: "is not an address"},
		"password":   {client: clientOf("https://u:p@x.io"), code: 2, stderr: "is not an address"},
	} {
		got := tc.client.run("skills", "ls")
		assert.Equal(t, tc.code, got.code, name, got.err)
		assert.Contains(t, got.err, tc.stderr)
		assert.Truef(t, !strings.Contains(got.err, "\x1b"), "%s: stderr has a control character: %q", name, got.err)
	}
	p := clientOf("http://127.0.0.1:1")
	for _, args := range [][]string{
		{"serve"}, {"dev"}, {"init"}, {"migrate"}, {"lanes", "run", "x", "--", "true"}, {"mcp"}, {"healthcheck"}, {"demo"},
	} {
		p.mustFail(2, "runs only on this machine", args...)
	}
	p.must("skills", "--help")
	p.must("--version")
}

// The client sends the token only to its server. A server may write only the file that the caller named.
func TestRemoteServerIsNotTrusted(t *testing.T) {
	t.Parallel()
	t.Run("redirect", func(t *testing.T) {
		t.Parallel()
		asked := false
		elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
		defer elsewhere.Close()
		server := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
		defer server.Close()
		newProgramWithoutDatabase(t, "AGENT_SERVER="+server.URL, "AGENT_TOKEN=t").run("skills", "ls")
		assert.True(t, !asked, "the redirect was followed")
	})
	t.Run("file", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		p := fakeCommandServer(t, 0, `{"file":"b25l"}`, `{"created":true}`, `{"exit":0}`)
		p.must("skills", "show", "x")
		p.must("documents", "get", "x", "-o", filepath.Join(dir, "named"))
		found, err := os.ReadDir(dir)
		require.NoError(t, err)
		assert.Truef(t, len(found) == 1 && found[0].Name() == "named", "files: %v", found)
	})
}

func TestLoginStoresTokenPerServer(t *testing.T) {
	t.Parallel()
	remote, _ := newProgram(t, pgtest.URL(t)).remote()
	base := strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")
	home := t.TempDir()
	p := newProgramWithoutDatabase(t, "HOME="+home, "XDG_CONFIG_HOME=relative")
	secret := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	login := func(typed string) commandResult {
		return p.runWith(t.Context(), strings.NewReader(typed), "login", base)
	}
	refused := func() {
		t.Helper()
		got := login("wrong\n")
		assert.Truef(t, got.code == 2 && got.out == "", "a wrong token: %+v", got)
		assert.Contains(t, got.err, "401", "nothing was stored", "AGENT_ADMIN_TOKEN", "agent tokens create")
		assert.Truef(t, !strings.Contains(got.err, "agent login"), "the advice is to do the same again: %s", got.err)
	}
	refused()
	got := login("\n")
	assert.Truef(t, got.code == 2 && strings.Contains(got.err, "empty"), "no token: %+v", got)
	p.mustFail(2, "there is no token", "--server", base, "skills", "ls")
	got = login(secret + "\n")
	assert.Truef(t, got.code == 0 && !strings.Contains(got.out+got.err, secret), "login: %+v", got)
	refused() // and the stored token does not change
	assert.Contains(t, p.must("--server", base, "skills", "ls"), "memory_search")
	p.mustFail(2, "there is no token", "--server", "http://127.0.0.1:2", "skills", "ls")
	file := filepath.Join(home, ".config", "lanekeeper", "login.json")
	info, err := os.Stat(file)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
	require.NoError(t, os.Chmod(file, 0o640))
	p.mustFail(2, "can be read by others; run chmod 600", "--server", base, "skills", "ls")
	require.NoError(t, os.Chmod(file, 0o600))
	p.mustFail(1, "there is no login to http://127.0.0.1:2", "logout", "http://127.0.0.1:2")
	assert.Contains(t, p.must("logout"), "removed 1 token")
	p.mustFail(2, "there is no token", "--server", base, "skills", "ls")
}

func TestLoginIgnoresTheCaseOfAHost(t *testing.T) {
	t.Parallel()
	remote, _ := newProgram(t, pgtest.URL(t)).remote()
	lower := strings.Replace(strings.TrimPrefix(remote.environ[0], "AGENT_SERVER="), "127.0.0.1", "localhost", 1)
	upper := strings.Replace(lower, "localhost", "LocalHost", 1)
	p := newProgramWithoutDatabase(t, "HOME="+t.TempDir())
	for login, use := range map[string]string{upper: lower, lower: upper} {
		got := p.runWith(t.Context(), strings.NewReader(strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")), "login", login)
		assert.Equal(t, "logged in to "+lower+"; use it with --server or AGENT_SERVER\n", got.out, got.err)
		assert.Contains(t, p.must("--server", use, "skills", "ls"), "memory_search")
		assert.Contains(t, p.must("logout", use), "removed 1 token")
	}
}

// blockedPager is a pager that nobody reads for longer than silenceLimit.
type blockedPager struct{ io.Writer }

func (blockedPager) Write(p []byte) (int, error) {
	<-time.After(2 * silenceLimit)
	return len(p), nil
}

func TestBlockedOutputIsNoSilenceOfTheServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		silent := time.AfterFunc(silenceLimit, func() { t.Error("the timer fired") })
		defer silent.Stop()
		call := remoteCall{cli: &cli{out: blockedPager{}, err: io.Discard}, warned: true}
		assert.NoError(t, call.print(strings.NewReader(`{"out":"eA=="}{"exit":0}`), silent))
	})
}

func TestServerHostsHaveNoCase(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"http://LocalHost:1/": "http://localhost:1", "https://Agent.Example.com": "https://agent.example.com",
	} {
		server, err := parseServer(text)
		require.NoError(t, err)
		assert.Equal(t, want, server.String())
	}
}

func TestReplacedFileIsWrittenBeside(t *testing.T) {
	t.Parallel()
	path, kept := filepath.Join(t.TempDir(), "evals.yaml"), filepath.Join(t.TempDir(), "kept")
	testkit.WriteFile(t, path, "old")
	require.NoError(t, os.Link(path, kept))
	require.NoError(t, writeFile(path, []byte("new"), true))
	for name, want := range map[string]string{path: "new", kept: "old"} {
		text, err := os.ReadFile(name)
		assert.Truef(t, err == nil && string(text) == want, "%s has %q, %v", name, text, err)
	}
}

func TestFailedWriteLeavesNoFile(t *testing.T) {
	t.Parallel()
	if path := os.Getenv("LANEKEEPER_TEST_WRITE"); path != "" { // the process below
		require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 1, Max: 1}))
		assert.ErrorIs(t, writeFile(path, []byte("long"), false), syscall.EFBIG)
		return
	}
	path := filepath.Join(t.TempDir(), "out")
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFailedWriteLeavesNoFile$")
	cmd.Env = append(os.Environ(), "LANEKEEPER_TEST_WRITE="+path)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	_, err = os.Stat(path)
	assert.ErrorIs(t, err, os.ErrNotExist)
}
