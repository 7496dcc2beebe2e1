package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
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

// externalForm is the form of the flows that external workers claim.
var externalForm = regexp.MustCompile(`^external(:[a-zA-Z0-9][a-zA-Z0-9._-]{0,99})?$`)

// CanClaim reports whether external workers can claim the executions of a flow: whether its name is external or
// external:NAME, with a NAME of 1 to 100 letters, digits and ._- that begins with a letter or digit.
func CanClaim(flow string) bool { return externalForm.MatchString(flow) }

// Errors of run locks. The functions return them wrapped in a *RunError.
var (
	// ErrHeld reports an execution that another worker's live lock holds.
	ErrHeld = errors.New("the run is locked by another worker")
	// ErrVoid reports a lock that never belonged, or no longer belongs, to the execution.
	ErrVoid = errors.New("the lock is void")
	// ErrOutputConflict reports a step that was recorded with another output.
	ErrOutputConflict = errors.New("the step was recorded with another output")
	// ErrNotExternal reports an execution that the agent's own processes run.
	ErrNotExternal = errors.New("the run is not for external workers")
	// ErrNotReady reports a waiting execution.
	ErrNotReady = errors.New("the run waits")
	// ErrEnded reports an ended execution.
	ErrEnded = errors.New("the run has ended")
	// ErrWaitingKey reports a wait for an unknown execution, or in a thread that the execution cannot access.
	ErrWaitingKey = errors.New("waiting_key is not valid")
	// ErrMalformed reports an invalid argument. The text names the argument.
	ErrMalformed = errors.New("not valid")
)

// RunError explains a rejected lock operation. errors.Is matches one of the errors above.
type RunError struct {
	Err     error
	TraceID string // the execution's trace; empty if unknown
	Holder  string // the owner of the live lock; empty for none
	Detail  string // the state of the execution, with advice
}

func (e *RunError) Error() string {
	if e.Detail == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + ": " + e.Detail
}

func (e *RunError) Unwrap() error { return e.Err }

// RunLock is an external worker's lock on an execution, with the state of the execution.
type RunLock struct {
	LockID      string // a secret: it authorizes writes of the execution
	ExpiresAt   time.Time
	Execution   Execution
	Checkpoints []Checkpoint // oldest first
	granted     bool         // the owner did not have it before
}

// LockRun locks an execution for an external worker, and reads its state in the same transaction. owner names one
// process of the worker. LockRun renews the owner's live lock and returns it again. The lock is void after ttl (whole
// seconds, up to a day) without a renewal. LockRun first settles an expired lock: by on_lost, the execution fails or is
// ready for another worker.
//
// Errors: ErrNotFound, ErrNotExternal, ErrHeld with its holder, ErrNotReady, ErrEnded, ErrPaused, ErrMalformed.
func (e *Engine) LockRun(ctx context.Context, id, owner string, ttl time.Duration) (RunLock, error) {
	var lock RunLock
	var refusal error
	var ended []Ended
	err := postgres.InTx(ctx, e.pool, func(tx pgx.Tx) (err error) {
		lock, refusal, err = lockRun(ctx, tx, id, owner, ttl)
		if err != nil || !errors.Is(refusal, ErrEnded) {
			return err // a refusal commits too, because the function may have settled an expired lock
		}
		b := &pgx.Batch{}
		queueEnded(b, &ended)
		return tx.SendBatch(ctx, b).Close()
	})
	if pausedErr, paused := errors.AsType[*PausedError](explainPaused(ctx, e.pool, err)); paused {
		return RunLock{}, &RunError{Err: ErrPaused, Detail: pausedErr.Pause.since() + "; lock it after the pause"}
	}
	switch {
	case err != nil:
		return RunLock{}, fmt.Errorf("lock execution %s: %w", id, invalidArgument(err))
	case refusal != nil:
		if errors.Is(refusal, ErrEnded) {
			e.LogEnded(ctx, ended)
			e.deliverCompletion(ctx, id)
		}
		return RunLock{}, refusal
	}
	e.logLocked(ctx, lock, owner)
	return lock, nil
}

