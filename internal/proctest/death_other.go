//go:build !linux

package proctest

import "syscall"

// DieWithUs does nothing on this system: a killed test binary may leave children.
func DieWithUs() *syscall.SysProcAttr { return nil }
