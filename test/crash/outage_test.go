//go:build unix

package crash_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// TestTheDatabaseRestarts while a heartbeat is under way: the process stays up, and goes on when the
// database is back. The lease outlasts the outage, however slow the machine is.
func TestTheDatabaseRestarts(t *testing.T) {
	t.Parallel()
	for name, immediate := range map[string]bool{"fast": false, "immediate": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			own := pgtest.Own(t)
			s := newSceneOn(t, own.URL())
			held := s.holdSkill("look", 1)
			a := s.serve("", "AGENT_WORKER_LEASE=5m")
			id := s.begin()
			held.wait()
			before := s.look()
			own.Stop(immediate)
			held.free() // its result has to be recorded while there is no database
			a.Says("database unavailable, trying again")
			own.Start()
			require.Equal(t, s.url, own.URL())
			s.db.Reset()
			s.ends(id, "completed")
			assert.True(t, a.Running(), "the process did not survive")
			// The call was under way and its process lived: it is recorded, once.
			key := s.keyOf("look")
			before.rows[key] = row{}
			before.called[key] = 0
			s.whole(id, before)
			again := s.begin()
			s.ends(again, "completed")
		})
	}
}
