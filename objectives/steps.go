package objectives

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const maxStepResult = 8 << 10

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

// FailStep counts a failed attempt of a pending step, stores the reason, and returns the step. It stays pending until
// [MaxAttempts] failures. It returns false if the step is not pending any more.
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

// AddSteps appends planned steps to an active objective and returns the new ones. It skips existing titles. An
// objective has at most 100 steps. The error is [ErrNotFound], [ErrNotActive], or names the invalid title.
func AddSteps(
	ctx context.Context, db postgres.Beginner, objectiveID string, titles []string,
) (added []Step, err error) {
	if err := errors.Join(checkTitles(titles)...); err != nil {
		return nil, fmt.Errorf("add steps: %w", err)
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

// lockObjective locks an objective until the transaction ends, so that its steps stay stable.
func lockObjective(ctx context.Context, tx pgx.Tx, objectiveID string) (status string, err error) {
	err = tx.QueryRow(ctx, `select status from agent_objectives where id = @id for update`,
		pgx.StrictNamedArgs{"id": objectiveID}).Scan(&status)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	return status, err
}

// addSteps appends steps under the objective's lock.
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

// truncate cuts a text to its stored length.
func truncate(text string) string { return textcut.Stored(text, maxStepResult) }

// Advanced records that a run worked on an objective under traceID, settles it if none of its steps is
// pending any more, and returns it as it is then:
//
//   - with review_every, the next round begins: due one review_every from now, round + 1, every
//     step pending again with no attempts, the skipped left out. The last results stay readable;
//   - otherwise it is completed, or failed if one of its steps failed.
//
// An objective without any step stays active unless it is reviewed. A second call for the same round changes
// nothing. [ErrNotFound] when there is no such objective.
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
// most a day. It changes nothing if the objective is not active or not due.
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

// Settle settles the due objectives without pending steps, as [Advanced] would: their run was lost before its end. It
// returns how many.
func Settle(ctx context.Context, db postgres.Beginner) (int, error) {
	type left struct{ ID, LastTraceID string }
	all, err := postgres.Rows[left](ctx, db, "settle objectives", `
		select o.id, o.last_trace_id from agent_objectives o
		 where o.status = 'active' and o.due_at <= statement_timestamp()
		   and exists (select from agent_objective_steps s where s.objective_id = o.id)
		   and not exists (select from agent_objective_steps s where s.objective_id = o.id and s.status = 'pending')
		 order by o.id`)
	if err != nil {
		return 0, err
	}
	for _, o := range all {
		if _, err := Advanced(ctx, db, o.ID, o.LastTraceID); err != nil {
			return 0, err
		}
	}
	return len(all), nil
}

// settle runs under the objective's lock. The condition on due_at stops a second caller: a recurring objective is not
// due right after its round.
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
		       status = case when e.id is null or e.recurs then o.status when e.failed > 0 then 'failed' else 'completed' end,
		       round = o.round + coalesce(e.recurs, false)::int,
		       due_at = case when e.recurs then clock_timestamp() + o.review_every else o.due_at end
		  from (select) one left join ended e on true
		 where o.id = @id::uuid`, pgx.StrictNamedArgs{"id": objectiveID, "trace_id": traceID})
	return err
}

// maxEvidence bounds the stored calls of one step.
const maxEvidence = 50

// EvidenceFilter selects the calls that may be evidence.
type EvidenceFilter struct {
	TraceID     string // trace of the calls; required
	ExecutionID string // execution of the calls; empty for any of the trace
	StepKey     string // key of the enclosing durable step; empty for any
}

// call is a successful call that proves no step yet.
type call struct{ ID, SkillName string }

// FindEvidence returns the activities that prove a pending step: successful calls since its round began that prove no
// step yet. If the step's title names skills, their calls count, all of them. Otherwise the oldest call counts that
// no other pending step names. Empty means that the agent has not acted.
func FindEvidence(ctx context.Context, db postgres.DB, stepID string, w EvidenceFilter) ([]string, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.skill_name
		  from lanekeeper.agent_evidence a, agent_objective_steps s
		 where s.id = @step and a.trace_id = @trace_id and a.created_at >= s.started_at
		   and (@execution = '' or a.execution_id = nullif(@execution, '')::uuid)
		   and (@under = '' or starts_with(a.step, @under || '/'))
		   and not exists (select from agent_objective_evidence e where e.activity_id = a.id)
		 order by a.id`,
		pgx.StrictNamedArgs{"step": stepID, "trace_id": w.TraceID, "execution": w.ExecutionID, "under": w.StepKey})
	calls, err := postgres.Collect(rows, err, "find evidence", pgx.RowToStructByPos[call])
	if err != nil {
		return nil, err
	}
	if len(calls) == 0 {
		return nil, nil
	}
	title, others, err := pendingTitles(ctx, db, stepID)
	if err != nil {
		return nil, fmt.Errorf("find evidence: %w", err)
	}
	return selectEvidence(calls, title, others), nil
}

