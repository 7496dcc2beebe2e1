package executions

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Logger is the log of the engine that runs the execution ctx belongs to; outside executions it discards.
func Logger(ctx context.Context) *slog.Logger {
	r, err := runOf(ctx)
	if err != nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.e.log
}

// Claim names the execution that ctx belongs to, and the claim under which this process runs it; ErrOutside when it
// belongs to none. It is what a function in SQL needs that acts for an execution.
func Claim(ctx context.Context) (id string, claim int64, err error) {
	r, err := runOf(ctx)
	if err != nil {
		return "", 0, err
	}
	return r.exec.ID, r.exec.Claim, nil
}

// Hint tells a worker of executions that tx has made ready by a function of the database, such as
// receive_agent_message. Ids of others are passed over. What is not told the sweep finds within seconds.
func (e *Engine) Hint(ctx context.Context, tx pgx.Tx, ids ...string) error {
	if len(ids) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, `
		select x.id::text, x.wake, x.queue, x.priority from agent_executions x
		 where x.id = any(@ids::uuid[]) and x.claimed_by is null and x.status = 'running' order by x.id`,
		postgres.Strict{"ids": ids})
	if err != nil {
		return fmt.Errorf("read ready executions: %w", err)
	}
	ready, err := pgx.CollectRows(rows, pgx.RowToStructByPos[hint])
	if err != nil {
		return fmt.Errorf("read ready executions: %w", err)
	}
	return e.sendHints(ctx, tx, ready)
}

// LockClaim is the claim that a live lock of a worker outside stands for, to act as its execution. Errors: ErrNotFound, ErrVoid
// with the reason.
func (e *Engine) LockClaim(ctx context.Context, id, lockID string) (int64, error) {
	var claim *int64
	err := e.pool.QueryRow(ctx, `
		select (select x.claim from agent_executions x where x.id = @id and x.claim = agent_lock_claim(@id, @lock))`, postgres.Strict{"id": id, "lock": lockID}).Scan(&claim)
	if err != nil {
		return 0, fmt.Errorf("look at lock of execution %s: %w", id, err)
	}
	if claim == nil {
		return 0, e.refuse(ctx, id, lockID, "message", "", nil)
	}
	return *claim, nil
}
