package webhooks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

// Formats of a body.
const (
	FormatJSON = "json"
	FormatText = "text"
)

// Challenges by which a sender verifies the address of an endpoint.
const (
	ChallengeSlack = "slack" // a signed body {"type": "url_verification", "challenge": …}
	ChallengeMeta  = "meta"  // GET with hub.mode, hub.verify_token and hub.challenge
)

// Settings are the details of an endpoint, as stored.
type Settings struct {
	Format           string  `json:"format"` // json, or text: UTF-8, not parsed
	MaxBytes         int64   `json:"max_bytes"`
	ToleranceSeconds float64 `json:"tolerance_seconds"`
	ID               string  `json:"id"` // path of the delivery id, or digest; empty for that of the scheme
	MaxAttempts      int     `json:"max_attempts"`
	Header           string  `json:"header,omitempty"`
	Encoding         string  `json:"encoding,omitempty"`
	Prefix           string  `json:"prefix,omitempty"`
	TimestampHeader  string  `json:"timestamp_header,omitempty"`
	IDHeader         string  `json:"id_header,omitempty"`
	Signed           string  `json:"signed,omitempty"`
	Challenge        string  `json:"challenge,omitempty"`
	VerifyToken      string  `json:"verify_token,omitempty"` // reference
}

// Digest is the path of a delivery id that selects the SHA-256 of the body.
const Digest = "digest"

// HMAC describes a generic signature.
type HMAC struct {
	Header          string `yaml:"header" json:"header,omitempty"`                     // X-Signature when empty
	Encoding        string `yaml:"encoding" json:"encoding,omitempty"`                 // hex or base64; hex when empty
	Prefix          string `yaml:"prefix" json:"prefix,omitempty"`                     // such as sha256=
	TimestampHeader string `yaml:"timestamp_header" json:"timestamp_header,omitempty"` // header of the signed time
	IDHeader        string `yaml:"id_header" json:"id_header,omitempty"`               // header of the signed id
	Signed          string `yaml:"signed" json:"signed,omitempty"`                     // default {id}.{timestamp}.{body}
}

// EndpointDefinition declares an endpoint in a workspace file.
type EndpointDefinition struct {
	Name        string           `yaml:"name" json:"name"` // the last segment of /webhooks/{name}
	Description string           `yaml:"description" json:"description,omitempty"`
	Scheme      signature.Scheme `yaml:"scheme" json:"scheme"`
	Secrets     []string         `yaml:"secrets" json:"secrets"` // references; several during a rotation
	HMAC        HMAC             `yaml:"hmac" json:"hmac,omitzero"`
	Tolerance   time.Duration    `yaml:"tolerance" json:"tolerance,omitempty"`       // of the signed time; 5 minutes when 0
	Format      string           `yaml:"format" json:"format,omitempty"`             // json (when empty) or text
	MaxBytes    int64            `yaml:"max_bytes" json:"max_bytes,omitempty"`       // 1 MiB when 0, at most 25 MiB
	ID          string           `yaml:"id" json:"id,omitempty"`                     // path of the delivery id, or digest
	MaxAttempts int              `yaml:"max_attempts" json:"max_attempts,omitempty"` // 5 when 0, at most 20
	Challenge   string           `yaml:"challenge" json:"challenge,omitempty"`       // slack or meta; none when empty
	VerifyToken string           `yaml:"verify_token" json:"verify_token,omitempty"` // reference, of challenge meta
	Actions     []Action         `yaml:"actions" json:"actions"`
}

// Action is a reaction to a delivery. It has exactly one of Event, Resume, Automation, Flow and Prompt. Event and
// Resume need Key and may have Data. Flow may have Data, its input, and Thread, its conversation. Every action with a
// true When runs, in order.
type Action struct {
	When       map[string]any `yaml:"when" json:"when,omitempty"`             // path: value or values; all must match
	Event      string         `yaml:"event" json:"event,omitempty"`           // such as EVENT_COMPLETED
	Resume     string         `yaml:"resume" json:"resume,omitempty"`         // kind of wait, a key of events
	Key        string         `yaml:"key" json:"key,omitempty"`               // template
	Data       map[string]any `yaml:"data" json:"data,omitempty"`             // field: path; the body when empty
	Automation string         `yaml:"automation" json:"automation,omitempty"` // name
	Flow       string         `yaml:"flow" json:"flow,omitempty"`             // name; starts once per delivery
	Thread     string         `yaml:"thread" json:"thread,omitempty"`         // template; created if missing
	Prompt     string         `yaml:"prompt" json:"prompt,omitempty"`         // template, for the model
	Scopes     []string       `yaml:"scopes" json:"scopes,omitempty"`         // of the model's skills; external when empty
}

// UnmarshalJSON preserves the numbers of When, because a float64 rounds large ids.
func (a *Action) UnmarshalJSON(text []byte) error {
	type plain Action
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode((*plain)(a))
}

// events maps each kind of wait to the event that ends it. It omits other kinds, because external senders must not
// decide approvals, end executions or fire timers.
func events() map[string]string {
	return map[string]string{
		"response": "MESSAGE_RECEIVED", "document": "DOCUMENT_UPLOADED", "signature": "SIGNATURE_COMPLETED",
		"test": "TEST_COMPLETED", "event": "EVENT_COMPLETED",
	}
}

// EventName returns the event that the action emits; empty for none.
func (a Action) EventName() string {
	if a.Resume != "" {
		return events()[a.Resume]
	}
	return a.Event
}

// Verifier returns the verifier of requests to the endpoint, with its secrets resolved.
func (e Endpoint) Verifier(secrets []string) signature.Verifier {
	return signature.Verifier{
		Scheme: e.Scheme, Secrets: secrets, Tolerance: time.Duration(e.Settings.ToleranceSeconds * float64(time.Second)),
		Layout: signature.Layout{
			Header: e.Settings.Header, Encoding: e.Settings.Encoding, Prefix: e.Settings.Prefix,
			TimestampHeader: e.Settings.TimestampHeader, IDHeader: e.Settings.IDHeader, Signed: e.Settings.Signed,
		},
	}
}

// SecretHeaders are the headers that authenticate a delivery. Their values are not stored.
func (e Endpoint) SecretHeaders() []string {
	return []string{
		"Authorization", "Proxy-Authorization", "Cookie", "X-Hub-Signature", "X-Hub-Signature-256", "Stripe-Signature",
		signature.HeaderSignature, "Svix-Signature", http.CanonicalHeaderKey(cmp.Or(e.Settings.Header, "X-Signature")),
	}
}

// PutEndpoint stores the declaration d and reports whether it changed anything. It does not change whether the endpoint
// is enabled.
func PutEndpoint(ctx context.Context, db postgres.DB, d EndpointDefinition) (changed bool, err error) {
	verb := fmt.Sprintf("put webhook %q", d.Name)
	e, invalid := d.resolve()
	settings, settingsErr := json.Marshal(e.Settings)
	actions, actionsErr := json.Marshal(e.Actions)
	if err := cmp.Or(invalid, settingsErr, actionsErr); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.Upsert(ctx, db, verb, "agent_webhook_endpoints", "name", postgres.Strict{
		"name": e.Name, "description": e.Description, "scheme": string(e.Scheme), "secrets": e.Secrets,
		"settings": settings, "actions": actions, "source": postgres.SourceWorkspace,
	})
}

// GetEndpoint reads an endpoint by name, or returns [ErrNotFound].
func GetEndpoint(ctx context.Context, db postgres.DB, name string) (Endpoint, error) {
	if !postgres.IsText(name) {
		return Endpoint{}, fmt.Errorf("read webhook %q: %w", name, ErrNotFound)
	}
	return postgres.RowOr[Endpoint](ctx, db, ErrNotFound, fmt.Sprintf("read webhook %q", name), `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by,
		       disabled_at, source, created_at, updated_at
		  from agent_webhook_endpoints where name = @name`, postgres.Strict{"name": name})
}

// Endpoints lists all endpoints by name.
func Endpoints(ctx context.Context, db postgres.DB) ([]Endpoint, error) {
	return postgres.Rows[Endpoint](ctx, db, "list webhooks", `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by,
		       disabled_at, source, created_at, updated_at
		  from agent_webhook_endpoints order by name`)
}

// RemoveEndpoints deletes the workspace's endpoints except keep, and returns their names. Their deliveries stay.
func RemoveEndpoints(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.DeleteOthers(ctx, db, "webhooks", "agent_webhook_endpoints", keep)
}

// SetEndpoint enables or disables an endpoint for an admin. It returns false if nothing changed.
func SetEndpoint(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_webhook_endpoints
		   set enabled = @enabled, disabled_by = case when @enabled then '' else @by end,
		       disabled_reason = case when @enabled then '' else @reason end,
		       disabled_at = case when @enabled then null else clock_timestamp() end, updated_at = clock_timestamp()
		 where name = @name and enabled <> @enabled`,
		postgres.Strict{"name": name, "enabled": enabled, "by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("change webhook %q: %w", name, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	_, err = GetEndpoint(ctx, db, name)
	return false, err
}
