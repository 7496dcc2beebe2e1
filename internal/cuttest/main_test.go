package cuttest_test

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 90 * time.Second

func TestMain(m *testing.M) {
	pgserver.GuardMain()
	flag.Parse()
	if err := setParallel(); err != nil {
		fmt.Fprintln(os.Stderr, "cuttest:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}

// setParallel lets more runs go on at once than there are processors, because they wait more than they compute;
// -parallel still decides where it is given.
func setParallel() error {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return nil
	}
	return flag.Set("test.parallel", "8")
}

// whole reports whether every message is to be cut.
func whole() bool { return os.Getenv("AGENT_CUT_ALL") != "" }
