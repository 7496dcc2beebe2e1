package webhooks

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// DefaultKeep is how long what is settled is kept.
const DefaultKeep = 90 * 24 * time.Hour

// pruned is how many rows of a table one statement deletes.
const pruned = 1000

// Prune deletes what is settled and older than keep: deliveries that are done or ignored, messages that were sent or given up.
// Dead deliveries stay until somebody decides. It returns how many rows went. A delivery that is sent once more after that is a
// new one; senders give up within days, and a signed time within minutes.
func Prune(ctx context.Context, db postgres.DB, keep time.Duration) (int64, error) {
	var all int64
	for {
		var n int64
		err := db.QueryRow(ctx, `
			with deliveries as (
			  delete from agent_webhook_deliveries where id in (
			    select d.id from agent_webhook_deliveries d
			     where d.id < agent_uuid7_floor(clock_timestamp() - make_interval(secs => @keep)) and d.status in ('done', 'ignored')
			     order by d.id limit @most)
			  returning 1),
			messages as (
			  delete from agent_webhook_outbox where id in (
			    select o.id from agent_webhook_outbox o
			     where o.id < agent_uuid7_floor(clock_timestamp() - make_interval(secs => @keep)) and o.status in ('sent', 'dead')
			     order by o.id limit @most)
			  returning 1)
			select (select count(*) from deliveries) + (select count(*) from messages)`,
			postgres.Strict{"keep": keep.Seconds(), "most": pruned}).Scan(&n)
		if err != nil {
			return all, fmt.Errorf("prune webhooks: %w", err)
		}
		if all += n; n == 0 {
			return all, nil
		}
	}
}
