package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// terminalTest runs a command on a terminal.
type terminalTest struct {
	t        *testing.T
	command  string
	keys     *os.File
	shown    testkit.Log
	consumed int // the length that waitFor has consumed
	ended    chan int
	stop     context.CancelFunc
}

func (d *operateTest) startTerminal(args ...string) *terminalTest {
	d.t.Helper()
	return d.startConsole(append([]string{"operate"}, args...)...)
}

// startConsole runs a command on a terminal.
func (p program) startConsole(args ...string) *terminalTest {
	t := p.t
	t.Helper()
	keys, tty, err := pty.Open()
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	require.NoError(t, pty.Setsize(keys, &pty.Winsize{Rows: 40, Cols: 200}))
	ctx, stop := context.WithCancel(t.Context())
	s := &terminalTest{t: t, command: args[0], keys: keys, ended: make(chan int, 1), stop: stop}
	var reading, running sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(&s.shown, keys) }) // ends with an error when the terminal closes
	running.Go(func() {
		s.ended <- run(ctx, args, p.environ, tty, tty, tty)
		_ = tty.Close()
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
		_, _ = keys.WriteString("\n") // unblocks a pending read, so that the terminal can be closed
		reading.Wait()
		_ = keys.Close()
	})
	return s
}

func (s *terminalTest) typeKeys(keys string) {
	s.t.Helper()
	_, err := s.keys.WriteString(keys)
	require.NoError(s.t, err)
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")

// waitFor waits until new output matches, and returns the last group, or the match if the pattern has no group.
func (s *terminalTest) waitFor(pattern string) (found string) {
	s.t.Helper()
	expression := regexp.MustCompile(pattern)
	matched := false
	defer func() {
		if !matched {
			s.t.Logf("the screen shows:\n%s", s.shown.String())
		}
	}()
	pgtest.Eventually(s.t, func() bool {
		text := escapes.ReplaceAllString(s.shown.String(), "")
		text = text[min(s.consumed, len(text)):]
		at := expression.FindStringSubmatchIndex(text)
		if matched = at != nil; matched {
			found = text[at[len(at)-2]:at[len(at)-1]]
			s.consumed += at[1]
		}
		return matched
	}, "the screen shows "+pattern)
	return found
}

func (s *terminalTest) waitExit() int {
	s.t.Helper()
	var code int
	pgtest.Eventually(s.t, func() bool {
		select {
		case code = <-s.ended:
			return true
		default:
			return false
		}
	}, "agent "+s.command+" ends")
	return code
}

func TestOperateTerminal(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."))
	s := d.startTerminal()
	s.waitFor(`session ses_`)
	s.waitFor(`> `)
	s.typeKeys("Hwo\x7f\x7fow many?\r")
	s.waitFor(`· look \{\} …`)
	s.waitFor(`✓ look \{\} → success .*42.*ms\)`)
	s.waitFor(`It is 42\.`)
	id := s.waitFor(`(op_[0-9A-Z]{26})  answered`)
	if asked := d.model.Requests()[0].Messages; !strings.HasSuffix(asked[len(asked)-1].Content, "\n\nHow many?") {
		t.Errorf("the model was asked %q", asked[len(asked)-1].Content)
	}
	for _, c := range []struct{ command, want string }{
		{"/trace", id},
		{"/trace " + id, "model_call"},
		{"/lanes", "HELD BY"},
		{"/approvals", "no pending approvals"},
		{"/objectives", "no objectives"},
		{"/memory", "no memories"},
		{"/help", "/reject ID"},
		{"/nope", "unknown command /nope"},
		{"/approve", "name an approval"},
	} {
		s.waitFor(`\n> `) // the output of the command before has ended
		s.typeKeys(c.command + "\r")
		s.waitFor(c.want)
	}
	s.waitFor(`\n> `)
	s.typeKeys("\x04")
	if code := s.waitExit(); code != 0 || d.laneHeld(t) {
		t.Errorf("exit %d; lane held: %v", code, d.laneHeld(t))
	}
}

// ^C at the question for the token ends agent login, and the terminal echoes again.
func TestInterruptAtTokenRestoresEcho(t *testing.T) {
	t.Parallel()
	keys, tty, err := pty.Open()
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	defer keys.Close()
	defer tty.Close()
	silent := func() bool {
		stty := exec.Command("stty", "-a")
		stty.Stdin = tty
		modes, err := stty.Output()
		require.NoError(t, err)
		return strings.Contains(string(modes), "-echo ")
	}
	cmd := exec.Command(os.Args[0], "login", "http://127.0.0.1:1")
	cmd.Env = append(os.Environ(), asAgent+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	pgtest.Eventually(t, silent, "it asks for the token")
	_, err = keys.WriteString("\x03")
	require.NoError(t, err)
	select {
	case <-ended:
	case <-time.After(pgtest.Timeout):
		t.Error("agent login ignores ^C")
		_ = cmd.Process.Kill()
		<-ended
	}
	assert.Equal(t, exitInterrupted, cmd.ProcessState.ExitCode())
	assert.True(t, !silent(), "the terminal echoes nothing")
}

func TestTerminalInterruptCancelsTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Still here."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("half a line\x03")
	s.typeKeys("Be slow.\r")
	d.waitSlow()
	s.typeKeys("\x03")
	s.waitFor(`op_[0-9A-Z]{26}  cancelled`)
	waitQuery(t, d.pool, `select count(*) = 0 from pg_stat_activity
		where datname = current_database() and state = 'active' and query like '%pg_sleep(600)%' and pid <> pg_backend_pid()`)
	pgtest.Equal(t, d.pool, "cancelled by admin", `select status || ' by ' || cancelled_by from agent_executions`)
	s.typeKeys("Are you there?\r")
	s.waitFor(`Still here\.`)
	pgtest.Equal(t, d.pool, "Be slow.", `select content from agent_messages order by id limit 1`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
}

func TestTerminalApprovals(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ keys, status, reason, shown string }{
		"approved": {"y\r", "consumed", "", `✓ wipe \{\} → success`},
		"rejected": {"not on a Friday\r", "rejected", "not on a Friday", `✗ wipe \{\} → denied not on a Friday`},
		"refused":  {"n\r", "rejected", "", `✗ wipe \{\} → denied`},
	} {
		t.Run(name, func(t *testing.T) {
			d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
			s := d.startTerminal()
			s.waitFor(`> `)
			s.typeKeys("Wipe.\r")
			s.waitFor(`waits for approval: wipe \{\}`)
			s.waitFor(`approve\?`)
			s.typeKeys(test.keys)
			s.waitFor(test.shown)
			s.waitFor(`It is over\.`)
			pgtest.Equal(t, d.pool, test.status+":"+test.reason, `select status || ':' || reason from agent_approvals`)
			s.typeKeys("\x04")
			s.waitExit()
		})
	}
}

func TestTerminalApprovalDecidedLater(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("Meanwhile."), modeltest.Text("It is over."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("Wipe.\r")
	id := s.waitFor(`\n  ([0-9a-f-]{36}), until`)
	s.waitFor(`approve\?`)
	s.typeKeys("\r")
	s.waitFor(`left open`)
	s.typeKeys("And else?\r")
	s.waitFor(`Meanwhile\.`)
	s.typeKeys("/approve " + id + "\r")
	s.waitFor(`It is over\.`)
	s.typeKeys("\x04")
	s.waitExit()
}

func TestTerminalApprovalDecidedElsewhere(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("Wipe.\r")
	id := s.waitFor(`\n  ([0-9a-f-]{36}), until`)
	s.waitFor(`approve\?`)
	_, err := approvals.Decide(t.Context(), d.pool, id, true, "admin", "")
	require.NoError(t, err)
	s.waitFor(`It is over\.`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
}
