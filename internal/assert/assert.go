// Package assert reports what a test did not expect, and lets it go on, like testify's package of that name. It imports
// nothing of the house, so every test can use it.
package assert

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal expects a value.
func Equal[T comparable](tb testing.TB, want, got T) {
	tb.Helper()
	if want != got {
		tb.Errorf("got %v, want %v", got, want)
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
