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

// ErrRunning reports a replay of an execution that this process is running at this moment.
var ErrRunning = errors.New("the execution is being run here: replay it when it waits or has ended")

// ErrUnknownFlow reports a flow that this program does not have; those of workers outside are among them.
var ErrUnknownFlow = errors.New("this program does not have the flow")

// Replayed is how a replay went.
type Replayed struct {
	ExecutionID string `json:"execution_id"`
	TraceID     string `json:"trace_id"`
	Flow        string `json:"flow"`
	Status      Status `json:"status"` // of the record
	Steps       int    `json:"steps"`  // recorded steps that the code came to, and those within them
	// Digest is over the record's steps, outputs, status and result; ReplayDigest is over what the replay came to.
	Digest       string `json:"digest"`
	ReplayDigest string `json:"replay_digest"`
	// EndedAt is the step with which the record ends although the function would go on: it waits there, or was stopped.
	EndedAt    string      `json:"ended_at"`
	Equal      bool        `json:"equal"`
	Divergence *Divergence `json:"divergence"` // null when all is equal

	changed string // the step that has a record for another input, as the error of it says; empty for none
	failure string // the error of code that failed between steps, so that it does so however often it is called; empty for none
}

// The ways in which a replay can differ from its record.
const (
	DivergedUnrecorded = "unrecorded" // the code takes a step that the record does not have
	DivergedOrder      = "order"      // the code comes to a step before one that was recorded earlier
	DivergedInput      = "input"      // the code comes to a step with another input, or reads its result as another type
	DivergedUnreached  = "unreached"  // the code ends without a step that the record has
	DivergedResult     = "result"     // the code ends otherwise
	DivergedDatabase   = "database"   // the code asks the database outside of steps
)

// Divergence says where a replay differs from its record.
type Divergence struct {
	Step    string `json:"step"`
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

// maxReplays bounds how many answers to the question whether a lane is free are tried.
const maxReplays = 32

// Replay calls the flow of an execution with what the execution has recorded, and with no way to do anything new: a
// step that is not recorded ends it, lanes are not taken, nothing is written, and a database handle of package
// internal/postgres answers nothing under the flow's context. What the code does in place of a step by other means is
// its own affair; see docs/executions.md. A record that ends in a wait, or that was stopped from outside, is replayed
// to there. A step that groups others is taken from its record, and those within it with it.
//
// The error is ErrNotFound, ErrRunning, or that the flow is not known here. That the replay differs is no error: see
// Replayed.Divergence.
func (e *Engine) Replay(ctx context.Context, id string) (Replayed, error) {
	x, err := Get(ctx, e.pool, id)
	if err != nil {
		return Replayed{}, err
	}
	e.mu.Lock()
	running := x.Status == Running && e.runs[x.ID] != nil
	e.mu.Unlock()
	if running {
		return Replayed{}, fmt.Errorf("replay execution %s: %w", x.ID, ErrRunning)
	}
	points, err := Checkpoints(ctx, e.pool, x.ID)
	if err != nil {
		return Replayed{}, err
	}
	var waitsIn *string
	if x.Status == Waiting {
		if waitsIn, err = waitingStep(ctx, e.pool, x.ID); err != nil {
			return Replayed{}, err
		}
	}
	got, err := e.rehearse(ctx, x, points, waitsIn)
	if err != nil {
		return Replayed{}, fmt.Errorf("replay execution %s: %w", x.ID, err)
	}
	return got, nil
}

// waitingStep is the step in which an execution waits.
func waitingStep(ctx context.Context, db postgres.DB, id string) (step *string, err error) {
	err = db.QueryRow(ctx, `select waiting_step from agent_executions where id = @id`, postgres.Strict{"id": id}).Scan(&step)
	if err != nil {
		return nil, fmt.Errorf("read execution %s: %w", id, err)
	}
	return step, nil
}

// rehearse replays a record. Whether a lane was free is not recorded, so where the code asks, "yes" is tried first, and
// "no" where that leads to a difference.
func (e *Engine) rehearse(ctx context.Context, x Execution, points []Checkpoint, waitsIn *string) (Replayed, error) {
	flow, err := e.flow(ctx, x.Flow)
	switch {
	case err != nil:
		return Replayed{}, fmt.Errorf("find flow %s: %w", x.Flow, err)
	case flow == nil:
		return Replayed{}, fmt.Errorf("%s: %w", x.Flow, ErrUnknownFlow)
	}
	nowhere, err := unreachable(ctx, e.pool)
	if err != nil {
		return Replayed{}, err
	}
	silent := &Engine{pool: nowhere, opts: e.opts, log: slog.New(slog.DiscardHandler), flows: e.flows, fallback: e.fallback}
	var first *Replayed
	var busy []bool
	for range maxReplays {
		p := newReplaying(x, points, waitsIn, busy)
		got := silent.replayOnce(ctx, x, flow, p)
		if ctx.Err() != nil {
			return Replayed{}, context.Cause(ctx)
		}
		if got.Divergence == nil {
			return got, nil
		}
		if first == nil {
			first = &got
		}
		busy = slices.Clone(p.answered)
		for len(busy) > 0 && busy[len(busy)-1] {
			busy = busy[:len(busy)-1]
		}
		if len(busy) == 0 {
			break
		}
		busy[len(busy)-1] = true
	}
	return *first, nil
}

// unreachable is a pool on the same database that never gives a connection: what a replay's run has in place of one.
func unreachable(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Pool, error) {
	config := pool.Config()
	config.MinConns, config.MinIdleConns = 0, 0
	nowhere, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("prepare replay: %w", err)
	}
	nowhere.Close()
	return nowhere, nil
}

