package webhooks

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// NextDue returns the time until a message is due. It skips the targets that full lists.
func NextDue(ctx context.Context, db postgres.DB, full []string) (time.Duration, error) {
	return nextDue(ctx, db, full)
}

// ClaimTarget claims one message and returns its target.
func ClaimTarget(ctx context.Context, db postgres.DB) (string, error) {
	claimed, err := claimDue(ctx, db, 1, outbox.MaxPerTarget, []string{}, lease)
	if err != nil || len(claimed) != 1 {
		return "", err
	}
	return claimed[0].Target, nil
}
