package lanekeeper

import (
	"context"
	"fmt"
	"net/url"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Schedule says when a flow starts by itself: see [Flow.SetSchedules].
type Schedule[In any] struct {
	Name     string // unique among the schedules of the flow
	Cron     string // five fields, such as "0 9 * * 1-5", or @daily, or an interval such as @every 30m
	Timezone string // a name of the IANA time zone database; empty means UTC, which has no daylight saving
	Input    In     // of each execution
}

// SetSchedules replaces the schedules of the flow; without arguments it removes them all. Any process whose runtime
// runs starts one execution at each time, even if the previous one has not ended. Times that passed while no process
// ran start one execution later. Times during a pause of the agent are skipped. A schedule with the same cron
// expression and time zone as before keeps its next time, so a program calls SetSchedules at each start. A new schedule
// is effective within five seconds. At a change to daylight saving, a time that the clocks skip does not happen that
// day, and a time that they repeat happens twice.
//
// Scheduled executions have the defaults of all [FlowOption] values, so [Interactive] has no effect on them. For a flow
// with [MaxLostWorkers] or [ProgressTimeout], SetSchedules sets no schedules and returns an error; without arguments it
// still removes them. A [Remote] of the same name without these options can set schedules.
func (f Flow[In, Out]) SetSchedules(ctx context.Context, schedules ...Schedule[In]) error {
	if executions.IsReserved(f.name) {
		return fmt.Errorf("set the schedules of flow %s: the name is Lanekeeper's own", f.name)
	}
	if len(schedules) > 0 && (f.spec.MaxAttempts != 0 || f.spec.ProgressSeconds != 0) {
		return fmt.Errorf("set the schedules of flow %s: scheduled executions have the default MaxLostWorkers "+
			"and ProgressTimeout; set the schedules with a Remote without these options", f.name)
	}
	err := postgres.InTx(ctx, f.r.pool, func(tx pgx.Tx) error {
		// Concurrent calls with other schedules would deadlock, or each would miss the other's new rows.
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('schedules of ' || @flow, 0))`,
			postgres.Strict{"flow": f.name}); err != nil {
			return err
		}
		var names []string
		for _, s := range schedules {
			name := url.PathEscape(f.name) + "/" + s.Name // the names of all flows' schedules are in one table
			if s.Name == "" || slices.Contains(names, name) {
				return fmt.Errorf("each schedule needs a name of its own, got %q", s.Name)
			}
			names = append(names, name)
			if err := executions.PutSchedule(ctx, tx, executions.Schedule{
				Name: name, Flow: f.name, Surface: f.spec.Surface, Cron: s.Cron, Timezone: s.Timezone, Input: s.Input,
			}); err != nil {
				return err
			}
		}
		return executions.RemoveSchedules(ctx, tx, f.name, names)
	})
	if err != nil {
		return fmt.Errorf("set the schedules of flow %s: %w", f.name, err)
	}
	return nil
}
