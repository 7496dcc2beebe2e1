package engineroom

import (
	"context"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/monitor"
)

// maxFailingShown bounds the groups of failures.
const maxFailingShown = 6

// visitMemo holds data that the parts of a page share.
type visitMemo struct {
	failures recent[monitor.Failures]
	hours    recent[hourChart]
}

// memoLasts is the cache time of failures. The parts of one page, or of one refresh, share a read.
const memoLasts = 250 * time.Millisecond

// failures reads the failures, or returns the failures that another part has just read. Streams share one read until
// the pulse reports a failure or a recovery.
func (room *Room) failures(ctx context.Context, v *visit) (monitor.Failures, error) {
	read := func() (monitor.Failures, error) { return monitor.ReadFailures(ctx, room.Read) }
	switch {
	case v.live:
		return room.hub.failures.read(sumsEvery, func() (monitor.Failures, error) {
			got, err := read()
			if err == nil {
				room.hub.failing.Store(got.Failing())
			}
			return got, err
		})
	case v.memo != nil:
		return v.memo.failures.read(memoLasts, read)
	}
	return read()
}

// failingNow is the panel of failures.
func (room *Room) failingNow(ctx context.Context, v *visit) (any, error) {
	f, err := room.failures(ctx, v)
	if err != nil {
		return nil, err
	}
	concerns, err := room.concerned(ctx, v)
	if err != nil {
		return nil, err
	}
	groups := f.Groups(concerns, room.Unforkable())
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
