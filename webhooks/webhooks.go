// Package webhooks owns the tables of webhooks, incoming and outgoing, and sends the outgoing ones.
//
// An endpoint is what others post to: how they sign, and what is done with what they send (see [EndpointDefinition]).
// A delivery is one thing they sent. Its row is written before it is acknowledged, and its unique key (endpoint,
// delivery id) makes it handled once however often it comes: [Insert] tells the first from the repeated, also when
// fifty come at the same moment. The surface that receives and acts is surfaces/webhook.
//
// A target is who is told of the agent's own events. Triggers write the outbox in the transaction that causes an
// event, so nothing is told that did not happen and nothing that happened is forgotten; with no target that wants an
// event they write nothing. A [Dispatcher] sends: any number may run at once, and an attempt is one's alone, because
// whoever takes a row moves its next time past the end of the attempt in the same statement. A dispatcher that dies
// is outlived by that time, and the message is sent again under the same webhook-id: at least once, never twice by
// two at once.
//
// Definitions hold references to secrets (${NAME}, file:/path), never secrets; [Secrets] resolves them when used, so
// a rotated file or a restarted process is enough to change one. Headers that carry secrets are blotted out before a
// delivery is stored.
package webhooks

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/signature"
)

var (
	// ErrNotFound reports an endpoint, a target or a delivery that does not exist.
	ErrNotFound = errors.New("webhook not found")
	// ErrUnderWay reports a delivery that is being handled, and so is not replayed.
	ErrUnderWay = errors.New("the delivery is being handled already")
)

// States of a delivery.
const (
	Received = "received" // stored, its execution has not begun
	Running  = "running"
	Failed   = "failed" // to be tried again at its next_attempt_at
	Done     = "done"
	Ignored  = "ignored" // no action of the endpoint was for it
	Dead     = "dead"    // the attempts are used up, or its execution was ended
)

// Statuses lists the states of a delivery.
func Statuses() []string { return []string{Received, Running, Failed, Done, Ignored, Dead} }

// SourceWorkspace marks endpoints and targets that a workspace file declares.
const SourceWorkspace = "workspace"

// Endpoint is a row of agent_webhook_endpoints.
type Endpoint struct {
	ID             string           `json:"id"`
	Name           string           `json:"name"`
	Description    string           `json:"description"`
	Scheme         signature.Scheme `json:"scheme"`
	Secrets        []string         `json:"secrets"` // references
	Settings       Settings         `json:"settings"`
	Actions        []Action         `json:"actions"`
	Enabled        bool             `json:"enabled"`
	DisabledReason string           `json:"disabled_reason"`
	DisabledBy     string           `json:"disabled_by"`
	DisabledAt     *time.Time       `json:"disabled_at"`
	Source         string           `json:"source"`
	CreatedAt      time.Time        `json:"created_at"`
	UpdatedAt      time.Time        `json:"updated_at"`
}

// Delivery is a row of agent_webhook_deliveries without its body.
type Delivery struct {
	ID            string          `json:"id"`
	Endpoint      string          `json:"endpoint"`
	DeliveryID    string          `json:"delivery_id"` // the sender's
	TraceID       string          `json:"trace_id"`    // of the first handling
	LastTraceID   string          `json:"last_trace_id"`
	ExecutionID   *string         `json:"execution_id"` // of the last handling
	Status        string          `json:"status"`
	Attempts      int             `json:"attempts"` // of the last handling
	Replays       int             `json:"replays"`
	Repeats       int             `json:"repeats"`   // how often it came again
	Conflicts     int             `json:"conflicts"` // and of these, with another body
	Headers       json.RawMessage `json:"headers"`
	BodySHA256    string          `json:"body_sha256"`
	BodyBytes     int             `json:"body_bytes"`
	Traceparent   string          `json:"traceparent"` // the sender's trace
	Outcome       json.RawMessage `json:"outcome"`
	ErrorMessage  *string         `json:"error_message"`
	NextAttemptAt *time.Time      `json:"next_attempt_at"`
	ReceivedAt    time.Time       `json:"received_at"`
	UpdatedAt     time.Time       `json:"updated_at"`
	FinishedAt    *time.Time      `json:"finished_at"`
}

// Target is a row of agent_webhook_targets.
type Target struct {
	ID             string     `json:"id"`
	Name           string     `json:"name"`
	Description    string     `json:"description"`
	URL            string     `json:"url"`
	Secrets        []string   `json:"secrets"` // references
	Events         []string   `json:"events"`
	MaxFailures    int        `json:"max_failures"`
	Enabled        bool       `json:"enabled"`
	DisabledReason string     `json:"disabled_reason"`
	DisabledBy     string     `json:"disabled_by"`
	DisabledAt     *time.Time `json:"disabled_at"`
	Failures       int        `json:"failures"` // attempts that failed in a row
	FailingSince   *time.Time `json:"failing_since"`
	BlockedUntil   time.Time  `json:"blocked_until"`
	Pending        int        `json:"pending"` // messages to be sent
	Dead           int        `json:"dead"`    // messages that were given up
	Source         string     `json:"source"`
	CreatedAt      time.Time  `json:"created_at"`
	UpdatedAt      time.Time  `json:"updated_at"`
}
