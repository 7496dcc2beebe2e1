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
//   - Call: a Step with an effect on another system. An activity row records the intent before the call. After a
//     crash an idempotent call is repeated under its idempotency key. Any other call ends `unknown` and is not
//     repeated.
//   - Phase: a Step that groups other steps under one activity row, which survives crashes.
//   - StepTx: a Step whose effect is in this database. Fence, effect and checkpoint are one transaction.
//
// Wait suspends the execution: the row becomes waiting, Wait returns ErrParked, and the flow must return that error.
// The execution then occupies no process until an event, the timer or a cancel ends the wait. If the flow ignores the
// error, every later step of the run fails, so the run has no further effect.
//
// External workers, in any language, run the flows "external" and "external:NAME". A worker locks an execution,
// records its steps and unlocks it (LockRun, RenewLocks, CheckpointRun, UnlockRun; over HTTP see
// docs/outside-workers.md). Its lock is a claim like any other, with a lease of its own.
//
// Safety: each claim has a number greater than all earlier claims, and every durable write has the number of its claim.
// The database rejects a write under an old number (SQLSTATE LK001, ErrStale here). So a process that was paused past
// its lease changes nothing when it continues. The activity log records the rejected writes. A claim lasts as long as
// its worker's lease: 30 seconds, renewed every 10.
//
// Only the row decides whether an execution is ready. A process that makes an execution ready polls the queue after its
// commit. One statement claims as many executions as the process has free workers, within the limits (Admission). With
// too few free workers, the process notifies other processes. In a caller's transaction, a River job carries the
// notification. Every process also polls every 5 seconds after a sweep, so a lost notification only causes a delay.
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
	case postgres.IsCode(err, "22P02", "22021"):
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

// Filter selects executions of a listing. An execution must match all fields that are not zero.
type Filter struct {
	Status, Surface, Flow, Agent string
	Before                       string     // id: the listing continues with older executions
	TraceIDs                     []trace.ID // one of them; see [trace.ParseAny]
	Label                        string     // see [ParseLabel]; searches the newest 10,000 executions with the value
	Statuses                     []string   // one of them
	Since, Until                 time.Time  // bounds of the creation time; Until is exclusive
	Limit                        int        // default 50, at most 1000
}

