package pgbouncer

import "syscall"

// dieWithUs ends the pooler when its tests die without having stopped it.
func dieWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
