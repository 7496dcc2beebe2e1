// Package child starts commands that end with this process.
//
// On Linux the kernel signals a child when its parent dies for any reason. The kernel counts the thread that started
// the child as the parent, and Go may end idle threads. So a goroutine locks its thread, starts the command and waits
// for it. On other systems a command outlives a killed parent.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
)

// Start starts cmd, which gets the signal s when this process dies. When cmd ends, its own goroutine calls onExit with
// the error of cmd.Wait. If Start returns an error, it does not call onExit.
func Start(cmd *exec.Cmd, s syscall.Signal, onExit func(err error)) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	endWithParent(cmd.SysProcAttr, s)
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		// Go ends a thread that stays locked, and with it other children that the thread has started.
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			onExit(cmd.Wait())
		}
	}()
	return <-started
}
