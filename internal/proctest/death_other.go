//go:build !linux

package proctest

import "syscall"

// DieWithUs cannot be had here: a test binary that is killed may leave children.
func DieWithUs() *syscall.SysProcAttr { return nil }
