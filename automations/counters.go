package automations

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Counters are the variables of signals, and further variables of the conditions of events. Names with the suffix 24h
// cover the last 24 hours.
type Counters struct {
	PendingApprovals   int     `expr:"pending_approvals" json:"pending_approvals"`
	Failures24h        int     `expr:"failures_24h" json:"failures_24h"` // failed calls of skills
	Calls24h           int     `expr:"calls_24h" json:"calls_24h"`
	Tokens24h          int     `expr:"tokens_24h" json:"tokens_24h"`
	CostUSD24h         float64 `expr:"cost_usd_24h" json:"cost_usd_24h"`
	ExecutionsPending  int     `expr:"executions_pending" json:"executions_pending"`
	ExecutionsRunning  int     `expr:"executions_running" json:"executions_running"`
	ExecutionsWaiting  int     `expr:"executions_waiting" json:"executions_waiting"`
	SkillsDisabled     int     `expr:"skills_disabled" json:"skills_disabled"`
	ObjectivesActive   int     `expr:"objectives_active" json:"objectives_active"`
	ObjectivesOverdue  int     `expr:"objectives_overdue" json:"objectives_overdue"` // due for over an hour
	ObjectivesProposed int     `expr:"objectives_proposed" json:"objectives_proposed"`
	AutomationsDead    int     `expr:"automations_dead" json:"automations_dead"` // dead runs
	Memories           int     `expr:"memories" json:"memories"`
}

// ReadCounters reads the counters in one statement.
func ReadCounters(ctx context.Context, db postgres.DB) (Counters, error) {
	rows, err := db.Query(ctx, `
		with a as (
		  select count(*) filter (where kind = 'call' and status = 'error') as failures,
		         count(*) filter (where kind = 'call') as calls,
		         coalesce(sum(lanekeeper.agent_tokens(token_usage, 'total_tokens')) filter (where kind = 'model'), 0)::bigint
		           as tokens,
		         coalesce(sum(cost_usd) filter (where kind = 'model'), 0)::float8 as cost
		    from agent_activity where id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '24 hours'))),
		x as (
		  select count(*) filter (where status = 'pending') as pending, count(*) filter (where status = 'running') as running,
		         count(*) filter (where status = 'waiting') as waiting
		    from agent_executions where status in ('pending', 'running', 'waiting')),
		o as (
		  select count(*) filter (where status = 'active') as active, count(*) filter (where status = 'proposed') as proposed,
		         count(*) filter (where status = 'active' and due_at < clock_timestamp() - interval '1 hour') as overdue
		    from agent_objectives where status in ('active', 'proposed'))
		select (select count(*) from agent_approvals where status = 'pending' and expires_at > clock_timestamp())
		         as pending_approvals,
		       a.failures as failures_24h, a.calls as calls_24h, a.tokens as tokens_24h, a.cost as cost_usd_24h,
		       x.pending as executions_pending, x.running as executions_running, x.waiting as executions_waiting,
		       (select count(*) from agent_skills where not enabled) as skills_disabled,
		       o.active as objectives_active, o.overdue as objectives_overdue, o.proposed as objectives_proposed,
		       (select count(*) from agent_automation_runs where status = 'dead') as automations_dead,
		       (select count(*) from agent_memory where expires_at is null or expires_at > clock_timestamp()) as memories
		  from a, x, o`)
	return postgres.CollectOne(rows, err, pgx.ErrNoRows, "read counters", pgx.RowToStructByName[Counters])
}
