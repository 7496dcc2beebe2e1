package engineroom

import (
	"context"
	_ "embed"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// changes is a set of kinds of changes.
type changes uint8

const (
	logChanged     changes = 1 << iota // the log has a new activity
	openChanged                        // an activity began or ended
	runsChanged                        // an execution began, was claimed, resumed, or ended
	failureChanged                     // an activity or an execution failed, or ran again after failures
	asksChanged                        // an approval, a request or a pause began or ended
	anyChange      = 1<<iota - 1
)

// pollChanges polls for changes, once for all topics, and notifies them.
func (h *hub) pollChanges(ctx context.Context) {
	tick := time.NewTicker(h.pollInterval)
	defer tick.Stop()
	var last [2]changeSnapshot
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := h.readSnapshots(ctx)
		if ctx.Err() != nil {
			return
		}
		h.databaseDown.Store(now[0].databaseDown)
		if changed := now[0].changedSince(last[0]) | now[1].changedSince(last[1]); changed != 0 {
			if changed&failureChanged != 0 {
				h.failures.invalidate()
			}
			if changed&asksChanged != 0 {
				h.room.pendingCache.invalidate()
			}
			h.notifyTopics(changed)
			last = now
		}
	}
}

// readSnapshots reads the snapshot of the database that pages read. If that is a replica, it also reads a snapshot of
// the primary, because some topics read from the primary.
func (h *hub) readSnapshots(ctx context.Context) (now [2]changeSnapshot) {
	ctx, cancel := context.WithTimeout(ctx, h.pollTimeout)
	defer cancel()
	read := h.room.Read
	readCtx, db := read.Choose(ctx, false)
	failing := h.lastFailing.Load()
	if now[0] = readSnapshot(readCtx, read, failing); db.Replica() {
		now[1] = readSnapshot(ctx, read, failing)
	}
	return now
}

// changeSnapshot has a text for each kind of change, and the time of the newest failure. A change alters the text.
type changeSnapshot struct {
	log, open, runs, asks string
	failing               string // the newest runs and calls of failing flows and skills
	lastFailure           time.Time
	databaseDown          bool // an outage is a change: parts show the failure, and later the recovery
}

// changedSince returns the changes since an earlier snapshot.
func (p changeSnapshot) changedSince(last changeSnapshot) (c changes) {
	if p.databaseDown != last.databaseDown {
		return anyChange
	}
	for _, one := range []struct {
		is   bool
		kind changes
	}{
		{p.log != last.log, logChanged},
		{p.open != last.open, openChanged},
		{p.runs != last.runs, runsChanged},
		{p.asks != last.asks, asksChanged},
		{p.lastFailure.After(last.lastFailure) || p.failing != last.failing, failureChanged},
	} {
		if one.is {
			c |= one.kind
		}
	}
	return c
}

//go:embed snapshot.sql
var snapshotSQL string

//go:embed snapshot_failing.sql
var failingSnapshotSQL string

// readSnapshot reads a snapshot. It searches for failures among the newest activities and failed executions. The next
// read of the shared failures finds a late failure of an older execution.
func readSnapshot(ctx context.Context, db postgres.DB, failing *monitor.Failing) (p changeSnapshot) {
	err := db.QueryRow(ctx, snapshotSQL).Scan(&p.log, &p.open, &p.runs, &p.asks, &p.lastFailure)
	if err != nil {
		return changeSnapshot{databaseDown: true}
	}
	if failing == nil || len(failing.Flows)+len(failing.Calls) == 0 {
		return p
	}
	newest, err := postgres.RowsGeneric[struct{ Newest string }](ctx, db, "read newest runs of failing flows",
		failingSnapshotSQL, postgres.Strict{"flows": failing.Flows, "calls": failing.Calls})
	if err != nil {
		return changeSnapshot{databaseDown: true}
	}
	for _, n := range newest {
		p.failing += n.Newest + "\n"
	}
	return p
}

// notifyTopics makes the parts of all topics that depend on the changes due.
func (h *hub) notifyTopics(changed changes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.topics {
		t.markChanged(changed)
	}
}
