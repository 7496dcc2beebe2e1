// Package child starts commands that end with us.
//
// On Linux the kernel sends a child a signal when its parent dies, however that dies. It takes the thread that
// started the child for the parent, and Go ends threads as it likes: so the one that starts a command waits for it,
// too, and is nobody else's meanwhile. Elsewhere a command whose parent was killed goes on.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
)

// Start starts cmd, which gets s when this process dies. over is called with what cmd.Wait says, on a goroutine of
// its own; after an error there is none.
func Start(cmd *exec.Cmd, s syscall.Signal, over func(err error)) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	endWithParent(cmd.SysProcAttr, s)
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		// or the thread would end with the goroutine, and what it has started otherwise with it
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			over(cmd.Wait())
		}
	}()
	return <-started
}
