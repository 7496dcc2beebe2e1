package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// checkpointWrite has the column values of the checkpoint of a step without an activity row.
type checkpointWrite struct {
	id, step, fingerprint string
	claim                 int64
	failed                bool
	output                json.RawMessage
	variables             json.RawMessage // nil when the row has them
}

// queue queues the checkpoint. A repeated insert changes nothing. If a later claim recorded the step, the database
// rejects the update as stale. The write waits for a lock on the execution for at most lockTimeout.
func (w *checkpointWrite) queue(b *pgx.Batch) {
	b.Queue(`
		insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
		select @id, @step, @claim, @fingerprint, @failed, @output from set_config('lock_timeout', @lock_timeout, true)
		on conflict (execution_id, step)
		do update set claim = excluded.claim where agent_checkpoints.claim <> excluded.claim`, postgres.Strict{
		"id": w.id, "step": w.step, "claim": w.claim, "fingerprint": w.fingerprint, "failed": w.failed, "output": w.output,
		"lock_timeout": lockTimeout,
	})
}

// writeCheckpoint writes the result of a step in a batch with results of other runs, or in a single write. deadline
// bounds only the single write: the writes of a batch share the timer of checkpointBatch, which saves one for each.
func (r *run) writeCheckpoint(
	ctx context.Context, deadline time.Time, s stepSpec, output json.RawMessage, failed bool,
) error {
	text := r.reserveVariables()
	single := func() (struct{}, error) {
		ctx, cancel := context.WithDeadline(ctx, deadline)
		defer cancel()
		return struct{}{}, r.withVariables(ctx, text, func(text json.RawMessage) error {
			return r.e.write(ctx, func(b *pgx.Batch) {
				r.queueVariables(b, text)
				r.queueCheckpoint(b, s, output, failed)
			})
		})
	}
	_, err := r.e.batchers.checkpoints.Do(ctx, checkpointWrite{
		id: r.exec.ID, step: s.key, fingerprint: s.fingerprint, claim: r.exec.Claim, failed: failed,
		output: output, variables: text,
	}, single)
	r.releaseVariables(text, err)
	return err
}

// checkpointBatch writes checkpoints in one commit, each under its own claim. It skips locked executions and executions
// without a live claim.
func (e *Engine) checkpointBatch(ctx context.Context, writes []checkpointWrite) ([]batch.Result[struct{}], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(writes)
	ids, claims, steps, fingerprints, failed := make([]string, n), make([]int64, n), make([]string, n),
		make([]string, n), make([]bool, n)
	outputs, variables := make([]*string, n), make([]*string, n)
	for i, w := range writes {
		ids[i], claims[i], steps[i], fingerprints[i], failed[i] = w.id, w.claim, w.step, w.fingerprint, w.failed
		outputs[i], variables[i] = nullableJSON(w.output), nullableJSON(w.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select n
		  from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps, @fingerprints, @failed,
		                                              (@outputs::text[])::jsonb[], (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": uuidArray(ids), "claims": claims, "steps": steps, "fingerprints": nilIfZero(fingerprints),
			"failed": nilIfZero(failed), "outputs": outputs, "variables": nilIfZero(variables),
		})
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	results, err := collectSkipped[struct{}](rows, n)
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	return results, nil
}
