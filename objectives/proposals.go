package objectives

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// maxUndecided bounds the number of undecided proposals.
const maxUndecided = 20

// Propose stores an objective that the agent by proposes, and returns it. That agent works on it after an admin accepts
// it. A repeated proposal with the same goal and criteria and without a new step changes nothing, not even the priority
// or the review interval. Propose returns [ErrNameTaken] for the name of any other objective, and [ErrTooMany] while 20
// proposals are undecided.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (o Objective, err error) {
	if err := Validate(d); err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Objective{}, fmt.Errorf("propose objective %q: the proposer or its trace is missing", d.Name)
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

// insertProposal inserts the row and returns its id; "" if the name is taken. A lock makes the count of undecided
// proposals exact.
func insertProposal(ctx context.Context, tx pgx.Tx, d Definition, by, traceID string) (id string, err error) {
	review, err := parseReview(d.ReviewEvery)
	if err != nil {
		return "", err
	}
	d.Priority = cmp.Or(d.Priority, defaultPriority)
	if _, err := tx.Exec(ctx,
		`select pg_advisory_xact_lock(hashtextextended('lanekeeper objective proposals', 0))`); err != nil {
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
	if open >= maxUndecided {
		return "", ErrTooMany
	}
	err = tx.QueryRow(ctx, `
		insert into agent_objectives (name, goal, success_criteria, priority, review_every, status, proposed_by, agent,
		  proposed_trace, source)
		values (@name, @goal, @criteria, @priority, make_interval(secs => nullif(@review::float8, 0)), 'proposed', @by,
		  coalesce((select g.name from agent_agents g where g.name = @by and g.current and not g.is_default), ''),
		  @trace_id, @source)
		on conflict (name) do nothing returning id`,
		pgx.StrictNamedArgs{
			"name": d.Name, "goal": strings.TrimSpace(d.Goal), "criteria": strings.TrimSpace(d.SuccessCriteria),
			"priority": d.Priority, "review": review.Seconds(), "by": by, "trace_id": traceID, "source": SourceAgent,
		}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// sameProposal returns [ErrNameTaken] unless d repeats the proposal o.
func sameProposal(ctx context.Context, tx pgx.Tx, o Objective, d Definition) error {
	if o.ProposedBy == "" || o.Goal != strings.TrimSpace(d.Goal) ||
		o.SuccessCriteria != strings.TrimSpace(d.SuccessCriteria) {
		return ErrNameTaken
	}
	var missing bool
	err := tx.QueryRow(ctx, `
		select exists (select from unnest(@titles::text[]) t (title)
		                where not exists (select from agent_objective_steps s where s.objective_id = @id
		                  and s.title = t.title))`,
		pgx.StrictNamedArgs{"id": o.ID, "titles": append([]string{}, d.Steps...)}).Scan(&missing)
	if err == nil && missing {
		err = ErrNameTaken
	}
	return err
}

// Accept activates a proposal, also a rejected one, for an admin. The objective is due now. Accept returns false if it
// is not a proposal, and [ErrNotFound] for an unknown objective.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Active, by, reason)
}

// Reject rejects a proposal for an admin. It returns false if the objective is not an undecided proposal, and
// [ErrNotFound] for an unknown objective.
func Reject(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Rejected, by, reason)
}

func decide(ctx context.Context, db postgres.DB, nameOrID, status, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("decide objective %q: an admin is required", nameOrID)
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
		pgx.StrictNamedArgs{"id": o.ID, "status": status, "by": truncate(by), "reason": truncate(reason)})
	return postgres.Changed(tag, err, fmt.Sprintf("decide objective %q", nameOrID))
}
