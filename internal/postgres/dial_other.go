//go:build !linux

package postgres

import "syscall"

// setUserTimeout does nothing: the option is Linux's.
func setUserTimeout(string, string, syscall.RawConn) error { return nil }
