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
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
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
	}
}

// On a server, a command may open only files that its caller sent.
func TestCommandsOpenFilesThroughTheCLI(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	opens := regexp.MustCompile(`os\.(Open|OpenFile|ReadFile|ReadDir|DirFS|Create|WriteFile)\(`)
	local := []string{"apply.go", "dev.go", "init.go", "login.go", "remote.go", "remotehost.go"}
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		found := len(opens.FindAll(text, -1))
		if name == "documents.go" && found == 1 { // createFile, behind the method of the same name
			continue
		}
		assert.Truef(t, found <= 0 || strings.HasSuffix(name, "_test.go") || slices.Contains(local, name),
			"%s opens files: use openFile or createFile of cli, which on a server take those of the caller", name)
	}
}

// volatile matches the parts that differ between two runs of a command.
var volatile = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}|[0-9A-Z]{26}|\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d\S*|` +
	`\d+(\.\d+)? ?(ms|s|min)\b|  +`) // columns are as wide as their widest value

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
	for says, text := range map[string]string{
		"it reads OPENAI_API_KEY, a secret of the server": secret + "[\"${OPENAI_API_\\u004bEY}\"]\n",
		"it reads a file of the server":                   secret + "[\"file:/etc/passwd\"]\n",
		"it runs a program on the server":                 "kind: mcp_server\nname: sh\ncommand: [sh, -c, id]\n",
		"it reads AGENT_ADMIN_TOKEN, a secret": "kind: channel\nname: c\ntype: telegram\nsecrets: {token: \"${AGENT_ADMIN_TOKEN}\"}\n" +
			"settings: {base_url: \"https://example.com\"}\n",
		"channel m: it reads a file of the server": "kind: channel\nname: m\ntype: email\nsecrets: {key: \"${MAIL_KEY}\"}\n" +
			"settings: {address: a@example.com, smtp: \"example.com:25\", listen: \":2525\", tls_cert: /etc/c, tls_key: /etc/k}\n",
		"it reads DATABASE_READ_URL, a secret": "kind: database\nname: d\ndescription: d\nurl_env: DATABASE_READ_URL\naccess: read\n",
	} {
		dir := writeFolder(t, map[string]string{"x.yaml": text})
		remote.mustFail(2, says, "apply", dir)
		if strings.Contains(says, "file") { // after a local apply, the file does not matter
			local.must("apply", dir)
			remote.must("apply", dir)
		}
	}
	post := func(body string) string {
		got, err := testkit.Do(t.Context(), http.DefaultClient, http.MethodPost,
			strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")+commandsPath, body,
			testkit.Bearer(strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")), "Content-Type: application/json")
		require.NoError(t, err)
		return string(got.Body)
	}
	for body, want := range map[string]string{
		`{"args":["init"]}`:                                    `"exit":2`,
		`{"args":["serve"]}`:                                   `"exit":2`,
		`{"args":["lanes","run","x","--","id"]}`:               `"exit":2`,
		`{"args":["documents","add","/etc/passwd"]}`:           `"exit":1`,
		`{"args":["apply","/etc"]}`:                            `"exit":2`,
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
	pgtest.Equal(t, db, "operator-all cli", `select concat_ws(' ', actor, via) from agent_audit where act = 'disable_skill'`)
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
	at := func(url string) program { return newProgramWithoutDatabase(t, "AGENT_SERVER="+url, "AGENT_TOKEN=t") }
	refusing := func(status int, body string) program {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "http://elsewhere.invalid/")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}))
		t.Cleanup(server.Close)
		return at(server.URL)
	}
	version := fmt.Sprintf(`{"version":%q}`, buildVersion())
	for name, c := range map[string]struct {
		p    program
		code int
		says string
	}{
		"dies":         {fakeCommandServer(t, 0, version, `{"out":"b25lCg=="}`), 1, "the connection ended before the command"},
		"never begins": {fakeCommandServer(t, 0), 1, "the command may have been done: see agent activity ls"},
		"other version": {
			fakeCommandServer(t, 0, `{"version":"v9.9.9"}`, `{"exit":0}`), 0,
			"the server runs v9.9.9, this is " + buildVersion(),
		},
		"exit code":   {fakeCommandServer(t, 0, version, `{"exit":75}`), 75, ""},
		"slow":        {fakeCommandServer(t, 50*time.Millisecond, version, `{}`, `{}`, `{"err":"b25lCg=="}`, `{"exit":1}`), 1, "one\n"},
		"401":         {refusing(401, `{"detail":"wrong token"}`), 2, "401 Unauthorized: wrong token; set AGENT_TOKEN"},
		"403":         {refusing(403, `{"detail":"the scope operate is missing"}`), 1, "the scope operate is missing"},
		"older":       {refusing(404, `{"detail":"no route"}`), 1, "of this version or newer"},
		"redirect":    {refusing(302, ""), 2, "redirects are not followed"},
		"proxy":       {refusing(502, "<html>\x1b[31m"), 1, "502 Bad Gateway"},
		"unreachable": {at("http://127.0.0.1:1"), 1, "connection refused"},
		"no token": {
			newProgramWithoutDatabase(t, "AGENT_SERVER=http://127.0.0.1:1", "HOME="+t.TempDir()), 2,
			"set AGENT_TOKEN, or run agent login http://127.0.0.1:1",
		},
		"http":       {at("http://example.com"), 2, "use https"},
		"no address": {at("example.com"), 2, "is not an address"},
		"password":   {at("https://u:p@x.io"), 2, "is not an address"},
	} {
		got := c.p.run("skills", "ls")
		assert.Truef(t, got.code == c.code && strings.Contains(got.err, c.says) && !strings.Contains(got.err, "\x1b"),
			"%s: %+v, want %d with %q", name, got, c.code, c.says)
	}
	p := at("http://127.0.0.1:1")
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
	p := newProgramWithoutDatabase(t, "HOME="+home)
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

// On a terminal, each line is one command of the same conversation.
func TestRemoteConversationOnTerminal(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("One."), modeltest.Text("Two."))
	remote, _ := d.remote()
	d.environ = remote.environ
	s := d.startTerminal()
	s.waitFor(`(>) `)
	s.typeKeys("Hello.\n")
	s.waitFor(`(One\.)`)
	s.waitFor(`\n(>) `)
	s.typeKeys("And?\n")
	s.waitFor(`(Two\.)`)
	s.waitFor(`\n(>) `)
	for line, shown := range map[string]string{
		"/help": `(session|/approve ID)`, "/lanes": `(no lane is held)`, "/approvals": `(no pending approvals)`,
		"/nothing": `(unknown command)`, "/trace": `(operate)`, "/approve 7": `(agent: decide approval 7)`,
	} {
		s.typeKeys(line + "\n")
		s.waitFor(shown)
		s.waitFor(`\n(>) `)
	}
	s.typeKeys("/quit\n")
	assert.Equal(t, 0, s.waitExit())
	pgtest.Equal(t, d.pool, 1, `select count(distinct thread_id) from agent_executions where flow = 'operate'`)
}

// withoutLogLevel removes AGENT_LOG_LEVEL.
func withoutLogLevel(environ []string) []string {
	set := func(s string) bool { return strings.HasPrefix(s, "AGENT_LOG_LEVEL=") }
	return slices.DeleteFunc(slices.Clone(environ), set)
}

// A command with model output logs only warnings, to a pipe and from a server too, unless the level is set.
func TestConversationCommandsLogOnlyWarnings(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t)
	d.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Hello.") })
	remote, _ := d.remote()
	for _, p := range []program{d.program, remote} {
		p.environ = withoutLogLevel(p.environ)
		for _, command := range []string{"operate", "chat"} {
			got := p.run(command, "Hello?")
			assert.Equal(t, "Hello.\n", got.out)
			assert.True(t, !strings.Contains(got.err, "level="), "log lines:", got.err)
			loud := program{t, append(slices.Clone(p.environ), "AGENT_LOG_LEVEL=info")}
			assert.Contains(t, loud.run(command, "Hello?").err, "level=INFO")
		}
	}
}

// A visitor's command reports once that the answer waits for an approval.
func TestChatReportsPendingApproval(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.ToolCall("wipe", `{}`))
	pgtest.Exec(t, d.pool, `update agent_skills set scope = 'both'`)
	d.environ = append(d.environ, "AGENT_CHAT_APPROVAL_WAIT=1s")
	here := d.run("chat", "Wipe.")
	remote, _ := d.remote()
	for where, got := range map[string]commandResult{"here": here, "on a server": remote.run("chat", "Wipe.")} {
		assert.Equal(t, 1, strings.Count(got.err, "the answer waits for an approval\n"), where, got.err)
		assert.Contains(t, got.out, "An admin has to approve a step")
	}
}

// The console on a server prints the same as the local one, without the server's log.
func TestRemoteConsolePrintsLikeLocal(t *testing.T) {
	t.Parallel()
	var screens [2]string
	for i := range screens {
		d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."), modeltest.ToolCall("wipe", `{}`),
			modeltest.Text("Over."), modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over again."),
			modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0))
		remoteTest := *d
		remoteTest.environ = withoutLogLevel(d.environ)
		if i == 1 {
			remote, _ := d.remote()
			remoteTest.environ = append(withoutLogLevel(remote.environ), "TERM=xterm")
		}
		s := remoteTest.startTerminal("--session", "ses_1")
		enter := func(line, until string) {
			s.typeKeys(line + "\n")
			s.waitFor(until)
		}
		s.waitFor(`(> )`)
		enter("How many?", `answered.*\s+(> )`)
		enter("Wipe.", `(approve\?) `)
		enter("y", `answered.*\s+(> )`)
		enter("Wipe.", `(approve\?) `)
		enter("", `left open.*\s+(> )`)
		// /lanes is left out: a local console holds its lane between turns, a remote one does not.
		for _, line := range []string{
			"/approvals", "/trace", "/objectives", "/memory", "/help", "/nope", "/approve", "/approve 7", "/trace 7",
		} {
			enter(line, `\n(> )`)
		}
		enter("/approve "+pgtest.Value[string](t, d.pool, `select id::text from agent_approvals where status = 'pending'`),
			`answered.*\s+(> )`)
		enter("Fail.", `agent: .*\s+(> )`)
		s.typeKeys("\x04")
		assert.Equal(t, 0, s.waitExit())
		screen := strings.ReplaceAll(escapes.ReplaceAllString(s.shown.String(), ""), "\r", "")
		screen = volatile.ReplaceAllString(regexp.MustCompile(`op_\S+@\S+|─+|[0-9a-f]{32}`).ReplaceAllString(screen, "#"), "#")
		screens[i] = strings.TrimRight(screen, "\n> ")
	}
	assert.NoDiff(t, strings.Split(screens[0], "\n"), strings.Split(screens[1], "\n"))
	assert.True(t, !strings.Contains(screens[1], "level="), "the log of the server is shown")
}

// An open local console holds the lane of the session. A remote console of the session still takes commands; a turn
// there reports the busy lane.
func TestRemoteConsoleBesideLocal(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("One."))
	local := d.startTerminal("--session", "ses_1")
	local.waitFor(`> `)
	local.typeKeys("Hello.\n")
	local.waitFor(`One\.`)
	remote, _ := d.remote()
	remoteTest := *d
	remoteTest.environ = append(remote.environ, "TERM=xterm")
	s := remoteTest.startTerminal("--session", "ses_1")
	s.waitFor(`> `)
	s.typeKeys("/lanes\n")
	s.waitFor(`operate  `)
	s.typeKeys("Are you there?\n")
	s.waitFor(`lane busy`)
	s.typeKeys("\x04")
	s.waitExit()
}

// A console of agent chat does not send its commands to the model, here and on a server. A path is no command.
func TestChatConsoleCommands(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"here", "on a server"} {
		t.Run(where, func(t *testing.T) {
			d := newOperateTest(t, modeltest.Text("A table of hosts."))
			remoteTest := *d
			if where != "here" {
				remote, _ := d.remote()
				remoteTest.environ = remote.environ
			}
			s := remoteTest.startConsole("chat")
			s.waitFor(`(> )`)
			for line, shown := range map[string]string{
				"/help": `/quit +leave`, "/lanes": `agent: unknown command /lanes; see /help`, "/nope": `unknown command /nope`,
			} {
				s.typeKeys(line + "\n")
				s.waitFor(shown)
				s.waitFor(`(> )`)
			}
			s.typeKeys("/etc/hosts is what?\n")
			s.waitFor(`A table of hosts\.`)
			s.typeKeys("/quit\n")
			assert.Equal(t, 0, s.waitExit())
			assert.Equal(t, 1, len(d.model.Requests()))
		})
	}
}

// Console commands need the same scopes: a principal that may not decide approvals cannot decide them here.
func TestSlashCommandsNeedTheirScopes(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`))
	d.mustFail(1, "waits for approval", "operate", "Wipe.")
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_approvals`)
	remote, _ := d.remote()
	d.must("principals", "add", "olga", "--role", "operator")
	remote.environ = append(remote.environ, "AGENT_TOKEN="+strings.TrimSpace(d.must("tokens", "create", "olga")))
	for _, decision := range []string{"/approve " + id, "/reject " + id + " no"} {
		got := remote.runWith(t.Context(), strings.NewReader(decision+"\n"), "operate")
		assert.Equal(t, exitFailed, got.code)
		assert.Contains(t, got.err, "needs the scope approvals:decide, which olga (role operator) does not have")
	}
	pgtest.Equal(t, d.pool, "pending", `select status from agent_approvals`)
	got := remote.runWith(t.Context(), strings.NewReader("/approvals\n"), "operate")
	assert.Contains(t, got.out, id)
}

// The console streams the output of a turn. ^C ends the turn on the server, not the conversation.
func TestRemoteTurnsAreStreamedAndCancelled(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Here."))
	remote, _ := d.remote()
	var shown testkit.Log
	c := &cli{environ: config.Environ(remote.environ), out: &shown, err: &shown}
	server, err := parseServer(c.environ["AGENT_SERVER"])
	require.NoError(t, err)
	call := &remoteCall{cli: c, server: server, token: c.environ["AGENT_TOKEN"]}
	args := func(text string) commandRequest {
		return commandRequest{Args: []string{"operate", "--session", "ses_1", text}, ErrTerminal: true, Asks: true}
	}
	interrupts, ended := make(chan os.Signal, 1), make(chan error, 1)
	go func() { ended <- call.turn(t.Context(), interrupts, nil, args("Be slow.")) }()
	pgtest.Eventually(t, func() bool { return strings.Contains(shown.String(), "slow {} …") }, "the call is shown")
	interrupts <- os.Interrupt
	require.NoError(t, <-ended)
	assert.Contains(t, shown.String(), "cancelled")
	pgtest.Until(t, d.pool, "cancelled", `select status::text from agent_executions where flow = 'operate'`)
	pgtest.Equal(t, d.pool, "root cli",
		`select concat_ws(' ', actor, via) from agent_audit where act = 'cancel_execution'`)
	require.NoError(t, call.turn(t.Context(), interrupts, nil, args("Are you there?")))
	assert.Contains(t, shown.String(), "Here.")
}

// If ^C cancels a visitor's turn in a remote console, the cancel names the caller's principal.
func TestInterruptedRemoteChatNamesPrincipal(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{})
	d := newOperateTest(t, modeltest.Custom(func(_ http.ResponseWriter, r *http.Request) {
		close(asked)
		<-r.Context().Done()
	}))
	remote, _ := d.remote()
	ana, _, _ := d.principal(remote, "ana", principals.Operator)
	s := ana.startProcess("chat")
	s.waitFor(`(>) `)
	s.typeKeys("Hello.\n")
	testkit.Receive(t, asked)
	s.typeKeys("\x03")
	s.waitFor(`(cancelled)`)
	pgtest.Until(t, d.pool, "cancelled by ana", `
		select status || coalesce(' by ' || cancelled_by, '') from agent_executions where flow = 'chat'`)
}

// principal adds a principal, and returns the program with its token.
func (d *operateTest) principal(remote program, name string, role principals.Role) (p program, secret, tokenID string) {
	d.t.Helper()
	_, err := principals.Create(d.t.Context(), d.pool,
		principals.CreateParams{Name: name, Kind: principals.User, Role: role})
	require.NoError(d.t, err)
	token, secret, err := principals.CreateToken(d.t.Context(), d.pool, principals.TokenParams{
		Principal: name, Scopes: []string{"*"},
	})
	require.NoError(d.t, err)
	return newProgramWithoutDatabase(d.t, remote.environ[0], "AGENT_TOKEN="+secret), secret, token.ID
}

// startProcess runs a command on a terminal in its own process. stop interrupts it.
func (p program) startProcess(args ...string) *terminalTest {
	t := p.t
	t.Helper()
	cmd := exec.Command(os.Args[0], args...) //nolint:gosec // itself
	cmd.Env = append(os.Environ(), append(p.environ, asAgent+"=1")...)
	keys, err := pty.Start(cmd)
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	s := &terminalTest{t: t, keys: keys, ended: make(chan int, 1)}
	s.stop = func() { assert.NoError(t, cmd.Process.Signal(os.Interrupt)) }
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(&s.shown, keys) }) // ends with an error when the process has ended
	reading.Go(func() {
		_ = cmd.Wait() // waitExit reads the exit code
		s.ended <- cmd.ProcessState.ExitCode()
	})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		reading.Wait()
		_ = keys.Close()
	})
	return s
}

// An interrupt at the prompt starts a new line. Only ^D leaves. (TestTerminalInterruptCancelsTurn tests agent operate.)
func TestInterruptAtPromptKeepsConsole(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t)
	d.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Still here.") })
	remote, _ := d.remote()
	for name, p := range map[string]program{"chat": d.program, "remote chat": remote, "remote operate": remote} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			s := p.startProcess(strings.TrimPrefix(name, "remote "))
			s.waitFor(`(>) `)
			s.stop()
			s.waitFor(`\n(>) `)
			s.typeKeys("Are you there?\r")
			s.waitFor(`(Still here\.)`)
			s.waitFor(`\n(>) `)
			s.stop()
			s.waitFor(`\n(>) `)
			s.typeKeys("\x04")
			assert.Equal(t, 0, s.waitExit())
		})
	}
}

// ^C at an approval prompt cancels the turn on the server, and the conversation continues.
func TestInterruptAtApprovalCancelsRemoteTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("Still here."))
	remote, _ := d.remote()
	s := remote.startProcess("operate")
	s.waitFor(`(>) `)
	s.typeKeys("Wipe.\n")
	s.waitFor(`(approve\?) \[y, n, or why not`)
	s.typeKeys("\x03")
	id := s.waitFor(`(op_[0-9A-Z]{26})  cancelled`)
	pgtest.Equal(t, d.pool, "cancelled by root: interrupted by the admin", `
		select status || ' by ' || cancelled_by || ': ' || cancel_reason from agent_executions where trace_id = '`+id+`'`)
	pgtest.Equal(t, d.pool, "expired", `select string_agg(status, ' ') from agent_approvals`)
	s.waitFor(`(>) `)
	s.typeKeys("Are you there?\n")
	s.waitFor(`(Still here\.)`)
	assert.Truef(t, !strings.Contains(s.shown.String(), "left open"), "the screen: %s", s.shown.String())
}

// The console reports that a turn was not cancelled, and why: a cancel needs runs:write.
func TestInterruptAtApprovalWithoutScope(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`))
	remote, _ := d.remote()
	token := strings.TrimSpace(d.must("tokens", "create", "root", "--scope", "operate", "--scope", "approvals:decide"))
	remote.environ = append(remote.environ, "AGENT_TOKEN="+token)
	s := remote.startProcess("operate")
	s.waitFor(`(>) `)
	s.typeKeys("Wipe.\n")
	s.waitFor(`(approve\?) \[y, n, or why not`)
	s.typeKeys("\x03")
	s.waitFor(`executions cancel (needs the scope runs:write)`)
	s.waitFor(`(not cancelled: the approval is left open; decide later with /approve or /reject)`)
	pgtest.Until(t, d.pool, "waiting", `select status::text from agent_executions where flow = 'operate'`)
}

// The console on a server prompts for an approval in place, if its caller may decide it.
func TestRemoteConsoleAsksForApproval(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."),
		modeltest.ToolCall("wipe", `{}`))
	remote, _ := d.remote()
	remoteTest := *d
	remoteTest.environ = remote.environ
	s := remoteTest.startTerminal()
	s.waitFor(`(>) `)
	s.typeKeys("Wipe everything.\n")
	s.waitFor(`(approve\?) \[y, n, or why not`)
	s.typeKeys("y\n")
	s.waitFor(`(It is over\.)`)
	pgtest.Equal(t, d.pool, "consumed", `select string_agg(status, ' ') from agent_approvals`)
	s.waitFor(`(>) `)
	s.typeKeys("Once more.\n")
	s.waitFor(`(approve\?) \[y, n, or why not`)
	s.typeKeys("\n")
	s.waitFor(`(left open; decide later)`)
	pgtest.Equal(t, d.pool, "consumed pending", `select string_agg(status, ' ' order by id) from agent_approvals`)
	pgtest.Until(t, d.pool, "completed waiting", `select string_agg(status, ' ' order by id) from agent_executions where flow = 'operate'`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
}
