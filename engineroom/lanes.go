package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// mostLanes is how many lanes the page shows.
const mostLanes = 200

// lanesPage shows who holds which lane, and takes one away.
func (room *Room) lanesPage() page {
	return page{
		path: "/lanes", name: "lanes", nav: "Lanes", title: "Lanes",
		parts: []part{{name: "held", every: time.Second, load: room.heldLanes}},
	}
}

// heldLane is a lane that is held now.
type heldLane struct {
	Lane, LockedBy string
	ExecutionID    *string
	TraceID        *string
	FencingToken   int64
	LockedAt       time.Time
	ExpiresAt      *time.Time // nil when parked
	Waiters        int64
}

// heldLanes reads the lanes that are held, the newest grant first.
func (room *Room) heldLanes(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Pool.Query(ctx, `
		select l.lane, l.locked_by, l.execution_id::text, coalesce(e.trace_id,
		         substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}')) as trace_id,
		       l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       (select count(*) from agent_lock_waiters w where w.lane = l.lane) as waiters
		  from agent_locks l left join agent_executions e on e.id = l.execution_id
		 where l.locked_by <> '' and l.expires_at > clock_timestamp()
		 order by l.fencing_token desc limit @most + 1`, postgres.Strict{"most": mostLanes})
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[heldLane])
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	more := len(list) > mostLanes
	return map[string]any{"Lanes": list[:min(len(list), mostLanes)], "More": more}, nil
}
