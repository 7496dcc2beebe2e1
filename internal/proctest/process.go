// Package proctest builds the program once for a test binary. It runs the program as real processes that tests kill,
// stop and read.
//
// A process gets exactly the given environment, dies with the test binary, and ends with its test. If the test has
// failed, proctest prints the process's last output and the stacks of its goroutines. A Process is safe for concurrent
// use.
package proctest

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/child"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// maxShownLines bounds the printed lines of a failed test's processes.
const maxShownLines = 60

// Process is a started process. Out and Err are its output so far.
type Process struct {
	Cmd      *exec.Cmd
	Out, Err testkit.Log

	t       testing.TB
	timeout time.Duration
	ended   chan struct{} // closed when the process has ended
}

// Environ returns the environment that every process needs, with more settings.
func Environ(more ...string) []string {
	var kept []string
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "USER", "AGENT_PG_BIN"} {
		if value := os.Getenv(name); value != "" {
			kept = append(kept, name+"="+value)
		}
	}
	return append(kept, more...)
}

// Start starts a command in a folder with exactly the given environment. timeout bounds each wait for a result.
func Start(tb testing.TB, timeout time.Duration, dir string, environ []string, command ...string) *Process {
	tb.Helper()
	p := &Process{Cmd: exec.Command(command[0], command[1:]...), t: tb, timeout: timeout, ended: make(chan struct{})}
	p.Cmd.Dir, p.Cmd.Env = dir, environ
	p.Cmd.Stdout, p.Cmd.Stderr = &p.Out, &p.Err
	p.Cmd.SysProcAttr = DieWithUs()
	// ProcessState has the exit status.
	require.NoError(tb, child.Start(p.Cmd, syscall.SIGKILL, func(error) { close(p.ended) }))
	tb.Cleanup(func() {
		if !tb.Failed() {
			p.Kill()
			return
		}
		out, err := p.Out.Tail(maxShownLines), p.Err.Tail(maxShownLines)
		where := p.goroutineStacks()
		p.Kill()
		tb.Logf("%s, pid %d:\n%s%s%s", strings.Join(command[1:], " "), p.Cmd.Process.Pid, out, err, where)
	})
	return p
}

// Kill sends SIGKILL and returns when the process has ended.
func (p *Process) Kill() {
	if err := p.Cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("kill %s: %v", p.name(), err)
	}
	<-p.ended
}

// Signal sends a signal to the process, which must be running.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.Cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("send %s to %s: %v", s, p.name(), err)
	}
}

// Ended returns a channel that closes when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Running reports whether the process still runs.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Exit waits for the process to end and returns its exit code; -1 when a signal ended it.
func (p *Process) Exit() int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.Cmd.ProcessState.ExitCode()
	case <-time.After(p.timeout):
		p.t.Fatalf("%s did not end within %s", p.name(), p.timeout)
		return 0
	}
}

// Terminate sends SIGTERM to the process, and returns its exit code.
func (p *Process) Terminate() int {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	return p.Exit()
}

// Stop ends the process gracefully: any exit code but 0 is an error of the test.
func (p *Process) Stop() {
	p.t.Helper()
	if code := p.Terminate(); code != 0 {
		p.t.Errorf("%s: exit code %d, want 0: %s", p.name(), code, p.Err.Tail(30))
	}
}

// AwaitOutput waits until the process has logged a text.
func (p *Process) AwaitOutput(words string) {
	p.t.Helper()
	pgtest.EventuallyWithin(p.t, p.timeout, func() bool { return strings.Contains(p.Err.String(), words) },
		p.name()+" says: "+words)
}

// Line is a line of a JSON log.
type Line struct {
	Level   string      `json:"level"`
	Message string      `json:"msg"`
	Listen  string      `json:"listen"`
	Lane    string      `json:"lane"`
	Owner   string      `json:"owner"`
	Token   json.Number `json:"fencing_token"`
	Raw     string      `json:"-"`
}

// Lines reads the process's JSON log lines so far.
func (p *Process) Lines() (all []Line) {
	for text := range strings.Lines(p.Err.String()) {
		l := Line{Raw: strings.TrimSpace(text)}
		if json.Unmarshal([]byte(text), &l) == nil {
			all = append(all, l)
		}
	}
	return all
}

// listens finds the address in a log of either form.
var listens = regexp.MustCompile(`(?:listen=|"listen":")(http://[^\s"]+)`)

// Base waits until the process listens, and returns its URL.
func (p *Process) Base() (url string) {
	p.t.Helper()
	pgtest.EventuallyWithin(p.t, p.timeout, func() bool {
		found := listens.FindStringSubmatch(p.Err.String())
		switch {
		case found != nil:
			url = found[1]
		case !p.Running():
			p.t.Fatalf("%s has ended before it served: %s", p.name(), p.Err.Tail(30))
		}
		return found != nil
	}, p.name()+" serves")
	return url
}

// name returns the command in a form for people.
func (p *Process) name() string { return "agent " + strings.Join(p.Cmd.Args[1:], " ") }
