package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lastWrite is the end of a run, as it is written.
type lastWrite struct {
	id        string
	claim     int64
	status    Status
	summary   string
	result    json.RawMessage
	failure   *string
	step      *string
	variables json.RawMessage // nil when the row has them
	row       *Execution      // as it was claimed, where somebody waits for it as it ends; else nil
	last      *point          // the step that ended just before; nil for none
}

// finished is what became of an end.
type finished struct {
	freed   []freedLane
	awaited bool       // somebody waits for this end
	row     *Execution // as it ended, where it was wanted
}

// finish writes the end, and with it the last step where that is not on record. Lanes, open activity rows and
// AGENT_COMPLETED follow in the same transaction. A result that the database refuses makes the execution fail, so
// that it does end.
func (r *run) finish(ctx context.Context, last *putOff, status Status, result Result, failure error) error {
	value, _, err := encode(result.Value)
	if err != nil {
		status, failure, value = Failed, fmt.Errorf("encode result: %w", err), nil
	}
	detached := context.WithoutCancel(ctx)
	done, err := r.writeEnd(detached, last.point(r), status, postgres.Text(result.Summary), value, failure)
	if refused(err) {
		status, failure = Failed, fmt.Errorf("store result: %w", err)
		done, err = r.writeEnd(detached, last.point(r), status, "", nil, failure)
	}
	if last != nil && refused(err) { // it was not the result, but the last step: the run does end
		r.noteFailure(last.s.key)
		failure, last = errors.Join(errUnrecorded, err), nil
		done, err = r.writeEnd(detached, nil, status, "", nil, failure)
	}
	switch {
	case errors.Is(err, ErrStale), err != nil && postgres.Code(err) == "":
		return r.finishStale(ctx, status, result, err)
	case err != nil:
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, err)
	}
	if last != nil {
		r.e.log.InfoContext(ctx, "checkpoint saved", "step", last.s.key)
	}
	r.afterEnd(ctx, status, failure, done)
	return nil
}

// afterEnd says that the run has ended, and resumes who waits for that.
func (r *run) afterEnd(ctx context.Context, status Status, failure error, done finished) {
	about := []any{"result_type", resultType(status), "status", string(status)}
	if failure != nil {
		about = append(about, "error", failure)
	}
	r.e.opts.Observer.Ended(r.exec, status)
	r.e.log.InfoContext(ctx, "execution completed", about...)
	r.e.log.InfoContext(ctx, "event emitted", "event", "AGENT_COMPLETED", "key", r.exec.ID)
	if r.exec.ParentID != nil || done.awaited { // the next turn of a thread may wait for this one
		r.e.deliverCompletion(context.WithoutCancel(ctx), r.exec.ID)
	}
	r.e.logFreed(ctx, r.exec.ID, done.freed)
	r.e.log.InfoContext(ctx, "locks released", "count", len(done.freed))
}

// deliverCompletion resumes the executions that wait for the completion of id. After a failure the sweep does it.
func (e *Engine) deliverCompletion(ctx context.Context, id string) {
	if err := e.tryDeliverCompletion(ctx, id); err != nil {
		e.log.WarnContext(ctx, "parent not told yet", "execution", id, "error", err)
	}
}

func (e *Engine) tryDeliverCompletion(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	var woken int
	b := &pgx.Batch{}
	queuePatience(b)
	b.Queue(`select lanekeeper.deliver_agent_completion(@id)`, postgres.Strict{"id": id}).QueryRow(func(row pgx.Row) error { return row.Scan(&woken) })
	err := e.pool.SendBatch(ctx, b).Close()
	if woken > 0 {
		e.ready(Background, woken)
		e.ready(Interactive, woken)
		if !e.works() {
			e.pass(ctx)
		}
	}
	return err
}

