//go:build unix

package lanerun

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/term"
)

// forwarded are the signals that the command gets too.
var forwarded = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}

// group is the command and the processes that it starts.
type group struct {
	cmd *exec.Cmd
	own bool // in its own process group
}

// newGroup starts cmd in its own process group, so its end reaches its children. At a terminal it stays in this
// group, where it can read from the terminal.
func newGroup(cmd *exec.Cmd) group {
	in, isFile := cmd.Stdin.(*os.File)
	g := group{cmd: cmd, own: !isFile || !term.IsTerminal(int(in.Fd()))}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: g.own}
	return g
}

// signal sends s to the group, and ignores an ended process.
func (g group) signal(s os.Signal) {
	n, ok := s.(syscall.Signal)
	switch {
	case !ok:
	case g.own:
		_ = syscall.Kill(-g.cmd.Process.Pid, n)
	case n == syscall.SIGINT || n == syscall.SIGQUIT: // the terminal sends it to the command
	default:
		_ = g.cmd.Process.Signal(n)
	}
}
