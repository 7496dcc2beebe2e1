//go:build unix

package mcp

import (
	"os/exec"
	"syscall"
)

// ownGroup puts a child into its own process group. So its children stop with it, and a ^C in our terminal does not
// reach it first.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup signals the group to end, or kills it. A missing group is no error.
func signalGroup(cmd *exec.Cmd, kill bool) {
	signal := syscall.SIGTERM
	if kill {
		signal = syscall.SIGKILL
	}
	_ = syscall.Kill(-cmd.Process.Pid, signal)
}
