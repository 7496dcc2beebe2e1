package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	maxMessages       = 50
	maxMessageTargets = 200 // targets of one list
)

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
	NextAttemptAt                             time.Time // not before the end of a pause of the target
	CreatedAt                                 time.Time
	FinishedAt                                *time.Time
	Enabled                                   bool // of the target
}

const messageColumns = `o.id::text, t.name as target, o.event, o.status, o.trace_id, left(o.last_error, 1000) as error,
	o.attempts, o.http_status, greatest(o.next_attempt_at, t.blocked_until) as next_attempt_at, o.created_at,
	o.finished_at, t.enabled`

// messagesList reads dead messages, newest first, or pending messages in sending order. Without a filter by target, it
// reads those of the first maxMessageTargets targets by name.
func (room *Room) messagesList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(messageFilter)
	targets, err := postgres.Values[string](ctx, room.Read, "list targets", `
		select id::text from agent_webhook_targets where @target = '' or name = @target order by name limit @limit + 1`,
		customPlan, postgres.Strict{"target": filter.Target, "limit": maxMessageTargets})
	if err != nil {
		return nil, err
	}
	targets, moreTargets := firstN(targets, maxMessageTargets)
	read := room.deadMessages
	if filter.Status == "pending" {
		read = room.pendingMessages
	}
	all, err := read(ctx, targets, filter.Before)
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, all, maxMessages, func(m messageRow) string { return m.ID })
	more := filter.Status == "pending" && links.Older != ""
	if more {
		links.Older = "" // the order of sending changes, so the list has no second page
	}
	return map[string]any{
		"Messages": list, "Want": filter, "More": more, "Links": links,
		"MoreTargets": moreTargets, "Targets": len(targets),
	}, nil
}

// pendingMessages sorts by the time of the next attempt. Messages to disabled targets have none, and come last.
func (room *Room) pendingMessages(ctx context.Context, targets []string, _ string) ([]messageRow, error) {
	return postgres.Rows[messageRow](ctx, room.Read, "list messages", `
		select `+messageColumns+`
		  from agent_webhook_targets t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'pending'
		     order by x.next_attempt_at limit @limit + 1) o
		 where t.id = any(@targets::text[]::uuid[])
		 order by not t.enabled, greatest(o.next_attempt_at, t.blocked_until), o.id limit @limit + 1`,
		customPlan, postgres.Strict{"targets": targets, "limit": maxMessages})
}

func (room *Room) deadMessages(ctx context.Context, targets []string, before string) ([]messageRow, error) {
	return postgres.Rows[messageRow](ctx, room.Read, "list messages", `
		select `+messageColumns+`
		  from agent_webhook_targets t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'dead'
		       and (@before = '' or x.id < nullif(@before, '')::uuid) order by x.id desc limit @limit + 1) o
		 where t.id = any(@targets::text[]::uuid[])
		 order by o.id desc limit @limit + 1`,
		customPlan, postgres.Strict{"targets": targets, "before": before, "limit": maxMessages})
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
		select `+messageColumns+`, left(case when @hide and o.payload #> '{data,result_summary}' is not null
		         then jsonb_set(o.payload, '{data,result_summary}', to_jsonb(@note::text)) else o.payload end::text, 40000)
		         as payload
		  from agent_webhook_outbox o join agent_webhook_targets t on t.id = o.target_id
		 where o.id = @id`,
		postgres.Strict{"id": req.Subject, "hide": activity.HidesTexts(ctx), "note": activity.HiddenText})
	if err != nil {
		return nil, err
	}
	m.Payload = argumentsShown(m.Payload)
	return m, nil
}
