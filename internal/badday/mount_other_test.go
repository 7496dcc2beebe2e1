//go:build unix && !linux

package badday_test

import "testing"

// mount cannot be had here.
func mount(*testing.T, string) (dir string, ok bool) { return "", false }
