//go:build unix

package soak_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "soak", &program) }
