package objectives

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// Step is a row of agent_objective_steps.
type Step struct {
	ID          string    `json:"id"`
	ObjectiveID string    `json:"objective_id"`
	Position    int       `json:"position"`
	Title       string    `json:"title"`
	Status      string    `json:"status"`
	Result      string    `json:"result"` // of the last round, until the next completion
	Attempts    int       `json:"attempts"`
	TraceID     string    `json:"trace_id"`
	StartedAt   time.Time `json:"started_at"` // start of this round; older calls are no evidence
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
}

// Steps returns the steps of an objective in order.
func Steps(ctx context.Context, db postgres.DB, objectiveID string) ([]Step, error) {
	return postgres.Rows[Step](ctx, db, "list steps", `
		select id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at
		  from agent_objective_steps where objective_id = @id order by position`, pgx.StrictNamedArgs{"id": objectiveID})
}

// MaxAttempts is the number of failures after which a step is [Failed].
const MaxAttempts = 3

// FailStep counts a failed attempt of a pending step, stores the reason, and returns the step. It stays pending until
// [MaxAttempts] failures. It returns false if the step is unknown or not pending any more.
func FailStep(ctx context.Context, db postgres.DB, stepID, reason, traceID string) (Step, bool, error) {
	rows, err := db.Query(ctx, `
		update agent_objective_steps
		   set attempts = attempts + 1, status = case when attempts + 1 >= @most then 'failed' else 'pending' end,
		       result = @reason, trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = 'pending'
		returning id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at`,
		pgx.StrictNamedArgs{"id": stepID, "most": MaxAttempts, "reason": truncate(reason), "trace_id": traceID})
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

// AddSteps appends planned steps to an active objective and returns the new ones. It skips existing titles. It returns
// [ErrNotFound], [ErrNotActive], or [ErrInvalid] for an invalid title or more than 100 steps.
func AddSteps(
	ctx context.Context, db postgres.Beginner, objectiveID string, titles []string,
) (added []Step, err error) {
	if err := errors.Join(checkTitles(titles)...); err != nil {
		return nil, fmt.Errorf("add steps: %w: %w", ErrInvalid, err)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		status, err := lockObjective(ctx, tx, objectiveID)
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

// lockObjective locks an objective until the transaction ends. The functions that add steps or settle take this lock.
func lockObjective(ctx context.Context, tx pgx.Tx, objectiveID string) (status string, err error) {
	err = tx.QueryRow(ctx, `select status from agent_objectives where id = @id for update`,
		pgx.StrictNamedArgs{"id": objectiveID}).Scan(&status)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	return status, err
}

// addSteps appends steps. The caller holds the objective's lock.
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
		err = fmt.Errorf("%w: an objective holds at most %d steps", ErrInvalid, maxSteps)
	}
	return added, err
}

// maxStepResult bounds a result, and other texts of an admin, in bytes. A longer one is cut.
const maxStepResult = 8 << 10

// truncate cuts a text to its stored length.
func truncate(text string) string { return textcut.Stored(text, maxStepResult) }

// CompleteStep completes a pending step. It stores its evidence, its result, cut at 8 KiB, and the trace. It returns
// false if the step is unknown or not pending any more. It returns [ErrNoEvidence] unless activities are successful
// calls of that trace, at least one, made since the round began, that prove no other step.
func CompleteStep(
	ctx context.Context, db postgres.Beginner, stepID, result, traceID string, activities []string,
) (bool, error) {
	return complete(ctx, db, stepID, result, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, activity_id)
			select @step, id from unnest(@ids::uuid[]) id order by id`,
			pgx.StrictNamedArgs{"step": stepID, "ids": append([]string{}, activities...)})
		return err
	})
}

// ConfirmStep completes a pending step by an admin's confirmation, which is stored with the admin and the reason. It
// returns false if the step is unknown or not pending any more.
func ConfirmStep(ctx context.Context, db postgres.Beginner, stepID, by, reason, traceID string) (bool, error) {
	if strings.TrimSpace(by) == "" || strings.TrimSpace(reason) == "" {
		return false, errors.New("complete step: a confirmation needs an admin and a reason")
	}
	return complete(ctx, db, stepID, reason, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, trace_id, given_by, reason)
			values (@step, @trace_id, @by, @reason)`,
			pgx.StrictNamedArgs{"step": stepID, "trace_id": traceID, "by": truncate(by), "reason": truncate(reason)})
		return err
	})
}

// Confirm is [ConfirmStep], and settles the objective after its last step, as [Advanced] does. It returns
// [ErrStepNotFound] for an unknown step.
func Confirm(ctx context.Context, db postgres.Beginner, stepID, by, reason, traceID string) (ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if ok, err = ConfirmStep(ctx, tx, stepID, by, reason, traceID); err != nil {
			return err
		}
		var objectiveID string
		err = tx.QueryRow(ctx, `select objective_id from agent_objective_steps where id = @id`,
			pgx.StrictNamedArgs{"id": stepID}).Scan(&objectiveID)
		if errors.Is(err, pgx.ErrNoRows) {
			err = fmt.Errorf("confirm step %s: %w", stepID, ErrStepNotFound)
		}
		if err == nil && ok {
			_, err = Advanced(ctx, tx, objectiveID, traceID)
		}
		return err
	})
	return ok, err
}

// complete calls prove, which stores the evidence, and marks the step as done, under the step's lock.
func complete(
	ctx context.Context, db postgres.Beginner, stepID, result, traceID string, prove func(context.Context, pgx.Tx) error,
) (ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		var pending bool
		err := tx.QueryRow(ctx, `
			select status = 'pending' from agent_objective_steps where id = @id for update`,
			pgx.StrictNamedArgs{"id": stepID}).Scan(&pending)
		if errors.Is(err, pgx.ErrNoRows) || err == nil && !pending {
			return nil
		}
		if err == nil {
			err = prove(ctx, tx)
		}
		if err == nil {
			ok, err = markDone(ctx, tx, stepID, result, traceID)
		}
		return err
	})
	// LK010: a trigger refused the evidence. 23505, unique_violation: the call already proves another step.
	if postgres.IsCode(err, "LK010", "23505") {
		err = fmt.Errorf("%w: %w", ErrNoEvidence, err)
	}
	if err != nil {
		return false, fmt.Errorf("complete step: %w", err)
	}
	return ok, nil
}

// markDone completes a pending step; false if it is not pending any more.
func markDone(ctx context.Context, db postgres.DB, stepID, result, traceID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objective_steps
		   set status = 'done', result = @result, trace_id = @trace_id, attempts = attempts + 1,
		       updated_at = clock_timestamp()
		 where id = @id and status = 'pending'`,
		pgx.StrictNamedArgs{"id": stepID, "result": truncate(result), "trace_id": traceID})
	return postgres.Changed(tag, err, "mark step done")
}
