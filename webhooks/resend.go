package webhooks

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Resend gives an outgoing message that was given up one more attempt, now, under the same webhook-id. False when it is not
// dead; [ErrNotFound] when there is no such message. A target that is out of service is sent it once it is back.
func Resend(ctx context.Context, tx pgx.Tx, id string) (bool, error) {
	// The attempts go on from where they were, so that a late end of an old one has no effect on the new.
	tag, err := tx.Exec(ctx, `
		with again as (
		  update agent_webhook_outbox
		     set status = 'pending', next_attempt_at = clock_timestamp(), finished_at = null
		   where id = @id and status = 'dead' returning id)
		select pg_notify('agent_webhooks', '') from again`, postgres.Strict{"id": id})
	if err != nil {
		return false, fmt.Errorf("resend webhook %s: %w", id, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	var known bool
	err = tx.QueryRow(ctx, `select exists (select from agent_webhook_outbox where id = @id)`, postgres.Strict{"id": id}).Scan(&known)
	if err == nil && !known {
		err = ErrNotFound
	}
	if err != nil {
		return false, fmt.Errorf("resend webhook %s: %w", id, err)
	}
	return false, nil
}
