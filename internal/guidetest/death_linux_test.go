package guidetest_test

import "syscall"

// dieWithUs ends the children when the test binary dies without having cleaned up.
func dieWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