// finishStale tells an end that was refused, or came too late, from one whose answer was lost.
func (r *run) finishStale(ctx context.Context, status Status, result Result, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	now, err := stillThere(Get(ctx, r.e.pool, r.exec.ID))
	switch {
	case err != nil:
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, errors.Join(cause, err))
	case now.Claim == r.exec.Claim && now.Status == status:
		r.e.opts.Observer.Ended(r.exec, status)
		return nil
	case now.Claim == r.exec.Claim && !errors.Is(cause, ErrStale):
		return fmt.Errorf("finish execution %s: %w", r.exec.ID, cause)
	}
	r.reject(ctx, activity.Entry{Skill: "finish", Claim: r.exec.Claim}, activity.Outcome{
		Status: activity.Status(status), Output: result,
	})
	return nil
}

// failed names the step whose error ended the run: the one that the error is of, or else the last one that failed or
// timed out, if nothing succeeded after it.
func (r *run) failed(failure error) string {
	if step, ok := errors.AsType[*StepError](failure); ok && step.Step != "" {
		return step.Step
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failedStep
}

// writeEnd writes the terminal row, and the last step where that was put off. It is tried for as long as a lease lasts.
func (r *run) writeEnd(ctx context.Context, last *point, status Status, summary string, value json.RawMessage, failure error) (done finished, err error) {
	end := lastWrite{
		id: r.exec.ID, claim: r.exec.Claim, status: status, summary: summary, result: value, variables: r.unwritten(), row: r.wantedRow(),
		last: last,
	}
	if failure != nil {
		end.failure, end.step = new(postgres.Text(failure.Error())), null(r.failed(failure))
	}
	until := time.Now().Add(r.e.opts.LeaseTTL)
	alone := func(write func(ctx context.Context, end lastWrite) (finished, error)) (finished, error) {
		bounded, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		return write(bounded, end)
	}
	if r.exec.ThreadID != nil { // it likely holds the thread's lane, and is not for a batch
		done, err = alone(r.endAlone)
	} else {
		done, err = r.e.batchers.ends.Do(ctx, end, func() (finished, error) { return alone(r.endSingly) })
	}
	if done.row != nil {
		r.over(done.row)
	}
	return done, err
}

// endSingly writes an end that comes alone: as a batch of one, or, where it has more to do than a batch does, by
// itself.
func (r *run) endSingly(ctx context.Context, end lastWrite) (finished, error) {
	got, err := r.e.finishSeveral(ctx, []lastWrite{end})
	if err != nil || got[0].Alone {
		return r.endAlone(ctx, end)
	}
	return got[0].Value, nil
}

// endAlone writes an end with all that follows from it, such as the lanes that it frees, in one transaction.
func (r *run) endAlone(ctx context.Context, end lastWrite) (done finished, err error) {
	err = r.with(ctx, end.variables, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			queuePatience(b)
			if end.last != nil { // whose fence locks the row more weakly than the end does
				b.Queue(`select from agent_executions where id = @id and claim = @claim for update`, postgres.Strict{"id": end.id, "claim": end.claim})
				end.last.queue(b)
			}
			r.queueVariables(b, text)
			queueEnd(b, end, &done)
		})
	})
	return done, err
}

// queueEnd queues an end and the questions whose answers are needed after the commit: the freed lanes, whether
// somebody waits for this end, and the row. Whoever begins to wait locks the row first: the end finds that wait, or
// the wait finds the end.
func queueEnd(b *pgx.Batch, end lastWrite, done *finished) {
	b.Queue(`select lanekeeper.complete_agent_execution(@id, @claim, @status, @summary, @result, @error, @step)`, postgres.Strict{
		"id": end.id, "claim": end.claim, "status": string(end.status), "summary": end.summary,
		"result": end.result, "error": end.failure, "step": end.step,
	})
	queueFreed(b, end.id, &done.freed)
	b.Queue(`select exists (select from agent_untold_ends where execution_id = @id)`, postgres.Strict{"id": end.id}).
		QueryRow(func(row pgx.Row) error { return row.Scan(&done.awaited) })
	if end.row != nil {
		b.Queue(`select `+columns+` from agent_executions where id = @id`, postgres.Strict{"id": end.id}).Query(func(rows pgx.Rows) error {
			row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
			done.row = &row
			return err
		})
	}
}

