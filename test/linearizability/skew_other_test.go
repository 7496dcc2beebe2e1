//go:build !(linux && amd64)

package linearizability_test

const skewable = false

// skew does nothing: the clocks of the processes are not skewed here.
func skew(int64) error { return nil }
