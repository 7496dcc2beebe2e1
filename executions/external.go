package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// External is the flow of an external worker. Workers with different tasks have flows of the form "external:NAME".
const External = "external"

// IsExternal reports whether external workers run a flow.
func IsExternal(flow string) bool { return flow == External || strings.HasPrefix(flow, External+":") }

// reserved are the flows that only the program itself starts.
var reserved = []string{
	"automation", "chat", "chat_relay", "chat_summary", "delegate", "eval", "heartbeat", "mcp.call", "operate",
	"skill_call", "webhook",
}

// Reserved lists the flows that only the program itself starts, sorted. No other program may register them.
func Reserved() []string { return slices.Clone(reserved) }

// IsReserved reports whether only the program itself starts a flow.
func IsReserved(flow string) bool { return slices.Contains(reserved, ReservedName(flow)) }

// ReservedName is the flow without the id of an eval's trial: "eval" for "eval:1f0c".
func ReservedName(flow string) string {
	if strings.HasPrefix(flow, "eval:") {
		return "eval"
	}
	return flow
}

// The errors of run locks. Each comes as a *RunError.
var (
	// ErrHeld reports an execution that another worker's live lock holds.
	ErrHeld = errors.New("the run is locked by another worker")
	// ErrVoid reports a lock that does not, or no longer, belong to the execution.
	ErrVoid = errors.New("the lock is void")
	// ErrOutputConflict reports a step that was recorded with another output.
	ErrOutputConflict = errors.New("the step was recorded with another output")
	// ErrNotExternal reports an execution of this program's own processes.
	ErrNotExternal = errors.New("the run is not for external workers")
	// ErrNotReady reports a waiting execution.
	ErrNotReady = errors.New("the run waits")
	// ErrEnded reports an ended execution.
	ErrEnded = errors.New("the run has ended")
	// ErrMalformed reports an invalid argument; the text names it.
	ErrMalformed = errors.New("not valid")
)

// RunError explains a refused lock operation; errors.Is matches one of the errors above.
type RunError struct {
	Err     error
	TraceID string // of the execution; empty where unknown
	Holder  string // owner of the live lock; empty for none
	Detail  string // the state, and advice
}

func (e *RunError) Error() string {
	if e.Detail == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + ": " + e.Detail
}

func (e *RunError) Unwrap() error { return e.Err }

// RunLock is the right to run an execution externally, with its state.
type RunLock struct {
	LockID      string // a secret: it authorizes writes of the execution
	ExpiresAt   time.Time
	Execution   Execution
	Checkpoints []Checkpoint // oldest first
}

// LockRun locks an execution for an external worker, and reads its state in the same transaction. owner names one
// process of the worker. LockRun renews the owner's live lock and returns it again. The lock is void after ttl (whole
// seconds, up to a day) without a renewal. LockRun first settles an expired lock: by on_lost, the execution fails or is
// ready for another worker.
//
// Errors: ErrNotFound, ErrNotExternal, ErrHeld with its holder, ErrNotReady, ErrEnded, ErrPaused, ErrMalformed.
func (e *Engine) LockRun(ctx context.Context, id, owner string, ttl time.Duration) (RunLock, error) {
	var got RunLock
	var refused error
	var ends []endedExecution
	err := postgres.InTx(ctx, e.pool, func(tx pgx.Tx) (err error) {
		got, refused, err = lockRun(ctx, tx, id, owner, ttl)
		if err != nil || !errors.Is(refused, ErrEnded) {
			return err // a refusal commits too: the expired lock is settled
		}
		b := &pgx.Batch{}
		queueEnded(b, &ends)
		return tx.SendBatch(ctx, b).Close()
	})
	if held, paused := errors.AsType[*PausedError](explainPaused(ctx, e.pool, err)); paused {
		return RunLock{}, &RunError{Err: ErrPaused, Detail: held.Pause.since() + "; lock it after the pause"}
	}
	switch {
	case err != nil:
		return RunLock{}, fmt.Errorf("lock execution %s: %w", id, invalidArgument(err))
	case refused != nil:
		if errors.Is(refused, ErrEnded) {
			e.logEnded(ctx, ends)
			e.deliverCompletion(ctx, id)
		}
		return RunLock{}, refused
	}
	message := "execution resumed"
	if got.Execution.Claim == 1 {
		message = "execution started"
	}
	e.log.InfoContext(ctx, message, append(executionAttrs(got.Execution.TraceID, id), "flow", got.Execution.Flow, //nolint:sloglint // one of two constants
		"claim", got.Execution.Claim, "checkpoints", len(got.Checkpoints), "owner", owner)...)
	return got, nil
}

