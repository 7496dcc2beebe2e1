//go:build !unix

package mcp

import (
	"os"
	"os/exec"
)

func ownGroup(*exec.Cmd) {}

// signalGroup ends the child; there are no process groups here.
func signalGroup(cmd *exec.Cmd, kill bool) {
	if kill {
		_ = cmd.Process.Kill() // gone already is no error
		return
	}
	_ = cmd.Process.Signal(os.Interrupt)
}
