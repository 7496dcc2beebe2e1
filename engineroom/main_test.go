package engineroom

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: browser.Tests{M: m}}) }
