package requests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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
	if err != nil {
		return Record{}, fmt.Errorf("read request: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Record])
	switch {
	case errors.Is(err, pgx.ErrNoRows), postgres.IsCode(err, "22P02"):
		return Record{}, fmt.Errorf("request %s: %w", id, ErrNotFound)
	case err != nil:
		return Record{}, fmt.Errorf("read request: %w", err)
	}
	return got, nil
}

// Filter narrows a listing. Zero values do not narrow; Limit defaults to 50 and is at most 1000. Before is the id
// after which the listing goes on, newest first.
type Filter struct {
	Kind, Status, ThreadID, ExecutionID, Before string
	Limit                                       int
}

// List reads requests, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Record, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_requests
		 where (@kind = '' or kind = @kind) and (@status = '' or status = @status)
		   and (@thread_id = '' or thread_id = @thread_id)
		   and (@execution_id = '' or execution_id = nullif(@execution_id, '')::uuid)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		postgres.Strict{
			"kind": f.Kind, "status": f.Status, "thread_id": f.ThreadID, "execution_id": f.ExecutionID, "before": f.Before,
			"limit": min(f.Limit, 1000),
		})
	if err != nil {
		return nil, fmt.Errorf("list requests: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Record])
	if err != nil {
		return nil, fmt.Errorf("list requests: %w", err)
	}
	return got, nil
}
