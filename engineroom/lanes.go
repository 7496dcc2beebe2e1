package engineroom

import (
	"context"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

const (
	// maxLanes bounds the lanes, waiters or loans of a part.
	maxLanes = 200
	// maxClaims bounds the running executions on a page.
	maxClaims = 50
	// maxLane bounds a lane's name, in bytes.
	maxLane = 255 * utf8.UTFMax
)

// lanesPage shows the holders, waiters and loans of lanes, and can release one.
func (room *Room) lanesPage() page {
	return page{
		path: "/lanes", name: "lanes", navLabel: "Lanes", title: "Lanes",
		open: room.openLanes,
		parts: []part{
			room.filtersPart("/lanes", "lane"),
			{name: "held", interval: time.Second, load: room.heldLanes},
			{name: "waiters", interval: time.Second, load: room.laneWaiters},
			{name: "loans", interval: time.Second, load: room.laneLoans},
			{name: "claims", interval: time.Second, load: room.claims},
			{name: "workers", interval: 2 * time.Second, load: room.workers},
			{name: "stale", interval: 5 * time.Second, load: room.stale},
		},
	}
}

// laneFilter holds the parameters of the page.
type laneFilter struct {
	Lane   string // only lanes whose names contain this text
	lanes  []string
	After  string // the last lane of the previous page
	Before string // the last execution of the previous page
}

func (room *Room) openLanes(ctx context.Context, req *pageRequest) (string, error) {
	filter := laneFilter{Lane: req.Query.Get("lane"), After: req.Query.Get("after")}
	for _, name := range []string{filter.Lane, filter.After} {
		if len(name) > maxLane || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
			return "", problem.BadParameter("%.60q is not the name of a lane: it has 1 to 255 printable characters", name)
		}
	}
	var err error
	if filter.Before, err = req.uuidFilter("before"); err != nil {
		return "", err
	}
	filter.lanes, err = room.lanesFor(ctx, req, filter.Lane)
	req.Subject = filter
	return "Lanes", err
}

// lanesFor returns the lanes whose names contain a text, or only the lane with exactly that name; nil without a text.
// It searches the first maxSearched lanes by name. Of more than maxNamesLike matches it returns the first, and records
// in the request that there are more. Without a match it returns the text.
func (room *Room) lanesFor(ctx context.Context, req *pageRequest, text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	lanes, err := postgres.Values[string](ctx, room.Read, "find lanes", `
		select x.lane from (select l.lane from agent_locks l order by l.lane limit @window) x
		 where not exists (select from agent_locks o where o.lane = @text) and x.lane ilike @like
		 limit @limit + 1`, customPlan,
		postgres.Strict{"text": text, "like": containsPattern(text), "window": maxSearched, "limit": maxNamesLike})
	if err != nil || len(lanes) == 0 {
		return []string{text}, err
	}
	lanes, more := firstN(lanes, maxNamesLike)
	if more {
		req.cappedFilters = append(req.cappedFilters, "lane")
	}
	return lanes, nil
}

// heldLane is a held lane.
type heldLane struct {
	lock           // with at most maxLanes + 1 waiters
	Queued int64   // queued messages of a thread, at most maxLanes + 1
	Lender *string // the execution that lent the lane
}

// Thread returns the id of the thread that has the lane.
func (l heldLane) Thread() string { return strings.TrimPrefix(l.Lane, "thread:") }

// QueuedMessages formats Queued.
func (l heldLane) QueuedMessages() string { return capped(l.Queued, maxLanes) }

// Waiting formats Waiters.
func (l heldLane) Waiting() string { return capped(l.Waiters, maxLanes) }

// heldLanes reads the held lanes by name, in index order.
func (room *Room) heldLanes(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(laneFilter)
	all, err := postgres.Rows[heldLane](ctx, room.Read, "list lanes", `
		select `+lockColumns+`, (select count(*) from (
		          (select from agent_lock_waiters w where w.lane = l.lane and w.expires_at > now() limit @limit + 1) union all
		          (select from agent_executions x where x.status = 'waiting' and x.waiting_for = 'lane'
		            and x.waiting_key = l.lane limit @limit + 1)
		          limit @limit + 1) q) as waiters,
		       (select count(*) from (select from agent_messages m where l.lane like 'thread:%'
		         and m.thread_id = substr(l.lane, 8) and m.status = 'queued' limit @limit + 1) q) as queued,
		       (select n.lender::text from agent_lock_loans n where n.lane = l.lane order by n.depth desc limit 1) as lender
		  from agent_locks l left join agent_executions e on e.id = l.execution_id
		 where l.locked_by <> '' and l.expires_at > now() and l.lane > @after
		   and (@lanes::text[] is null or l.lane = any (@lanes))
		 order by l.lane limit @limit + 1`,
		customPlan, postgres.Strict{"limit": maxLanes, "after": filter.After, "lanes": filter.lanes})
	if err != nil {
		return nil, err
	}
	list, more := firstN(all, maxLanes)
	next := ""
	if more {
		next = req.withParam("after", list[len(list)-1].Lane)
	}
	return map[string]any{"Lanes": list, "Want": filter, "Next": next}, nil
}

// claim is a running execution, or an execution of a dead process.
type claim struct {
	ExecutionID, Flow, Surface, TraceID, Worker, Kind string
	Claim                                             int64
	Since, ExpiresAt                                  time.Time
}

