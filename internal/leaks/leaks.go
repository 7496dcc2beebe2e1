// Package leaks finds goroutines that tests leave behind: each goroutine of the house has an owner who waits for it, so
// when the tests of a package are over, and their servers and pools are closed, none may be there.
//
// A test package that is looked at has
//
//	func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }
//
// pgtest.Main asks Leaks after it has stopped its share of the server, when the tests have passed.
package leaks

import (
	"flag"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/goleak"
)

// guard waits for the process that guards the test server: it stays as long as any test binary uses the server, so it
// may outlive the tests of the binary that started it.
const guard = "github.com/lanekeeper/lanekeeper/internal/pgserver.launchGuard.func1"

// patience is how long a goroutine may take to end on a busy machine.
const patience = 30 * time.Second

// Tests are the tests of a package whose goroutines have to end.
type Tests struct {
	M interface{ Run() int }
	// Allowed are functions, as a stack names them, whose goroutines may be left; each has its reason where it is given.
	Allowed []string
}

// Run runs the tests and returns the exit code.
func (t Tests) Run() int { return t.M.Run() }

// Leaks reports the goroutines that are still there when they had time to end. Fuzzing is left out: its workers are
// killed in the middle.
func (t Tests) Leaks() error {
	for _, name := range []string{"test.fuzz", "test.fuzzworker"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" && f.Value.String() != "false" {
			return nil
		}
	}
	http.DefaultClient.CloseIdleConnections() // connections that are kept for the next request belong to nobody
	return t.find(patience)
}

// find looks until nothing is left, or the time is over.
func (t Tests) find(within time.Duration) error {
	options := make([]goleak.Option, 0, len(t.Allowed)+1)
	for _, function := range append([]string{guard}, t.Allowed...) {
		options = append(options, goleak.IgnoreAnyFunction(function))
	}
	deadline := time.Now().Add(within)
	for {
		err := goleak.Find(options...) // itself waits for a while
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("goroutines are left when the tests are over: %w", err)
		}
	}
}
