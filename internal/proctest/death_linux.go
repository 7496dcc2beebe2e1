package proctest

import "syscall"

// DieWithUs ends a child when the test binary dies without having cleaned up. The child has a process group of its
// own: when the shell that began the tests ends before them, the kernel wakes whoever is stopped in the tests' group,
// and a process that a test has stopped would go on.
func DieWithUs() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
