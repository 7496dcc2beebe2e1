package engineroom

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(browser.Tests{M: m}) }
