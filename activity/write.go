package activity

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// MaxField bounds the stored input and output, in bytes. A cut value says so.
const MaxField = 16 << 10

// maxText bounds error messages, in bytes.
const maxText = 4 << 10

// Open writes a running row and returns its id. A repeated open of a step under the same claim returns the open row,
// so a retry leaves no second one.
func Open(ctx context.Context, db postgres.DB, e Entry) (string, error) {
	var id string
	b := &pgx.Batch{}
	OpenIn(ctx, b, e, &id)
	return id, wrapError("open activity "+e.Skill, send(ctx, db, b))
}

// Close finishes an open row. A repeated close changes nothing.
func Close(ctx context.Context, db postgres.DB, id string, e Entry, o Outcome) error {
	b := &pgx.Batch{}
	CloseIn(ctx, b, id, e, o)
	return wrapError("close activity "+e.Skill, send(ctx, db, b))
}

// Note writes a finished row and returns its id.
func Note(ctx context.Context, db postgres.DB, e Entry, o Outcome) (string, error) {
	var id string
	b := &pgx.Batch{}
	NoteIn(ctx, b, e, o, &id)
	return id, wrapError("note activity "+e.Skill, send(ctx, db, b))
}

// Reject records a rejected stale write with status error and class stale, without a fence.
func Reject(ctx context.Context, db postgres.DB, e Entry, o Outcome) error {
	claim := e.Claim
	e.Claim, e.Kind = 0, KindNote
	e.Input = map[string]any{"rejected_write": e.Skill, "step": e.Step, "claim": claim}
	e.Skill = "stale_write"
	o.Output = map[string]any{"status": o.Status, "output": o.Output, "error": o.Message}
	o.Status, o.Class, o.Message = Error, "stale", ErrStale.Error()
	_, err := Note(ctx, db, e, o)
	return err
}

// OpenIn queues Open's statement on a batch; into gets the id when the batch is sent. A trigger of the table fences
// the row.
func OpenIn(ctx context.Context, b *pgx.Batch, e Entry, into *string) {
	b.Queue(`
		with open as (
		  select o.activity_id from agent_activity_open o
		   where o.execution_id = @execution_id and o.claim = @claim and o.step = @step and @step <> ''),
		row as (
		  insert into agent_activity (trace_id, execution_id, parent_id, cause_id, claim, step, kind, agent, surface,
		    skill_name, skill_id, purpose, status, input, model, idempotency_key, thread_id, lane)
		  select @trace_id, @execution_id, @parent_id, @cause_id, @claim, @step, @kind, @agent, @surface, @skill, @skill_id,
		         @purpose, 'running', @input, @model, @idempotency_key, @thread_id, @lane
		   where not exists (select from open)
		  returning id),
		listed as (
		  insert into agent_activity_open (activity_id, execution_id, claim, step, kind)
		  select id, @execution_id, @claim, @step, @kind from row)
		select id::text from row union all select activity_id::text from open`,
		e.arguments(ctx)).QueryRow(func(row pgx.Row) error { return row.Scan(into) })
}

// CloseIn queues Close's statement on a batch.
func CloseIn(ctx context.Context, b *pgx.Batch, id string, e Entry, o Outcome) {
	args := e.withContext(ctx).fence()
	o.arguments(args)
	args["id"] = id
	b.Queue(`
		with fence as materialized (
		  select case when @claim::bigint is null then true else fence_agent_execution(@execution_id, @claim) end as ok),
		listed as (
		  delete from agent_activity_open o using fence where fence.ok and o.activity_id = @id returning o.activity_id),
		closed as (
		  update agent_activity a
		     set status = @status, output = @output, error_message = @error_message, error_class = @error_class,
		         token_usage = @token_usage, cost_usd = @cost_usd, led_to = @led_to,
		           model = coalesce(nullif(@model, ''), a.model),
		         finished_at = clock_timestamp(),
		         duration_ms = (extract(epoch from clock_timestamp() - a.created_at) * 1000)::bigint
		    from fence
		   where fence.ok and a.id = @id and a.status = 'running')
		select ok from fence`, args)
}

// NoteIn queues Note's statement on a batch; into (may be nil) gets the id when the batch is sent.
func NoteIn(ctx context.Context, b *pgx.Batch, e Entry, o Outcome, into *string) {
	e.Kind = cmp.Or(e.Kind, KindNote)
	o.Model = cmp.Or(o.Model, e.Model)
	args := e.arguments(ctx)
	o.arguments(args)
	q := b.Queue(`
		insert into agent_activity (trace_id, execution_id, parent_id, cause_id, claim, step, kind, agent, surface,
		  skill_name, skill_id, purpose, status, input, output, error_message, error_class, token_usage, cost_usd, led_to,
		  model, idempotency_key, thread_id, lane, finished_at, duration_ms)
		values (@trace_id, @execution_id, @parent_id, @cause_id, @claim, @step, @kind, @agent, @surface, @skill, @skill_id,
		  @purpose, @status, @input, @output, @error_message, @error_class, @token_usage, @cost_usd, @led_to, @model,
		  @idempotency_key, @thread_id, @lane, clock_timestamp(), 0)
		returning id::text`, args)
	q.QueryRow(func(row pgx.Row) error {
		var id string
		if into == nil {
			into = &id
		}
		return row.Scan(into)
	})
}

// send runs a batch as one implicit transaction, or within the caller's.
func send(ctx context.Context, db postgres.DB, b *pgx.Batch) error {
	return db.SendBatch(ctx, b).Close()
}

// withContext fills empty fields from the context.
func (e Entry) withContext(ctx context.Context) Entry {
	span, _ := trace.From(ctx)
	e.TraceID = cmp.Or(e.TraceID, string(span.TraceID))
	e.ExecutionID = cmp.Or(e.ExecutionID, span.ExecutionID)
	e.ParentID = cmp.Or(e.ParentID, span.ActivityID)
	e.CauseID = cmp.Or(e.CauseID, span.CauseID)
	e.Surface = cmp.Or(e.Surface, string(span.Surface))
	e.Agent = cmp.Or(e.Agent, span.Agent, "agent")
	e.ThreadID = cmp.Or(e.ThreadID, span.ThreadID)
	e.Lane = cmp.Or(e.Lane, span.Lane)
	e.Kind = cmp.Or(e.Kind, KindCall)
	return e
}

// fence returns the arguments of the fence.
func (e Entry) fence() postgres.Strict {
	return postgres.Strict{"execution_id": null(e.ExecutionID), "claim": null(e.Claim)}
}

// arguments returns the arguments of an insert.
func (e Entry) arguments(ctx context.Context) postgres.Strict {
	e = e.withContext(ctx)
	args := e.fence()
	maps.Copy(args, map[string]any{
		"trace_id": e.TraceID, "parent_id": null(e.ParentID), "cause_id": null(e.CauseID), "step": e.Step,
		"kind": string(e.Kind), "agent": e.Agent,
		"surface": e.Surface, "skill": e.Skill, "skill_id": null(e.SkillID), "purpose": e.Purpose,
		"input": redactField(e.Input, "{}"), "model": e.Model, "idempotency_key": e.IdempotencyKey,
		"thread_id": null(e.ThreadID), "lane": e.Lane,
	})
	return args
}

// arguments adds the arguments of a finished row.
func (o Outcome) arguments(args postgres.Strict) {
	usage := json.RawMessage("{}")
	if o.Usage != (Usage{}) {
		usage, _ = json.Marshal(o.Usage) // plain fields: cannot fail
	}
	args["status"] = string(cmp.Or(o.Status, Success))
	args["output"] = redactField(o.Output, "null")
	args["error_message"] = null(redact.Text(o.Message, maxText))
	args["error_class"] = postgres.Text(o.Class) // may come from another service, like the model
	args["token_usage"] = usage
	args["cost_usd"] = fmt.Sprintf("%.6f", o.CostUSD)
	args["model"] = postgres.Text(o.Model)
	args["led_to"] = json.RawMessage("{}")
	if len(o.LedTo) > 0 {
		args["led_to"], _ = json.Marshal(o.LedTo) // names and numbers: cannot fail
	}
}

// redactField redacts and bounds a value; nil becomes empty.
func redactField(v any, empty string) json.RawMessage {
	if v == nil {
		return json.RawMessage(empty)
	}
	return redact.JSON(v, MaxField)
}

// null turns a zero value into SQL's null.
func null[T comparable](v T) any {
	var zero T
	if v == zero {
		return nil
	}
	return v
}