// pendingTitles returns the titles of the step and of the objective's other pending steps.
func pendingTitles(ctx context.Context, db postgres.DB, stepID string) (title string, others []string, err error) {
	rows, err := db.Query(ctx, `
		select o.title, o.id = s.id
		  from agent_objective_steps s join agent_objective_steps o on o.objective_id = s.objective_id
		 where s.id = @step and (o.id = s.id or o.status = 'pending')`, pgx.StrictNamedArgs{"step": stepID})
	if err != nil {
		return "", nil, err
	}
	var text string
	var own bool
	_, err = pgx.ForEachRow(rows, []any{&text, &own}, func() error {
		if own {
			title = text
		} else {
			others = append(others, text)
		}
		return nil
	})
	return title, others, err
}

// selectEvidence selects the calls that prove a step.
func selectEvidence(calls []call, title string, others []string) (ids []string) {
	for _, c := range calls {
		if names(title, c.SkillName) && len(ids) < maxEvidence {
			ids = append(ids, c.ID)
		}
	}
	if len(ids) > 0 {
		return ids
	}
	for _, c := range calls {
		if !slices.ContainsFunc(others, func(other string) bool { return names(other, c.SkillName) }) {
			return []string{c.ID}
		}
	}
	return nil
}

// names reports whether a title names a skill, as a whole word.
func names(title, skill string) bool {
	for rest := title; ; {
		i := strings.Index(rest, skill)
		if i < 0 {
			return false
		}
		before, after := rest[:i], rest[i+len(skill):]
		if !endsInWord(before) && !beginsWithWord(after) {
			return true
		}
		rest = after
	}
}

func endsInWord(s string) bool     { return s != "" && wordByte(s[len(s)-1]) }
func beginsWithWord(s string) bool { return s != "" && wordByte(s[0]) }
func wordByte(b byte) bool {
	return b == '_' || b == '-' || b >= '0' && b <= '9' || b|0x20 >= 'a' && b|0x20 <= 'z'
}
func noEvidence(err error) bool    { return postgres.IsCode(err, "LK010") }
func provedAnother(err error) bool { return postgres.IsCode(err, "23505") }

// CompleteStep completes a pending step with its evidence, and stores its result, cut at 8 KiB, and the trace. It
// returns false if the step is not pending any more. It returns [ErrNoEvidence] if activities is empty or contains
// anything but successful calls of that trace, made since the round began, that prove no other step.
func CompleteStep(
	ctx context.Context, db postgres.Beginner, stepID, result, traceID string, activities []string,
) (bool, error) {
	return complete(ctx, db, stepID, result, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, activity_id) select @step, id from unnest(@ids::uuid[]) id
			  order by id`,
			pgx.StrictNamedArgs{"step": stepID, "ids": append([]string{}, activities...)})
		return err
	})
}

// ConfirmStep completes a pending step by an admin's confirmation, which is stored with the admin and the reason. It
// returns false if the step is not pending any more.
func ConfirmStep(ctx context.Context, db postgres.Beginner, stepID, by, reason, traceID string) (bool, error) {
	if strings.TrimSpace(by) == "" || strings.TrimSpace(reason) == "" {
		return false, errors.New("complete step: a confirmation needs an admin and a reason")
	}
	return complete(ctx, db, stepID, reason, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, trace_id, given_by, reason) values (@step, @trace_id, @by, @reason)`,
			pgx.StrictNamedArgs{"step": stepID, "trace_id": traceID, "by": truncate(by), "reason": truncate(reason)})
		return err
	})
}

// complete stores the evidence and ends the step, under the step's lock.
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
	if noEvidence(err) || provedAnother(err) {
		err = fmt.Errorf("%w: %w", ErrNoEvidence, err)
	}
	if err != nil {
		return false, fmt.Errorf("complete step: %w", err)
	}
	return ok, nil
}

// EvidenceOf returns the evidence of an objective's steps, in order.
func EvidenceOf(ctx context.Context, db postgres.DB, objectiveID string) ([]Evidence, error) {
	return postgres.Rows[Evidence](ctx, db, "list evidence", `
		select e.id, e.step_id, e.activity_id, e.skill_name, e.trace_id, e.given_by, e.reason, e.created_at
		  from agent_objective_evidence e join agent_objective_steps s on s.id = e.step_id
		 where s.objective_id = @id and e.created_at >= s.started_at order by e.id`, pgx.StrictNamedArgs{"id": objectiveID})
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
