package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Schedule starts executions of a flow repeatedly. The database stores its next run time, so ticks that were missed
// while no process ran start one execution later.
type Schedule struct {
	Name     string
	Flow     string
	Surface  trace.Surface
	Agent    string // empty means the default agent
	Cron     string // five fields, or a descriptor such as @every 1h
	Timezone string // a name of the IANA time zone database
	Input    any
}

// PutSchedule creates or updates a schedule. It changes the next run time only if the cron expression or time zone
// changes, so a restart postpones no tick.
func (e *Engine) PutSchedule(ctx context.Context, s Schedule) error {
	if err := PutSchedule(ctx, e.pool, s); err != nil {
		return err
	}
	return e.refreshDue(ctx)
}

// PutSchedule is [Engine.PutSchedule] for a caller's transaction. Engines read the schedule at their next sweep.
func PutSchedule(ctx context.Context, db postgres.DB, s Schedule) error {
	if s.Name == "" || s.Flow == "" || s.Surface.Prefix() == "" {
		return fmt.Errorf("schedule %s: name, flow and surface are required, got %q, %q and %q", s.Name,
			s.Name, s.Flow, s.Surface)
	}
	next, err := s.next(ctx, db)
	if err != nil {
		return fmt.Errorf("schedule %s: %w", s.Name, err)
	}
	input := json.RawMessage("{}")
	if s.Input != nil {
		if input, err = json.Marshal(s.Input); err != nil {
			return fmt.Errorf("schedule %s: encode input: %w", s.Name, err)
		}
	}
	_, err = db.Exec(ctx, `
		insert into agent_schedules as x (name, flow, surface, agent, cron, timezone, input, next_run_at)
		values (@name, @flow, @surface, @agent, @cron, @timezone, @input, @next)
		on conflict (name) do update
		   set flow = excluded.flow, surface = excluded.surface, agent = excluded.agent, cron = excluded.cron,
		       timezone = excluded.timezone, input = excluded.input, updated_at = clock_timestamp(),
		       next_run_at = case when (x.cron, x.timezone) = (excluded.cron, excluded.timezone)
		                          then x.next_run_at else excluded.next_run_at end`,
		postgres.Strict{
			"name": s.Name, "flow": s.Flow, "surface": string(s.Surface), "agent": s.Agent, "cron": s.Cron,
			"timezone": s.Timezone, "input": input, "next": next,
		})
	if err != nil {
		return fmt.Errorf("schedule %s: %w", s.Name, err)
	}
	return nil
}

// AssignSchedule changes the agent of a schedule. It reports whether the schedule exists.
func AssignSchedule(ctx context.Context, db postgres.DB, name, agent string) (bool, error) {
	tag, err := db.Exec(ctx,
		`update agent_schedules set agent = @agent, updated_at = clock_timestamp() where name = @name`,
		postgres.Strict{"name": name, "agent": agent})
	if err != nil {
		return false, fmt.Errorf("assign schedule %s: %w", name, err)
	}
	return tag.RowsAffected() > 0, nil
}

// RemoveSchedules deletes the schedules of a flow except keep. Started executions continue.
func RemoveSchedules(ctx context.Context, db postgres.DB, flow string, keep []string) error {
	_, err := db.Exec(ctx, `delete from agent_schedules where flow = @flow and name <> all(@keep::text[])`,
		postgres.Strict{"flow": flow, "keep": append([]string{}, keep...)})
	if err != nil {
		return fmt.Errorf("remove schedules of %s: %w", flow, err)
	}
	return nil
}

// NextRuns returns the next time of each flow that has a schedule.
func NextRuns(ctx context.Context, db postgres.DB) (map[string]time.Time, error) {
	rows, err := db.Query(ctx, `select flow, min(next_run_at) from agent_schedules group by flow`)
	next, flow, at := map[string]time.Time{}, "", time.Time{}
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&flow, &at}, func() error {
			next[flow] = at
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read the next times of schedules: %w", err)
	}
	return next, nil
}

// next returns the first run time after the database's present time.
func (s Schedule) next(ctx context.Context, db postgres.DB) (time.Time, error) {
	zone, err := schedule.Location(s.Timezone)
	if err != nil {
		return time.Time{}, err
	}
	plan, err := schedule.Parse(s.Cron, zone)
	if err != nil {
		return time.Time{}, err
	}
	var now time.Time
	if err := db.QueryRow(ctx, `select clock_timestamp()`).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the time: %w", err)
	}
	return plan.Next(now), nil
}

// Tick starts one execution for each due schedule, in the transaction that advances the schedule. The due time is part
// of the dedupe key, so concurrent calls start one execution for each due time. During a pause, Tick records a due time
// as skipped. If a schedule cannot start, Tick returns the error and retries the schedule in a minute. A failed or
// locked schedule does not delay other schedules.
func (e *Engine) Tick(ctx context.Context) error {
	var failures []error
	err := postgres.InTxWithin(ctx, e.pool, func(tx pgx.Tx) error {
		due, err := dueSchedules(ctx, tx)
		if err != nil {
			return err
		}
		failures = nil
		pause, err := CurrentPause(ctx, tx)
		if err != nil {
			return err
		}
		for _, s := range due {
			err := postgres.InTx(ctx, tx, func(tx pgx.Tx) error {
				if pause.Paused {
					return skipTick(ctx, tx, s.schedule(), s.NextRunAt, pause)
				}
				return e.startScheduled(ctx, tx, s.schedule(), s.NextRunAt)
			})
			if err == nil {
				continue
			}
			failures = append(failures, fmt.Errorf("schedule %s: %w", s.Name, err))
			if postgres.Locked(err) { // the next tick retries
				continue
			}
			if _, err := tx.Exec(ctx, `
				update agent_schedules set next_run_at = clock_timestamp() + interval '1 minute' where name = @name`,
				postgres.Strict{"name": s.Name}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(append(failures, err, e.refreshDue(ctx))...); err != nil {
		return fmt.Errorf("tick: %w", err)
	}
	return nil
}

// dueSchedule is a due row of agent_schedules.
type dueSchedule struct {
	Name, Flow, Surface, Agent, Cron, Timezone string
	Input                                      json.RawMessage
	NextRunAt                                  time.Time
}

func (d dueSchedule) schedule() Schedule {
	return Schedule{d.Name, d.Flow, trace.Surface(d.Surface), d.Agent, d.Cron, d.Timezone, d.Input}
}

func dueSchedules(ctx context.Context, tx pgx.Tx) ([]dueSchedule, error) {
	rows, err := tx.Query(ctx, `
		select name, flow, surface, agent, cron, timezone, input, next_run_at
		  from agent_schedules
		 where next_run_at <= statement_timestamp()
		 order by next_run_at for update skip locked`)
	return postgres.Collect(rows, err, "read due schedules", pgx.RowToStructByPos[dueSchedule])
}

// startScheduled starts the execution of one tick and advances the schedule.
func (e *Engine) startScheduled(ctx context.Context, tx pgx.Tx, s Schedule, due time.Time) error {
	next, err := s.next(ctx, tx)
	if err != nil {
		return err
	}
	_, _, err = e.Start(ctx, tx, Spec{
		Flow: s.Flow, Surface: s.Surface, Agent: s.Agent, Input: s.Input,
		DedupeKey: s.Name + " " + due.UTC().Format(time.RFC3339Nano),
	})
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update agent_schedules set last_run_at = next_run_at, next_run_at = @next, updated_at = clock_timestamp()
		 where name = @name`, postgres.Strict{"next": next, "name": s.Name})
	return err
}
