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

// checkpointWrite is the result of a step without an activity row, in the form for the database.
type checkpointWrite struct {
	id, step, fingerprint string
	claim                 int64
	failed                bool
	output                json.RawMessage
	variables             json.RawMessage // nil when the row has them
}

// queue queues the checkpoint. A repeated insert changes nothing. If a later claim recorded the step, the database
// refuses the update as stale. The write waits for a lock of the execution at most for lockTimeout.
func (p *checkpointWrite) queue(b *pgx.Batch) {
	b.Queue(`
		insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
		select @id, @step, @claim, @fingerprint, @failed, @output from set_config('lock_timeout', @lock_timeout, true)
		on conflict (execution_id, step)
		do update set claim = excluded.claim where agent_checkpoints.claim <> excluded.claim`, postgres.Strict{
		"id": p.id, "step": p.step, "claim": p.claim, "fingerprint": p.fingerprint, "failed": p.failed, "output": p.output,
		"lock_timeout": lockTimeout,
	})
}

// writeCheckpoint writes the result of a step in a batch with results of other runs, or alone until a deadline. Only
// the single write sets a timer, because timers are costly.
func (r *run) writeCheckpoint(
	ctx context.Context, until time.Time, s stepSpec, output json.RawMessage, failed bool,
) error {
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
		id: r.exec.ID, step: s.key, fingerprint: s.fingerprint, claim: r.exec.Claim, failed: failed,
		output: output, variables: text,
	}, alone)
	r.returnVariables(text, err)
	return err
}