const claimColumns = `e.id::text as execution_id, e.flow, e.surface, e.trace_id,
	case when w.name = '' then w.id::text else left(w.name, 200) end as worker,
	w.kind, e.claim, e.updated_at as since, w.expires_at`

// claims reads the running executions, newest first.
func (room *Room) claims(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(laneFilter)
	all, err := postgres.Rows[claim](ctx, room.Read, "list claims", `
		select `+claimColumns+`
		  from agent_executions e join agent_workers w on w.id = e.claimed_by
		 where e.status = 'running' and e.claimed_by is not null and w.expires_at > now()
		   and (@before = '' or e.id < nullif(@before, '')::uuid)
		 order by e.id desc limit @limit + 1`, customPlan, postgres.Strict{"before": filter.Before, "limit": maxClaims})
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, all, maxClaims, func(c claim) string { return c.ExecutionID })
	return map[string]any{"Claims": list, "Links": links}, nil
}

// laneWaiter is a process or an execution that waits for a lane.
type laneWaiter struct {
	Lane, Owner string
	ExecutionID *string
	Place       int64      // in the queue; 0 for an execution that retries when the lane is free
	Ticket      int64      // 0 for such an execution
	Since       time.Time  // start of the wait
	Until       *time.Time // deadline of such an execution
}

// laneWaiters reads the waiters in the order of service. Waiting processes form a queue. A release wakes waiting
// executions, which retry.
func (room *Room) laneWaiters(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(laneFilter)
	all, err := postgres.Rows[laneWaiter](ctx, room.Read, "list waiters", `
		select * from (
		(select w.lane, w.owner, substring(w.owner from '^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})#') as execution_id,
		        row_number() over (partition by w.lane order by w.ticket) as place, w.ticket, w.since,
		        null::timestamptz as until
		   from agent_lock_waiters w where w.expires_at > now() and (@lanes::text[] is null or w.lane = any (@lanes))
		  order by w.lane, w.ticket limit @limit + 1)
		union all
		(select coalesce(e.waiting_key, ''), left(e.flow, 200), e.id::text, 0, 0, e.updated_at, e.waiting_until
		   from agent_executions e where e.status = 'waiting' and e.waiting_for = 'lane'
		     and (@lanes::text[] is null or e.waiting_key = any (@lanes))
		  order by e.waiting_key, e.id limit @limit + 1)) q
		 order by q.lane, q.place = 0, q.ticket, q.execution_id limit @limit + 1`,
		customPlan, postgres.Strict{"limit": maxLanes, "lanes": filter.lanes})
	if err != nil {
		return nil, err
	}
	list, more := firstN(all, maxLanes)
	return map[string]any{"Waiters": list, "More": more}, nil
}

// laneLoan is a lane that a parent lends to its awaited child.
type laneLoan struct {
	Lane, Lender, Borrower string
	Depth                  int
	LentAt                 time.Time
}

func (room *Room) laneLoans(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(laneFilter)
	all, err := postgres.Rows[laneLoan](ctx, room.Read, "list loans", `
		select n.lane, n.lender::text, n.borrower::text, n.depth, n.lent_at
		  from agent_lock_loans n where @lanes::text[] is null or n.lane = any (@lanes)
		 order by n.lane, n.depth limit @limit + 1`,
		customPlan, postgres.Strict{"limit": maxLanes, "lanes": filter.lanes})
	if err != nil {
		return nil, err
	}
	list, more := firstN(all, maxLanes)
	return map[string]any{"Loans": list, "More": more}, nil
}

// maxExpiredSearch bounds the held lanes searched for an expired lease. No index covers the expiry, because every
// renewal would have to update the index.
const maxExpiredSearch = 1000

// staleLane is a lane with an expired lease and no new holder.
type staleLane struct {
	Lane, LockedBy string
	ExecutionID    *string
	ExpiredAt      time.Time
}

// stale reads the expired lanes. A sweep removes such lanes, so a lane that stays here means that no sweep runs.
func (room *Room) stale(ctx context.Context, _ *pageRequest) (any, error) {
	claims, err := postgres.Rows[claim](ctx, room.Read, "list claims", `
		select `+claimColumns+`
		  from (select * from agent_workers x where x.expires_at <= now() order by x.expires_at desc limit @limit) w
		 cross join lateral (
		    select * from agent_executions x where x.claimed_by = w.id and x.claimed_by is not null limit @limit + 1) e
		 order by w.expires_at desc, e.id limit @limit + 1`, customPlan, postgres.Strict{"limit": maxClaims})
	if err != nil {
		return nil, err
	}
	lanes, err := postgres.Rows[staleLane](ctx, room.Read, "list stale lanes", `
		select l.lane, l.locked_by, l.execution_id::text, l.expires_at as expired_at
		  from (select * from agent_locks x where x.locked_by <> '' order by x.lane limit @searched) l
		 where l.expires_at <= now() order by l.lane limit @limit + 1`,
		customPlan, postgres.Strict{"limit": maxClaims, "searched": maxExpiredSearch})
	if err != nil {
		return nil, err
	}
	shownClaims, moreClaims := firstN(claims, maxClaims)
	shownLanes, moreLanes := firstN(lanes, maxClaims)
	return map[string]any{
		"Claims": shownClaims, "Lanes": shownLanes, "More": moreClaims || moreLanes,
		"Looked": int64(maxExpiredSearch),
	}, nil
}
