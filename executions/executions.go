// Package executions runs durable functions: runs that survive the death of their process.
//
// An execution is a row with a state machine (pending → running → waiting | completed | failed | timeout
// | cancelled). A worker claims the row and calls the Go function registered under the row's flow. The
// function does its work in steps; each finished step is a checkpoint, and when the run is claimed again
// after a crash the function starts from the top, gets the recorded results back and goes on where it
// stopped. So a flow is ordinary code that keeps one rule: whatever differs from run to run (time, ids,
// randomness, the world) happens inside a step. See docs/executions.md and docs/code-changes.md.
//
// The four kinds of steps:
//
//   - Step: a function whose result, or error, is recorded, at the latest with what the execution does next. May run
//     again if the process dies before.
//   - Call: a Step with an effect on the world. Its intent is an activity row before it acts. When the
//     process dies in it, an idempotent call is made again under the same idempotency key; any other ends
//     `unknown` and is never repeated silently.
//   - Phase: a Step that groups others under one activity row, which survives crashes.
//   - StepTx: a Step whose effect is in this database: fence, effect and checkpoint are one transaction.
//
// Wait parks: the row goes to waiting, the function unwinds with ErrParked, and no process is needed
// until the event, the timer or a cancel ends the wait. Whoever runs a function must return that error;
// after a park every further step fails, so code that ignores it does no harm.
//
// The runs of the flows "external" and "external:NAME" are not called here: a worker outside, in any language,
// locks one, records its steps and gives it back (LockRun, BeatRuns, CheckpointRun, UnlockRun; over HTTP see
// docs/outside-workers.md). Its lock is a claim like any other, with a lease of its own.
//
// Why this is safe: a claim has a number that only grows, and every durable write carries it. The
// database refuses a write under an old number (SQLSTATE LK001, ErrStale here), so a process that was
// paused past its lease can do nothing when it wakes; what it tried is noted in the activity log. Claims
// live as long as their worker's lease, 30 seconds renewed every 10.
//
// The row is the truth about what is ready. A process that made something ready looks at the queue after its
// commit and claims as many executions as it has free workers, in one statement, within the limits (Admission);
// where it has too few, it tells other processes. In a transaction of the caller's River carries the hint. Every
// process also looks by itself every 5 seconds, after a sweep, which covers whatever hint was lost.
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

// Errors that callers tell apart.
var (
	// ErrParked unwinds a durable function that has begun to wait. Return it.
	ErrParked = errors.New("execution parked: it goes on when its wait ends")
	// ErrStale reports a write under a claim that is no longer live.
	ErrStale = activity.ErrStale
	// ErrLost is the cause with which a run's context ends when its worker's lease has ended.
	ErrLost = errors.New("claim lost: the worker's lease ended")
	// ErrCancelled is the cause with which a run's context ends when the execution was cancelled.
	ErrCancelled = errors.New("execution cancelled")
	// ErrChanged reports code that changed under a running execution.
	ErrChanged = errors.New("the code changed under a running execution")
	// ErrNotFound reports an id without an execution.
	ErrNotFound = errors.New("no such execution")
	// ErrOutside reports a step that is not inside a running execution.
	ErrOutside = errors.New("not inside an execution: steps need the context that a flow is called with")

	// ErrDraining is the cause with which a run is handed back because its process shuts down.
	ErrDraining = errors.New("the process shuts down: the execution goes on elsewhere")
)

// Status is a state of an execution.
type Status string

// The states. Which may follow which is enforced by the database (SQLSTATE LK002).
const (
	Pending   Status = "pending"
	Running   Status = "running"
	Waiting   Status = "waiting"
	Completed Status = "completed"
	Failed    Status = "failed"
	Timeout   Status = "timeout"
	Cancelled Status = "cancelled"
)

// Ended reports whether a status is terminal.
func (s Status) Ended() bool {
	return s == Completed || s == Failed || s == Timeout || s == Cancelled
}

