//go:build unix

package mcp

import (
	"os/exec"
	"syscall"
)

// ownGroup puts a child into a process group of its own, so that what it starts can be stopped with it, and a ^C in
// our terminal does not reach it before us.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup asks the group to end, or kills it. A group that is gone is no error.
func signalGroup(cmd *exec.Cmd, kill bool) {
	signal := syscall.SIGTERM
	if kill {
		signal = syscall.SIGKILL
	}
	_ = syscall.Kill(-cmd.Process.Pid, signal)
}
