//go:build unix && !linux

package guidetest_test

import "syscall"

// dieWithUs cannot be had here: a test binary that is killed may leave children.
func dieWithUs() *syscall.SysProcAttr { return nil }
