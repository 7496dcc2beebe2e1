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

// checkpointWrite is the result of a step that has no activity row, as it is written.
type checkpointWrite struct {
	id, step, fingerprint string
	claim                 int64
	failed                bool
	output                json.RawMessage
	variables             json.RawMessage // nil when the row has them
}

// queue queues the record of a step. Sent twice, it changes nothing the second time. It waits for a lock of the
// execution for a moment only.
func (p *checkpointWrite) queue(b *pgx.Batch) {
	b.Queue(`
		insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
		select @id, @step, @claim, @fingerprint, @failed, @output from set_config('lock_timeout', @patience, true)
		on conflict (execution_id, step) do nothing`, postgres.Strict{
		"id": p.id, "step": p.step, "claim": p.claim, "fingerprint": p.fingerprint, "failed": p.failed, "output": p.output, "patience": lockTimeout,
	})
}

// writeCheckpoint writes the result of a step, together with those of other runs that come at the same time, or by
// itself until then. Only who is by itself sets a timer, which costs more than it seems to.
func (r *run) writeCheckpoint(ctx context.Context, until time.Time, s stepSpec, output json.RawMessage, failed bool) error {
	text := r.takeVariables()
	alone := func() (struct{}, error) {
		ctx, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		return struct{}{}, r.withVariables(ctx, text, func(text json.RawMessage) error {
			return r.e.write(ctx, func(b *pgx.Batch) {
				r.queueVariables(b, text)
				r.queueCheckpoint(b, s, output, failed)
			})
		})
	}
	_, err := r.e.batchers.checkpoints.Do(ctx, checkpointWrite{
		id: r.exec.ID, step: s.key, fingerprint: s.fingerprint, claim: r.exec.Claim, failed: failed, output: output, variables: text,
	}, alone)
	r.returnVariables(text, err)
	return err
}

// checkpointBatch writes results in one commit, each under its own claim. What is not live, or locked, is left to be
// written by itself, where it is refused or waits.
func (e *Engine) checkpointBatch(ctx context.Context, points []checkpointWrite) ([]batch.Answer[struct{}], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(points)
	ids, claims, steps, prints, failed := make([]string, n), make([]int64, n), make([]string, n), make([]string, n), make([]bool, n)
	outputs, variables := make([]*string, n), make([]*string, n)
	for i, p := range points {
		ids[i], claims[i], steps[i], prints[i], failed[i] = p.id, p.claim, p.step, p.fingerprint, p.failed
		outputs[i], variables[i] = nullableJSON(p.output), nullableJSON(p.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select n from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps, @prints, @failed, (@outputs::text[])::jsonb[],
		       (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": uuidArray(ids), "claims": claims, "steps": steps, "prints": nilIfZero(prints), "failed": nilIfZero(failed), "outputs": outputs,
			"variables": nilIfZero(variables),
		})
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	answers, err := readLeftOut[struct{}](rows, n)
	if err != nil {
		return nil, fmt.Errorf("record %d steps: %w", n, err)
	}
	return answers, nil
}

// uuidArray is an argument of ids, which costs less to send and to read in sixteen bytes each. What is no UUID the
// database refuses.
func uuidArray(ids []string) any {
	several := make(pgtype.FlatArray[pgtype.UUID], len(ids))
	for i, id := range ids {
		if several[i].Scan(id) != nil {
			return ids
		}
	}
	return several
}

// nilIfZero is an argument of several writes; nil, which is less to send and to take apart, where all have the zero
// value.
func nilIfZero[T comparable](values []T) []T {
	var zero T
	if slices.ContainsFunc(values, func(v T) bool { return v != zero }) {
		return values
	}
	return nil
}

// readLeftOut reads which of n writes of a batch were left to be made by themselves.
func readLeftOut[Out any](rows pgx.Rows, n int) ([]batch.Answer[Out], error) {
	answers := make([]batch.Answer[Out], n)
	var n1 int
	_, err := pgx.ForEachRow(rows, []any{&n1}, func() error {
		answers[n1-1].Alone = true
		return nil
	})
	return answers, err
}

// The result of a step that is nothing but its result is put off being written for a moment, because what often
// follows is the end of the run, and then both are one write. It is written before the execution begins or records
// anything else, and by itself when nothing follows soon: so no other step, no wait and no end is ever ahead of a
// record, and records are written in the order in which their steps ended. A process that dies in this moment runs
// the step again, as if it had died within it.
const deferDelay = time.Millisecond

// maxDeferredBytes is how long a result may be, in bytes, to be put off, and longestKey the key of its step, which is
// indexed. What the database might refuse is written at once, while the code can still be told.
const (
	maxDeferredBytes = 4096
	maxDeferredKey   = 1024
)

// errUnrecorded ends a run whose result could not be written after the code had been told that the step was done.
var errUnrecorded = errors.New("the result of a step could not be recorded")

// deferredCheckpoint is the result of a step that is yet to be written.
type deferredCheckpoint struct {
	s       stepSpec
	effect  *Effect
	value   any
	output  json.RawMessage
	failure *StepError
}

// write is the result as it is written; nil for none.
func (p *deferredCheckpoint) write(r *run) *checkpointWrite {
	if p == nil {
		return nil
	}
	return &checkpointWrite{id: r.exec.ID, step: p.s.key, fingerprint: p.s.fingerprint, claim: r.exec.Claim, failed: p.failure != nil, output: p.output}
}

// canDefer reports a result that may be put off.
func (r *run) canDefer(s stepSpec, effect *Effect, output json.RawMessage) bool {
	return s.repeatable && s.entry == nil && s.onIntent == nil && (effect == nil || effect.OnResult == nil) && r.replay == nil &&
		len(output) <= maxDeferredBytes && withoutExponents(output) && len(s.key) <= maxDeferredKey && s.key == postgres.Text(s.key)
}

// withoutExponents reports JSON without exponents. Its numbers are those that jsonb holds, if they are not long.
func withoutExponents(text json.RawMessage) bool {
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

// deferCheckpoint keeps a result until something else is written, or its time is up.
func (r *run) deferCheckpoint(ctx context.Context, p *deferredCheckpoint) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	if err := r.flushDeferredLocked(ctx); err != nil { // of another branch, or of a step within this one
		return err
	}
	r.deferred = p
	if r.deferTimer != nil {
		r.deferTimer.Reset(deferDelay)
		return nil
	}
	r.deferTimer = time.AfterFunc(deferDelay, func() {
		_ = r.flushDeferred(context.WithoutCancel(ctx)) // an error has stopped the run
	})
	return nil
}

// flushDeferred returns when nothing is put off any more. An error has stopped the run.
func (r *run) flushDeferred(ctx context.Context) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	return r.flushDeferredLocked(ctx)
}

