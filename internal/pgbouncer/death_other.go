//go:build !linux

package pgbouncer

import "syscall"

// dieWithUs is nothing: only Linux can end a child with its parent.
func dieWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }
