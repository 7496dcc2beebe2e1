package engineroom

import (
	"context"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// queueKinds bounds the kinds of work and the limits on the page.
const queueKinds = 100

// stateTab links to the executions of one state.
type stateTab struct {
	Label, Link string
	Count       string // with "+" beyond maxCount; empty without a count
	Now         bool   // the current tab
}

// executionStates returns the tabs, which are the only filter of states. Failed includes timeouts. Waiting is in order
// of the deadline. A tab keeps the filters. Counts cover all executions, so the page shows counts only without filters.
func (room *Room) executionStates(ctx context.Context, req *pageRequest) (any, error) {
	f := req.Subject.(executionFilter)
	counts := map[string]string{}
	if !f.Narrowed() {
		var err error
		if counts, err = room.countStates(ctx); err != nil {
			return nil, err
		}
	}
	tabs := []stateTab{{Label: "All", Link: f.tabURL("", ""), Now: f.View == "" && f.Status == "" && !f.Failed}}
	for _, s := range executions.Statuses() {
		tab := stateTab{Label: s, Link: f.tabURL("status", s), Count: counts[s], Now: f.Status == s}
		switch s {
		case string(executions.Waiting):
			tab.Link, tab.Now = f.tabURL("view", s), tab.Now || f.View == s
		case string(executions.Failed):
			tab.Link, tab.Now = f.tabURL("failed", "1"), tab.Now || f.Failed || f.Status == string(executions.Timeout)
		case string(executions.Timeout):
			continue // counted as failed
		}
		tabs = append(tabs, tab)
	}
	return append(tabs, stateTab{
		Label: "stuck", Link: f.tabURL("view", "stuck"), Count: counts["stuck"], Now: f.View == "stuck",
	}), nil
}

// countStates counts the executions of each state, up to maxCount, from the state's index. A plain condition could make
// the planner scan the table for a rare state. Completed executions have no such index, so countStates counts them
// among the newest executions.
func (room *Room) countStates(ctx context.Context) (map[string]string, error) {
	type stateCount struct {
		Status string
		More   bool
		N      int64
	}
	list, err := postgres.Rows[stateCount](ctx, room.Read, "count executions", `
		select s.status, false as more, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('pending', 'running', 'waiting')
		            and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @limit + 1) x) as n
		  from unnest(array['pending', 'running', 'waiting']) s (status)
		union all
		select s.status, false, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('failed', 'timeout', 'cancelled')
		            and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @limit + 1) x)
		  from unnest(array['failed', 'timeout', 'cancelled']) s (status)
		union all
		select 'completed', exists (select e.id from agent_executions e order by e.id desc offset @searched limit 1),
		       (select count(*) from (
		         select from (select e.status from agent_executions e order by e.id desc limit @searched) x
		           where x.status = 'completed' limit @limit + 1) y)
		union all
		select 'stuck', false, (select count(*)
		  from (select from agent_executions_stuck k where k.waiting_until <= now() limit @limit + 1) x)`, customPlan,
		postgres.Strict{"limit": maxCount, "searched": 4 * maxCount})
	if err != nil {
		return nil, err
	}
	counts := map[string]string{}
	var failed int64
	for _, s := range list {
		switch s.Status {
		case string(executions.Failed), string(executions.Timeout):
			failed += s.N
			continue
		}
		counts[s.Status] = capped(s.N, maxCount)
		if s.More && s.N <= maxCount {
			counts[s.Status] += "+"
		}
	}
	counts[string(executions.Failed)] = capped(failed, maxCount)
	return counts, nil
}

// capped formats a count of at most limit + 1, such as 1,000+.
func capped(n, limit int64) string {
	if n > limit {
		return human.Count(limit) + "+"
	}
	return human.Count(n)
}

// readyKind is ready work of one kind without a worker.
type readyKind struct {
	Queue, Flow, Surface string
	Ready                int64
}

// Count formats Ready.
func (k readyKind) Count() string { return capped(k.Ready, maxCount) }

// admission is a limit with its usage.
type admission struct {
	Kind, Name string
	Most       int
	Running    int64
}

// Full reports an exhausted limit.
func (a admission) Full() bool { return a.Running >= int64(a.Most) }

// executionQueue reads the ready work by kind, and the limits.
func (room *Room) executionQueue(ctx context.Context, _ *pageRequest) (any, error) {
	ready, err := postgres.Rows[readyKind](ctx, room.Read, "read the queue", `
		select k.queue, left(k.flow, 200) as flow, k.surface,
		       (select count(*) from (select from agent_executions x
		          where x.claimed_by is null and x.status in ('pending', 'running') and not x.is_external
		            and x.queue = k.queue
		            and x.flow = k.flow and x.surface = k.surface limit @counted + 1) c) as ready
		  from lanekeeper.agent_ready_kinds k
		 order by k.queue desc, k.flow, k.surface
		 limit @limit + 1`, customPlan, postgres.Strict{"counted": maxCount, "limit": queueKinds})
	if err != nil {
		return nil, err
	}
	limits, err := postgres.Rows[admission](ctx, room.Read, "read the limits", `
		select l.kind, left(l.name, 200) as name, l.running as most, case l.kind
		         when 'flow' then (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.flow = l.name limit @counted + 1) c)
		         else (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.surface = l.name limit @counted + 1) c) end as running
		  from agent_limits l order by l.kind, l.name limit @limit`, customPlan,
		postgres.Strict{"counted": maxCount, "limit": queueKinds})
	if err != nil {
		return nil, err
	}
	ready, more := firstN(ready, queueKinds)
	return map[string]any{"Ready": ready, "More": more, "Limits": limits}, nil
}
