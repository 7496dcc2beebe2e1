package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// deliveryColumns are the columns of a [Delivery].
const deliveryColumns = `d.id::text, d.endpoint, d.delivery_id, d.trace_id, d.last_trace_id, d.execution_id::text, d.status,
	d.attempts, d.replays, d.repeats, d.conflicts, d.headers, d.body_sha256, octet_length(d.body) as body_bytes,
	d.traceparent, d.outcome, d.error_message, d.next_attempt_at, d.received_at, d.updated_at, d.finished_at`

// maxHeaders bounds the stored headers of a delivery, in bytes.
const maxHeaders = 64 << 10

var (
	traceparentRegexp = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}`)
	printableIDRegexp = regexp.MustCompile(`^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$`)
)

// Incoming is a verified request.
type Incoming struct {
	Header http.Header
	Body   []byte
	Value  any // the parsed body
}

// StoredHeaders returns the stored headers, with secrets redacted.
func (e Endpoint) StoredHeaders(h http.Header) json.RawMessage {
	stored := h.Clone()
	for _, name := range e.SecretHeaders() {
		if stored.Get(name) != "" {
			stored.Set(name, redact.Marker)
		}
	}
	return redact.JSON(stored, maxHeaders)
}

// Lane returns the lane of a delivery's handling.
func (d Delivery) Lane() string {
	name := "webhook:" + d.Endpoint + ":" + d.DeliveryID
	if !lanes.ValidName(name) {
		return "webhook:" + d.Endpoint + ":" + digest("id-sha256:", []byte(d.DeliveryID))
	}
	return name
}

// Insert stores a delivery. isNew is true for one of concurrent deliveries with the same id. The others return that one
// and count as its repeats.
func Insert(
	ctx context.Context, tx pgx.Tx, e Endpoint, deliveryID, traceID string, in Incoming,
) (d Delivery, isNew bool, err error) {
	parent := in.Header.Get("Traceparent")
	if !traceparentRegexp.MatchString(parent) || len(parent) > 200 {
		parent = ""
	}
	args := postgres.Strict{
		"endpoint": e.Name, "delivery_id": deliveryID, "trace_id": traceID, "headers": e.StoredHeaders(in.Header),
		"body": in.Body, "sha256": digest("", in.Body), "traceparent": parent,
	}
	d, err = postgres.Row[Delivery](ctx, tx, "store delivery", `
		insert into agent_webhook_deliveries as d
		       (endpoint, delivery_id, trace_id, last_trace_id, headers, body, body_sha256, traceparent)
		values (@endpoint, @delivery_id, @trace_id, @trace_id, @headers, @body, @sha256, @traceparent)
		on conflict (endpoint, delivery_id) do nothing
		returning `+deliveryColumns, args)
	if !errors.Is(err, pgx.ErrNoRows) {
		return d, err == nil, err
	}
	d, err = postgres.Row[Delivery](ctx, tx, "read the first delivery", `
		update agent_webhook_deliveries d set repeats = d.repeats + 1
		 where d.endpoint = @endpoint and d.delivery_id = @delivery_id
		returning `+deliveryColumns, postgres.Strict{"endpoint": e.Name, "delivery_id": deliveryID})
	return d, false, err
}

// Link stores the execution that handles a delivery.
func Link(ctx context.Context, tx pgx.Tx, id, executionID string) error {
	_, err := tx.Exec(ctx, `update agent_webhook_deliveries set execution_id = @execution where id = @id`,
		postgres.Strict{"id": id, "execution": executionID})
	if err != nil {
		return fmt.Errorf("link delivery: %w", err)
	}
	return nil
}

// StatusUpdate is a change of a delivery's status.
type StatusUpdate struct {
	Status  string
	Attempt int
	Error   string
	Retry   float64 // seconds until the next attempt, for status failed
	Outcome any
}

// UpdateStatus stores the status of a delivery for the execution that handles it. For another execution it has no
// effect.
func UpdateStatus(ctx context.Context, db postgres.DB, id, executionID string, u StatusUpdate) error {
	_, err := db.Exec(ctx, `
		update agent_webhook_deliveries
		   set status = @status, attempts = @attempt, error_message = nullif(@error, ''), updated_at = clock_timestamp(),
		       outcome = coalesce(@outcome::jsonb, outcome),
		       next_attempt_at = case when @status = 'failed' then clock_timestamp() + make_interval(secs => @retry) end,
		       finished_at = case when @status in ('done', 'ignored', 'dead') then clock_timestamp() end
		 where id = @id and execution_id = @execution`,
		postgres.Strict{
			"id": id, "execution": executionID, "status": u.Status, "attempt": u.Attempt, "error": redact.Text(u.Error, 2000),
			"retry": u.Retry, "outcome": outcome(u.Outcome),
		})
	if err != nil {
		return fmt.Errorf("mark delivery %s: %w", u.Status, err)
	}
	return nil
}

// outcome redacts an outcome and bounds it at 16 KiB; nil stays nil.
func outcome(v any) any {
	if v == nil {
		return nil
	}
	return redact.JSON(v, 16<<10)
}

// Reopen starts a replay: it sets the status received, with a new trace. It returns [ErrInProgress] if the delivery is
// being processed, or if its number of replays is not the expected one. A negative number expects any.
func Reopen(ctx context.Context, tx pgx.Tx, id, traceID string, expected int) (Delivery, error) {
	d, err := postgres.Row[Delivery](ctx, tx, "reopen delivery", `
		update agent_webhook_deliveries d
		   set status = 'received', replays = d.replays + 1, attempts = 0, last_trace_id = @trace_id, error_message = null,
		       outcome = null, finished_at = null, next_attempt_at = null, updated_at = clock_timestamp()
		 where d.id = @id and d.status in ('done', 'ignored', 'dead') and (@seen < 0 or d.replays = @seen)
		returning `+deliveryColumns, postgres.Strict{"id": id, "trace_id": traceID, "seen": expected})
	if errors.Is(err, pgx.ErrNoRows) {
		if d, err = Get(ctx, tx, id); err == nil {
			err = ErrInProgress
		}
		return d, err
	}
	return d, err
}

// Get reads a delivery by its id, or by the sender's id if it is unique; [ErrNotFound] for none.
func Get(ctx context.Context, db postgres.DB, id string) (Delivery, error) {
	found, err := postgres.Rows[Delivery](ctx, db, "read delivery", `
		select `+deliveryColumns+` from agent_webhook_deliveries d
		 where d.id = case when @id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then (@id)::uuid end
		union all
		select `+deliveryColumns+` from agent_webhook_deliveries d
		 where d.delivery_id = @id limit 2`, postgres.Strict{"id": id})
	switch {
	case err != nil:
		return Delivery{}, err
	case len(found) == 0:
		return Delivery{}, fmt.Errorf("delivery %s: %w", redact.Text(id, 100), ErrNotFound)
	case len(found) > 1 && found[0].ID != found[1].ID && found[0].ID != id:
		return Delivery{}, fmt.Errorf("several endpoints have a delivery %s; use its own id: %w",
			redact.Text(id, 100), ErrNotFound)
	}
	return found[0], nil
}

// Body reads the raw body of a delivery.
func Body(ctx context.Context, db postgres.DB, id string) ([]byte, error) {
	rows, err := db.Query(ctx, `select body from agent_webhook_deliveries where id = @id`, postgres.Strict{"id": id})
	return postgres.CollectOne(rows, err, ErrNotFound, "read body of delivery", pgx.RowTo[[]byte])
}

// Load returns the content that the paths of a delivery's endpoint read.
func Load(ctx context.Context, db postgres.DB, d Delivery, format string) (Content, error) {
	c := Content{Endpoint: d.Endpoint, DeliveryID: d.DeliveryID}
	var headers map[string]any // a list of values, or the marker of a redacted secret
	if err := json.Unmarshal(d.Headers, &headers); err != nil {
		return c, fmt.Errorf("read headers of delivery: %w", err)
	}
	c.Header = http.Header{}
	for name, value := range headers {
		values, isList := value.([]any)
		if !isList {
			values = []any{value}
		}
		for _, v := range values {
			c.Header.Add(name, fmt.Sprint(v))
		}
	}
	raw, err := Body(ctx, db, d.ID)
	if err != nil {
		return c, err
	}
	c.Body, err = Parse(raw, format)
	return c, err
}

// Parse decodes a body in an endpoint's format.
func Parse(raw []byte, format string) (any, error) {
	if !utf8.Valid(raw) {
		return nil, errors.New("the body is not UTF-8")
	}
	if format == FormatText {
		return string(raw), nil
	}
	if !json.Valid(raw) {
		return nil, errors.New("the body is not JSON")
	}
	return parseBody(raw)
}

// Filter narrows a listing. Zero values do not narrow. Limit is 50 by default, at most 1000. The listing continues
// after the id Before, newest first.
type Filter struct {
	Endpoint, Status, Before string
	Limit                    int
}

// List reads deliveries, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Delivery, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	return postgres.Rows[Delivery](ctx, db, "list deliveries", `
		select `+deliveryColumns+` from agent_webhook_deliveries d
		 where (@endpoint = '' or d.endpoint = @endpoint) and (@status = '' or d.status = @status)
		   and (@before = '' or d.id < nullif(@before, '')::uuid)
		 order by d.id desc limit @limit`,
		postgres.Strict{"endpoint": f.Endpoint, "status": f.Status, "before": f.Before, "limit": min(f.Limit, 1000)})
}