// lockRun is LockRun in a transaction.
func lockRun(ctx context.Context, tx pgx.Tx, id, owner string, ttl time.Duration) (got RunLock, refused, err error) {
	var lockID, holder, why *string
	var expires *time.Time
	err = tx.QueryRow(ctx, `select lock_id, expires_at, holder, refused from lock_agent_execution(@id, @owner, @ttl)`,
		postgres.Strict{"id": id, "owner": owner, "ttl": int(min(max(ttl, 0), 1<<20*time.Second).Seconds())}).
		Scan(&lockID, &expires, &holder, &why)
	if errors.Is(err, pgx.ErrNoRows) {
		return RunLock{}, nil, ErrNotFound
	}
	if err != nil {
		return RunLock{}, nil, err
	}
	if got.Execution, err = Get(ctx, tx, id); err != nil {
		return RunLock{}, nil, err
	}
	if why != nil {
		return RunLock{}, lockRefusal(ctx, *why, got.Execution, holder, expires), nil
	}
	got.LockID, got.ExpiresAt = *lockID, *expires
	got.Checkpoints, err = Checkpoints(ctx, tx, id)
	return got, nil, err
}

// lockRefusal explains a refused lock.
func lockRefusal(ctx context.Context, why string, x Execution, holder *string, expires *time.Time) error {
	x = x.Redacted(ctx)
	refused := &RunError{TraceID: x.TraceID}
	switch why {
	case "held":
		refused.Err, refused.Holder = ErrHeld, *holder
		refused.Detail = fmt.Sprintf("%s holds it until %s, or longer after a heartbeat", *holder,
			expires.UTC().Format(time.RFC3339))
	case "waiting":
		refused.Err, refused.Detail = ErrNotReady, "for "+describeWait(x)+"; lock it after the wait"
	case "inside":
		refused.Err, refused.Detail = ErrNotExternal, fmt.Sprintf("its flow is %s, not %s or %s:NAME",
			x.Flow, External, External)
	default:
		refused.Err, refused.Detail = ErrEnded, describeEnd(x)
	}
	return refused
}

// describeWait describes the wait of an execution.
func describeWait(x Execution) string {
	if x.WaitingFor == nil || x.WaitingKey == nil || x.WaitingUntil == nil {
		return "an event that has just arrived"
	}
	return fmt.Sprintf("%s %s until %s", *x.WaitingFor, *x.WaitingKey, x.WaitingUntil.UTC().Format(time.RFC3339))
}

func describeEnd(x Execution) string {
	for _, why := range []*string{x.ErrorMessage, x.CancelReason} {
		if why != nil && *why != "" {
			return fmt.Sprintf("%s, %s", x.Status, *why)
		}
	}
	return string(x.Status)
}

// LockRenewal is the result of one renewed lock.
type LockRenewal struct {
	LockID          string
	ExecutionID     *string // nil for a deleted lock
	TraceID         *string
	Live            bool // renewed, or CancelRequested; otherwise void
	ExpiresAt       *time.Time
	Status          *Status
	CancelRequested bool // the execution was cancelled: stop the work. Reported once, because the cancel ended the lock
}

// RenewLocks renews locks, each by its own ttl, and answers in their order. It neither waits for nor delays a
// checkpoint in flight.
func (e *Engine) RenewLocks(ctx context.Context, lockIDs []string) ([]LockRenewal, error) {
	return e.renewLocks(ctx, lockIDs, nil)
}

// RenewLock renews the lock of one execution. Errors: ErrNotFound, ErrVoid with the reason.
func (e *Engine) RenewLock(ctx context.Context, id, lockID string) (LockRenewal, error) {
	got, err := e.renewLocks(ctx, []string{lockID}, id)
	if err != nil {
		return LockRenewal{}, err
	}
	if !got[0].Live {
		return LockRenewal{}, e.rejectVoidLock(ctx, id, lockID, "beat", "", nil)
	}
	return got[0], nil
}

