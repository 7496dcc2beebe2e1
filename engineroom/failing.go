package engineroom

import (
	"context"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/monitor"
)

// maxFailingShown bounds the groups of failures.
const maxFailingShown = 6

// pageCache holds data that the parts of a page share.
type pageCache struct {
	failures cached[monitor.Failures]
	hours    cached[hourChart]
}

// failuresTTL is the cache time of failures. The parts of one page, or of one refresh, share a read.
const failuresTTL = 250 * time.Millisecond

// failures reads the failures, or returns the failures that another part has just read. Streams share one read until
// pollChanges detects a failure or a recovery.
func (room *Room) failures(ctx context.Context, req *pageRequest) (monitor.Failures, error) {
	read := func() (monitor.Failures, error) { return monitor.ReadFailures(ctx, room.Read) }
	switch {
	case req.streaming:
		return room.hub.failures.read(sumsInterval, func() (monitor.Failures, error) {
			value, err := read()
			if err == nil {
				room.hub.lastFailing.Store(value.Failing())
			}
			return value, err
		})
	case req.cache != nil:
		return req.cache.failures.read(failuresTTL, read)
	}
	return read()
}

// failingNow returns the groups of failures that match the selected agent: those that still fail, and those that have
// recovered.
func (room *Room) failingNow(ctx context.Context, req *pageRequest) (any, error) {
	f, err := room.failures(ctx, req)
	if err != nil {
		return nil, err
	}
	isShown, err := room.agentFilter(ctx, req)
	if err != nil {
		return nil, err
	}
	groups := f.Groups(isShown, room.Unforkable())
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
