//go:build unix

package lanerun

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/term"
)

// forwarded are the signals that are handed to the command.
var forwarded = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}

// group is the command with the processes it starts.
type group struct {
	cmd *exec.Cmd
	own bool // a process group of its own
}

// newGroup gives cmd a process group of its own, so that its end reaches what it started. At a terminal it stays
// in ours: in another it could not read from the terminal.
func newGroup(cmd *exec.Cmd) group {
	in, isFile := cmd.Stdin.(*os.File)
	g := group{cmd: cmd, own: !isFile || !term.IsTerminal(int(in.Fd()))}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: g.own}
	return g
}

// signal sends s to the group. That a process is gone already is as good.
func (g group) signal(s os.Signal) {
	n, ok := s.(syscall.Signal)
	switch {
	case !ok:
	case g.own:
		_ = syscall.Kill(-g.cmd.Process.Pid, n)
	case n == syscall.SIGINT || n == syscall.SIGQUIT: // the terminal has sent it to the command too
	default:
		_ = g.cmd.Process.Signal(n)
	}
}
