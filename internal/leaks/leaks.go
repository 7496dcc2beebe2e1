// Package leaks finds goroutines that tests leave behind. A goroutine of this repository ends with its owner. So none
// may remain after the tests of a package, when their servers and pools are closed.
//
// A checked test package has
//
//	func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }
//
// pgtest.Main calls Leaks after the tests passed and its part of the server stopped.
package leaks

import (
	"flag"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/goleak"
)

// guard waits for the guard process of the test server, which runs while any test binary uses the server. So it may
// outlive the tests of its binary.
const guard = "github.com/lanekeeper/lanekeeper/internal/pgserver.launchGuard.func1"

// waitTimeout bounds the wait for goroutines on a busy machine.
const waitTimeout = 30 * time.Second

// Tests are the tests of a package without goroutine leaks.
type Tests struct {
	M interface{ Run() int }
	// Allowed are functions, as in a stack trace, whose goroutines may remain. Each caller states the reason.
	Allowed []string
}

// Run runs the tests and returns the exit code.
func (t Tests) Run() int { return t.M.Run() }

// Leaks returns the goroutines that remain after a wait. It skips fuzzing, whose workers are killed.
func (t Tests) Leaks() error {
	for _, name := range []string{"test.fuzz", "test.fuzzworker"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" && f.Value.String() != "false" {
			return nil
		}
	}
	http.DefaultClient.CloseIdleConnections() // idle connections have no owner that closes them
	return t.find(waitTimeout)
}

// find repeats the search until no goroutine remains, or the time is over.
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
