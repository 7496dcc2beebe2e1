//go:build !linux

package resourcefaults_test

import (
	"testing"
)

// mount does nothing: this platform cannot mount.
func mount(*testing.T, string) (dir string, ok bool) { return "", false }
