package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// point is the result of a step that has no activity row, as it is written.
type point struct {
	id, step, print string
	claim           int64
	failed          bool
	output          json.RawMessage
	variables       json.RawMessage // nil when the row has them
}

// queue queues the record of a step. Sent twice, it changes nothing the second time. It waits for a lock of the
// execution for a moment only.
func (p *point) queue(b *pgx.Batch) {
	b.Queue(`
		insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
		select @id, @step, @claim, @fingerprint, @failed, @output from set_config('lock_timeout', @patience, true)
		on conflict (execution_id, step) do nothing`, postgres.Strict{
		"id": p.id, "step": p.step, "claim": p.claim, "fingerprint": p.print, "failed": p.failed, "output": p.output, "patience": lockPatience,
	})
}

// keepPoint writes the result of a step, together with those of other runs that come at the same time, or by itself
// until then. Only who is by itself sets a timer, which costs more than it seems to.
func (r *run) keepPoint(ctx context.Context, until time.Time, s spec, output json.RawMessage, failed bool) error {
	text := r.carry()
	alone := func() (struct{}, error) {
		ctx, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		return struct{}{}, r.with(ctx, text, func(text json.RawMessage) error {
			return r.e.write(ctx, func(b *pgx.Batch) {
				r.queueVariables(b, text)
				r.queueCheckpoint(b, s, output, failed)
			})
		})
	}
	_, err := r.e.batchers.checkpoints.Do(ctx, point{
		id: r.exec.ID, step: s.key, print: s.print, claim: r.exec.Claim, failed: failed, output: output, variables: text,
	}, alone)
	r.carried(text, err)
	return err
}

// recordSeveral writes results in one commit, each under its own claim. What is not live, or locked, is left to be
// written by itself, where it is refused or waits.
func (e *Engine) recordSeveral(ctx context.Context, points []point) ([]batch.Answer[struct{}], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(points)
	ids, claims, steps, prints, failed := make([]string, n), make([]int64, n), make([]string, n), make([]string, n), make([]bool, n)
	outputs, variables := make([]*string, n), make([]*string, n)
	for i, p := range points {
		ids[i], claims[i], steps[i], prints[i], failed[i] = p.id, p.claim, p.step, p.print, p.failed
		outputs[i], variables[i] = jsonText(p.output), jsonText(p.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select n from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps, @prints, @failed, (@outputs::text[])::jsonb[],
		       (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": uuids(ids), "claims": claims, "steps": steps, "prints": given(prints), "failed": given(failed), "outputs": outputs,
			"variables": given(variables),
		})
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	answers, err := leftAlone[struct{}](rows, n)
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	return answers, nil
}

// uuids is an argument of ids, which costs less to send and to read in sixteen bytes each. What is no UUID the
// database refuses.
func uuids(ids []string) any {
	several := make(pgtype.FlatArray[pgtype.UUID], len(ids))
	for i, id := range ids {
		if several[i].Scan(id) != nil {
			return ids
		}
	}
	return several
}

// given is an argument of several writes; nil, which is less to send and to take apart, where all have the zero value.
func given[T comparable](values []T) []T {
	var zero T
	if slices.ContainsFunc(values, func(v T) bool { return v != zero }) {
		return values
	}
	return nil
}

// leftAlone reads which of n writes of a batch were left to be made by themselves.
func leftAlone[Out any](rows pgx.Rows, n int) ([]batch.Answer[Out], error) {
	answers := make([]batch.Answer[Out], n)
	var at int
	_, err := pgx.ForEachRow(rows, []any{&at}, func() error {
		answers[at-1].Alone = true
		return nil
	})
	return answers, err
}
