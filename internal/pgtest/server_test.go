package pgtest

import (
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestSweepDropsLeftovers(t *testing.T) {
	s, err := sharedServer.get()
	require.NoError(t, err)
	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	left, mine := fmt.Sprintf("%s%d_left", testPrefix, gone.Process.Pid), newName()
	for _, name := range []string{left, mine} {
		require.NoError(t, s.create(t.Context(), name, "template0"))
		s.handOut(t, name)
	}
	require.NoError(t, s.sweep(t.Context()))
	names, err := s.names(t.Context(), "select datname from pg_database")
	require.NoError(t, err)
	assert.Truef(t, !slices.Contains(names, left) && slices.Contains(names, mine),
		"after the sweep there are %v; %s should be gone and %s not", names, left, mine)
}

func TestTemplateIsBuiltOnce(t *testing.T) {
	s, err := sharedServer.get()
	require.NoError(t, err)
	template := templatePrefix + newName() // other processes may run this test too
	s.handOut(t, template)
	var all sync.WaitGroup
	for range 2 * adminConns {
		all.Go(func() {
			assert.NoError(t, s.buildTemplate(t.Context(), template))
		})
	}
	all.Wait()
	names, err := s.names(t.Context(), "select datname from pg_database where datname = $1 and not datallowconn", template)
	assert.NoError(t, err, names)
	assert.Equal(t, 1, len(names), names)
}

// failingTB is a test that records its failure.
type failingTB struct {
	testing.TB
	failed chan string
}

func (f failingTB) Fatalf(format string, args ...any) {
	f.failed <- fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestEventually(t *testing.T) {
	t.Parallel()
	calls := 0
	Eventually(t, func() bool { calls++; return calls == 3 }, "third call")
	assert.Equal(t, 3, calls, calls-3)
	f := failingTB{TB: t, failed: make(chan string)}
	eventually := EventuallyWithin // vet cannot know that the test may call this Fatalf here
	go eventually(f, time.Millisecond, func() bool { return false }, "never")
	assert.Equal(t, "not within 1ms: never", <-f.failed)
}
