package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrTimedOut ends an execution with status timeout, when a durable function returns it, wrapped or not.
var ErrTimedOut = errors.New("the wait timed out")

// WaitFor describes a wait.
type WaitFor struct {
	kind    string
	key     string
	timeout time.Duration
	data    any
}

// MaxWait is the longest wait. Some kinds have a shorter limit; see Limits.
const MaxWait = 30 * 24 * time.Hour

// Limits returns the default and the maximum timeout of a kind of wait. A default of 0 requires a timeout.
// wait_agent_execution has the same table and rejects longer timeouts.
func Limits(kind string) (defaultTimeout, maxTimeout time.Duration) {
	const day = 24 * time.Hour
	switch kind {
	case "response":
		return day, 7 * day
	case "agent":
		return time.Hour, day
	case "delay":
		return 0, MaxWait
	}
	return 7 * day, MaxWait
}

// waitEvents are the events that end waits, by kind, as in the view lanekeeper.agent_wait_events.
var waitEvents = map[string]string{
	"response": "MESSAGE_RECEIVED", "agent": "AGENT_COMPLETED", "document": "DOCUMENT_UPLOADED",
	"signature": "SIGNATURE_COMPLETED", "test": "TEST_COMPLETED", "event": "EVENT_COMPLETED",
	"delay": "SCHEDULE_REACHED", "approval": "APPROVAL_DECIDED", "lane": "LANE_FREED",
}

// WaitKinds returns the kinds of waits, sorted.
func WaitKinds() []string { return slices.Sorted(maps.Keys(waitEvents)) }

// Delay waits for d, by the database's clock. The limit is MaxWait.
func Delay(d time.Duration) WaitFor { return WaitFor{kind: "delay", timeout: d} }

// Event waits for EVENT_COMPLETED with a key. A timeout of 0 is 7 days; the limit is MaxWait. An earlier event that
// ended no other wait ends this wait at once.
func Event(key string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "event", key: key, timeout: timeout}
}

// Approval waits for the decision on an approval: APPROVAL_DECIDED with its id as key. The outcome's Data is
// {"status", "by", "reason"}. A timeout of 0 is 7 days; the limit is MaxWait.
func Approval(id string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "approval", key: id, timeout: timeout}
}

// Patient is a timeout of [Agent]: a day, or longer while the child itself waits.
const Patient time.Duration = -1

// Agent waits for the end of another execution, normally a child: AGENT_COMPLETED with its id as key. The outcome's
// Data has its status, result_type and result_summary. The limit is a day. A timeout of 0 is 1 hour, or longer while
// the child itself waits; see also [Patient].
func Agent(childID string, timeout time.Duration) WaitFor {
	w := WaitFor{kind: "agent", key: childID, timeout: timeout}
	if timeout == 0 || timeout == Patient {
		w.data = map[string]any{"patient": true}
	}
	if timeout == Patient {
		_, w.timeout = Limits(w.kind)
	}
	return w
}

// Response waits for a message in a thread, MESSAGE_RECEIVED with the thread as key, after the execution's own last
// message. The timeout starts when that message is sent. A timeout of 0 is 24 hours; the limit is 7 days.
func Response(threadID string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "response", key: threadID, timeout: timeout}
}

// Document waits for all documents of a request: DOCUMENT_UPLOADED with its id as key. The outcome's Data has
// documentUrls in the requested order. A timeout of 0 is 7 days; the limit is MaxWait.
func Document(requestID string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "document", key: requestID, timeout: timeout}
}

// Signature waits for SIGNATURE_COMPLETED with the id of a request as key. A timeout of 0 is 7 days; the limit is
// MaxWait.
func Signature(requestID string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "signature", key: requestID, timeout: timeout}
}

// Test waits for TEST_COMPLETED with the id of a request as key. A timeout of 0 is 7 days; the limit is MaxWait.
func Test(requestID string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "test", key: requestID, timeout: timeout}
}

// WithData adds an object to waiting_data, which the Engine Room shows.
func (w WaitFor) WithData(data map[string]any) WaitFor {
	merged := map[string]any{}
	maps.Copy(merged, data)
	if own, ok := w.data.(map[string]any); ok {
		maps.Copy(merged, own)
	}
	w.data = merged
	return w
}

// LaneFree waits until a lane is free, without acquiring it. Another owner may acquire it first.
func LaneFree(lane string, timeout time.Duration) WaitFor {
	return WaitFor{kind: "lane", key: lane, timeout: timeout}
}

// Outcome is the result of a wait.
type Outcome struct {
	Event    string          `json:"event"`
	EventID  string          `json:"event_id,omitempty"`
	Data     json.RawMessage `json:"data"`
	TimedOut bool            `json:"timed_out"`
}

