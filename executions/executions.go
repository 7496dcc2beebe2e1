// Package executions runs durable functions. An execution of such a function survives the crash of its process.
//
// An execution is a row with a state: pending → running → waiting | completed | failed | timeout | cancelled. A worker
// claims the row and calls the Go function that is registered under the row's flow. The function does its work in
// steps, and each finished step has a checkpoint. After a crash another worker claims the row and calls the function
// from the beginning. Recorded steps return their checkpoints, so the function continues where it stopped. A flow is
// ordinary code with one rule: code whose result may differ between runs (time, ids, random numbers, other systems)
// belongs inside a step. See docs/executions.md and docs/code-changes.md.
//
// The four kinds of steps:
//
//   - Step: a function whose result or error is recorded. It may run again if the process dies before the checkpoint.
//   - Call: a Step with an effect on another system. An activity row records the intent before the call. After a crash
//     an idempotent call is repeated under its idempotency key. Any other call ends `unknown` and is not repeated.
//   - Phase: a Step that groups other steps under one activity row, which survives crashes.
//   - StepTx: a Step whose effect is in this database. Fence, effect and checkpoint are one transaction.
//
// Wait suspends the execution: the row becomes waiting, Wait returns ErrParked, and the flow must return that error.
// The execution then occupies no process until an event, the timer or a cancel ends the wait. If the flow ignores the
// error, every later step of the run fails, so no later step has an effect.
//
// External workers, in any language, run the flows "external" and "external:NAME". A worker locks an execution, records
// its steps and unlocks it (LockRun, RenewLocks, CheckpointRun, UnlockRun; over HTTP see docs/outside-workers.md). Its
// lock is a claim like any other, with a lease of its own.
//
// Safety: each claim has a number greater than all earlier claims, and every durable write has the number of its claim.
// The database rejects a write under an old number (SQLSTATE LK001, ErrStale here). So a process that was paused past
// its lease changes nothing of the execution when it continues. The activity log records the rejected writes. A claim
// lasts as long as its worker's lease: by default 30 seconds, renewed every 10.
//
// Only the row decides whether an execution is ready. A process that makes an execution ready polls the queue after its
// commit. One statement claims as many executions as the process has free workers, within the limits (Admission). With
// too few free workers, the process notifies other processes. In a caller's transaction, a River job carries the
// notification. Every process also polls every Options.SweepEvery (5 seconds), so a lost notification only causes a
// delay.
package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Errors that callers distinguish.
var (
	// ErrParked reports that the execution waits. The flow must return it.
	ErrParked = errors.New("execution parked: it continues when its wait ends")
	// ErrStale reports a write under a claim that is no longer live.
	ErrStale = activity.ErrStale
	// ErrLost is the cause of a run context that ended because the worker's lease ended.
	ErrLost = errors.New("claim lost: the worker's lease ended")
	// ErrCancelled is the cause of a run context that ended because of a cancel.
	ErrCancelled = errors.New("execution cancelled")
	// ErrChanged reports a checkpoint that does not fit the present code of its flow.
	ErrChanged = errors.New("the code changed under a running execution")
	// ErrNotFound reports an id without an execution.
	ErrNotFound = errors.New("no such execution")
	// ErrNotInExecution reports a step outside a running execution.
	ErrNotInExecution = errors.New("not inside an execution: pass the context of the flow to its steps")

	// ErrDraining is the cause of a run context that ended because the process shuts down.
	ErrDraining = errors.New("the process shuts down: another process continues the execution")
)

// Status is a state of an execution.
type Status string

// The states. The database enforces the transitions (SQLSTATE LK002).
const (
	Pending   Status = "pending"
	Running   Status = "running"
	Waiting   Status = "waiting"
	Completed Status = "completed"
	Failed    Status = "failed"
	Timeout   Status = "timeout"
	Cancelled Status = "cancelled"
)

// Statuses returns the names of all states.
func Statuses() []string {
	return []string{
		string(Pending), string(Running), string(Waiting), string(Completed), string(Failed), string(Timeout),
		string(Cancelled),
	}
}

// Ended reports whether a status is terminal.
func (s Status) Ended() bool {
	return s == Completed || s == Failed || s == Timeout || s == Cancelled
}