// takeDeferred hands what was put off to a write that takes it along; nil when there is nothing. It waits for a write
// that is under way.
func (r *run) takeDeferred() *deferredCheckpoint {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	p := r.deferred
	r.deferred = nil
	if p != nil {
		r.deferTimer.Stop()
	}
	return p
}

// flushDeferredLocked writes what was put off. The caller holds r.recording.
func (r *run) flushDeferredLocked(ctx context.Context) error {
	p := r.deferred
	if p == nil {
		return nil
	}
	r.deferred = nil
	r.deferTimer.Stop()
	return r.recordDeferred(ctx, p)
}

// recordDeferred writes what was taken from r.put. An error has stopped the run.
func (r *run) recordDeferred(ctx context.Context, p *deferredCheckpoint) error {
	err := r.recordStep(ctx, p.s, p.effect, p.value, p.output, p.failure)
	switch {
	case err == nil, r.stopCause() != nil:
	case transient(err), ctx.Err() != nil:
		r.stop(ErrLost) // nobody knows, and whoever takes over runs the step again
	default:
		err = errors.Join(errUnrecorded, err)
		r.setFailedStep(p.s.key)
		r.stop(err)
	}
	return err
}

// batchers join the writes of concurrent executions, one batcher for each kind of write.
type batchers struct {
	starts      *batch.Batcher[insertParams, Execution]
	checkpoints *batch.Batcher[checkpointWrite, struct{}]
	waits       *batch.Batcher[waitWrite, []byte]
	events      *batch.Batcher[event, Delivered]
	completions *batch.Batcher[completion, completionResult]
}

// newBatchers returns the batchers of an engine. They share a scheduler, so callers of different kinds fall into step
// too.
//
// A checkpoint or an end that is sent twice changes nothing the second time. A start, a wait, or an event without an
// id would count twice, so these are sent again only after the database refused them. Checkpoints and ends are sorted
// as their rows are locked.
func newBatchers(e *Engine) batchers {
	s := &batch.Scheduler{}
	return batchers{
		starts: &batch.Batcher[insertParams, Execution]{Scheduler: s, Send: e.startBatch, Unchanged: postgres.Unchanged},
		waits:  &batch.Batcher[waitWrite, []byte]{Scheduler: s, Send: e.waitBatch, Unchanged: postgres.Unchanged},
		events: &batch.Batcher[event, Delivered]{Scheduler: s, Send: e.deliverBatch, Unchanged: postgres.Unchanged},
		checkpoints: &batch.Batcher[checkpointWrite, struct{}]{
			Scheduler: s, Send: e.checkpointBatch, Compare: func(a, b checkpointWrite) int { return strings.Compare(a.id, b.id) },
		},
		completions: &batch.Batcher[completion, completionResult]{
			Scheduler: s, Send: e.completeBatch, Compare: func(a, b completion) int { return strings.Compare(a.id, b.id) },
		},
	}
}

// SetVariables replaces the execution's variables, the state that it shows to others: an object. They are written
// together with the next durable write of the run (a checkpoint, a wait, the end; or the one after, where that is a
// StepTx while somebody has the row locked), under its fence, so they cost no round trip and are lost with that write
// alone. It is not a step: code that replays sets the same variables again, and what the row has already is not
// written again. Of branches that run at the same time the last one to set them wins.
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
	var object map[string]any // a number that has no float64 is beyond what the row can hold, too
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return fmt.Errorf("set variables: they are an object that can be stored, not %T: %w", variables, errors.Join(err, errNotObject))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.variables = text
	return nil
}

// errNotObject reports variables that are not an object.
var errNotObject = errors.New("give a struct or a map")

// canonicalJSON writes JSON in the one way that two equal values share, whatever the order of their members was.
func canonicalJSON(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, err
	}
	return json.Marshal(tree)
}

// pendingVariables returns the variables that the row does not have yet; nil when it has them.
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

// takeVariables takes the variables for one write of several that may be under way; nil when another has them. The
// writer calls carried when it is done.
func (r *run) takeVariables() json.RawMessage {
	text := r.pendingVariables()
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == nil || r.variablesInFlight {
		return nil
	}
	r.variablesInFlight = true
	return text
}

func (r *run) returnVariables(text json.RawMessage, err error) {
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

// setStoredVariables notes what the row has.
func (r *run) setStoredVariables(text json.RawMessage) {
	if text == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.storedVariables = text
}

// queueVariables queues the variables for the batch of a write that is fenced.
func (r *run) queueVariables(b *pgx.Batch, text json.RawMessage) {
	if text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = @id and claim between @claim::bigint and @claim::bigint + 1`, // a park in this batch has made it one more
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": text})
}

// queueVariablesUnlessLocked is queueVariables for a transaction that may hold lanes, as one that speaks in a thread
// does: executions are locked before lanes, so who has the row now, such as a parent that begins to wait, may want
// them next. Then text becomes nil, and the next write takes the variables along.
func (r *run) queueVariablesUnlessLocked(b *pgx.Batch, text *json.RawMessage) {
	if *text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = (select x.id from agent_executions x where x.id = @id and x.claim = @claim for no key update skip locked)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": *text}).Exec(func(done pgconn.CommandTag) error {
		if done.RowsAffected() == 0 {
			*text = nil
		}
		return nil
	})
}

// withVariables makes a write that carries variables. Those that the database cannot hold must not keep the run from
// going on: they are left out, and the log says so.
func (r *run) withVariables(ctx context.Context, text json.RawMessage, write func(text json.RawMessage) error) error {
	err := write(text)
	if code := postgres.Code(err); text != nil && (strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")) {
		if again := write(nil); again == nil {
			r.e.log.ErrorContext(ctx, "variables not stored", "error", err)
			err = nil
		}
	}
	return err
}

// write is the engine's write, which takes along the variables that were set since the last one. They come first,
// because the fence locks the row more weakly than they do.
func (r *run) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	text := r.takeVariables()
	err := r.withVariables(ctx, text, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			queueLockTimeout(b)
			r.queueVariables(b, text)
			queue(b)
		})
	})
	r.returnVariables(text, err)
	return err
}
