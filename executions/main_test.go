package executions_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(restartURL); url != "" {
		if err := doomed(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	pgtest.AtOnce(6)
	pgtest.Main(leaks.Tests{M: m})
}
