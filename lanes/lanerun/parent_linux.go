package lanerun

import "syscall"

// endWithParent has the kernel end the command when this process dies without a chance to do it.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGTERM }
