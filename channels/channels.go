// Package channels connects conversations in Telegram, in Slack and by e-mail with threads.
//
// # In
//
// A [Transport] receives messages from its provider and passes them to its [Inbox]. The inbox commits them to
// agent_channel_messages before the transport acknowledges them. A message has the provider's id, so it counts once.
// From there it enters a thread as a chat message does: one thread for each conversation, with its lane, its order and
// its limits. The messages of a conversation enter one after the other. No conversation waits for another.
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
// A sender is the provider's id, never a display name. An unknown sender gets a pairing code, which an admin confirms;
// that makes a visitor only. A button decides an approval under these conditions. The press is signed, the first one,
// and in time. Its sender is linked to a principal that may decide. The arguments have not changed.
package channels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/mail"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The types of channels.
const (
	Telegram = "telegram"
	Slack    = "slack"
	Email    = "email"
)

// Pairing determines the permitted senders.
const (
	PairingRequired = "required" // senders that an admin has confirmed
	PairingOpen     = "open"     // everybody
)

// ErrNotFound reports an unknown channel.
var ErrNotFound = errors.New("no such channel")

// Definition declares a channel in a workspace file.
type Definition struct {
	Name        string            `yaml:"name" json:"name"`
	Description string            `yaml:"description" json:"description,omitempty"`
	Type        string            `yaml:"type" json:"type"`
	Agent       string            `yaml:"agent" json:"agent,omitempty"`         // default: the default agent
	Secrets     map[string]string `yaml:"secrets" json:"secrets"`               // references, by name
	Settings    map[string]string `yaml:"settings" json:"settings,omitempty"`   // of the type
	Pairing     string            `yaml:"pairing" json:"pairing,omitempty"`     // required or open
	ReportTo    string            `yaml:"report_to" json:"report_to,omitempty"` // a conversation
}

var (
	nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	envForm  = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)
)

// fields are the secrets and settings of a type; the value is true for a required one.
type fields struct {
	secrets  map[string]bool
	settings map[string]func(value string) string // returns the fault
	required []string                             // settings that must be set
}

// Types lists the types of channels.
func Types() []string { return []string{Telegram, Slack, Email} }

// types has the fields of each type. A new type adds its entry.
func types() map[string]fields {
	return map[string]fields{
		Telegram: {
			secrets: map[string]bool{"token": true, "webhook": false},
			settings: map[string]func(string) string{
				"mode": oneOf("polling", "webhook"), "base_url": webAddress,
			},
		},
		Slack: {
			secrets: map[string]bool{"token": true, "app_token": false, "signing_secret": false},
			settings: map[string]func(string) string{
				"mode": oneOf("socket", "events"), "base_url": webAddress,
			},
		},
		Email: emailFields(),
	}
}

// emailFields has the settings of an e-mail channel. The package email reads them.
func emailFields() fields {
	path := func(v string) string {
		if filepath.IsAbs(v) {
			return ""
		}
		return "must be an absolute path"
	}
	text := func(string) string { return "" }
	return fields{
		secrets: map[string]bool{"key": true, "password": false, "webhook": false},
		settings: map[string]func(string) string{
			"address": ownMailbox, "listen": hostPort, "max_bytes": mailBytes, "tls_cert": path, "tls_key": path,
			"relays": networks, "authserv_id": text, "webhook_scheme": oneOf("bearer", "hmac", "standard"),
			"smtp": hostPort, "smtp_tls": oneOf("starttls", "implicit", "none"), "smtp_ca": path, "username": text,
		},
		required: []string{"address", "smtp"},
	}
}

// ownMailbox checks the address of a channel. Signed suffixes follow its local part; both together have at most 64
// bytes.
func ownMailbox(v string) string {
	a, err := mail.ParseAddress(v)
	if err != nil {
		return "must be an address, such as Support <support@example.com>"
	}
	local, _, _ := strings.Cut(a.Address, "@")
	if len(local) > 20 || strings.Contains(local, "+") {
		return "must have at most 20 characters before the @, and no +"
	}
	return ""
}

func hostPort(v string) string {
	if _, port, err := net.SplitHostPort(v); err != nil || port == "" {
		return "must be host:port"
	}
	return ""
}

func mailBytes(v string) string {
	if n, err := strconv.ParseInt(v, 10, 64); err != nil || n < 10_000 || n > 50<<20 {
		return "must be a number of bytes from 10000 to 52428800"
	}
	return ""
}

func networks(v string) string {
	for field := range strings.FieldsSeq(v) {
		_, notAddress := netip.ParseAddr(field)
		if _, notPrefix := netip.ParsePrefix(field); notAddress != nil && notPrefix != nil {
			return "must be addresses and networks, such as 10.0.0.7 192.168.0.0/16"
		}
	}
	return ""
}

func oneOf(values ...string) func(string) string {
	return func(v string) string {
		if slices.Contains(values, v) {
			return ""
		}
		return "must be " + strings.Join(values, " or ")
	}
}

