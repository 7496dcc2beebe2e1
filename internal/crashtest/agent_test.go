//go:build unix

package crashtest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// patience is how long anything may take on a busy machine before the test gives up. It is more than twice as long as the server
// lets a stopped process keep a transaction open.
const patience = 150 * time.Second

// agent is a running process of the program.
type agent struct {
	t        testing.TB
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

// launch starts the program in a folder with exactly the given environment. The process is killed when
// the test ends, and what it logged is shown when the test has failed.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	a := &agent{t: t, cmd: exec.Command(program, args...), ended: make(chan struct{})}
	a.cmd.Dir, a.cmd.Env = dir, append(base(), environ...)
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
		a.kill()
		if t.Failed() {
			t.Logf("agent %s, pid %d:\n%s%s", strings.Join(args, " "), a.cmd.Process.Pid, a.out.String(), lastLines(a.err.String(), 120))
		}
	})
	return a
}

// base is what every process needs of the environment.
func base() []string {
	var kept []string
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "USER", "AGENT_PG_BIN"} {
		if value := os.Getenv(name); value != "" {
			kept = append(kept, name+"="+value)
		}
	}
	return kept
}

// kill is kill -9, and returns when the process is gone.
func (a *agent) kill() {
	if err := a.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		a.t.Errorf("kill agent: %v", err)
	}
	<-a.ended
}

// signal sends a signal to the process.
func (a *agent) signal(s syscall.Signal) {
	a.t.Helper()
	if err := a.cmd.Process.Signal(s); err != nil {
		a.t.Fatalf("send %s: %v", s, err)
	}
}

// running reports whether the process is still there.
func (a *agent) running() bool {
	select {
	case <-a.ended:
		return false
	default:
		return true
	}
}

// exit waits for the process to end and returns its exit code; -1 when a signal ended it.
func (a *agent) exit() int {
	a.t.Helper()
	select {
	case <-a.ended:
		return a.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		a.t.Fatalf("the process did not end within %s", patience)
		return 0
	}
}

// says waits until the process has logged a text.
func (a *agent) says(words string) {
	a.t.Helper()
	eventually(a.t, "the process says: "+words, func() bool { return strings.Contains(a.err.String(), words) })
}

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.Eventually(t, patience, condition, what)
}

func lastLines(s string, n int) string {
	lines := strings.SplitAfter(s, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "")
}

var listens = regexp.MustCompile(`listen=http://(\S+)`)

// address is where a process that serves listens.
func (a *agent) address() string {
	a.t.Helper()
	found := listens.FindStringSubmatch(a.err.String())
	if found == nil {
		a.t.Fatal("the process does not say where it listens")
	}
	return found[1]
}

// answers reports whether somebody accepts connections at an address.
func answers(t testing.TB, address string) bool {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// pid is the process id, as text.
func (a *agent) pid() string { return strconv.Itoa(a.cmd.Process.Pid) }

// decode reads the JSON document that a process has printed.
func (a *agent) decode(into any) {
	a.t.Helper()
	if err := json.Unmarshal([]byte(a.out.String()), into); err != nil {
		a.t.Fatalf("%v in %q", err, a.out.String())
	}
}
