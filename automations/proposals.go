package automations

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Propose stores an automation that the agent by proposes, and returns it. That agent acts in its runs. The automation
// is disabled until an admin accepts it; earlier events and signals cause no runs. A repeated proposal changes nothing,
// even with another description. Propose returns [ErrNameTaken] for the name of any other automation, and [ErrTooMany]
// while 20 proposals are undecided.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (a Automation, err error) {
	r, err := resolve(d)
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Automation{}, fmt.Errorf("propose automation %q: the proposer or its trace is missing", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		inserted, err := insertProposal(ctx, tx, r, by, traceID)
		if err != nil {
			return err
		}
		if a, err = Get(ctx, tx, d.Name); err == nil && !inserted && !a.repeats(r) {
			err = ErrNameTaken
		}
		return err
	})
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	return a, nil
}

// insertProposal inserts the row; false if the name is taken. A lock makes the count of open proposals exact.
func insertProposal(ctx context.Context, tx pgx.Tx, r resolved, by, traceID string) (bool, error) {
	if _, err := tx.Exec(ctx,
		`select pg_advisory_xact_lock(hashtextextended('lanekeeper automation proposals', 0))`); err != nil {
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
	if open >= maxUndecided {
		return false, ErrTooMany
	}
	tag, err := tx.Exec(ctx, `
		insert into agent_automations
		       (name, description, trigger, cron, timezone, event, condition, signal, skill_name, arguments, prompt, flow,
		        max_attempts, enabled, disabled_by, disabled_reason, disabled_at, proposed_by, agent, last_trace_id, source)
		values (@name, @description, @trigger, @cron, @timezone, @event, @condition, @signal, @skill, @arguments, @prompt,
		  @flow, @max_attempts, false, 'proposal', 'proposed by the agent; an admin accepts it', clock_timestamp(), @by,
		  coalesce((select g.name from agent_agents g where g.name = @by and g.current and not g.is_default), ''),
		  @trace_id, @source)
		on conflict (name) do nothing`,
		pgx.StrictNamedArgs{
			"name": r.Name, "description": r.Description, "trigger": r.Trigger, "cron": r.Cron,
			"timezone": r.Timezone, "event": r.Event, "condition": r.When, "signal": r.Signal, "skill": r.Skill,
			"arguments": r.arguments, "prompt": r.Prompt, "flow": r.Flow, "max_attempts": r.MaxAttempts, "by": by,
			"trace_id": traceID, "source": SourceAgent,
		})
	return tag.RowsAffected() > 0, err
}

// repeats reports whether a is a proposal of the agent with the trigger and the action of r.
func (a Automation) repeats(r resolved) bool {
	return a.ProposedBy != "" && a.Trigger == r.Trigger && a.Cron == r.Cron && a.Timezone == r.Timezone &&
		a.Event == r.Event && a.Condition == r.When && a.Signal == r.Signal &&
		a.SkillName == r.Skill && exactjson.Equal(a.Arguments, r.arguments) && a.Prompt == r.Prompt && a.Flow == r.Flow &&
		a.MaxAttempts == r.MaxAttempts
}

// Accept enables a proposal for an admin; a schedule starts now. It returns false if the automation is not a proposal,
// and [ErrNotFound] for an unknown automation. [Disable] rejects a proposal.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("accept automation %q: an admin is required", nameOrID)
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
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, decided_by = @by,
		       next_run_at = @next, updated_at = clock_timestamp()
		 where id = @id and disabled_by = 'proposal' and revision = @revision`,
		pgx.StrictNamedArgs{"id": a.ID, "by": truncate(by), "next": next, "revision": a.Revision})
	return postgres.Changed(tag, err, fmt.Sprintf("accept automation %q", nameOrID))
}

// definition returns the fields that determine an automation's times.
func (a Automation) definition() Definition {
	return Definition{
		Name: a.Name, Trigger: a.Trigger, Cron: a.Cron, Timezone: a.Timezone, Event: a.Event,
		When: a.Condition, Signal: a.Signal, Skill: a.SkillName, Prompt: a.Prompt, Flow: a.Flow,
		MaxAttempts: a.MaxAttempts,
	}
}

// maxUndecided bounds the number of undecided proposals.
const maxUndecided = 20