// Execution is one durable run, as its row says.
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
	OnLost        string          `json:"on_lost"`          // what the loss of its worker means
	MaxAttempts   int             `json:"max_attempts"`     // workers lost without a checkpoint between
	Progress      int             `json:"progress_seconds"` // 0 is no bound
	Inherits      bool            `json:"inherits"`         // may borrow the lanes of the parent that waits for it
	ForkedFrom    *string         `json:"forked_from"`      // the execution whose steps, up to ForkedStep, it began with
	ForkedStep    *string         `json:"forked_step"`
	FlowVersion   *int            `json:"flow_version"` // of a flow that is written down as data
	CreatedAt     time.Time       `json:"created_at"`
	StartedAt     *time.Time      `json:"started_at"`
	UpdatedAt     time.Time       `json:"updated_at"`
	CompletedAt   *time.Time      `json:"completed_at"`
}

// span is where the work of a run is, for what it calls, writes and logs.
func (x *Execution) span() trace.Span {
	s := trace.Span{TraceID: trace.ID(x.TraceID), ExecutionID: x.ID, Surface: trace.Surface(x.Surface), Agent: x.Agent}
	if x.ThreadID != nil {
		s.ThreadID = *x.ThreadID
	}
	return s
}

// columns lists what Execution scans, in its order.
const columns = `id::text, trace_id, surface, agent, flow, parent_id::text, thread_id, queue, priority, status,
	claimed_by::text, claim, input, variables, waiting_for, waiting_key, waiting_until, waiting_data, wait_number, attempt,
	result_type, result_summary, result, error_message, failed_step, cancelled_by, cancel_reason, dedupe_key, on_lost,
	max_attempts, progress_seconds, inherits, forked_from::text, forked_step, flow_version, created_at, started_at, updated_at, completed_at`

// Get reads one execution; ErrNotFound when there is none.
func Get(ctx context.Context, db postgres.DB, id string) (Execution, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_executions where id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return Execution{}, fmt.Errorf("read execution: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Execution{}, missing(ctx, db, id)
	case postgres.IsCode(err, "22P02"):
		return Execution{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
	case err != nil:
		return Execution{}, fmt.Errorf("read execution: %w", err)
	}
	return got, nil
}

// missing says that there is no such execution, and that retention may have taken it away: it has taken some, and
// this one's id is as old.
func missing(ctx context.Context, db postgres.DB, id string) error {
	rows, err := db.Query(ctx, `
		select coalesce(': it keeps what has ended for ' || r.keep, '') from agent_retention r join agent_retention_passes p on p.kind = r.kind
		 where r.kind = 'executions' and p.removed > 0 and (r.keep is null or @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - r.keep))`,
		postgres.Strict{"id": id})
	if err != nil {
		return fmt.Errorf("read execution: %w", err)
	}
	keeps, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("execution %s: %w", id, ErrNotFound)
	case err != nil:
		return fmt.Errorf("read execution: %w", err)
	}
	return fmt.Errorf("execution %s: %w; retention may have taken it away%s", id, ErrNotFound, keeps)
}

// Filter narrows a listing. Zero values do not narrow; Limit defaults to 50 and is at most 1000. Before
// is the id after which the listing goes on, newest first.
type Filter struct {
	Status, Surface, Flow, Agent, Before string
	TraceIDs                             []trace.ID // what [trace.ParseAny] makes of one id
	Limit                                int
}

// List reads executions, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Execution, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_executions
		 where (@status = '' or status = @status) and (@surface = '' or surface = @surface)
		   and (@flow = '' or flow = @flow) and (@agent = '' or agent = @agent)
		   and (@trace_ids::text[] is null or trace_id = any (@trace_ids))
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		postgres.Strict{
			"status": f.Status, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "trace_ids": f.TraceIDs,
			"before": f.Before, "limit": min(f.Limit, 1000),
		})
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Execution])
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	return got, nil
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

// Checkpoints reads what an execution has recorded, in the order in which it was.
func Checkpoints(ctx context.Context, db postgres.DB, id string) ([]Checkpoint, error) {
	rows, err := db.Query(ctx, `
		select step, claim, fingerprint, failed, output, created_at from agent_checkpoints
		 where execution_id = @id order by created_at, step`, postgres.Strict{"id": id})
	if err != nil {
		return nil, fmt.Errorf("read checkpoints: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Checkpoint])
	if err != nil {
		return nil, fmt.Errorf("read checkpoints: %w", err)
	}
	return got, nil
}
