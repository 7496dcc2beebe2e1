// Package require ends a test at its first error, like testify's package of that name. Like assert it can be used by
// every test.
package require

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// NoError ends the test if err is not nil. What it is about opens the report.
func NoError(tb testing.TB, err error, about ...any) {
	tb.Helper()
	assert.NoError(tb, err, about...)
	if err != nil {
		tb.FailNow()
	}
}

// Equal ends the test if two values differ.
func Equal[T comparable](tb testing.TB, want, got T, about ...any) {
	tb.Helper()
	assert.Equal(tb, want, got, about...)
	if want != got {
		tb.FailNow()
	}
}
