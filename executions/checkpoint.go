package executions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

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

// writeCheckpoint writes the result of a step in a batch with results of other runs, or in a single write. Only the
// single write has a deadline, because each deadline costs a timer.
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

// deferDelay is how long the run defers the checkpoint of a plain step. Often the run ends next, and then one write
// stores both the checkpoint and the completion. Otherwise the run writes the checkpoint before it starts a step or
// records another result, or after the delay. So checkpoints keep the order in which their steps ended, and precede
// every later step, wait or completion. If the process dies within the delay, the next claim runs the step again.
const deferDelay = time.Millisecond

// Bounds of a deferred result and of its step's key. The database might reject a larger one, so the run writes it at
// once and the flow can receive the error.
const (
	maxDeferredBytes = 4096
	maxDeferredKey   = 1024
)

// errNotRecorded ends a run that could not write its deferred result.
var errNotRecorded = errors.New("the result of a step could not be recorded")

// deferredCheckpoint is the result of a step that is not written yet.
type deferredCheckpoint struct {
	step    stepSpec
	effect  *Effect
	value   any
	output  json.RawMessage
	failure *StepError
}

// write returns the checkpoint to write; nil for none.
func (d *deferredCheckpoint) write(r *run) *checkpointWrite {
	if d == nil {
		return nil
	}
	return &checkpointWrite{
		id: r.exec.ID, step: d.step.key, fingerprint: d.step.fingerprint, claim: r.exec.Claim,
		failed: d.failure != nil, output: d.output,
	}
}

// canDefer reports whether a result may be deferred.
func (r *run) canDefer(s stepSpec, effect *Effect, output json.RawMessage) bool {
	return s.repeatable && s.entry == nil && s.onIntent == nil && (effect == nil || effect.OnResult == nil) &&
		r.replay == nil && len(output) <= maxDeferredBytes && lacksExponents(output) &&
		len(s.key) <= maxDeferredKey && s.key == postgres.Text(s.key)
}

// lacksExponents reports whether JSON has no number with an exponent. jsonb may reject such a number as too large.
func lacksExponents(text json.RawMessage) bool {
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == 'e' || c == 'E') && i > 0 && text[i-1] >= '0' && text[i-1] <= '9':
			return false
		}
	}
	return true
}

// deferCheckpoint keeps a result until another write includes it or deferDelay is over.
func (r *run) deferCheckpoint(ctx context.Context, checkpoint *deferredCheckpoint) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	if err := r.flushDeferredLocked(ctx); err != nil { // the earlier checkpoint of another branch or an inner step
		return err
	}
	r.deferred = checkpoint
	if r.deferTimer != nil {
		r.deferTimer.Reset(deferDelay)
		return nil
	}
	r.deferTimer = time.AfterFunc(deferDelay, func() {
		_ = r.flushDeferred(context.WithoutCancel(ctx)) // an error stops the run
	})
	return nil
}

// flushDeferred writes the deferred checkpoint. If the write fails, it has stopped the run.
func (r *run) flushDeferred(ctx context.Context) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	return r.flushDeferredLocked(ctx)
}

// takeDeferred removes and returns the deferred checkpoint; nil for none. The caller writes it. takeDeferred waits for
// a write in flight.
func (r *run) takeDeferred() *deferredCheckpoint {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	deferred := r.deferred
	r.deferred = nil
	if deferred != nil {
		r.deferTimer.Stop()
	}
	return deferred
}

// writeWithDeferred makes a write in one transaction with the deferred checkpoint. Other branches may depend on that
// step, so they wait meanwhile. If the transaction fails, writeWithDeferred writes the checkpoint and then queue in
// separate transactions. recordErr is the error of the checkpoint's own write, which has stopped the run.
func (r *run) writeWithDeferred(ctx context.Context, queue func(b *pgx.Batch)) (recordErr, err error) {
	r.recordMu.Lock()
	deferred := r.deferred
	if deferred == nil {
		r.recordMu.Unlock()
		return nil, r.write(ctx, queue)
	}
	defer r.recordMu.Unlock()
	r.deferred = nil
	r.deferTimer.Stop()
	err = r.write(ctx, func(b *pgx.Batch) {
		deferred.write(r).queue(b)
		queue(b)
	})
	if err == nil {
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", deferred.step.key)
		return nil, nil
	}
	if recordErr = r.recordDeferred(ctx, deferred); recordErr != nil {
		return recordErr, nil
	}
	return nil, r.write(ctx, queue)
}

// flushDeferredLocked is flushDeferred for a caller that holds r.recordMu.
func (r *run) flushDeferredLocked(ctx context.Context) error {
	deferred := r.deferred
	if deferred == nil {
		return nil
	}
	r.deferred = nil
	r.deferTimer.Stop()
	return r.recordDeferred(ctx, deferred)
}

