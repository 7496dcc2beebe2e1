//go:build unix

package failover_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// agent is a running process of the program, which logs JSON.
type agent struct {
	t        testing.TB
	name     string
	cmd      *exec.Cmd
	out, err text
	ended    chan struct{} // closed when the process is gone
}

// text is what a process has printed so far.
type text struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (x *text) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.buf.Write(p)
}

func (x *text) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.buf.String()
}

// launch starts the program in a folder with exactly the given environment. The process is killed when the test
// ends, and what it logged last is shown when the test has failed.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	a := &agent{t: t, name: strings.Join(args, " "), cmd: exec.Command(program, args...), ended: make(chan struct{})}
	a.cmd.Dir, a.cmd.Env = dir, environ
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "USER"} {
		if value := os.Getenv(name); value != "" {
			a.cmd.Env = append(a.cmd.Env, name+"="+value)
		}
	}
	a.cmd.Stdout, a.cmd.Stderr = &a.out, &a.err
	a.cmd.SysProcAttr = dieWithUs()
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(a.ended)
		_ = a.cmd.Wait() // how it ended is in ProcessState
	}()
	t.Cleanup(func() {
		if err := a.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("kill agent: %v", err)
		}
		<-a.ended
		if t.Failed() {
			t.Logf("%s, pid %d:\n%s", a.name, a.cmd.Process.Pid, a.complaints())
		}
	})
	return a
}

// exit waits for the process to end and returns its exit code; -1 when a signal ended it.
func (a *agent) exit() int {
	select {
	case <-a.ended:
		return a.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		a.t.Errorf("agent %s did not end within %s", a.name, patience)
		return -1
	}
}

// stop ends the process in good order.
func (a *agent) stop() {
	a.t.Helper()
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		a.t.Errorf("stop agent %s: %v", a.name, err)
	}
	if code := a.exit(); code != 0 {
		a.t.Errorf("agent %s: exit code %d, want 0: %s", a.name, code, tail(a.err.String()))
	}
}

// line is what the tests read of a log line.
type line struct {
	Message string      `json:"msg"`
	Listen  string      `json:"listen"`
	Lane    string      `json:"lane"`
	Token   json.Number `json:"fencing_token"`
}

// lines reads what the process has logged.
func (a *agent) lines() []line {
	var all []line
	for text := range strings.Lines(a.err.String()) {
		var l line
		if json.Unmarshal([]byte(text), &l) == nil {
			all = append(all, l)
		}
	}
	return all
}

// base waits until the process serves, and returns the URL.
func (a *agent) base() string {
	a.t.Helper()
	var url string
	pgtest.Eventually(a.t, patience, func() bool {
		for _, l := range a.lines() {
			if l.Message == "serving" {
				url = l.Listen
			}
		}
		return url != ""
	}, "agent "+a.name+" serves")
	return url
}

// complaints are the last warnings and errors of the process.
func (a *agent) complaints() string {
	var kept strings.Builder
	for text := range strings.Lines(a.err.String()) {
		if strings.Contains(text, `"level":"WARN"`) || strings.Contains(text, `"level":"ERROR"`) || !strings.HasPrefix(text, "{") {
			kept.WriteString(text)
		}
	}
	return tail(kept.String())
}