// renewLocks renews locks, only those of one execution when id is not nil.
func (e *Engine) renewLocks(ctx context.Context, lockIDs []string, id any) ([]LockRenewal, error) {
	rows, err := e.pool.Query(ctx, `
		select lock_id, execution_id::text, trace_id, live, expires_at, status, cancel_requested
		  from beat_agent_locks(@locks, @id)`,
		postgres.Strict{"locks": lockIDs, "id": id})
	got, err := postgres.Collect(rows, err, "renew locks", pgx.RowToStructByPos[LockRenewal])
	if err != nil {
		return nil, err
	}
	for _, b := range got {
		if id == nil && !b.Live && b.ExecutionID != nil && b.TraceID != nil {
			e.recordStale(ctx, *b.TraceID, *b.ExecutionID, b.LockID, "beat", "", nil)
		}
	}
	return got, nil
}

// CheckpointRun records a step under a lock. recorded is false when the step has this output already, equal as jsonb.
// Errors: ErrNotFound, ErrVoid with the reason, ErrOutputConflict, ErrMalformed.
func (e *Engine) CheckpointRun(
	ctx context.Context, id, lockID, step string, output json.RawMessage,
) (traceID string, recorded bool, err error) {
	if len(output) == 0 {
		output = json.RawMessage("null")
	}
	var answer string
	var trace *string
	err = e.pool.QueryRow(ctx, `
		select checkpoint_agent_execution(@id, @lock, @step, @output), (select trace_id from agent_executions
		  where id = @id)`,
		postgres.Strict{"id": id, "lock": lockID, "step": step, "output": output}).Scan(&answer, &trace)
	if trace != nil {
		traceID = *trace
	}
	switch {
	case postgres.IsCode(err, "LK001"):
		return "", false, e.rejectVoidLock(ctx, id, lockID, "checkpoint", step, output)
	case err != nil:
		return "", false, fmt.Errorf("record step of execution %s: %w", id, invalidArgument(err))
	case answer == "different":
		return traceID, false, &RunError{
			Err: ErrOutputConflict, TraceID: traceID,
			Detail: fmt.Sprintf("%.100q keeps the first output; give each step its own name", step),
		}
	}
	if answer == "created" {
		e.log.InfoContext(ctx, "checkpoint saved", append(executionAttrs(traceID, id), "step", step)...)
	}
	return traceID, answer == "created", nil
}

// rejectVoidLock explains a void lock, and records the rejected write.
func (e *Engine) rejectVoidLock(ctx context.Context, id, lockID, write, step string, output json.RawMessage) error {
	refused := e.voidLockError(ctx, id)
	if void, is := errors.AsType[*RunError](refused); is && errors.Is(void, ErrVoid) {
		e.recordStale(ctx, void.TraceID, id, lockID, write, step, output)
	}
	return refused
}

// recordStale records a rejected write of an external worker in the activity log. The first few writes per lock have a
// row each, and the last row counts the rest. So a stale worker cannot fill the log.
func (e *Engine) recordStale(ctx context.Context, traceID, id, lockID, write, step string, output json.RawMessage) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var kept any
	if len(output) > 0 {
		kept = redact.JSON(output, activity.MaxField)
	}
	if _, err := e.pool.Exec(ctx, `select record_stale_agent_write(@id, @lock, @write, @step, @output)`,
		postgres.Strict{"id": id, "lock": lockID, "write": write, "step": step, "output": kept}); err != nil {
		e.log.WarnContext(ctx, "stale write not recorded",
			append(executionAttrs(traceID, id), "step", step, "error", err)...)
		return
	}
	e.log.WarnContext(ctx, "stale write rejected", append(executionAttrs(traceID, id), "write", write, "step", step)...)
}

// voidLockError explains why a lock is void.
func (e *Engine) voidLockError(ctx context.Context, id string) error {
	x, err := Get(ctx, e.pool, id)
	if err != nil {
		return err
	}
	x = x.Redacted(ctx)
	refused := &RunError{Err: ErrVoid, TraceID: x.TraceID}
	var owner string
	err = e.pool.QueryRow(ctx, `
		select coalesce((select w.owner from agent_workers w join agent_executions x on x.claimed_by = w.id
		                  where x.id = @id and w.expires_at > clock_timestamp()),
		                    '')`, postgres.Strict{"id": id}).Scan(&owner)
	if err != nil {
		return fmt.Errorf("read holder of execution %s: %w", id, err)
	}
	switch {
	case x.Status.Ended():
		refused.Detail = "the run has ended: " + describeEnd(x) + ". Stop the work"
	case x.Status == Waiting:
		refused.Detail = "it was released, and the run waits for " + describeWait(x)
	case owner != "":
		refused.Holder = owner
		refused.Detail = "the run is locked by " + owner + ", which continues it. Stop the work"
	default:
		refused.Detail = "it expired or was released. Stop the work, and lock the run again to continue from its last " +
			"checkpoint"
	}
	return refused
}

