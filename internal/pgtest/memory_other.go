//go:build !linux

package pgtest

const memory = ""

// plenty reports whether a server of tests may be in memory.
func plenty() bool { return false }
