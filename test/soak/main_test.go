//go:build unix

package soak_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "soak", &program) }

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 90 * time.Second

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...)
}
