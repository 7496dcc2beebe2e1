package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// completion has the column values of the end of a run.
type completion struct {
	id           string
	claim        int64
	status       Status
	summary      string
	result       json.RawMessage
	errorMessage *string
	failedStep   *string
	variables    json.RawMessage  // nil if the row has them already
	claimed      *Execution       // the claimed execution if a caller wants the final row; nil otherwise
	lastStep     *checkpointWrite // the deferred checkpoint of the last step; nil for none
}

// completionResult is the result of a written completion.
type completionResult struct {
	releasedLanes []releasedLane
	awaited       bool       // whether another execution waits for this one
	row           *Execution // the final row if a caller wants it; nil otherwise
}

// complete writes the end of the execution and its deferred checkpoint. The same transaction releases the lanes, closes
// the open activity rows and emits AGENT_COMPLETED (not for a trial of an eval). If the database rejects the result,
// the execution ends as failed.
func (r *run) complete(
	ctx context.Context, last *deferredCheckpoint, status Status, result Result, failure error,
) error {
	value, _, err := encodeResult(result.Value)
	if err != nil {
		status, failure, value = Failed, fmt.Errorf("encode result: %w", err), nil
	}
	detached := context.WithoutCancel(ctx)
	done, err := r.writeCompletion(detached, last.checkpoint(r), status, postgres.Text(result.Summary), value, failure)
	if rejected(err) {
		status, failure = Failed, fmt.Errorf("store result: %w", err)
		done, err = r.writeCompletion(detached, last.checkpoint(r), status, "", nil, failure)
	}
	if last != nil && rejected(err) { // the last step was rejected, not the result
		r.setFailedStep(last.step.key)
		failure, last = errors.Join(errNotRecorded, err), nil
		done, err = r.writeCompletion(detached, nil, status, "", nil, failure)
	}
	switch {
	case errors.Is(err, ErrStale), err != nil && postgres.Code(err) == "":
		return r.resolveStaleCompletion(ctx, status, result, failure, err)
	case err != nil:
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, err)
	}
	if last != nil {
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", last.step.key)
	}
	r.afterCompletion(ctx, status, failure, done)
	return nil
}

// afterCompletion logs the end and resumes the executions that wait for it.
func (r *run) afterCompletion(ctx context.Context, status Status, failure error, done completionResult) {
	r.logCompletion(ctx, status, failure)
	if r.exec.Surface != string(trace.Eval) { // a trial emits nothing
		r.e.log.InfoContext(ctx, "event emitted", "event", "AGENT_COMPLETED", "key", r.exec.ID)
	}
	if r.exec.ParentID != nil || done.awaited {
		r.e.deliverCompletion(context.WithoutCancel(ctx), r.exec.ID)
	}
	r.e.logReleasedLanes(ctx, r.laneOwner().String(), done.releasedLanes)
	r.e.log.InfoContext(ctx, "locks released", "count", len(done.releasedLanes))
}

func (r *run) logCompletion(ctx context.Context, status Status, failure error) {
	attrs := []any{"result_type", resultType(status), "status", string(status)}
	if failure != nil {
		attrs = append(attrs, "error", failure)
	}
	r.e.opts.Observer.ExecutionEnded(r.exec, status)
	r.e.log.InfoContext(ctx, "execution completed", attrs...)
}

// deliverCompletion resumes the executions that wait for the completion of id. After an error the sweep resumes them.
func (e *Engine) deliverCompletion(ctx context.Context, id string) {
	if err := e.tryDeliverCompletion(ctx, id); err != nil {
		e.log.WarnContext(ctx, "parent not resumed yet", "execution", id, "error", err)
	}
}

func (e *Engine) tryDeliverCompletion(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	var resumed int
	b := &pgx.Batch{}
	queueLockTimeout(b)
	b.Queue(`select count(*) from lanekeeper.resume_agent_waiters('agent', @id)`,
		postgres.Strict{"id": id}).QueryRow(func(row pgx.Row) error { return row.Scan(&resumed) })
	err := e.pool.SendBatch(ctx, b).Close()
	if resumed > 0 {
		e.notifyReady(Background, resumed)
		e.notifyReady(Interactive, resumed)
		if !e.dispatching() {
			e.notifyPeers(ctx)
		}
	}
	return err
}

