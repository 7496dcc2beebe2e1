//go:build !unix

package mcp

import (
	"os"
	"os/exec"
)

func ownGroup(*exec.Cmd) {}

// signalGroup ends the child; this platform has no process groups.
func signalGroup(cmd *exec.Cmd, kill bool) {
	if kill {
		_ = cmd.Process.Kill() // an exited process is no error
		return
	}
	_ = cmd.Process.Signal(os.Interrupt)
}
