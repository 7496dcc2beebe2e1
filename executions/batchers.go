package executions

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// batchers batch the writes of concurrent executions. Each kind of write has its own batcher.
type batchers struct {
	starts      *batch.Batcher[insertParams, Execution]
	checkpoints *batch.Batcher[checkpointWrite, struct{}]
	waits       *batch.Batcher[waitWrite, []byte]
	events      *batch.Batcher[event, Delivered]
	completions *batch.Batcher[completion, completionResult]
}

// newBatchers returns the batchers of an engine. They share a scheduler, so writes of different kinds are batched at
// the same pace.
//
// A repeated checkpoint or completion changes nothing. A repeated start, wait, or event without an id would count
// twice, so the batcher repeats these only if the failed batch certainly changed nothing. Checkpoints and completions
// are sorted by execution, so that all batches lock executions in the same order.
func newBatchers(e *Engine) batchers {
	scheduler, unchanged := &batch.Scheduler{}, postgres.Unchanged
	return batchers{
		starts: &batch.Batcher[insertParams, Execution]{Scheduler: scheduler, Send: e.startBatch, Unchanged: unchanged},
		waits:  &batch.Batcher[waitWrite, []byte]{Scheduler: scheduler, Send: e.waitBatch, Unchanged: unchanged},
		events: &batch.Batcher[event, Delivered]{Scheduler: scheduler, Send: e.deliverBatch, Unchanged: unchanged},
		checkpoints: &batch.Batcher[checkpointWrite, struct{}]{
			Scheduler: scheduler, Send: e.checkpointBatch,
			Compare: func(a, b checkpointWrite) int { return strings.Compare(a.id, b.id) },
		},
		completions: &batch.Batcher[completion, completionResult]{
			Scheduler: scheduler, Send: e.completeBatch,
			Compare: func(a, b completion) int { return strings.Compare(a.id, b.id) },
		},
	}
}

// uuidArray encodes each id in sixteen bytes, which is cheaper to send and parse. If an id is not a UUID, it returns
// the ids as text, and the database rejects them.
func uuidArray(ids []string) any {
	uuids := make(pgtype.FlatArray[pgtype.UUID], len(ids))
	for i, id := range ids {
		if uuids[i].Scan(id) != nil {
			return ids
		}
	}
	return uuids
}

// nilIfZero returns nil if all values are zero, because nil is cheaper to send.
func nilIfZero[T comparable](values []T) []T {
	var zero T
	if slices.ContainsFunc(values, func(v T) bool { return v != zero }) {
		return values
	}
	return nil
}

// nullableJSON returns JSON as an element of an array parameter; nil becomes SQL's null.
func nullableJSON(text json.RawMessage) *string {
	if text == nil {
		return nil
	}
	s := string(text)
	return &s
}

// collectSkipped reads the positions (from 1) of the skipped writes of a batch of n.
func collectSkipped[Out any](rows pgx.Rows, n int) ([]batch.Result[Out], error) {
	results := make([]batch.Result[Out], n)
	var position int
	_, err := pgx.ForEachRow(rows, []any{&position}, func() error {
		results[position-1].Skipped = true
		return nil
	})
	return results, err
}
