package executions

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StatusChange is a state of an execution and the time when the state began.
type StatusChange struct {
	ID         string    `json:"id"`
	TraceID    string    `json:"trace_id"`
	Status     Status    `json:"status"`
	WaitingFor *string   `json:"waiting_for"`
	At         time.Time `json:"at"`
	Claim      int64     `json:"-"`
	WaitNumber int       `json:"-"`
	// Change numbers the stored status changes of an external execution; 0 for others.
	Change int `json:"-"`
}

const (
	// watchInterval is the pause between polls of watched executions.
	watchInterval = 250 * time.Millisecond
	// watchTimeout bounds one poll.
	watchTimeout = 10 * time.Second
)

// CurrentStatus reads the state of an execution. It returns ErrNotFound for an unknown execution.
func (e *Engine) CurrentStatus(ctx context.Context, id string) (StatusChange, error) {
	statuses, err := e.readStatus(ctx, []string{id})
	if status := statuses[id]; status.ID != "" || err != nil {
		return status, err
	}
	return StatusChange{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
}

// Watch follows an execution until the caller calls unsubscribe, which is mandatory. The channel holds the latest
// state, from the first poll on; a zero value means that the execution is gone. Watch reports a run that ends in this
// process at once, and all other changes within watchInterval. One query reads all watched executions.
func (e *Engine) Watch(ctx context.Context, id string) (updates <-chan StatusChange, unsubscribe func()) {
	return e.statuses.subscribe(ctx, id)
}

// Await waits until an execution has ended, and returns the execution. When ctx ends first, Await returns the cause.
func (e *Engine) Await(ctx context.Context, id string) (Execution, error) {
	updates, unsubscribe := e.Watch(ctx, id)
	defer unsubscribe()
	for {
		x, err := Get(ctx, e.pool, id)
		if err == nil && x.Status.Ended() || err != nil && !postgres.Transient(err) {
			return x, err
		}
		for ended := false; !ended; {
			select {
			case <-ctx.Done():
				return x, context.Cause(ctx)
			case change := <-updates:
				ended = change.ID == "" || change.Status.Ended()
			}
		}
	}
}

// readStatus reads the states of executions. A missing execution has a zero value.
func (e *Engine) readStatus(ctx context.Context, ids []string) (map[string]StatusChange, error) {
	rows, err := e.pool.Query(ctx, `
		select e.id::text, e.trace_id, e.status, e.waiting_for, e.updated_at as at, e.claim, e.wait_number,
		       case when e.is_external
		         then coalesce((select max(c.n) from agent_status_changes c where c.execution_id = e.id), 0)
		         else 0 end as change
		  from agent_executions e
		 where e.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids})
	changes, err := postgres.Collect(rows, err, "read status", pgx.RowToStructByName[StatusChange])
	if err != nil {
		return nil, err
	}
	statuses := make(map[string]StatusChange, len(ids))
	for _, id := range ids {
		statuses[id] = StatusChange{}
	}
	for _, e := range changes {
		statuses[e.ID] = e
	}
	return statuses, nil
}
