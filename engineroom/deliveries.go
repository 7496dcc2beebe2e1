package engineroom

import (
	"context"
	"regexp"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	maxDeliveries = 50
	maxRejections = 10
	maxTargets    = 100
	maxCounted    = 1000 // bound of a target's message count
)

// webhookNamePattern matches names of endpoints and targets.
var webhookNamePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

// deliveriesPage lists incoming deliveries, rejected requests, and targets.
func (room *Room) deliveriesPage() page {
	return page{
		path: "/deliveries", name: "deliveries", navLabel: "Deliveries", title: "Deliveries",
		open: room.openDeliveries,
		parts: []part{
			room.filtersPart("/deliveries", "endpoint"),
			{name: "list", interval: 2 * time.Second, load: room.deliveriesList},
			{name: "refused", interval: 5 * time.Second, load: room.deliveriesRefused},
			{name: "targets", interval: 5 * time.Second, load: room.deliveryTargets},
		},
	}
}

// deliveryFilter holds the parameters of the list.
type deliveryFilter struct {
	Endpoint, Status, Before string
	ID                       string   // as entered
	endpoints                []string // endpoints that match Endpoint; nil if it is empty
	ids                      []string // deliveries that match ID; nil if it is empty
}

// Statuses are the options of Status.
func (deliveryFilter) Statuses() []string { return webhooks.Statuses() }

// openDeliveries reads the filters. It rejects an unknown status or a malformed cursor.
func (room *Room) openDeliveries(ctx context.Context, req *pageRequest) (string, error) {
	endpoint, err := req.hookFilter("endpoint")
	if err != nil {
		return "", err
	}
	filter := deliveryFilter{Endpoint: endpoint}
	if filter.endpoints, err = room.namesLike(ctx, req, "endpoint", endpoint); err != nil {
		return "", err
	}
	if filter.ID, err = req.textFilter("id"); err != nil {
		return "", err
	}
	if filter.ids, err = room.deliveriesFor(ctx, filter.ID); err != nil {
		return "", err
	}
	status, err := req.oneOf("status", append([]string{""}, webhooks.Statuses()...)...)
	if err != nil {
		return "", err
	}
	before, err := req.uuidFilter("before")
	filter.Status, filter.Before = status, before
	req.Subject = filter
	return "Deliveries", err
}

// deliveriesFor returns the deliveries whose id, or whose sender's id, contains the text; nil without a text.
func (room *Room) deliveriesFor(ctx context.Context, text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	ids := []string{}
	if f, ok := fragmentOf(text); ok {
		found, err := room.matchUUIDs(ctx, "agent_webhook_deliveries", f, maxMatches)
		if err != nil {
			return nil, err
		}
		ids = append(ids, found...)
	}
	byDeliveryID, err := postgres.Values[string](ctx, room.Read, "find deliveries", `
		select x.id::text from (select d.id, d.delivery_id from agent_webhook_deliveries d order by d.id desc limit @window) x
		 where x.delivery_id ilike @like limit @limit`, customPlan,
		postgres.Strict{"like": containsPattern(text), "window": maxOtherFragments, "limit": maxMatches})
	return append(ids, byDeliveryID...), err
}

// hookFilter reads a filter by endpoint or target; empty if absent.
func (req *pageRequest) hookFilter(name string) (string, error) {
	value := req.Query.Get(name)
	if value != "" && !webhookNamePattern.MatchString(value) {
		return "", problem.BadParameter("%s is %.80q, which is not a valid name", name, value)
	}
	return value, nil
}

// deliveryRow is a delivery in the list.
type deliveryRow struct {
	ID, Endpoint, DeliveryID, Status, TraceID, Error, Event string
	Scheme                                                  string // empty if the endpoint is deleted
	ExecutionID                                             *string
	Attempts, Replays, Repeats, Conflicts                   int
	Bytes                                                   int64
	NextAttemptAt                                           *time.Time
	ReceivedAt                                              time.Time
}