// checkpointBatch writes results in one commit, each under its own claim. It leaves out locked executions and
// executions without a live claim.
func (e *Engine) checkpointBatch(ctx context.Context, points []checkpointWrite) ([]batch.Answer[struct{}], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(points)
	ids, claims, steps, prints, failed := make([]string, n), make([]int64, n), make([]string, n),
		make([]string, n), make([]bool, n)
	outputs, variables := make([]*string, n), make([]*string, n)
	for i, p := range points {
		ids[i], claims[i], steps[i], prints[i], failed[i] = p.id, p.claim, p.step, p.fingerprint, p.failed
		outputs[i], variables[i] = nullableJSON(p.output), nullableJSON(p.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select n from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps, @prints, @failed,
		  (@outputs::text[])::jsonb[],
		       (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": uuidArray(ids), "claims": claims, "steps": steps, "prints": nilIfZero(prints),
			"failed": nilIfZero(failed), "outputs": outputs,
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

// uuidArray encodes ids in sixteen bytes each, which is cheaper to send and parse. The database rejects an id that is
// no UUID.
func uuidArray(ids []string) any {
	several := make(pgtype.FlatArray[pgtype.UUID], len(ids))
	for i, id := range ids {
		if several[i].Scan(id) != nil {
			return ids
		}
	}
	return several
}

// nilIfZero returns nil where all values are zero, which is cheaper to send.
func nilIfZero[T comparable](values []T) []T {
	var zero T
	if slices.ContainsFunc(values, func(v T) bool { return v != zero }) {
		return values
	}
	return nil
}

func readLeftOut[Out any](rows pgx.Rows, n int) ([]batch.Answer[Out], error) {
	answers := make([]batch.Answer[Out], n)
	var n1 int
	_, err := pgx.ForEachRow(rows, []any{&n1}, func() error {
		answers[n1-1].Alone = true
		return nil
	})
	return answers, err
}

// deferDelay is how long the run defers the checkpoint of a plain step. Often the run ends next, and one write stores
// checkpoint and end. The run writes the checkpoint before it starts a step or records a result, or alone after the
// delay. So checkpoints keep the order in which their steps ended, and precede every later step, wait or end. If the
// process dies within the delay, the next claim runs the step again.
const deferDelay = time.Millisecond

// Bounds of a deferred result and of its step's key. The run writes a result that the database might reject at once,
// while the code can still receive the error.
const (
	maxDeferredBytes = 4096
	maxDeferredKey   = 1024
)

// errUnrecorded ends a run that could not write its deferred result.
var errUnrecorded = errors.New("the result of a step could not be recorded")

// deferredCheckpoint is the result of a step that is not written yet.
type deferredCheckpoint struct {
	s       stepSpec
	effect  *Effect
	value   any
	output  json.RawMessage
	failure *StepError
}

// write returns the checkpoint to write; nil for none.
func (p *deferredCheckpoint) write(r *run) *checkpointWrite {
	if p == nil {
		return nil
	}
	return &checkpointWrite{
		id: r.exec.ID, step: p.s.key, fingerprint: p.s.fingerprint, claim: r.exec.Claim,
		failed: p.failure != nil, output: p.output,
	}
}

// canDefer reports whether a result may be deferred.
func (r *run) canDefer(s stepSpec, effect *Effect, output json.RawMessage) bool {
	return s.repeatable && s.entry == nil && s.onIntent == nil && (effect == nil || effect.OnResult == nil) &&
		r.replay == nil &&
		len(output) <= maxDeferredBytes && withoutExponents(output) && len(s.key) <= maxDeferredKey &&
		s.key == postgres.Text(s.key)
}

// withoutExponents reports JSON without exponents. jsonb stores its numbers as they are, unless they are long.
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

// deferCheckpoint stores a result until another write includes it or the delay is over.
func (r *run) deferCheckpoint(ctx context.Context, p *deferredCheckpoint) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	if err := r.flushDeferredLocked(ctx); err != nil { // of another branch, or of an inner step
		return err
	}
	r.deferred = p
	if r.deferTimer != nil {
		r.deferTimer.Reset(deferDelay)
		return nil
	}
	r.deferTimer = time.AfterFunc(deferDelay, func() {
		_ = r.flushDeferred(context.WithoutCancel(ctx)) // an error stops the run
	})
	return nil
}

// flushDeferred writes the deferred checkpoint. An error has stopped the run.
func (r *run) flushDeferred(ctx context.Context) error {
	r.recordMu.Lock()
	defer r.recordMu.Unlock()
	return r.flushDeferredLocked(ctx)
}

// takeDeferred returns the deferred checkpoint for a write that includes it; nil for none. It waits for a write in
// flight.
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

// writeWithDeferred writes in one transaction with the deferred checkpoint. Other branches may build on that step, so
// they wait meanwhile. If the write fails, writeWithDeferred writes the checkpoint alone. unrecorded is the error of
// that second write, which has stopped the run.
func (r *run) writeWithDeferred(ctx context.Context, queue func(b *pgx.Batch)) (unrecorded, err error) {
	r.recordMu.Lock()
	p := r.deferred
	if p == nil {
		r.recordMu.Unlock()
		return nil, r.write(ctx, queue)
	}
	defer r.recordMu.Unlock()
	r.deferred = nil
	r.deferTimer.Stop()
	err = r.write(ctx, func(b *pgx.Batch) {
		p.write(r).queue(b)
		queue(b)
	})
	if err == nil {
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", p.s.key)
		return nil, nil
	}
	if unrecorded = r.recordDeferred(ctx, p); unrecorded != nil {
		return unrecorded, nil
	}
	return nil, r.write(ctx, queue)
}

// flushDeferredLocked is flushDeferred. The caller holds r.recordMu.
func (r *run) flushDeferredLocked(ctx context.Context) error {
	p := r.deferred
	if p == nil {
		return nil
	}
	r.deferred = nil
	r.deferTimer.Stop()
	return r.recordDeferred(ctx, p)
}

// recordDeferred writes a taken checkpoint. An error has stopped the run.
func (r *run) recordDeferred(ctx context.Context, p *deferredCheckpoint) error {
	err := r.recordStep(ctx, p.s, p.effect, p.value, p.output, p.failure)
	switch {
	case err == nil, r.stopCause() != nil:
	case transient(err), ctx.Err() != nil:
		r.stop(ErrLost) // the outcome is unknown: the next claim runs the step again
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

// newBatchers returns the batchers of an engine. They share a scheduler, so writes of different kinds are batched at
// the same pace.
//
// A repeated checkpoint or completion changes nothing. A repeated start, wait, or event without an id would count
// twice. So the batcher repeats these only after the database rejected them. Checkpoints and completions are sorted in
// lock order.
func newBatchers(e *Engine) batchers {
	s := &batch.Scheduler{}
	return batchers{
		starts: &batch.Batcher[insertParams, Execution]{Scheduler: s, Send: e.startBatch, Unchanged: postgres.Unchanged},
		waits:  &batch.Batcher[waitWrite, []byte]{Scheduler: s, Send: e.waitBatch, Unchanged: postgres.Unchanged},
		events: &batch.Batcher[event, Delivered]{Scheduler: s, Send: e.deliverBatch, Unchanged: postgres.Unchanged},
		checkpoints: &batch.Batcher[checkpointWrite, struct{}]{
			Scheduler: s, Send: e.checkpointBatch,
			Compare: func(a, b checkpointWrite) int { return strings.Compare(a.id, b.id) },
		},
		completions: &batch.Batcher[completion, completionResult]{
			Scheduler: s, Send: e.completeBatch, Compare: func(a, b completion) int { return strings.Compare(a.id, b.id) },
		},
	}
}

// SetVariables replaces the variables of the execution, an object that shows the execution's state to readers. The next
// durable write of the run (a checkpoint, a wait or the end) stores the variables under its fence. A StepTx on a locked
// row leaves the variables to the next write. So variables cost no round trip, and are lost only with that write.
// SetVariables is not a step. Replayed code sets the same variables again, but the run does not write stored values
// again. Of parallel branches, the last call wins.
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
	var object map[string]any // rejects numbers beyond float64, as the row would
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

// canonicalJSON writes equal JSON values alike, for any order of their members.
func canonicalJSON(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, err
	}
	return json.Marshal(tree)
}

// pendingVariables returns the variables that the row lacks; nil for none.
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

// takeVariables reserves the variables for one of several concurrent writes. It returns nil when another write has
// reserved them. The writer calls returnVariables afterwards.
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
		 where id = @id and claim between @claim::bigint and @claim::bigint + 1`, // a wait in this batch has increased it
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": text})
}

// queueVariablesUnlessLocked is queueVariables for a transaction that may hold lanes. Executions are locked before
// lanes, so the present holder of the row may wait for those lanes. Then text becomes nil, and the next write stores
// the variables.
func (r *run) queueVariablesUnlessLocked(b *pgx.Batch, text *json.RawMessage) {
	if *text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = (select x.id from agent_executions x where x.id = @id
		   and x.claim = @claim for no key update skip locked)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": *text}).Exec(func(done pgconn.CommandTag) error {
		if done.RowsAffected() == 0 {
			*text = nil
		}
		return nil
	})
}

// withVariables makes a write with variables. Rejected variables must not stop the run: withVariables logs them and
// repeats the write without them.
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

// write is the engine's write with the pending variables. Their update comes first, because the fence takes a weaker
// lock.
func (r *run) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	text := r.takeVariables()
	err := r.withVariables(ctx, text, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			// The activity log is partitioned, so PostgreSQL would plan the update of its row at each call. PostgreSQL's log
			// warns of SET LOCAL in a batch.
			b.Queue(`
				select set_config('lock_timeout', @lock_timeout, true), set_config('plan_cache_mode', 'force_generic_plan', true)`,
				postgres.Strict{"lock_timeout": lockTimeout})
			r.queueVariables(b, text)
			queue(b)
		})
	})
	r.returnVariables(text, err)
	return err
}