// recordDeferred writes a checkpoint that was deferred. If the write fails, it has stopped the run.
func (r *run) recordDeferred(ctx context.Context, deferred *deferredCheckpoint) error {
	err := r.recordStep(ctx, deferred.step, deferred.effect, deferred.value, deferred.output, deferred.failure)
	switch {
	case err == nil, r.stopCause() != nil:
	case transient(err), ctx.Err() != nil:
		r.stop(ErrLost) // the outcome is unknown: the next claim runs the step again
	default:
		err = errors.Join(errNotRecorded, err)
		r.setFailedStep(deferred.step.key)
		r.stop(err)
	}
	return err
}

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
// are sorted in lock order.
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

// SetVariables replaces the variables of the execution, an object that describes its state to readers. The next durable
// write of the run (a checkpoint, a wait or the completion) stores the variables under its fence, so they need no round
// trip of their own. A StepTx whose row is locked leaves the variables to the next write. SetVariables is not a step: a
// replay calls it again, but the run does not write stored values again. With parallel branches, the last call wins.
func SetVariables(ctx context.Context, variables any) error {
	r, err := runFrom(ctx)
	if err != nil {
		return err
	}
	text, _, err := encode(variables)
	if err == nil {
		text, err = canonicalJSON(text)
	}
	if err != nil {
		return fmt.Errorf("encode variables: %w", err)
	}
	var object map[string]any // rejects numbers beyond float64, as jsonb would
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return fmt.Errorf("set variables: need a JSON object, got %T: %w", variables, errors.Join(err, errNotObject))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.variables = text
	return nil
}

// errNotObject reports variables that are not an object.
var errNotObject = errors.New("pass a struct or a map")

// canonicalJSON returns the same text for JSON values that differ only in the order of their members.
func canonicalJSON(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, err
	}
	return json.Marshal(tree)
}

// pendingVariables returns the variables if the row does not have them yet; nil otherwise.
func (r *run) pendingVariables() json.RawMessage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.variables == nil {
		return nil
	}
	if r.storedVariables == nil && len(r.exec.Variables) > 0 {
		if text, err := canonicalJSON(r.exec.Variables); err == nil {
			r.storedVariables = text
		}
	}
	if bytes.Equal(r.variables, r.storedVariables) {
		return nil
	}
	return r.variables
}

// reserveVariables returns the pending variables for one of several concurrent writes. It returns nil if another write
// has reserved them. The caller calls releaseVariables after its write.
func (r *run) reserveVariables() json.RawMessage {
	text := r.pendingVariables()
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == nil || r.variablesInFlight {
		return nil
	}
	r.variablesInFlight = true
	return text
}

// releaseVariables ends a reservation. err is the result of the write.
func (r *run) releaseVariables(text json.RawMessage, err error) {
	if text == nil {
		return
	}
	r.mu.Lock()
	r.variablesInFlight = false
	r.mu.Unlock()
	if err == nil {
		r.setStoredVariables(text)
	}
}

func (r *run) setStoredVariables(text json.RawMessage) {
	if text == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.storedVariables = text
}

// queueVariables queues the variables in the batch of a fenced write.
func (r *run) queueVariables(b *pgx.Batch, text json.RawMessage) {
	if text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = @id and claim between @claim::bigint and @claim::bigint + 1`, // a wait in this batch increments the claim
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": text})
}

// queueVariablesUnlessLocked is queueVariables for a transaction that may hold lanes. The lock order is executions
// before lanes, so a transaction that locks the row may wait for those lanes. If the row is locked, text becomes nil,
// and the next write stores the variables.
func (r *run) queueVariablesUnlessLocked(b *pgx.Batch, text *json.RawMessage) {
	if *text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = (select x.id from agent_executions x
		              where x.id = @id and x.claim = @claim
		                for no key update skip locked)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": *text}).Exec(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			*text = nil
		}
		return nil
	})
}

// withVariables makes a write with variables. If the database rejects the variables, withVariables logs the error and
// repeats the write without them, because variables must not stop the run.
func (r *run) withVariables(ctx context.Context, text json.RawMessage, write func(text json.RawMessage) error) error {
	err := write(text)
	if code := postgres.Code(err); text != nil && (strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")) {
		if retryErr := write(nil); retryErr == nil {
			r.e.log.ErrorContext(ctx, "variables not stored", "error", err)
			err = nil
		}
	}
	return err
}

// write is Engine.write with the pending variables. It updates the variables first, because the fence of the other
// statements takes a weaker lock on the row.
func (r *run) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	text := r.reserveVariables()
	err := r.withVariables(ctx, text, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			// agent_activity is partitioned, so PostgreSQL would plan its update at each call without this setting. set_config
			// replaces SET LOCAL, which logs a warning in a batch.
			b.Queue(`
				select set_config('lock_timeout', @lock_timeout, true), set_config('plan_cache_mode', 'force_generic_plan', true)`,
				postgres.Strict{"lock_timeout": lockTimeout})
			r.queueVariables(b, text)
			queue(b)
		})
	})
	r.releaseVariables(text, err)
	return err
}
