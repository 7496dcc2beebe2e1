package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	fastLimit = 15 * time.Second
	killLimit = 5 * time.Second
)

// clearStale removes the postmaster.pid of a dead server.
//
// PostgreSQL itself refuses to start in three cases: the file is empty, its process is an unreaped zombie, or the pid
// now belongs to another process. In a container all three cases are common and permanent. The caller holds start.lock,
// and no process holds guard.lock. So a server of this package that still runs has lost its guard, and clearStale shuts
// it down. Any other server on the data is an error.
func clearStale(ctx context.Context, l layout) error {
	path := filepath.Join(l.data(), "postmaster.pid")
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := strings.Split(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(lines[0]))
	if err != nil || pid <= 1 || !servesFrom(pid, l.data()) {
		return removeIfExists(path)
	}
	if sockets, err := recordedSockets(l); err != nil || len(lines) < 5 || lines[4] != sockets {
		return fmt.Errorf("a server that was not started by agent (process %d) runs on %s: stop it with kill -INT %d", pid,
			l.data(), pid)
	}
	if err := endOrphan(ctx, pid, l.data()); err != nil {
		return err
	}
	return removeIfExists(path)
}

// endOrphan shuts down a server that has lost its guard: fast, then immediately.
func endOrphan(ctx context.Context, pid int, data string) error {
	for _, attempt := range []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGINT, fastLimit}, {syscall.SIGQUIT, killLimit}} {
		if err := syscall.Kill(pid, attempt.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("stop the server left behind (process %d): %w", pid, err)
		}
		limited, cancel := context.WithTimeout(ctx, attempt.limit)
		err := poll(limited, func() (bool, error) { return !servesFrom(pid, data), nil })
		cancel()
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("the server left behind (process %d) does not stop: end it with kill -KILL %d", pid, pid)
}

func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
