// Package requests requests documents, signatures and tests from people.
//
// An execution inserts a row of agent_requests. Its id is the key of the answering event (DOCUMENT_UPLOADED,
// SIGNATURE_COMPLETED, TEST_COMPLETED) and of the wait (executions.Document, Signature, Test). The caller notifies the
// person, by a message in a thread or a mail.
//
// A request is answered once: a signature or a test by its first event, documents when all items are received, in any
// number of events. Unexpected documents and later events are stored and change nothing. A request stores an early
// answer, so a later wait ends at once. A request is closed when its execution ends, or its action times out, first.
//
// The SQL function answer_agent_request has the rules, because any client may send events.
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

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNotFound reports an unknown request.
var ErrNotFound = errors.New("no such request")

// ErrInvalid reports an invalid request.
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
	Closed    = "closed"    // the execution ended, or its action timed out, first
)

// maxItems bounds the documents of one request.
const maxItems = 100

// Request declares a request.
type Request struct {
	Kind     string         `json:"kind"`
	Title    string         `json:"title"`
	Details  map[string]any `json:"details"`   // for the page that shows it: what to sign, which test
	Items    []string       `json:"items"`     // names of the documents, without duplicates; kind document only
	ThreadID string         `json:"thread_id"` // default: the execution's
}

// Validate returns all problems of a request, wrapped in [ErrInvalid].
func (r Request) Validate() error {
	var wrong []error
	switch {
	case r.Kind != Document && r.Kind != Signature && r.Kind != Test:
		wrong = append(wrong, fmt.Errorf("kind %q is not known: give %s, %s or %s", r.Kind, Document, Signature, Test))
	case r.Kind != Document && len(r.Items) > 0:
		wrong = append(wrong, fmt.Errorf("a %s has no items", r.Kind))
	case r.Kind == Document && (len(r.Items) == 0 || len(r.Items) > maxItems):
		wrong = append(wrong, fmt.Errorf("%d items are given: give 1 to %d", len(r.Items), maxItems))
	}
	for i, item := range r.Items {
		if strings.TrimSpace(item) == "" || strings.ContainsRune(item, 0) {
			wrong = append(wrong, fmt.Errorf("item %d is blank or has a NUL character", i+1))
		} else if slices.Contains(r.Items[:i], item) {
			wrong = append(wrong, fmt.Errorf("item %q is a duplicate", item))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalid, errors.Join(wrong...))
	}
	return nil
}

// WaitFor returns the wait for the answer to a request. The default timeout is 7 days, the largest executions.MaxWait.
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

// Create inserts a request of the execution in ctx, in the caller's transaction, and returns its id. It is no durable
// step: use [Ask], or call it in executions.StepTx.
func Create(ctx context.Context, tx pgx.Tx, r Request) (string, error) {
	if err := r.Validate(); err != nil {
		return "", fmt.Errorf("request a %s: %w", r.Kind, err)
	}
	x, ok := executions.Current(ctx)
	if !ok {
		return "", fmt.Errorf("request a %s: %w", r.Kind, executions.ErrNotInExecution)
	}
	details := json.RawMessage("{}")
	if r.Details != nil {
		var err error
		if details, err = json.Marshal(r.Details); err != nil {
			return "", fmt.Errorf("request a %s: encode details: %w", r.Kind, err)
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
		return "", fmt.Errorf("request a %s: %w", r.Kind, err)
	}
	return id, nil
}

// Ask creates a request as the durable step name of the execution in ctx. The step calls created with the id; a replay
// does not.
func Ask(
	ctx context.Context, name string, r Request, created ...func(ctx context.Context, id string),
) (string, error) {
	if err := r.Validate(); err != nil {
		return "", fmt.Errorf("request a %s: %w", r.Kind, err)
	}
	return executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (string, error) {
		id, err := Create(ctx, tx, r)
		for _, f := range created {
			if err == nil {
				f(ctx, id)
			}
		}
		return id, err
	}, executions.Input(r))
}

// Close closes a pending request as the durable step name of the execution in ctx.
func Close(ctx context.Context, name, id string) error {
	current, _ := executions.Current(ctx)
	_, err := executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		tag, err := tx.Exec(ctx, `update agent_requests set status = 'closed', completed_at = clock_timestamp()
			where id = @id::uuid and execution_id = @execution::uuid and status = 'pending'`,
			postgres.Strict{"id": id, "execution": current.ID}) // a fork leaves the request of its original
		return postgres.Changed(tag, err, "close request")
	})
	return err
}

// Record is a row of agent_requests.
type Record struct {
	ID          string            `json:"id"`
	Kind        string            `json:"kind"`
	ExecutionID string            `json:"execution_id"`
	TraceID     string            `json:"trace_id"`
	ThreadID    *string           `json:"thread_id"`
	Title       string            `json:"title"`
	Details     json.RawMessage   `json:"details"`
	Items       []string          `json:"items"`
	Received    map[string]string `json:"received"`   // URLs by item
	Unexpected  map[string]string `json:"unexpected"` // URLs of other documents
	Answer      json.RawMessage   `json:"answer"`     // null while an item is missing
	Status      string            `json:"status"`
	CreatedAt   time.Time         `json:"created_at"`
	CompletedAt *time.Time        `json:"completed_at"` // or closed
}

// columns are the columns of a [Record], in order.
const columns = `id::text, kind, execution_id::text, trace_id, thread_id, title, details, items, received, unexpected,
	answer, status, created_at, completed_at`

// Get returns one request, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, id string) (Record, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_requests where id = @id`, postgres.Strict{"id": id})
	r, err := postgres.CollectOne(rows, err, ErrNotFound, "read request "+id, pgx.RowToStructByPos[Record])
	r.hideTexts(ctx)
	return r, err
}

// hideTexts hides what a conversation says about the request under ctx: see [activity.WithoutTexts].
func (r *Record) hideTexts(ctx context.Context) {
	if r.ThreadID == nil || !activity.HidesTexts(ctx) {
		return
	}
	if r.Title != "" {
		r.Title = activity.HiddenText
	}
	r.Details, r.Answer = activity.HiddenJSON(r.Details), activity.HiddenJSON(r.Answer)
	for item := range r.Received {
		r.Received[item] = activity.HiddenText
	}
	if len(r.Unexpected) > 0 { // senders choose their names
		r.Unexpected = map[string]string{activity.HiddenText: activity.HiddenText}
	}
}

// OverBefore returns the status of a request that had ended before an event, which changed nothing then; else "".
func OverBefore(ctx context.Context, db postgres.DB, id, event string) (status string, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(max(status), '') from agent_requests
		 where id = @id and (status = 'closed' or event_id <> @event)`,
		postgres.Strict{"id": id, "event": event}).Scan(&status)
	if err != nil {
		return "", fmt.Errorf("read request %s: %w", id, err)
	}
	return status, nil
}

// Filter narrows [List]; the zero value lists the newest 50. Before, an id, selects older requests. Limit is at most
// 1000.
type Filter struct {
	Kind, Status, ThreadID, ExecutionID, Before string
	Limit                                       int
}

// List returns requests, newest first.
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
	list, err := postgres.Collect(rows, err, "list requests", pgx.RowToStructByPos[Record])
	for i := range list {
		list[i].hideTexts(ctx)
	}
	return list, err
}
