package engineroom

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const mostAttempts = 100

// deliveryPage shows one delivery: what came, and what it led to.
func (room *Room) deliveryPage() page {
	return page{
		path: "/deliveries/{id}", name: "delivery", title: "Delivery",
		open: room.openDelivery,
		parts: []part{
			{name: "facts", every: 2 * time.Second, load: room.deliveryFacts},
			{name: "attempts", every: 2 * time.Second, load: room.deliveryAttempts},
			{name: "content", load: room.deliveryContent},
		},
	}
}

func (room *Room) openDelivery(ctx context.Context, v *visit) (string, error) {
	id := strings.ToLower(v.path("id"))
	if !uuidShape.MatchString(id) {
		return "", missing("there is no delivery %.60q", id)
	}
	var endpoint string
	err := room.Read.QueryRow(ctx, `select endpoint from agent_webhook_deliveries where id = @id`, postgres.Strict{"id": id}).Scan(&endpoint)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", missing("there is no delivery %s", id)
	}
	v.About = id
	return "Delivery to " + cut(80, endpoint), err
}

// deliveryDetail is a delivery without its body.
type deliveryDetail struct {
	deliveryRow
	FirstTraceID, BodySHA256, Traceparent, Outcome string
	FinishedAt                                     *time.Time
	UpdatedAt                                      time.Time
}

// Settled reports that it can be replayed.
func (d deliveryDetail) Settled() bool {
	return d.Status == "done" || d.Status == "ignored" || d.Status == "dead"
}

// Seen is how many replays the reader saw, as a form's field.
func (d deliveryDetail) Seen() string { return strconv.Itoa(d.Replays) }

func (room *Room) deliveryFacts(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select d.id::text, d.endpoint, d.delivery_id, d.status, left(d.last_trace_id, 300) as trace_id, left(d.trace_id, 300) as first_trace_id, d.execution_id::text,
		       d.attempts, d.replays, d.repeats, d.conflicts, octet_length(d.body)::bigint as bytes, d.next_attempt_at, d.received_at, d.finished_at, d.updated_at,
		       coalesce(left(d.error_message, 4000), '') as error, coalesce(e.scheme, '') as scheme, left(d.body_sha256, 100) as body_sha256,
		       d.traceparent, coalesce(left(d.headers #>> '{X-Github-Event,0}', 100), '') as event,
		       coalesce(left(d.outcome::text, 20000), '') as outcome
		  from agent_webhook_deliveries d left join agent_webhook_endpoints e on e.name = d.endpoint where d.id = @id`,
		postgres.Strict{"id": v.About})
	if err != nil {
		return nil, fmt.Errorf("read delivery: %w", err)
	}
	d, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[deliveryDetail])
	if err != nil {
		return nil, fmt.Errorf("read delivery: %w", err)
	}
	if d.Outcome != "" {
		d.Outcome = argumentsShown(d.Outcome)
	}
	return d, nil
}

// deliveryAttempt is one thing that was tried for a delivery, or that it started.
type deliveryAttempt struct {
	ID, Step, SkillName, Status, Error, Output string
	Millis                                     *int64
	CreatedAt                                  time.Time
}

func (room *Room) deliveryAttempts(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select a.id::text, left(a.step, 200) as step, a.skill_name, a.status, coalesce(left(a.error_message, 1000), '') as error,
		       coalesce(left(a.output::text, 2000), '') as output, a.duration_ms as millis, a.created_at
		  from agent_webhook_deliveries d join agent_activity a on a.execution_id = d.execution_id
		 where d.id = @id order by a.id limit @most + 1`, freshPlan, postgres.Strict{"id": v.About, "most": mostAttempts})
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[deliveryAttempt])
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	list, more := onPage(all, mostAttempts)
	return map[string]any{"Attempts": list, "More": more}, nil
}

// deliveryBody is what came: the headers that are kept, and the beginning of the body as text without secrets.
type deliveryBody struct {
	ID, Headers, Body, Marker string
	Bytes, Shown              int64
	Whole                     bool
	ReceivedAt                time.Time
}

// deliveryContent is what came, and then the other bodies that came under its id.
func (room *Room) deliveryContent(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select x.id::text, left(x.headers::text, 70000) as headers, substring(x.body from 1 for @most) as body, octet_length(x.body)::bigint as bytes,
		       x.received_at
		  from (select d.id, d.headers, d.body, d.received_at, 0 as place from agent_webhook_deliveries d where d.id = @id
		        union all
		        select c.id, c.headers, c.body, c.received_at, 1 from agent_webhook_conflicts c where c.delivery = @id) x
		 order by x.place, x.id`, postgres.Strict{"id": v.About, "most": mostShown})
	if err != nil {
		return nil, fmt.Errorf("read what came: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b deliveryBody, err error) {
		var headers string
		var body []byte
		err = row.Scan(&b.ID, &headers, &body, &b.Bytes, &b.ReceivedAt)
		b.Shown = int64(len(body))
		b.Whole = b.Bytes == b.Shown // else a character may be cut in two, which redact leaves out
		b.Headers, b.Body, b.Marker = argumentsShown(headers), argumentsShown(string(body)), redact.Marker
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("read what came: %w", err)
	}
	if len(all) == 0 {
		return nil, missing("there is no delivery %s", v.About)
	}
	return map[string]any{"First": all[0], "Others": all[1:]}, nil
}
