package engineroom

import (
	"context"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Bounds of the reads of a trace's rows. The page reports how many rows it omits, with a link to the table.
const (
	traceFirst   = 1500   // rows read from the beginning of the trace
	traceLast    = 500    // rows read from the end of the trace
	traceFailed  = 50     // failed rows, anywhere in the trace
	traceSummed  = 20_000 // rows aggregated for totals, and searched for errors
	tracePerPage = 100    // rows of a page of the table
	maxSpanText  = 64_000 // characters of an input or an output
)

// spanRow is an activity of a trace, its long values cut.
type spanRow struct {
	ID                                    string
	ExecutionID, ParentID                 *string
	Claim                                 *int64
	Step, Kind, Agent, Surface, Skill     string
	SkillID                               *string
	Purpose, Status                       string
	CauseID                               *string
	LedTo                                 string // JSON: calls of each skill in a model's answer
	Open                                  bool   // agent_activity_open has the row: the work runs
	Input, Output, Message                string
	InputBytes, OutputBytes, MessageBytes int64
	Class, Model                          string
	Prompt, Completion, Tokens, Unknown   int64
	Cached, CacheWrites                   int64
	Estimated                             bool
	CostUSD                               float64
	DurationMS                            *int64
	Key                                   string
	ThreadID                              *string
	Lane                                  string
	CreatedAt                             time.Time
	FinishedAt                            *time.Time
	Try                                   int    `db:"-"` // number of the attempt at its step, from 1
	ApprovalID, ApprovalStatus            string `db:"-"`
	Decision                              string `db:"-"` // decision on the requested approval, its author and reason
	TraceID                               string `db:"-"`
	InputCut, OutputCut, MessageCut       bool   `db:"-"`
}

// formatTexts formats the JSON texts that are complete, and sets the trace's id.
func (r *spanRow) formatTexts(id string) {
	r.TraceID = id
	r.Input, r.InputCut = formatWhole(r.Input, r.InputBytes)
	r.Output, r.OutputCut = formatWhole(r.Output, r.OutputBytes)
	r.MessageCut = int64(len(r.Message)) < r.MessageBytes
}

// formatWhole formats JSON of a given size, unless text is only its beginning.
func formatWhole(text string, size int64) (formatted string, isCut bool) {
	if isCut = int64(len(text)) < size; isCut || text == "" {
		return text, isCut
	}
	return formatJSON(text), false
}

// spanColumns are all columns of a spanRow, texts cut at @text characters.
const spanColumns = `a.id::text, a.execution_id::text, a.parent_id::text, a.claim, left(a.step, 300) as step, a.kind,
	left(a.agent, 100) as agent, left(a.surface, 100) as surface, left(a.skill_name, 200) as skill, a.skill_id::text,
	left(a.purpose, 200) as purpose, a.status, a.cause_id::text, left(a.led_to::text, 400) as led_to,
	a.status = 'running' and exists (select from agent_activity_open o where o.activity_id = a.id) as open,
	coalesce(left(nullif(a.input::text, '{}'), @text::int), '') as input,
	coalesce(left(nullif(a.output::text, 'null'), @text::int), '') as output,
	left(coalesce(a.error_message, ''), @text::int) as message, octet_length(a.input::text)::bigint as input_bytes,
	coalesce(octet_length(a.output::text), 0)::bigint as output_bytes,
	coalesce(octet_length(a.error_message), 0)::bigint as message_bytes, left(a.error_class, 100) as class,
	left(a.model, 200) as model, lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') as prompt,
	lanekeeper.agent_tokens(a.token_usage, 'cached_tokens') as cached,
	lanekeeper.agent_tokens(a.token_usage, 'cache_write_tokens') as cache_writes,
	lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') as completion,
	lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens,
	lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens') as unknown,
	coalesce(a.token_usage ->> 'estimated', '') = 'true' as estimated, a.cost_usd::float8 as cost_usd, a.duration_ms,
	left(a.idempotency_key, 200) as key, left(a.thread_id, 300) as thread_id, left(a.lane, 255) as lane, a.created_at,
	a.finished_at`

// lineColumns are the columns of a line of the waterfall, without those that only the panel shows.
const lineColumns = `a.id::text, a.execution_id::text, a.parent_id::text, a.claim, left(a.step, 300) as step, a.kind,
	left(a.skill_name, 200) as skill, left(a.purpose, 200) as purpose, a.status,
	case when a.kind = 'model' then left(a.led_to::text, 400) else '' end as led_to,
	a.status = 'running' and exists (select from agent_activity_open o where o.activity_id = a.id) as open,
	left(coalesce(a.error_message, ''), 300) as message, left(a.error_class, 100) as class, left(a.model, 200) as model,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') else 0 end as prompt,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') else 0 end as completion,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'total_tokens') else 0 end as tokens,
	a.cost_usd::float8 as cost_usd, a.duration_ms, left(a.surface, 100) as surface, left(a.lane, 255) as lane,
	a.created_at, a.finished_at`

// firstRowsOf reads the first activities of a trace: as many as a page can draw, and one more if more exist.
func (room *Room) firstRowsOf(ctx context.Context, id string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+lineColumns+`
		  from agent_activity a where a.trace_id = @id order by a.created_at, a.id limit @limit`,
		postgres.Strict{"id": id, "limit": traceFirst + traceLast + 1})
	return room.collectSpans(ctx, rows, err, id)
}