// Execution is one durable run: a row of agent_executions.
type Execution struct {
	ID            string          `json:"id"`
	TraceID       string          `json:"trace_id"`
	Surface       string          `json:"surface"`
	Agent         string          `json:"agent"`
	Flow          string          `json:"flow"`
	ParentID      *string         `json:"parent_id"`
	ThreadID      *string         `json:"thread_id"`
	Queue         string          `json:"queue"`
	Priority      int             `json:"priority"`
	Status        Status          `json:"status"`
	ClaimedBy     *string         `json:"claimed_by"`
	Claim         int64           `json:"claim"`
	Input         json.RawMessage `json:"input"`
	Variables     json.RawMessage `json:"variables"`
	WaitingFor    *string         `json:"waiting_for"`
	WaitingKey    *string         `json:"waiting_key"`
	WaitingUntil  *time.Time      `json:"waiting_until"`
	WaitingData   json.RawMessage `json:"waiting_data"`
	WaitNumber    int             `json:"wait_number"`
	Attempt       int             `json:"attempt"`
	ResultType    *string         `json:"result_type"`
	ResultSummary string          `json:"result_summary"`
	Result        json.RawMessage `json:"result"`
	ErrorMessage  *string         `json:"error_message"`
	FailedStep    *string         `json:"failed_step"`
	CancelledBy   *string         `json:"cancelled_by"`
	CancelReason  *string         `json:"cancel_reason"`
	DedupeKey     *string         `json:"dedupe_key"`
	OnLost        string          `json:"on_lost"`          // see Spec.OnLost
	MaxAttempts   int             `json:"max_attempts"`     // see Spec.MaxAttempts
	Progress      int             `json:"progress_seconds"` // see Spec.ProgressSeconds
	Inherits      bool            `json:"inherits"`         // may borrow the lanes of its waiting parent
	ForkedFrom    *string         `json:"forked_from"`      // source of the copied steps before ForkedStep
	ForkedStep    *string         `json:"forked_step"`
	FlowVersion   *int            `json:"flow_version"` // of a flow that is stored as data
	CreatedAt     time.Time       `json:"created_at"`
	StartedAt     *time.Time      `json:"started_at"`
	UpdatedAt     time.Time       `json:"updated_at"`
	CompletedAt   *time.Time      `json:"completed_at"`
}

// span is the trace span of the run.
func (x *Execution) span() trace.Span {
	s := trace.Span{TraceID: trace.ID(x.TraceID), ExecutionID: x.ID, Surface: trace.Surface(x.Surface), Agent: x.Agent}
	if x.ThreadID != nil {
		s.ThreadID = *x.ThreadID
	}
	return s
}

// columns lists the columns of an Execution, in the order of its fields.
const columns = `id::text, trace_id, surface, agent, flow, parent_id::text, thread_id, queue, priority, status,
	claimed_by::text, claim, input, variables, waiting_for, waiting_key, waiting_until, waiting_data, wait_number, attempt,
	result_type, result_summary, result, error_message, failed_step, cancelled_by, cancel_reason, dedupe_key, on_lost,
	max_attempts, progress_seconds, inherits, forked_from::text, forked_step, flow_version, created_at, started_at,
	updated_at, completed_at`

// Get reads one execution. It returns ErrNotFound for an unknown id.
func Get(ctx context.Context, db postgres.DB, id string) (Execution, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_executions where id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return Execution{}, fmt.Errorf("read execution: %w", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Execution{}, notFoundError(ctx, db, id)
	case postgres.IsCode(err, "22P02", "22021"): // the id is not a UUID, or not text
		return Execution{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
	case err != nil:
		return Execution{}, fmt.Errorf("read execution: %w", err)
	}
	return x, nil
}

// notFoundError returns ErrNotFound. If retention has removed executions and this id is old enough, the text says that
// retention may have removed it.
func notFoundError(ctx context.Context, db postgres.DB, id string) error {
	rows, err := db.Query(ctx, `
		select coalesce(': it keeps ended executions for ' || r.keep, '')
		  from agent_retention r
		  join agent_retention_passes p on p.kind = r.kind
		 where r.kind = 'executions' and p.removed > 0
		   and (r.keep is null or @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - r.keep))`,
		postgres.Strict{"id": id})
	detail, err := postgres.CollectOne(rows, err, ErrNotFound, "execution "+id, pgx.RowTo[string])
	if err != nil {
		return err
	}
	return fmt.Errorf("execution %s: %w; retention may have removed it%s", id, ErrNotFound, detail)
}

// Checkpoint is the recorded result of one step.
type Checkpoint struct {
	Step        string          `json:"step"`
	Claim       int64           `json:"claim"`
	Fingerprint string          `json:"-"`
	Failed      bool            `json:"failed"`
	Output      json.RawMessage `json:"output"`
	CreatedAt   time.Time       `json:"created_at"`
}

// Checkpoints reads the checkpoints of an execution, oldest first.
func Checkpoints(ctx context.Context, db postgres.DB, id string) ([]Checkpoint, error) {
	rows, err := db.Query(ctx, `
		select step, claim, fingerprint, failed, output, created_at from agent_checkpoints
		 where execution_id = @id order by created_at, step`, postgres.Strict{"id": id})
	return postgres.Collect(rows, err, "read checkpoints", pgx.RowToStructByPos[Checkpoint])
}

// LatestCheckpoint reads the latest recorded step of an execution; nil for none.
func LatestCheckpoint(ctx context.Context, db postgres.DB, id string) (*Checkpoint, error) {
	rows, err := db.Query(ctx, `
		select step, claim, fingerprint, failed, output, created_at from agent_checkpoints
		 where execution_id = @id order by created_at desc, step desc limit 1`, postgres.Strict{"id": id})
	found, err := postgres.Collect(rows, err, "read latest checkpoint", pgx.RowToAddrOfStructByPos[Checkpoint])
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil
}

// IsControl reports whether an error interrupts a run (because it waits, was stopped or was released) and is not a
// result of its work. A flow must return such an error unchanged.
func IsControl(err error) bool {
	for _, control := range []error{ErrParked, ErrLost, ErrStale, ErrCancelled, ErrDraining, context.Canceled} {
		if errors.Is(err, control) {
			return true
		}
	}
	return false
}
