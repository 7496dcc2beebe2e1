package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// halt describes work that does not run although its row still has the status running. Its execution waits or has
// ended, or its worker's lease is over. A sweep closes the rows of ended work later; pages do not wait for the sweep.
// The trace page finds the same states in its own rows: see markLost.
type halt struct {
	ID    string
	State string // stateWaiting, stateStopped or stateLost
	At    time.Time
	// Unclaimed reports that the execution waits for another worker, which continues its phases. Calls in flight are
	// lost.
	Unclaimed bool
}

// durationMS returns the duration of work that started at start, in milliseconds; nil for waiting work.
func (h halt) durationMS(start time.Time) *int64 {
	if h.State == stateWaiting {
		return nil
	}
	return new(max(0, h.At.Sub(start).Milliseconds()))
}

// haltRunning finds the halted rows among n rows. running returns a row's execution, or empty unless the row is
// running. update changes the row.
func haltRunning(
	ctx context.Context, db postgres.DB, n int, running func(i int) string, update func(i int, h halt),
) error {
	var ids []string
	for i := range n {
		if id := running(i); id != "" {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	halted, err := postgres.Rows[halt](ctx, db, "find halted work", `
		select e.id::text, case when e.completed_at is not null then @stopped::text
		            when e.status = 'waiting' then @waiting::text else @lost::text end as state,
		       coalesce(e.completed_at, w.expires_at, e.updated_at) as at,
		       e.completed_at is null and e.claimed_by is null as unclaimed
		  from agent_executions e left join agent_workers w on w.id = e.claimed_by
		 where e.id = any (@ids::text[]::uuid[])
		   and (e.completed_at is not null or e.claimed_by is null and e.status in ('pending', 'running', 'waiting')
		        or e.claimed_by is not null and coalesce(w.expires_at <= clock_timestamp(), true))`,
		postgres.Strict{"ids": ids, "stopped": stateStopped, "waiting": stateWaiting, "lost": stateLost})
	if err != nil {
		return err
	}
	halts := map[string]halt{}
	for _, h := range halted {
		halts[h.ID] = h
	}
	for i := range n {
		if h, ok := halts[running(i)]; ok {
			update(i, h)
		}
	}
	return nil
}

// lines lists activities, and marks running activities that have halted.
func (room *Room) lines(ctx context.Context, f activity.Filter) (activity.Listing, error) {
	feed, err := activity.Lines(ctx, room.Read, f)
	if err != nil {
		return feed, err
	}
	lines := feed.Lines
	return feed, haltRunning(ctx, room.Read, len(lines), func(i int) string {
		if l := lines[i]; l.Status == activity.Running && l.ExecutionID != nil {
			return *l.ExecutionID
		}
		return ""
	}, func(i int, h halt) {
		l := &lines[i]
		if h.Unclaimed && h.State != stateWaiting && l.Kind != activity.KindCall && l.Kind != activity.KindModel {
			return
		}
		l.Status, l.DurationMS = activity.Status(h.State), h.durationMS(l.CreatedAt)
	})
}
