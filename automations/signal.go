package automations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Watch looks at the signals of all enabled automations, once, and returns how many fired. A signal fires when
// it becomes true, and again only after it was false: that it is true costs one run, however long it stays so
// and however many processes watch. A signal that cannot be decided does not hold up the others; the error
// joins what was wrong with each.
func Watch(ctx context.Context, db postgres.DB) (fired int, err error) {
	rows, err := db.Query(ctx, `
		select id, name, signal, armed from agent_automations where enabled and trigger = 'signal' order by id`)
	if err != nil {
		return 0, fmt.Errorf("watch signals: %w", err)
	}
	type watched struct {
		ID, Name, Signal string
		Armed            bool
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[watched])
	if err != nil || len(all) == 0 {
		return 0, wrapped("watch signals", err)
	}
	counters, err := Count(ctx, db)
	if err != nil {
		return 0, fmt.Errorf("watch signals: %w", err)
	}
	var failures []error
	for _, w := range all {
		up, err := holds(w.Signal, counters)
		switch {
		case err != nil:
			failures = append(failures, &ConditionError{w.Name, err})
		case up && w.Armed:
			did, err := fire(ctx, db, w.ID, w.Signal, counters)
			if err != nil {
				return fired, fmt.Errorf("watch signals: %w", err)
			}
			fired += did
		case !up && !w.Armed:
			if err := rearm(ctx, db, w.ID, w.Signal); err != nil {
				return fired, fmt.Errorf("watch signals: %w", err)
			}
		}
	}
	return fired, errors.Join(failures...)
}

// fire makes a run due. The flag is the claim: of many watchers one lowers it, in the statement that inserts
// the run.
func fire(ctx context.Context, db postgres.DB, id, signal string, counters Counters) (int, error) {
	tag, err := db.Exec(ctx, `
		with up as (
		  update agent_automations set armed = false
		   where id = @id and armed and enabled and signal = @signal returning id),
		run as (
		  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, payload)
		  select id, 'signal', clock_timestamp(), 'due', @counters from up returning id)
		select pg_notify(@channel, '') from run`,
		pgx.StrictNamedArgs{"id": id, "signal": signal, "counters": counters, "channel": Channel})
	return int(tag.RowsAffected()), err
}

func rearm(ctx context.Context, db postgres.DB, id, signal string) error {
	_, err := db.Exec(ctx, `update agent_automations set armed = true where id = @id and not armed and signal = @signal`,
		pgx.StrictNamedArgs{"id": id, "signal": signal})
	return err
}

func wrapped(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
