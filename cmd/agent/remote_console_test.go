package main

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/creack/pty"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/principals"
)

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
	s.typeKeys("/lanes\n")
	s.waitFor(`(no lane is held)`)
	s.typeKeys("/quit\n")
	assert.Equal(t, 0, s.waitExit())
	pgtest.Equal(t, d.pool, 1, `select count(distinct thread_id) from agent_executions where flow = 'operate'`)
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

// withoutLogLevel removes AGENT_LOG_LEVEL.
func withoutLogLevel(environ []string) []string {
	set := func(s string) bool { return strings.HasPrefix(s, "AGENT_LOG_LEVEL=") }
	return slices.DeleteFunc(slices.Clone(environ), set)
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
		d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."),
			modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over."),
			modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over again."),
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
		screen = regexp.MustCompile(`op_\S+@\S+|─+|[0-9a-f]{32}`).ReplaceAllString(screen, "#")
		screens[i] = strings.TrimRight(volatile.ReplaceAllString(screen, "#"), "\n> ")
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

// If somebody else decides an approval, an Enter does not cancel the turn, which continues.
func TestRemoteQuestionEndsWithDecisionElsewhere(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t)
	proceed := make(chan struct{})
	d.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n == 0 {
			return modeltest.ToolCall("wipe", `{}`)
		}
		<-proceed
		return modeltest.Text("It is over.")
	})
	remote, _ := d.remote()
	var shown testkit.Log
	c := &cli{environ: config.Environ(remote.environ), out: &shown, err: &shown}
	server, err := parseServer(c.environ["AGENT_SERVER"])
	require.NoError(t, err)
	call := &remoteCall{cli: c, server: server, token: c.environ["AGENT_TOKEN"]}
	lines, ended := make(chan string), make(chan error, 1)
	release := sync.OnceFunc(func() { close(proceed) })
	t.Cleanup(release)
	go func() {
		ended <- call.turn(t.Context(), nil, lines, commandRequest{
			Args: []string{"operate", "--session", "ses_1", "Wipe."}, ErrTerminal: true, Asks: true,
		})
	}()
	pgtest.Eventually(t, func() bool { return strings.Contains(shown.String(), "approve?") }, "the approval is requested")
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_approvals`)
	_, err = approvals.Decide(t.Context(), d.pool, id, true, "admin", "")
	require.NoError(t, err)
	pgtest.Eventually(t, func() bool {
		return strings.Contains(shown.String(), "was decided elsewhere") && strings.Contains(shown.String(), "✓ wipe")
	}, "the turn continues")
	select {
	case lines <- "y":
	case err := <-ended:
		t.Fatalf("the turn ended: %v", err)
	}
	release()
	require.NoError(t, <-ended)
	assert.Contains(t, shown.String(), "not sent: the approval is no longer open", "It is over.")
	pgtest.Equal(t, d.pool, "completed", `select status::text from agent_executions where flow = 'operate'`)
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