// List reads executions, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Execution, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	name, value := ParseLabel(f.Label)
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_executions
		 where (@value = '' or id = any (array(
		         select l.execution_id from agent_execution_labels l
		          where l.value = @value and (@name = '' or l.name = @name)
		            and (@before = '' or l.execution_id < nullif(@before, '')::uuid)
		          order by l.execution_id desc limit 10000)))
		   and (@status = '' or status = @status)
		   and (@statuses::text[] is null or status = any (@statuses))
		   and (@surface = '' or surface = @surface)
		   and (@flow = '' or flow = @flow)
		   and (@agent = '' or agent = @agent)
		   and (@trace_ids::text[] is null or trace_id = any (@trace_ids))
		   and (@before = '' or id < nullif(@before, '')::uuid)
		   and (@since::timestamptz is null or id >= lanekeeper.agent_uuid7_floor(@since))
		   and (@until::timestamptz is null or id < lanekeeper.agent_uuid7_floor(@until))
		 order by agent_executions.id desc limit @limit`, // an unqualified id would be the text column of the result
		pgx.QueryExecModeCacheDescribe, // a custom plan: a generic plan would scan the table
		postgres.Strict{
			"since": timeBound(f.Since), "until": timeBound(f.Until),
			"status": f.Status, "statuses": f.Statuses,
			"surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "trace_ids": f.TraceIDs,
			"before": f.Before, "limit": min(f.Limit, 1000), "name": name, "value": value,
		})
	return postgres.Collect(rows, err, "list executions", pgx.RowToStructByPos[Execution])
}

// timeBound returns a bound on creation times as an SQL parameter; null for the zero time. It is not before the epoch,
// because ids have no earlier times.
func timeBound(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	if epoch := time.Unix(0, 0); t.Before(epoch) {
		return epoch
	}
	return t
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

// StatusCount is a row of the view agent_executions_by_status: the number and mean age of executions in one state.
type StatusCount struct {
	Status        Status  `json:"status"`
	Count         int64   `json:"count"`
	AvgAgeSeconds float64 `json:"avg_age_seconds"`
}

// CountByStatus counts pending, running and waiting executions.
func CountByStatus(ctx context.Context, db postgres.DB) ([]StatusCount, error) {
	rows, err := db.Query(ctx, `
		select status, count, avg_age_seconds::float8 from agent_executions_by_status order by status`)
	return postgres.Collect(rows, err, "count executions", pgx.RowToStructByPos[StatusCount])
}

// WaitingRow is a row of the views agent_executions_waiting and agent_executions_stuck.
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
	ThreadID     *string         `json:"-"`
}

// Redacted returns the row without secrets; see [Execution.Redacted].
func (w WaitingRow) Redacted(ctx context.Context) WaitingRow {
	w.WaitingData = redactValue(w.WaitingData)
	if activity.HidesTexts(ctx) && activity.IsConversation(w.Flow, w.Surface, w.ThreadID) {
		w.WaitingData = activity.HiddenJSON(w.WaitingData)
	}
	return w
}

// ListWaiting reads at most 500 waiting executions in the order of their deadlines. kind selects one kind of wait.
// stuck selects executions whose deadline has passed and that had no update for an hour.
func ListWaiting(ctx context.Context, db postgres.DB, kind string, stuck bool, limit int) ([]WaitingRow, error) {
	rows, err := db.Query(ctx, `
		select w.id::text, w.trace_id, w.surface, w.agent, w.flow, coalesce(w.waiting_for, ''), coalesce(w.waiting_key, ''),
		       w.waiting_until, w.waiting_data, extract(epoch from w.waiting_time)::float8,
		       (select x.thread_id from agent_executions x where x.id = w.id)
		  from agent_executions_waiting w
		 where (@kind = '' or w.waiting_for = @kind)
		   and (not @stuck or w.id in (select s.id from agent_executions_stuck s))
		 order by w.waiting_until, w.id limit @limit`,
		postgres.Strict{"kind": kind, "stuck": stuck, "limit": min(max(limit, 1), 500)})
	return postgres.Collect(rows, err, "list waiting executions", pgx.RowToStructByPos[WaitingRow])
}

// Relative is a child or a fork of an execution.
type Relative struct {
	ID     string `json:"id"`
	Flow   string `json:"flow"`
	Status Status `json:"status"`
	// From is the first step that the fork runs again. It is empty for children and for forks that keep every step.
	From string `json:"from"`
	Fork bool   `json:"fork"`
}

// Relatives reads at most 500 children and forks of an execution, oldest first.
func Relatives(ctx context.Context, db postgres.DB, id string) ([]Relative, error) {
	rows, err := db.Query(ctx, `
		select id::text, flow, status, coalesce(forked_step, ''), coalesce(forked_from = @id::uuid, false)
		  from agent_executions
		 where parent_id = @id::uuid or forked_from = @id::uuid
		 order by id limit 500`, postgres.Strict{"id": id})
	return postgres.Collect(rows, err, fmt.Sprintf("list children of execution %s", id), pgx.RowToStructByPos[Relative])
}

// maxRedactedBytes bounds each value of a redacted row.
const maxRedactedBytes = 64 << 10

// Redacted returns the execution without secrets and without the conversation texts that ctx hides. It cuts each value
// at 64 KiB. Show users only this form. The row keeps the original values, because a replay needs them.
func (x Execution) Redacted(ctx context.Context) Execution {
	hide := x.hidesTexts(ctx)
	for _, value := range []*json.RawMessage{&x.Input, &x.Variables, &x.WaitingData, &x.Result} {
		if *value = redactValue(*value); hide {
			*value = activity.HiddenJSON(*value)
		}
	}
	if hide && x.ResultSummary != "" {
		x.ResultSummary = activity.HiddenText
	}
	x.ResultSummary = redact.Text(x.ResultSummary, maxRedactedBytes)
	for _, text := range []**string{&x.WaitingKey, &x.ErrorMessage, &x.FailedStep, &x.CancelReason, &x.DedupeKey} {
		if *text != nil {
			*text = new(redact.Text(**text, maxRedactedBytes))
		}
	}
	return x
}

func (x Execution) hidesTexts(ctx context.Context) bool {
	return activity.HidesTexts(ctx) && activity.IsConversation(x.Flow, x.Surface, x.ThreadID)
}

// Redacted returns the checkpoint of an execution without secrets and hidden texts; see [Execution.Redacted].
func (c Checkpoint) Redacted(ctx context.Context, x Execution) Checkpoint {
	c.Step = redact.Text(c.Step, maxRedactedBytes)
	if c.Output = redactValue(c.Output); x.hidesTexts(ctx) {
		c.Output = activity.HiddenJSON(c.Output)
	}
	return c
}

// redactValue redacts a JSON value; nil stays nil.
func redactValue(value json.RawMessage) json.RawMessage {
	if value == nil {
		return nil
	}
	return redact.JSON(value, maxRedactedBytes)
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
