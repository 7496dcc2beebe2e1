package engineroom

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// queueKinds is how many kinds of work, and how many limits, the page shows.
const queueKinds = 100

// stateTab leads to the executions of one state.
type stateTab struct {
	Word, Link string
	Count      string // with "+" beyond countedMost; empty where it is not counted
	Now        bool   // it is what the page shows
}

// executionStates are the tabs. Filters stay when another is chosen; counts are of all, so they are shown without
// filters only.
func (room *Room) executionStates(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	counts := map[string]string{}
	if !f.Narrowed() {
		var err error
		if counts, err = room.countStates(ctx); err != nil {
			return nil, err
		}
	}
	tabs := []stateTab{{Word: "All", Link: f.tab("", ""), Now: f.View == "" && f.Status == "" && !f.Failed}}
	for _, s := range executionStatuses() {
		tabs = append(tabs, stateTab{Word: s, Link: f.tab("status", s), Count: counts[s], Now: f.Status == s && !f.Failed})
	}
	return append(tabs,
		stateTab{Word: "failed or timed out", Link: f.tab("failed", "1"), Now: f.Failed},
		stateTab{Word: "waiting by deadline", Link: f.tab("view", "waiting"), Count: counts["waiting by deadline"], Now: f.View == "waiting"},
		stateTab{Word: "stuck", Link: f.tab("view", "stuck"), Count: counts["stuck"], Now: f.View == "stuck"}), nil
}

// countStates counts the executions of each state, up to countedMost: as many entries of the state's index from it
// on, whatever follows it there. A condition on the state alone would leave it to the planner's guess whether a rare
// one is worth a walk through the table. Completed ones have no such index: they are counted among the newest.
func (room *Room) countStates(ctx context.Context) (map[string]string, error) {
	rows, err := room.Read.Query(ctx, `
		select s.status, false as more, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('pending', 'running', 'waiting') and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['pending', 'running', 'waiting']) s (status)
		union all
		select s.status, false, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('failed', 'timeout', 'cancelled') and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['failed', 'timeout', 'cancelled']) s (status)
		union all
		select 'completed', exists (select e.id from agent_executions e order by e.id desc offset @looked limit 1), (select count(*) from (
		         select from (select e.status from agent_executions e order by e.id desc limit @looked) x where x.status = 'completed' limit @most + 1) y)
		union all
		select 'stuck', false, (select count(*) from (select from agent_executions_stuck k where k.waiting_until <= now() limit @most + 1) x)`, freshPlan,
		postgres.Strict{"most": countedMost, "looked": 4 * countedMost})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	counts := map[string]string{}
	var status string
	var more bool
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&status, &more, &n}, func() error {
		counts[status] = capped(n, countedMost)
		if more && n <= countedMost {
			counts[status] += "+"
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	return counts, nil
}

// capped is a count that goes no further than most.
func capped(n, most int64) string {
	if n > most {
		return thousands(most) + "+"
	}
	return thousands(n)
}

// readyKind is work of one kind that is ready and has no worker yet.
type readyKind struct {
	Queue, Flow, Surface string
	Ready                int64
}

// Count is Ready as it is shown.
func (k readyKind) Count() string { return capped(k.Ready, countedMost) }

// admission is a limit with what it is used.
type admission struct {
	Kind, Name string
	Most       int
	Running    int64
}

// Full reports whether nothing more of it is started now.
func (a admission) Full() bool { return a.Running >= int64(a.Most) }

// executionQueue is what is ready, by kind, and the limits.
func (room *Room) executionQueue(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select k.queue, left(k.flow, 200) as flow, k.surface,
		       (select count(*) from (select from agent_executions x
		          where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = k.queue
		            and x.flow = k.flow and x.surface = k.surface limit @counted + 1) c) as ready
		  from lanekeeper.agent_ready_kinds k
		 order by k.queue desc, k.flow, k.surface
		 limit @most + 1`, freshPlan, postgres.Strict{"counted": countedMost, "most": queueKinds})
	if err != nil {
		return nil, fmt.Errorf("read the queue: %w", err)
	}
	ready, err := pgx.CollectRows(rows, pgx.RowToStructByName[readyKind])
	if err != nil {
		return nil, fmt.Errorf("read the queue: %w", err)
	}
	rows, err = room.Read.Query(ctx, `
		select l.kind, left(l.name, 200) as name, l.running as most, case l.kind
		         when 'flow' then (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.flow = l.name limit @counted + 1) c)
		         else (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.surface = l.name limit @counted + 1) c) end as running
		  from agent_limits l order by l.kind, l.name limit @most`, freshPlan,
		postgres.Strict{"counted": countedMost, "most": queueKinds})
	if err != nil {
		return nil, fmt.Errorf("read the limits: %w", err)
	}
	limits, err := pgx.CollectRows(rows, pgx.RowToStructByName[admission])
	if err != nil {
		return nil, fmt.Errorf("read the limits: %w", err)
	}
	ready, more := onPage(ready, queueKinds)
	return map[string]any{"Ready": ready, "More": more, "Limits": limits}, nil
}
