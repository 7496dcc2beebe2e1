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
// locks one, records its steps and gives it back (LockRun, RenewLocks, CheckpointRun, UnlockRun; over HTTP see
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
	"github.com/lanekeeper/lanekeeper/internal/redact"
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
	// ErrNotInExecution reports a step that is not inside a running execution.
	ErrNotInExecution = errors.New("not inside an execution: steps need the context that a flow is called with")

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
		return Execution{}, notFoundError(ctx, db, id)
	case postgres.IsCode(err, "22P02"):
		return Execution{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
	case err != nil:
		return Execution{}, fmt.Errorf("read execution: %w", err)
	}
	return got, nil
}

// notFoundError says that there is no such execution, and that retention may have taken it away: it has taken some, and
// this one's id is as old.
func notFoundError(ctx context.Context, db postgres.DB, id string) error {
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

// StatusCount is a row of the view agent_executions_by_status: how many executions are in a state that is not terminal,
// and for how long they have been there on average.
type StatusCount struct {
	Status        Status  `json:"status"`
	Count         int64   `json:"count"`
	AvgAgeSeconds float64 `json:"avg_age_seconds"`
}

// CountByStatus reads how many executions are pending, running and waiting.
func CountByStatus(ctx context.Context, db postgres.DB) ([]StatusCount, error) {
	rows, err := db.Query(ctx, `
		select status, count, avg_age_seconds::float8 from agent_executions_by_status order by status`)
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[StatusCount])
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	return got, nil
}

// WaitingRow is an execution that waits, as the views agent_executions_waiting and agent_executions_stuck show it.
type WaitingRow struct {
	ID           string          `json:"id"`
	TraceID      string          `json:"trace_id"`
	Surface      string          `json:"surface"`
	Agent        string          `json:"agent"`
	Flow         string          `json:"flow"`
	WaitingFor   string          `json:"waiting_for"`
	WaitingKey   string          `json:"waiting_key"`
	WaitingUntil time.Time       `json:"waiting_until"`
	WaitingData  json.RawMessage `json:"waiting_data"`
	Waited       float64         `json:"waited_seconds"`
}

// Redacted is the row as it may be shown; see [Execution.Redacted].
func (w WaitingRow) Redacted() WaitingRow {
	w.WaitingData = redactValue(w.WaitingData)
	return w
}

// ListWaiting reads what waits, the nearest deadline first; at most 500. kind narrows to one kind of wait, and stuck
// to what the deadline has passed of and nobody has touched for an hour.
func ListWaiting(ctx context.Context, db postgres.DB, kind string, stuck bool, limit int) ([]WaitingRow, error) {
	rows, err := db.Query(ctx, `
		select w.id::text, w.trace_id, w.surface, w.agent, w.flow, coalesce(w.waiting_for, ''), coalesce(w.waiting_key, ''), w.waiting_until,
		       w.waiting_data, extract(epoch from w.waiting_time)::float8
		  from agent_executions_waiting w
		 where (@kind = '' or w.waiting_for = @kind) and (not @stuck or w.id in (select s.id from agent_executions_stuck s))
		 order by w.waiting_until, w.id limit @limit`,
		postgres.Strict{"kind": kind, "stuck": stuck, "limit": min(max(limit, 1), 500)})
	if err != nil {
		return nil, fmt.Errorf("list waiting executions: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[WaitingRow])
	if err != nil {
		return nil, fmt.Errorf("list waiting executions: %w", err)
	}
	return got, nil
}

// Relative is an execution that belongs to another: its child, or its fork.
type Relative struct {
	ID     string `json:"id"`
	Flow   string `json:"flow"`
	Status Status `json:"status"`
	// From is the step that a fork began with; empty for children, and for forks of all that was recorded.
	From string `json:"from"`
	Fork bool   `json:"fork"`
}

// Relatives reads the children and the forks of an execution, in the order in which they were started; at most 500.
func Relatives(ctx context.Context, db postgres.DB, id string) ([]Relative, error) {
	rows, err := db.Query(ctx, `
		select id::text, flow, status, coalesce(forked_step, ''), coalesce(forked_from = @id::uuid, false) from agent_executions
		 where parent_id = @id::uuid or forked_from = @id::uuid order by id limit 500`, postgres.Strict{"id": id})
	if err != nil {
		return nil, fmt.Errorf("list children of execution %s: %w", id, err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Relative])
	if err != nil {
		return nil, fmt.Errorf("list children of execution %s: %w", id, err)
	}
	return got, nil
}

// maxRedactedBytes is how many bytes of one value of a row are shown.
const maxRedactedBytes = 64 << 10

// Redacted is the execution as it may be shown: without secrets, each value at most 64 KiB. The row keeps
// them whole, because a replay needs what was there, so whatever prints an execution prints this.
func (x Execution) Redacted() Execution {
	for _, value := range []*json.RawMessage{&x.Input, &x.Variables, &x.WaitingData, &x.Result} {
		*value = redactValue(*value)
	}
	x.ResultSummary = redact.Text(x.ResultSummary, maxRedactedBytes)
	for _, text := range []**string{&x.WaitingKey, &x.ErrorMessage, &x.FailedStep, &x.CancelReason, &x.DedupeKey} {
		if *text != nil {
			*text = new(redact.Text(**text, maxRedactedBytes))
		}
	}
	return x
}

// Redacted is the checkpoint as it may be shown; see [Execution.Redacted].
func (c Checkpoint) Redacted() Checkpoint {
	c.Step = redact.Text(c.Step, maxRedactedBytes)
	c.Output = redactValue(c.Output)
	return c
}

// redactValue is a value without secrets; one that is not there stays so.
func redactValue(value json.RawMessage) json.RawMessage {
	if value == nil {
		return nil
	}
	return redact.JSON(value, maxRedactedBytes)
}

// IsControl reports an error that is not a result of the work but the way a run is ended: parked,
// stopped, handed back. Durable code passes it on untouched.
func IsControl(err error) bool {
	for _, control := range []error{ErrParked, ErrLost, ErrStale, ErrCancelled, ErrDraining, context.Canceled} {
		if errors.Is(err, control) {
			return true
		}
	}
	return false
}