// executionAttrs are the log attributes of every line about an execution.
func executionAttrs(traceID, id string) []any {
	return []any{slog.String("trace_id", traceID), slog.String("execution_id", id)}
}

// invalidArgument turns a rejected argument into ErrMalformed, with the database's message.
func invalidArgument(err error) error {
	refused, is := errors.AsType[*pgconn.PgError](err)
	if !is || !slices.Contains([]string{"22023", "22P02", "22P05", "22003"}, refused.Code) {
		return err
	}
	return &RunError{Err: ErrMalformed, Detail: postgres.Told(refused)}
}

// UnlockParams describe how an external worker releases a lock.
type UnlockParams struct {
	Status  Status // Completed, Failed or Waiting
	Summary string // of the result
	Result  json.RawMessage
	Error   string // reason of the failure
	// With Waiting: one of the eight kinds of Limits (response, agent, document, signature, test, event, delay,
	// approval) and the timeout. 0 is the default of the kind.
	For     string
	Key     string // empty for a delay
	Timeout time.Duration
}

// UnlockRun releases a lock: the execution ends, or waits. After the wait any worker can lock it again. The outcome
// of the wait is a checkpoint named "wait KIND N", where N counts the execution's waits. The returned status is
// Running when the awaited event had happened already.
//
// Errors: ErrNotFound, ErrVoid with the reason, ErrMalformed.
func (e *Engine) UnlockRun(
	ctx context.Context, id, lockID string, r UnlockParams,
) (status Status, traceID string, err error) {
	var timeout any
	if r.Timeout != 0 {
		timeout = r.Timeout.Seconds()
	}
	var failure, result any
	if r.Error != "" || r.Status == Failed {
		failure = r.Error
	}
	if len(r.Result) > 0 {
		result = r.Result
	}
	err = e.pool.QueryRow(ctx, `
		select unlock_agent_execution(@id, @lock, @status, @summary, @error, @kind, @key,
		  make_interval(secs => @timeout::float8), @result),
		       (select trace_id from agent_executions where id = @id)`, postgres.Strict{
		"id": id, "lock": lockID, "status": string(r.Status), "summary": r.Summary, "error": failure,
		"kind": null(r.For), "key": null(r.Key),
		"timeout": timeout, "result": result,
	}).Scan(&status, &traceID)
	switch {
	case postgres.IsCode(err, "LK001"):
		return "", "", e.rejectVoidLock(ctx, id, lockID, "release", string(r.Status), r.Result)
	case err != nil:
		return "", "", fmt.Errorf("unlock execution %s: %w", id, invalidArgument(err))
	}
	e.logUnlocked(ctx, id, traceID, status, r)
	return status, traceID, nil
}

// logUnlocked logs the result of an unlock, and resumes waiting executions.
func (e *Engine) logUnlocked(ctx context.Context, id, traceID string, status Status, r UnlockParams) {
	attrs := executionAttrs(traceID, id)
	switch {
	case status == Waiting:
		e.log.InfoContext(ctx, "execution waiting", append(attrs, "waiting_for", r.For, "waiting_key", r.Key)...)
		if r.Timeout > 0 {
			e.wakeSweepIn(r.Timeout)
		}
	case status.Ended():
		e.log.InfoContext(ctx, "execution completed", append(attrs, "result_type", resultType(status),
			"status", string(status))...)
		e.log.InfoContext(ctx, "event emitted", append(attrs, "event", "AGENT_COMPLETED", "key", id)...)
		var freed int
		var claim int64
		err := e.pool.QueryRow(ctx, `
			select coalesce((v.data ->> 'locks_released')::int, 0), x.claim from agent_events v
			  join agent_executions x on x.id = @id::uuid where v.external_id = 'completed ' || @id::text`,
			postgres.Strict{"id": id}).Scan(&freed, &claim)
		if err != nil {
			e.log.WarnContext(ctx, "number of released lanes not read", append(attrs, "error", err)...)
		}
		e.logReleased(ctx, id, claim, freed, attrs...)
		e.deliverCompletion(ctx, id)
	}
}
