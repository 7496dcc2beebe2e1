//go:build unix

package rollout_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// patience is how long something may take that takes a moment.
const patience = 90 * time.Second

// launch starts a program with exactly the given environment.
func launch(t testing.TB, program string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, patience, t.TempDir(), proctest.Environ(environ...), append([]string{program}, args...)...)
}