// resolveStaleCompletion handles a completion that was rejected or had no response. It reads the row: an earlier
// attempt may have been committed although its response was lost.
func (r *run) resolveStaleCompletion(
	ctx context.Context, status Status, result Result, failure, cause error,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	current, err := explainMissing(Get(ctx, r.e.pool, r.exec.ID))
	switch {
	case err != nil:
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, errors.Join(cause, err))
	case current.Claim == r.exec.Claim && current.Status == status:
		done := completionResult{awaited: true} // the lost response says whether it is
		b := &pgx.Batch{}
		queueReleasedLanes(b, r.exec.ID, &done.releasedLanes)
		if err := r.e.pool.SendBatch(ctx, b).Close(); err != nil {
			r.e.log.WarnContext(ctx, "released lanes not read", "error", err)
		}
		r.afterCompletion(ctx, status, failure, done)
		return nil
	case current.Claim == r.exec.Claim && !errors.Is(cause, ErrStale):
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, cause)
	}
	r.recordRejected(ctx, activity.Entry{Skill: "finish", Claim: r.exec.Claim}, activity.Outcome{
		Status: activity.Status(status), Output: result,
	})
	return nil
}

// failedStepOf returns the step whose error ended the run: the step of a StepError, or else the last step that failed
// or timed out without a later success.
func (r *run) failedStepOf(failure error) string {
	if step, ok := errors.AsType[*StepError](failure); ok && step.Step != "" {
		return step.Step
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failedStep
}

// writeCompletion writes the completion and the deferred checkpoint. It retries for one lease.
func (r *run) writeCompletion(
	ctx context.Context, last *checkpointWrite, status Status, summary string, value json.RawMessage, failure error,
) (done completionResult, err error) {
	c := completion{
		id: r.exec.ID, claim: r.exec.Claim, status: status, summary: summary, result: value,
		variables: r.pendingVariables(), claimed: r.claimedForCaller(), lastStep: last,
	}
	if failure != nil {
		c.errorMessage, c.failedStep = new(postgres.Text(failure.Error())), null(r.failedStepOf(failure))
	}
	deadline := time.Now().Add(r.e.opts.LeaseTTL)
	single := func(write func(ctx context.Context, c completion) (completionResult, error)) (completionResult, error) {
		bounded, cancel := context.WithDeadline(ctx, deadline)
		defer cancel()
		return write(bounded, c)
	}
	if r.exec.ThreadID != nil { // the run likely holds the thread's lane, and a batch skips executions that hold lanes
		done, err = single(r.completeInTx)
	} else {
		done, err = r.e.batchers.completions.Do(ctx, c, func() (completionResult, error) { return single(r.completeOne) })
	}
	if done.row != nil {
		r.onCompleted(done.row)
	}
	return done, err
}

// completeOne writes a single completion as a batch of one. If the batch fails or skips the completion, completeOne
// writes it in its own transaction.
func (r *run) completeOne(ctx context.Context, c completion) (completionResult, error) {
	results, err := r.e.completeBatch(ctx, []completion{c})
	if err != nil || results[0].Skipped {
		return r.completeInTx(ctx, c)
	}
	return results[0].Value, nil
}

// completeInTx writes a completion and its side effects, such as released lanes, in one transaction.
func (r *run) completeInTx(ctx context.Context, c completion) (done completionResult, err error) {
	err = r.withVariables(ctx, c.variables, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			queueLockTimeout(b)
			if c.lastStep != nil { // lock the row before the fence of the checkpoint takes a weaker lock
				b.Queue(`select from agent_executions where id = @id and claim = @claim for update`,
					postgres.Strict{"id": c.id, "claim": c.claim})
				c.lastStep.queue(b)
			}
			r.queueVariables(b, text)
			queueCompletion(b, c, &done)
		})
	})
	return done, err
}

// queueCompletion queues a completion and reads the released lanes, whether an execution waits for this one, and the
// final row. A new wait locks the row first too, so either the completion finds the wait or the wait finds the
// completion.
func queueCompletion(b *pgx.Batch, c completion, done *completionResult) {
	b.Queue(`select lanekeeper.complete_agent_execution(@id, @claim, @status, @summary, @result, @error, @step)`,
		postgres.Strict{
			"id": c.id, "claim": c.claim, "status": string(c.status), "summary": c.summary,
			"result": c.result, "error": c.errorMessage, "step": c.failedStep,
		})
	queueReleasedLanes(b, c.id, &done.releasedLanes)
	b.Queue(`select exists (select from agent_unpublished_completions where execution_id = @id)`,
		postgres.Strict{"id": c.id}).QueryRow(func(row pgx.Row) error { return row.Scan(&done.awaited) })
	if c.claimed != nil {
		b.Queue(`select `+columns+` from agent_executions where id = @id`, postgres.Strict{"id": c.id}).Query(
			func(rows pgx.Rows) error {
				row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
				done.row = &row
				return err
			})
	}
}