// deliveriesList reads a page of deliveries, newest first. The index on status or on the endpoint bounds the read.
func (room *Room) deliveriesList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(deliveryFilter)
	all, err := postgres.Rows[deliveryRow](ctx, room.Read, "list deliveries", `
		select d.id::text, d.endpoint, d.delivery_id, d.status, left(d.last_trace_id, 300) as trace_id,
		       d.execution_id::text, d.attempts, d.replays, d.repeats, d.conflicts,
		       octet_length(d.body)::bigint as bytes, d.next_attempt_at, d.received_at,
		       coalesce(left(d.error_message, 300), '') as error, coalesce(e.scheme, '') as scheme,
		       coalesce(left(coalesce(d.headers #>> '{X-Github-Event,0}',
		         jsonb_path_query_first(d.outcome, '$.*.event') #>> '{}'), 100), '') as event
		  from ((select x.* from agent_webhook_deliveries x
		          where @endpoints::text[] is null and (@status = '' or x.status = @status)
		            and (@ids::text[] is null or x.id = any (@ids::text[]::uuid[]))
		            and (@before = '' or x.id < nullif(@before, '')::uuid)
		          order by x.id desc limit @limit + 1)
		        union all
		        (select y.* from unnest(@endpoints::text[]) n (name) cross join lateral (
		           select x.* from agent_webhook_deliveries x
		            where x.endpoint = n.name and (@status = '' or x.status = @status)
		              and (@ids::text[] is null or x.id = any (@ids::text[]::uuid[]))
		              and (@before = '' or x.id < nullif(@before, '')::uuid)
		            order by x.id desc limit @limit + 1) y)) d
		  left join agent_webhook_endpoints e on e.name = d.endpoint
		 order by d.id desc limit @limit + 1`,
		customPlan, postgres.Strict{
			"endpoints": filter.endpoints, "ids": filter.ids, "status": filter.Status, "before": filter.Before,
			"limit": maxDeliveries,
		})
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, all, maxDeliveries, func(d deliveryRow) string { return d.ID })
	return map[string]any{
		"Deliveries": list, "Want": filter, "Links": links,
	}, nil
}

// rejectedRequest is a row of the activity log about requests with a bad signature. A process adds at most one such row
// a minute for an endpoint and a class of errors.
type rejectedRequest struct {
	ID, TraceID, Endpoint, Count, Why string
	CreatedAt                         time.Time
}

func (room *Room) deliveriesRefused(ctx context.Context, _ *pageRequest) (any, error) {
	return postgres.Rows[rejectedRequest](ctx, room.Read, "list refusals", `
		select a.id::text, a.trace_id, coalesce(a.input ->> 'endpoint', '') as endpoint,
		       coalesce(a.input ->> 'count', '') as count, coalesce(left(a.error_message, 300), '') as why, a.created_at
		  from agent_activity a where a.skill_name = 'webhook_refused' order by a.id desc limit @limit`,
		customPlan, postgres.Strict{"limit": maxRejections})
}

// targetRow is a target with its pending messages.
type targetRow struct {
	ID, Name, URL, DisabledBy, DisabledReason string
	Events                                    []string
	Enabled                                   bool
	Failures                                  int
	FailingSince                              *time.Time
	BlockedUntil                              *time.Time // nil if messages may be sent
	Pending, Dead                             int64      // at most maxCounted + 1
}

// Capped formats Pending or Dead.
func (targetRow) Capped(n int64) string { return capped(n, maxCounted) }

// deliveryTargets lists the first maxTargets targets by name, with bounded counts of pending and dead messages.
func (room *Room) deliveryTargets(ctx context.Context, _ *pageRequest) (any, error) {
	all, err := postgres.Rows[targetRow](ctx, room.Read, "list targets", `
		select t.id::text, t.name, left(t.url, 2048) as url,
		       array(select left(coalesce(e, ''), 200) from unnest(t.events[:20]) e) as events,
		       t.enabled, left(t.disabled_by, 300) as disabled_by, left(t.disabled_reason, 300) as disabled_reason,
		       t.failures, t.failing_since,
		       case when t.blocked_until > clock_timestamp() then t.blocked_until end as blocked_until,
		       (select count(*)
		          from (select from agent_webhook_outbox o
		                 where o.target_id = t.id and o.status = 'pending'
		                 limit @count + 1) p) as pending,
		       (select count(*)
		          from (select from agent_webhook_outbox o
		                 where o.target_id = t.id and o.status = 'dead'
		                 limit @count + 1) p) as dead
		  from agent_webhook_targets t order by t.name limit @limit + 1`,
		postgres.Strict{"limit": maxTargets, "count": maxCounted})
	if err != nil {
		return nil, err
	}
	for i := range all {
		all[i].URL = redact.Text(all[i].URL, maxValue)
	}
	list, more := firstN(all, maxTargets)
	return map[string]any{"Targets": list, "More": more}, nil
}
