package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	mostDeliveries = 50
	mostRefusals   = 10
	mostTargets    = 100
	mostCounted    = 1000 // messages of one target that are counted
)

// hookShape is how endpoints and targets are named.
var hookShape = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

// deliveriesPage lists what others posted, what was refused of it, and who is told of the agent's own events.
func (room *Room) deliveriesPage() page {
	return page{
		path: "/deliveries", name: "deliveries", nav: "Deliveries", title: "Deliveries",
		open: openDeliveries,
		parts: []part{
			{name: "list", every: 2 * time.Second, load: room.deliveriesList},
			{name: "refused", every: 5 * time.Second, load: room.deliveriesRefused},
			{name: "targets", every: 5 * time.Second, load: room.deliveryTargets},
		},
	}
}

// deliveriesWanted is what the address of the list asks for.
type deliveriesWanted struct{ Endpoint, Status, Before string }

func openDeliveries(_ context.Context, v *visit) (string, error) {
	endpoint, err := v.hookFilter("endpoint")
	if err != nil {
		return "", err
	}
	status, err := v.oneOf("status", append([]string{""}, webhooks.Statuses()...)...)
	if err != nil {
		return "", err
	}
	before, err := v.uuidFilter("before")
	v.About = deliveriesWanted{endpoint, status, before}
	return "Deliveries", err
}

// hookFilter is a filter that is the name of an endpoint or a target; empty when it is not given.
func (v *visit) hookFilter(name string) (string, error) {
	value := v.Query.Get(name)
	if value != "" && !hookShape.MatchString(value) {
		return "", problem.New(http.StatusBadRequest, "%s is %.80q, which cannot be the name of one", name, value).
			Kind("bad-parameter", "Bad filter")
	}
	return value, nil
}

// deliveryRow is a delivery in the list.
type deliveryRow struct {
	ID, Endpoint, DeliveryID, Status, TraceID, Error, Event string
	Scheme                                                  string // empty when the endpoint is no longer there
	ExecutionID                                             *string
	Attempts, Replays, Repeats, Conflicts                   int
	Bytes                                                   int64
	NextAttemptAt                                           *time.Time
	ReceivedAt                                              time.Time
}

func (room *Room) deliveriesList(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(deliveriesWanted)
	rows, err := room.Read.Query(ctx, `
		select d.id::text, d.endpoint, d.delivery_id, d.status, left(d.last_trace_id, 300) as trace_id, d.execution_id::text, d.attempts, d.replays,
		       d.repeats, d.conflicts, octet_length(d.body)::bigint as bytes, d.next_attempt_at, d.received_at,
		       coalesce(left(d.error_message, 300), '') as error, coalesce(e.scheme, '') as scheme,
		       coalesce(left(coalesce(d.headers #>> '{X-Github-Event,0}', jsonb_path_query_first(d.outcome, '$.*.event') #>> '{}'), 100), '') as event
		  from agent_webhook_deliveries d left join agent_webhook_endpoints e on e.name = d.endpoint
		 where (@endpoint = '' or d.endpoint = @endpoint) and (@status = '' or d.status = @status)
		   and (@before = '' or d.id < nullif(@before, '')::uuid)
		 order by d.id desc limit @most + 1`,
		freshPlan, postgres.Strict{"endpoint": want.Endpoint, "status": want.Status, "before": want.Before, "most": mostDeliveries})
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[deliveryRow])
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	endpoints, err := names(room.Read.Query(ctx, `select name from agent_webhook_endpoints order by name limit 200`))
	if err != nil {
		return nil, err
	}
	list, more := onPage(all, mostDeliveries)
	older := ""
	if more {
		older = v.at("before", list[len(list)-1].ID)
	}
	return map[string]any{
		"Deliveries": list, "Want": want, "Endpoints": endpoints, "Statuses": webhooks.Statuses(), "Older": older, "Newest": newest(v, want.Before),
	}, nil
}

// names are the values of a query's one column.
func names(rows pgx.Rows, err error) ([]string, error) {
	if err != nil {
		return nil, fmt.Errorf("list names: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list names: %w", err)
	}
	return list, nil
}

// refusal is a note about requests whose signature was bad. Of many in a minute one note is left.
type refusal struct {
	ID, TraceID, Endpoint, Count, Why string
	CreatedAt                         time.Time
}

func (room *Room) deliveriesRefused(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select a.id::text, a.trace_id, coalesce(a.input ->> 'endpoint', '') as endpoint, coalesce(a.input ->> 'count', '') as count,
		       coalesce(left(a.error_message, 300), '') as why, a.created_at
		  from agent_activity a where a.skill_name = 'webhook_refused' order by a.id desc limit @most`,
		freshPlan, postgres.Strict{"most": mostRefusals})
	if err != nil {
		return nil, fmt.Errorf("list refusals: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[refusal])
	if err != nil {
		return nil, fmt.Errorf("list refusals: %w", err)
	}
	return list, nil
}

// targetRow is who is told of the agent's events, with what is to be sent.
type targetRow struct {
	ID, Name, URL, DisabledBy, DisabledReason string
	Events                                    []string
	Enabled                                   bool
	Failures                                  int
	FailingSince                              *time.Time
	BlockedUntil                              *time.Time // nil when it may be sent to
	Pending, Dead                             int64      // at most mostCounted + 1
}

// Capped is a count, or that there are more than are counted.
func (targetRow) Capped(n int64) string {
	if n > mostCounted {
		return thousands(mostCounted) + "+"
	}
	return thousands(n)
}

func (room *Room) deliveryTargets(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select t.id::text, t.name, left(t.url, 2048) as url, array(select left(coalesce(e, ''), 200) from unnest(t.events[:20]) e) as events,
		       t.enabled, left(t.disabled_by, 300) as disabled_by, left(t.disabled_reason, 300) as disabled_reason, t.failures,
		       t.failing_since, case when t.blocked_until > clock_timestamp() then t.blocked_until end as blocked_until,
		       (select count(*) from (select from agent_webhook_outbox o where o.target_id = t.id and o.status = 'pending' limit @count + 1) p) as pending,
		       (select count(*) from (select from agent_webhook_outbox o where o.target_id = t.id and o.status = 'dead' limit @count + 1) p) as dead
		  from agent_webhook_targets t order by t.name limit @most + 1`,
		postgres.Strict{"most": mostTargets, "count": mostCounted})
	if err != nil {
		return nil, fmt.Errorf("list targets: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[targetRow])
	if err != nil {
		return nil, fmt.Errorf("list targets: %w", err)
	}
	for i := range all {
		all[i].URL = redact.Text(all[i].URL, maxValue)
	}
	list, more := onPage(all, mostTargets)
	return map[string]any{"Targets": list, "More": more}, nil
}
