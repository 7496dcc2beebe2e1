// Package require ends a test at its first error, like testify's package of that name. It imports nothing of the
// house, so every test can use it.
package require

import "testing"

// NoError ends the test if err is not nil.
func NoError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
