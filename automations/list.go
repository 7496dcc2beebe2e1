package automations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Enabled *bool
	Skill   string
	Source  string
	Before  string // an id: only older rows
	Limit   int    // 100 when 0, at most 1000
}

// List returns automations, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations
		 where (@enabled::boolean is null or enabled = @enabled) and (@skill = '' or skill_name = @skill)
		   and (@source = '' or source = @source) and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"enabled": f.Enabled, "skill": f.Skill, "source": f.Source, "before": f.Before, "limit": page(f.Limit),
		})
	return collect(rows, err, "list automations")
}

// Get returns one automation by its name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations where name = @key or id::text = @key order by id::text = @key desc limit 1`,
		pgx.StrictNamedArgs{"key": nameOrID})
	found, err := collect(rows, err, fmt.Sprintf("get automation %q", nameOrID))
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("get automation %q: %w", nameOrID, ErrNotFound)
	}
	if err != nil {
		return Automation{}, err
	}
	return found[0], nil
}

// tries holds for an automation a that self-heal has paused for its own skill, of which the one trial is to be made: its next time, or
// a run that waits, is the occasion. A skill that no model uses would else never come back. Not one that needs leave, of which nobody
// knows when it is made, nor while another of its automations makes the trial.
const tries = `(a.disabled_by = 'self_heal' and a.paused_for = a.skill_name and exists (
	select from agent_skills s where s.name = a.paused_for and not s.enabled and s.disabled_by = 'self_heal' and s.trial_at is not null
	   and s.trust <> 'approve' and coalesce((s.evidence #>> '{trial,until}')::timestamptz <= clock_timestamp(), true))
	and not exists (select from agent_automation_runs c join agent_automations o on o.id = c.automation_id
	                 where c.status = 'claimed' and o.paused_for = a.paused_for))`

// Due returns the automations whose time has come, the longest waiting first: those that are enabled, and those with which a skill
// is tried. Each is to be claimed with its NextRunAt. limit is 100 when 0.
func Due(ctx context.Context, db postgres.DB, limit int) ([]Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations a
		 where (enabled or `+tries+`) and trigger = 'cron' and next_run_at <= clock_timestamp()
		 order by next_run_at, id limit @limit`, pgx.StrictNamedArgs{"limit": page(limit)})
	return collect(rows, err, "list due automations")
}

func collect(rows pgx.Rows, err error, what string) ([]Automation, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Automation])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return found, nil
}

// RunFilter narrows [Runs]; the zero value lists the newest 100.
type RunFilter struct {
	AutomationID string
	Status       string // "dead" is the dead letter box
	Before       string // an id: only older rows
	Limit        int    // 100 when 0, at most 1000
}

// Runs returns runs, newest first.
func Runs(ctx context.Context, db postgres.DB, f RunFilter) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message, output,
		       created_at, finished_at
		  from agent_automation_runs
		 where (@automation = '' or automation_id = nullif(@automation, '')::uuid) and (@status = '' or status = @status)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{"automation": f.AutomationID, "status": f.Status, "before": f.Before, "limit": page(f.Limit)})
	return collectRuns(rows, err, "list automation runs")
}

// Abandoned returns the claimed runs that nobody will finish, oldest first: those whose execution has ended, or is
// no longer there, and those that belong to no execution and were claimed more than a day ago. Each is to be
// ended with [Finish], which one of many callers does. limit is 100 when 0.
func Abandoned(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at, r.execution_id, r.trace_id,
		       r.error_message, r.output, r.created_at, r.finished_at
		  from agent_automation_runs r
		 where r.status = 'claimed'
		   and case when r.execution_id is null then r.claimed_at < clock_timestamp() - interval '1 day'
		       else not exists (select from agent_executions e
		                         where e.id = r.execution_id and e.status in ('pending', 'running', 'waiting')) end
		 order by r.id limit @limit`, pgx.StrictNamedArgs{"limit": page(limit)})
	return collectRuns(rows, err, "list abandoned runs")
}

func collectRuns(rows pgx.Rows, err error, what string) ([]Run, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	runs, err := pgx.CollectRows(rows, pgx.RowToStructByName[Run])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return runs, nil
}

func page(limit int) int {
	if limit <= 0 {
		return defaultPage
	}
	return min(limit, maxPage)
}