// logLocked logs the start or resumption of an execution by a new lock.
func (e *Engine) logLocked(ctx context.Context, lock RunLock, owner string) {
	if !lock.granted {
		return
	}
	x := lock.Execution
	attrs := executionAttrs(x.TraceID, x.ID)
	detail := append(slices.Clip(attrs), "flow", x.Flow, "claim", x.Claim, "checkpoints", len(lock.Checkpoints),
		"owner", owner)
	if x.Claim == 1 {
		e.log.InfoContext(ctx, "execution started", detail...)
		return
	}
	e.log.InfoContext(ctx, "execution resumed", detail...)
	e.log.InfoContext(ctx, "continuing from checkpoint", append(attrs, "checkpoints", len(lock.Checkpoints))...)
}

// maxLockTTL is above the limit of a day, so the function still rejects a larger ttl, and fits in its int.
const maxLockTTL = 1 << 20 * time.Second

// lockRun is LockRun in a transaction.
func lockRun(ctx context.Context, tx pgx.Tx, id, owner string, ttl time.Duration) (lock RunLock, refusal, err error) {
	var lockID, holder, reason *string
	var expiresAt *time.Time
	err = tx.QueryRow(ctx, `
		select l.lock_id, l.expires_at, l.holder, l.refused,
		       not exists (select from agent_workers w where w.lock_id = l.lock_id) -- before this statement
		  from lock_agent_execution(@id, @owner, @ttl) l`,
		postgres.Strict{"id": id, "owner": owner, "ttl": int(min(max(ttl, 0), maxLockTTL).Seconds())}).
		Scan(&lockID, &expiresAt, &holder, &reason, &lock.granted)
	if errors.Is(err, pgx.ErrNoRows) {
		return RunLock{}, nil, ErrNotFound
	}
	if err != nil {
		return RunLock{}, nil, err
	}
	if lock.Execution, err = Get(ctx, tx, id); err != nil {
		return RunLock{}, nil, err
	}
	if reason != nil {
		return RunLock{}, lockRefusal(ctx, *reason, lock.Execution, holder, expiresAt), nil
	}
	lock.LockID, lock.ExpiresAt = *lockID, *expiresAt
	lock.Checkpoints, err = Checkpoints(ctx, tx, id)
	return lock, nil, err
}

// lockRefusal returns the error for a refused lock.
func lockRefusal(ctx context.Context, reason string, x Execution, holder *string, expiresAt *time.Time) error {
	x = x.Redacted(ctx)
	refusal := &RunError{TraceID: x.TraceID}
	switch reason {
	case "held":
		refusal.Err, refusal.Holder = ErrHeld, *holder
		refusal.Detail = fmt.Sprintf("%s holds it until %s, or longer after a heartbeat", *holder,
			expiresAt.UTC().Format(time.RFC3339))
	case "waiting":
		refusal.Err, refusal.Detail = ErrNotReady, "for "+describeWait(x)+"; lock it after the wait"
	case "inside":
		refusal.Err, refusal.Detail = ErrNotExternal, fmt.Sprintf("its flow is %s, not %s or %s:NAME",
			x.Flow, External, External)
	default:
		refusal.Err, refusal.Detail = ErrEnded, describeEnd(x)
	}
	return refusal
}

// describeWait describes the wait of an execution.
func describeWait(x Execution) string {
	if x.WaitingFor == nil || x.WaitingKey == nil || x.WaitingUntil == nil {
		return "an event that has just arrived"
	}
	return fmt.Sprintf("%s %s until %s", *x.WaitingFor, *x.WaitingKey, x.WaitingUntil.UTC().Format(time.RFC3339))
}

func describeEnd(x Execution) string {
	for _, reason := range []*string{x.ErrorMessage, x.CancelReason} {
		if reason != nil && *reason != "" {
			return fmt.Sprintf("%s, %s", x.Status, *reason)
		}
	}
	return string(x.Status)
}

