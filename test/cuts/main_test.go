package cuts_test

import (
	"os"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 90 * time.Second

func TestMain(m *testing.M) {
	pgtest.AtOnce(8)
	pgtest.Main(m)
}

// whole reports whether every message is to be cut.
func whole() bool { return os.Getenv("AGENT_CUT_ALL") != "" }
