//go:build !linux

package pgtest

const memory = ""

// plenty reports whether the data of a test server fits into memory.
func plenty() bool { return false }
