package executions

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrRunning reports a replay of a running execution.
var ErrRunning = errors.New("the execution is running: replay it when it waits or has ended")

// ErrUnknownFlow reports a flow that this program does not have, such as the flow of an external worker.
var ErrUnknownFlow = errors.New("this program does not have the flow")

// Replayed is the result of a replay.
type Replayed struct {
	ExecutionID string `json:"execution_id"`
	TraceID     string `json:"trace_id"`
	Flow        string `json:"flow"`
	Status      Status `json:"status"` // of the recorded execution
	Steps       int    `json:"steps"`  // number of recorded steps, including inner ones, that the code reached
	// Digest covers the recorded steps, outputs, status and result. ReplayDigest covers those that the replay reached.
	Digest       string `json:"digest"`
	ReplayDigest string `json:"replay_digest"`
	// EndedAt is the step where the record ends before the function does: the execution waits there, or was stopped.
	EndedAt    string      `json:"ended_at"`
	Equal      bool        `json:"equal"`
	Divergence *Divergence `json:"divergence"` // null if Equal

	changed string // error of the step with another input; empty for none
	failure string // error of code that failed between steps; empty for none
}

// Kinds of divergence.
const (
	DivergedUnrecorded = "unrecorded" // the code takes a step without a checkpoint
	DivergedOrder      = "order"      // the code reaches a step before an earlier one
	DivergedInput      = "input"      // the code reaches a step with another input or result type
	DivergedUnreached  = "unreached"  // the code ends before a recorded step
	DivergedResult     = "result"     // the code ends with another result
	DivergedDatabase   = "database"   // the code queries the database outside steps
)

// Divergence is the first difference between a replay and its record.
type Divergence struct {
	Step    string `json:"step"`
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

// maxReplays bounds the combinations of lane answers that a replay tries.
const maxReplays = 32

// Replay calls the flow of an execution with its checkpoints and without effects. A step without a checkpoint ends the
// replay. Replay acquires no lanes and writes nothing. Queries through internal/postgres fail under the flow's context,
// but Replay cannot prevent effects by other means; see docs/executions.md. If the record ends in a wait or an external
// stop, Replay ends there too. A step with inner steps returns its checkpoint, and the inner steps count as reached.
//
// Errors: ErrNotFound, ErrRunning, ErrUnknownFlow. A difference is not an error; see Replayed.Divergence.
func (e *Engine) Replay(ctx context.Context, id string) (Replayed, error) {
	x, err := Get(ctx, e.pool, id)
	if err != nil {
		return Replayed{}, err
	}
	if x.Status == Running {
		return Replayed{}, fmt.Errorf("replay execution %s: %w", x.ID, ErrRunning)
	}
	checkpoints, err := Checkpoints(ctx, e.pool, x.ID)
	if err != nil {
		return Replayed{}, err
	}
	var waitingIn *string
	if x.Status == Waiting {
		if waitingIn, err = waitingStep(ctx, e.pool, x.ID); err != nil {
			return Replayed{}, err
		}
	}
	result, err := e.replayCheckpoints(ctx, x, checkpoints, waitingIn)
	if err != nil {
		return Replayed{}, fmt.Errorf("replay execution %s: %w", x.ID, err)
	}
	return result, nil
}

// waitingStep reads the step in which an execution waits.
func waitingStep(ctx context.Context, db postgres.DB, id string) (step *string, err error) {
	err = db.QueryRow(ctx, `select waiting_step from agent_executions where id = @id`,
		postgres.Strict{"id": id}).Scan(&step)
	if err != nil {
		return nil, fmt.Errorf("read execution %s: %w", id, err)
	}
	return step, nil
}

// replayCheckpoints replays a record. The record does not say which lanes were busy. So the first replay assumes that
// all lanes were free. After a divergence, further replays assume that some were busy.
func (e *Engine) replayCheckpoints(
	ctx context.Context, x Execution, checkpoints []Checkpoint, waitingStep *string,
) (Replayed, error) {
	flow, err := e.flow(ctx, x.Flow)
	switch {
	case err != nil:
		return Replayed{}, fmt.Errorf("find flow %s: %w", x.Flow, err)
	case flow == nil:
		return Replayed{}, fmt.Errorf("%s: %w", x.Flow, ErrUnknownFlow)
	}
	closed, err := closedPool(ctx, e.pool)
	if err != nil {
		return Replayed{}, err
	}
	engine := &Engine{pool: closed, opts: e.opts, log: slog.New(slog.DiscardHandler), flows: e.flows, fallback: e.fallback}
	var firstResult *Replayed
	var busy []bool
	for range maxReplays {
		record := newReplayRecord(x, checkpoints, waitingStep, busy)
		result := engine.replayOnce(ctx, x, flow, record)
		if ctx.Err() != nil {
			return Replayed{}, context.Cause(ctx)
		}
		if result.Divergence == nil {
			return result, nil
		}
		if firstResult == nil {
			firstResult = &result
		}
		busy = slices.Clone(record.laneAnswers)
		for len(busy) > 0 && busy[len(busy)-1] {
			busy = busy[:len(busy)-1]
		}
		if len(busy) == 0 {
			break
		}
		busy[len(busy)-1] = true
	}
	return *firstResult, nil
}

// closedPool returns a closed pool for the same database, so a replay gets no connections.
func closedPool(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Pool, error) {
	config := pool.Config()
	config.MinConns, config.MinIdleConns = 0, 0
	closed, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("prepare replay: %w", err)
	}
	closed.Close()
	return closed, nil
}

// replayOnce calls the function once and compares it with the record.
func (e *Engine) replayOnce(ctx context.Context, x Execution, flow Func, record *replayRecord) Replayed {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &run{
		e: e, exec: x, ctx: ctx, cancel: cancel, replay: record,
		occurrences: map[string]int{}, latestStep: map[string]int{}, checkpoints: record.checkpoints,
		interrupted: map[string]bool{},
	}
	sealed, seal := postgres.WithoutDatabase(r.flowContext(ctx))
	result, err := r.callFlow(sealed, flow)
	replayed := Replayed{
		ExecutionID: x.ID, TraceID: x.TraceID, Flow: x.Flow, Status: x.Status,
		Digest: digest(record.checkpointsByTime, record.counts, string(x.Status), recordedEnd(x)),
	}
	if cause := r.stopCause(); errors.Is(cause, ErrChanged) {
		replayed.changed = cause.Error()
	}
	stepErr, isStepErr := errors.AsType[*StepError](err)
	if err != nil && record.divergence == nil && record.endedAt == "" && !seal.Tried() &&
		(!isStepErr || stepErr.Step == "") {
		replayed.failure = err.Error()
	}
	status, end := r.compareEnd(x, record, result, err, seal.Tried())
	replayed.EndedAt, replayed.Divergence = record.endedAt, record.divergence
	replayed.ReplayDigest = digest(record.checkpointsByTime, record.wasReached, string(status), end)
	for _, c := range record.checkpointsByTime {
		if record.wasReached(c) {
			replayed.Steps++
		}
	}
	replayed.Equal = replayed.Divergence == nil && replayed.Digest == replayed.ReplayDigest
	return replayed
}

// endState is the end of an execution, for its digest.
type endState struct {
	Summary string `json:"summary"`
	Result  any    `json:"result"`
	Error   string `json:"error"`
}

func recordedEnd(x Execution) endState {
	end := endState{Summary: x.ResultSummary, Result: comparableJSON(x.Result)}
	if x.ErrorMessage != nil {
		end.Error = *x.ErrorMessage
	}
	return end
}

