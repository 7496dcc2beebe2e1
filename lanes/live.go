package lanes

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// LiveLane is a held lane, or a running execution (its lane is "execution:{id}").
type LiveLane struct {
	Lane         string   `json:"lane"`
	LockedBy     string   `json:"locked_by"`
	ExecutionID  *string  `json:"execution_id"`
	TraceID      *string  `json:"trace_id"`
	FencingToken int64    `json:"fencing_token"`
	HeldFor      float64  `json:"held_for"`   // seconds
	ExpiresIn    *float64 `json:"expires_in"` // seconds; null when parked
	Parked       bool     `json:"parked"`     // held by a waiting execution, without an expiry
}

const selectLive = `select l.lane, l.locked_by, l.execution_id::text as execution_id, l.trace_id, l.fencing_token,
	extract(epoch from l.held_for)::float8 as held_for, extract(epoch from l.expires_in)::float8 as expires_in, l.parked
	from agent_locks_live l`

// Live reads the view agent_locks_live, sorted by lane.
func Live(ctx context.Context, db postgres.DB) ([]LiveLane, error) {
	rows, err := db.Query(ctx, selectLive+` order by l.lane`)
	return postgres.Collect(rows, err, "list lanes", pgx.RowToStructByName[LiveLane])
}

// Get reads one lane of the view agent_locks_live. It returns nil for a free lane.
func Get(ctx context.Context, db postgres.DB, lane string) (*LiveLane, error) {
	rows, err := db.Query(ctx, selectLive+` where l.lane = @lane`, postgres.Strict{"lane": lane})
	found, err := postgres.Collect(rows, err, "read lane "+lane, pgx.RowToAddrOfStructByName[LiveLane])
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil
}

// Holder returns the holder of a lane; nil for a free lane or while lanes are off.
func (k *Keeper) Holder(ctx context.Context, lane string) (*BusyError, error) {
	if !k.enabled {
		return nil, nil
	}
	rows, err := k.db.Query(ctx, `
		select l.locked_by, case when l.parked then null else l.expires_at end from agent_locks l
		 where l.lane = @lane and l.locked_by <> '' and l.expires_at > clock_timestamp()`, postgres.Strict{"lane": lane})
	type holder struct {
		Name string
		Ends *time.Time
	}
	holders, err := postgres.Collect(rows, err, "read lane "+lane, pgx.RowToStructByPos[holder])
	if err != nil || len(holders) == 0 {
		return nil, err
	}
	busy := &BusyError{Lane: lane, Holder: holders[0].Name}
	if holders[0].Ends != nil {
		busy.ExpiresAt = *holders[0].Ends
	}
	return busy, nil
}

// Held reports whether an owner holds lane.
func Held(ctx context.Context, db postgres.DB, lane string) (bool, error) {
	var held bool
	err := db.QueryRow(ctx, `select is_agent_lock_held(@lane)`, postgres.Strict{"lane": lane}).Scan(&held)
	if err != nil {
		return false, fmt.Errorf("read lane %s: %w", lane, err)
	}
	return held, nil
}
