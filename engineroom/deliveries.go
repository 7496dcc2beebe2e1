package engineroom

import (
	"context"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
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

func (room *Room) openDeliveries(ctx context.Context, req *pageRequest) (string, error) {
	if _, ok := req.Subject.(deliveryFilter); ok {
		return "Deliveries", nil // found for the same address
	}
	endpoint, err := req.hookFilter("endpoint")
	if err != nil {
		return "", err
	}
	filter := deliveryFilter{Endpoint: endpoint}
	if filter.endpoints, err = room.namesLike(ctx, "endpoint", endpoint); err != nil {
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

func (room *Room) deliveriesList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(deliveryFilter)
	all, err := postgres.Rows[deliveryRow](ctx, room.Read, "list deliveries", `
		select d.id::text, d.endpoint, d.delivery_id, d.status, left(d.last_trace_id, 300) as trace_id, d.execution_id::text,
		  d.attempts, d.replays,
		       d.repeats, d.conflicts, octet_length(d.body)::bigint as bytes, d.next_attempt_at, d.received_at,
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

// rejectedRequest is a row of the activity log about requests with a bad signature. The log gets at most one such row a
// minute.
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

// Capped formats a bounded count.
func (targetRow) Capped(n int64) string {
	if n > maxCounted {
		return human.Count(maxCounted) + "+"
	}
	return human.Count(n)
}

func (room *Room) deliveryTargets(ctx context.Context, _ *pageRequest) (any, error) {
	all, err := postgres.Rows[targetRow](ctx, room.Read, "list targets", `
		select t.id::text, t.name, left(t.url, 2048) as url, array(select left(coalesce(e, ''), 200)
		  from unnest(t.events[:20]) e) as events,
		       t.enabled, left(t.disabled_by, 300) as disabled_by, left(t.disabled_reason, 300) as disabled_reason,
		         t.failures,
		       t.failing_since, case when t.blocked_until > clock_timestamp() then t.blocked_until end as blocked_until,
		       (select count(*) from (select from agent_webhook_outbox o where o.target_id = t.id and o.status = 'pending'
		         limit @count + 1) p) as pending,
		       (select count(*) from (select from agent_webhook_outbox o where o.target_id = t.id
		         and o.status = 'dead' limit @count + 1) p) as dead
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

const maxAttempts = 100

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

const maxMessages = 50

// outgoingPage lists unsent messages to targets.
func (room *Room) outgoingPage() page {
	return page{
		path: "/outgoing", name: "outgoing", title: "Outgoing deliveries",
		open: func(_ context.Context, req *pageRequest) (string, error) {
			status, err := req.oneOf("status", "dead", "pending")
			if err != nil {
				return "", err
			}
			target, err := req.hookFilter("target")
			if err != nil {
				return "", err
			}
			before, err := req.uuidFilter("before")
			req.Subject = messageFilter{target, status, before}
			return "Outgoing deliveries", err
		},
		parts: []part{
			room.filtersPart("/outgoing", "target"),
			{name: "list", interval: 2 * time.Second, load: room.messagesList},
		},
	}
}

// messageFilter holds the parameters of the list.
type messageFilter struct{ Target, Status, Before string }

// messageRow is a message to a target.
type messageRow struct {
	ID, Target, Event, Status, TraceID, Error string
	Attempts, HTTPStatus                      int
	NextAttemptAt, CreatedAt                  time.Time
	FinishedAt                                *time.Time
	Enabled                                   bool // of the target
}

const messageColumns = `o.id::text, t.name as target, o.event, o.status, o.trace_id, left(o.last_error, 1000) as error,
	o.attempts, o.http_status, o.next_attempt_at, o.created_at, o.finished_at, t.enabled`

// messagesList reads dead messages, newest first, or pending messages in sending order.
func (room *Room) messagesList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(messageFilter)
	read := room.deadMessages
	if filter.Status == "pending" {
		read = room.pendingMessages
	}
	all, err := read(ctx, filter)
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, all, maxMessages, func(m messageRow) string { return m.ID })
	more := filter.Status == "pending" && links.Older != ""
	if more {
		links.Older = "" // the order of sending changes, so the list has no second page
	}
	return map[string]any{"Messages": list, "Want": filter, "More": more, "Links": links}, nil
}

func (room *Room) pendingMessages(ctx context.Context, filter messageFilter) ([]messageRow, error) {
	return postgres.Rows[messageRow](ctx, room.Read, "list messages", `
		select `+messageColumns+`
		  from (select * from agent_webhook_targets where @target = '' or name = @target order by name limit 200) t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'pending'
		     order by x.next_attempt_at limit @limit + 1) o
		 order by o.next_attempt_at, o.id limit @limit + 1`,
		customPlan, postgres.Strict{"target": filter.Target, "limit": maxMessages})
}

func (room *Room) deadMessages(ctx context.Context, filter messageFilter) ([]messageRow, error) {
	return postgres.Rows[messageRow](ctx, room.Read, "list messages", `
		select `+messageColumns+`
		  from (select * from agent_webhook_targets where @target = '' or name = @target order by name limit 200) t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'dead'
		       and (@before = '' or x.id < nullif(@before, '')::uuid) order by x.id desc limit @limit + 1) o
		 order by o.id desc limit @limit + 1`,
		customPlan, postgres.Strict{"target": filter.Target, "before": filter.Before, "limit": maxMessages})
}

// messagePage shows one message to a target.
func (room *Room) messagePage() page {
	return page{
		path: "/outgoing/{id}", name: "message", title: "Outgoing delivery",
		open:  room.openByID("outgoing delivery", "Outgoing ", `select event from agent_webhook_outbox where id = @id`),
		parts: []part{{name: "facts", interval: 2 * time.Second, load: room.messageFacts}},
	}
}

// messageDetail is a message with its payload.
type messageDetail struct {
	messageRow
	Payload string
}

func (room *Room) messageFacts(ctx context.Context, req *pageRequest) (any, error) {
	m, err := postgres.Row[messageDetail](ctx, room.Read, "read message", `
		select `+messageColumns+`, left(o.payload::text, 40000) as payload
		  from agent_webhook_outbox o join agent_webhook_targets t on t.id = o.target_id
		 where o.id = @id`, postgres.Strict{"id": req.Subject})
	if err != nil {
		return nil, err
	}
	m.Payload = argumentsShown(m.Payload)
	return m, nil
}
