// Package channels connects conversations in Telegram, in Slack and by e-mail with threads.
//
// # In
//
// A [Transport] receives messages from its provider and passes them to its [Inbox]. The inbox commits them to
// agent_channel_messages before the transport acknowledges them. A message has the provider's id, so it counts once.
// From there it enters a thread as a chat message does: one thread for each conversation, with its lane, its order and
// its limits. The messages of a conversation enter one after the other. A message that cannot enter yet delays its own
// conversation only.
//
// # Out
//
// A message of such a thread has a row in agent_channel_sends, written in its transaction. The messages of a thread
// leave in order. Providers have no idempotent send, so each part is marked before it is sent. A part whose answer was
// lost is maybe_sent: it is counted and listed. It is sent again only if the provider can show that it never arrived
// ([Finder]). While a turn writes its answer, the channel edits one message to show it, if the provider allows edits.
//
// # Workers
//
// Each channel has a worker of its own, which holds the lane channel:NAME. So one process polls a bot, and a channel
// that is down, slow or rate-limited delays no other. Its state is a column of agent_channels.
//
// # People
//
// A sender is the provider's id, never a display name. If pairing is required, an unknown sender gets a pairing code,
// which an admin confirms; that makes a visitor only. A button decides an approval under these conditions. The provider
// reports the press, it is the button's first, and it comes in time. Its sender is linked to a principal that may
// decide. The arguments have not changed.
package channels

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNotFound reports an unknown channel.
var ErrNotFound = errors.New("no such channel")

// Channel is a row of agent_channels with its counts.
type Channel struct {
	ID             string            `json:"id"`
	Name           string            `json:"name"`
	Description    string            `json:"description"`
	Type           string            `json:"type"`
	Agent          string            `json:"agent"`
	Secrets        map[string]string `json:"secrets"` // references
	Settings       map[string]string `json:"settings"`
	Pairing        string            `json:"pairing"`
	ReportTo       string            `json:"report_to"`
	Enabled        bool              `json:"enabled"`
	DisabledReason string            `json:"disabled_reason"`
	DisabledBy     string            `json:"disabled_by"`
	State          string            `json:"state"` // new, connected or failing
	Error          string            `json:"error"`
	StateAt        time.Time         `json:"state_at"`
	SeenAt         *time.Time        `json:"seen_at"` // time of the provider's last answer
	Source         string            `json:"source"`
	UpdatedAt      time.Time         `json:"updated_at"`
	LastInAt       *time.Time        `json:"last_in_at"`
	LastOutAt      *time.Time        `json:"last_out_at"`
	Waiting        int               `json:"waiting"`    // messages that have not reached their thread
	Queued         int               `json:"queued"`     // messages to send
	MaybeSent      int               `json:"maybe_sent"` // messages of the last 30 days, sent once or not at all
	Failed         int               `json:"failed"`     // messages of the last 30 days that were given up
	Pairings       int               `json:"pairings"`   // senders that wait for an admin
	Deaf           bool              `json:"deaf"`       // connected, but the provider has not answered for deafAfter
}

// deafAfter is the time without an answer of the provider after which a connected channel counts as deaf. The longest
// wait for an answer is a poll of Telegram, 25 s.
const deafAfter = 3 * time.Minute

// List reads all channels by name.
func List(ctx context.Context, db postgres.DB) ([]Channel, error) { return list(ctx, db, "") }

// Get reads a channel; [ErrNotFound] for none.
func Get(ctx context.Context, db postgres.DB, name string) (Channel, error) {
	found, err := list(ctx, db, name)
	if err == nil && (len(found) == 0 || name == "") {
		err = fmt.Errorf("channel %q: %w", name, ErrNotFound)
	}
	if err != nil {
		return Channel{}, err
	}
	return found[0], nil
}

