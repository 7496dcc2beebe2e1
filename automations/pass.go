package automations

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// PassTime ends one time of an automation's schedule that is not run, because of what why says: the run is recorded as
// skipped, and the automation moves to its next time. Of many callers one gets ok, as with [Claim].
func PassTime(ctx context.Context, db postgres.Beginner, automationID string, scheduledFor time.Time, traceID, why string) (run Run, ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if run, ok, err = Claim(ctx, tx, automationID, scheduledFor, "", traceID); err != nil || !ok {
			return err
		}
		run, ok, err = Finish(ctx, tx, run.ID, run.Attempt, Result{Skipped: true, Output: map[string]string{"skipped": why}})
		return err
	})
	return run, ok && err == nil, err
}
