package objectives

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Status string
	Source string
	Before string // an id: only older rows
	Limit  int    // 100 when 0, at most 1000
}

// selected is an objective with its progress.
const selected = `
		select o.id, o.name, o.goal, o.success_criteria, o.status, o.agent, o.priority,
		       coalesce(extract(epoch from o.review_every), 0)::bigint as review_every_seconds, o.due_at, o.idle_runs, o.round, o.note,
		       o.proposed_by, o.proposed_trace, o.decided_by, o.decided_reason, o.decided_at, o.revision, o.last_trace_id,
		       o.source, o.created_at, o.updated_at, p.total, p.done, p.failed, p.pending,
		       coalesce(round(p.done::numeric / nullif(p.total, 0), 3), 0)::float8 as progress
		  from agent_objectives o, lateral (
		       select count(*) as steps, count(*) filter (where s.status <> 'skipped') as total,
		              count(*) filter (where s.status = 'done') as done, count(*) filter (where s.status = 'failed') as failed,
		              count(*) filter (where s.status = 'pending') as pending
		         from agent_objective_steps s where s.objective_id = o.id) p`

// List returns objectives with their progress, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Objective, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	rows, err := db.Query(ctx, selected+`
		 where (@status = '' or o.status = @status) and (@source = '' or o.source = @source)
		   and (@before = '' or o.id < nullif(@before, '')::uuid)
		 order by o.id desc limit @limit`,
		pgx.StrictNamedArgs{"status": f.Status, "source": f.Source, "before": f.Before, "limit": min(f.Limit, 1000)})
	return collect("list objectives", rows, err)
}

// Whose says whose objectives are meant: those of an agent, or, without one, all but those of others.
type Whose struct {
	Agent  string
	Except []string
}

// Due returns the objectives that have work now, the most important and longest waiting first: active,
// their time come, with a pending step or with no step at all. limit is 10 when 0.
func Due(ctx context.Context, db postgres.DB, w Whose, limit int) ([]Objective, error) {
	if limit <= 0 {
		limit = 10
	}
	rows, err := db.Query(ctx, selected+`
		 where o.status = 'active' and o.due_at <= clock_timestamp() and (p.pending > 0 or p.steps = 0)
		   and case when @agent <> '' then o.agent = @agent else o.agent <> all(@except::text[]) end
		 order by o.priority, o.due_at, o.id limit @limit`,
		pgx.StrictNamedArgs{"agent": w.Agent, "except": append([]string{}, w.Except...), "limit": limit})
	return collect("list due objectives", rows, err)
}

// Get returns one objective by its name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Objective, error) {
	rows, err := db.Query(ctx, selected+`
		 where o.name = @key or o.id::text = @key
		 order by o.id::text = @key desc limit 1`, pgx.StrictNamedArgs{"key": nameOrID})
	found, err := collect(fmt.Sprintf("get objective %q", nameOrID), rows, err)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("get objective %q: %w", nameOrID, ErrNotFound)
	}
	if err != nil {
		return Objective{}, err
	}
	return found[0], nil
}

func collect(what string, rows pgx.Rows, err error) ([]Objective, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Objective])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return found, nil
}

// Steps returns the steps of an objective in their order.
func Steps(ctx context.Context, db postgres.DB, objectiveID string) ([]Step, error) {
	rows, err := db.Query(ctx, `
		select id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at
		  from agent_objective_steps where objective_id = @id order by position`, pgx.StrictNamedArgs{"id": objectiveID})
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	steps, err := pgx.CollectRows(rows, pgx.RowToStructByName[Step])
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	return steps, nil
}

// SetStatus pauses, resumes or ends an objective by hand: from is the status it must have. False when
// it has another. A proposal is decided with [Accept] or [Reject] and with nothing else.
func SetStatus(ctx context.Context, db postgres.DB, objectiveID, from, to string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objectives set status = @to, updated_at = clock_timestamp() where id = @id and status = @from and status not in ('proposed', 'rejected') and @to not in ('proposed', 'rejected')`,
		pgx.StrictNamedArgs{"id": objectiveID, "from": from, "to": to})
	if err != nil {
		return false, fmt.Errorf("set objective to %s: %w", to, err)
	}
	return tag.RowsAffected() > 0, nil
}
