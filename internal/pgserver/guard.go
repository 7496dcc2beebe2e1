package pgserver

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	guardArg   = "__pg-guard"
	guardHello = "pg-guard ready\n"
	helloLimit = 10 * time.Second
	maxLogSize = 8 << 20
)

// order is the guard's input.
type order struct {
	Root    string   `json:"root"`
	Keep    bool     `json:"keep"`
	Program string   `json:"program"`
	Args    []string `json:"args"`
	UID     int      `json:"uid"` // -1: this process's user
	GID     int      `json:"gid"`
}

func (o order) layout() layout {
	l := layout{root: o.Root, keep: o.Keep}
	if o.UID >= 0 {
		l.user = &Account{uid: o.UID, gid: o.GID}
	}
	return l
}

// guard is the child process that guards the server.
type guard struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended and is reaped
}

// launchGuard starts the guard, which starts the server. It returns when the guard runs.
func launchGuard(l layout, bin Binaries, config Config) (*guard, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	input, err := json.Marshal(newOrder(l, bin, config))
	if err != nil {
		return nil, err
	}
	log, err := openLog(l)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	hello, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer hello.Close()
	cmd := exec.Command(self, guardArg, l.root)
	cmd.Dir = l.root
	cmd.Env = serverEnv() // a process that may outlive this one must not keep its secrets in the environment
	cmd.Stdin = bytes.NewReader(input)
	cmd.Stdout = write
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	if err = errors.Join(err, write.Close()); err != nil {
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	g := &guard{cmd: cmd, ended: make(chan struct{})}
	go func() {
		defer close(g.ended)
		_ = cmd.Wait() // the log has the exit status; only the end matters here
	}()
	return g, g.waitHello(hello)
}

func newOrder(l layout, bin Binaries, config Config) order {
	o := order{Root: l.root, Keep: l.keep, Program: bin.path("postgres"), Args: serverArgs(l, config), UID: -1, GID: -1}
	if l.user != nil {
		o.UID, o.GID = l.user.uid, l.user.gid
	}
	return o
}

// waitHello waits for the guard's first message. Without an early call of GuardMain, the program would run its main
// instead of the guard.
func (g *guard) waitHello(hello *os.File) error {
	if err := hello.SetReadDeadline(time.Now().Add(helloLimit)); err != nil {
		return errors.Join(err, g.abandon())
	}
	line, err := bufio.NewReader(hello).ReadString('\n')
	if line == guardHello {
		return nil
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.New("main (or TestMain) does not call pgserver.GuardMain first")
	}
	return errors.Join(fmt.Errorf("start the guard: %w", err), g.abandon())
}

// hasEnded reports whether the guard process has ended.
func (g *guard) hasEnded() (bool, error) {
	select {
	case <-g.ended:
		return true, nil
	default:
		return false, nil
	}
}

// abandon ends a guard whose server did not start.
func (g *guard) abandon() error {
	for _, attempt := range []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGTERM, fastLimit + 2*killLimit}, {syscall.SIGKILL, killLimit}} {
		if err := g.cmd.Process.Signal(attempt.signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("end the guard: %w", err)
		}
		select {
		case <-g.ended:
			return nil
		case <-time.After(attempt.limit):
		}
	}
	return fmt.Errorf("end the guard: process %d does not end", g.cmd.Process.Pid)
}

// openLog opens the server's log for appending. It renames a large log first.
func openLog(l layout) (*os.File, error) {
	path := l.path(logFile)
	if info, err := os.Stat(path); err == nil && info.Size() > maxLogSize {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	return f, l.user.chown(path)
}

func serverArgs(l layout, config Config) []string {
	settings := []string{
		"listen_addresses=",
		"unix_socket_permissions=0700",
		"max_connections=" + strconv.Itoa(config.MaxConnections),
		"logging_collector=off",
		"log_destination=stderr",
		"log_checkpoints=off",
		"jit=off",
	}
	if sharedMemoryIsSmall() {
		settings = append(settings, "dynamic_shared_memory_type=mmap")
	}
	if !config.Durable {
		settings = append(settings, "shared_buffers=32MB", "fsync=off", "synchronous_commit=off", "full_page_writes=off",
			"autovacuum=off",
			"wal_level=minimal", "max_wal_senders=0", "max_wal_size=256MB", "max_prepared_transactions=32")
	}
	args := []string{"-D", l.data(), "-k", l.sockets, "-p", strconv.Itoa(port)}
	for _, setting := range settings {
		args = append(args, "-c", setting)
	}
	return args
}

func isGuard(args []string) bool {
	return len(args) > 1 && strings.TrimSpace(args[1]) == guardArg
}
