package executions

import (
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// batchers join the writes of concurrent executions, one batcher for each kind of write.
type batchers struct {
	starts      *batch.Batcher[opening, Execution]
	checkpoints *batch.Batcher[point, struct{}]
	waits       *batch.Batcher[parking, []byte]
	events      *batch.Batcher[occurrence, Delivered]
	ends        *batch.Batcher[lastWrite, finished]
}

// newBatchers returns the batchers of an engine. They share a scheduler, so callers of different kinds fall into step
// too.
//
// A checkpoint or an end that is sent twice changes nothing the second time. A start, a wait, or an event without an
// id would count twice, so these are sent again only after the database refused them. Checkpoints and ends are sorted
// as their rows are locked.
func newBatchers(e *Engine) batchers {
	s := &batch.Scheduler{}
	return batchers{
		starts: &batch.Batcher[opening, Execution]{Scheduler: s, Send: e.startSeveral, Unchanged: postgres.Unchanged},
		waits:  &batch.Batcher[parking, []byte]{Scheduler: s, Send: e.parkSeveral, Unchanged: postgres.Unchanged},
		events: &batch.Batcher[occurrence, Delivered]{Scheduler: s, Send: e.handSeveral, Unchanged: postgres.Unchanged},
		checkpoints: &batch.Batcher[point, struct{}]{
			Scheduler: s, Send: e.recordSeveral, Compare: func(a, b point) int { return strings.Compare(a.id, b.id) },
		},
		ends: &batch.Batcher[lastWrite, finished]{
			Scheduler: s, Send: e.finishSeveral, Compare: func(a, b lastWrite) int { return strings.Compare(a.id, b.id) },
		},
	}
}
