package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// withReplica gives every page the part that says how far behind it is, where there is a replica. A page on which
// nothing else changes by itself is not watched for it.
func (room *Room) withReplica(pages []page) []page {
	if !room.Read.Configured() {
		return pages
	}
	for i := range pages {
		one := part{name: "replica", shared: true, load: sourceOf}
		if len(pages[i].live()) > 0 {
			one.every = 2 * time.Second
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// sourceOf is where the page is read from.
func sourceOf(ctx context.Context, _ *visit) (any, error) { return replica.From(ctx), nil }