// completeBatch writes completions in one commit, each with its last step and under its own claim. It skips executions
// that hold lanes and executions without a live claim.
func (e *Engine) completeBatch(
	ctx context.Context, completions []completion,
) ([]batch.Result[completionResult], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(completions)
	results := batch.AllSkipped[completionResult](n)
	ids, claims, objects := make([]string, n), make([]int64, n), make([]completionParams, n)
	for i, c := range completions {
		ids[i], claims[i], objects[i] = c.id, c.claim, c.params()
	}
	encoded, err := json.Marshal(objects)
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	rows, err := e.pool.Query(ctx, `
		select n, updated_at, completed_at, result, variables, inherits, flow_version
		  from lanekeeper.complete_agent_executions(@ids, @claims, @ends)`,
		postgres.Strict{"ids": uuidArray(ids), "claims": claims, "ends": json.RawMessage(encoded)})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	var position int
	var row completedRow
	dest := []any{&position, &row.updated, &row.completed, &row.result, &row.variables, &row.inherits, &row.version}
	_, err = pgx.ForEachRow(rows, dest, func() error {
		done := completionResult{row: row.execution(completions[position-1])}
		results[position-1] = batch.Result[completionResult]{Value: done}
		row.result, row.variables = nil, nil // so the next row does not overwrite them
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	return results, nil
}

// completionParams is the JSON form of a completion that complete_agent_executions reads.
type completionParams struct {
	Status      Status          `json:"status"`
	Summary     string          `json:"summary,omitempty"`
	Result      json.RawMessage `json:"result,omitempty"`
	Error       *string         `json:"error,omitempty"`
	FailedStep  *string         `json:"failed_step,omitempty"`
	Variables   json.RawMessage `json:"variables,omitempty"`
	ReturnRow   bool            `json:"wanted,omitempty"`
	Step        string          `json:"step,omitempty"`
	Fingerprint string          `json:"print,omitempty"`
	StepFailed  bool            `json:"step_failed,omitempty"`
	Output      json.RawMessage `json:"output,omitempty"`
}

func (c *completion) params() completionParams {
	p := completionParams{
		Status: c.status, Summary: c.summary, Result: c.result, Error: c.errorMessage, FailedStep: c.failedStep,
		Variables: c.variables, ReturnRow: c.claimed != nil,
	}
	if c.lastStep != nil {
		p.Step, p.Fingerprint, p.StepFailed, p.Output = c.lastStep.step, c.lastStep.fingerprint,
			c.lastStep.failed, c.lastStep.output
	}
	return p
}

// completedRow has the columns of a completed execution that the database sets.
type completedRow struct {
	updated, completed time.Time
	result, variables  json.RawMessage
	inherits           bool
	version            *int
}

// execution returns the final row, as a query would read it. It returns nil if no caller wants the row.
func (c completedRow) execution(end completion) *Execution {
	if end.claimed == nil {
		return nil
	}
	x := *end.claimed
	kind := resultType(end.status)
	x.Status, x.ClaimedBy, x.ResultType, x.ResultSummary, x.Result = end.status, nil, &kind, end.summary, c.result
	x.ErrorMessage, x.FailedStep, x.Variables = end.errorMessage, end.failedStep, c.variables
	x.WaitingFor, x.WaitingKey, x.WaitingUntil, x.WaitingData = nil, nil, nil, nil
	x.UpdatedAt, x.CompletedAt, x.Inherits, x.FlowVersion = c.updated, &c.completed, c.inherits, c.version
	return &x
}

// claimedForCaller returns the claimed execution if a caller wants the final row; nil otherwise.
func (r *run) claimedForCaller() *Execution {
	if r.onCompleted == nil {
		return nil
	}
	return &r.exec
}

// resultType returns the result_type of a terminal status.
func resultType(s Status) string {
	switch s {
	case Completed:
		return "success"
	case Failed:
		return "failure"
	case Pending, Running, Waiting:
		return ""
	case Timeout, Cancelled:
	}
	return string(s)
}
