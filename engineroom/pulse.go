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

// pulse polls for changes, once for all topics, and notifies them.
func (h *hub) pulse(ctx context.Context) {
	tick := time.NewTicker(h.pollInterval)
	defer tick.Stop()
	var last [2]pulse
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := h.readPulse(ctx)
		if ctx.Err() != nil {
			return
		}
		h.away.Store(now[0].away)
		if changed := now[0].since(last[0]) | now[1].since(last[1]); changed != 0 {
			if changed&failureChanged != 0 {
				h.failures.forget()
			}
			if changed&asksChanged != 0 {
				h.room.waits.forget()
			}
			h.notifyTopics(changed)
			last = now
		}
	}
}

// readPulse reads the pulse of the database that pages read. If that is a replica, the second pulse is the primary's,
// because some topics read from the primary.
func (h *hub) readPulse(ctx context.Context) (now [2]pulse) {
	ctx, cancel := context.WithTimeout(ctx, h.pulseLimit)
	defer cancel()
	read := h.room.Read
	reading, from := read.Choose(ctx, false)
	failing := h.failing.Load()
	if now[0] = pulseOf(reading, read, failing); from.Replica() {
		now[1] = pulseOf(ctx, read, failing)
	}
	return now
}

// pulse has a text for each kind of change, and the time of the newest failure. A change alters the text.
type pulse struct {
	log, open, runs, asks string
	failing               string // the newest runs and calls of failing flows and skills
	failure               time.Time
	away                  bool // an outage is a change: parts show the failure, and later the recovery
}

// since returns the changes since an earlier pulse.
func (p pulse) since(last pulse) (c changes) {
	if p.away != last.away {
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
		{p.failure.After(last.failure) || p.failing != last.failing, failureChanged},
	} {
		if one.is {
			c |= one.kind
		}
	}
	return c
}

//go:embed pulse.sql
var pulseSQL string

//go:embed pulse_failing.sql
var pulseFailingSQL string

// pulseOf reads a pulse. It searches for failures among the newest activities and failed executions. The next read of
// the shared failures finds a late failure of an older execution.
func pulseOf(ctx context.Context, db postgres.DB, failing *monitor.Failing) (p pulse) {
	err := db.QueryRow(ctx, pulseSQL).Scan(&p.log, &p.open, &p.runs, &p.asks, &p.failure)
	if err != nil {
		return pulse{away: true}
	}
	if failing == nil || len(failing.Flows)+len(failing.Calls) == 0 {
		return p
	}
	newest, err := postgres.RowsGeneric[struct{ Newest string }](ctx, db, "read newest runs of failing flows",
		pulseFailingSQL, postgres.Strict{"flows": failing.Flows, "calls": failing.Calls})
	if err != nil {
		return pulse{away: true}
	}
	for _, n := range newest {
		p.failing += n.Newest + "\n"
	}
	return p
}

// notifyTopics makes parts due in all topics if they depend on a change.
func (h *hub) notifyTopics(changed changes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.topics {
		t.moved(changed)
	}
}
