// Package assert reports what a test did not expect, and lets it go on, like testify's package of that name. It imports
// nothing of the house, so every test can use it.
package assert

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal expects a value. What it is about, such as the case of a table, opens the report.
func Equal[T comparable](tb testing.TB, want, got T, about ...any) {
	tb.Helper()
	if want != got {
		tb.Errorf("%sgot %v, want %v", prefix(about), got, want)
	}
}

func prefix(about []any) string {
	if len(about) == 0 {
		return ""
	}
	return strings.TrimSuffix(fmt.Sprintln(about...), "\n") + ": "
}

// True expects a condition. What it is about is the report.
func True(tb testing.TB, condition bool, about ...any) {
	tb.Helper()
	if !condition {
		tb.Error(about...)
	}
}

// Truef expects a condition. Its arguments are evaluated whether it holds or not.
func Truef(tb testing.TB, condition bool, format string, args ...any) {
	tb.Helper()
	if !condition {
		tb.Errorf(format, args...)
	}
}

// NoError expects no error.
func NoError(tb testing.TB, err error, about ...any) {
	tb.Helper()
	if err != nil {
		tb.Errorf("%s%v", prefix(about), err)
	}
}

// Error expects some error.
func Error(tb testing.TB, err error, about ...any) {
	tb.Helper()
	if err == nil {
		tb.Errorf("%sgot no error", prefix(about))
	}
}

// ErrorContains expects an error with words.
func ErrorContains(tb testing.TB, err error, words string, about ...any) {
	tb.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		tb.Errorf("%sgot error %v, want one with %q", prefix(about), err, words)
	}
}

// ErrorIs expects an error that wraps another.
func ErrorIs(tb testing.TB, err, want error, about ...any) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Errorf("%sgot error %v, want %v", prefix(about), err, want)
	}
}

// NoDiff expects a value whose parts are compared.
func NoDiff[T any](tb testing.TB, want, got T, options ...cmp.Option) {
	tb.Helper()
	if diff := cmp.Diff(want, got, options...); diff != "" {
		tb.Errorf("differs (-want +got):\n%s", diff)
	}
}

// Contains expects words in a text.
func Contains(tb testing.TB, text string, words ...string) {
	tb.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			tb.Errorf("%q is not in:\n%s", w, text)
		}
	}
}
