package objectives

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// maxEvidence is how many calls are kept for one step.
const maxEvidence = 50

// Where says which of the agent's calls may speak for a step.
type Where struct {
	TraceID     string // the calls' trace; required
	ExecutionID string // the run that made them; empty: any of the trace
	Under       string // the key of the durable step within which they were made; empty: any
}

// call is a candidate: a successful call that proves no step yet.
type call struct{ ID, SkillName string }

// FindEvidence returns the ids of the activities that show a pending step to be done: successful calls made
// since its round began that prove no step yet. Those of a skill that the step's title names speak for it,
// all of them; where it names none, the oldest call that no other pending step names does. Empty when
// there is none: then the agent has not acted.
func FindEvidence(ctx context.Context, db postgres.DB, stepID string, w Where) ([]string, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.skill_name
		  from agent_activity a, agent_objective_steps s
		 where s.id = @step and a.trace_id = @trace_id and a.created_at >= s.started_at
		   and lanekeeper.is_agent_evidence(a.kind, a.status, a.surface, a.skill_name)
		   and (@execution = '' or a.execution_id = nullif(@execution, '')::uuid)
		   and (@under = '' or starts_with(a.step, @under || '/'))
		   and not exists (select from agent_objective_evidence e where e.activity_id = a.id)
		 order by a.id`,
		pgx.StrictNamedArgs{"step": stepID, "trace_id": w.TraceID, "execution": w.ExecutionID, "under": w.Under})
	if err != nil {
		return nil, fmt.Errorf("find evidence: %w", err)
	}
	calls, err := pgx.CollectRows(rows, pgx.RowToStructByPos[call])
	if err != nil {
		return nil, fmt.Errorf("find evidence: %w", err)
	}
	if len(calls) == 0 {
		return nil, nil
	}
	title, others, err := pendingTitles(ctx, db, stepID)
	if err != nil {
		return nil, fmt.Errorf("find evidence: %w", err)
	}
	return chosen(calls, title, others), nil
}

// pendingTitles is the step's title, and those of the objective's other pending steps.
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

// chosen picks the calls that speak for a step.
func chosen(calls []call, title string, others []string) (ids []string) {
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

// names reports whether a title speaks of a skill, as a word of its own.
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

// CompleteStep marks a pending step done, with the activities that show it, and keeps its result, cut at 8
// KiB, and the trace that did it. False when the step is not pending any more, and then nothing changes.
// [ErrNoEvidence] when activities is empty, or one of them is not a successful call of that trace since the
// step's round began, or proves another step already.
func CompleteStep(ctx context.Context, db postgres.Beginner, stepID, result, traceID string, activities []string) (bool, error) {
	return complete(ctx, db, stepID, result, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, activity_id) select @step, id from unnest(@ids::uuid[]) id order by id`,
			pgx.StrictNamedArgs{"step": stepID, "ids": append([]string{}, activities...)})
		return err
	})
}

// ConfirmStep marks a pending step done on an admin's word, which is kept with who gave it and why. False when
// the step is not pending any more.
func ConfirmStep(ctx context.Context, db postgres.Beginner, stepID, by, reason, traceID string) (bool, error) {
	if strings.TrimSpace(by) == "" || strings.TrimSpace(reason) == "" {
		return false, errors.New("complete step: an admin's word needs who gives it and why")
	}
	return complete(ctx, db, stepID, reason, traceID, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_objective_evidence (step_id, trace_id, given_by, reason) values (@step, @trace_id, @by, @reason)`,
			pgx.StrictNamedArgs{"step": stepID, "trace_id": traceID, "by": storable(by), "reason": storable(reason)})
		return err
	})
}

// complete writes the evidence and ends the step, under the step's lock.
func complete(ctx context.Context, db postgres.Beginner, stepID, result, traceID string, prove func(context.Context, pgx.Tx) error) (ok bool, err error) {
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
			ok, err = done(ctx, tx, stepID, result, traceID)
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

// EvidenceOf returns what shows the steps of an objective to be done, in the order in which it was given.
func EvidenceOf(ctx context.Context, db postgres.DB, objectiveID string) ([]Evidence, error) {
	rows, err := db.Query(ctx, `
		select e.id, e.step_id, e.activity_id, e.skill_name, e.trace_id, e.given_by, e.reason, e.created_at
		  from agent_objective_evidence e join agent_objective_steps s on s.id = e.step_id
		 where s.objective_id = @id and e.created_at >= s.started_at order by e.id`, pgx.StrictNamedArgs{"id": objectiveID})
	if err != nil {
		return nil, fmt.Errorf("list evidence: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Evidence])
	if err != nil {
		return nil, fmt.Errorf("list evidence: %w", err)
	}
	return found, nil
}

// Confirm is [ConfirmStep], and settles the objective if that was its last step, as [Advanced] does.
// [ErrStepNotFound] when there is no such step.
func Confirm(ctx context.Context, db postgres.Beginner, stepID, by, reason, traceID string) (ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if ok, err = ConfirmStep(ctx, tx, stepID, by, reason, traceID); err != nil {
			return err
		}
		var objectiveID string
		err = tx.QueryRow(ctx, `select objective_id from agent_objective_steps where id = @id`, pgx.StrictNamedArgs{"id": stepID}).Scan(&objectiveID)
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
