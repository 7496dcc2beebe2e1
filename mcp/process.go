package mcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// stopTimeout bounds the exit of a child after its input closes, and again after SIGTERM.
const stopTimeout = 2 * time.Second

// process is a server that runs as a child, in its own process group.
type process struct {
	cmd    *exec.Cmd
	stdin  *os.File // this process's end of the child's input
	stdout *os.File // this process's end of the child's output
	exited chan struct{}
}

// startProcess starts command with exactly the environment env. It logs the child's error output by line, bounded.
func startProcess(command, env []string, log *slog.Logger, redactText func(string) string) (*process, error) {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return nil, err
	}
	childIn, stdin, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("create pipe: %w", err)
	}
	stdout, childOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create pipe: %w", err), childIn.Close(), stdin.Close())
	}
	cmd := exec.Command(path, command[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout = env, childIn, childOut
	stderr := &lineLogger{log: log, redactText: redactText}
	cmd.Stderr = stderr
	cmd.WaitDelay = stopTimeout // a grandchild may hold the error output open
	setProcessGroup(cmd)
	err = cmd.Start()
	// The child has its own copies of these ends.
	if closeErr := errors.Join(childIn.Close(), childOut.Close()); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, errors.Join(err, stdin.Close(), stdout.Close())
	}
	p := &process{cmd: cmd, stdin: stdin, stdout: stdout, exited: make(chan struct{})}
	go func() { // ends with the child; stop waits for it
		defer close(p.exited)
		err := cmd.Wait()
		_, _ = stderr.Write([]byte{'\n'}) // logs an unfinished last line; never fails
		if err != nil {
			log.Debug("MCP server ended", "pid", cmd.Process.Pid, "error", err)
		}
	}()
	return p, nil
}

// stop ends the child and its children: it closes the input, sends SIGTERM to the group, then SIGKILL. It returns
// when the child has exited.
func (p *process) stop() {
	_ = p.stdin.Close() // closed already if the session ended first
	if !p.waitExit(stopTimeout) {
		signalGroup(p.cmd, false)
		p.waitExit(stopTimeout)
	}
	signalGroup(p.cmd, true) // also the remaining processes of the group
	<-p.exited
	_ = p.stdout.Close()
}

// kill ends the child at once.
func (p *process) kill() { signalGroup(p.cmd, true) }

// waitExit reports whether the child exits within timeout.
func (p *process) waitExit(timeout time.Duration) bool {
	select {
	case <-p.exited:
		return true
	default:
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-p.exited:
		return true
	case <-timer.C:
		return false
	}
}

// lineLogger logs its input by line. It cuts long lines.
type lineLogger struct {
	log        *slog.Logger
	redactText func(string) string

	mu      sync.Mutex
	partial []byte
}

func (l *lineLogger) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(text)
	for len(text) > 0 {
		line, after, ended := bytes.Cut(text, []byte{'\n'})
		text = after
		// A secret that the limit would cut is kept whole until it is redacted.
		if room := maxStderrLine + maxSecretFile - len(l.partial); len(line) > room {
			line = line[:room]
		}
		l.partial = append(l.partial, line...)
		if !ended {
			break
		}
		if message := cleanText(l.redactText(string(l.partial)), maxStderrLine); message != "" {
			l.log.InfoContext(context.Background(), "MCP server says", "line", message)
		}
		l.partial = l.partial[:0]
	}
	return n, nil
}

// setProcessGroup puts a child into its own process group. A signal to the group then reaches the child's children too,
// and ^C in the terminal does not reach the child before this process.
func setProcessGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup signals the group to end, or kills it. A missing group is no error.
func signalGroup(cmd *exec.Cmd, kill bool) {
	signal := syscall.SIGTERM
	if kill {
		signal = syscall.SIGKILL
	}
	_ = syscall.Kill(-cmd.Process.Pid, signal)
}
