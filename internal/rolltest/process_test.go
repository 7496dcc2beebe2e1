//go:build unix

package rolltest_test

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

// patience is how long something may take that takes a moment.
const patience = 90 * time.Second

// replica is a running process of the program, which logs JSON.
type replica struct {
	t     testing.TB
	cmd   *exec.Cmd
	err   text
	ended chan struct{} // closed when the process is gone
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

// launch starts the program with exactly the given environment. The process is killed when the test ends.
func launch(t testing.TB, environ []string, args ...string) *replica {
	t.Helper()
	r := &replica{t: t, cmd: exec.Command(program, args...), ended: make(chan struct{})}
	r.cmd.Dir, r.cmd.Env = t.TempDir(), append(environ, "PATH="+os.Getenv("PATH"), "HOME="+os.Getenv("HOME"))
	r.cmd.Stderr = &r.err
	r.cmd.SysProcAttr = dieWithUs()
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.ended)
		_ = r.cmd.Wait() // how it ended is in ProcessState
	}()
	t.Cleanup(func() {
		if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("kill agent: %v", err)
		}
		<-r.ended
		if t.Failed() {
			t.Logf("%s, pid %d:\n%s", strings.Join(args, " "), r.cmd.Process.Pid, r.warnings())
		}
	})
	return r
}

// warnings are the last ones of the process.
func (r *replica) warnings() string {
	var kept []string
	for line := range strings.Lines(r.err.String()) {
		if !strings.Contains(line, `"level":"INFO"`) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept[max(0, len(kept)-20):], "")
}

// base waits until the process serves, and returns the URL.
func (r *replica) base() (base string) {
	r.t.Helper()
	pgtest.Eventually(r.t, patience, func() bool {
		for line := range strings.Lines(r.err.String()) {
			var l struct{ Msg, Listen string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "serving" {
				base = l.Listen
			}
		}
		return base != ""
	}, "a replica serves")
	return base
}

// terminate asks the process to stop, and returns its exit code.
func (r *replica) terminate() int {
	r.t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		r.t.Fatal(err)
	}
	return r.wait()
}

func (r *replica) wait() int {
	r.t.Helper()
	select {
	case <-r.ended:
	case <-time.After(patience):
		r.t.Fatalf("a process did not end within %s:\n%s", patience, r.err.String())
	}
	return r.cmd.ProcessState.ExitCode()
}
