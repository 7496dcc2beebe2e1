package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// laneWaiter waits for a lane.
type laneWaiter struct {
	Lane, Owner string
	ExecutionID *string
	Place       int64      // in the queue; 0 for an execution that asks again once the lane is free
	Ticket      int64      // 0 for such an execution
	Since       time.Time  // since when it waits
	Until       *time.Time // when such an execution gives up
}

// laneWaiters reads who waits, in the order in which they are served. Processes that wait stand in a queue; executions that
// wait without a process are woken by the release and ask again.
func (room *Room) laneWaiters(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(lanesWanted)
	rows, err := room.Read.Query(ctx, `
		select * from (
		(select w.lane, w.owner, substring(w.owner from '^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})#') as execution_id,
		        row_number() over (partition by w.lane order by w.ticket) as place, w.ticket, w.since, null::timestamptz as until
		   from agent_lock_waiters w where w.expires_at > now() and (@lane = '' or w.lane = @lane)
		  order by w.lane, w.ticket limit @most + 1)
		union all
		(select coalesce(e.waiting_key, ''), left(e.flow, 200), e.id::text, 0, 0, e.updated_at, e.waiting_until
		   from agent_executions e where e.status = 'waiting' and e.waiting_for = 'lane' and (@lane = '' or e.waiting_key = @lane)
		  order by e.waiting_key, e.id limit @most + 1)) q
		 order by q.lane, q.place = 0, q.ticket, q.execution_id limit @most + 1`,
		freshPlan, postgres.Strict{"most": mostLanes, "lane": want.Lane})
	if err != nil {
		return nil, fmt.Errorf("list waiters: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[laneWaiter])
	if err != nil {
		return nil, fmt.Errorf("list waiters: %w", err)
	}
	list, more := onPage(all, mostLanes)
	return map[string]any{"Waiters": list, "More": more}, nil
}

// laneLoan is a lane that a parent lends to the child it waits for.
type laneLoan struct {
	Lane, Lender, Borrower string
	Depth                  int
	LentAt                 time.Time
}

func (room *Room) laneLoans(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(lanesWanted)
	rows, err := room.Read.Query(ctx, `
		select n.lane, n.lender::text, n.borrower::text, n.depth, n.lent_at
		  from agent_lock_loans n where @lane = '' or n.lane = @lane order by n.lane, n.depth limit @most + 1`,
		freshPlan, postgres.Strict{"most": mostLanes, "lane": want.Lane})
	if err != nil {
		return nil, fmt.Errorf("list loans: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[laneLoan])
	if err != nil {
		return nil, fmt.Errorf("list loans: %w", err)
	}
	list, more := onPage(all, mostLanes)
	return map[string]any{"Loans": list, "More": more}, nil
}

// mostLooked is how many held lanes are looked at for an end that has passed: no index has them by their end, because every
// renewal would have to change it.
const mostLooked = 1000

// staleLane is a lane whose holder let it expire, and that nobody has taken since.
type staleLane struct {
	Lane, LockedBy string
	ExecutionID    *string
	ExpiredAt      time.Time
}

// stale reads what is left of holders that are gone: it is taken over by itself, and to see it stay means that nobody sweeps.
func (room *Room) stale(ctx context.Context, _ *visit) (any, error) {
	claims, err := collectClaims(room.Read.Query(ctx, `
		select `+claimColumns+`
		  from (select * from agent_workers x where x.expires_at <= now() order by x.expires_at desc limit @most) w
		 cross join lateral (
		    select * from agent_executions x where x.claimed_by = w.id and x.claimed_by is not null limit @most + 1) e
		 order by w.expires_at desc, e.id limit @most + 1`, freshPlan, postgres.Strict{"most": mostClaims}))
	if err != nil {
		return nil, err
	}
	rows, err := room.Read.Query(ctx, `
		select l.lane, l.locked_by, l.execution_id::text, l.expires_at as expired_at
		  from (select * from agent_locks x where x.locked_by <> '' order by x.lane limit @looked) l
		 where l.expires_at <= now() order by l.lane limit @most + 1`,
		freshPlan, postgres.Strict{"most": mostClaims, "looked": mostLooked})
	if err != nil {
		return nil, fmt.Errorf("list stale lanes: %w", err)
	}
	lanes, err := pgx.CollectRows(rows, pgx.RowToStructByName[staleLane])
	if err != nil {
		return nil, fmt.Errorf("list stale lanes: %w", err)
	}
	shownClaims, moreClaims := onPage(claims, mostClaims)
	shownLanes, moreLanes := onPage(lanes, mostClaims)
	return map[string]any{"Claims": shownClaims, "Lanes": shownLanes, "More": moreClaims || moreLanes, "Looked": int64(mostLooked)}, nil
}