// rowsOf reads the activities of the waterfall: all of them, or only the first, the last and the failed activities.
func (room *Room) rowsOf(ctx context.Context, h *traceHead) ([]spanRow, error) {
	if h.whole {
		return h.rows, nil
	}
	rows, err := room.Read.Query(ctx, `
		with picked as (
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at, a.id limit @first)
		  union
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at desc, a.id desc limit @last)
		  union
		  (select a.id from (select x.id, x.status, x.created_at from agent_activity x
		                      where x.trace_id = @id order by x.created_at limit @scan) a
		    where a.status in ('error', 'unknown') order by a.created_at limit @failed))
		select `+lineColumns+`
		  from picked p join agent_activity a on a.id = p.id
		 order by a.created_at, a.id`, customPlan, postgres.Strict{
		"id": h.ID, "first": traceFirst, "last": traceLast, "failed": traceFailed, "scan": traceSummed,
	})
	return room.collectSpans(ctx, rows, err, h.ID)
}

// pageOf reads a page of the table in order of the start, after a row.
func (room *Room) pageOf(ctx context.Context, id, after string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+lineColumns+`
		  from agent_activity a
		 where a.trace_id = @id
		   and (@after::text = '' or a.created_at >= (select b.created_at from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		   and (@after::text = '' or (a.created_at, a.id) > (select b.created_at, b.id from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		 order by a.created_at, a.id limit @limit::int + 1`, customPlan, postgres.Strict{
		"id": id, "after": after, "limit": tracePerPage,
	})
	return room.collectSpans(ctx, rows, err, id)
}

// rowOf reads one activity of a trace, with its texts cut at maxSpanText. It returns no row for an unknown activity.
func (room *Room) rowOf(ctx context.Context, id, row string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+spanColumns+`
		  from agent_activity a where a.id = @row::text::uuid and a.trace_id = @id`,
		customPlan, postgres.Strict{"id": id, "row": row, "text": maxSpanText})
	return room.collectSpans(ctx, rows, err, id)
}

// collectSpans reads the rows of a query on a trace, numbers the attempts at each step, and formats the texts. A
// request for approval gets the status of the decision.
func (room *Room) collectSpans(ctx context.Context, rows pgx.Rows, err error, id string) ([]spanRow, error) {
	list, err := postgres.Collect(rows, err, "list activities of trace", pgx.RowToStructByNameLax[spanRow])
	if err != nil {
		return nil, err
	}
	attempts := map[[2]string]int{}
	var approvalIDs []string
	for i := range list {
		r := &list[i]
		hide := activity.HidesTexts(ctx) && activity.HasTexts(activity.Kind(r.Kind), r.Skill)
		hideJSON(hide, &r.Input, &r.InputBytes)
		hideJSON(hide, &r.Output, &r.OutputBytes)
		r.formatTexts(id)
		if r.Status == string(activity.PendingApproval) {
			approvalIDs = append(approvalIDs, r.ID)
		}
		if r.Try = 1; r.ExecutionID != nil && r.Step != "" && r.isCall() {
			attempts[[2]string{*r.ExecutionID, r.Step}]++
			r.Try = attempts[[2]string{*r.ExecutionID, r.Step}]
		}
	}
	decisions, err := activity.Decisions(ctx, room.Read, approvalIDs)
	for i := range list {
		if d, ok := decisions[list[i].ID]; ok {
			list[i].Status, list[i].Decision = d.Status, d.String()
		}
	}
	return list, err
}

// isCall reports whether the row is a call of a skill or a model, which a process can retry.
func (r *spanRow) isCall() bool { return r.Kind == "call" || r.Kind == "model" }

// addApproval adds the row's approval: the one that the row requested, or the newest of its step.
func (room *Room) addApproval(ctx context.Context, row *spanRow) error {
	found, err := postgres.Rows[struct{ ID, Status string }](ctx, room.Read, "find approval of activity", `
		select p.id::text, p.status
		  from agent_approvals p
		 where p.trace_id = @trace
		   and (p.activity_id = @row::text::uuid
		        or @step <> '' and p.step = @step and p.execution_id = nullif(@run::text, '')::uuid)
		 order by coalesce(p.activity_id = @row::text::uuid, false) desc, p.id desc
		 limit 1`, customPlan, postgres.Strict{
		"trace": row.TraceID, "row": row.ID, "step": row.Step, "run": postgres.Deref(row.ExecutionID),
	})
	if err == nil && len(found) > 0 {
		row.ApprovalID, row.ApprovalStatus = found[0].ID, found[0].Status
	}
	return err
}

// Type is the row's kind, for texts and colours.
func (r *spanRow) Type() string { return rowNode(r).Type }

// Name is the purpose of a model call, and the skill of any other row.
func (r *spanRow) Name() string { return rowNode(r).Name }

// ForkURL is the form that forks the execution from the row's step; empty for none.
func (r *spanRow) ForkURL() string {
	if r.ExecutionID == nil || r.Step == "" || len(r.Step) > maxFilterBytes {
		return ""
	}
	return "/executions/" + *r.ExecutionID + "?from=" + url.QueryEscape(r.Step) + "#fork"
}

// Label is the row's kind as text.
func (r *spanRow) Label() string { return rowNode(r).Label() }

// Took is the duration in short form; empty while the work runs, or without a duration.
func (r *spanRow) Took() string { return rowNode(r).Took() }

// Queued is a run's queue time; empty before the claim, or if it was short.
func (r traceRun) Queued() string {
	if r.StartedAt == nil || r.StartedAt.Sub(r.CreatedAt) < time.Millisecond {
		return ""
	}
	return human.Duration(r.StartedAt.Sub(r.CreatedAt))
}
