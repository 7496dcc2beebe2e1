// Package lanerun runs a command while it holds a lane, like flock(1) with a file. It implements `agent lanes run
// LANE -- CMD…`, for jobs that do not use lanes themselves.
//
// The command starts only with the lane. If the lane is busy, the command does not run. If the lane is lost, the
// command gets SIGTERM, and SIGKILL ten seconds later. An exit of this process releases the lane. If the process is
// killed, the lane is held until its lease expires. The command may run until then, but on Linux it gets SIGTERM.
package lanerun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/lanekeeper/lanekeeper/internal/child"
	"github.com/lanekeeper/lanekeeper/lanes"
)

const (
	// ExitBusy is the exit code for a busy lane.
	ExitBusy = 75
	// ExitFailed is the exit code if the command did not run, or lost its lane.
	ExitFailed = 1
	exitSignal = 128 // plus the signal's number, as in a shell

	grace        = 10 * time.Second // between SIGTERM and SIGKILL
	releaseLimit = 30 * time.Second // for the retries of a release
)

// Stdio has the streams of the command and of RunCommand's log.
type Stdio struct {
	In       io.Reader
	Out, Err io.Writer
	Log      *slog.Logger // nil for text on Err
	// Skipped is called if the lane is busy and the command did not run; may be nil.
	Skipped func(ctx context.Context, busy *lanes.BusyError)
}

func (s Stdio) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.NewTextHandler(s.Err, nil))
	}
	return s.Log
}

// RunCommand runs argv while keeper holds lane. It returns the exit code of the command, or 128 + n after signal n. It
// forwards signals of this process to the command. A ttl of 0 is the default of the lane.
//
// For a busy lane, RunCommand logs the warning `already running, skipped` and returns exit code 75 without an error. It
// retries a failed release for 30 seconds. Then it logs a warning and returns no error, because the command has run. An
// error has exit code 1. Its causes are an invalid lane or command, an unavailable database, a lost lane
// (lanes.ErrLost) and the end of ctx, which ends the command. If the loss is found after the command, the exit code is
// the command's.
func RunCommand(
	ctx context.Context, keeper *lanes.Keeper, lane string, ttl time.Duration, argv []string, stdio Stdio,
) (int, error) {
	if len(argv) == 0 {
		return ExitFailed, errors.New("run: no command given; add it after --")
	}
	var opts []lanes.Option
	if ttl != 0 {
		opts = append(opts, lanes.WithTTL(ttl))
	}
	lease, err := keeper.Acquire(ctx, lane, opts...)
	if busy, ok := errors.AsType[*lanes.BusyError](err); ok {
		stdio.log().WarnContext(ctx, "already running, skipped", "lane", lane, "holder", busy.Holder)
		if stdio.Skipped != nil {
			stdio.Skipped(ctx, busy)
		}
		return ExitBusy, nil
	}
	if err != nil {
		return ExitFailed, err
	}
	code, err := runHeld(lease, argv, stdio)
	released := lease.ReleaseWithin(ctx, releaseLimit)
	switch {
	case err == nil && errors.Is(released, lanes.ErrLost): // another command may have run at the same time
		return code, fmt.Errorf("after %s: %w", argv[0], released)
	case released != nil && !errors.Is(released, lanes.ErrLost):
		stdio.log().WarnContext(ctx, "lane not released, it ends with its lease", "lane", lane, "error", released)
	}
	return code, err
}

// runHeld runs the command under the lease. When it returns, the command has ended. If it had to stop the command, it
// has also killed the other processes of its group.
func runHeld(lease *lanes.Lease, argv []string, stdio Stdio) (int, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio.In, stdio.Out, stdio.Err
	cmd.WaitDelay = grace
	group := newGroup(cmd)

	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)

	ended := make(chan error, 1)
	if err := child.Start(cmd, syscall.SIGTERM, func(err error) { ended <- err }); err != nil {
		return ExitFailed, fmt.Errorf("run %s: %w", argv[0], err)
	}
	stop, lost := lease.Context().Done(), lease.Lost()
	var kill <-chan time.Time
	var cause error
	for {
		select {
		case err := <-ended:
			if cause != nil {
				group.signal(syscall.SIGKILL) // remaining processes of the group
				return ExitFailed, fmt.Errorf("run %s: ended: %w", argv[0], cause)
			}
			return exitCode(cmd, err)
		case s := <-signals:
			group.signal(s)
			continue
		case <-kill:
			group.signal(syscall.SIGKILL)
			continue
		case <-stop:
			cause = context.Cause(lease.Context())
		case <-lost:
			cause = cmp.Or(context.Cause(lease.Context()), lanes.ErrLost)
		}
		stop, lost, kill = nil, nil, time.After(grace)
		group.signal(syscall.SIGTERM)
	}
}

// exitCode returns the exit code of a command.
func exitCode(cmd *exec.Cmd, err error) (int, error) {
	if cmd.ProcessState == nil {
		return ExitFailed, fmt.Errorf("run %s: %w", cmd.Path, err)
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal()), nil
	}
	return cmd.ProcessState.ExitCode(), nil
}

// forwarded are the signals that the command gets too.
var forwarded = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}

// group is the command and the processes that it starts.
type group struct {
	cmd *exec.Cmd
	own bool // in its own process group
}

// newGroup makes cmd start in its own process group, so signals reach its children. At a terminal, cmd stays in the
// group of this process, where it can read from the terminal.
func newGroup(cmd *exec.Cmd) group {
	in, isFile := cmd.Stdin.(*os.File)
	g := group{cmd: cmd, own: !isFile || !term.IsTerminal(int(in.Fd()))}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: g.own}
	return g
}

// signal sends s to the group. It ignores ended processes.
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
