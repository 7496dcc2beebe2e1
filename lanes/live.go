package lanes

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// LiveLane is a lane that is held now, or an execution that is run now (its lane is "execution:{id}").
type LiveLane struct {
	Lane         string   `json:"lane"`
	LockedBy     string   `json:"locked_by"`
	ExecutionID  *string  `json:"execution_id"`
	TraceID      *string  `json:"trace_id"`
	FencingToken int64    `json:"fencing_token"`
	HeldFor      float64  `json:"held_for"`   // seconds
	ExpiresIn    *float64 `json:"expires_in"` // seconds; null when parked
	Parked       bool     `json:"parked"`     // kept by an execution that waits, without an end
}

// Live returns the view agent_locks_live, by lane.
func Live(ctx context.Context, db postgres.DB) ([]LiveLane, error) {
	rows, err := db.Query(ctx, `
		select l.lane, l.locked_by, l.execution_id::text as execution_id, l.trace_id, l.fencing_token,
		       extract(epoch from l.held_for)::float8 as held_for,
		       extract(epoch from l.expires_in)::float8 as expires_in, l.parked
		  from agent_locks_live l order by l.lane`)
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	live, err := pgx.CollectRows(rows, pgx.RowToStructByName[LiveLane])
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	return live, nil
}

// Held reports whether somebody holds lane.
func Held(ctx context.Context, db postgres.DB, lane string) (bool, error) {
	var held bool
	err := db.QueryRow(ctx, `select is_agent_lock_held(@lane)`, postgres.Strict{"lane": lane}).Scan(&held)
	if err != nil {
		return false, fmt.Errorf("look at %s: %w", lane, err)
	}
	return held, nil
}

// Break takes lane away from its holder, whose token is void from then on, and records that with the
// reason as an activity under the holder's trace. It waits for a fenced write that is under way, at most
// 30 seconds. False when nobody holds the lane; ErrInvalid without a reason.
func Break(ctx context.Context, db postgres.DB, lane, reason string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, breakLimit)
	defer cancel()
	var broken bool
	err := db.QueryRow(ctx, `select break_agent_lock(@lane, @reason)`,
		postgres.Strict{"lane": lane, "reason": reason}).Scan(&broken)
	if refused(err) {
		return false, invalid("break", lane, err)
	}
	if err != nil {
		return false, fmt.Errorf("break %s: %w", lane, err)
	}
	return broken, nil
}

const breakLimit = 30 * time.Second