// finishSeveral writes ends in one commit, each with its last step and under its own claim. They free no lanes,
// because what holds any is left to be ended by itself, as is one whose claim is not live any more.
func (e *Engine) finishSeveral(ctx context.Context, ends []lastWrite) ([]batch.Answer[finished], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(ends)
	answers := batch.Unanswered[finished](n)
	ids, claims, objects := make([]string, n), make([]int64, n), make([]endObject, n)
	for i, x := range ends {
		ids[i], claims[i], objects[i] = x.id, x.claim, x.object()
	}
	text, err := json.Marshal(objects)
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	rows, err := e.pool.Query(ctx, `
		select n, updated_at, completed_at, result, variables, inherits, flow_version
		  from lanekeeper.complete_agent_executions(@ids, @claims, @ends)`,
		postgres.Strict{"ids": uuids(ids), "claims": claims, "ends": json.RawMessage(text)})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	var place int
	var c closed
	into := []any{&place, &c.updated, &c.completed, &c.result, &c.variables, &c.inherits, &c.version}
	_, err = pgx.ForEachRow(rows, into, func() error {
		answers[place-1] = batch.Answer[finished]{Value: finished{row: c.execution(ends[place-1])}}
		c.result, c.variables = nil, nil // the next row has bytes of its own
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	return answers, nil
}

// endObject is an end as complete_agent_executions takes it.
type endObject struct {
	Status     Status          `json:"status"`
	Summary    string          `json:"summary,omitempty"`
	Result     json.RawMessage `json:"result,omitempty"`
	Error      *string         `json:"error,omitempty"`
	FailedStep *string         `json:"failed_step,omitempty"`
	Variables  json.RawMessage `json:"variables,omitempty"`
	Wanted     bool            `json:"wanted,omitempty"`
	Step       string          `json:"step,omitempty"`
	Print      string          `json:"print,omitempty"`
	StepFailed bool            `json:"step_failed,omitempty"`
	Output     json.RawMessage `json:"output,omitempty"`
}

func (x *lastWrite) object() endObject {
	o := endObject{
		Status: x.status, Summary: x.summary, Result: x.result, Error: x.failure, FailedStep: x.step, Variables: x.variables, Wanted: x.row != nil,
	}
	if x.last != nil {
		o.Step, o.Print, o.StepFailed, o.Output = x.last.step, x.last.print, x.last.failed, x.last.output
	}
	return o
}

// closed is what only the database knows of an execution that has ended.
type closed struct {
	updated, completed time.Time
	result, variables  json.RawMessage
	inherits           bool
	version            *int
}

// execution is the row as it ended, as it would be read; nil where nobody wants it.
func (c closed) execution(end lastWrite) *Execution {
	if end.row == nil {
		return nil
	}
	x := *end.row
	kind := resultType(end.status)
	x.Status, x.ClaimedBy, x.ResultType, x.ResultSummary, x.Result = end.status, nil, &kind, end.summary, c.result
	x.ErrorMessage, x.FailedStep, x.Variables = end.failure, end.step, c.variables
	x.WaitingFor, x.WaitingKey, x.WaitingUntil, x.WaitingData = nil, nil, nil, nil
	x.UpdatedAt, x.CompletedAt, x.Inherits, x.FlowVersion = c.updated, &c.completed, c.inherits, c.version
	return &x
}

// wantedRow is the execution as it was claimed, where somebody waits for it as it ends.
func (r *run) wantedRow() *Execution {
	if r.over == nil {
		return nil
	}
	return &r.exec
}

// jsonText is JSON as a parameter of an array; nil for none.
func jsonText(text json.RawMessage) *string {
	if text == nil {
		return nil
	}
	s := string(text)
	return &s
}

// resultType is the result_type that belongs to a terminal status.
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

// ended is an execution that a transaction has ended, and how many lanes that freed.
type ended struct {
	ID, TraceID string
	Status      Status
	Freed       int
}

// endedIn adds the question which executions the batch's transaction has ended: by a cancel or a sweep, where no run
// says so. As part of the batch it holds nothing up, whatever becomes of this process. A sweep ends executions in
// transactions within its own: what is visible and in progress is of one of them.
func endedIn(b *pgx.Batch, into *[]ended) {
	b.Queue(`
		select x.id::text, x.trace_id, x.status, coalesce((v.data ->> 'locks_released')::int, 0)
		  from agent_events v join agent_executions x on x.id = lanekeeper.agent_uuid(v.key)
		 where v.id >= lanekeeper.agent_uuid7_floor(transaction_timestamp()) and v.event = 'AGENT_COMPLETED'
		   and case when v.xmin::text::bigint >= mod(pg_current_xact_id_if_assigned()::text::bigint, 4294967296)
		            then pg_xact_status((div(pg_current_xact_id_if_assigned()::text::numeric, 4294967296) * 4294967296 + v.xmin::text::bigint)::text::xid8)
		                 = 'in progress' end
		 order by v.id`).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowToStructByPos[ended])
		return err
	})
}

