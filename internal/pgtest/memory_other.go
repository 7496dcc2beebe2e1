//go:build !linux

package pgtest

const memory = ""

// hasRoom reports whether the data of a test server fits into memory.
func hasRoom() bool { return false }
