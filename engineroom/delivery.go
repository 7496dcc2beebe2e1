package engineroom

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// deliveryPage shows one delivery and its effects.
func (room *Room) deliveryPage() page {
	return page{
		path: "/deliveries/{id}", name: "delivery", title: "Delivery",
		open: room.openByID("delivery", "Delivery to ", `select endpoint from agent_webhook_deliveries where id = @id`),
		parts: []part{
			{name: "facts", interval: 2 * time.Second, load: room.deliveryFacts},
			{name: "attempts", interval: 2 * time.Second, load: room.deliveryAttempts},
			{name: "content", load: room.deliveryContent},
		},
	}
}

// deliveryDetail is a delivery without its body.
type deliveryDetail struct {
	deliveryRow
	FirstTraceID, BodySHA256, Traceparent, Outcome string
	FinishedAt                                     *time.Time
	UpdatedAt                                      time.Time
}

// Settled reports whether the delivery is in a state from which an admin can replay it.
func (d deliveryDetail) Settled() bool {
	return d.Status == "done" || d.Status == "ignored" || d.Status == "dead"
}

// Seen is the number of shown replays, for a form.
func (d deliveryDetail) Seen() string { return strconv.Itoa(d.Replays) }

func (room *Room) deliveryFacts(ctx context.Context, req *pageRequest) (any, error) {
	d, err := postgres.Row[deliveryDetail](ctx, room.Read, "read delivery", `
		select d.id::text, d.endpoint, d.delivery_id, d.status, left(d.last_trace_id, 300) as trace_id,
		       left(d.trace_id, 300) as first_trace_id, d.execution_id::text, d.attempts, d.replays, d.repeats, d.conflicts,
		       octet_length(d.body)::bigint as bytes, d.next_attempt_at, d.received_at, d.finished_at, d.updated_at,
		       coalesce(left(d.error_message, 4000), '') as error, coalesce(e.scheme, '') as scheme,
		       left(d.body_sha256, 100) as body_sha256, d.traceparent,
		       coalesce(left(d.headers #>> '{X-Github-Event,0}', 100), '') as event,
		       coalesce(left(d.outcome::text, 20000), '') as outcome
		  from agent_webhook_deliveries d left join agent_webhook_endpoints e on e.name = d.endpoint where d.id = @id`,
		postgres.Strict{"id": req.Subject})
	if err != nil {
		return nil, err
	}
	if d.Outcome != "" {
		d.Outcome = argumentsShown(d.Outcome)
	}
	return d, nil
}

// deliveryAttempt is an action for a delivery, or an effect.
type deliveryAttempt struct {
	Kind                                       activity.Kind
	ID, Step, SkillName, Status, Error, Output string
	Millis                                     *int64
	CreatedAt                                  time.Time
}

const maxAttempts = 100

func (room *Room) deliveryAttempts(ctx context.Context, req *pageRequest) (any, error) {
	all, err := postgres.Rows[deliveryAttempt](ctx, room.Read, "list attempts", `
		select a.id::text, left(a.step, 200) as step, a.skill_name, a.kind, a.status,
		       coalesce(left(a.error_message, 1000), '') as error, coalesce(left(a.output::text, 2000), '') as output,
		       a.duration_ms as millis, a.created_at
		  from agent_webhook_deliveries d join agent_activity a on a.execution_id = d.execution_id
		 where d.id = @id order by a.id limit @limit + 1`,
		customPlan, postgres.Strict{"id": req.Subject, "limit": maxAttempts})
	if err != nil {
		return nil, err
	}
	for i := range all {
		hide := activity.HidesTexts(ctx) && activity.HasTexts(all[i].Kind, all[i].SkillName)
		hideJSON(hide, &all[i].Output, new(int64))
	}
	list, more := firstN(all, maxAttempts)
	return map[string]any{"Attempts": list, "More": more}, nil
}

// deliveryBody holds the stored headers, and the beginning of the body, redacted.
type deliveryBody struct {
	ID, Headers, Body, Marker string
	Bytes, Shown              int64
	Whole                     bool
	ReceivedAt                time.Time
}

// deliveryContent reads the body, and further bodies under the same id.
func (room *Room) deliveryContent(ctx context.Context, req *pageRequest) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select x.id::text, left(x.headers::text, 70000) as headers, substring(x.body from 1 for @limit) as body,
		       octet_length(x.body)::bigint as bytes, x.received_at
		  from (select d.id, d.headers, d.body, d.received_at, 0 as place from agent_webhook_deliveries d where d.id = @id
		        union all
		        select c.id, c.headers, c.body, c.received_at, 1 from agent_webhook_conflicts c where c.delivery = @id) x
		 order by x.place, x.id`, postgres.Strict{"id": req.Subject, "limit": maxShown})
	all, err := postgres.Collect(rows, err, "read body", func(row pgx.CollectableRow) (b deliveryBody, err error) {
		var headers string
		var body []byte
		err = row.Scan(&b.ID, &headers, &body, &b.Bytes, &b.ReceivedAt)
		b.Shown = int64(len(body))
		b.Whole = b.Bytes == b.Shown // otherwise a cut character may be missing
		b.Headers, b.Body, b.Marker = argumentsShown(headers), argumentsShown(string(body)), redact.Marker
		return b, err
	})
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, notFound("there is no delivery %s", req.Subject)
	}
	return map[string]any{"First": all[0], "Others": all[1:]}, nil
}