func webAddress(v string) string {
	if strings.HasPrefix(v, "https://") || strings.HasPrefix(v, "http://") {
		return ""
	}
	return "must be an https:// or http:// address"
}

// Validate returns all problems of d, each as "field path: problem", joined as by [errors.Join].
func Validate(d Definition) error {
	var problems fielderr.List
	if !nameForm.MatchString(d.Name) {
		problems.Add("name", "must be 1 to 64 of a-z, 0-9, _ and -, and begin with a letter or digit")
	}
	kind, known := types()[d.Type]
	if !known {
		problems.Add("type", "must be %s", strings.Join(slices.Sorted(maps.Keys(types())), ", "))
		return errors.Join(problems...)
	}
	if d.Pairing != "" && d.Pairing != PairingRequired && d.Pairing != PairingOpen {
		problems.Add("pairing", "must be %s or %s", PairingRequired, PairingOpen)
	}
	if len(d.ReportTo) > maxConversation {
		problems.Add("report_to", "has more than %d bytes", maxConversation)
	}
	for _, name := range slices.Sorted(maps.Keys(kind.secrets)) {
		if kind.secrets[name] && d.Secrets[name] == "" {
			problems.Add("secrets", "needs %s, as ${NAME} or file:/path", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Secrets)) {
		path, isFile := strings.CutPrefix(d.Secrets[name], "file:")
		switch _, has := kind.secrets[name]; {
		case !has:
			problems.Add("secrets", "%q is unknown; a %s channel has %s", name, d.Type,
				strings.Join(slices.Sorted(maps.Keys(kind.secrets)), ", "))
		case !envForm.MatchString(d.Secrets[name]) && (!isFile || !filepath.IsAbs(path)):
			problems.Add("secrets", "%s is no reference; a secret does not belong into a file that is shared: write ${NAME} of the "+
				"environment or file:/absolute/path", name)
		}
	}
	for _, name := range kind.required {
		if d.Settings[name] == "" {
			problems.Add("settings", "needs %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Settings)) {
		check, has := kind.settings[name]
		if !has {
			problems.Add("settings", "%q is unknown; a %s channel has %s", name, d.Type,
				strings.Join(slices.Sorted(maps.Keys(kind.settings)), ", "))
		} else if wrong := check(d.Settings[name]); wrong != "" {
			problems.Add("settings", "%s %s", name, wrong)
		}
	}
	if d.Type == Telegram && d.Settings["mode"] == "webhook" && d.Secrets["webhook"] == "" {
		problems.Add("secrets", "needs webhook where settings.mode is webhook; it authenticates Telegram")
	}
	if need := slackSecret(d.Settings["mode"]); d.Type == Slack && d.Secrets[need] == "" {
		problems.Add("secrets", "needs %s for the mode %s", need, cmp.Or(d.Settings["mode"], "socket"))
	}
	return errors.Join(problems...)
}

// slackSecret is the secret that a mode of Slack needs beside the token.
func slackSecret(mode string) string {
	if mode == "events" {
		return "signing_secret"
	}
	return "app_token"
}

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
	Deaf           bool              `json:"deaf"`       // connected, but without an answer of the provider for long
}

// deafAfter is the silence of a provider after which a connected channel counts as deaf. A poll lasts 25 s.
const deafAfter = 3 * time.Minute

// List reads all channels by name.
func List(ctx context.Context, db postgres.DB) ([]Channel, error) { return list(ctx, db, "") }

// Get reads a channel; [ErrNotFound] for none.
func Get(ctx context.Context, db postgres.DB, name string) (Channel, error) {
	got, err := list(ctx, db, name)
	if err == nil && (len(got) == 0 || name == "") {
		err = fmt.Errorf("channel %q: %w", name, ErrNotFound)
	}
	if err != nil {
		return Channel{}, err
	}
	return got[0], nil
}

func list(ctx context.Context, db postgres.DB, name string) ([]Channel, error) {
	return postgres.Rows[Channel](ctx, db, "list channels", `
		select c.id::text, c.name, c.description, c.type, c.agent, c.secrets, c.settings, c.pairing, c.report_to, c.enabled,
		       c.disabled_reason, c.disabled_by, c.state, c.error, c.state_at, c.seen_at, c.source, c.updated_at,
		       (select m.received_at from agent_channel_messages m where m.channel = c.name order by m.id desc limit 1)
		         as last_in_at,
		       (select s.finished_at from agent_channel_sends s where s.channel = c.name and s.finished_at is not null
		         order by s.message_id desc limit 1) as last_out_at,
		       (select count(*) from agent_channel_messages m where m.channel = c.name and m.status = 'received') as waiting,
		       (select count(*) from agent_channel_sends s where s.channel = c.name and s.status in ('queued', 'sending'))
		         as queued,
		       (select count(*) from agent_channel_sends s where s.channel = c.name and s.status = 'maybe_sent'
		           and s.created_at > clock_timestamp() - interval '30 days') as maybe_sent,
		       (select count(*) from agent_channel_sends s where s.channel = c.name and s.status = 'failed'
		           and s.created_at > clock_timestamp() - interval '30 days') as failed,
		       (select count(*) from agent_channel_identities i where i.channel = c.name and i.status = 'pending'
		           and i.expires_at > clock_timestamp()) as pairings,
		       c.enabled and c.state = 'connected' and c.seen_at < clock_timestamp() - make_interval(secs => @deaf) as deaf
		  from agent_channels c where @name = '' or c.name = @name order by c.name`,
		postgres.Strict{"name": name, "deaf": deafAfter.Seconds()})
}

// Broken is an enabled channel that does not work.
type Broken struct {
	Name, Agent string
	State       string // failing, deaf or not delivering
	Error       string
	Since       time.Time
}

// failingAfter is the time that a channel may fail before it counts as broken: its worker reconnects.
const failingAfter = 2 * time.Minute

// ListBroken lists three kinds of channels: those that have failed for a while, deaf ones, and those that could not
// deliver their newest message of the last day.
func ListBroken(ctx context.Context, db postgres.DB) ([]Broken, error) {
	return postgres.Rows[Broken](ctx, db, "list broken channels", `
		select c.name, c.agent, case when c.state = 'failing' then c.state when l.failed is null then 'deaf' else 'not delivering' end as state,
		       case when c.state = 'failing' then c.error else coalesce(l.error, '') end as error,
		       case when c.state = 'failing' then c.state_at else coalesce(l.failed, c.seen_at) end as since
		  from agent_channels c
		  left join lateral (
		    select s.finished_at as failed, s.error_message as error from (
		      select r.* from agent_channel_sends r where r.channel = c.name and r.finished_at is not null
		       order by r.message_id desc limit 1) s
		     where s.status = 'failed' and s.finished_at > clock_timestamp() - interval '1 day') l on true
		 where c.enabled and (c.state = 'failing' and c.state_at < clock_timestamp() - make_interval(secs => @failing)
		    or c.state <> 'failing' and l.failed is not null
		    or c.state = 'connected' and c.seen_at < clock_timestamp() - make_interval(secs => @deaf))
		 order by c.name`, postgres.Strict{"failing": failingAfter.Seconds(), "deaf": deafAfter.Seconds()})
}

// Put stores the declaration d and reports whether it changed anything. State and cursor stay.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put channel %q: %w", d.Name, err)
	}
	verb := fmt.Sprintf("put channel %q", d.Name)
	changed, err = postgres.Upsert(ctx, db, verb, "agent_channels", "name", postgres.Strict{
		"name": d.Name, "description": d.Description, "type": d.Type, "agent": d.Agent, "secrets": notNil(d.Secrets),
		"settings": notNil(d.Settings), "pairing": cmp.Or(d.Pairing, PairingRequired), "report_to": d.ReportTo,
		"source": postgres.SourceWorkspace,
	})
	if err == nil && changed {
		err = notify(ctx, db)
	}
	return changed, err
}

func notNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// Remove deletes the workspace's channels except keep, and returns their names. Their messages stay.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	names, err := postgres.DeleteOthers(ctx, db, "channels", "agent_channels", keep)
	if err == nil && len(names) > 0 {
		err = notify(ctx, db)
	}
	return names, err
}

// Set enables or disables a channel for an admin. It returns false if nothing changed.
func Set(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		with changed as (
		  update agent_channels
		     set enabled = @enabled, disabled_by = case when @enabled then '' else @by end,
		         disabled_reason = case when @enabled then '' else @reason end,
		         disabled_at = case when @enabled then null else clock_timestamp() end, updated_at = clock_timestamp(),
		         state = 'new', error = '', state_at = clock_timestamp()
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

// SendFilter narrows [Sends]. Before is the id of the last message of the previous page.
type SendFilter struct {
	Channel, Before string
	Limit           int
}

// Sent is a message that was maybe sent or given up.
type Sent struct {
	MessageID string    `json:"message_id"`
	Channel   string    `json:"channel"`
	ThreadID  string    `json:"thread_id"`
	Status    string    `json:"status"` // maybe_sent or failed
	Attempts  int       `json:"attempts"`
	Error     string    `json:"error"`
	CreatedAt time.Time `json:"created_at"`
}

// Sends lists the messages that were maybe sent or given up, newest first.
func Sends(ctx context.Context, db postgres.DB, f SendFilter) ([]Sent, error) {
	return postgres.Rows[Sent](ctx, db, "list sent messages", `
		select message_id::text, channel, thread_id, status, attempts, error_message as error, created_at
		  from agent_channel_sends
		 where status in ('failed', 'maybe_sent') and (@channel = '' or channel = @channel)
		   and (@before = '' or message_id < nullif(@before, '')::uuid)
		 order by message_id desc limit @limit`,
		postgres.Strict{"channel": f.Channel, "before": f.Before, "limit": postgres.PageSize(f.Limit, 50, 501)})
}
