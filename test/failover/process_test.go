//go:build unix

package failover_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...)
}
