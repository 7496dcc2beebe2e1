package engineroom

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// maxFailingShown bounds the groups of failures.
const maxFailingShown = 6

// failureMemo keeps the failures for the parts of a page.
type failureMemo struct {
	mu sync.Mutex
	monitor.Failures
	at time.Time
}

// memoLasts is how long failures are kept: the parts of one page, or of one refresh of it, share a read.
const memoLasts = 250 * time.Millisecond

// readFailures reads the failures, or returns those that another part has just read.
func (v *visit) readFailures(ctx context.Context, db postgres.DB) (monitor.Failures, error) {
	if v.memo == nil {
		return monitor.ReadFailures(ctx, db)
	}
	v.memo.mu.Lock()
	defer v.memo.mu.Unlock()
	if time.Since(v.memo.at) < memoLasts {
		return v.memo.Failures, nil
	}
	got, err := monitor.ReadFailures(ctx, db)
	if err == nil {
		v.memo.Failures, v.memo.at = got, time.Now()
	}
	return got, err
}

// failingNow is the panel of what fails.
func (room *Room) failingNow(ctx context.Context, v *visit) (any, error) {
	f, err := v.readFailures(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	concerns, err := room.concerned(ctx, v)
	if err != nil {
		return nil, err
	}
	groups := f.Groups(concerns)
	failing := slices.IndexFunc(groups, func(g monitor.Group) bool { return !g.Failing })
	if failing < 0 {
		failing = len(groups)
	}
	now, recovered := groups[:failing], groups[failing:]
	return map[string]any{
		"Now": now[:min(len(now), maxFailingShown)], "All": len(now),
		"Recovered": recovered[:min(len(recovered), maxFailingShown)], "AllRecovered": len(recovered),
	}, nil
}
