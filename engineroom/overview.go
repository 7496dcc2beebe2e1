package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// overviewPage shows the agent's verdict, items that need attention, failures, current work and cost, in the order of
// importance. With several agents the parameter agent selects one. Items that need attention come from all agents.
func (room *Room) overviewPage() page {
	return page{
		path: "/", name: "overview", navLabel: "Overview", title: "Overview", open: openActivity, parallel: true,
		parts: []part{
			{
				name: "verdict", interval: 3 * time.Second, refreshOnActivity: true, triggers: failureChanged | asksChanged,
				load: room.verdictPart,
			},
			{name: "needs", interval: 3 * time.Second, triggers: asksChanged | failureChanged, load: room.attentionItems},
			{
				name: "failing", interval: 3 * time.Second, refreshOnActivity: true, triggers: failureChanged,
				load: room.failingNow,
			},
			{name: "now", interval: 2 * time.Second, triggers: runsChanged | openChanged, load: room.runningNow},
			room.healthPart(),
			{
				name: "feed", interval: time.Second, refreshOnActivity: true, triggers: logChanged | openChanged,
				load: room.recentActivity,
			},
			room.spendPart(),
			{name: "locks", interval: time.Second, triggers: runsChanged, load: room.locks},
			{name: "objectives", interval: 10 * time.Second, refreshOnActivity: true, load: room.activeObjectives},
			{name: "memory", interval: 30 * time.Second, refreshOnActivity: true, load: room.memoryPanel},
		},
	}
}

// The overview shows a few items of each kind and links to all.
const (
	maxRunning            = 5
	maxOverviewLocks      = 6
	maxOverviewObjectives = 5
	maxFeedRows           = 12
	maxOverviewCategories = 6
	// countLimit is where counting stops. The page shows this count as "1,000+".
	countLimit = 1001
)

// running is a running execution, or an action outside executions.
type running struct {
	ExecutionID *string
	TraceID     string
	Surface     string
	Flow        string
	ThreadID    string
	Doing       []string  // the running actions, outer first
	Since       time.Time // start of the innermost action
}

// currentWork is the agent's current work.
type currentWork struct {
	Runs                      []running
	More                      bool
	Running, Pending, Waiting int64 // numbers of executions, counted up to countLimit
	Agent                     string
	Next                      *struct {
		Name string
		At   time.Time
	}
}

// URL is the address of the list of the executions with a status.
func (w currentWork) URL(status string) string {
	return executionFilter{Status: status, Agent: w.Agent}.url()
}

// runningNow reads the running work: claimed executions with a live worker, then other actions.
func (room *Room) runningNow(ctx context.Context, req *pageRequest) (any, error) {
	agent, err := room.selectedAgent(ctx, req)
	if err != nil {
		return nil, err
	}
	work := currentWork{Agent: agent}
	work.Runs, err = postgres.Rows[running](ctx, room.Read, "list running work", `
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
		  where e.claimed_by is not null and (@agent::text = '' or e.agent = @agent)
		  order by e.id desc limit @limit::int + 1),
		loose as (
		 select null::text, a.trace_id, left(a.surface, 100), '', coalesce(left(a.thread_id, 300), ''),
		        array[left(a.skill_name, 100)], x.started_at
		   from agent_activity_open x
		   join agent_activity a on a.id = x.activity_id
		  where x.execution_id is null and (@agent::text = '' or a.agent = @agent)
		  order by x.activity_id desc limit @limit::int + 1)
		select * from runs union all select * from loose`, postgres.Strict{"limit": maxRunning, "agent": agent})
	if err != nil {
		return nil, err
	}
	work.Runs, work.More = firstN(work.Runs, maxRunning)
	if err := room.readQueueState(ctx, &work); err != nil {
		return nil, err
	}
	return work, nil
}

// readQueueState adds the numbers of executions, and the next schedule. Those of an agent are counted among the newest
// executions of the state.
func (room *Room) readQueueState(ctx context.Context, work *currentWork) error {
	var name *string
	var at *time.Time
	err := room.Read.QueryRow(ctx, `
		select (select count(*)
		          from (select from (select e.agent from agent_executions e where e.status = 'running'
		                              order by e.id desc limit @searched) y
		                 where @agent::text = '' or y.agent = @agent limit @count_limit) x),
		       (select count(*)
		          from (select from (select e.agent from agent_executions e where e.status = 'pending'
		                              order by e.id desc limit @searched) y
		                 where @agent::text = '' or y.agent = @agent limit @count_limit) x),
		       (select count(*)
		          from (select from (select e.agent from agent_executions e where e.status = 'waiting'
		                              order by e.id desc limit @searched) y
		                 where @agent::text = '' or y.agent = @agent limit @count_limit) x),
		       s.name, s.next_run_at
		  from (select) one
		  left join (select left(name, 100) as name, next_run_at from agent_schedules order by next_run_at limit 1) s
		    on true`,
		postgres.Strict{"count_limit": countLimit, "searched": maxSearched, "agent": work.Agent}).
		Scan(&work.Running, &work.Pending, &work.Waiting, &name, &at)
	if err != nil {
		return fmt.Errorf("count executions: %w", err)
	}
	if name != nil && at != nil {
		work.Next = &struct {
			Name string
			At   time.Time
		}{*name, *at}
	}
	return nil
}

// lock is a held lane.
type lock struct {
	Lane, LockedBy string
	ExecutionID    *string
	TraceID        string
	FencingToken   int64
	LockedAt       time.Time
	ExpiresAt      *time.Time // nil if parked
	Waiters        int64
}

// lockColumns are the columns of a lock, of agent_locks l and agent_executions e, without the waiters.
const lockColumns = `l.lane, l.locked_by, l.execution_id::text, coalesce(e.trace_id,
	         substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'), '') as trace_id,
	       l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at`

// locks reads the held lanes, newest first.
func (room *Room) locks(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[lock](ctx, room.Read, "list lanes", `
		select `+lockColumns+`, (select count(*) from (select from agent_lock_waiters w
		         where w.lane = l.lane and w.expires_at > clock_timestamp() limit @count_limit) x) as waiters
		  from (select * from agent_locks k
		         where k.locked_by <> '' and k.expires_at > clock_timestamp()
		         order by k.fencing_token desc limit @limit::int + 1) l
		  left join agent_executions e on e.id = l.execution_id
		 order by l.fencing_token desc`, postgres.Strict{"limit": maxOverviewLocks, "count_limit": countLimit})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxOverviewLocks)
	all := int64(len(list))
	if more {
		err = room.Read.QueryRow(ctx, `select count(*) from (select from agent_locks k
			where k.locked_by <> '' and k.expires_at > clock_timestamp() limit @count_limit) x`,
			postgres.Strict{"count_limit": countLimit}).Scan(&all)
	}
	return map[string]any{"Locks": list, "More": more, "All": all}, err
}

// memoryPanel returns the use of memory by the first categories.
func (room *Room) memoryPanel(ctx context.Context, req *pageRequest) (any, error) {
	data, err := room.memoryUse(ctx, req)
	use, ok := data.(map[string]any)
	if err != nil || !ok {
		return data, err
	}
	if list, ok := use["Categories"].([]category); ok && len(list) > maxOverviewCategories {
		use["Categories"], use["More"] = list[:maxOverviewCategories], true
	}
	return use, nil
}
