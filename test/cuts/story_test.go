package cuts_test

import (
	"context"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// story is something that a process does, and its end.
type story struct {
	name     string
	declared string // the workspace
	settings settings
	begin    func(w *world)                      // before the process starts
	tell     func(ctx context.Context, w *world) // while it works; returns when all is over
}

// ending is how a story ended.
type ending struct {
	digest []string // the state of the world, see digest_test.go
	told   []string // what somebody outside was told, other than what they asked for
	sent   []sent
	left   []cut // the cuts that were not made
	slow   bool  // a lease was lost, which on a machine that stood still needs no cut
	log    string
}

// end tells a story with cuts, and says how it ended.
func (s story) end(t *testing.T, cuts []cut) ending {
	t.Helper()
	database := pgtest.URL(t)
	w := newWorld(t, database, s.declared, cuts)
	s.begin(w)
	w.run(database, s.settings, func(ctx context.Context) {
		s.tell(ctx, w)
		w.eventually("everything is over", `
			select not exists (select from agent_executions where completed_at is null)
			   and not exists (select from agent_activity_open) and not exists (select from agent_locks_live)`)
	})
	slow := pgtest.Value[int](w.t, w.db, `select count(*) from agent_workers`) > 1
	return ending{digest(w), w.told(), w.ledger.all(), w.ledger.left(), slow, w.log.String()}
}
