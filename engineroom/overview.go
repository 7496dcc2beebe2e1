package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// overviewPage answers on one screen: what the agent is doing, whether it works, what it cost, and what needs a
// person. What moves by the second is cheap to read; what is summed up is calm.
func (room *Room) overviewPage() page {
	return page{
		path: "/", name: "overview", nav: "Overview", title: "Overview", open: askActivity,
		parts: []part{
			{name: "now", every: time.Second, load: room.runningNow},
			{name: "needs", every: 3 * time.Second, load: room.needs},
			room.spendPart(), room.healthPart(),
			{name: "feed", every: time.Second, load: room.feed},
			{name: "locks", every: time.Second, load: room.locks},
			{name: "objectives", every: 10 * time.Second, calm: true, load: room.workedOn},
			{name: "memory", every: 30 * time.Second, calm: true, load: room.memoryUse},
		},
	}
}

// Has reports whether the page has a part.
func (s show) Has(name string) bool {
	_, has := s.parts[name]
	return has
}

const (
	mostNow        = 15 // runs that the overview shows
	mostLocks      = 12
	mostObjectives = 8
	// beyond is the first number that is not counted: "1,000+".
	beyond = 1001
)

// running is something under way: a run, or an action outside of any.
type running struct {
	ExecutionID *string
	TraceID     string
	Surface     string
	Flow        string
	ThreadID    string
	Doing       []string  // the actions under way, the outer ones first
	Since       time.Time // of the innermost
}

// now is what the agent is doing.
type now struct {
	Runs             []running
	More             bool
	Pending, Waiting int64 // executions, counted up to beyond
	Next             *struct {
		Name string
		At   time.Time
	}
}

// runningNow reads what is under way: runs that a live worker has claimed, then actions outside of runs.
func (room *Room) runningNow(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		with runs as (
		 select e.id::text as execution_id, e.trace_id, e.surface, left(e.flow, 100) as flow,
		        coalesce(left(e.thread_id, 300), '') as thread_id, coalesce(o.doing, '{}') as doing,
		        coalesce(o.since, e.updated_at) as since
		   from agent_executions e
		   join agent_workers w on w.id = e.claimed_by and w.expires_at > clock_timestamp()
		   left join lateral (
		        select array_agg(left(a.skill_name, 100) order by x.activity_id) as doing, max(x.started_at) as since
		          from (select o.activity_id, o.started_at from agent_activity_open o
		                 where o.execution_id = e.id order by o.activity_id desc limit 5) x
		          join agent_activity a on a.id = x.activity_id) o on true
		  where e.claimed_by is not null
		  order by e.id desc limit @most::int + 1),
		loose as (
		 select null::text, a.trace_id, left(a.surface, 100), '', coalesce(left(a.thread_id, 300), ''), array[left(a.skill_name, 100)], x.started_at
		   from (select o.activity_id, o.started_at from agent_activity_open o
		          where o.execution_id is null order by o.activity_id desc limit @most::int + 1) x
		   join agent_activity a on a.id = x.activity_id
		  order by a.id desc)
		select * from runs union all select * from loose`, postgres.Strict{"most": mostNow})
	if err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	var got now
	if got.Runs, err = pgx.CollectRows(rows, pgx.RowToStructByName[running]); err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	got.Runs, got.More = onPage(got.Runs, mostNow)
	if err := room.idle(ctx, &got); err != nil {
		return nil, err
	}
	return got, nil
}

// idle adds what is not under way but will be: what is ready, what waits, and the next schedule.
func (room *Room) idle(ctx context.Context, got *now) error {
	var name *string
	var at *time.Time
	err := room.Read.QueryRow(ctx, `
		select (select count(*) from (select from agent_executions e where e.status = 'pending' order by e.id desc limit @beyond) x),
		       (select count(*) from (select from agent_executions e where e.status = 'waiting' order by e.id desc limit @beyond) x),
		       s.name, s.next_run_at
		  from (select) one
		  left join (select left(name, 100) as name, next_run_at from agent_schedules order by next_run_at limit 1) s on true`,
		postgres.Strict{"beyond": beyond}).Scan(&got.Pending, &got.Waiting, &name, &at)
	if err != nil {
		return fmt.Errorf("count executions: %w", err)
	}
	if name != nil && at != nil {
		got.Next = &struct {
			Name string
			At   time.Time
		}{*name, *at}
	}
	return nil
}

// lock is a lane that is held now.
type lock struct {
	Lane, LockedBy string
	ExecutionID    *string
	TraceID        *string
	FencingToken   int64
	LockedAt       time.Time
	ExpiresAt      *time.Time // nil when parked
	Waiters        int64
}

// locks reads the lanes that are held, the newest grant first.
func (room *Room) locks(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select l.lane, l.locked_by, l.execution_id::text, coalesce(e.trace_id,
		         substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}')) as trace_id,
		       l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       (select count(*) from (select from agent_lock_waiters w
		         where w.lane = l.lane and w.expires_at > clock_timestamp() limit @beyond) x) as waiters
		  from (select * from agent_locks k
		         where k.locked_by <> '' and k.expires_at > clock_timestamp()
		         order by k.fencing_token desc limit @most::int + 1) l
		  left join agent_executions e on e.id = l.execution_id
		 order by l.fencing_token desc`, postgres.Strict{"most": mostLocks, "beyond": beyond})
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[lock])
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	more := len(list) > mostLocks
	return map[string]any{"Locks": list[:min(len(list), mostLocks)], "More": more}, nil
}
