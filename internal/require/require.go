// Package require ends a test at its first error, like testify's package of that name. Like assert it can be used by
// every test.
package require

import (
	"errors"
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

// True ends the test if a condition does not hold.
func True(tb testing.TB, condition bool, about ...any) {
	tb.Helper()
	if !condition {
		tb.Fatal(about...)
	}
}

// Truef ends the test if a condition does not hold. Its arguments are evaluated whether it holds or not.
func Truef(tb testing.TB, condition bool, format string, args ...any) {
	tb.Helper()
	if !condition {
		tb.Fatalf(format, args...)
	}
}

// Error ends the test if err is nil.
func Error(tb testing.TB, err error, about ...any) {
	tb.Helper()
	assert.Error(tb, err, about...)
	if err == nil {
		tb.FailNow()
	}
}

// ErrorIs ends the test if err does not wrap another.
func ErrorIs(tb testing.TB, err, want error, about ...any) {
	tb.Helper()
	assert.ErrorIs(tb, err, want, about...)
	if !errors.Is(err, want) {
		tb.FailNow()
	}
}
