//go:build !linux

package resourcefaults_test

import (
	"testing"
)

// mount cannot be had here.
func mount(*testing.T, string) (dir string, ok bool) { return "", false }
