package engineroom

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const mostMessages = 50

// outgoingPage lists messages to targets that were not sent.
func (room *Room) outgoingPage() page {
	return page{
		path: "/outgoing", name: "outgoing", title: "Outgoing deliveries",
		open: func(_ context.Context, v *visit) (string, error) {
			status, err := v.oneOf("status", "dead", "pending")
			if err != nil {
				return "", err
			}
			target, err := v.hookFilter("target")
			if err != nil {
				return "", err
			}
			before, err := v.uuidFilter("before")
			v.About = messagesWanted{target, status, before}
			return "Outgoing deliveries", err
		},
		parts: []part{{name: "list", every: 2 * time.Second, load: room.messagesList}},
	}
}

// messagesWanted is what the address of the list asks for.
type messagesWanted struct{ Target, Status, Before string }

// messageRow is a message to a target.
type messageRow struct {
	ID, Target, Event, Status, TraceID, Error string
	Attempts, HTTPStatus                      int
	NextAttemptAt, CreatedAt                  time.Time
	FinishedAt                                *time.Time
	Enabled                                   bool // the target's
}

const messageColumns = `o.id::text, t.name as target, o.event, o.status, o.trace_id, left(o.last_error, 1000) as error, o.attempts,
	o.http_status, o.next_attempt_at, o.created_at, o.finished_at, t.enabled`

// messagesList reads dead messages, the newest first, or those that wait, in the order in which they are sent.
func (room *Room) messagesList(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(messagesWanted)
	read := room.deadMessages
	if want.Status == "pending" {
		read = room.pendingMessages
	}
	all, err := read(ctx, want)
	if err != nil {
		return nil, err
	}
	targets, err := names(room.Read.Query(ctx, `select name from agent_webhook_targets order by name limit 200`))
	if err != nil {
		return nil, err
	}
	list, more := onPage(all, mostMessages)
	older := ""
	if more && want.Status == "dead" {
		older = v.at("before", list[len(list)-1].ID)
	}
	return map[string]any{
		"Messages": list, "Want": want, "Targets": targets, "More": more, "Older": older, "Newest": newest(v, want.Before),
	}, nil
}

func (room *Room) pendingMessages(ctx context.Context, want messagesWanted) ([]messageRow, error) {
	return collectMessages(room.Read.Query(ctx, `
		select `+messageColumns+`
		  from (select * from agent_webhook_targets where @target = '' or name = @target order by name limit 200) t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'pending'
		     order by x.next_attempt_at limit @most + 1) o
		 order by o.next_attempt_at, o.id limit @most + 1`,
		freshPlan, postgres.Strict{"target": want.Target, "most": mostMessages}))
}

func (room *Room) deadMessages(ctx context.Context, want messagesWanted) ([]messageRow, error) {
	return collectMessages(room.Read.Query(ctx, `
		select `+messageColumns+`
		  from (select * from agent_webhook_targets where @target = '' or name = @target order by name limit 200) t
		 cross join lateral (
		    select * from agent_webhook_outbox x where x.target_id = t.id and x.status = 'dead'
		       and (@before = '' or x.id < nullif(@before, '')::uuid) order by x.id desc limit @most + 1) o
		 order by o.id desc limit @most + 1`,
		freshPlan, postgres.Strict{"target": want.Target, "before": want.Before, "most": mostMessages}))
}

func collectMessages(rows pgx.Rows, err error) ([]messageRow, error) {
	if err != nil {
		return nil, fmt.Errorf("list messages: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[messageRow])
	if err != nil {
		return nil, fmt.Errorf("list messages: %w", err)
	}
	return list, nil
}

// messagePage shows one message to a target.
func (room *Room) messagePage() page {
	return page{
		path: "/outgoing/{id}", name: "message", title: "Outgoing delivery",
		open: func(ctx context.Context, v *visit) (string, error) {
			id := strings.ToLower(v.path("id"))
			if !uuidShape.MatchString(id) {
				return "", missing("there is no outgoing delivery %.60q", id)
			}
			var event string
			err := room.Read.QueryRow(ctx, `select event from agent_webhook_outbox where id = @id`, postgres.Strict{"id": id}).Scan(&event)
			if errors.Is(err, pgx.ErrNoRows) {
				return "", missing("there is no outgoing delivery %s", id)
			}
			v.About = id
			return "Outgoing " + cut(80, event), err
		},
		parts: []part{{name: "facts", every: 2 * time.Second, load: room.messageFacts}},
	}
}

// messageDetail is a message with what it says.
type messageDetail struct {
	messageRow
	Payload string
}

func (room *Room) messageFacts(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select `+messageColumns+`, left(o.payload::text, 40000) as payload
		  from agent_webhook_outbox o join agent_webhook_targets t on t.id = o.target_id where o.id = @id`, postgres.Strict{"id": v.About})
	if err != nil {
		return nil, fmt.Errorf("read message: %w", err)
	}
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[messageDetail])
	if err != nil {
		return nil, fmt.Errorf("read message: %w", err)
	}
	m.Payload = argumentsShown(m.Payload)
	return m, nil
}
