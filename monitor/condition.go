package monitor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Condition is the data from which verdicts are derived.
type Condition struct {
	Failures
	now          time.Time
	pause        executions.Pause
	workers      int64 // processes with a live lease
	lease        *time.Time
	queued       bool // an execution, not for outside workers, has been pending for longer than overdueAfter
	beats        []Beat
	disabled     []disabledSkill
	stuck        []stuckWork
	broken       []channels.Broken
	overBudget   map[string]bool // agents whose budget of the day is spent; "" is the budget of the day
	acknowledged map[string]acknowledgement
	// Budgets has today's budgets, and AgentBudgets those of agents by name.
	Budgets      []Budget
	AgentBudgets map[string]Budget
}

// readCondition reads the condition, without failures and budgets. Pending executions come first in the index of open
// ones; the order by status makes the planner read that index.
func readCondition(ctx context.Context, db postgres.DB) (c Condition, err error) {
	if c.pause, err = executions.CurrentPause(ctx, db); err != nil {
		return c, err
	}
	err = db.QueryRow(ctx, `
		select (select count(*) from (select from agent_workers w
		         where w.kind = 'process' and w.expires_at > clock_timestamp() limit 1000) x),
		       (select max(w.expires_at) from agent_workers w where w.kind = 'process'),
		       exists (select from (select e.status, e.is_external, e.created_at from agent_executions e
		                             where e.status in ('pending', 'running', 'waiting')
		                             order by e.status, e.id limit 1000) e
		                where e.status = 'pending' and not e.is_external
		                  and e.created_at < clock_timestamp() - @delay::interval),
		       clock_timestamp()`, postgres.Strict{"delay": overdueAfter}).
		Scan(&c.workers, &c.lease, &c.queued, &c.now)
	if err != nil {
		return c, fmt.Errorf("count processes: %w", err)
	}
	c.beats, err = postgres.Rows[Beat](ctx, db, "list heartbeats", `
		select left(s.agent, 300) as agent, s.cron, s.timezone, s.next_run_at, s.last_run_at,
		       coalesce(h.id::text, '') as id, coalesce(h.trace_id, '') as trace_id, coalesce(h.status, '') as status,
		       coalesce(h.result, '') as result, coalesce(h.problem, '') as problem, h.ended_at
		  from (select * from agent_schedules where flow = 'heartbeat' order by name limit @limit::int) s
		  left join lateral (
		    select x.id, x.trace_id, x.status::text, left(x.result_summary, 300) as result,
		           left(x.error_message, 300) as problem, x.completed_at as ended_at
		      from ((select e.* from agent_executions e where e.flow = 'heartbeat' and e.claimed_by is null
		              order by e.id desc limit 2000)
		            union all
		            (select e.* from agent_executions e
		              where e.agent = s.agent and e.agent <> 'agent' and e.agent <> 'visitor_chat'
		              order by e.id desc limit 2000)) x
		     where x.flow = 'heartbeat' and x.agent = s.agent and x.completed_at is not null
		     order by x.id desc limit 1) h on true`,
		postgres.Strict{"limit": maxBeats})
	if err != nil {
		return c, err
	}
	c.disabled, err = postgres.Rows[disabledSkill](ctx, db, "list disabled skills", `
		select s.name, s.disabled_by <> 'self_heal' as by_admin, s.trial_at is not null as on_trial, s.disabled_at as at
		  from agent_skills s where not s.enabled order by s.disabled_at limit 1000`)
	if err != nil {
		return c, err
	}
	c.stuck, err = postgres.Rows[stuckWork](ctx, db, "list stuck work", `
		select left(x.agent, 300) as agent, '' as lane, count(*) as n, min(x.waiting_until) as since
		  from (select e.agent, e.waiting_until from agent_executions_stuck e
		         order by e.waiting_until limit @limit::int) x
		 group by x.agent
		union all
		select '', l.lane, 1, w.since
		  from (select k.lane from agent_locks k
		         where k.locked_by <> '' and not k.parked and k.expires_at > clock_timestamp() and k.locked_at < @before
		         limit @limit::int) l
		 cross join lateral (
		   select q.since from agent_lock_waiters q
		    where q.lane = l.lane and q.expires_at > clock_timestamp() order by q.ticket limit 1) w
		 where w.since < @before`,
		postgres.Strict{"limit": countLimit, "before": c.now.Add(-stuckAfter)})
	if err != nil {
		return c, err
	}
	c.broken, err = channels.ListBroken(ctx, db)
	return c, err
}

// Beat is an agent's heartbeat: its schedule, and the newest one that ended.
type Beat struct {
	Agent     string     `json:"agent"`
	Cron      string     `json:"cron"`
	Timezone  string     `json:"timezone"`
	NextRunAt time.Time  `json:"next_run_at"`
	LastRunAt *time.Time `json:"last_run_at"` // the last tick
	// The newest heartbeat that ended; empty for none.
	ID      string     `json:"execution_id"`
	TraceID string     `json:"trace_id"`
	Status  string     `json:"status"`
	Result  string     `json:"result"`
	Problem string     `json:"error"`
	EndedAt *time.Time `json:"ended_at"`
}

// Skipped reports that the newest heartbeat ended without work.
func (b Beat) Skipped() bool { return strings.HasPrefix(b.Result, "skipped:") }

// period returns the longer of the last and the next interval of the schedule, or 0 for an invalid schedule.
func (b Beat) period() time.Duration {
	zone, err := schedule.Location(b.Timezone)
	if err != nil {
		return 0
	}
	plan, err := schedule.Parse(b.Cron, zone)
	if err != nil {
		return 0
	}
	period := plan.Next(b.NextRunAt).Sub(b.NextRunAt)
	if b.LastRunAt != nil {
		period = max(period, b.NextRunAt.Sub(*b.LastRunAt))
	}
	return max(period, 0)
}

// recent reports whether a heartbeat finished within the last period.
func (b Beat) recent(now time.Time) bool {
	return b.EndedAt != nil && now.Sub(*b.EndedAt) <= b.period()+overdueAfter
}

// problem returns why a heartbeat is dead, or "".
func (b Beat) problem(now time.Time) (text string, since time.Time) {
	switch {
	case now.Sub(b.NextRunAt) > overdueAfter:
		return "heartbeat overdue", b.NextRunAt
	case b.EndedAt != nil && b.LastRunAt != nil && b.LastRunAt.After(*b.EndedAt) &&
		now.Sub(*b.EndedAt) > 2*b.period()+overdueAfter:
		return "no heartbeat finished", *b.EndedAt
	}
	return "", time.Time{}
}

// BeatsOf returns the heartbeats of the agents that concerns accepts.
func (c Condition) BeatsOf(concerns func(string) bool) (list []Beat) {
	for _, b := range c.beats {
		if concerns(b.Agent) {
			list = append(list, b)
		}
	}
	return list
}

type disabledSkill struct {
	Name    string
	ByAdmin bool // disabled by an admin, so it is not a reason
	OnTrial bool
	At      *time.Time
}

// stuckWork counts the stuck executions of an agent, or names a stuck lane.
type stuckWork struct {
	Agent, Lane string
	N           int64
	Since       *time.Time
}

const (
	maxBeats     = 1000             // heartbeats that are read
	countLimit   = 1001             // the smallest count that is written as "1,000+"
	overdueAfter = 2 * time.Minute  // maximum delay of a due heartbeat or a pending execution
	stuckAfter   = 15 * time.Minute // maximum time of a hold while others wait
)
