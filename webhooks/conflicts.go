package webhooks

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

// keptConflicts is how many bodies are kept for one delivery, beside the first.
const keptConflicts = 5

// Conflict is another body that came under the id of a delivery, and was not handled.
type Conflict struct {
	ID         string          `json:"id"`
	BodySHA256 string          `json:"body_sha256"`
	BodyBytes  int             `json:"body_bytes"`
	Headers    json.RawMessage `json:"headers"`
	ReceivedAt time.Time       `json:"received_at"`
}

// KeepConflict compares what came again with the delivery d that has its id. When it says something else, it is counted and
// kept, and conflict is true; kept is false when this body is kept already, or five others are. The caller's transaction holds d.
func KeepConflict(ctx context.Context, tx pgx.Tx, e Endpoint, d Delivery, in Incoming) (conflict, kept bool, err error) {
	sum := digest("", in.Body)
	if sum == d.BodySHA256 {
		return false, false, nil
	}
	first, err := Body(ctx, tx, d.ID)
	if err != nil {
		return false, false, err
	}
	if value, err := Parse(first, e.Settings.Format); err == nil && e.same(value, in.Value) {
		return false, false, nil
	}
	err = tx.QueryRow(ctx, `
		with counted as (
		  update agent_webhook_deliveries set conflicts = conflicts + 1 where id = @delivery),
		kept as (
		  insert into agent_webhook_conflicts (delivery, headers, body, body_sha256)
		  select @delivery, @headers, @body, @sum
		   where (select count(*) from agent_webhook_conflicts c where c.delivery = @delivery) < @most
		  on conflict (delivery, body_sha256) do nothing
		  returning id)
		select exists (select from kept)`,
		postgres.Strict{"delivery": d.ID, "headers": e.KeptHeaders(in.Header), "body": in.Body, "sum": sum, "most": keptConflicts}).Scan(&kept)
	if err != nil {
		return false, false, fmt.Errorf("keep another body of delivery %s: %w", d.ID, err)
	}
	return true, kept, nil
}

// same reports whether two bodies of one delivery id say the same: senders write JSON anew for each attempt. Stripe's event also says
// how many webhooks are still to be told, which is less the next time.
func (e Endpoint) same(first, again any) bool {
	if e.Scheme == signature.Stripe {
		first, again = without(first, "pending_webhooks"), without(again, "pending_webhooks")
	}
	return reflect.DeepEqual(first, again)
}

func without(body any, member string) any {
	object, ok := body.(map[string]any)
	if !ok {
		return body
	}
	object = maps.Clone(object)
	delete(object, member)
	return object
}

// Conflicts reads the other bodies that are kept of a delivery, oldest first.
func Conflicts(ctx context.Context, db postgres.DB, deliveryID string) ([]Conflict, error) {
	rows, err := db.Query(ctx, `
		select c.id::text, c.body_sha256, octet_length(c.body) as body_bytes, c.headers, c.received_at
		  from agent_webhook_conflicts c where c.delivery = @delivery order by c.id`, postgres.Strict{"delivery": deliveryID})
	if err != nil {
		return nil, fmt.Errorf("list conflicts: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[Conflict])
	if err != nil {
		return nil, fmt.Errorf("list conflicts: %w", err)
	}
	return got, nil
}

// ConflictBody reads the body of a conflict, as it came.
func ConflictBody(ctx context.Context, db postgres.DB, id string) ([]byte, error) {
	var body []byte
	if err := db.QueryRow(ctx, `select body from agent_webhook_conflicts where id = @id`, postgres.Strict{"id": id}).Scan(&body); err != nil {
		return nil, fmt.Errorf("read body of conflict: %w", err)
	}
	return body, nil
}
