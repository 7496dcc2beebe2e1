package engineroom

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// maxPendingCount bounds the counted items: "99+".
const maxPendingCount = 99

// pendingCounts counts approvals and requests of executions that wait for a person. Titles, icons and notifications
// show the count.
type pendingCounts struct {
	Approvals, Requests int64
	Newest, Skill       string // id and skill of the newest approval; empty for none
}

// Total is the text of a title: 3, or 99+; empty for none.
func (w pendingCounts) Total() string { return pendingText(w.Approvals + w.Requests) }

// Asked is the text beside the link to the approvals.
func (w pendingCounts) Asked() string { return pendingText(w.Approvals) }

func pendingText(n int64) string {
	if n == 0 {
		return ""
	}
	return capped(n, maxPendingCount)
}

// pendingTTL is the longest age of a shared count, unless pollChanges detects a change earlier. Topics that are due
// together thus share one count.
const pendingTTL = 200 * time.Millisecond

// countPending counts the items that wait for a person.
func (room *Room) countPending(ctx context.Context) (pendingCounts, error) {
	return room.pendingCache.read(pendingTTL, func() (pendingCounts, error) { return room.readPending(ctx) })
}

func (room *Room) readPending(ctx context.Context) (w pendingCounts, err error) {
	err = room.Read.QueryRow(ctx, `
		with pending as (
		 select a.id, a.skill_name from agent_approvals a
		  where a.status = 'pending' and a.expires_at > clock_timestamp()
		  order by a.status, a.expires_at desc limit @limit::int + 1)
		select (select count(*) from pending),
		       (select count(*) from (select from agent_requests r where r.status = 'pending'
		         order by r.id limit @limit::int + 1) x),
		       coalesce(n.id::text, ''), coalesce(left(n.skill_name, 100), '')
		  from (select) one left join (select p.id, p.skill_name from pending p order by p.id desc limit 1) n on true`,
		postgres.Strict{"limit": maxPendingCount}).Scan(&w.Approvals, &w.Requests, &w.Newest, &w.Skill)
	if err != nil {
		return w, fmt.Errorf("count pending approvals and requests: %w", err)
	}
	return w, nil
}

// withPendingCounts adds the part to every page, so each title is live.
func (room *Room) withPendingCounts(pages []page) []page {
	load := func(ctx context.Context, _ *pageRequest) (any, error) { return room.countPending(ctx) }
	for i := range pages {
		one := part{
			name: "waits", interval: time.Second, refreshOnActivity: true, triggers: asksChanged,
			sharedTemplate: true, load: load,
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// pausePart shows on every page that autonomous work is paused, with the action to resume. Without a pause, only the
// overview has content: the action to pause.
func (room *Room) pausePart() part {
	return part{
		name: "pause", interval: 2 * time.Second, refreshOnActivity: true, triggers: asksChanged, sharedTemplate: true,
		load: room.paused,
	}
}

// withPause adds pausePart to every page. A page without other live parts opens no stream for pausePart.
func (room *Room) withPause(pages []page) []page {
	for i := range pages {
		one := room.pausePart()
		if len(pages[i].liveParts()) == 0 {
			one.interval = 0
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// pausedState is the pause, and whether the page offers the action to pause.
type pausedState struct {
	executions.Pause
	Overview bool
}

// paused reads the pause.
func (room *Room) paused(ctx context.Context, req *pageRequest) (any, error) {
	path, _, _ := strings.Cut(req.URL, "?")
	p, err := executions.CurrentPause(ctx, room.Read)
	return pausedState{p, path == "/"}, err
}

// withReplica adds the replica's lag to every page. A page without other live parts opens no stream for the lag.
func (room *Room) withReplica(pages []page) []page {
	if !room.Read.Configured() {
		return pages
	}
	for i := range pages {
		one := part{name: "replica", sharedTemplate: true, load: sourceOf}
		if len(pages[i].liveParts()) > 0 {
			one.interval = 2 * time.Second
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// sourceOf returns the source of the page.
func sourceOf(ctx context.Context, _ *pageRequest) (any, error) { return replica.From(ctx), nil }
