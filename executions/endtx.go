package executions

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// EndTx is a [StepTx] whose transaction also ends the execution, as completed with the result of the value: the
// effect, its record and the end are in the database together or not at all. The flow returns after it; what it
// returns then is not looked at.
func EndTx[T any](
	ctx context.Context, name string, fn func(ctx context.Context, tx pgx.Tx) (T, error), result func(value T) Result,
) (T, error) {
	return StepTx(ctx, name, fn, func(s *spec) {
		s.end = func(value any) Result { return result(value.(T)) } //nolint:forcetypeassert // the step's own
	})
}

// queueLockForEnd locks the row as an end does, before the fence locks it more weakly: whoever waits for it in
// between would deadlock with a lock that grows.
func (r *run) queueLockForEnd(b *pgx.Batch) {
	queuePatience(b)
	b.Queue(`select from agent_executions where id = @id and claim = @claim for update`, postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim})
	b.Queue(`set local lock_timeout to default`) // for the step's own statements
}

// queueCompletion queues the end of the run with a result.
func (r *run) queueCompletion(b *pgx.Batch, result Result) (*finished, error) {
	value, _, err := encode(result.Value)
	if err != nil {
		return nil, fmt.Errorf("encode result: %w", err)
	}
	done := &finished{}
	queuePatience(b)
	queueEnd(b, lastWrite{
		id: r.exec.ID, claim: r.exec.Claim, status: Completed, summary: postgres.Text(result.Summary), result: value, row: r.wantedRow(),
	}, done)
	return done, nil
}

// completed notes that a transaction has ended the run. Its lanes are the database's from here on.
func (r *run) completed(done *finished) {
	r.mu.Lock()
	r.done = done
	r.mu.Unlock()
	r.e.keeper.Drop(r.claimOwner())
}

// endedBefore reports whether an earlier try of the transaction has ended the run after all, though its answer was
// lost. Then the record is the step's result.
func (r *run) endedBefore(ctx context.Context, step string) bool {
	row, err := Get(ctx, r.e.pool, r.exec.ID)
	if err != nil || row.Status != Completed || row.Claim != r.exec.Claim {
		return false
	}
	if !errors.Is(r.reread(ctx, r.e.pool, step), errRecorded) {
		return false
	}
	r.completed(&finished{row: &row})
	return true
}