// LockRenewal is the result of one renewed lock.
type LockRenewal struct {
	LockID      string
	ExecutionID *string // nil for a deleted lock
	TraceID     *string
	Live        bool // whether the lock was renewed or CancelRequested is true; otherwise the lock is void
	ExpiresAt   *time.Time
	Status      *Status
	// CancelRequested says that the worker must stop. A cancel ends the lock, so it is reported once. While another
	// transaction delays the cancel, each renewal reports it.
	CancelRequested bool
}

// RenewLocks renews locks, each by its own ttl, and returns the results in the same order. It neither waits for nor
// delays a checkpoint in flight.
func (e *Engine) RenewLocks(ctx context.Context, lockIDs []string) ([]LockRenewal, error) {
	return e.renewLocks(ctx, lockIDs, nil)
}

// RenewLock renews the lock of one execution. Errors: ErrNotFound, ErrVoid with the reason.
func (e *Engine) RenewLock(ctx context.Context, id, lockID string) (LockRenewal, error) {
	renewals, err := e.renewLocks(ctx, []string{lockID}, id)
	if err != nil {
		return LockRenewal{}, err
	}
	if !renewals[0].Live {
		return LockRenewal{}, e.rejectVoidLock(ctx, id, lockID, "beat", "", nil)
	}
	return renewals[0], nil
}

// renewLocks renews locks, only those of one execution when id is not nil.
func (e *Engine) renewLocks(ctx context.Context, lockIDs []string, id any) ([]LockRenewal, error) {
	rows, err := e.pool.Query(ctx, `
		select lock_id, execution_id::text, trace_id, live, expires_at, status, cancel_requested
		  from beat_agent_locks(@locks, @id)`,
		postgres.Strict{"locks": lockIDs, "id": id})
	renewals, err := postgres.Collect(rows, err, "renew locks", pgx.RowToStructByPos[LockRenewal])
	if err != nil {
		return nil, err
	}
	for _, renewal := range renewals {
		if id == nil && !renewal.Live && renewal.ExecutionID != nil && renewal.TraceID != nil {
			e.recordStale(ctx, *renewal.TraceID, *renewal.ExecutionID, renewal.LockID, "beat", "", nil)
		}
	}
	return renewals, nil
}

// CheckpointRun records a step under a lock. recorded is false if the step has an equal output already.
// Errors: ErrNotFound, ErrVoid with the reason, ErrOutputConflict, ErrMalformed.
func (e *Engine) CheckpointRun(
	ctx context.Context, id, lockID, step string, output json.RawMessage,
) (traceID string, recorded bool, err error) {
	if len(output) == 0 {
		output = json.RawMessage("null")
	}
	var outcome string
	var storedTraceID *string
	err = e.pool.QueryRow(ctx, `
		select checkpoint_agent_execution(@id, @lock, @step, @output),
		       (select trace_id from agent_executions where id = @id)`,
		postgres.Strict{"id": id, "lock": lockID, "step": step, "output": output}).Scan(&outcome, &storedTraceID)
	if storedTraceID != nil {
		traceID = *storedTraceID
	}
	switch {
	case postgres.IsCode(err, "LK001"):
		return "", false, e.rejectVoidLock(ctx, id, lockID, "checkpoint", step, output)
	case err != nil:
		return "", false, fmt.Errorf("record step of execution %s: %w", id, invalidArgument(err))
	case outcome == "different":
		return traceID, false, &RunError{
			Err: ErrOutputConflict, TraceID: traceID,
			Detail: fmt.Sprintf("%.100q keeps the first output; give each step its own name", step),
		}
	}
	if outcome == "created" {
		e.log.InfoContext(ctx, "checkpoint saved", append(executionAttrs(traceID, id), "step", step)...)
	}
	return traceID, outcome == "created", nil
}

