package crash_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	proctest.Main(m, "crash", &program)
}
