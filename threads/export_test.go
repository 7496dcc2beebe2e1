package threads

import (
	"context"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SettleFailed records a failed attempt to deliver a message of a thread.
func SettleFailed(ctx context.Context, db postgres.DB, thread, id string, attempt int) (recorded bool, err error) {
	return recordAttempt(ctx, db, outboxMessage{ID: id, ThreadID: thread, Attempt: attempt},
		attemptResult{status: Failed, err: "late"})
}