// rejectVoidLock returns the error for a void lock and records the rejected write.
func (e *Engine) rejectVoidLock(ctx context.Context, id, lockID, write, step string, output json.RawMessage) error {
	refusal := e.voidLockError(ctx, id)
	if voidErr, ok := errors.AsType[*RunError](refusal); ok && errors.Is(voidErr, ErrVoid) {
		e.recordStale(ctx, voidErr.TraceID, id, lockID, write, step, output)
	}
	return refusal
}

// recordStale records a rejected write of an external worker in the activity log. The first writes under a lock get one
// row each, and the last row counts all further writes. So a stale worker cannot fill the activity log.
func (e *Engine) recordStale(ctx context.Context, traceID, id, lockID, write, step string, output json.RawMessage) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var redacted any
	if len(output) > 0 {
		redacted = redact.JSON(output, activity.MaxField)
	}
	if _, err := e.pool.Exec(ctx, `select record_stale_agent_write(@id, @lock, @write, @step, @output)`,
		postgres.Strict{"id": id, "lock": lockID, "write": write, "step": step, "output": redacted}); err != nil {
		e.log.WarnContext(ctx, "stale write not recorded",
			append(executionAttrs(traceID, id), "step", step, "error", err)...)
		return
	}
	e.log.WarnContext(ctx, "stale write rejected", append(executionAttrs(traceID, id), "write", write, "step", step)...)
}

// voidLockError returns the error for a void lock, with the state of the execution.
func (e *Engine) voidLockError(ctx context.Context, id string) error {
	x, err := Get(ctx, e.pool, id)
	if err != nil {
		return err
	}
	x = x.Redacted(ctx)
	refusal := &RunError{Err: ErrVoid, TraceID: x.TraceID}
	var owner string
	err = e.pool.QueryRow(ctx, `
		select coalesce((select w.owner
		                   from agent_workers w
		                   join agent_executions x on x.claimed_by = w.id
		                  where x.id = @id and w.expires_at > clock_timestamp()), '')`,
		postgres.Strict{"id": id}).Scan(&owner)
	if err != nil {
		return fmt.Errorf("read holder of execution %s: %w", id, err)
	}
	switch {
	case x.Status.Ended():
		refusal.Detail = "the run has ended: " + describeEnd(x) + ". Stop the work"
	case x.Status == Waiting:
		refusal.Detail = "it was released, and the run waits for " + describeWait(x)
	case owner != "":
		refusal.Holder = owner
		refusal.Detail = "the run is locked by " + owner + ", which continues it. Stop the work"
	default:
		refusal.Detail = "it expired or was released. Stop the work, and lock the run again to continue from its last " +
			"checkpoint"
	}
	return refusal
}

// executionAttrs returns the log attributes of every line about an execution.
func executionAttrs(traceID, id string) []any {
	return []any{slog.String("trace_id", traceID), slog.String("execution_id", id)}
}

// malformedCodes are the SQLSTATEs of an invalid argument.
var malformedCodes = []string{
	"22003", // numeric_value_out_of_range
	"22021", // character_not_in_repertoire: not UTF-8, or with a NUL
	"22023", // invalid_parameter_value: refused by the SQL function
	"22P02", // invalid_text_representation: not a UUID or not JSON
	"22P05", // untranslatable_character: U+0000 in JSON
}

// invalidArgument converts the database's error for an invalid argument to ErrMalformed. It returns other errors
// unchanged.
func invalidArgument(err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || !slices.Contains(malformedCodes, pgErr.Code) {
		return err
	}
	return &RunError{Err: ErrMalformed, Detail: postgres.RefusalText(pgErr)}
}

// UnlockParams describe how an external worker releases a lock.
type UnlockParams struct {
	Status  Status // Completed, Failed or Waiting
	Summary string // summary of the result
	Result  json.RawMessage
	Error   string // reason of the failure
	// For is the kind of wait if Status is Waiting: response, agent, document, signature, test, event, delay or approval.
	For     string
	Key     string        // empty for a delay
	Timeout time.Duration // 0 means the default of the kind; see Limits
}

