package automations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Watch evaluates the signals of all enabled automations once and returns how many fired. A signal fires when it
// becomes true, and again only after it was false, regardless of the number of watchers. A failing signal does not
// stop the others; the error joins all failures.
func Watch(ctx context.Context, db postgres.DB) (fired int, err error) {
	rows, err := db.Query(ctx, `
		select id, name, signal, signal_armed from agent_automations where enabled and trigger = 'signal' order by id`)
	type watched struct {
		ID, Name, Signal string
		SignalArmed      bool
	}
	all, err := postgres.Collect(rows, err, "watch signals", pgx.RowToStructByPos[watched])
	if err != nil || len(all) == 0 {
		return 0, err
	}
	counters, err := ReadCounters(ctx, db)
	if err != nil {
		return 0, fmt.Errorf("watch signals: %w", err)
	}
	var failures []error
	for _, w := range all {
		active, err := evaluate(w.Signal, counters)
		switch {
		case err != nil:
			failures = append(failures, &ConditionError{w.Name, err})
			continue
		case active && w.SignalArmed:
			var runs int
			runs, err = fire(ctx, db, w.ID, w.Signal, counters)
			fired += runs
		case !active && !w.SignalArmed:
			err = rearm(ctx, db, w.ID, w.Signal)
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("update the signal of automation %q: %w", w.Name, err))
		}
	}
	return fired, errors.Join(failures...)
}

// fire inserts a due run, once for several watchers: the statement also clears signal_armed, and does nothing if the
// flag is clear.
func fire(ctx context.Context, db postgres.DB, id, signal string, counters Counters) (int, error) {
	tag, err := db.Exec(ctx, `
		with fired as (
		  update agent_automations set signal_armed = false
		   where id = @id and signal_armed and enabled and signal = @signal returning id),
		run as (
		  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, payload)
		  select id, 'signal', clock_timestamp(), 'due', @counters from fired returning id)
		select pg_notify(@channel, '') from run`,
		pgx.StrictNamedArgs{"id": id, "signal": signal, "counters": counters, "channel": Channel})
	return int(tag.RowsAffected()), err
}

// rearm records that a signal was false, so it may fire again.
func rearm(ctx context.Context, db postgres.DB, id, signal string) error {
	_, err := db.Exec(ctx, `
		update agent_automations set signal_armed = true where id = @id and not signal_armed and signal = @signal`,
		pgx.StrictNamedArgs{"id": id, "signal": signal})
	return err
}
