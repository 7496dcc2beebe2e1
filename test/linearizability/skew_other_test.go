//go:build !(linux && amd64)

package linearizability_test

const skewable = false

// skew does nothing: this platform cannot skew the clock of a process.
func skew(int64) error { return nil }
