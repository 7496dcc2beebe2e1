package lanes

import (
	"context"
	"errors"
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

const (
	// expireMost is how many of the lanes that are held one Expire looks at.
	expireMost = 1000
	// overdue is how long a lease has ended when Expire clears its lane.
	overdue = 10 * time.Second
)

// Expire clears lanes whose lease ended ten seconds ago or more and logs each, among some of those that are held:
// those after a name, which is empty for the first. It returns after which name to go on. Threads are cleared by who
// delivers their messages, and lent lanes are returned by [Prune]. It does nothing while lanes are off.
func (k *Keeper) Expire(ctx context.Context, after string) (next string, err error) {
	if !k.enabled {
		return "", nil
	}
	next, err = k.clearEnded(ctx, after)
	if err != nil {
		return "", fmt.Errorf("clear lanes that ended: %w", err)
	}
	return next, nil
}

func (k *Keeper) clearEnded(ctx context.Context, after string) (next string, err error) {
	_, err = k.db.Exec(ctx, `
		delete from agent_lock_waiters w where w.ctid = any (array(
		  select x.ctid from agent_lock_waiters x where x.expires_at < statement_timestamp() - interval '1 minute' for update skip locked))`)
	if err != nil {
		return "", err
	}
	// By name: an index by the end of the lease would be written by each renewal.
	rows, err := k.db.Query(ctx, `
		select l.lane from agent_locks l where l.locked_by <> '' and l.lane > @after order by l.lane limit @most`,
		postgres.Strict{"after": after, "most": expireMost})
	if err != nil {
		return "", err
	}
	held, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(held) == 0 {
		return "", err
	}
	rows, err = k.db.Query(ctx, `
		with ended as materialized (
		  select l.lane, l.locked_by, l.execution_id, l.expires_at from agent_locks l
		   where l.lane = any (@held::text[]) and l.locked_by <> '' and l.expires_at <= clock_timestamp() - make_interval(secs => @overdue)
		     and not l.parked and l.lane not like 'thread:%' and not exists (select from agent_lock_loans n where n.lane = l.lane)
		   order by l.lane for update of l skip locked)
		select e.lane, e.locked_by as holder, coalesce(e.execution_id::text, '') as execution_id,
		       extract(epoch from clock_timestamp() - e.expires_at)::float8 as ended_for
		  from ended e, lanekeeper.clear_agent_lock(e.lane, 'expired')`, postgres.Strict{"held": held, "overdue": overdue.Seconds()})
	if err != nil {
		return "", err
	}
	type expired struct {
		Lane, Holder, ExecutionID string
		EndedFor                  float64
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[expired])
	if err != nil {
		return "", err
	}
	for _, f := range found {
		k.log.WarnContext(ctx, "lane stale, clearing", "lane", f.Lane, "holder", f.Holder, "execution_id", f.ExecutionID, "age", age(f.EndedFor))
	}
	if len(held) < expireMost {
		return "", nil
	}
	return held[expireMost-1], nil
}

// Prune returns lanes whose borrower has let them expire, and forgets those that have been free for a time. Their
// tokens go on to grow, because the clock does.
func Prune(ctx context.Context, db postgres.DB, free time.Duration) error {
	if free < 0 {
		return fmt.Errorf("prune lanes that were free for %s: %w: give 0 or more", free, ErrInvalid)
	}
	_, first := db.Exec(ctx, `
		select count(lanekeeper.return_agent_lock(l.lane)) from (
		  select l.lane from agent_locks l
		   where l.expires_at <= statement_timestamp() and exists (select from agent_lock_loans n where n.lane = l.lane)
		   order by l.lane limit 1000 for update skip locked) l`)
	_, second := db.Exec(ctx, `
		with old as (
		  select l.lane, l.execution_id, l.fencing_token, l.locked_at, l.expires_at from agent_locks l
		   where l.expires_at < statement_timestamp() - make_interval(secs => @free)
		     and not exists (select from agent_lock_loans n where n.lane = l.lane)
		   order by l.lane limit 1000 for update skip locked),
		held as (
		  insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
		  select o.lane, o.execution_id, o.fencing_token, o.locked_at, o.expires_at, 'expired' from old o where o.execution_id is not null
		  on conflict do nothing)
		delete from agent_locks l using old where l.lane = old.lane`, postgres.Strict{"free": free.Seconds()})
	if err := errors.Join(first, second); err != nil {
		return fmt.Errorf("prune lanes: %w", err)
	}
	return nil
}

// age is a time in seconds as a log line has it.
func age(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond).String()
}

// Busy returns who holds a lane, or nil when nobody does, as while lanes are off.
func (k *Keeper) Busy(ctx context.Context, lane string) (*BusyError, error) {
	if !k.enabled {
		return nil, nil
	}
	rows, err := k.db.Query(ctx, `
		select l.locked_by, case when l.parked then null else l.expires_at end from agent_locks l
		 where l.lane = @lane and l.locked_by <> '' and l.expires_at > clock_timestamp()`, postgres.Strict{"lane": lane})
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", lane, err)
	}
	type holder struct {
		Name string
		Ends *time.Time
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[holder])
	if err != nil || len(found) == 0 {
		return nil, err
	}
	busy := &BusyError{Lane: lane, Holder: found[0].Name}
	if found[0].Ends != nil {
		busy.ExpiresAt = *found[0].Ends
	}
	return busy, nil
}

// Held reports whether somebody holds lane; nobody does while lanes are off.
func (k *Keeper) Held(ctx context.Context, lane string) (bool, error) {
	if !k.enabled {
		return false, nil
	}
	return Held(ctx, k.db, lane)
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
// reason as an activity under the holder's trace. The holder is notified (see [Keeper.Run]). It waits for a fenced
// write that is under way, about a second: then it is a *BlockedError, and the lane is as it was. False when nobody
// holds the lane; ErrInvalid without a reason.
func Break(ctx context.Context, db postgres.DB, lane, reason string) (bool, error) {
	var broken bool
	err := db.QueryRow(ctx, `select break_agent_lock(@lane, @reason)`,
		postgres.Strict{"lane": lane, "reason": reason}).Scan(&broken)
	if refused(err) {
		return false, invalid("break", lane, err)
	}
	if err != nil {
		return false, fmt.Errorf("break %s: %w", lane, blocked(err))
	}
	return broken, nil
}