// list reads one channel, or all channels if name is "".
func list(ctx context.Context, db postgres.DB, name string) ([]Channel, error) {
	return postgres.Rows[Channel](ctx, db, "list channels", `
		select c.id::text, c.name, c.description, c.type, c.agent, c.secrets, c.settings, c.pairing, c.report_to, c.enabled,
		       c.disabled_reason, c.disabled_by, c.state, c.error, c.state_at, c.seen_at, c.source, c.updated_at,
		       (select m.received_at
		          from agent_channel_messages m
		         where m.channel = c.name
		         order by m.id desc
		         limit 1) as last_in_at,
		       (select s.finished_at
		          from agent_channel_sends s
		         where s.channel = c.name and s.finished_at is not null
		         order by s.message_id desc
		         limit 1) as last_out_at,
		       (select count(*)
		          from agent_channel_messages m
		         where m.channel = c.name and m.status = 'received') as waiting,
		       (select count(*)
		          from agent_channel_sends s
		         where s.channel = c.name and s.status in ('queued', 'sending')) as queued,
		       (select count(*)
		          from agent_channel_sends s
		         where s.channel = c.name and s.status = 'maybe_sent'
		           and s.created_at > clock_timestamp() - interval '30 days') as maybe_sent,
		       (select count(*)
		          from agent_channel_sends s
		         where s.channel = c.name and s.status = 'failed'
		           and s.created_at > clock_timestamp() - interval '30 days') as failed,
		       (select count(*)
		          from agent_channel_identities i
		         where i.channel = c.name and i.status = 'pending' and i.expires_at > clock_timestamp()) as pairings,
		       c.enabled and c.state = 'connected'
		         and c.seen_at < clock_timestamp() - make_interval(secs => @deaf) as deaf
		  from agent_channels c
		 where @name = '' or c.name = @name
		 order by c.name`,
		postgres.Strict{"name": name, "deaf": deafAfter.Seconds()})
}

// Set enables or disables a channel for an admin. It returns false if nothing changed.
func Set(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		with changed as (
		  update agent_channels
		     set enabled = @enabled,
		         disabled_by = case when @enabled then '' else @by end,
		         disabled_reason = case when @enabled then '' else @reason end,
		         disabled_at = case when @enabled then null else clock_timestamp() end,
		         updated_at = clock_timestamp(), state = 'new', error = '', state_at = clock_timestamp()
		   where name = @name and enabled <> @enabled returning name)
		select pg_notify('agent_channels', '') from changed`,
		postgres.Strict{"name": name, "enabled": enabled, "by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("change channel %q: %w", name, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	_, err = Get(ctx, db, name)
	return false, err
}

// notifications is the channel of LISTEN that wakes the workers. The payload is a channel's name; "" means all.
const notifications = "agent_channels"

// approvalRequested is the payload for a new request for approval. No channel can have this name.
const approvalRequested = "approval requested"

// notify wakes the workers of all channels.
func notify(ctx context.Context, db postgres.DB) error {
	if _, err := db.Exec(ctx, `select pg_notify(@channel, '')`, postgres.Strict{"channel": notifications}); err != nil {
		return fmt.Errorf("wake channels: %w", err)
	}
	return nil
}

// Status describes the state for people.
func (c Channel) Status() string {
	switch {
	case !c.Enabled:
		return "disabled"
	case c.Deaf:
		return "deaf"
	}
	return c.State
}

// Broken is an enabled channel that does not work.
type Broken struct {
	Name, Agent string
	State       string // failing, deaf or not delivering
	Error       string
	Since       time.Time
}

// failingAfter is the time that a channel may fail before it counts as broken. Most failures end before, because the
// worker reconnects.
const failingAfter = 2 * time.Minute

// ListBroken lists the enabled channels that have failed for longer than failingAfter, that are deaf, or whose newest
// finished message failed within the last day.
func ListBroken(ctx context.Context, db postgres.DB) ([]Broken, error) {
	return postgres.Rows[Broken](ctx, db, "list broken channels", `
		select c.name, c.agent,
		       case
		         when c.state = 'failing' then c.state
		         when l.failed is null then 'deaf'
		         else 'not delivering'
		       end as state,
		       case when c.state = 'failing' then c.error else coalesce(l.error, '') end as error,
		       case when c.state = 'failing' then c.state_at else coalesce(l.failed, c.seen_at) end as since
		  from agent_channels c
		  left join lateral (
		       select s.finished_at as failed, s.error_message as error
		         from (select r.*
		                 from agent_channel_sends r
		                where r.channel = c.name and r.finished_at is not null
		                order by r.message_id desc
		                limit 1) s
		        where s.status = 'failed' and s.finished_at > clock_timestamp() - interval '1 day') l on true
		 where c.enabled
		   and (c.state = 'failing' and c.state_at < clock_timestamp() - make_interval(secs => @failing)
		        or c.state <> 'failing' and l.failed is not null
		        or c.state = 'connected' and c.seen_at < clock_timestamp() - make_interval(secs => @deaf))
		 order by c.name`, postgres.Strict{"failing": failingAfter.Seconds(), "deaf": deafAfter.Seconds()})
}
