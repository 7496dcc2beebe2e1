// Package webhooks owns the tables of incoming and outgoing webhooks, and sends the outgoing ones.
//
// An endpoint receives deliveries. Its [EndpointDefinition] declares the signature and the actions. A delivery's row
// is written before the response. By its unique key (endpoint, delivery id), [Insert] distinguishes the first from
// repeats, also under concurrency, until retention deletes the row. surfaces/webhook receives and acts.
//
// A target receives the agent's events. Triggers write the outbox in the transaction of the event, so the outbox has
// the committed events only. Without a matching target they write nothing. Any number of [Dispatcher]s may run: a
// claim sets next_attempt_at to the end of its lease in the same statement, so one process makes each attempt. After a
// crash, the message is sent again under the same webhook-id, so a target may receive it twice. A message without a
// success is dead after its last attempt.
//
// Definitions hold references to secrets (${NAME}, file:/path). [Secrets] resolves them at use, so a changed file or a
// restart rotates a secret. Headers with secrets are redacted before a delivery is stored.
package webhooks

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/signature"
)

var (
	// ErrNotFound reports an unknown endpoint, target or delivery.
	ErrNotFound = errors.New("not found")
	// ErrInProgress reports a delivery that is being processed, or was replayed meanwhile.
	ErrInProgress = errors.New("the delivery is being processed or was replayed already")
)

// States of a delivery.
const (
	Received = "received" // stored; its execution has not started
	Running  = "running"
	Failed   = "failed" // the next attempt is at next_attempt_at
	Done     = "done"
	Ignored  = "ignored" // no action of the endpoint matched
	Dead     = "dead"    // failed for good, or its execution failed or was cancelled
)

// Statuses lists the states of a delivery.
func Statuses() []string { return []string{Received, Running, Failed, Done, Ignored, Dead} }

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
	DeliveryID    string          `json:"delivery_id"` // the sender's id
	TraceID       string          `json:"trace_id"`    // of the first handling
	LastTraceID   string          `json:"last_trace_id"`
	ExecutionID   *string         `json:"execution_id"` // of the last handling
	Status        string          `json:"status"`
	Attempts      int             `json:"attempts"` // of the last handling
	Replays       int             `json:"replays"`
	Repeats       int             `json:"repeats"`   // number of repeats
	Conflicts     int             `json:"conflicts"` // repeats with another body
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
	Format         string     `json:"format"`
	MaxFailures    int        `json:"max_failures"`
	Enabled        bool       `json:"enabled"`
	DisabledReason string     `json:"disabled_reason"`
	DisabledBy     string     `json:"disabled_by"`
	DisabledAt     *time.Time `json:"disabled_at"`
	Failures       int        `json:"failures"` // consecutive failed attempts
	FailingSince   *time.Time `json:"failing_since"`
	BlockedUntil   time.Time  `json:"blocked_until"`
	Pending        int        `json:"pending"` // messages to send
	Dead           int        `json:"dead"`    // dead messages
	Source         string     `json:"source"`
	CreatedAt      time.Time  `json:"created_at"`
	UpdatedAt      time.Time  `json:"updated_at"`
}
