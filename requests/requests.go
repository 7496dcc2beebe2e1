// Package requests asks people for something: documents, a signature, a test.
//
// A request is a row of agent_requests, made by an execution, whose id is the key of the event that answers it
// (DOCUMENT_UPLOADED, SIGNATURE_COMPLETED, TEST_COMPLETED) and of the wait for it (executions.Document, Signature,
// Test). How it reaches the person, a message in a thread or a link by mail, is the caller's business.
//
// A request is answered once. A signature or a test by its first event; documents when all that were asked for are
// there, whether they come one by one, several at once or several times. What was not asked for is noted and changes
// nothing, and so is what comes after the answer. An answer that comes while nobody waits is kept by the request, so
// a wait that begins later ends at once. A request whose execution ends before it is answered is closed.
//
// The rules are a SQL function (answer_agent_request), because events come from any client.
package requests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNotFound reports an id without a request.
var ErrNotFound = errors.New("no such request")

// ErrInvalid reports a request that cannot be made.
var ErrInvalid = errors.New("the request is not valid")

// The kinds of requests.
const (
	Document  = "document"
	Signature = "signature"
	Test      = "test"
)

// The states of a request.
const (
	Pending   = "pending"
	Completed = "completed" // answered
	Closed    = "closed"    // its execution ended first
)

// mostItems is how many documents one request may ask for.
const mostItems = 100

// Request is what is asked for.
type Request struct {
	Kind     string         `json:"kind"`
	Title    string         `json:"title"`
	Details  map[string]any `json:"details"`   // for whoever shows it: what to sign, which test
	Items    []string       `json:"items"`     // the documents asked for, each once; kind document only
	ThreadID string         `json:"thread_id"` // the execution's when empty
}

// Validate says everything that is wrong with a request; errors.Is(err, ErrInvalid).
func (r Request) Validate() error {
	var wrong []error
	switch {
	case r.Kind != Document && r.Kind != Signature && r.Kind != Test:
		wrong = append(wrong, fmt.Errorf("kind %q is not known: give %s, %s or %s", r.Kind, Document, Signature, Test))
	case r.Kind != Document && len(r.Items) > 0:
		wrong = append(wrong, fmt.Errorf("a %s has no items", r.Kind))
	case r.Kind == Document && (len(r.Items) == 0 || len(r.Items) > mostItems):
		wrong = append(wrong, fmt.Errorf("it asks for %d documents: give 1 to %d", len(r.Items), mostItems))
	}
	for i, item := range r.Items {
		if strings.TrimSpace(item) == "" || strings.ContainsRune(item, 0) {
			wrong = append(wrong, fmt.Errorf("item %d has no name that can be stored", i+1))
		} else if slices.Contains(r.Items[:i], item) {
			wrong = append(wrong, fmt.Errorf("item %q is there twice", item))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalid, errors.Join(wrong...))
	}
	return nil
}

// WaitFor is the wait for the answer to a request; a timeout of 0 is 7 days, the most is executions.MaxWait.
func WaitFor(kind, id string, timeout time.Duration) (executions.WaitFor, error) {
	switch kind {
	case Document:
		return executions.Document(id, timeout), nil
	case Signature:
		return executions.Signature(id, timeout), nil
	case Test:
		return executions.Test(id, timeout), nil
	}
	return executions.WaitFor{}, fmt.Errorf("wait for request %s: %w: kind %q is not known", id, ErrInvalid, kind)
}

// Create inserts a request in the caller's transaction, on behalf of the execution that ctx belongs to, and returns
// its id. It is not durable by itself: inside an execution use Ask, or call it in the function of a step
// (executions.StepTx).
func Create(ctx context.Context, tx pgx.Tx, r Request) (string, error) {
	if err := r.Validate(); err != nil {
		return "", fmt.Errorf("ask for a %s: %w", r.Kind, err)
	}
	x, ok := executions.Current(ctx)
	if !ok {
		return "", fmt.Errorf("ask for a %s: %w", r.Kind, executions.ErrNotInExecution)
	}
	details := json.RawMessage("{}")
	if r.Details != nil {
		var err error
		if details, err = json.Marshal(r.Details); err != nil {
			return "", fmt.Errorf("ask for a %s: encode details: %w", r.Kind, err)
		}
	}
	thread := x.ThreadID
	if r.ThreadID != "" {
		thread = &r.ThreadID
	}
	items := r.Items
	if items == nil {
		items = []string{}
	}
	var id string
	err := tx.QueryRow(ctx, `
		insert into agent_requests (kind, execution_id, trace_id, thread_id, title, details, items)
		values (@kind, @execution_id, @trace_id, @thread_id, @title, @details, @items) returning id::text`,
		postgres.Strict{
			"kind": r.Kind, "execution_id": x.ID, "trace_id": x.TraceID, "thread_id": thread, "title": r.Title,
			"details": details, "items": items,
		}).Scan(&id)
	if err != nil {
		return "", fmt.Errorf("ask for a %s: %w", r.Kind, err)
	}
	return id, nil
}

// Ask makes a request as a durable step of the execution that ctx belongs to: once, whatever crashes. name is the
// step's.
func Ask(ctx context.Context, name string, r Request) (string, error) {
	if err := r.Validate(); err != nil {
		return "", fmt.Errorf("ask for a %s: %w", r.Kind, err)
	}
	return executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return Create(ctx, tx, r)
	}, executions.Input(r))
}

// Record is a request, as its row says.
type Record struct {
	ID          string            `json:"id"`
	Kind        string            `json:"kind"`
	ExecutionID string            `json:"execution_id"`
	TraceID     string            `json:"trace_id"`
	ThreadID    *string           `json:"thread_id"`
	Title       string            `json:"title"`
	Details     json.RawMessage   `json:"details"`
	Items       []string          `json:"items"`
	Received    map[string]string `json:"received"`   // document: its URL
	Unexpected  map[string]string `json:"unexpected"` // what came and was not asked for
	Answer      json.RawMessage   `json:"answer"`     // null as long as something is missing
	Status      string            `json:"status"`
	CreatedAt   time.Time         `json:"created_at"`
	CompletedAt *time.Time        `json:"completed_at"` // or closed
}

// columns lists what Record scans, in its order.
const columns = `id::text, kind, execution_id::text, trace_id, thread_id, title, details, items, received, unexpected, answer,
	status, created_at, completed_at`

// Get reads one request; ErrNotFound when there is none.
func Get(ctx context.Context, db postgres.DB, id string) (Record, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_requests where id = @id`, postgres.Strict{"id": id})
	return postgres.CollectOne(rows, err, ErrNotFound, "read request "+id, pgx.RowToStructByPos[Record])
}

// Filter narrows a listing. Zero values do not narrow; Limit defaults to 50 and is at most 1000. Before is the id
// after which the listing goes on, newest first.
type Filter struct {
	Kind, Status, ThreadID, ExecutionID, Before string
	Limit                                       int
}

// List reads requests, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Record, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_requests
		 where (@kind = '' or kind = @kind) and (@status = '' or status = @status)
		   and (@thread_id = '' or thread_id = @thread_id)
		   and (@execution_id = '' or execution_id = nullif(@execution_id, '')::uuid)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		postgres.Strict{
			"kind": f.Kind, "status": f.Status, "thread_id": f.ThreadID, "execution_id": f.ExecutionID, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, 50, 1000),
		})
	return postgres.Collect(rows, err, "list requests", pgx.RowToStructByPos[Record])
}