// replayOnce calls the function once and compares.
func (e *Engine) replayOnce(ctx context.Context, x Execution, flow Func, p *replaying) Replayed {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &run{
		e: e, exec: x, life: ctx, cancel: cancel, replay: p,
		seen: map[string]int{}, latest: map[string]int{}, checkpoints: p.points, interrupted: map[string]bool{},
	}
	sealed, seal := postgres.Sealed(r.within(ctx))
	result, err := r.call(sealed, flow)
	got := Replayed{
		ExecutionID: x.ID, TraceID: x.TraceID, Flow: x.Flow, Status: x.Status,
		Digest: digest(p.all, p.counts, string(x.Status), recordedEnd(x)),
	}
	if poison := r.poisoned(); errors.Is(poison, ErrChanged) {
		got.changed = poison.Error()
	}
	if step, of := errors.AsType[*StepError](err); err != nil && p.divergence == nil && p.endedAt == "" && !seal.Tried() && (!of || step.Step == "") {
		got.failure = err.Error()
	}
	status, end := r.judge(x, p, result, err, seal.Tried())
	got.EndedAt, got.Divergence = p.endedAt, p.divergence
	got.ReplayDigest = digest(p.all, p.came, string(status), end)
	for _, c := range p.all {
		if p.came(c) {
			got.Steps++
		}
	}
	got.Equal = got.Divergence == nil && got.Digest == got.ReplayDigest
	return got
}

// ending is what an execution ended with, for its digest.
type ending struct {
	Summary string `json:"summary"`
	Result  any    `json:"result"`
	Error   string `json:"error"`
}

func recordedEnd(x Execution) ending {
	end := ending{Summary: x.ResultSummary, Result: canonicalJSON(x.Result)}
	if x.ErrorMessage != nil {
		end.Error = *x.ErrorMessage
	}
	return end
}

// judge notes how the end of a replay differs from that of the record, and returns the status and the end that it
// came to.
func (r *run) judge(x Execution, p *replaying, result Result, err error, asked bool) (Status, ending) {
	poison := r.poisoned()
	switch {
	case p.divergence != nil:
		return "", ending{}
	case asked:
		p.diverge(r.lastStep(p), DivergedDatabase, "the code asks the database outside of a step, so what it does cannot be told from the record")
		return "", ending{}
	case p.endedAt != "":
		p.unreached("")
		return x.Status, recordedEnd(x)
	}
	if poison != nil { // of ErrChanged
		err = poison
	}
	status := Completed
	switch {
	case errors.Is(err, ErrTimedOut):
		status = Timeout
	case err != nil:
		status = Failed
	}
	var end ending
	if err != nil {
		end.Error = postgres.Text(err.Error())
	}
	value, _, wrong := encode(result.Value)
	if wrong != nil {
		status, end.Error = Failed, fmt.Errorf("encode result: %w", wrong).Error()
	} else {
		end.Summary, end.Result = postgres.Text(result.Summary), canonicalJSON(value)
	}
	was := recordedEnd(x)
	same := status == x.Status && digest(nil, nil, "", end) == digest(nil, nil, "", was)
	switch {
	case same:
		p.unreached("")
	case errors.Is(poison, ErrChanged):
		p.diverge(r.lastFailed(), DivergedInput, poison.Error())
	case p.unreached(end.Error):
	case p.open && p.waitsIn == nil: // stopped after its last step
		return x.Status, recordedEnd(x)
	case p.open:
		p.diverge(*p.waitsIn, DivergedResult, fmt.Sprintf("the code ends as %s where the record waits", status))
	case status != x.Status:
		p.diverge(r.lastStep(p), DivergedResult, fmt.Sprintf("the code ends as %s, the record as %s%s", status, x.Status, because(end.Error)))
	default:
		p.diverge(r.lastStep(p), DivergedResult, fmt.Sprintf("the code ends with %s, the record with %s", clipped(end), clipped(was)))
	}
	return status, end
}

func because(message string) string {
	if message == "" {
		return ""
	}
	return ": " + message
}

// clipped shows an end.
func clipped(end ending) string {
	text, err := json.Marshal(end)
	if err != nil {
		return "what cannot be shown"
	}
	return string(bytes.ToValidUTF8(text[:min(len(text), 300)], nil))
}

// lastStep is the step that a replay came to last.
func (r *run) lastStep(p *replaying) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

// lastFailed is the step that was noted as failed last.
func (r *run) lastFailed() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failedStep
}

// digest identifies steps, outputs, status and result. Steps go by their keys, because those of parallel branches
// have no order.
func digest(points []Checkpoint, counts func(Checkpoint) bool, status string, end ending) string {
	sum := sha256.New()
	write := func(v any) {
		text, err := json.Marshal(v)
		if err != nil {
			text = []byte(err.Error())
		}
		sum.Write(append(text, '\n'))
	}
	sorted := slices.SortedFunc(slices.Values(points), func(a, b Checkpoint) int { return strings.Compare(a.Step, b.Step) })
	for _, c := range sorted {
		if counts(c) {
			write([]any{c.Step, c.Failed, c.Fingerprint, canonicalJSON(c.Output)})
		}
	}
	write(status)
	write(end)
	return hex.EncodeToString(sum.Sum(nil))
}

// canonicalJSON is a JSON value in one form, however it was written: numbers by their value, members by their names.
func canonicalJSON(text json.RawMessage) any {
	if len(text) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return string(text)
	}
	return plainNumbers(v)
}

func plainNumbers(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, ok := new(big.Rat).SetString(v.String()); ok {
			return "number " + n.RatString()
		}
	case []any:
		for i := range v {
			v[i] = plainNumbers(v[i])
		}
	case map[string]any:
		for name, member := range v {
			v[name] = plainNumbers(member)
		}
	}
	return v
}