// compareEnd records how the end of a replay differs from the record. It returns the status and end of the replay.
func (r *run) compareEnd(x Execution, record *replayRecord, result Result, err error, queried bool) (Status, endState) {
	stopErr := r.stopCause()
	switch {
	case record.divergence != nil:
		return "", endState{}
	case queried:
		record.diverge(r.lastStep(record), DivergedDatabase, "the code queries the database outside a step, so the record "+
			"does not determine its result")
		return "", endState{}
	case record.endedAt != "":
		record.divergeUnreached("")
		return x.Status, recordedEnd(x)
	}
	if stopErr != nil { // such as ErrChanged
		err = stopErr
	}
	status := Completed
	switch {
	case errors.Is(err, ErrTimedOut):
		status = Timeout
	case err != nil:
		status = Failed
	}
	var end endState
	if err != nil {
		end.Error = postgres.Text(err.Error())
	}
	encodeEnd := encode
	if x.Status == Failed { // older results may be larger than the bound of today
		encodeEnd = encodeResult
	}
	value, _, encodeErr := encodeEnd(result.Value)
	if encodeErr != nil {
		status, end.Error = Failed, fmt.Errorf("encode result: %w", encodeErr).Error()
	} else {
		end.Summary, end.Result = postgres.Text(result.Summary), comparableJSON(value)
	}
	recorded := recordedEnd(x)
	same := status == x.Status && digest(nil, nil, "", end) == digest(nil, nil, "", recorded)
	switch {
	case same:
		record.divergeUnreached("")
	case errors.Is(stopErr, ErrChanged):
		record.diverge(r.lastFailed(), DivergedInput, stopErr.Error())
	case record.divergeUnreached(end.Error):
	case record.openEnded && record.waitingStep == nil: // stopped after its last step
		return x.Status, recordedEnd(x)
	case record.openEnded:
		record.diverge(*record.waitingStep, DivergedResult, fmt.Sprintf("the code ends as %s where the record waits", status))
	case status != x.Status:
		record.diverge(r.lastStep(record), DivergedResult, fmt.Sprintf("the code ends as %s, the record as %s%s", status,
			x.Status, errorSuffix(end.Error)))
	default:
		record.diverge(r.lastStep(record), DivergedResult, fmt.Sprintf("the code ends with %s, the record with %s",
			truncated(end), truncated(recorded)))
	}
	return status, end
}

func errorSuffix(message string) string {
	if message == "" {
		return ""
	}
	return ": " + message
}

// truncated formats an end state for a message, in at most 300 bytes.
func truncated(end endState) string {
	text, err := json.Marshal(end)
	if err != nil {
		return "an end that cannot be encoded"
	}
	return string(bytes.ToValidUTF8(text[:min(len(text), 300)], nil))
}

// lastStep returns the last step that a replay reached.
func (r *run) lastStep(record *replayRecord) string {
	record.mu.Lock()
	defer record.mu.Unlock()
	return record.last
}

// lastFailed returns the step that failed last.
func (r *run) lastFailed() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failedStep
}

// digest returns a hash of steps, outputs, status and end. counts selects the steps. Steps are sorted by key, because
// parallel branches have no order.
func digest(checkpoints []Checkpoint, counts func(Checkpoint) bool, status string, end endState) string {
	sum := sha256.New()
	write := func(v any) {
		text, err := json.Marshal(v)
		if err != nil {
			text = []byte(err.Error())
		}
		sum.Write(append(text, '\n'))
	}
	sorted := slices.SortedFunc(slices.Values(checkpoints),
		func(a, b Checkpoint) int { return strings.Compare(a.Step, b.Step) })
	for _, c := range sorted {
		if counts(c) {
			write([]any{c.Step, c.Failed, c.Fingerprint, comparableJSON(c.Output)})
		}
	}
	write(status)
	write(end)
	return hex.EncodeToString(sum.Sum(nil))
}

// comparableJSON decodes JSON to a form in which equal values are equal: numbers by value, members by name.
func comparableJSON(text json.RawMessage) any {
	if len(text) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return string(text)
	}
	return normalizeNumbers(v)
}

func normalizeNumbers(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, ok := new(big.Rat).SetString(v.String()); ok {
			return "number " + n.RatString()
		}
	case []any:
		for i := range v {
			v[i] = normalizeNumbers(v[i])
		}
	case map[string]any:
		for name, member := range v {
			v[name] = normalizeNumbers(member)
		}
	}
	return v
}