// Wait waits durably. The first call normally returns ErrParked, and the flow must return it. The execution then waits
// without a process. After the wait the flow runs again, and Wait returns the recorded outcome. Exactly one of event,
// timer and cancel ends the wait. Wait fails within a StepTx, and within a Do that is not idempotent.
func Wait(ctx context.Context, name string, w WaitFor) (Outcome, error) {
	if err := checkWaitAllowed(ctx, name); err != nil {
		return Outcome{}, err
	}
	if err := w.resolve(); err != nil {
		return Outcome{}, fmt.Errorf("wait %s: %w", name, err)
	}
	s := stepSpec{name: name}
	r, err := s.start(ctx)
	if err != nil {
		return Outcome{}, err
	}
	if done, out, err := recordedResult[Outcome](ctx, r, s); done {
		switch {
		case err != nil:
			return out, err
		case out.Event != waitEvents[w.kind]: // a record of a step that was no wait decodes too
			return Outcome{}, r.failChanged(s.key, fmt.Errorf("step %s has a record, but not of a wait for %s: %w", s.key,
				w.kind, ErrChanged))
		}
		r.recordTimeout(s.key, out)
		return out, nil
	}
	if w.kind == "delay" {
		w.key = r.exec.ID
	}
	data, _, err := encode(w.data)
	if err != nil {
		return Outcome{}, fmt.Errorf("wait %s: encode data: %w", name, err)
	}
	r.e.log.InfoContext(ctx, "action requires wait", "step", s.key, "waiting_for", w.kind)
	outcome, err := r.park(ctx, s.key, w, data)
	switch {
	case errors.Is(err, ErrStale), err != nil && r.writeLost(ctx, s, err, activity.Outcome{}):
		return Outcome{}, r.handleWriteError(ctx, s, ErrStale, activity.Outcome{})
	case err != nil && ctx.Err() != nil:
		return Outcome{}, context.Cause(ctx)
	case err != nil:
		return Outcome{}, fmt.Errorf("wait %s: %w", name, err)
	case outcome != nil:
		out, err := decode[Outcome](outcome)
		if err != nil {
			return Outcome{}, fmt.Errorf("wait %s: %w", name, err)
		}
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", s.key, "event", out.Event)
		r.recordTimeout(s.key, out)
		return out, nil
	}
	r.e.log.InfoContext(ctx, "execution waiting", "waiting_for", w.kind, "waiting_key", w.key,
		"timeout", w.timeout.String())
	r.stop(ErrParked)
	r.e.wakeSweepIn(w.timeout)
	if w.kind == "lane" {
		r.e.requestSweep() // a lane released before this commit notified no waiter
	}
	return Outcome{}, ErrParked
}

// IsRecorded reports whether the next step or wait of a name has a record. IsRecorded is not a step.
func IsRecorded(ctx context.Context, name string) bool {
	r, err := runFrom(ctx)
	if err != nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	key := scopeOf(ctx) + name
	if n := r.occurrences[key]; n > 0 {
		key += "#" + strconv.Itoa(n+1)
	}
	_, recorded := r.checkpoints[key]
	return recorded
}

// resolve applies the default timeout and checks the wait.
func (w *WaitFor) resolve() error {
	defaultTimeout, maxTimeout := Limits(w.kind)
	w.timeout = cmp.Or(w.timeout, defaultTimeout)
	switch {
	case w.timeout <= 0 || w.timeout > maxTimeout:
		return fmt.Errorf("the timeout for %s must be more than 0 and at most %s, got %s", w.kind, maxTimeout, w.timeout)
	case w.kind != "delay" && w.key == "":
		return fmt.Errorf("a wait for %s needs a key", w.kind)
	}
	return nil
}

type noWaitsKey struct{}

// forbidWaits marks ctx as the context of a step that cannot suspend.
func forbidWaits(ctx context.Context, within string) context.Context {
	return context.WithValue(ctx, noWaitsKey{}, within)
}

// checkWaitAllowed rejects a wait in a step that cannot suspend.
func checkWaitAllowed(ctx context.Context, name string) error {
	if within, ok := ctx.Value(noWaitsKey{}).(string); ok {
		return fmt.Errorf("wait %s: not allowed within %s: wait before or after it", name, within)
	}
	return nil
}

// recordTimeout records the step of a timed-out wait as the failed step of the run.
func (r *run) recordTimeout(step string, out Outcome) {
	if out.TimedOut {
		r.setFailedStep(step)
	}
}

