package executions

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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

// checkpoint returns the checkpoint to write; nil for none.
func (d *deferredCheckpoint) checkpoint(r *run) *checkpointWrite {
	if d == nil {
		return nil
	}
	return &checkpointWrite{
		id: r.exec.ID, step: d.step.key, fingerprint: d.step.fingerprint, claim: r.exec.Claim,
		failed: d.failure != nil, output: d.output,
	}
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

// canDefer reports whether a result may be deferred: the step may run again, it has no activity row and no statements
// of its own, and the database certainly accepts its result.
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

// flushDeferred writes the deferred checkpoint. If the write fails, it has stopped the run.
func (r *run) flushDeferred(ctx context.Context) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	return r.flushDeferredLocked(ctx)
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
		deferred.checkpoint(r).queue(b)
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
