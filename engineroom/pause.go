package engineroom

import (
	"context"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
)

// pausePart says on every page that autonomous work is paused, with the lever that ends it. While it is not, the
// overview has the lever that pauses it, and the other pages have nothing there.
func (room *Room) pausePart() part {
	return part{name: "pause", every: 2 * time.Second, calm: true, shared: true, load: room.paused}
}

// withPause gives every page the part. A page on which nothing else changes by itself is not watched for it.
func (room *Room) withPause(pages []page) []page {
	for i := range pages {
		one := room.pausePart()
		if len(pages[i].live()) == 0 {
			one.every = 0
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// pausedState is the pause, and whether the page has room for the lever that begins one.
type pausedState struct {
	executions.Pause
	Overview bool
}

// paused reads whether autonomous work is paused.
func (room *Room) paused(ctx context.Context, v *visit) (any, error) {
	path, _, _ := strings.Cut(v.URL, "?")
	p, err := executions.CurrentPause(ctx, room.Read)
	return pausedState{p, path == "/"}, err
}