// park suspends the execution, or returns the outcome of a wait that ended at once. It retries after a broken
// connection. The wait number shows whether an attempt with a lost response was committed.
func (r *run) park(ctx context.Context, step string, w WaitFor, data json.RawMessage) (outcome []byte, err error) {
	backoff := newBackoff()
	for uncertain := false; ; uncertain = true {
		text := r.pendingVariables()
		err := r.withVariables(ctx, text, func(text json.RawMessage) (err error) {
			outcome, err = retryLocked(ctx, r.e,
				func(ctx context.Context) ([]byte, error) { return r.writeWait(ctx, step, w, data, text) })
			return err
		})
		switch {
		case err == nil:
			r.setStoredVariables(text)
			return outcome, nil
		case postgres.IsCode(err, "LK001"):
			if current, err := Get(ctx, r.e.pool, r.exec.ID); uncertain && err == nil && current.WaitNumber > r.exec.WaitNumber {
				return nil, nil
			}
			return nil, ErrStale
		case ctx.Err() != nil, !transient(err):
			return nil, err
		}
		r.e.warnUnavailable(ctx, err, "step", step)
		if !backoff.Wait(ctx) {
			return nil, context.Cause(ctx)
		}
	}
}

// waitInTx starts a wait in its own transaction, with the variables after it.
func (r *run) waitInTx(
	ctx context.Context, step string, w WaitFor, data, variables json.RawMessage,
) (outcome []byte, err error) {
	b := &pgx.Batch{}
	queueLockTimeout(b)
	b.Queue(`
		select lanekeeper.wait_agent_execution(
		  @id, @claim, @step, @kind, @key, make_interval(secs => @seconds), @data)`,
		postgres.Strict{
			"id": r.exec.ID, "claim": r.exec.Claim, "step": step, "kind": w.kind, "key": w.key,
			"seconds": w.timeout.Seconds(), "data": data,
		}).QueryRow(func(row pgx.Row) error { return row.Scan(&outcome) })
	r.queueVariables(b, variables)
	return outcome, r.e.pool.SendBatch(ctx, b).Close()
}

// waitWrite is the batched write that starts a wait.
type waitWrite struct {
	id, step, kind, key string
	claim               int64
	seconds             float64
	data                json.RawMessage
	variables           json.RawMessage // nil when the row has them
}

// batchedKinds are the kinds of waits that only an event or a time ends, so their writes can be batched.
var batchedKinds = []string{"event", "approval", "delay"}

// writeWait starts a wait in a batch, or in its own transaction if its kind or run needs one. It returns the outcome if
// the wait ended at once.
func (r *run) writeWait(
	ctx context.Context, step string, w WaitFor, data, variables json.RawMessage,
) (outcome []byte, err error) {
	single := func() ([]byte, error) { return r.waitInTx(ctx, step, w, data, variables) }
	// A run with a thread usually holds its lane, and batches skip runs that hold lanes.
	if !slices.Contains(batchedKinds, w.kind) || r.exec.ThreadID != nil {
		return single()
	}
	return r.e.batchers.waits.Do(ctx, waitWrite{
		id: r.exec.ID, step: step, kind: w.kind, key: w.key, claim: r.exec.Claim, seconds: w.timeout.Seconds(), data: data,
		variables: variables,
	}, single)
}

// waitBatch starts waits in one commit, each under its own claim. It skips executions that hold lanes, are locked or
// are stale. It also skips waits that may end at once. The batcher retries each skipped wait alone.
func (e *Engine) waitBatch(ctx context.Context, waits []waitWrite) ([]batch.Result[[]byte], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(waits)
	ids, claims, steps, kinds, keys := make([]string, n), make([]int64, n), make([]string, n),
		make([]string, n), make([]string, n)
	seconds, data, variables := make([]float64, n), make([]*string, n), make([]*string, n)
	for i, w := range waits {
		ids[i], claims[i], steps[i], kinds[i], keys[i], seconds[i] = w.id, w.claim, w.step, w.kind, w.key, w.seconds
		data[i], variables[i] = nullableJSON(w.data), nullableJSON(w.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select lanekeeper.wait_agent_executions(
		  @ids, @claims, @steps, @kinds, @keys, @seconds, (@data::text[])::jsonb[], (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": ids, "claims": claims, "steps": steps, "kinds": kinds, "keys": keys, "seconds": seconds, "data": data,
			"variables": variables,
		})
	if err != nil {
		return nil, fmt.Errorf("suspend %d executions: %w", n, err)
	}
	results, err := collectSkipped[[]byte](rows, n)
	if err != nil {
		return nil, fmt.Errorf("suspend %d executions: %w", n, err)
	}
	return results, nil
}
