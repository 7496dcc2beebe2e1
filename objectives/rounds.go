package objectives

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Advanced records that a run worked on an objective under traceID, and returns the objective. If the objective is
// active and due and none of its steps is pending, Advanced settles it:
//
//   - With review_every, the next round begins. It is due one review_every from now. All steps but the skipped ones are
//     pending again, without attempts. Their last results stay readable.
//   - Otherwise the objective is completed, or failed if one of its steps failed.
//
// An objective without any step and without review_every stays active. A second call for the same round settles
// nothing. Advanced returns [ErrNotFound] for an unknown objective.
func Advanced(ctx context.Context, db postgres.Beginner, objectiveID, traceID string) (Objective, error) {
	var o Objective
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if _, err := lockObjective(ctx, tx, objectiveID); err != nil {
			return err
		}
		if err := settle(ctx, tx, objectiveID, traceID); err != nil {
			return err
		}
		var err error
		o, err = Get(ctx, tx, objectiveID)
		return err
	})
	if err != nil {
		return Objective{}, fmt.Errorf("advance objective: %w", err)
	}
	return o, nil
}

// BackOff records a run without progress: the objective is due again in 15 minutes, doubled for each further run, at
// most a day. It does nothing if the objective is not active or not due.
func BackOff(ctx context.Context, db postgres.DB, objectiveID string) error {
	_, err := db.Exec(ctx, `
		update agent_objectives o
		   set idle_runs = o.idle_runs + 1, updated_at = clock_timestamp(),
		       due_at = clock_timestamp() + least(interval '15 minutes' * 2 ^ least(o.idle_runs, 10), interval '1 day')
		 where o.id = @id and o.status = 'active' and o.due_at <= clock_timestamp()`, pgx.StrictNamedArgs{"id": objectiveID})
	if err != nil {
		return fmt.Errorf("back off objective: %w", err)
	}
	return nil
}

// Settle settles, like [Advanced], the active objectives whose due_at has passed and whose steps have all ended: a lost
// run did not settle them. It returns their number. An objective that is deleted meanwhile is no error.
func Settle(ctx context.Context, db postgres.Beginner) (int, error) {
	type unsettled struct{ ID, LastTraceID string }
	all, err := postgres.Rows[unsettled](ctx, db, "settle objectives", `
		select o.id, o.last_trace_id from agent_objectives o
		 where o.status = 'active' and o.due_at <= statement_timestamp()
		   and exists (select from agent_objective_steps s where s.objective_id = o.id)
		   and not exists (select from agent_objective_steps s where s.objective_id = o.id and s.status = 'pending')
		 order by o.id`)
	if err != nil {
		return 0, err
	}
	for _, o := range all {
		if _, err := Advanced(ctx, db, o.ID, o.LastTraceID); err != nil && !errors.Is(err, ErrNotFound) {
			return 0, err
		}
	}
	return len(all), nil
}

// settle records the trace and settles the objective. The caller holds its lock. The condition on due_at makes a second
// call for the same round do nothing: after the first, the next round is not due.
func settle(ctx context.Context, tx pgx.Tx, objectiveID, traceID string) error {
	_, err := tx.Exec(ctx, `
		with steps as (
		  select count(*) as n, count(*) filter (where status = 'pending') as pending,
		         count(*) filter (where status = 'failed') as failed
		    from agent_objective_steps where objective_id = @id::uuid),
		ended as (
		  select o.id, o.review_every is not null as recurs, s.failed
		    from agent_objectives o, steps s
		   where o.id = @id::uuid and o.status = 'active' and o.due_at <= clock_timestamp() and s.pending = 0
		     and (s.n > 0 or o.review_every is not null)),
		again as (
		  update agent_objective_steps t set status = 'pending', attempts = 0, updated_at = clock_timestamp()
		    from ended e where t.objective_id = e.id and e.recurs and t.status in ('done', 'failed'))
		update agent_objectives o
		   set last_trace_id = @trace_id, updated_at = clock_timestamp(),
		       status = case
		                  when e.id is null or e.recurs then o.status
		                  when e.failed > 0 then 'failed'
		                  else 'completed'
		                end,
		       round = o.round + coalesce(e.recurs, false)::int,
		       due_at = case when e.recurs then clock_timestamp() + o.review_every else o.due_at end
		  from (select) one left join ended e on true
		 where o.id = @id::uuid`, pgx.StrictNamedArgs{"id": objectiveID, "trace_id": traceID})
	return err
}
