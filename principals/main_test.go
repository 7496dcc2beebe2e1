package principals_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
