package proctest

import "syscall"

// DieWithUs ends a child when the test binary dies without having cleaned up.
func DieWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
