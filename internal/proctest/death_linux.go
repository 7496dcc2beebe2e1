package proctest

import "syscall"

// DieWithUs ends a child when the test binary dies without a cleanup. The child has a process group of its own. If the
// shell that started the tests ends first, the kernel wakes stopped processes in the tests' group. Without its own
// group, a process that a test has stopped would then continue.
func DieWithUs() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
