//go:build unix

package crashtest_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	flag.Parse()
	err := setParallel()
	if err == nil {
		program, err = proctest.Build("crashtest")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crashtest:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}

// setParallel lets more tests run at once than there are processors, because they wait for processes more
// than they compute; -parallel still decides where it is given.
func setParallel() error {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return nil
	}
	return flag.Set("test.parallel", "4")
}
