package proctest

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// TestStacks: a failed test prints the stacks of a hanging process.
func TestStacks(t *testing.T) {
	if os.Getenv("PROCTEST_HANG") != "" {
		hang()
	}
	t.Parallel()
	p := Start(t, time.Minute, t.TempDir(), append(Environ(), "PROCTEST_HANG=yes"), os.Args[0],
		"-test.run=^TestStacks$", "-test.v")
	pgtest.Eventually(t, func() bool { return strings.Contains(p.Out.String(), "hangs") },
		"the process hangs")
	got := p.goroutineStacks()
	assert.Truef(t, strings.Contains(got, "proctest.hang < proctest.TestStacks") && strings.Contains(got, "1 × "),
		"stacks of a process that hangs:\n%s\nwant one of hang, called by TestStacks; it printed:\n%s", got, p.Err.Tail(40))
}

// hang reports itself: a dump of a process that still writes also shows hang.
//
//go:noinline
func hang() {
	_, _ = os.Stdout.WriteString("hangs\n")
	time.Sleep(time.Hour) // without cgo, select would be a deadlock and end the program
}
