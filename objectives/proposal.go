package objectives

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Propose writes down an objective that the agent by wants to pursue, and returns it. It is not worked on until
// an admin accepts it. Proposing the same again changes nothing; [ErrTaken] when the name belongs to an
// objective that says something else, [ErrTooMany] when 20 proposals await a decision.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (o Objective, err error) {
	if err := Validate(d); err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Objective{}, fmt.Errorf("propose objective %q: say who proposes it, under which trace", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		id, err := insertProposal(ctx, tx, d, by, traceID)
		if err == nil && id != "" {
			_, err = addSteps(ctx, tx, id, d.Steps)
		}
		if err != nil {
			return err
		}
		if o, err = Get(ctx, tx, d.Name); err == nil && id == "" {
			err = sameProposal(ctx, tx, o, d)
		}
		return err
	})
	if err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	return o, nil
}

// insertProposal writes the row; no id when the name is taken. The lock makes the count of open ones exact.
func insertProposal(ctx context.Context, tx pgx.Tx, d Definition, by, traceID string) (id string, err error) {
	review, err := parseReview(d.ReviewEvery)
	if err != nil {
		return "", err
	}
	if d.Priority == 0 {
		d.Priority = defaultPriority
	}
	if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper objective proposals', 0))`); err != nil {
		return "", err
	}
	var taken bool
	var open int
	err = tx.QueryRow(ctx, `
		select exists (select from agent_objectives where name = @name),
		       (select count(*) from agent_objectives where status = 'proposed')`,
		pgx.StrictNamedArgs{"name": d.Name}).Scan(&taken, &open)
	if err != nil || taken {
		return "", err
	}
	if open >= maxOpen {
		return "", ErrTooMany
	}
	err = tx.QueryRow(ctx, `
		insert into agent_objectives (name, goal, success_criteria, priority, review_every, status, proposed_by, proposed_trace, source)
		values (@name, @goal, @criteria, @priority, make_interval(secs => nullif(@review::float8, 0)), 'proposed', @by, @trace_id, @source)
		on conflict (name) do nothing returning id`,
		pgx.StrictNamedArgs{
			"name": d.Name, "goal": strings.TrimSpace(d.Goal), "criteria": strings.TrimSpace(d.SuccessCriteria), "priority": d.Priority,
			"review": review.Seconds(), "by": by, "trace_id": traceID, "source": SourceAgent,
		}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// sameProposal lets a proposal pass that was made before, in the same words.
func sameProposal(ctx context.Context, tx pgx.Tx, o Objective, d Definition) error {
	if o.ProposedBy == "" || o.Goal != strings.TrimSpace(d.Goal) || o.SuccessCriteria != strings.TrimSpace(d.SuccessCriteria) {
		return ErrTaken
	}
	var missing bool
	err := tx.QueryRow(ctx, `
		select exists (select from unnest(@titles::text[]) t (title)
		                where not exists (select from agent_objective_steps s where s.objective_id = @id and s.title = t.title))`,
		pgx.StrictNamedArgs{"id": o.ID, "titles": append([]string{}, d.Steps...)}).Scan(&missing)
	if err == nil && missing {
		err = ErrTaken
	}
	return err
}

// Accept makes a proposal active, due now, by an admin's decision. False when it is not a proposal; a rejected
// one may be accepted still. [ErrNotFound] when there is no such objective.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Active, by, reason)
}

// Reject refuses a proposal, by an admin's decision. False when it is not an undecided proposal;
// [ErrNotFound] when there is no such objective.
func Reject(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Rejected, by, reason)
}

func decide(ctx context.Context, db postgres.DB, nameOrID, status, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("decide objective %q: name the admin who does it", nameOrID)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives
		   set status = @status, decided_by = @by, decided_reason = @reason, decided_at = clock_timestamp(),
		       due_at = clock_timestamp(), updated_at = clock_timestamp()
		 where id = @id and (status = 'proposed' or status = 'rejected' and @status = 'active')`,
		pgx.StrictNamedArgs{"id": o.ID, "status": status, "by": storable(by), "reason": storable(reason)})
	if err != nil {
		return false, fmt.Errorf("decide objective %q: %w", nameOrID, err)
	}
	return tag.RowsAffected() > 0, nil
}

// SetNote replaces the note on an objective's progress and returns the objective. revision is the one that the caller
// has read, or [Unread]: then there must be no note. With [ErrConflict], which tells that it is otherwise, the
// objective is returned as it is. 0 replaces whatever is there. It is [ErrNotActive] for an objective that is not
// worked on or proposed.
func SetNote(ctx context.Context, db postgres.DB, nameOrID, note, traceID string, revision int) (Objective, error) {
	if err := checkText("note", note, maxNote); err != nil {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, err)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Objective{}, err
	}
	if o.Status != Active && o.Status != Proposed && o.Status != Paused {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, ErrNotActive)
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives set note = @note, last_trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = @status and (@revision = 0 or revision = @revision or @revision = -1 and note = '')`,
		pgx.StrictNamedArgs{"id": o.ID, "note": note, "trace_id": traceID, "status": o.Status, "revision": revision})
	if err != nil {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, err)
	}
	o, err = Get(ctx, db, o.ID)
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("note objective %q: %w", nameOrID, ErrConflict)
	}
	return o, err
}
