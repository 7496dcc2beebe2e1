package automations

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Propose writes down an automation that the agent by wants, and returns it. It is out of service until an admin
// accepts it, and an event or signal in the meantime starts nothing. Proposing the same again changes nothing;
// [ErrTaken] when the name belongs to another automation, [ErrTooMany] when 20 proposals await a decision.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (a Automation, err error) {
	r, err := resolve(d)
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Automation{}, fmt.Errorf("propose automation %q: say who proposes it, under which trace", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		inserted, err := insertProposal(ctx, tx, r, by, traceID)
		if err != nil {
			return err
		}
		if a, err = Get(ctx, tx, d.Name); err == nil && !inserted && !a.says(r) {
			err = ErrTaken
		}
		return err
	})
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	return a, nil
}

// insertProposal writes the row; false when the name is taken. The lock makes the count of open ones exact.
func insertProposal(ctx context.Context, tx pgx.Tx, r resolved, by, traceID string) (bool, error) {
	if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper automation proposals', 0))`); err != nil {
		return false, err
	}
	var taken bool
	var open int
	err := tx.QueryRow(ctx, `
		select exists (select from agent_automations where name = @name),
		       (select count(*) from agent_automations where disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"name": r.Name}).Scan(&taken, &open)
	if err != nil || taken {
		return false, err
	}
	if open >= maxOpen {
		return false, ErrTooMany
	}
	tag, err := tx.Exec(ctx, `
		insert into agent_automations
		       (name, description, trigger, cron, timezone, event, condition, signal, skill_name, arguments, prompt, flow, max_attempts,
		        enabled, disabled_by, disabled_reason, disabled_at, proposed_by, last_trace_id, source)
		values (@name, @description, @trigger, @cron, @timezone, @event, @condition, @signal, @skill, @arguments, @prompt, @flow, @max_attempts,
		        false, 'proposal', 'proposed by the agent; an admin accepts it', clock_timestamp(), @by, @trace_id, @source)
		on conflict (name) do nothing`,
		pgx.StrictNamedArgs{
			"name": r.Name, "description": r.Description, "trigger": r.Trigger, "cron": r.Cron, "timezone": r.Timezone, "event": r.Event,
			"condition": r.When, "signal": r.Signal, "skill": r.Skill, "arguments": r.arguments, "prompt": r.Prompt,
			"flow": r.Flow, "max_attempts": r.MaxAttempts, "by": by, "trace_id": traceID, "source": SourceAgent,
		})
	return tag.RowsAffected() > 0, err
}

// says reports whether a proposal of the agent was made in these words.
func (a Automation) says(r resolved) bool {
	return a.ProposedBy != "" && a.Trigger == r.Trigger && a.Cron == r.Cron && a.Event == r.Event && a.Condition == r.When &&
		a.Signal == r.Signal && a.SkillName == r.Skill && a.Prompt == r.Prompt && a.Flow == r.Flow
}

// Accept puts a proposal into service, by an admin's decision; a schedule begins now. False when it is not a
// proposal; [ErrNotFound] when there is no such automation. [Disable] refuses one.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("accept automation %q: name the admin who does it", nameOrID)
	}
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	r, err := resolve(a.definition())
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	next, err := firstTime(ctx, db, r)
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, decided_by = @by, next_run_at = @next,
		       updated_at = clock_timestamp()
		 where id = @id and disabled_by = 'proposal' and revision = @revision`,
		pgx.StrictNamedArgs{"id": a.ID, "by": clip(by), "next": next, "revision": a.Revision})
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	return tag.RowsAffected() > 0, nil
}

// definition is what decides about an automation's times.
func (a Automation) definition() Definition {
	return Definition{
		Name: a.Name, Trigger: a.Trigger, Cron: a.Cron, Timezone: a.Timezone, Event: a.Event, When: a.Condition, Signal: a.Signal,
		Skill: a.SkillName, Prompt: a.Prompt, Flow: a.Flow, MaxAttempts: a.MaxAttempts,
	}
}
