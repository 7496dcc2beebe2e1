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

// Conflict is a different body that was received under the id of a delivery. It was not handled.
type Conflict struct {
	ID         string          `json:"id"`
	BodySHA256 string          `json:"body_sha256"`
	BodyBytes  int             `json:"body_bytes"`
	Headers    json.RawMessage `json:"headers"`
	ReceivedAt time.Time       `json:"received_at"`
}

// maxStoredConflicts bounds the stored bodies of one delivery, beside the first.
const maxStoredConflicts = 5

// StoreConflict compares a repeated delivery with d, which has the same id. conflict reports a different body, which is
// counted. stored reports that the body was stored: it is new, and fewer than maxStoredConflicts are stored. The
// caller's transaction must have locked d.
func StoreConflict(
	ctx context.Context, tx pgx.Tx, e Endpoint, d Delivery, in Incoming,
) (conflict, stored bool, err error) {
	sum := digest("", in.Body)
	if sum == d.BodySHA256 {
		return false, false, nil
	}
	first, err := Body(ctx, tx, d.ID)
	if err != nil {
		return false, false, err
	}
	if value, err := Parse(first, e.Settings.Format); err == nil && e.equalBodies(value, in.Value) {
		return false, false, nil
	}
	err = tx.QueryRow(ctx, `
		with counted as (
		  update agent_webhook_deliveries set conflicts = conflicts + 1 where id = @delivery),
		stored as (
		  insert into agent_webhook_conflicts (delivery, headers, body, body_sha256)
		  select @delivery, @headers, @body, @sum
		   where (select count(*) from agent_webhook_conflicts c where c.delivery = @delivery) < @most
		  on conflict (delivery, body_sha256) do nothing
		  returning id)
		select exists (select from stored)`,
		postgres.Strict{
			"delivery": d.ID, "headers": e.StoredHeaders(in.Header), "body": in.Body, "sum": sum,
			"most": maxStoredConflicts,
		}).Scan(&stored)
	if err != nil {
		return false, false, fmt.Errorf("store another body of delivery %s: %w", d.ID, err)
	}
	return true, stored, nil
}

// equalBodies reports whether two bodies of one delivery id are equal. Senders encode JSON anew for each attempt.
// Stripe also counts its pending webhooks, which decreases.
func (e Endpoint) equalBodies(first, second any) bool {
	if e.Scheme == signature.Stripe {
		first, second = without(first, "pending_webhooks"), without(second, "pending_webhooks")
	}
	return reflect.DeepEqual(first, second)
}

// without returns a copy of an object without a member, and other values unchanged.
func without(body any, member string) any {
	object, ok := body.(map[string]any)
	if !ok {
		return body
	}
	object = maps.Clone(object)
	delete(object, member)
	return object
}

// Conflicts reads the stored conflicts of a delivery, oldest first.
func Conflicts(ctx context.Context, db postgres.DB, deliveryID string) ([]Conflict, error) {
	return postgres.Rows[Conflict](ctx, db, "list conflicts", `
		select c.id::text, c.body_sha256, octet_length(c.body) as body_bytes, c.headers, c.received_at
		  from agent_webhook_conflicts c
		 where c.delivery = @delivery order by c.id`, postgres.Strict{"delivery": deliveryID})
}

// ConflictBody reads the raw body of a conflict.
func ConflictBody(ctx context.Context, db postgres.DB, id string) ([]byte, error) {
	var body []byte
	if err := db.QueryRow(ctx, `select body from agent_webhook_conflicts where id = @id`,
		postgres.Strict{"id": id}).Scan(&body); err != nil {
		return nil, fmt.Errorf("read body of conflict: %w", err)
	}
	return body, nil
}