// UnlockRun releases a lock. The execution then ends or waits. After a wait any worker can lock it again. The outcome
// of the wait is a checkpoint named "wait KIND N", where N counts the waits of the execution. The returned status is
// Running if the awaited event had happened already.
//
// Errors: ErrNotFound, ErrVoid with the reason, ErrWaitingKey, ErrMalformed.
func (e *Engine) UnlockRun(
	ctx context.Context, id, lockID string, p UnlockParams,
) (status Status, traceID string, err error) {
	var timeout any
	if p.Timeout != 0 {
		timeout = p.Timeout.Seconds()
	}
	var errorMessage, result any
	if p.Error != "" || p.Status == Failed {
		errorMessage = p.Error
	}
	if len(p.Result) > 0 {
		result = p.Result
	}
	err = e.pool.QueryRow(ctx, `
		select unlock_agent_execution(@id, @lock, @status, @summary, @error, @kind, @key,
		                              make_interval(secs => @timeout::float8), @result),
		       (select trace_id from agent_executions where id = @id)`, postgres.Strict{
		"id": id, "lock": lockID, "status": string(p.Status), "summary": p.Summary, "error": errorMessage,
		"kind": null(p.For), "key": null(p.Key), "timeout": timeout, "result": result,
	}).Scan(&status, &traceID)
	switch {
	case postgres.IsCode(err, "LK001"):
		return "", "", e.rejectVoidLock(ctx, id, lockID, "release", string(p.Status), p.Result)
	case postgres.IsCode(err, "P0002"):
		pgErr, _ := errors.AsType[*pgconn.PgError](err)
		return "", "", &RunError{Err: ErrWaitingKey, Detail: postgres.RefusalText(pgErr)}
	case err != nil:
		return "", "", fmt.Errorf("unlock execution %s: %w", id, invalidArgument(err))
	}
	e.logUnlocked(ctx, id, traceID, status, p)
	return status, traceID, nil
}

// logUnlocked logs the result of an unlock. If the execution ended, it resumes the executions that wait for its end.
func (e *Engine) logUnlocked(ctx context.Context, id, traceID string, status Status, p UnlockParams) {
	attrs := executionAttrs(traceID, id)
	switch {
	case status == Waiting:
		e.log.InfoContext(ctx, "execution waiting", append(attrs, "waiting_for", p.For, "waiting_key", p.Key)...)
		if p.Timeout > 0 {
			e.wakeSweepIn(p.Timeout)
		}
	case status.Ended():
		e.log.InfoContext(ctx, "execution completed", append(attrs, "result_type", resultType(status),
			"status", string(status))...)
		e.log.InfoContext(ctx, "event emitted", append(attrs, "event", "AGENT_COMPLETED", "key", id)...)
		var released int
		var claim int64
		err := e.pool.QueryRow(ctx, `
			select coalesce((v.data ->> 'locks_released')::int, 0), x.claim
			  from agent_events v
			  join agent_executions x on x.id = @id::uuid
			 where v.external_id = 'completed ' || @id::text`,
			postgres.Strict{"id": id}).Scan(&released, &claim)
		if err != nil {
			e.log.WarnContext(ctx, "number of released lanes not read", append(attrs, "error", err)...)
		}
		e.logReleased(ctx, id, claim, released, attrs...)
		e.deliverCompletion(ctx, id)
	}
}

// LockClaim returns the claim number of a live lock of an external worker. Errors: ErrNotFound, ErrVoid with the
// reason.
func (e *Engine) LockClaim(ctx context.Context, id, lockID string) (int64, error) {
	var claim *int64
	err := e.pool.QueryRow(ctx, `
		select (select x.claim from agent_executions x
		         where x.id = @id and x.claim = agent_lock_claim(@id, @lock))`,
		postgres.Strict{"id": id, "lock": lockID}).Scan(&claim)
	if err != nil {
		return 0, fmt.Errorf("read lock of execution %s: %w", id, err)
	}
	if claim == nil {
		return 0, e.rejectVoidLock(ctx, id, lockID, "message", "", nil)
	}
	return *claim, nil
}