// announceEnds says that executions have ended, as a run says it of itself.
func (e *Engine) announceEnds(ctx context.Context, ends []ended) {
	for _, x := range ends {
		about := named(x.TraceID, x.ID)
		e.log.InfoContext(ctx, "execution completed", append(about, "result_type", resultType(x.Status), "status", string(x.Status))...)
		e.log.InfoContext(ctx, "event emitted", append(about, "event", "AGENT_COMPLETED", "key", x.ID)...)
		e.logReleased(ctx, x.ID, x.Freed, about...)
	}
}

// freedLane is a lane that the end of an execution has freed, or returned to who lent it.
type freedLane struct {
	Lane      string
	Token     int64
	Successor string // who waited for it and has it now; "" for nobody
}

// queueFreed queues the question which lanes the end of an execution has freed. The end has said in its event how
// many they are, and each was noted in its transaction: the last ones are those.
func queueFreed(b *pgx.Batch, id string, into *[]freedLane) {
	b.Queue(`
		select h.lane, h.fencing_token as token, h.successor from (
		  select * from agent_lane_holds o where o.execution_id = @id and o.ended in ('ended', 'given back')
		   order by o.held_until desc
		   limit coalesce((select (v.data ->> 'locks_released')::int from agent_events v where v.external_id = 'completed ' || @id::text), 0)) h
		 order by h.lane`, postgres.Strict{"id": id}).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[freedLane])
		return err
	})
}

// logReleased names the lanes that the end of an execution has freed, and says how many they were.
func (e *Engine) logReleased(ctx context.Context, id string, n int, about ...any) {
	var freed []freedLane
	if n > 0 {
		asking, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		b := &pgx.Batch{}
		queueFreed(b, id, &freed)
		if err := e.pool.SendBatch(asking, b).Close(); err != nil {
			e.log.WarnContext(ctx, "names of released lanes not read", append(slices.Clip(about), "error", err)...)
		}
	}
	e.logFreed(ctx, id, freed, about...)
	e.log.InfoContext(ctx, "locks released", append(slices.Clip(about), "count", n)...)
}

// logFreed names freed lanes.
func (e *Engine) logFreed(ctx context.Context, id string, freed []freedLane, about ...any) {
	for _, f := range freed {
		line := append(slices.Clip(about), "lane", f.Lane, "owner", id, "fencing_token", f.Token)
		if f.Successor != "" {
			line = append(line, "to", f.Successor)
		}
		e.log.InfoContext(ctx, "lane released", line...)
	}
}
