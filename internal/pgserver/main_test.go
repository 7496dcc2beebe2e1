package pgserver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const (
	userArg       = "__use-server" // makes the test binary a process that uses a server, see runUserProcess
	noGuardBinary = "forgetful"    // name of a test binary that does not call GuardMain
)

func TestMain(m *testing.M) {
	forgets := filepath.Base(os.Args[0]) == noGuardBinary
	if !forgets {
		pgserver.GuardMain()
	}
	if len(os.Args) > 2 && os.Args[1] == userArg {
		os.Exit(runUserProcess(os.Args[2]))
	}
	if forgets {
		fmt.Println("this is another program")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// started is a process's report about its server.
type started struct {
	URL      string
	Dir      string
	Adopted  bool
	Progress []string
	Err      string
}

// runUserProcess starts or joins the server, reports it, and stops at the end of its input.
func runUserProcess(arg string) int {
	var config pgserver.Config
	if err := json.Unmarshal([]byte(arg), &config); err != nil {
		panic(err)
	}
	var report started
	config.Progress = func(line string) { report.Progress = append(report.Progress, line) }
	ctx := background()
	s, err := pgserver.Start(ctx, config)
	if err != nil {
		report.Err = err.Error()
	} else {
		report.URL, report.Dir, report.Adopted = s.URL(), s.Dir(), s.Adopted()
	}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil || report.Err != "" {
		return 1
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := s.Stop(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// userProcess is a process that uses a server.
type userProcess struct {
	started
	t     *testing.T
	cmd   *exec.Cmd
	input io.Closer
	out   io.Reader
}

// launchUser starts a user process of the given binary, as another user if credential is not nil.
func launchUser(t *testing.T, binary string, credential *syscall.Credential, config pgserver.Config) *userProcess {
	t.Helper()
	arg, err := json.Marshal(struct {
		Dir                string
		Ephemeral, Durable bool
	}{config.Dir, config.Ephemeral, config.Durable})
	require.NoError(t, err)
	cmd := exec.Command(binary, userArg, string(arg))
	cmd.Stderr = os.Stderr
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "AGENT_PG_BIN=" + os.Getenv("AGENT_PG_BIN")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &userProcess{t: t, cmd: cmd, input: input, out: out}
	t.Cleanup(p.kill)
	return p
}

// readReport reads the process's report about its server.
func (p *userProcess) readReport() {
	p.t.Helper()
	line, err := bufio.NewReader(p.out).ReadBytes('\n')
	require.NoError(p.t, err)
	require.NoError(p.t, json.Unmarshal(line, &p.started))
}

func (p *userProcess) mustHear() {
	p.t.Helper()
	if p.readReport(); p.Err != "" {
		p.t.Fatal(p.Err)
	}
}

// kill sends SIGKILL.
func (p *userProcess) kill() {
	err := p.cmd.Process.Kill()
	assert.True(p.t, err == nil || errors.Is(err, os.ErrProcessDone), err)
	_ = p.cmd.Wait() // a killed process always has an error
}

// stop has the process stop its server and end.
func (p *userProcess) stop() {
	p.t.Helper()
	assert.NoError(p.t, p.input.Close())
	assert.NoError(p.t, p.cmd.Wait())
}

// sharedTempDir returns a short, new folder that every user may enter.
func sharedTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "lk-") //nolint:usetesting // t.TempDir is long, and other users cannot enter it
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() {
		pgtest.Eventually(t, func() bool { return len(servers(t, dir)) == 0 }, "no server works below "+dir)
		logs, err := filepath.Glob(dir + "/*/postgres.log")
		for _, log := range logs {
			text, err := os.ReadFile(log)
			assert.Truef(t, err == nil && !strings.Contains(string(text), " of quit\n"),
				"the server had to be killed (%v):\n%s", err, text)
		}
		assert.NoError(t, errors.Join(err, os.RemoveAll(dir)))
	})
	return dir
}

// copyBinary copies this test binary to a folder in which every user can run it.
func copyBinary(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(sharedTempDir(t), name)
	// Another process writes the copy. A child that starts while this process had it open would inherit the file, and
	// the copy could not run: text file busy.
	out, err := exec.Command("cp", self(t), path).CombinedOutput()
	require.NoError(t, err, "cp", out)
	require.NoError(t, os.Chmod(path, 0o755))
	return path
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

func start(t *testing.T, config pgserver.Config) *pgserver.Server {
	t.Helper()
	s, err := pgserver.Start(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { stop(t, s) })
	return s
}

func stop(t *testing.T, s *pgserver.Server) {
	t.Helper()
	assert.NoError(t, s.Stop(background()))
}

// query runs one statement on a new connection and returns its text value.
func query(t *testing.T, url, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(background())
	var value string
	err = conn.QueryRow(t.Context(), sql).Scan(&value)
	require.True(t, err == nil || errors.Is(err, pgx.ErrNoRows), err)
	return value
}

// servers returns the postmasters whose data directory is below dir.
func servers(t *testing.T, dir string) []int {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(lines) == 0 {
		t.Skip("needs /proc to see processes")
	}
	var pids []int
	for _, line := range lines {
		text, err := os.ReadFile(line)
		args := strings.Split(string(text), "\x00")
		if err != nil || len(args) < 3 || args[1] != "-D" || !strings.HasPrefix(args[2], dir+"/") ||
			filepath.Base(args[0]) != "postgres" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(line)))
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	return pids
}

// statOf returns the fields of /proc/PID/stat after the command: state, parent, group, session and so on.
func statOf(t *testing.T, pid int) []string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	_, after, _ := strings.Cut(string(text), ") ")
	return strings.Fields(after)
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	parent, err := strconv.Atoi(statOf(t, pid)[1])
	require.NoError(t, err)
	return parent
}

func signalTo(t *testing.T, pid int, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, syscall.Kill(pid, signal), "signal", pid)
}

// background returns a context for cleanups. It outlives the test.
func background() context.Context { return context.Background() }
