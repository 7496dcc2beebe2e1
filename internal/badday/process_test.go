//go:build unix

package badday_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

const token = "a-long-random-text-for-tests"

// agent is a process of the program.
type agent struct {
	t        testing.TB
	cmd      *exec.Cmd
	out, err text
	ended    chan struct{} // closed when the process is gone
	base     string
	client   *http.Client
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

// launch starts a program with exactly the given environment. It is killed when the test ends, and what it logged is shown
// when the test has failed.
func launch(t testing.TB, dir string, environ []string, command ...string) *agent {
	t.Helper()
	a := &agent{t: t, cmd: exec.Command(command[0], command[1:]...), ended: make(chan struct{}), client: &http.Client{Timeout: patience}}
	a.cmd.Dir, a.cmd.Env = dir, environ
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
		a.client.CloseIdleConnections()
		if t.Failed() {
			lines := strings.SplitAfter(a.err.String(), "\n")
			t.Logf("%s\n%s%s", strings.Join(command, " "), a.out.String(), strings.Join(lines[max(0, len(lines)-80):], ""))
		}
	})
	return a
}

// environ is what a process gets, with DATABASE_URL.
func environ(database string, more ...string) []string {
	kept := []string{
		"DATABASE_URL=" + database, "AGENT_ADMIN_TOKEN=" + token, "AGENT_LISTEN=127.0.0.1:0", "HOOK_SECRET=hook-secret-of-the-test",
		"AGENT_MODEL=offline", "AGENT_HEARTBEAT_CRON=0 0 29 2 *", "AGENT_LOG_LEVEL=debug", "AGENT_WORKER_LEASE=5s",
	}
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "USER", "AGENT_PG_BIN"} {
		if value := os.Getenv(name); value != "" {
			kept = append(kept, name+"="+value)
		}
	}
	return append(kept, more...)
}

// serve is `agent serve`, ready to work; a shell command of before, if any, sets it up.
func serve(t testing.TB, before string, environ []string) *agent {
	t.Helper()
	return serveProgram(t, program, before, environ)
}

func serveProgram(t testing.TB, program, before string, environ []string) *agent {
	t.Helper()
	a := launch(t, t.TempDir(), environ, "/bin/sh", "-c", before+` exec "$0" serve`, program)
	listens := regexp.MustCompile(`listen=(http://\S+)`)
	eventually(t, "the process serves", func() bool {
		if a.gone() {
			t.Fatal("the process has ended")
		}
		found := listens.FindStringSubmatch(a.err.String())
		if found != nil {
			a.base = found[1]
		}
		return found != nil
	})
	return a
}

func (a *agent) gone() bool {
	select {
	case <-a.ended:
		return true
	default:
		return false
	}
}

// command runs one command of the program to its end.
func command(t testing.TB, environ []string, args ...string) (code int, out, errs string) {
	t.Helper()
	a := launch(t, t.TempDir(), environ, append([]string{program}, args...)...)
	select {
	case <-a.ended:
	case <-time.After(patience):
		t.Fatalf("agent %s does not end", strings.Join(args, " "))
	}
	return a.cmd.ProcessState.ExitCode(), a.out.String(), a.err.String()
}

// answer is what a request got; a status of 0 is none at all.
type answer struct {
	status int
	body   string
	header http.Header
}

// problem is the detail of a problem.
func (a answer) problem() string {
	var p struct{ Type, Detail string }
	if json.Unmarshal([]byte(a.body), &p) != nil {
		return a.body
	}
	return p.Detail
}

// ask makes a request as the admin.
func (a *agent) ask(method, path, body string, header ...string) answer {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	return a.askIn(ctx, method, path, body, header...)
}

// askIn is ask with a limit of the caller's.
func (a *agent) askIn(ctx context.Context, method, path, body string, header ...string) answer {
	a.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, a.base+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w, err := a.client.Do(r)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer w.Body.Close()
	text, err := io.ReadAll(w.Body)
	if err != nil {
		return answer{body: err.Error()}
	}
	return answer{w.StatusCode, string(text), w.Header}
}
