//go:build unix

package soak_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	var err error
	if program, err = proctest.Build("soak"); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}
