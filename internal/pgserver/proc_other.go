//go:build !linux

package pgserver

import (
	"context"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// servesFrom reports whether pid is a living postmaster; this system does not show its directory.
func servesFrom(pid int, _ string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-o", "state=,comm=", "-p", strconv.Itoa(pid)).Output()
	state, command, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !ok || strings.HasPrefix(state, "Z") {
		return false
	}
	name := filepath.Base(strings.TrimSpace(command))
	return name == "postgres" || name == "postmaster"
}

func dieWithParent(*syscall.SysProcAttr) {}

func bootID() string { return "" }

func sharedMemoryIsSmall() bool { return false }
