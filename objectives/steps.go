package objectives

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const maxStepResult = 8 << 10

// done marks a pending step so; false when it is not pending any more.
func done(ctx context.Context, db postgres.DB, stepID, result, traceID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objective_steps
		   set status = 'done', result = @result, trace_id = @trace_id, attempts = attempts + 1, updated_at = clock_timestamp()
		 where id = @id and status = 'pending'`,
		pgx.StrictNamedArgs{"id": stepID, "result": storable(result), "trace_id": traceID})
	if err != nil {
		return false, fmt.Errorf("mark step done: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// FailStep counts a failed attempt of a pending step and keeps the reason. The step stays pending for the
// next run until [MaxAttempts] have failed; it is returned as it is then. False when the step is not
// pending any more, and then nothing changes.
func FailStep(ctx context.Context, db postgres.DB, stepID, reason, traceID string) (Step, bool, error) {
	rows, err := db.Query(ctx, `
		update agent_objective_steps
		   set attempts = attempts + 1, status = case when attempts + 1 >= @most then 'failed' else 'pending' end,
		       result = @reason, trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = 'pending'
		returning id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at`,
		pgx.StrictNamedArgs{"id": stepID, "most": MaxAttempts, "reason": storable(reason), "trace_id": traceID})
	if err != nil {
		return Step{}, false, fmt.Errorf("fail step: %w", err)
	}
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Step])
	if errors.Is(err, pgx.ErrNoRows) {
		return Step{}, false, nil
	}
	if err != nil {
		return Step{}, false, fmt.Errorf("fail step: %w", err)
	}
	return s, true, nil
}

// AddSteps appends steps, as the model plans them, to an active objective and returns the new ones; a
// title that is there already is left out. An objective holds at most 100. The error is
// [ErrNotFound] or [ErrNotActive], or says what is wrong with the titles.
func AddSteps(ctx context.Context, db postgres.Beginner, objectiveID string, titles []string) (added []Step, err error) {
	if err := errors.Join(checkTitles(titles)...); err != nil {
		return nil, fmt.Errorf("add steps: %w", err)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		status, err := hold(ctx, tx, objectiveID)
		if err == nil && status != Active {
			err = ErrNotActive
		}
		if err != nil {
			return err
		}
		added, err = addSteps(ctx, tx, objectiveID, titles)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("add steps: %w", err)
	}
	return added, nil
}

// hold locks an objective until the end of the transaction, so that what the next statement reads of
// its steps is not about to be changed by another hold.
func hold(ctx context.Context, tx pgx.Tx, objectiveID string) (status string, err error) {
	err = tx.QueryRow(ctx, `select status from agent_objectives where id = @id for update`,
		pgx.StrictNamedArgs{"id": objectiveID}).Scan(&status)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	return status, err
}

// addSteps appends under the lock of the objective.
func addSteps(ctx context.Context, tx pgx.Tx, objectiveID string, titles []string) ([]Step, error) {
	if len(titles) == 0 {
		return nil, nil
	}
	rows, err := tx.Query(ctx, `
		insert into agent_objective_steps (objective_id, position, title)
		select @id::uuid, coalesce((select max(position) from agent_objective_steps where objective_id = @id::uuid), 0)
		       + row_number() over (order by t.n), t.title
		  from unnest(@titles::text[]) with ordinality t (title, n)
		 where not exists (select from agent_objective_steps s where s.objective_id = @id::uuid and s.title = t.title)
		 order by t.n
		returning id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at`,
		pgx.StrictNamedArgs{"id": objectiveID, "titles": titles})
	if err != nil {
		return nil, err
	}
	added, err := pgx.CollectRows(rows, pgx.RowToStructByName[Step])
	if err == nil && len(added) > 0 && added[len(added)-1].Position > maxSteps {
		err = fmt.Errorf("an objective holds at most %d steps", maxSteps)
	}
	return added, err
}

// storable cuts a text to what is kept of it.
func storable(text string) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) > maxStepResult {
		text = strings.ToValidUTF8(text[:maxStepResult], "") + "…"
	}
	return text
}
