//go:build unix

package rollout_test

import (
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

// rounds is how often each replica is replaced.
func rounds() int {
	if os.Getenv("AGENT_ROLL") == "long" {
		return 10
	}
	return 1
}

func TestMain(m *testing.M) { proctest.Main(m, "rollout", &program) }
