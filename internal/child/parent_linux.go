package child

import "syscall"

func endWithParent(attr *syscall.SysProcAttr, s syscall.Signal) { attr.Pdeathsig = s }
