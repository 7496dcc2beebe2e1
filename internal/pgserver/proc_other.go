//go:build !linux

package pgserver

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// servesFrom reports whether pid is a living postmaster. A postmaster that lsof shows in another directory than data
// got the pid later.
func servesFrom(pid int, data string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-o", "state=,comm=", "-p", strconv.Itoa(pid)).Output()
	state, command, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !ok || strings.HasPrefix(state, "Z") {
		return false
	}
	name := filepath.Base(strings.TrimSpace(command))
	if name != "postgres" && name != "postmaster" {
		return false
	}
	// The lines are p and the pid, fcwd, and n and the path.
	out, _ = exec.CommandContext(ctx, "lsof", "-a", "-d", "cwd", "-F", "n", "-p", strconv.Itoa(pid)).Output()
	_, dir, _ := strings.Cut(strings.TrimSpace(string(out)), "\nn")
	its, unknown := os.Stat(dir)
	own, err := os.Stat(data)
	return unknown != nil || err != nil || os.SameFile(its, own)
}

func dieWithParent(*syscall.SysProcAttr) {}

func bootID() string { return "" }

func sharedMemoryIsSmall() bool { return false }
