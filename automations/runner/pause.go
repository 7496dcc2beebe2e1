package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// skipDue records the due times of schedules since the start of a pause as skipped, each with an activity under its own
// trace. It leaves earlier ones to the next heartbeat. A broken schedule does not delay the others.
func skipDue(ctx context.Context, db postgres.Beginner, agent string, p executions.Pause) error {
	due, err := automations.Due(ctx, db, *p.PausedAt, batch)
	if err != nil {
		return fmt.Errorf("skip automations: %w", err)
	}
	var failures []error
	for _, a := range due {
		if err := skip(ctx, db, agent, a, p); err != nil {
			failures = append(failures, fmt.Errorf("skip automation %q: %w", a.Name, err))
		}
	}
	return errors.Join(failures...)
}

// skip records one time and its activity in one transaction.
func skip(ctx context.Context, db postgres.Beginner, agent string, a automations.Automation, p executions.Pause) error {
	id := trace.New(trace.Flow)
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		run, ok, err := automations.SkipOccurrence(ctx, tx, a.ID, *a.NextRunAt, string(id), p.String())
		if err != nil || !ok {
			return err
		}
		_, err = activity.Note(ctx, tx, activity.Entry{
			TraceID: string(id), Surface: string(trace.Flow), Agent: cmp.Or(a.Agent, agent), Skill: "run_automation",
			Input: map[string]any{"automation": a.Name, "scheduled_for": run.ScheduledFor},
		}, activity.Outcome{Status: activity.Skipped, Output: p.String()})
		return err
	})
}
