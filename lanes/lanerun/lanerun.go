//go:build unix

// Package lanerun runs a command while it holds a lane, as flock(1) does with a file: the body of
// `agent lanes run LANE -- CMD…`, for jobs that know nothing of lanes.
//
// It promises that the command never runs without the lane: a busy lane skips it, and a lane that is
// lost ends it, first politely and then not. The lane is released on every way out; when
// this process is killed the lane ends with its lease, and the command, which nobody then watches, may go
// on for that long unnoticed (on Linux it is told to end, too).
package lanerun

import (
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

	"github.com/lanekeeper/lanekeeper/internal/child"
	"github.com/lanekeeper/lanekeeper/lanes"
)

const (
	// ExitBusy is the exit code when the lane is held by somebody else.
	ExitBusy = 75
	// ExitFailed is the exit code when the command could not be run, or had to be ended with its lane lost.
	ExitFailed = 1
	exitSignal = 128 // plus the signal's number, as in a shell

	grace        = 10 * time.Second // between the polite end of a command and the other
	releaseLimit = 30 * time.Second // for a release that the database does not answer
)

// Stdio is what the command reads and writes, and where RunCommand itself logs.
type Stdio struct {
	In       io.Reader
	Out, Err io.Writer
	Log      *slog.Logger // nil for text on Err
	// Skipped is told that the lane is busy and the command was not run; nil when nobody wants to know.
	Skipped func(ctx context.Context, busy *lanes.BusyError)
}

func (s Stdio) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.NewTextHandler(s.Err, nil))
	}
	return s.Log
}

// RunCommand runs argv while keeper holds lane, and returns the command's exit code; 128 + n when
// signal n ended it. Signals that this process gets meanwhile are handed to the command. ttl 0 is
// the lane's default.
//
// A busy lane is exit code 75 and no error, with a warning `already running, skipped` in the log. A release that
// the database does not answer is tried again for 30 seconds, and then a warning too: the command has run, and is not to be run again for that. An
// error comes with exit code 1: the lane or the command is not valid, the database did not answer, the
// lane was lost (lanes.ErrLost) or ctx ended, which ends the command.
func RunCommand(ctx context.Context, keeper *lanes.Keeper, lane string, ttl time.Duration, argv []string, stdio Stdio) (int, error) {
	if len(argv) == 0 {
		return ExitFailed, errors.New("run: no command given; write it after --")
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
	released := lease.ReleaseWithin(ctx, releaseLimit) // afterwards nobody is left who could
	switch {
	case err == nil && errors.Is(released, lanes.ErrLost): // the command may not have been alone
		return code, fmt.Errorf("after %s: %w", argv[0], released)
	case released != nil && !errors.Is(released, lanes.ErrLost):
		stdio.log().WarnContext(ctx, "lane not released, it ends with its lease", "lane", lane, "error", released)
	}
	return code, err
}

// runHeld runs the command under the lease. Whatever ends it, it has ended when this returns, and with it
// the processes it started, where they stayed in its group.
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
				group.signal(syscall.SIGKILL) // what the command left behind
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
			cause = lanes.ErrLost
		}
		stop, lost, kill = nil, nil, time.After(grace)
		group.signal(syscall.SIGTERM)
	}
}

// exitCode turns the end of a command into an exit code.
func exitCode(cmd *exec.Cmd, err error) (int, error) {
	if cmd.ProcessState == nil {
		return ExitFailed, fmt.Errorf("run %s: %w", cmd.Path, err)
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal()), nil
	}
	return cmd.ProcessState.ExitCode(), nil
}
