//go:build !linux

package postgres

import "syscall"

// confirmWithin does nothing where the kernel offers nothing of the kind.
func confirmWithin(string, string, syscall.RawConn) error { return nil }
