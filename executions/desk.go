package executions

import (
	"strings"
	"sync"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// desk is where writes of executions go together: a line, with a group for each kind of write.
type desk struct {
	ends   *batch.Group[lastWrite, finished]
	events *batch.Group[occurrence, Delivered]
	starts *batch.Group[opening, Execution]
	points *batch.Group[point, struct{}]
	parks  *batch.Group[parking, []byte]

	desks *desks
	there int // who sits here; guarded by desks
}

// desks are those of an engine. A line sends one batch at a time, and while the server works on it this process has nothing to do, nor the
// server while callers go on. Callers who run executions themselves come back with one write after the other: where they are many, half of
// them write while the other half goes on, and each stays at its desk until its run is over, so that those who have shared a batch are those
// who come back for the next. With few a batch would be too small to be worth its statement, so they share the first desk. What workers run,
// and what is started for them, is at the first: of that there is always enough for large batches, which cost less.
type desks struct {
	mu  sync.Mutex
	all [2]desk
}

// worthTwo is how many callers have to be there for a second desk.
const worthTwo = 24

// furnish makes an engine's desks.
func (e *Engine) furnish() {
	for i := range e.desks.all {
		d := &e.desks.all[i]
		line := &batch.Line{}
		d.desks = &e.desks
		// Where a batch comes in the order in which its rows are locked, one comparison tells that all of it counts.
		d.ends = &batch.Group[lastWrite, finished]{
			Line: line, Send: e.finishSeveral, Compare: func(a, b lastWrite) int { return strings.Compare(a.id, b.id) },
		}
		d.points = &batch.Group[point, struct{}]{
			Line: line, Send: e.recordSeveral, Compare: func(a, b point) int { return strings.Compare(a.id, b.id) },
		}
		// An event without an id, or a start, that was sent twice would count twice, and a wait that was begun twice would look
		// stale: they are sent again only where the database has said no.
		d.events = &batch.Group[occurrence, Delivered]{Line: line, Send: e.handSeveral, Unchanged: postgres.Unchanged}
		d.starts = &batch.Group[opening, Execution]{Line: line, Send: e.startSeveral, Unchanged: postgres.Unchanged}
		d.parks = &batch.Group[parking, []byte]{Line: line, Send: e.parkSeveral, Unchanged: postgres.Unchanged}
	}
}

// first is the desk of whoever does not sit at one.
func (d *desks) first() *desk { return &d.all[0] }

// sit comes to a desk: the first, unless there are enough for two; then the one where fewer are.
func (d *desks) sit() *desk {
	d.mu.Lock()
	defer d.mu.Unlock()
	first, second := &d.all[0], &d.all[1]
	at := first
	if first.there+second.there >= worthTwo && second.there < first.there {
		at = second
	}
	at.there++
	return at
}

// rise leaves it.
func (d *desk) rise() {
	d.desks.mu.Lock()
	defer d.desks.mu.Unlock()
	d.there--
}
